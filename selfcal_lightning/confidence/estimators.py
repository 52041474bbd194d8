"""Estimators of confidence from P(True), token statistics, steps, hidden states and agreement.

Statistics are taken at temperature 1, however the response was drawn, and exclude the end-of-turn token. This module
loads no torch: whatever needs it is imported when a model reads the first response.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from selfcal_lightning.confidence import base
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Aggregation, Steps
from selfcal_lightning.data.steps import Span, aggregate, token_step_ends
from selfcal_lightning.engines.base import Engine, mass_of
from selfcal_lightning.metrics.arrays import check_positive
from selfcal_lightning.metrics.consistency import masked_standardised_weights
from selfcal_lightning.records import QuestionSamples, Sample, normalised_p_true, sample_seed

if TYPE_CHECKING:
    from torch import Tensor

    from selfcal_lightning.confidence.response_probe import ResponseProbe
    from selfcal_lightning.confidence.token_reader import ResponseStatistics, TokenReader
    from selfcal_lightning.models.chat_format import ChatFormat

Scores = list[list[float | None]]  # [question][sample]; None where a sample has none


class ResponseConsistency:
    """The share of k samples of the question that agree with a response's answer, in [0, 1].

    ``c(y) = #{i in S: y_i = y} / k`` with S a set of k samples, drawn without replacement. Unreadable samples count
    among the k but agree with nothing; an unreadable response has no confidence (arXiv 2203.11171, 2602.13540).

    Args:
        num_samples: k; None uses all samples. Questions with fewer samples use all of theirs.
        seed: Seeds the draw, separately for each question.
    """

    name: ClassVar[str] = "response_consistency"
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "pool"

    def __init__(self, *, num_samples: int | None = None, seed: int = 0) -> None:
        if num_samples is not None:
            check_positive(num_samples, "num_samples")
        self._num_samples, self._seed = num_samples, seed

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        return [self._shares(entry) for entry in pool]

    def _shares(self, entry: QuestionSamples) -> list[float | None]:
        drawn: Sequence[Sample] = entry.samples
        if self._num_samples is not None and self._num_samples < len(drawn):
            seed = sample_seed(self._seed, drawn[0].round, entry.question.id, 0)
            drawn = random.Random(seed).sample(entry.samples, self._num_samples)
        counts = Counter(sample.answer for sample in drawn)
        return [None if sample.answer is None else counts[sample.answer] / len(drawn) for sample in entry.samples]


class PTrue:
    """P(Yes) / (P(Yes) + P(No)) after the confidence query, in [0, 1]; the definition that generation uses.

    The sequence is prompt + response without end-of-turn + ``chat.query.suffix_ids``; the masses are sums of the full
    softmax over the query's Yes and No token ids. The model that sampled a store reproduces the stored values; another
    model gives its own confidence in the same responses. Not ``normalised``, it is P(Yes), as in the paper.
    """

    name: ClassVar[str] = base.P_TRUE
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "engine"

    def __init__(self, engine: Engine, chat: ChatFormat, *, normalised: bool = True) -> None:
        self._engine, self._chat, self._normalised = engine, chat, normalised

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        """Return P(True) of every sample; None without a response, room for it, or mass, or if the engine refuses."""
        sequences = [[self._sequences(ids) for ids in base.entry_ids(entry, self._chat)] for entry in pool]
        distinct = list(dict.fromkeys(one for row in sequences for ones in row for one in ones))
        query, number = self._chat.query, len(self._chat.query.yes_ids)
        wanted = [*query.yes_ids, *query.no_ids]
        rows = self._engine.next_token_probabilities(distinct, wanted) if distinct else []
        found: dict[tuple[int, ...], float | None] = dict.fromkeys(distinct)
        for sequence, row in zip(distinct, rows, strict=True):
            if row is not None:
                yes, no = mass_of(row[:number]), mass_of(row[number:])
                found[sequence] = normalised_p_true(yes, no) if self._normalised else yes
        return [[self._combine([found[one] for one in ones]) for ones in row] for row in sequences]

    def _sequences(self, ids: base.ResponseIds | None) -> list[tuple[int, ...]]:
        """Return prompt + response up to each end + query; empty if the longest exceeds the context."""
        if ids is None:
            return []
        suffix = self._chat.query.suffix_ids
        ones = [(*ids.prompt, *ids.response[:end], *suffix) for end in self._ends(ids.response)]
        return ones if ones and len(ones[-1]) <= self._engine.max_context else []

    def _ends(self, response: tuple[int, ...]) -> list[int]:
        return [len(response)]

    def _combine(self, values: Sequence[float | None]) -> float | None:
        return values[0] if values else None


class StepSelfEvaluation(PTrue):
    """P(True) after each step of a response, combined into one number.

    After the last step it is P(True) of the response; before, it asks whether an unfinished response is right,
    which is not the probability of an observable event.
    """

    name: ClassVar[str] = "step_self_evaluation"
    is_probability: ClassVar[bool] = False

    def __init__(
        self, engine: Engine, chat: ChatFormat, *, steps: Steps = "auto", over_steps: Aggregation = "mean"
    ) -> None:
        super().__init__(engine, chat)
        self._steps, self._over_steps = steps, over_steps

    def _ends(self, response: tuple[int, ...]) -> list[int]:
        ends = token_step_ends(self._chat.tokenizer, response, self._steps)
        return [*ends[:-1], len(response)] if ends else []  # the last covers the whole response

    def _combine(self, values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return aggregate(known, self._over_steps) if len(known) == len(values) else None


Read = Callable[["ResponseStatistics"], float]


class OfTokens:
    """What estimators that read token statistics have in common."""

    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"


@dataclass(frozen=True)
class TokenScores(OfTokens):
    """An estimator that reads a number off a response's token statistics; nan is unknown."""

    name: str
    tokens: TokenReader
    read: Read

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        """Return the score of every sample; None if it is undefined, or if the response is too long for the model."""
        return self.tokens.scores(pool, self.read)


