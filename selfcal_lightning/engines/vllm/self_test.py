"""The self-test of an activated adapter in the child process of the vLLM engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from selfcal_lightning.engines.activated_probe import ProbeAnswers, Table, check_answers, make_probe
from selfcal_lightning.engines.vllm.params import probabilities, query_params

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.llm_engine import LLMEngine


def try_adapter(
    engine: LLMEngine, lora: LoRARequest, activated: dict[str, Any], limits: dict[str, Any]
) -> dict[str, Any]:
    """Hold an activated adapter against the base model and return what was asked, and what it says awake.

    All is asked in steps that hold the tokens of both, over a cache that the base model has filled.

    Args:
        engine: Where nothing else is in flight.
        lora: The adapter.
        activated: Its ``query``, and the ``token_ids`` of Yes and No.
        limits: What is known of the engine.

    Raises:
        ValueError: It does not sleep, or does not wake.
    """
    longest = limits["max_context"]
    probe = make_probe(activated["query"], activated["token_ids"], vocabulary=limits["vocabulary"], longest=longest)
    base = _ask(engine, [(context, None) for context in probe.contexts], probe.token_ids)
    mixed = [*((prompt, lora) for prompt in probe.asked), *((prompt, None) for prompt in probe.asked)]
    together = _ask(engine, [*mixed, *((context, lora) for context in probe.contexts)], probe.token_ids)
    count = len(base)
    awake, base_asked, asleep = (together[start : start + count] for start in range(0, 3 * count, count))
    again = _ask(engine, [(prompt, None) for prompt in probe.asked], probe.token_ids)
    answers = ProbeAnswers(base, asleep, base_asked, awake, again)
    check_answers(answers, exact=limits["dtype"] == "float32", engine="vLLM")
    engine.reset_prefix_cache()
    return {"contexts": probe.contexts, "awake": awake}


def _ask(
    engine: LLMEngine, prompts: Sequence[tuple[tuple[int, ...], LoRARequest | None]], token_ids: Sequence[int]
) -> Table:
    """Return the probabilities of the tokens after prompts, each with the adapter or without it."""
    found: dict[str, list[float]] = {}
    for i, (prompt, lora) in enumerate(prompts):
        engine_input = {"type": "token", "prompt_token_ids": list(prompt)}
        engine.add_request(f"t{i}", engine_input, query_params(token_ids), lora_request=lora)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = probabilities(output.outputs[0], token_ids)
    return [found[f"t{i}"] for i in range(len(prompts))]
