import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.module_batches import largest_difference, trained_state
from support.processes import run_processes
from support.ssc_pools import Pool, Recorder, fit, random_samples
from torch import Tensor

from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc.stored_rows import pool_rounds, read_rounds
from selfcal_lightning.datamodules.ssc.tuples import TargetRecipe, build_table
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.records import Question
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

SHALLOW = True
Size = tuple[int, int]  # rows of a micro-batch, and how many make a step


def keeping(folder: Path, each: str = "step") -> dict[str, Any]:
    """Return settings of a trainer that keeps a checkpoint of each step, or epoch."""
    when: dict[str, Any] = {"every_n_train_steps": 1} if each == "step" else {"save_on_train_epoch_end": True}
    kept = ModelCheckpoint(folder, filename=f"{{{each}}}", save_top_k=-1, **when)
    return {"callbacks": [kept], "enable_checkpointing": True}


@pytest.mark.parametrize(
    ("accumulate", "workers", "schedule", "settings"),
    [
        (1, 0, True, {"limit_val_batches": 0}),
        (3, 0, True, {"val_check_interval": 4}),
        (2, 2, True, {"limit_val_batches": 0}),
        (2, 0, False, {"reload_dataloaders_every_n_epochs": 1}),
        (2, 0, True, {"limit_train_batches": 7, "limit_val_batches": 0}),
    ],
)
def test_a_stopped_run_goes_on_with_the_very_next_rows(
    pool: Pool, store_dir: str, tmp_path: Path, accumulate: int, workers: int, schedule: bool, settings: dict[str, Any]
) -> None:
    def run(ckpt_path: str | None = None, **more: Any) -> list[Any]:
        more |= {"accumulate_grad_batches": accumulate, "module": Recorder(schedule), **settings}
        return fit(pool.data(store_dir, num_workers=workers), ckpt_path=ckpt_path, **more).seen

    unbroken = run(**keeping(tmp_path))
    steps = unbroken[-1][0] + 1
    # In the first epoch, at its very end, and in the second one.
    for stop in (1, steps // 2, steps // 2 + 1):
        rest = run(ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
        assert rest == [entry for entry in unbroken if entry[0] >= stop], f"stopped after step {stop}"


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 33}])
@pytest.mark.parametrize("validated", [0, 1])
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((4, 1), (2, 2))])
def test_other_micro_batches_take_the_steps_of_the_next_epoch(
    pool: Pool, store_dir: str, tmp_path: Path, before: Size, after: Size, validated: int, length: dict[str, int]
) -> None:
    def steps(size: Size, **more: Any) -> list[list[int]]:
        data = pool.data(store_dir, batch_size=size[0], total_tuples=44)
        seen = fit(data, accumulate_grad_batches=size[1], limit_val_batches=validated, **length, **more).seen
        return [sorted(row for step, _, rows, *_ in seen if step == n for row in rows) for n in range(33)]

    unbroken = steps(before, **keeping(tmp_path, "epoch"))
    for epoch, done in ((0, 11), (1, 22)):
        assert steps(after, ckpt_path=str(tmp_path / f"epoch={epoch}.ckpt"))[done:] == unbroken[done:]


class TrainedRecorder(SelfCalibrationModule):
    """Remembers the rows that its adapter was trained on, and saves a checkpoint after every micro-batch."""

    def __init__(self, model: str, folder: Path) -> None:
        super().__init__(model, lora=LoraSettings(r=4), lr=1e-2)
        self.folder, self.seen = folder, []

    def training_step(self, batch: SSCBatch, batch_idx: int) -> Tensor:
        self.seen.append((self.global_step, batch_idx, batch.row.tolist()))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.save_checkpoint(self.folder / f"{len(self.seen)}.ckpt")

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.trainer.save_checkpoint(self.folder / f"validated-{len(self.seen)}.ckpt")


