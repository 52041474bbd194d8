"""What vLLM is asked of a sample and of a query, and the probabilities in its answer. Runs in the child process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

COLDEST_PLAIN_TEMPERATURE = 0.01  # vLLM raises what is below to this; EDT with a scale of 1 has no such floor


def sampling_params(spec: dict[str, Any], stop_ids: frozenset[int], *, by_position: bool) -> SamplingParams:
    """Return what draws one response.

    Args:
        spec: The wire form of a sample.
        stop_ids: Ids that end a response.
        by_position: Whether vLLM draws a token with a number that follows from the seed and the token's position, as
            model runner V2 does. Runner V1 begins a stream with the first token drawn.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    temperature, edt = spec["temperature"], spec["edt"]
    if 0.0 < temperature < COLDEST_PLAIN_TEMPERATURE and edt is None:
        edt = [temperature, 1.0, 0.0]
    return SamplingParams(
        temperature=temperature if edt is None else 1.0,
        extra_args=None if edt is None else {"edt": edt},
        top_p=spec["top_p"],
        max_tokens=spec["max_tokens"],
        seed=spec["seed" if by_position else "stream_seed"],
        stop_token_ids=sorted(stop_ids.union(spec["step_ids"])),
        ignore_eos=True,  # the end-of-turn ids are all named above
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def query_params(token_ids: Sequence[int]) -> SamplingParams:
    """Return what reads the probabilities of at most 128 tokens after a prompt."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logprob_token_ids=list(dict.fromkeys(token_ids)),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def probabilities(completion: CompletionOutput, token_ids: Sequence[int]) -> list[float]:
    """Return the probabilities of the tokens from the answer to ``query_params``."""
    (position,) = completion.logprobs
    return [math.exp(position[token].logprob) for token in token_ids]
