"""One process's share of a run: its settings, its engine, and its own part of the store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.errors import InputError
from selfcal_lightning.generation.report import GenerationReport
from selfcal_lightning.generation.rollouts import Prefix, RolloutSource
from selfcal_lightning.generation.sample_plan import SamplePlan, load_plan
from selfcal_lightning.generation.sampler import generate_samples, store_fingerprint
from selfcal_lightning.generation.shares import check_questions
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.store.manifest import check_place
from selfcal_lightning.store.sample_store import SampleStore
from selfcal_lightning.tasks.parts import Part
from selfcal_lightning.tasks.sources import check_source, load_source

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


@dataclass(frozen=True)
class GenerationSettings:
    """What every process of a run has in common: the arguments of ``selfcal generate``, resolved.

    With ``rollouts``, prefixes of stored responses stand in the place of the questions of tasks.
    """

    model: str
    store_dir: str
    task: list[str]
    split: str
    path: str | None
    part: Part | None
    limit: int | None
    offset: int
    store_split: str
    chain_of_thought: bool
    prompt: Prompt | None
    num_samples: int
    engine: EngineOptions
    sampling: SamplingSettings
    seed: int
    query: str
    questions_per_shard: int
    max_failures: int
    plan: str | None = None
    top_up: bool = False
    rollouts: RolloutSource | None = None

    @classmethod
    def from_plain(cls, content: Mapping[str, Any]) -> GenerationSettings:
        """Return the settings that ``dataclasses.asdict`` made ``content`` of, perhaps in another process."""
        records = {
            "engine": EngineOptions(**content["engine"]),
            "sampling": SamplingSettings(**content["sampling"]),
            "prompt": None if content["prompt"] is None else Prompt.from_json(content["prompt"]),
        }
        rollouts = content.get("rollouts")
        return cls(**{**content, **records, "rollouts": None if rollouts is None else RolloutSource(**rollouts)})

    def chat(self) -> ChatFormat:
        """Load the tokenizer and return the chat format of the model."""
        return load_chat(self.engine, self.model, query=self.query, prompt=self.prompt)

    def check(self) -> None:
        """Refuse what needs no model and no hub to be refused, in the order of what it costs to look."""
        for name in ("num_samples", "questions_per_shard", "max_failures"):
            if getattr(self, name) < 1:
                raise InputError(f"Expected `{name}` to be at least 1, but got {getattr(self, name)}.")
        if self.top_up and self.plan is not None:
            raise InputError("Expected `top_up` without a `plan`, which says how many responses each question gets.")
        if not self.task and self.rollouts is None:
            raise InputError("Expected `task` to name at least one task, but got none.")
        if self.path is not None and len(self.task) > 1:
            raise InputError(f"Expected one `task` when `path` is given, but got {self.task}. Run them one by one.")
        for name in self.task:
            check_source(self, name)
        check_place(Path(self.store_dir))
        self.sample_plan()
        check_engine(self.engine, self.model)

    def questions(self) -> list[Question]:
        """Load the questions of all tasks, or prefixes as questions of their own."""
        if self.rollouts is not None:
            return [prefix.question for prefix in self._prefixes(self.rollouts)]
        questions = [question for name in self.task for question in load_source(self, name, prompt=self.prompt)]
        check_questions(questions)
        plan = self.sample_plan()
        return questions if plan is None else plan.chosen(questions)

    def prefixes(self) -> dict[str, tuple[int, ...]]:
        """Return what responses begin with, by the id of the question; empty without rollouts."""
        return (
            {} if self.rollouts is None else {one.question.id: one.prefix_ids for one in self._prefixes(self.rollouts)}
        )

    def _prefixes(self, source: RolloutSource) -> list[Prefix]:
        return source.read(self.chat(), longest=self.sampling.max_new_tokens)

    def sample_plan(self) -> SamplePlan | None:
        """Read the plan that says how many responses each question gets; None where all get ``num_samples``."""
        return None if self.plan is None else load_plan(self.plan)


def sample_share(settings: GenerationSettings, *, shard: tuple[int, int], progress: bool) -> GenerationReport:
    """Load the model and sample one share into its own part of the store.

    Args:
        settings: The run.
        shard: (i, n), this process's share.
        progress: Whether to show how far it is.
    """
    questions, chat, plan = settings.questions(), settings.chat(), settings.sample_plan()
    digest = None if plan is None else plan.digest
    engine = open_engine(settings.engine, settings.model, chat=chat)
    try:
        store = SampleStore.create_or_open(
            settings.store_dir,
            store_fingerprint(engine, chat, settings.sampling, settings.seed, plan=digest),
            num_samples=settings.num_samples if plan is None else None,
            engine=engine.describe(),
            splits=(settings.store_split,),
            top_up=settings.top_up,
        )
        return generate_samples(
            questions,
            split=settings.store_split,
            engine=engine,
            chat=chat,
            store=store,
            num_samples=settings.num_samples,
            sampling=settings.sampling,
            seed=settings.seed,
            part=part_name(shard),
            shard=shard,
            questions_per_shard=settings.questions_per_shard,
            max_failures=settings.max_failures,
            progress=progress,
            planned=None if plan is None else plan.samples,
            prefixes=settings.prefixes(),
        )
    finally:
        engine.close()


def part_name(shard: tuple[int, int]) -> str:
    """Return the name of the part that share (i, n) is written to."""
    return f"rank-{shard[0]}-of-{shard[1]}"
