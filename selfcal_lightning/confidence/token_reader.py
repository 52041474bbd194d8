"""Token statistics from a local model; one forward pass over prompt and response serves all estimators."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfcal_lightning.confidence import certainty
from selfcal_lightning.confidence.base import entry_ids
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.data.steps import Span, spans_of, token_spans
from selfcal_lightning.engines.transformers.prompt_states import decoder_of, watch_levels
from selfcal_lightning.models.causal_lm import forward_arguments, selected_logits, without_cudnn
from selfcal_lightning.models.chat_format import ChatFormat, token_pieces
from selfcal_lightning.models.packing import PrefixTree, packs_rightly, prefer_segments, shared_prefix_problem
from selfcal_lightning.records import QuestionSamples

T = TypeVar("T")
# Tokens of a prompt, and of a response to it.
Key = tuple[tuple[int, ...], tuple[int, ...]]


class TokenRows(NamedTuple):
    """The inputs of a forward pass over S rows of T tokens."""

    ids: Tensor  # [S, T]
    mask: Tensor  # 1 at real tokens [S, T]
    positions: Tensor  # which of the S * T tokens predict the response tokens [n]
    trees: tuple[PrefixTree, ...] = ()  # prompts and responses of a packed row


def rows_apart(batch: Sequence[Key]) -> TokenRows:
    """Return one row per prompt + response, right-padded."""
    shape = len(batch), max(len(prompt) + len(response) for prompt, response in batch)
    ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    predicts = torch.zeros(shape, dtype=torch.bool)  # the logits at t are those of the token at t + 1
    for row, (prompt, response) in enumerate(batch):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor([*prompt, *response])
        mask[row, :end] = 1
        predicts[row, len(prompt) - 1 : end - 1] = True
    return TokenRows(ids, mask, predicts.flatten().nonzero()[:, 0])


def packed_rows(batch: Sequence[Key]) -> TokenRows:
    """Return one packed row in which consecutive responses to a prompt share it."""
    ids: list[int] = []
    positions: list[int] = []
    trees: list[PrefixTree] = []
    for prompt, keys in groupby(batch, key=lambda key: key[0]):
        responses = [response for _, response in keys]
        tree = PrefixTree(len(ids), len(prompt), tuple(map(len, responses)))
        for own in tree.spans:
            # The first token is drawn after the prompt's last one, wherever the response stands.
            positions += [tree.start + tree.prompt - 1, *range(own.start, own.stop - 1)]
        ids += [*prompt, *(token for response in responses for token in response)]
        trees.append(tree)
    row = torch.tensor([ids])
    return TokenRows(row, torch.ones_like(row), torch.tensor(positions), tuple(trees))


def packed_tokens(batch: Sequence[Key]) -> int:
    return sum(map(len, {prompt for prompt, _ in batch})) + sum(len(response) for _, response in batch)


# Likeliest tokens whose mean log-probability is the confidence of a token, as in Deep Think with Confidence.
TOP_K = 20


@dataclass(frozen=True, slots=True)
class ResponseStatistics:
    """Statistics of one response's n tokens, without end-of-turn, in nats."""

    token_ids: tuple[int, ...]
    vocabulary_size: int
    tokens: certainty.TokenStatistics
    top_confidence: Tensor
    trajectories: Mapping[Steps | None, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def logprob(self) -> float:
        return self.tokens.logprob.sum().item()

    def step_means(self, column: str, spans: Sequence[Span]) -> Tensor:
        return certainty.span_means(getattr(self.tokens, column), spans)

    def chains(self, steps: Steps | None, *, normalise: bool) -> list[certainty.ChainOfEmbedding] | None:
        """Return the trajectory of the mean state (``steps`` None), or of each step's; None if one is undefined."""
        found = [certainty.chain_of_embedding(means, normalise=normalise) for means in self.trajectories[steps]]
        known = [one for one in found if one is not None]
        return known if len(known) == len(found) else None


class TokenReader:
    """Computes full-vocabulary statistics of recorded responses at temperature 1."""

    def __init__(
        self, network: PreTrainedModel, chat: ChatFormat, *, forward_tokens: int = 8192, logit_elements: int = 2**28
    ) -> None:
        if network.training:
            raise InputError("`network` is in training mode. Call `.eval()` first.")
        config = network.config.get_text_config()
        self.network, self.chat = network, chat
        self.max_context: int | None = getattr(config, "max_position_embeddings", None)
        self._forward_tokens = forward_tokens
        self._logit_rows = max(1, logit_elements // config.vocab_size)
        self._can_pack: bool | None = None  # known once a prompt has two responses
        self._watched: list[Steps | None] = []
        self._known: dict[Key, ResponseStatistics] = {}
        self._spans: dict[tuple[tuple[int, ...], Steps], list[Span]] = {}

    def watch(self, steps: Steps | None) -> None:
        """Also read layer trajectories from now on."""
        if steps not in self._watched:
            self._watched.append(steps)
            self._known = {}

    def steps(self, token_ids: tuple[int, ...], rule: Steps) -> list[Span]:
        """Return the tokens of each step of a response, without headings; empty without text."""
        key = (token_ids, rule)
        if key not in self._spans:
            pieces = token_pieces(self.chat.decode, token_ids)
            self._spans[key] = token_spans(pieces, spans_of("".join(pieces), rule))
        return self._spans[key]

    def read(self, pool: Sequence[QuestionSamples]) -> list[list[ResponseStatistics | None]]:
        """Return the statistics of every sample; None without a response, or if it is too long."""
        keys = self._keys(pool)
        wanted = {key for row in keys for key in row if key is not None}
        known = {key: self._known[key] for key in wanted & self._known.keys()}
        nothing = torch.zeros(0, dtype=torch.float64)
        empty = ResponseStatistics((), 0, certainty.TokenStatistics(nothing, nothing, nothing), nothing)
        known |= {key: empty for key in wanted if not key[1]}
        self._known = known | self._pass_over(wanted - known.keys(), self._forward)
        responses = {response for _, response in self._known}
        self._spans = {key: spans for key, spans in self._spans.items() if key[0] in responses}
        return [[None if key is None else self._known[key] for key in row] for row in keys]

    def states(self, pool: Sequence[QuestionSamples]) -> list[list[Tensor | None]]:
        """Return two states [2, D] of every sample, after the last layer; None if it is empty or too long.

        The first is the mean over the positions that predict the response's tokens, the second that of the confidence
        query's last token, where P(True) is read.
        """
        query = self.chat.query.suffix_ids
        suffix = (*query, query[-1])  # one token more, since the states are those that predict a token
        keys = self._keys(pool, further=len(suffix))
        asked = {key: (key[0], key[1] + suffix) for row in keys for key in row if key is not None and key[1]}
        found = self._pass_over(set(asked.values()), self._two_states)
        return [[found[asked[key]] if key in asked else None for key in row] for row in keys]

    def _keys(self, pool: Sequence[QuestionSamples], *, further: int = 0) -> list[list[Key | None]]:
        """Return the keys of all samples; None without a response, or if ``further`` tokens would make it too long."""
        room = (math.inf if self.max_context is None else self.max_context) - further
        return [
            [
                None if row is None or len(row.prompt) + len(row.response) > room else (row.prompt, row.response)
                for row in entry_ids(entry, self.chat)
            ]
            for entry in pool
        ]

    def _pass_over(self, keys: Collection[Key], forward: Callable[..., Iterable[T]]) -> dict[Key, T]:
        packs, found = self._packs(keys), dict[Key, T]()
        with self._segments() if packs else nullcontext():
            for batch in self._batches(keys, packs=packs):
                found |= zip(batch, forward(batch, packs=packs), strict=True)
        return found

    def scores(
        self, pool: Sequence[QuestionSamples], pick: Callable[[ResponseStatistics], float]
    ) -> list[list[float | None]]:
        """Return one statistic of every sample; None where it is not finite."""

        def known(statistics: ResponseStatistics | None) -> float | None:
            value = math.nan if statistics is None else pick(statistics)
            return value if math.isfinite(value) else None

        return [[known(statistics) for statistics in row] for row in self.read(pool)]

    def _packs(self, keys: Collection[Key]) -> bool:
        """Return whether packing pays, a prompt having several responses, and the model supports it."""
        if len({prompt for prompt, _ in keys}) == len(keys):
            return False
        if self._can_pack is None:
            self._can_pack = shared_prefix_problem(self.network.config) is None
            if self._can_pack:
                with self._segments():
                    self._can_pack = packs_rightly(self.network)
        return self._can_pack

    @contextmanager
    def _segments(self) -> Iterator[None]:
        implementation = self.network.config.get_text_config()._attn_implementation
        prefer_segments(self.network)
        try:
            yield
        finally:
            self.network.set_attn_implementation(implementation)

    def _batches(self, keys: Iterable[Key], *, packs: bool) -> Iterator[list[Key]]:
        """Yield ``keys`` in batches within the limits on tokens and logits, grouped by prompt or sorted by length."""
        batch: list[Key] = []
        rows = 0
        for key in sorted(keys, key=(lambda key: key) if packs else (lambda key: (len(key[0]) + len(key[1]), key))):
            tokens = packed_tokens([*batch, key]) if packs else (len(batch) + 1) * (len(key[0]) + len(key[1]))
            if batch and (tokens > self._forward_tokens or rows + len(key[1]) > self._logit_rows):
                yield batch
                batch, rows = [], 0
            batch.append(key)
            rows += len(key[1])
        if batch:
            yield batch

    @torch.no_grad()
    def _two_states(self, batch: Sequence[Key], *, packs: bool) -> list[Tensor]:
        laid_out = packed_rows(batch) if packs else rows_apart(batch)
        ids, mask, positions = (tensor.to(self.network.device) for tensor in laid_out[:3])
        arguments = forward_arguments(self.network, ids, mask, trees=laid_out.trees)
        with without_cudnn():
            hidden = decoder_of(self.network)(**arguments).last_hidden_state
        rows = hidden.flatten(0, 1)[positions].float().cpu().double()
        end = -len(self.chat.query.suffix_ids) - 1
        pieces = rows.split([len(response) for _, response in batch])
        return [torch.stack([piece[:end].mean(0), piece[-1]]) for piece in pieces]

    @torch.no_grad()
    def _forward(self, batch: Sequence[Key], *, packs: bool) -> list[ResponseStatistics]:
        device = self.network.device
        laid_out = packed_rows(batch) if packs else rows_apart(batch)
        ids, mask, positions = (tensor.to(device) for tensor in laid_out[:3])
        head = self.network.get_output_embeddings()
        lengths = [len(response) for _, response in batch]
        watched = [
            [[Span(0, len(response))] if rule is None else self.steps(response, rule) for rule in self._watched]
            for _, response in batch
        ]
        pools = _SpanMeans(watched, lengths, positions)
        with without_cudnn(), ExitStack() as hooks:
            if self._watched:
                watch_levels(hooks, self.network, pools.take)
            arguments = forward_arguments(self.network, ids, mask, trees=laid_out.trees)
            logits = selected_logits(self.network, head, arguments, positions)
        drawn = torch.tensor([token for _, response in batch for token in response], device=device)
        top = certainty.top_k_confidence(logits, min(TOP_K, logits.shape[-1]))
        columns = torch.stack([*certainty.token_statistics(logits, drawn), top]).cpu().double()
        pieces, size = columns.split(lengths, dim=1), logits.shape[-1]
        found: list[ResponseStatistics] = []
        for (_, response), piece, means in zip(batch, pieces, pools.means(), strict=True):
            tokens, paths = certainty.TokenStatistics(*piece[:3]), dict(zip(self._watched, means, strict=True))
            found.append(ResponseStatistics(response, size, tokens, piece[3], paths))
        return found


class _SpanMeans:
    """Collects the mean hidden states over spans of tokens, layer by layer."""

    def __init__(self, spans: Sequence[Sequence[Sequence[Span]]], lengths: Sequence[int], positions: Tensor) -> None:
        self._spans, self._positions = spans, positions
        self._levels: dict[int, Tensor] = {}
        # Averages positions over spans [spans, n].
        self._weights = torch.zeros(sum(len(rule) for rules in spans for rule in rules), sum(lengths))
        row = start = 0
        for rules, length in zip(spans, lengths, strict=True):
            for span in chain.from_iterable(rules):
                self._weights[row, start + span.start : start + span.end] = 1.0 / (span.end - span.start)
                row += 1
            start += length

    def take(self, level: int, states: Tensor) -> None:
        """Pool states [rows, tokens, D]."""
        chosen = states.flatten(0, 1)[self._positions.to(states.device)].float()
        self._levels[level] = (self._weights.to(states.device) @ chosen).cpu()

    def means(self) -> list[list[Tensor]]:
        """Return the means, [response][rule] of [spans, levels, D]."""
        if not self._levels:
            return [[] for _ in self._spans]
        table = torch.stack([self._levels[level] for level in sorted(self._levels)], dim=1)
        rows = iter(table.split([len(spans) for rules in self._spans for spans in rules]))
        return [[next(rows) for _ in rules] for rules in self._spans]
