"""An activated adapter on a server: its name and its base's, and the self-test over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from selfcal_lightning.engines.activated_probe import Probe, ProbeAnswers, check_answers
from selfcal_lightning.engines.activated_queries import ADAPTER_VARIABLE
from selfcal_lightning.engines.openai.wire import list_models
from selfcal_lightning.errors import InputError

Ask = Callable[[tuple[int, ...], bool], Awaitable[list[float]]]  # (prompt, whether by the adapter's name)
WAY_OUT = (
    f"Start vLLM's server with the environment variable {ADAPTER_VARIABLE} naming the adapter's folder, "
    "`--enable-lora --max-loras 2 --lora-modules NAME=FOLDER`, and on a CPU `--enforce-eager`, where this project is "
    "installed too."
)


def base_of(answer: Any, adapter: str) -> str:
    """Return a server's name for the model that an adapter is on.

    Args:
        answer: What the server says to ``GET /models``.
        adapter: Its name for the adapter.

    Raises:
        ServerError: When the answer is not a list of models.
        ValueError: When the server does not tell, or has the name for no adapter.
    """
    models = list_models(answer)
    parent = models[adapter].get("parent") if adapter in models else None
    if not isinstance(parent, str) or parent not in models:
        raise InputError(
            f"Expected `served_model` to be the server's name for an adapter on one of its models, but got "
            f"{adapter!r}. It has: {', '.join(models)}. {WAY_OUT}"
        )
    return parent


async def try_adapter(ask: Ask, probe: Probe, *, exact: bool) -> list[list[float]]:
    """Hold a server's activated adapter against its base model, and return what it says awake, [contexts][tokens].

    Args:
        ask: Gives the probabilities of the probe's tokens.
        probe: What is asked.
        exact: Whether the server computes in float32.

    Raises:
        ServerError: When the server does not answer.
        ValueError: The adapter does not sleep, or does not wake.
    """

    async def ask_all(prompts: Sequence[tuple[int, ...]], by_adapter: bool) -> list[list[float]]:
        return await asyncio.gather(*(ask(prompt, by_adapter) for prompt in prompts))

    base = await ask_all(probe.contexts, False)
    awake, base_asked, asleep = await asyncio.gather(
        ask_all(probe.asked, True), ask_all(probe.asked, False), ask_all(probe.contexts, True)
    )
    again = await ask_all(probe.asked, False)
    try:
        check_answers(ProbeAnswers(base, asleep, base_asked, awake, again), exact=exact, engine="the server")
    except ValueError as error:
        raise ValueError(f"{error} {WAY_OUT}") from None
    return awake