@pytest.mark.slow
def test_a_run_stopped_inside_a_step_takes_all_of_it(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    def run(folder: Path, ckpt_path: str | None = None) -> TrainedRecorder:
        accumulated = {"accumulate_grad_batches": 3, "val_check_interval": 2, "limit_val_batches": 1}
        module = TrainedRecorder(pool.model, folder)
        fit(pool.data(store_dir, total_tuples=10), module=module, ckpt_path=ckpt_path, **accumulated)
        return module

    unbroken = run(tmp_path)
    # Inside the first step, between two, and in the second epoch, whose steps begin with the micro-batches 6 and 9.
    for stop, step in {"1": 0, "validated-2": 0, "3": 1, "validated-4": 1, "7": 2, "validated-8": 2, "11": 3}.items():
        rest = run(tmp_path / "resumed", str(tmp_path / f"{stop}.ckpt"))
        assert rest.seen == [entry for entry in unbroken.seen if entry[0] >= step], stop
        assert largest_difference(trained_state(rest), trained_state(unbroken)) == 0.0, stop


@pytest.mark.parametrize("length", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 15}])
@pytest.mark.parametrize(("before", "after"), [((4, 1), (2, 2)), ((2, 2), (4, 1))])
def test_an_epochs_last_batch_is_its_end_for_other_micro_batches_too(
    pool: Pool, store_dir: str, tmp_path: Path, before: Size, after: Size, length: dict[str, int]
) -> None:
    def run(size: Size, folder: Path, **more: Any) -> list[list[int]]:
        module = TrainedRecorder(pool.model, folder)
        data = pool.data(store_dir, batch_size=size[0], total_tuples=20)
        fit(data, module=module, accumulate_grad_batches=size[1], limit_val_batches=1, **length, **more)
        return [sorted(row for step, _, rows in module.seen if step == n for row in rows) for n in range(15)]

    unbroken = run(before, tmp_path)
    last = 5 * before[1]
    for stop, step in {f"{last}": 5, f"validated-{last}": 5, f"{2 * last}": 10, f"validated-{2 * last}": 10}.items():
        rest = run(after, tmp_path / "resumed", ckpt_path=str(tmp_path / f"{stop}.ckpt"))
        assert rest[step:] == unbroken[step:], stop
        assert not any(rest[:step]), stop


