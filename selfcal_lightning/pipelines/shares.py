"""One process's share of a run: its settings, its engine, and its own part of the store."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from selfcal_lightning.engines.base import Engine
from selfcal_lightning.pipelines.engines import EngineName, open_engine
from selfcal_lightning.pipelines.sampling import (
    GenerationReport,
    check_questions,
    generate_samples,
    store_fingerprint,
)
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.store import SampleStore
from selfcal_lightning.tasks.registry import load_some

if TYPE_CHECKING:
    from selfcal_lightning.prompts import ChatFormat

Dtype = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class GenerationSettings:
    """What every process of a run has in common: arguments of ``pipelines.generate.run_generate``, resolved."""

    model: str
    store_dir: str
    task: list[str]
    split: str
    path: str | None
    limit: int | None
    store_split: str
    chain_of_thought: bool
    num_samples: int
    engine: EngineName
    temperature: float
    edt_scale: float | None
    edt_theta: float
    top_p: float
    max_new_tokens: int
    seed: int
    query: str
    dtype: Dtype
    revision: str | None
    adapter: str | None
    max_batch: int
    questions_per_shard: int
    base_url: str | None = None
    engine_args: dict[str, Any] = field(default_factory=dict)
    offset: int = 0

    def sampling(self) -> SamplingSettings:
        """Return how responses are drawn."""
        return SamplingSettings(**{part.name: getattr(self, part.name) for part in fields(SamplingSettings)})

    def chat(self) -> ChatFormat:
        """Load the tokenizer and return the chat format of the model."""
        from selfcal_lightning.prompts import ChatFormat, load_tokenizer

        other = self.engine_args.get("tokenizer")
        tokenizer = load_tokenizer(self.model, revision=self.revision) if other is None else load_tokenizer(other)
        return ChatFormat(tokenizer, query=self.query)

    def questions(self) -> list[Question]:
        """Load the questions of all tasks."""
        if self.path is not None and len(self.task) > 1:
            raise ValueError(f"Expected one `task` when `path` is given, but got {self.task}. Run them one by one.")
        questions = [
            question
            for name in self.task
            for question in load_some(
                name,
                self.split,
                path=self.path,
                chain_of_thought=self.chain_of_thought,
                offset=self.offset,
                limit=self.limit,
            )
        ]
        check_questions(questions)
        return questions


def sample_share(settings: GenerationSettings, *, shard: tuple[int, int], progress: bool) -> GenerationReport:
    """Load the model and sample one share into its own part of the store.

    Args:
        settings: The run.
        shard: (i, n), this process's share.
        progress: Whether to show how far it is.
    """
    questions, chat = settings.questions(), settings.chat()
    engine = build_engine(settings, chat)
    try:
        store = SampleStore.create_or_open(
            settings.store_dir,
            store_fingerprint(engine, chat, settings.sampling(), settings.seed),
            num_samples=settings.num_samples,
            engine=engine.describe(),
        )
        return generate_samples(
            questions,
            split=settings.store_split,
            engine=engine,
            chat=chat,
            store=store,
            num_samples=settings.num_samples,
            sampling=settings.sampling(),
            seed=settings.seed,
            part=part_name(shard),
            shard=shard,
            questions_per_shard=settings.questions_per_shard,
            progress=progress,
        )
    finally:
        engine.close()


def build_engine(settings: GenerationSettings, chat: ChatFormat) -> Engine:
    """Return the engine that ``settings`` ask for."""
    return open_engine(
        settings.engine,
        settings.model,
        chat,
        revision=settings.revision,
        adapter=settings.adapter,
        dtype=settings.dtype,
        max_batch=settings.max_batch,
        base_url=settings.base_url,
        engine_args=settings.engine_args,
    )


def part_name(shard: tuple[int, int]) -> str:
    """Return the name of the part that share (i, n) is written to."""
    return f"rank-{shard[0]}-of-{shard[1]}"
