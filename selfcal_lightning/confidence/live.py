"""Estimators on responses as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from selfcal_lightning.confidence.estimators import ProbedResponses
from selfcal_lightning.confidence.fitted_files import check_states_origin
from selfcal_lightning.confidence.response_probe import ResponseProbe
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel, states_origin
from selfcal_lightning.confidence.splits import check_not_fitted_on
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.hidden_states import check_gives_hidden_states
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, QuestionSamples, Sample

if TYPE_CHECKING:
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

LIVE = "live"
Score = Callable[[Sequence[QuestionSamples]], list[list[float | None]]]  # of an estimator


class LiveScorer:
    """A confidence of one response, by the estimator that `selfcal score` runs on recorded ones."""

    requires: ClassVar[tuple[str, ...]] = ()
    needs_pool: ClassVar[bool] = False

    def __init__(self, name: str, score: Score, questions: Sequence[Question], chat: ChatFormat) -> None:
        self.name, self._score, self._chat = name, score, chat
        self._questions = {question.id: question for question in questions}
        self._last: tuple[str, tuple[int, ...]] | None = None

    def score_sample(self, sample: Sample) -> float | None:
        """Return the confidence of a response; None if the model cannot read it."""
        question = self._questions[sample.question_id]
        if self._last is None or self._last[0] != question.id:  # samples mostly come by question
            self._last = question.id, self._chat.prompt_ids(question.messages)
        entry = QuestionSamples(question, (sample,), LIVE, self._last[1])
        ((value,),) = self._score([entry])
        return value


def check_live_probe(
    probe: ResponseProbe, questions: Sequence[Question], options: EngineOptions, read: Collection[str | None]
) -> None:
    """Refuse a probe that nothing reads, that was fitted on the questions, or whose engine gives no hidden states."""
    check_gives_hidden_states(options)
    if probe.name not in read:
        found = ", ".join(sorted(name for name in read if name is not None)) or "no confidence"
        raise InputError(f"Expected a strategy that reads {probe.name} where `probe` is given; this one reads {found}.")
    check_not_fitted_on(questions, probe)


def open_live_probe(
    probe: ResponseProbe, engine: Engine, model: str, options: EngineOptions, questions: Sequence[Question],
    chat: ChatFormat,
) -> LiveScorer:  # fmt: skip
    """Return the scorer of a probe, which reads the states of the engine's own model."""
    from selfcal_lightning.confidence.token_reader import TokenReader

    identity = ScoringModel(ModelSettings(model, None, options)).identity
    check_states_origin(probe.origin, states_origin(identity, chat))
    estimator = ProbedResponses(TokenReader(cast("TransformersEngine", engine).network, chat), probe=probe)
    return LiveScorer(probe.name, estimator.score, questions, chat)
