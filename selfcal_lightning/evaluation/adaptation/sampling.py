"""Sampling and judging before and after an adaptation, on the questions adapted on and on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.adaptation.comparison import SetComparison, compare_set
from selfcal_lightning.evaluation.adaptation.questions import TRANSDUCTIVE, QuestionSlice
from selfcal_lightning.evaluation.adaptation.samples import SampledSet, read_set
from selfcal_lightning.generation.process_share import GenerationSettings
from selfcal_lightning.generation.running import sample_questions
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.runtime.progress import say

QUESTIONS_PER_SHARD = 64
GREEDY = SamplingSettings(temperature=0.0, edt_scale=None)


@dataclass(frozen=True)
class Evaluation:
    """How models are sampled and compared.

    Attributes:
        base_model: Folder or hub name of the base model.
        revision: Its revision on the hub.
        adapter: Folder of the adapter.
        slices: The questions, by the name of their set.
        sampling: How both models are sampled.
        temperatures: Further temperatures of the base model, above 0.
        num_samples: Responses to a question; the option is ``evaluation_samples``.
        engine: What samples.
        seed: Of sampling.
        query: The confidence query.
        prompt: How questions are put to the model; None is their tasks' own way.
        base_dir: Where the responses of the base model lie.
        adapted_dir: Where those of the adapted one lie.

    Raises:
        InputError: ``num_samples`` or one of the temperatures is out of its range.
    """

    base_model: str
    revision: str | None
    adapter: Path
    slices: Mapping[str, QuestionSlice]
    sampling: SamplingSettings
    temperatures: Sequence[float]
    num_samples: int
    engine: EngineSettings
    seed: int
    query: str
    prompt: Prompt | None
    base_dir: Path
    adapted_dir: Path

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"Expected `evaluation_samples` to be at least 1, but got {self.num_samples}.")
        for temperature in self.temperatures:
            if not 0.0 < temperature <= 2.0:
                raise InputError(
                    f"Expected `temperatures` to lie in (0, 2], but got {temperature}. The greedy response is there "
                    "without it."
                )

    def compare(self, cost_in_samples: int) -> list[SetComparison]:
        """Sample what is missing, and compare the models on all sets.

        Args:
            cost_in_samples: Responses to a question that as many tokens give as the adaptation took.
        """
        return [self._compare(name, cost_in_samples) for name in self.slices]

    def _compare(self, name: str, cost_in_samples: int) -> SetComparison:
        further = cost_in_samples if name == TRANSDUCTIVE else 0
        say(f"Evaluation: {name}")
        whole = self._sample(name, "base", self.sampling, num_samples=self.num_samples + further)
        others = {
            f"temperature {temperature:g}": self._sample(
                name, f"base-{temperature:g}", self._at(temperature), num_samples=self.num_samples
            )
            for temperature in self.temperatures
        }
        greedy = replace(GREEDY, max_new_tokens=self.sampling.max_new_tokens)
        return compare_set(
            name,
            base=whole.first(self.num_samples),
            adapted=self._sample(name, "adapted", self.sampling, num_samples=self.num_samples, adapted=True),
            base_greedy=self._sample(name, "base-greedy", greedy, num_samples=1),
            adapted_greedy=self._sample(name, "adapted-greedy", greedy, num_samples=1, adapted=True),
            others=others,
            equal_tokens=whole if further else None,
            seed=self.seed,
        )

    def _at(self, temperature: float) -> SamplingSettings:
        return replace(self.sampling, temperature=temperature, edt_scale=None)

    def _sample(
        self, name: str, label: str, sampling: SamplingSettings, *, num_samples: int, adapted: bool = False
    ) -> SampledSet:
        store = (self.adapted_dir if adapted else self.base_dir) / name / label
        adapter = str(self.adapter) if adapted else None
        sample_questions(
            sampling_run(
                self.slices[name], self.base_model, str(store), split="test", num_samples=num_samples,
                engine=self.engine.of(revision=self.revision, adapter=adapter), sampling=sampling, seed=self.seed,
                query=self.query, prompt=self.prompt,
            )
        )  # fmt: skip
        return read_set(store)


def sampling_run(
    place: QuestionSlice,
    model: str,
    store_dir: str,
    *,
    split: str,
    num_samples: int,
    engine: EngineOptions,
    sampling: SamplingSettings,
    seed: int,
    query: str,
    prompt: Prompt | None,
) -> GenerationSettings:
    """Return the run that samples questions into a store under ``split``; what is there is kept, and topped up."""
    return GenerationSettings(
        model=model, store_dir=store_dir, task=[place.task], split=place.split, path=place.path, part=place.part,
        limit=place.limit, offset=place.offset, store_split=split, chain_of_thought=place.chain_of_thought,
        prompt=prompt, num_samples=num_samples, engine=engine, sampling=sampling, seed=seed, query=query,
        questions_per_shard=QUESTIONS_PER_SHARD, max_failures=MAX_FAILURES, top_up=True,
    )  # fmt: skip
