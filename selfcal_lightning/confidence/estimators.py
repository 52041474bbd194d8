"""Estimators of confidence from token statistics, P(True) and agreement.

Statistics are taken at temperature 1, however the response was drawn, and exclude the end-of-turn token.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.token_ids import ResponseIds, entry_ids
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import Steps
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.metrics.arrays import check_positive
from selfcal_lightning.records import ConfidenceQuery, QuestionSamples, Sample, normalised_p_true, sample_seed

if TYPE_CHECKING:
    from selfcal_lightning.confidence.token_reader import ResponseStatistics, TokenReader
    from selfcal_lightning.models.chat_format import ChatFormat


class ResponseConsistency:
    """The share of k samples of the question that agree with a response's answer, in [0, 1].

    ``c(y) = #{i in S: y_i = y} / k`` with S a set of k samples, drawn without replacement. Unreadable samples count
    among the k but agree with nothing; an unreadable response has no confidence. Answers are compared in canonical
    form.

    Args:
        num_samples: k; None uses all samples. Questions with fewer samples use all of theirs.
        seed: Seeds the draw, separately for each question.

    Raises:
        ValueError: If ``num_samples`` is neither None nor positive.

    Reference:
        arXiv 2602.13540 (response consistency as an estimator of capability); Wang et al., Self-Consistency,
        arXiv 2203.11171.
    """

    name: ClassVar[str] = "response_consistency"
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "pool"

    def __init__(self, *, num_samples: int | None = None, seed: int = 0) -> None:
        if num_samples is not None:
            check_positive(num_samples, "num_samples")
        self._num_samples, self._seed = num_samples, seed

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the share of every sample, [question][sample]; None where it cannot be read."""
        return [self._shares(entry) for entry in pool]

    def _shares(self, entry: QuestionSamples) -> list[float | None]:
        drawn = self._draw(entry)
        counts = Counter(sample.answer for sample in drawn)
        return [None if sample.answer is None else counts[sample.answer] / len(drawn) for sample in entry.samples]

    def _draw(self, entry: QuestionSamples) -> Sequence[Sample]:
        if self._num_samples is None or self._num_samples >= len(entry.samples):
            return entry.samples
        seed = sample_seed(self._seed, entry.samples[0].round, entry.question.id, 0)
        return random.Random(seed).sample(entry.samples, self._num_samples)


class PTrue:
    """P(Yes) / (P(Yes) + P(No)) after the confidence query, in [0, 1]; the definition that generation uses.

    The sequence is prompt + response without end-of-turn + ``chat.query.suffix_ids``; the masses are sums of the full
    softmax over the query's Yes and No token ids. The model that sampled a store reproduces the stored values; another
    model gives its own confidence in the same responses.

    Args:
        engine: The engine to ask.
        chat: Chat format of its tokenizer, with the query.
        normalised: False returns the unnormalised P(Yes), as in the paper.
    """

    name: ClassVar[str] = P_TRUE
    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "engine"

    def __init__(self, engine: Engine, chat: ChatFormat, *, normalised: bool = True) -> None:
        self._engine, self._chat, self._normalised = engine, chat, normalised

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return P(True) of every sample, [question][sample].

        None stands for a sample without a response, room for it, or mass, and for one that the engine refuses.

        Raises:
            RequestsFailedError: The engine did not answer for another reason.
        """
        query = self._chat.query
        sequences = [[self._sequence(ids) for ids in entry_ids(entry, self._chat)] for entry in pool]
        distinct = list(dict.fromkeys(sequence for row in sequences for sequence in row if sequence is not None))
        found = p_true_of(self._engine, distinct, query, normalised=self._normalised)
        return [[None if sequence is None else found[sequence] for sequence in row] for row in sequences]

    def _sequence(self, ids: ResponseIds | None) -> tuple[int, ...] | None:
        """Return prompt + response + query, or None where there is no response or the engine has no room for it."""
        if ids is None:
            return None
        sequence = sequence_behind(ids, self._chat.query)
        return sequence if len(sequence) <= self._engine.max_context else None


def sequence_behind(ids: ResponseIds, query: ConfidenceQuery, *, end: int | None = None) -> tuple[int, ...]:
    """Return prompt + the first ``end`` tokens of the response (None: all) + query."""
    return (*ids.prompt, *ids.response[:end], *query.suffix_ids)


def p_true_of(
    engine: Engine, sequences: Sequence[tuple[int, ...]], query: ConfidenceQuery, *, normalised: bool = True
) -> dict[tuple[int, ...], float | None]:
    """Return P(True) after each of several distinct sequences that end with the query.

    None stands for a sequence without mass, or one that the engine refuses.
    """
    wanted = [*query.yes_ids, *query.no_ids]
    masses = engine.next_token_probabilities(list(sequences), wanted) if sequences else []
    found: dict[tuple[int, ...], float | None] = {}
    for sequence, row in zip(sequences, masses, strict=True):
        if row is None:
            found[sequence] = None
            continue
        number = len(query.yes_ids)
        yes, no = sum(row[:number]), sum(row[number:])
        found[sequence] = normalised_p_true(yes, no) if normalised else yes
    return found


Read = Callable[["ResponseStatistics"], float]


@dataclass(frozen=True)
class TokenStatistic:
    """An estimator that is one statistic of a response's tokens; call it with a reader to create it.

    Attributes:
        name: Name of the confidence.
        read: Returns the statistic of a response; nan for an empty response.
    """

    name: str
    read: Read
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __call__(self, tokens: TokenReader) -> ReadStatistic:
        """Return the estimator that reads by ``tokens``."""
        return ReadStatistic(self.name, self.read, tokens)


@dataclass(frozen=True)
class ReadStatistic(TokenStatistic):
    """A token statistic with the model that reads it."""

    tokens: TokenReader

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the statistic of every sample, [question][sample]; None if undefined or too long for the model."""
        return self.tokens.scores(pool, self.read)


