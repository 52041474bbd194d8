"""Statistics of response tokens from a local model: one forward pass over prompt and response serves all estimators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from selfcal_lightning.confidence.estimators.token_ids import entry_ids
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.certainty import token_statistics
from selfcal_lightning.model_files.attention_backends import without_cudnn
from selfcal_lightning.models.causal_lm import logits_at
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.prompts.chat_format import ChatFormat

Key = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ResponseStatistics:
    """What the model says of one response's n tokens, without end-of-turn; in nats.

    Attributes:
        num_tokens: n.
        logprob: Sum of log p(token).
        certainty: Mean KL(uniform || p) of the distributions that the tokens were drawn from; nan where n is 0.
        entropy: Mean entropy of these distributions; nan where n is 0.
    """

    num_tokens: int
    logprob: float
    certainty: float
    entropy: float


class TokenReader:
    """Reads full-vocabulary statistics of recorded responses, under the untempered model.

    A position's distribution is the one that its token was drawn from, so the first is read after the last prompt
    token. Equal responses to equal prompts are read once, and what one call has read is there for the next, so that
    several estimators over one pool cost one forward pass. The weights must not change in between.

    Args:
        network: A causal language model in evaluation mode, or its PEFT wrapper.
        chat: Chat format of its tokenizer.
        forward_tokens: Tokens of a forward pass, padding included; one sequence may be longer.
        logit_elements: Entries of the logits of a forward pass; 2**28 are 0.5 GiB in half precision. One sequence may
            need more.

    Attributes:
        max_context: Longest prompt + response in tokens; None where the model's configuration does not say.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        chat: ChatFormat,
        *,
        forward_tokens: int = 8192,
        logit_elements: int = 2**28,
    ) -> None:
        if network.training:
            raise InputError(
                "Expected `network` to be in evaluation mode, but got training mode. Call `.eval()` first."
            )
        config = network.config.get_text_config()
        self.network, self.chat = network, chat
        self.max_context: int | None = getattr(config, "max_position_embeddings", None)
        self._forward_tokens = forward_tokens
        self._logit_rows = max(1, logit_elements // config.vocab_size)
        self._known: dict[Key, ResponseStatistics] = {}

    def read(self, pool: Sequence[QuestionSamples]) -> list[list[ResponseStatistics | None]]:
        """Return the statistics of every sample, [question][sample]; None where there is no response or no room."""
        ids = [entry_ids(entry, self.chat) for entry in pool]
        keys = [[None if row is None else (row.prompt, row.response) for row in rows] for rows in ids]
        wanted = {key for row in keys for key in row if key is not None and self._fits(key)}
        known = {key: self._known[key] for key in wanted & self._known.keys()}
        known |= {key: ResponseStatistics(0, 0.0, math.nan, math.nan) for key in wanted if not key[1]}
        for batch in self._batches(wanted - known.keys()):
            known |= zip(batch, self._forward(batch), strict=True)
        self._known = known
        return [[None if key is None else known.get(key) for key in row] for row in keys]

    def scores(
        self, pool: Sequence[QuestionSamples], pick: Callable[[ResponseStatistics], float]
    ) -> list[list[float | None]]:
        """Return one number of the statistics of every sample, [question][sample]; None where it is not finite."""

        def known(statistics: ResponseStatistics | None) -> float | None:
            value = math.nan if statistics is None else pick(statistics)
            return value if math.isfinite(value) else None

        return [[known(statistics) for statistics in row] for row in self.read(pool)]

    def _fits(self, key: Key) -> bool:
        return self.max_context is None or len(key[0]) + len(key[1]) <= self.max_context

    def _batches(self, keys: Iterable[Key]) -> Iterator[list[Key]]:
        """Yield ``keys`` by rising length, in batches within the limits on tokens and on logits."""
        batch: list[Key] = []
        rows = 0
        for key in sorted(keys, key=lambda key: (len(key[0]) + len(key[1]), key)):
            width = len(key[0]) + len(key[1])
            full = (len(batch) + 1) * width > self._forward_tokens or rows + len(key[1]) > self._logit_rows
            if batch and full:
                yield batch
                batch, rows = [], 0
            batch.append(key)
            rows += len(key[1])
        if batch:
            yield batch

    @torch.no_grad()
    def _forward(self, batch: Sequence[Key]) -> list[ResponseStatistics]:
        """Run prompt + response of each of ``batch``, padded on the right, and reduce its tokens to sums and means."""
        device = self.network.device
        shape = len(batch), max(len(prompt) + len(response) for prompt, response in batch)
        ids = torch.zeros(shape, dtype=torch.long)
        mask = torch.zeros(shape, dtype=torch.long)
        predicts = torch.zeros(shape, dtype=torch.bool)  # the logits at t are those of the token at t + 1
        for row, (prompt, response) in enumerate(batch):
            end = len(prompt) + len(response)
            ids[row, :end] = torch.tensor([*prompt, *response])
            mask[row, :end] = 1
            predicts[row, len(prompt) - 1 : end - 1] = True
        head = self.network.get_output_embeddings()
        positions = predicts.flatten().nonzero()[:, 0].to(device)
        with without_cudnn():
            logits = logits_at(self.network, head, ids.to(device), mask.to(device), positions)
        tokens = torch.tensor([token for _, response in batch for token in response], device=device)
        columns = torch.stack(token_statistics(logits, tokens)).cpu().double()
        pieces = columns.split([len(response) for _, response in batch], dim=1)
        return [
            ResponseStatistics(
                num_tokens=piece.shape[1],
                logprob=piece[0].sum().item(),
                certainty=piece[1].mean().item(),
                entropy=piece[2].mean().item(),
            )
            for piece in pieces
        ]