def test_changed_rows_or_settings_stop_a_resumed_epoch(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    fit(pool.data(store_dir), **keeping(tmp_path), max_epochs=1)
    with pytest.raises(ValueError, match=r"`rows_per_step` was 2 and is 4.*epoch's end"):
        fit(pool.data(store_dir, batch_size=4), ckpt_path=str(tmp_path / "step=2.ckpt"))
    changes = {"seed": (0, 1), "max_repeats": (4, 1), "num_buckets": (20, 5), "exact": (False, True)}
    for name, (old, new) in changes.items():
        with pytest.raises(ValueError, match=f"`{name}` was {old} and is {new}"):
            fit(pool.data(store_dir, **{name: new}), ckpt_path=str(tmp_path / "step=2.ckpt"))


def seen_by(pool: Pool, store_dir: str, world: int, **settings: Any) -> dict[str, Any]:
    """Return the rows that this process trained on and validated; four rows an optimiser step."""
    sources = [QuestionSource("word_problems", split="validation", limit=3)]
    data, accumulate = pool.data(store_dir, validation=sources), 4 // world
    recorder = fit(data, accumulate_grad_batches=accumulate, devices=world, **settings)
    return {"seen": recorder.seen, "validated": recorder.validated}


@pytest.mark.timeout(120)
def test_two_processes_take_the_steps_of_one(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    results = {"one": [seen_by(pool, store_dir, 1)], "two": run_processes(seen_by, tmp_path, pool, store_dir, 2)}
    steps = {
        name: [
            (
                sorted(row for rank in ranks for step, _, rows, *_ in rank["seen"] if step == number for row in rows),
                {tuple(totals) for rank in ranks for step, _, _, *totals in rank["seen"] if step == number},
            )
            for number in range(6)
        ]
        for name, ranks in results.items()
    }
    assert steps["one"] == steps["two"]
    validated = {name: [point for rank in ranks for point in rank["validated"]] for name, ranks in results.items()}
    assert sorted(validated["one"]) == sorted(validated["two"])
    questions = [{question for question, _ in rank["validated"]} for rank in results["two"]]
    assert not questions[0] & questions[1]


def whole_and_rest(pool: Pool, store_dir: str, folder: Path) -> list[dict[str, Any]]:
    whole = seen_by(pool, store_dir, 2, **keeping(folder))
    return [whole, seen_by(pool, store_dir, 2, ckpt_path=str(folder / "step=2.ckpt"))]


@pytest.mark.timeout(120)
def test_two_processes_go_on_with_the_very_next_rows(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    for whole, rest in run_processes(whole_and_rest, tmp_path, pool, store_dir, tmp_path):
        assert rest["seen"] == [entry for entry in whole["seen"] if entry[0] >= 2]


RELOAD = {"reload_dataloaders_every_n_epochs": 1, "limit_val_batches": 0}


@pytest.fixture(scope="module")
def rounds_dir(pool: Pool) -> str:
    """Three rounds, all with other targets, since every later one has fewer readable answers."""
    for round in range(3):

        def make(question: Question, rng: np.random.Generator, round: int = round) -> list[dict[str, Any]]:
            rng = np.random.default_rng([round, sum(question.id.encode())])
            return random_samples(question, rng)

        path = pool.write("rounds", make, round=round)
    return path


def rounds_of(loader: Any) -> tuple[int, ...]:
    return tuple(sorted({int(re.search(r"round-(\d+)", file)[1]) for file in loader.dataset.table.index.files}))


class RoundRecorder(Recorder):
    """Remembers of which rounds the rows of every epoch's loader are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rounds: list[tuple[int, ...]] = []

    def on_train_epoch_start(self) -> None:
        self.rounds.append(rounds_of(self.trainer.train_dataloader))


def test_every_epoch_reads_its_round(pool: Pool, rounds_dir: str) -> None:
    for every, rule, expected in (
        (1, "replace", [(0,), (1,), (2,)]),
        (1, "mix", [(0,), (0, 1), (0, 1, 2)]),
        (2, "replace", [(0,), (0,), (1,), (1,), (2,)]),
        (None, "mix", [(0,), (0,)]),
    ):
        data, recorder = pool.data(rounds_dir, regenerate_every_n_epochs=every, round_rule=rule), RoundRecorder()
        fit(data, module=recorder, max_epochs=len(expected), **RELOAD)
        assert recorder.rounds == expected


def test_a_fixed_round_is_mixed_with_those_before_it(pool: Pool, rounds_dir: str) -> None:
    for rule, rounds in {"replace": (1,), "mix": (0, 1)}.items():
        assert rounds_of(pool.data(rounds_dir, round=1, round_rule=rule).train_dataloader()) == rounds


def test_mixed_targets_count_the_samples_of_all_rounds_by_hand(pool: Pool) -> None:
    rounds = [[("7", 0.75), ("8", 0.25), (None, 0.5)], [("9", 0.5), ("7", 0.5), ("7", 0.25)]]
    for round, answers in enumerate(rounds):
        samples = [
            {"text": f"{round}", "answer": a, "correct": a != "8", "yes_mass": p, "no_mass": 1 - p} for a, p in answers
        ]
        path = pool.write("mixed", lambda question, rng, samples=samples: samples, round=round)
    data = pool.data(path, num_samples=3)
    store, collator, questions = SampleStore(path), data.collator(), data.questions("train")
    settings = {"recipes": [TargetRecipe("ssc")], "p_true": "normalised", "drop_none": True}
    targets = {}
    for rule, rounds in (("mix", (0, 1)), ("replace", (1,))):
        index = read_rounds(store, split="train", rounds=rounds, questions=questions, chat=collator.chat)
        targets[rule] = build_table(store, index, collator, **settings)[0].target
    # Confidences: 7 has .75 + .5 + .25 = 1.5, 8 has .25, 9 has .5; all together 2.25.
    nan = float("nan")
    mixed = [1.5 / 2.25, 0.25 / 2.25, nan, 0.5 / 2.25, 1.5 / 2.25, 1.5 / 2.25]
    assert targets["mix"] == pytest.approx(mixed * 12, nan_ok=True)
    assert targets["replace"] == pytest.approx([0.5 / 1.25, 0.75 / 1.25, 0.75 / 1.25] * 12)


def test_pooled_rows_stand_question_by_question_and_equal_answers_have_one_name(pool: Pool) -> None:
    for round, answers in enumerate((["1/2", "8", None], ["9", "0.5", "0.5"])):
        same = {"correct": None, "yes_mass": 0.5, "no_mass": 0.5}
        samples = [{"text": f"{round}{place}", "answer": answer, **same} for place, answer in enumerate(answers)]
        path = pool.write("named", lambda question, rng, samples=samples: samples, round=round)
    store = SampleStore(path)
    indexes = [store.index(split="train", round=round) for round in range(2)]
    numbers = [replace(index, task=np.full(len(index), "local_number", dtype=object)) for index in indexes]
    mixed = pool_rounds(numbers)
    assert len(mixed) == 12 * 6
    assert mixed.question_id.tolist() == sorted(mixed.question_id)
    assert mixed.question_index.tolist() == [question for question in range(12) for _ in range(6)]
    assert mixed.sample_index.tolist() == list(range(6)) * 12
    assert mixed.answer[-6:].tolist() == ["1/2", "8", None, "9", "1/2", "1/2"]
    texts = [row.sample.text for row in store.read_rows(mixed.locate(range(6, 12)))]
    assert texts == ["00", "01", "02", "10", "11", "12"]


@pytest.mark.slow
@pytest.mark.parametrize("ask_for_schedule", [True, False])
@pytest.mark.parametrize(("every", "rule"), [(1, "replace"), (2, "mix")])
def test_a_run_resumed_in_a_later_round_goes_on_with_the_very_next_rows(
    pool: Pool, rounds_dir: str, tmp_path: Path, every: int, rule: str, ask_for_schedule: bool
) -> None:
    def run(ckpt_path: str | None = None, **more: Any) -> RoundRecorder:
        data = pool.data(rounds_dir, regenerate_every_n_epochs=every, round_rule=rule, total_tuples=8)
        recorder = RoundRecorder(ask_for_schedule=ask_for_schedule)
        fit(data, module=recorder, ckpt_path=ckpt_path, max_epochs=3 * every, **RELOAD, **more)
        return recorder

    unbroken = run(**keeping(tmp_path)).seen
    steps = unbroken[-1][0] + 1
    assert steps == 4 * 3 * every
    # In the first round, right before and after the second one begins, in the middle of the last one.
    for stop in (2, 4 * every, 4 * every + 1, steps - 2):
        rest = run(ckpt_path=str(tmp_path / f"step={stop}.ckpt")).seen
        assert rest == [entry for entry in unbroken if entry[0] >= stop], f"stopped after step {stop}"


def test_a_loader_of_another_round_refuses_to_draw(pool: Pool, rounds_dir: str) -> None:
    sampler = pool.data(rounds_dir, regenerate_every_n_epochs=2).train_dataloader().batch_sampler
    for epoch, round in ((2, 1), (4, 2)):
        with pytest.raises(RuntimeError, match=f"Epoch {epoch} is trained on round {round}"):
            sampler.draw(epoch)


def test_missing_rounds_are_named_and_loaders_built_anew(pool: Pool, rounds_dir: str) -> None:
    data = pool.data(pool.write("only_round_0"), regenerate_every_n_epochs=1)
    with pytest.raises(ValueError, match=r"samples of round 1 .*SSCGeneration"):
        fit(data, **RELOAD)
    for n in (0, 2):
        with pytest.raises(ValueError, match=rf"reload_dataloaders_every_n_epochs: 1` .* with {n}, training"):
            fit(pool.data(rounds_dir, regenerate_every_n_epochs=1), reload_dataloaders_every_n_epochs=n)