class ProbedResponses(OfTokens):
    """The confidence of a fitted probe of hidden states in each response, in [0, 1], by the model of the fit."""

    name: ClassVar[str] = base.RESPONSE_PROBE
    is_probability: ClassVar[bool] = True

    def __init__(self, tokens: TokenReader, *, probe: ResponseProbe) -> None:
        self._tokens, self._probe = tokens, probe

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        return self._probe.score(self._tokens, pool)


@dataclass(frozen=True)
class TokenStatistic(OfTokens):
    """A row of the table of token statistics; call it with a reader to create the estimator."""

    name: str
    read: Read  # nan for an empty response
    watches: bool = False  # whether it reads the mean hidden states of the response

    def __call__(self, tokens: TokenReader) -> TokenScores:
        if self.watches:
            tokens.watch(None)
        return TokenScores(self.name, tokens, self.read)


def _coe(name: str, number: str, *, normalise: bool) -> TokenStatistic:
    def read(response: ResponseStatistics) -> float:
        chains = response.chains(None, normalise=normalise) if response.num_tokens else None
        return math.nan if chains is None else float(getattr(chains[0], number))

    return TokenStatistic(name, read, watches=True)


# All are in nats, and higher is better: entropies stand with a minus. Self-certainty is the mean KL(uniform || p_t)
# (Kang et al., arXiv 2502.18581), response certainty the same plus log V; steadiness minus the deviation of entropies.
SequenceLogprob = TokenStatistic(base.LOGPROB, lambda response: response.logprob)
MeanLogprob = TokenStatistic(base.MEAN_LOGPROB, lambda r: r.logprob / r.num_tokens if r.num_tokens else math.nan)
LowestLogprob = TokenStatistic("min_logprob", lambda r: r.tokens.logprob.min().item() if r.num_tokens else math.nan)
SelfCertainty = TokenStatistic("self_certainty", lambda r: r.tokens.certainty.mean().item())
ResponseCertainty = TokenStatistic(
    "response_certainty", lambda r: SelfCertainty.read(r) + math.log(r.vocabulary_size) if r.num_tokens else math.nan
)
TokenEntropy = TokenStatistic("token_entropy", lambda r: -r.tokens.entropy.mean().item())
TokenSteadiness = TokenStatistic(
    "token_steadiness", lambda r: -r.tokens.entropy.std(correction=0).item() if r.num_tokens else math.nan
)
TOKEN_STATISTICS = (
    SequenceLogprob, MeanLogprob, LowestLogprob, SelfCertainty, ResponseCertainty, TokenEntropy, TokenSteadiness,
)  # fmt: skip
# Chain-of-Embedding: length of the layers' steps minus their angle (R), or length of the mean step in polar
# coordinates (C); normalised by the way from first to last layer, or raw, on the scale of the model's states.
TRAJECTORIES = (
    _coe("coe_r", "coe_r", normalise=True),
    _coe("coe_c", "coe_c", normalise=True),
    _coe("coe_r_raw", "coe_r", normalise=False),
    _coe("coe_c_raw", "coe_c", normalise=False),
)


def check_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise InputError(f"Expected `{name}` to lie in [0, 1], but got {value}.")


class LowestGroupConfidence(OfTokens):
    """Confidence of the least certain window of a response, in nats; higher is better.

    A token's confidence is the mean negative log-probability of the 20 most likely tokens at its position; a window's
    is the mean over its tokens. A response shorter than ``window`` is a single window.
    """

    name: ClassVar[str] = "lowest_group_confidence"

    def __init__(self, tokens: TokenReader, *, window: int = 2048, lowest: float = 0.0) -> None:
        check_positive(window, "window")
        check_share("lowest", lowest)
        self._tokens, self._window, self._lowest = tokens, window, lowest

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        """Return the confidence of every sample; None if it is empty or too long for the model."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the confidence of one response; nan without tokens."""
        from selfcal_lightning.confidence.certainty import lowest_group_confidence

        found = lowest_group_confidence(statistics.top_confidence, window=self._window, share=self._lowest)
        return math.nan if found is None else found


