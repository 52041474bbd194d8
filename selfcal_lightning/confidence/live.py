"""Estimators on responses as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, cast

from selfcal_lightning.confidence.response_probe import ResponseProbe
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.confidence.splits import FittedOn, check_not_fitted_on
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.settings import EngineOptions, check_gives_hidden_states
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, QuestionSamples, Sample

if TYPE_CHECKING:
    from selfcal_lightning.confidence.token_reader import TokenReader
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

LIVE = "live"
PROBE_AND_THRESHOLD = (
    "A threshold file does not say which probe it was fitted with, so it takes none. Give the value by `threshold`."
)
Score = Callable[[Sequence[QuestionSamples]], list[list[float | None]]]  # of an estimator
Asked = tuple[Question, tuple[int, ...]]  # a question, and its prompt's tokens


class LiveScorer:
    """A confidence of one response, by the estimator that `selfcal score` runs on recorded ones."""

    requires: ClassVar[tuple[str, ...]] = ()
    needs_pool: ClassVar[bool] = False

    def __init__(
        self, name: str, score: Score, asked: Callable[[str], Asked], *, fitted_on: FittedOn | None = None
    ) -> None:
        self.name, self._score, self._asked, self.fitted_on = name, score, asked, fitted_on

    def score_sample(self, sample: Sample) -> float | None:
        question, prompt_ids = self._asked(sample.question_id)
        ((value,),) = self._score([QuestionSamples(question, (sample,), LIVE, prompt_ids)])
        return value


def find_asked(questions: Sequence[Question], chat: ChatFormat) -> Callable[[str], Asked]:
    known = {question.id: question for question in questions}

    @lru_cache(1)  # samples mostly come by question
    def find(name: str) -> Asked:
        return known[name], chat.prompt_ids(known[name].messages)

    return find


def check_live_probe(probe: ResponseProbe, questions: Sequence[Question], read: Collection[str | None]) -> None:
    if probe.name not in read:
        found = ", ".join(sorted(name for name in read if name is not None)) or "no confidence"
        raise InputError(f"Expected a strategy that reads {probe.name} where `probe` is given; this one reads {found}.")
    check_not_fitted_on(questions, probe)


def load_live_probe(path: str, model: str, query: str, options: EngineOptions) -> ResponseProbe:
    """Read a probe, whose states the engine must give and the model must have."""
    check_gives_hidden_states(options)
    return ScoringModel(ModelSettings(model, query, options)).response_probe(path)


def open_tokens(engine: Engine, chat: ChatFormat) -> TokenReader:
    from selfcal_lightning.confidence.token_reader import TokenReader

    return TokenReader(cast("TransformersEngine", engine).network, chat)


def open_live_probe(probe: ResponseProbe, read: Callable[[], TokenReader], asked: Callable[[str], Asked]) -> LiveScorer:
    return LiveScorer(probe.name, lambda pool: probe.score(read(), pool), asked, fitted_on=probe.fitted_on)
