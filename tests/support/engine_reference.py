"""The questions that engines are asked in tests, and the model as a plain forward pass to hold them against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, Request, SamplingSettings

QUESTIONS = (
    "Ivan has 76 plums. Zoe has 78 more than Ivan. Paul has 58 more than Zoe. How many plums do Zoe and Paul have?",
    "Mia has 5 pens. Tom has 3 more than Mia. How many pens do Mia and Tom have together?",
    "There are 12 apples. 4 apples are eaten. How many are left?",
)


EDT = SamplingSettings(max_new_tokens=64)


FIXED = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)


GREEDY = SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=64)


class Reference:
    """The model as a plain forward pass, one sequence at a time."""

    def __init__(self, path: str) -> None:
        self.chat = ChatFormat(load_tokenizer(path))
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the logits after every token, [len(ids), vocabulary], float64."""
        return self.model(torch.tensor([list(ids)])).logits[0].double()

    def next_probabilities(self, ids: Sequence[int]) -> torch.Tensor:
        return self.logits(ids)[-1].softmax(-1)

    def prompt(self, question: str) -> tuple[int, ...]:
        return self.chat.prompt_ids([Message("user", question)])

    def requests(self, sampling: SamplingSettings, *, count: int) -> list[Request]:
        """Return ``count`` requests for each question, ids "q/j"."""
        return [
            Request(
                id=f"{q}/{j}",
                prompt_ids=self.prompt(question),
                sampling=sampling,
                seed=1000 * q + j,
                query=self.chat.query,
            )
            for q, question in enumerate(QUESTIONS)
            for j in range(count)
        ]
