"""Generation as the reference system does it: one response at a time, the whole sequence anew for every token."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from selfcal_lightning.engines.transformers.slots import dynamic_temperature
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Request

TOP = 20  # log-probabilities that it reads the confidence from


@torch.no_grad()
def reference_passes(
    model: str, chat: ChatFormat, requests: Sequence[Request], repeats: int
) -> list[tuple[float, int]]:
    """Return (seconds, sampled tokens) of some passes, in float32, with EDT and the confidence query.

    There is no cache, and no two responses share a forward pass. The sampled token is turned into text by itself and
    compared with the text of end-of-turn. Its entropy is computed as it should be; the cost is the same.
    """
    network = load_causal_lm(model, dtype="float32", attn_implementation="sdpa").eval()
    end = {chat.tokenizer.decode([token]) for token in chat.end_of_turn_ids}
    passes = []
    for _ in range(repeats):
        start, tokens = time.perf_counter(), 0
        for request in requests:
            torch.manual_seed(request.seed % 2**63)
            ids = list(request.prompt_ids)
            for _ in range(request.sampling.max_new_tokens):
                logits = network(torch.tensor([ids]), use_cache=False).logits[0, -1]
                settings = request.sampling
                temperature = dynamic_temperature(
                    logits, base=settings.temperature, scale=settings.edt_scale, theta=settings.edt_theta
                )
                if temperature < 1e-3:
                    token = int(logits.argmax())
                else:
                    token = int(torch.multinomial((logits / temperature).softmax(-1), 1))
                tokens += 1
                if chat.tokenizer.decode([token]) in end:
                    break
                ids.append(token)
            asked = torch.tensor([[*ids, *request.query.suffix_ids]])
            network(asked, use_cache=False).logits[0, -1].log_softmax(-1).topk(TOP)
        passes.append((time.perf_counter() - start, tokens))
    return passes