Metric = Callable[["ResponseStatistics", Sequence[Span], Steps], "Tensor | None"]


@dataclass(frozen=True)
class StepStatistic(OfTokens):
    """A row of the table of step estimators: a metric of each step, combined with the probability of its tokens.

    A step scores ``metric^(1 - weight) * exp(mean log p)^weight``. Headings and white space between steps belong to no
    step. Call it with a reader and the settings to create the estimator.
    """

    name: str
    metric: Metric  # of each step [S]; None if undefined
    watches: bool = False  # whether it reads the mean hidden states of each step
    is_weighted: bool = True  # whether it is combined with the probability; a metric that may be negative cannot be

    def __call__(
        self, tokens: TokenReader, *, steps: Steps = "auto", weight: float = 0.5, over_steps: Aggregation = "mean"
    ) -> TokenScores:
        check_share("weight", weight)
        if self.watches:
            tokens.watch(steps)

        def read(response: ResponseStatistics) -> float:
            from selfcal_lightning.confidence.certainty import step_scores

            spans = tokens.steps(response.token_ids, steps)
            scores = self.metric(response, spans, steps) if spans else None
            if scores is None:
                return math.nan
            if self.is_weighted:
                scores = step_scores(scores, response.step_means("logprob", spans), weight=weight)
            found = aggregate(scores.tolist(), over_steps)
            return math.nan if found is None else found

        return TokenScores(self.name, tokens, read)


def _step_coe(name: str, number: str, *, normalise: bool) -> StepStatistic:
    """Return the row of a Chain-of-Embedding score of the steps' mean states; CoE-R may be negative."""

    def metric(response: ResponseStatistics, spans: Sequence[Span], steps: Steps) -> Tensor | None:
        chains = response.chains(steps, normalise=normalise)
        return None if chains is None else response.tokens.logprob.new_tensor([getattr(c, number) for c in chains])

    return StepStatistic(name, metric, watches=True, is_weighted=number == "coe_c")


# Certainty is the mean of ``-1/V sum_v log p(v)`` over a step's tokens: self-certainty plus log V. Entropy is one minus
# their mean entropy in units of log V, in [0, 1].
STEP_STATISTICS = (
    StepStatistic("step_certainty", lambda r, spans, _: r.step_means("certainty", spans) + math.log(r.vocabulary_size)),
    StepStatistic(
        "step_entropy",
        lambda r, spans, _: (1.0 - r.step_means("entropy", spans) / math.log(r.vocabulary_size)).clamp(0.0, 1.0),
    ),
    _step_coe("step_coe_c", "coe_c", normalise=False),
    _step_coe("step_coe_c_normalised", "coe_c", normalise=True),
    _step_coe("step_coe_r", "coe_r", normalise=False),
    _step_coe("step_coe_r_normalised", "coe_r", normalise=True),
)


class SteadyTokens(OfTokens):
    """``exp(-z)`` of the standard deviation of a response's token entropies, standardised within the question."""

    name: ClassVar[str] = "sasc_std"
    needs_pool: ClassVar[bool] = True
    # Functions that compute a response's scores, each higher when more certain; nan if undefined.
    statistics: tuple[Read, ...] = (TokenSteadiness.read,)

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> Scores:
        """Return the weight of every sample; None without a score, or if it is too long."""
        found = [self._tokens.scores(pool, read) for read in self.statistics]
        return [_weights(columns) for columns in zip(*found, strict=True)]


class LikelyTokens(SteadyTokens):
    """``exp(z)`` of the mean log-probability of a response's tokens."""

    name: ClassVar[str] = "sasc_certainty"
    statistics = (lambda response: response.tokens.logprob.mean().item(),)


class SteadySteps(SteadyTokens):
    """``exp(-z - z')`` of the standard deviations of token entropies and of the steps' mean entropies."""

    name: ClassVar[str] = "sasc_double"

    def __init__(self, tokens: TokenReader, *, steps: Steps = "auto") -> None:
        super().__init__(tokens)

        def step_steadiness(response: ResponseStatistics) -> float:
            spans = tokens.steps(response.token_ids, steps)
            return -response.step_means("entropy", spans).std(correction=0).item() if spans else math.nan

        self.statistics = (TokenSteadiness.read, step_steadiness)


def _weights(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the weight of each response to a question; None if one of its scores is unknown."""
    scores = np.array(columns, dtype=np.float64).T  # None is NaN
    is_known = np.asarray(~np.isnan(scores).any(axis=1))
    weights = masked_standardised_weights(np.where(is_known[:, None], scores, np.nan)).prod(axis=1)
    return [weight if known else None for weight, known in zip(weights.tolist(), is_known, strict=True)]


WEIGHTS = (SteadyTokens, LikelyTokens, SteadySteps)
