"""The settings of `selfcal fit` behind an adaptation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from selfcal_lightning.adaptation.evaluation import SampledSet, SetComparison, compare_set, read_set
from selfcal_lightning.adaptation.group_rewards import ANNOTATIONS
from selfcal_lightning.adaptation.selection_files import examples, read_selection
from selfcal_lightning.core.config_files import override
from selfcal_lightning.core.errors import InputError, check_at_least, check_literals
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.data.tasks.registry import QuestionSlice, load_source
from selfcal_lightning.engines.sampling.running import GenerationSettings, sample_questions
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget
from selfcal_lightning.models.chat_format import Prompt
from selfcal_lightning.records import Question, SamplingSettings

TRANSDUCTIVE, INDUCTIVE, OUT_OF_DOMAIN = "transductive", "inductive", "out_of_domain"


def sampled(place: QuestionSlice) -> dict[str, Any]:
    """Return the settings of a run that samples them; what is in its store is kept and extended."""
    return {**asdict(place), "task": [place.task], "extend": True}


def load_sets(slices: Mapping[str, QuestionSlice]) -> dict[str, list[Question]]:
    found = {name: load_source(place, place.task) for name, place in slices.items()}
    contents = {name: {question_digest(question): question.id for question in own} for name, own in found.items()}
    for one, other in combinations(contents, 2):
        if shared := sorted(contents[one].keys() & contents[other].keys()):
            shown = f"{len(shared)} questions, such as {contents[one][shared[0]]!r}"
            raise InputError(f"`{one}` and `{other}` share {shown}. Take other splits.")
    return found


OWN_OF_MODEL = ("base_model", "revision", "reward", "target", "lr", "seed")
OWN_OF_DATA = ("store_dir", "selection", "num_samples", "batch_size", "seed")
ADAPTER, SAMPLES, GUARD_FILE = "adapter", "samples", "guard.json"


@dataclass(frozen=True)
class Adaptation:
    """What is learned from what, with how many samples; ``run_adapt`` documents the settings."""

    base_model: str
    revision: str | None
    questions: QuestionSlice
    reward: GroupReward
    target: PoolTarget | None
    selection: str | None
    store_dir: str | None
    rounds: int
    num_samples: int
    batch_size: int
    lr: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        check_literals(self)
        check_at_least(1, rounds=self.rounds)
        if (self.selection is None) != (self.store_dir is None):
            got = f"{self.store_dir!r} with {self.selection!r}"
            raise InputError(f"Expected `store_dir` with a `selection`, and there alone, but got {got}.")
        if self.selection is None and self.reward == "none":
            raise InputError("Expected a `selection` with `reward: none`, which samples nothing, but got None.")
        if self.is_one_round and self.reward != "none" and self.rounds > 1:
            what = f"`reward: {self.reward}`, known in round 0 alone"
            raise InputError(f"Expected `rounds: 1` with {what}, but got {self.rounds}.")

    @property
    def is_one_round(self) -> bool:
        """Whether nothing is sampled after round 0: a selection and token statistics are known of round 0 alone."""
        return self.reward in ANNOTATIONS or self.reward == "none"


def fit_settings(
    one: Adaptation, folder: Path, *, engine: EngineSettings, guard: Mapping[str, float], options: Mapping[str, Any]
) -> dict[str, Any]:
    model = {name: getattr(one, name) for name in OWN_OF_MODEL}
    data = {
        **{name: getattr(one, name) for name in OWN_OF_DATA}, "store_dir": one.store_dir or str(folder / SAMPLES),
        "train": [] if one.is_one_round else [asdict(one.questions)],
        "regenerate_every_n_epochs": None if one.is_one_round else 1,
    }  # fmt: skip
    # A policy gradient needs samples at temperature 1 from the whole distribution.
    sampling = {"temperature": 1.0, "edt_scale": None, "top_p": 1.0, "max_new_tokens": one.max_new_tokens}
    checkpoints = {"dirpath": str(folder / "checkpoints"), "every_n_train_steps": 1, "save_last": True}
    generation = {"engine": asdict(engine), "sampling": sampling, "seed": one.seed}
    callbacks = {
        "selfcal_lightning.callbacks.generation.SSCGeneration": generation,
        "selfcal_lightning.callbacks.adaptation_guard.AdaptationGuard": {"report": str(folder / GUARD_FILE), **guard},
        "lightning.pytorch.callbacks.ModelCheckpoint": checkpoints,
        "selfcal_lightning.callbacks.adapter_export.AdapterExport": {"output_dir": str(folder / ADAPTER)},
    }
    logger = {"save_dir": str(folder), "name": "logs"}
    settings: dict[str, Any] = {
        "seed_everything": one.seed,
        "trainer": {
            "devices": 1, "max_epochs": one.rounds, "reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0,
            "num_sanity_val_steps": 0, "use_distributed_sampler": False, "log_every_n_steps": 1,
            "gradient_clip_val": 1.0, "enable_model_summary": False, "default_root_dir": str(folder),
            "logger": {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": logger},
            "callbacks": [{"class_path": name, "init_args": given} for name, given in callbacks.items()],
        },
        "model": {"class_path": "selfcal_lightning.adaptation.module.TestTimeTrainingModule", "init_args": model},
        "data": {"class_path": "selfcal_lightning.datamodules.adaptation.RolloutDataModule", "init_args": data},
    }  # fmt: skip
    stated: list[tuple[str, str, object]] = [("model", name, model[name]) for name in OWN_OF_MODEL]
    stated += [("data", name, data[name]) for name in OWN_OF_DATA]
    override(settings, options)
    for section, name, value in (*stated, ("trainer", "max_epochs", one.rounds)):
        if (found := settings[section].get("init_args", settings[section])[name]) != value:
            raise InputError(f"Expected `fit_options` without `{section}.{name}`, but got {found!r}; it is {value!r}.")
    return settings


def check_learnt(
    selection: str, store_dir: str, sets: Mapping[str, Sequence[Question]], *, learns_confidence: bool
) -> None:
    chosen = read_selection(selection)
    kept = [example.question for example in examples(chosen, store_dir=store_dir)]
    _check_among(kept, sets, what=f"the {len(kept):,} questions that {selection} keeps")
    if learns_confidence:
        store, round = SampleStore(store_dir), chosen.manifest["store"]["round"]
        taught = [entry.question for entry in counted_samples(store, store.index(split="train", round=round))]
        _check_among(taught, sets, what=f"the {len(taught):,} training questions of {store_dir}, for `target`,")


def _check_among(learnt: Sequence[Question], sets: Mapping[str, Sequence[Question]], *, what: str) -> None:
    """Raise InputError unless all of ``learnt`` are among ``questions``; gold answers are not compared."""
    own = {key for question in sets[TRANSDUCTIVE] for key in _keys(question)}
    held = {key for name, others in sets.items() if name != TRANSDUCTIVE for one in others for key in _keys(one)}
    outside = [question for question in learnt if own.isdisjoint(_keys(question))]
    if outside:
        num_own, num_held = len(sets[TRANSDUCTIVE]), sum(not held.isdisjoint(_keys(question)) for question in outside)
        raise InputError(
            f"Expected {what} to be among the {num_own:,} of `questions`, but got {len(outside):,} that are not, "
            f"{num_held:,} of them in `inductive` or `out_of_domain`, such as {outside[0].id!r}."
        )


def _keys(question: Question) -> tuple[str, tuple[str, str, str]]:
    """Return what identifies a question: its messages, or where a prompt changed these, its name and text."""
    return question_digest(replace(question, reference=None)), (question.task, question.id, question.text)


@dataclass(frozen=True)
class Evaluation:
    """How models are sampled and compared; ``num_samples`` is the option ``evaluation_samples``."""

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
        check_at_least(1, evaluation_samples=self.num_samples)
        for temperature in self.temperatures:
            if not 0.0 < temperature <= 2.0:
                raise InputError(f"Expected `temperatures` to lie in (0, 2], but got {temperature}.")

    def compare(self, cost_in_samples: int) -> list[SetComparison]:
        """Sample what is missing and compare; ``cost_in_samples`` is the adaptation's cost in responses a question."""
        return [self._compare(name, cost_in_samples if name == TRANSDUCTIVE else 0) for name in self.slices]

    def _compare(self, name: str, further: int) -> SetComparison:
        say(f"Evaluation: {name}")
        whole = self._sample(name, "base", self.sampling, num_samples=self.num_samples + further)
        others = {}
        for temperature in self.temperatures:
            hot = replace(self.sampling, temperature=temperature, edt_scale=None)
            label = f"base-{temperature:g}"
            others[f"temperature {temperature:g}"] = self._sample(name, label, hot, num_samples=self.num_samples)
        longest = self.sampling.max_new_tokens
        greedy = SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=longest)
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

    def _sample(
        self, name: str, label: str, sampling: SamplingSettings, *, num_samples: int, adapted: bool = False
    ) -> SampledSet:
        store = (self.adapted_dir if adapted else self.base_dir) / name / label
        adapter = str(self.adapter) if adapted else None
        own = GenerationSettings(
            model=self.base_model, store_dir=str(store), **sampled(self.slices[name]), store_split="test",
            prompt=self.prompt, num_samples=num_samples, engine=self.engine.of(revision=self.revision, adapter=adapter),
            sampling=sampling, seed=self.seed, query=self.query,
        )  # fmt: skip
        sample_questions(own)
        asked = {question.id for question in own.questions()}  # an earlier or shared evaluation may have more
        return SampledSet(tuple(one for one in read_set(store).entries if one.question.id in asked)).first(num_samples)
