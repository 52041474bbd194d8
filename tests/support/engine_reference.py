"""The questions that engines are asked in tests, and the model as a plain forward pass to hold them against."""

from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM

from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import ConfidenceQuery, Message, Request, SamplingSettings

QUESTIONS = (
    "Ivan has 76 plums. Zoe has 78 more than Ivan. Paul has 58 more than Zoe. How many plums do Zoe and Paul have?",
    "Mia has 5 pens. Tom has 3 more than Mia. How many pens do Mia and Tom have together?",
    "There are 12 apples. 4 apples are eaten. How many are left?",
)


EDT = SamplingSettings(max_new_tokens=64)
FIXED = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)
GREEDY = SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=64)


def masses(p: torch.Tensor, query: ConfidenceQuery) -> tuple[float, float]:
    """Return the masses on Yes and on No of probabilities [V]."""
    return p[list(query.yes_ids)].sum().item(), p[list(query.no_ids)].sum().item()


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

    def masses(self, context: Sequence[int], query: ConfidenceQuery | None = None) -> tuple[float, float]:
        """Return the masses on Yes and on No after a query that follows ``context``."""
        query = query or self.chat.query
        return masses(self.next_probabilities((*context, *query.suffix_ids)), query)

    def logprob(self, context: Sequence[int], tokens: Sequence[int]) -> float:
        logits = self.logits((*context, *tokens))[len(context) - 1 : -1]
        return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).sum().item()

    def prompt(self, question: str) -> tuple[int, ...]:
        return self.chat.prompt_ids([Message("user", question)])

    def requests(self, sampling: SamplingSettings, *, count: int) -> list[Request]:
        """Return ``count`` requests for each question, ids "q/j"."""
        return [
            Request(f"{q}/{j}", self.prompt(question), sampling, seed=1000 * q + j, query=self.chat.query)
            for q, question in enumerate(QUESTIONS)
            for j in range(count)
        ]
