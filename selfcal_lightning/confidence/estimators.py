"""Statistics of a response's tokens under the model that is asked: how likely they were, and how sure it was of each.

The model is untempered, however the response was drawn, and the end-of-turn token is no part of the response.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
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
    """The share of k samples of the question that give a response's answer, in [0, 1].

    ``c(y) = #{i in S: y_i = y} / k`` with S a set of k samples, drawn without replacement from those that there are.
    An unreadable sample agrees with nothing, but counts among the k; an unreadable response has no confidence. Answers
    are compared as the store names them, equal expressions being one answer.

    Args:
        num_samples: k; None takes all. A question with fewer samples takes those that it has.
        seed: Seed of the draw; every question has its own, derived from it.

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
    softmax over the exact token ids of the query. So the model that sampled a store gives again what the store holds,
    and another model gives its own view of the same responses.

    Args:
        engine: Who is asked.
        chat: Chat format of its tokenizer, with the query.
        normalised: False gives P(Yes) itself, the raw value of the paper.
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
    """Return P(True) behind each of different sequences that end with the query.

    None stands for a sequence without mass, and for one that the engine refuses.
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


class _TokenStatistic(ABC):
    """What the statistics have in common; a member adds its name and how it is read."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = False
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the statistic of every sample, [question][sample]; None where it has none, or no room is left."""
        return self._tokens.scores(pool, self.read)

    @staticmethod
    @abstractmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the statistic of a response; nan where it has no token to take a mean over."""


class SequenceLogprob(_TokenStatistic):
    """``sum_t log p(y_t | x, y_<t)`` over the response tokens, in nats; higher is better.

    Generation stores the same number with every sample.
    """

    name = LOGPROB

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the sum."""
        return statistics.logprob


class MeanLogprob(_TokenStatistic):
    """``1/n sum_t log p(y_t | x, y_<t)`` over the n response tokens, in nats; higher is better.

    Unlike the sum it does not favour short responses.
    """

    name = MEAN_LOGPROB

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean."""
        return statistics.logprob / statistics.num_tokens if statistics.num_tokens else math.nan


class LowestLogprob(_TokenStatistic):
    """``min_t log p(y_t | x, y_<t)``: how likely the least likely token was, in nats; higher is better."""

    name = "min_logprob"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the lowest one."""
        return statistics.tokens.logprob.min().item() if statistics.num_tokens else math.nan


class SelfCertainty(_TokenStatistic):
    """Mean ``KL(uniform || p_t)`` over the response tokens, in nats; higher is better.

    See ``functional.certainty.self_certainty``. It depends on the size of the vocabulary, so compare it within a model.

    Reference:
        Kang et al., Scalable Best-of-N Selection for Large Language Models via Self-Certainty, arXiv 2502.18581.
    """

    name = "self_certainty"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean divergence."""
        return statistics.certainty


class ResponseCertainty(_TokenStatistic):
    """Mean ``-1/V sum_v log p_t(v)`` over the response tokens, in nats, at least log V; higher is better.

    It is self-certainty plus log V, so that it orders responses as self-certainty does.
    """

    name = "response_certainty"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return the mean cross-entropy."""
        return statistics.certainty + math.log(statistics.vocabulary_size) if statistics.num_tokens else math.nan


class TokenEntropy(_TokenStatistic):
    """*Minus* the mean entropy of the response tokens' distributions, in nats, at most 0; higher is better.

    The sign makes it a confidence: the value -0.2 says that the tokens were drawn at .2 nats of entropy on average.
    See ``functional.certainty.token_entropy`` for the entropy itself.
    """

    name = "token_entropy"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return minus the entropy."""
        return -statistics.entropy


class TokenSteadiness(_TokenStatistic):
    """*Minus* the standard deviation of the entropies of the response tokens, in nats, at most 0; higher is better.

    How unevenly a response was sure, whatever its mean. Votes that are weighed by how it stands out among the responses
    to a question are those of SASC: the strategy ``standardised``.
    """

    name = "token_steadiness"

    @staticmethod
    def read(statistics: ResponseStatistics) -> float:
        """Return minus the deviation."""
        return -statistics.tokens.entropy.std(correction=0).item() if statistics.num_tokens else math.nan


class LowestGroupConfidence:
    """Confidence of the least sure stretch of a response, in nats; higher is better.

    The confidence of a token is the mean negative log-probability of the 20 likeliest ones at its place; that of a
    stretch is the mean over its tokens. A response that is shorter than ``window`` is one stretch.
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
        """Return the confidence of every sample, [question][sample]; None where it has no token, or no room is left."""
        return self._tokens.scores(pool, self.read)

    def read(self, statistics: ResponseStatistics) -> float:
        """Return the confidence of one response; nan without tokens."""
        from selfcal_lightning.confidence.certainty import lowest_group_confidence

        found = lowest_group_confidence(statistics.top_confidence, window=self._window, share=self._lowest)
        return math.nan if found is None else found


Read = Callable[["ResponseStatistics"], float]


class _Standardised(ABC):
    """What the weights have in common; a member adds its name and the scores that are standardised."""

    name: ClassVar[str]
    is_probability: ClassVar[bool] = False
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "tokens"

    def __init__(self, tokens: TokenReader) -> None:
        self._tokens = tokens

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the weight of every sample, [question][sample]; None where it has no score, or no room is left."""
        found = [self._tokens.scores(pool, read) for read in self.scores()]
        return [_weights(columns) for columns in zip(*found, strict=True)]

    @abstractmethod
    def scores(self) -> Sequence[Read]:
        """Return what reads the scores of a response, each higher where it is surer; nan where there is none."""


class SteadyTokens(_Standardised):
    """``exp(-z)`` of the standard deviation of the entropies of a response's tokens: the steadier, the more."""

    name = "sasc_std"

    def scores(self) -> Sequence[Read]:
        """Return what reads minus the deviation."""
        return (TokenSteadiness.read,)


class LikelyTokens(_Standardised):
    """``exp(z)`` of the mean log-probability of a response's tokens."""

    name = "sasc_certainty"

    def scores(self) -> Sequence[Read]:
        """Return what reads the mean."""
        return (lambda statistics: statistics.tokens.logprob.mean().item(),)


class SteadySteps(_Standardised):
    """``exp(-z - z')`` of the deviations of the entropies of tokens, and of the mean entropies of steps."""

    name = "sasc_double"

    def __init__(self, tokens: TokenReader, *, steps: Steps = "auto") -> None:
        super().__init__(tokens)
        self._steps = steps

    def scores(self) -> Sequence[Read]:
        """Return what reads minus both deviations."""
        return TokenSteadiness.read, self._minus_step_spread

    def _minus_step_spread(self, statistics: ResponseStatistics) -> float:
        from selfcal_lightning.confidence.certainty import span_means

        spans = self._tokens.steps(statistics.token_ids, self._steps)
        return -span_means(statistics.tokens.entropy, spans).std(correction=0).item() if spans else math.nan


def _weights(columns: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Return the weight of each response to one question; None where one of its scores is unknown."""
    from selfcal_lightning.metrics.consistency import standardised_weights

    samples = list(zip(*columns, strict=True))
    known = [number for number, scores in enumerate(samples) if None not in scores]
    weights = standardised_weights(*([column[number] for number in known] for column in columns))
    found = dict(zip(known, weights.tolist(), strict=True))
    return [found.get(number) for number in range(len(samples))]


WEIGHTS = (SteadyTokens, LikelyTokens, SteadySteps)