# All are in nats, and higher is better: entropies stand with a minus. Self-certainty is the mean KL(uniform || p_t)
# (Kang et al., arXiv 2502.18581), response certainty the same plus log V; steadiness minus the deviation of entropies.
SequenceLogprob = TokenStatistic(LOGPROB, lambda response: response.logprob)
MeanLogprob = TokenStatistic(MEAN_LOGPROB, lambda r: r.logprob / r.num_tokens if r.num_tokens else math.nan)
LowestLogprob = TokenStatistic("min_logprob", lambda r: r.tokens.logprob.min().item() if r.num_tokens else math.nan)
SelfCertainty = TokenStatistic("self_certainty", lambda r: r.certainty)
ResponseCertainty = TokenStatistic(
    "response_certainty", lambda r: r.certainty + math.log(r.vocabulary_size) if r.num_tokens else math.nan
)
TokenEntropy = TokenStatistic("token_entropy", lambda r: -r.entropy)
TokenSteadiness = TokenStatistic(
    "token_steadiness", lambda r: -r.tokens.entropy.std(correction=0).item() if r.num_tokens else math.nan
)


class LowestGroupConfidence:
    """Confidence of the least certain window of a response, in nats; higher is better.

    A token's confidence is the mean negative log-probability of the 20 most likely tokens at its position; a window's
    is the mean over its tokens. A response shorter than ``window`` is a single window.
    """

    name: ClassVar[str] = "lowest_group_confidence"
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader, *, window: int = 2048, lowest: float = 0.0) -> None:
        check_positive(window, "window")
        if not 0.0 <= lowest <= 1.0:
            raise InputError(f"Expected `lowest` to lie in [0, 1], but got {lowest}.")
        self._tokens, self._window, self._lowest = tokens, window, lowest

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None if it is empty or too long for the model."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the confidence of one response; nan without tokens."""
        from selfcal_lightning.confidence.certainty import lowest_group_confidence

        found = lowest_group_confidence(statistics.top_confidence, window=self._window, share=self._lowest)
        return math.nan if found is None else found


class _Standardised(ABC):
    """Base of the standardised weights; subclasses add a name and the scores to standardise."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the weight of every sample, [question][sample]; None without a score, or if it is too long."""
        found = [self._tokens.scores(pool, read) for read in self.scores()]
        return [_weights(columns) for columns in zip(*found, strict=True)]

    @abstractmethod
    def scores(self) -> Sequence[Read]:
        """Return functions that compute a response's scores, each higher when more certain; nan if undefined."""


class SteadyTokens(_Standardised):
    """``exp(-z)`` of the standard deviation of a response's token entropies; higher is steadier."""

    name = "sasc_std"

    def scores(self) -> Sequence[Read]:
        """Return the negative standard deviation."""
        return (TokenSteadiness.read,)


class LikelyTokens(_Standardised):
    """``exp(z)`` of the mean log-probability of a response's tokens."""

    name = "sasc_certainty"

    def scores(self) -> Sequence[Read]:
        """Return the mean log-probability."""
        return (lambda statistics: statistics.tokens.logprob.mean().item(),)


class SteadySteps(_Standardised):
    """``exp(-z - z')`` of the standard deviations of token entropies and of the steps' mean entropies."""

    name = "sasc_double"

    def __init__(self, tokens: TokenReader, *, steps: Steps = "auto") -> None:
        super().__init__(tokens)
        self._steps = steps

    def scores(self) -> Sequence[Read]:
        """Return both negative standard deviations."""
        return TokenSteadiness.read, self._minus_step_spread

    def _minus_step_spread(self, statistics: ResponseStatistics) -> float:
        from selfcal_lightning.confidence.certainty import span_means

        spans = self._tokens.steps(statistics.token_ids, self._steps)
        return -span_means(statistics.tokens.entropy, spans).std(correction=0).item() if spans else math.nan


def _weights(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the weight of each response to a question; None if one of its scores is unknown."""
    from selfcal_lightning.metrics.consistency import standardised_weights

    samples = list(zip(*columns, strict=True))
    known = [number for number, scores in enumerate(samples) if None not in scores]
    weights = standardised_weights(*([column[number] for number in known] for column in columns))
    found = dict(zip(known, weights.tolist(), strict=True))
    return [found.get(number) for number in range(len(samples))]


WEIGHTS = (SteadyTokens, LikelyTokens, SteadySteps)
