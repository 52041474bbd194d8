"""The data module of trained probes: hidden states of a store's questions, and what their responses show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import Sampler, TensorDataset

from selfcal_lightning.capability import question_table as tables
from selfcal_lightning.capability.features import PromptModel, feature_origin, open_features, read_features
from selfcal_lightning.capability.probe import Pooling, ProbeBasis, checked_targets, design
from selfcal_lightning.capability.probe_module import ProbeBatch
from selfcal_lightning.confidence.scoring_model import ModelSettings
from selfcal_lightning.confidence.splits import check_disjoint, leading_ids
from selfcal_lightning.core.errors import InputError, check_at_least, check_literals
from selfcal_lightning.core.plan import Plan, QuestionCount, Training
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.datamodules.questions import splits_of
from selfcal_lightning.datamodules.ssc.sampler import LateDataLoader, epoch_position, limited_batches, planned_steps
from selfcal_lightning.engines.settings import EngineSettings, LevelSettings, check_gives_hidden_states
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import Question, QuestionSamples, question_hash


@dataclass(frozen=True, eq=False)
class ProbeRows:
    """Q questions of a split, with features [Q, D] that are not yet standardised and targets [Q]."""

    entries: Sequence[QuestionSamples]
    features: Floats
    table: tables.QuestionTable
    target: Floats

    def select(self, rows: np.ndarray) -> ProbeRows:
        entries = [self.entries[row] for row in rows.tolist()]
        return ProbeRows(entries, self.features[rows], self.table.select(rows), self.target[rows])

    def dataset(self, centre: Floats, scale: Floats) -> TensorDataset:
        columns = ((self.features - centre) / scale, self.target, self.table.num_correct)
        features, target, correct = (torch.as_tensor(column.astype(np.float32)) for column in columns)
        return TensorDataset(features, target, correct, torch.as_tensor(self.table.num_samples))


class EpochOrder(Sampler[list[int]]):
    """Batches of all questions, shuffled by seed and epoch, starting where the trainer resumes."""

    def __init__(self, size: int, batch_size: int, *, seed: int, trainer: Trainer | None) -> None:
        self.size, self.batch_size, self.seed, self.trainer = size, batch_size, seed, trainer

    def __len__(self) -> int:
        return -(-self.size // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        epoch, start = (0, 0) if self.trainer is None else epoch_position(self.trainer)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size).tolist()
        for place in range(len(self) if start is None else start, len(self)):
            yield order[place * self.batch_size : (place + 1) * self.batch_size]


def _loader(dataset: TensorDataset, batches: Sampler[list[int]] | list[list[int]]) -> LateDataLoader:
    own = torch.Generator()
    return LateDataLoader(dataset, batch_size=None, sampler=batches, collate_fn=ProbeBatch._make, generator=own)


TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(eq=False, repr=False)
class ProbeDataModule(LightningDataModule):
    """Questions of a store with their hidden states; missing states are computed when a run starts, and kept.

    Args:
        base_model: Folder or hub name of the model that the responses were sampled with.
        store_dir: Folder of the store, filled by `selfcal generate` or a training.
        train_split: Split of the store that is trained on.
        validation_split: Split that is validated on; None sets a share of the training questions aside.
        validation_share: Share of the training questions set aside for validation, above 0 and at most one half; the
            same questions for one seed.
        test_split: Split that the verb ``test`` scores.
        target: Target of the probe: "agreeing_pairs" and "top_share" need no labels; "label" is the share of right
            responses.
        target_draws: Adds binomial noise to the training targets, as if a question had only this many responses: with
            1, the verdict on a single response drawn at random. Null takes what all responses show.
        features: Vectors of a prompt: "last_token", "token_mean", or "both" concatenated.
        levels: Reads the output of these layers, 0 being the embedding and -1 the last; null takes all.
        average: Averages over the layers instead of concatenating them.
        final_norm: Reads the last layer after the model's final normalisation.
        features_dir: Folder that keeps the hidden states; null is a folder in the store.
        batch_size: Questions in an optimiser step; null takes all at once, as "lbfgs" needs.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter that the responses were sampled with.
        engine: How transformers reads the hidden states: dtype and batch size.
        seed: Seeds the order of questions, the choice of those set aside, and the noise on the targets.
    """

    linked_arguments: ClassVar[tuple[str, ...]] = ("base_model", "revision")

    base_model: str
    store_dir: str
    _: KW_ONLY
    train_split: str = TRAIN
    validation_split: str | None = None
    validation_share: float = 0.1
    test_split: str = TEST
    target: tables.Target = "agreeing_pairs"
    target_draws: int | None = None
    features: Pooling = "both"
    levels: list[int] | None = None
    average: bool = True
    final_norm: bool = True
    features_dir: str | None = None
    batch_size: int | None = 32
    revision: str | None = None
    adapter: str | None = None
    engine: EngineSettings = EngineSettings()
    seed: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        check_at_least(1, batch_size=self.batch_size, target_draws=self.target_draws)
        check_at_least(0, seed=self.seed)
        check_literals(self)
        check_gives_hidden_states(self.engine)
        if not 0.0 < self.validation_share <= 0.5:
            raise InputError(f"`validation_share` must lie in (0, 0.5], but got {self.validation_share}.")
        self.splits = {TRAIN: self.train_split, VALIDATION: self.validation_split, TEST: self.test_split}
        levels = None if self.levels is None else tuple(self.levels)
        self.read_levels = LevelSettings(levels, self.average, self.final_norm)
        self.basis: ProbeBasis | None = None
        self._pools: dict[str, tables.CapabilityPool] = {}
        self._rows: dict[str, ProbeRows] = {}

    @property
    def sources(self) -> Mapping[str, Sequence[Any]]:
        """Nothing: only the store knows the questions."""
        return {TRAIN: (), VALIDATION: (), TEST: ()}

    def training_settings(self) -> dict[str, Any]:
        train = self._rows.get(TRAIN)
        questions = [] if train is None else [entry.question for entry in train.entries]
        return {
            "target": self.target, "target_draws": self.target_draws, "features": self.features,
            **asdict(self.read_levels), "batch_size": self.batch_size, "seed": self.seed, "splits": self.splits,
            "validation_share": None if self.splits[VALIDATION] is not None else self.validation_share,
            "questions": sorted((question.id, question_digest(question)) for question in questions),
        }  # fmt: skip

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        """No hidden state is read for it."""
        self._load(self._roles(verb))
        counts = tuple(
            QuestionCount(role, task, sum(entry.question.task == task for entry in pool.pool.entries))
            for role, pool in self._pools.items()
            for task in sorted({entry.question.task for entry in pool.pool.entries})
        )
        if verb != "fit":
            return Plan(questions=counts)
        rows = len(self._training_numbers()[0])
        size = min(self.batch_size or rows, rows)
        steps, epochs = planned_steps(trainer, limited_batches(-(-rows // size), trainer.limit_train_batches))
        return Plan(questions=counts, training=(Training(steps, size, epochs),))

    def setup(self, stage: str) -> None:
        roles = self._roles(stage)
        self._load(roles)
        missing = [role for role in roles if role not in self._rows]
        if not missing:
            return
        read = [role for role in missing if role in self._pools]
        first = self._pools[read[0]]
        named = ModelSettings(self.base_model, None, self.engine.of(revision=self.revision, adapter=self.adapter))
        with PromptModel(named, first.fingerprint) as model:
            origin = feature_origin(model, self.read_levels)
            folder = open_features(model, self.read_levels, store=Path(self.store_dir), given=self.features_dir)
            for role in read:
                states = read_features(model, self._pools[role].questions, folder, self.read_levels)
                entries = self._pools[role].pool.entries
                table = tables.question_table(entries)
                target = table.targets(self.target)
                self._rows[role] = ProbeRows(entries, design(states, self.features), table, target)
        if TRAIN in roles:
            self._prepare(origin, first)

    def _prepare(self, origin: Mapping[str, Any], pool: tables.CapabilityPool) -> None:
        """Set the validation questions aside where no split has them, and standardise by the training questions."""
        whole = self._rows[TRAIN]
        if VALIDATION not in self._rows:
            train, held_out = self._training_numbers()
            self._rows |= {TRAIN: whole.select(train), VALIDATION: whole.select(held_out)}
        train_rows = self._rows[TRAIN]
        if self.target_draws is not None:  # what is validated on has no noise that can be spared
            noisy = train_rows.table.targets(self.target, draws=self.target_draws, seed=self.seed)
            self._rows[TRAIN] = train_rows = replace(train_rows, target=noisy)
        self.basis = ProbeBasis.of(
            train_rows.features, train_rows.entries, target=self.target, pooling=self.features, origin=origin,
            sampling=pool.sampling, draws=self.target_draws,
        )  # fmt: skip
        rank_zero_info(
            f"{len(train_rows.entries):,} questions to train on, {len(self._rows[VALIDATION].entries):,} to validate "
            f"on, {train_rows.features.shape[1]:,} features."
        )

    def _roles(self, stage: str) -> tuple[str, ...]:
        """Return the splits that a stage reads; without a validation split, it takes some training questions."""
        roles = splits_of(stage, TEST)
        return (TRAIN, VALIDATION) if VALIDATION in roles and self.splits[VALIDATION] is None else roles

    def _load(self, roles: Sequence[str]) -> None:
        for role in roles:
            split = self.splits[role]
            if role in self._pools or split is None:
                continue
            if not Path(self.store_dir).is_dir():
                raise InputError(f"There is no store {self.store_dir} (`store_dir`). `selfcal generate` fills one.")
            pool = tables.load_capability_pool(self.store_dir, split=split, task=None)
            table = tables.question_table(pool.pool.entries)
            if role == TRAIN:
                checked_targets(table, self.target, draws=self.target_draws, seed=self.seed)
            else:
                table.targets(self.target)
            self._pools[role] = pool
        if TRAIN in self._pools:
            for role in (VALIDATION, TEST):
                check_disjoint(
                    self._pools[TRAIN].questions, self._pools[role].questions if role in self._pools else (),
                    names=("`train_split`", f"`{role}_split`"), way_out="Name two splits.",
                )  # fmt: skip

    def _training_numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the training split that are trained on, and those that are set aside."""
        questions = self._pools[TRAIN].questions
        if self.splits[VALIDATION] is not None:
            return np.arange(len(questions)), np.arange(0)
        aside = set_aside(questions, self.validation_share, seed=self.seed)
        return np.flatnonzero(~aside), np.flatnonzero(aside)

    def train_dataloader(self) -> LateDataLoader:
        dataset = self._dataset(TRAIN)
        size = self.batch_size or len(dataset)
        return _loader(dataset, EpochOrder(len(dataset), size, seed=self.seed, trainer=self.trainer))

    def val_dataloader(self) -> LateDataLoader:
        return self._whole(VALIDATION)

    def test_dataloader(self) -> LateDataLoader:
        return self._whole(TEST)

    def _whole(self, role: str) -> LateDataLoader:
        dataset = self._dataset(role)
        return _loader(dataset, [list(range(len(dataset)))])

    def _dataset(self, role: str) -> TensorDataset:
        module: Any = self.trainer.lightning_module if self.trainer is not None else None
        basis: ProbeBasis | None = self.basis or (None if module is None else module.basis)
        if basis is None:
            raise InputError(f"The split {role!r} needs a trained probe: give `--ckpt_path`.")
        return self._rows[role].dataset(basis.centre, basis.scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what the order of questions depends on; the trainer counts the position."""
        return {"batch_size": self.batch_size, "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse another order where training continues."""
        changed = [f"`{name}` was {old!r}" for name, old in state_dict.items() if old != self.state_dict()[name]]
        if changed and self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING:
            raise InputError(f"The checkpoint has another order of questions: {'; '.join(changed)}. Restore it.")


def set_aside(questions: Sequence[Question], share: float, *, seed: int) -> np.ndarray:
    """Return which questions are set aside for validation, a mask [Q]: one at least, all of one content together."""
    leaders = leading_ids(questions)
    order = sorted(set(leaders.values()), key=lambda name: question_hash(f"{seed}/{name}"))
    chosen = set(order[: max(1, round(share * len(order)))])
    return np.array([leaders[question.id] in chosen for question in questions])
