"""Order of rows: a stop at any batch, several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.ssc_pools import FileRecorder, Pool, Recorder, fit, read_ranks

from selfcal_lightning.datamodules.questions import QuestionSource

SHALLOW = True


@pytest.mark.parametrize(
    ("accumulate", "num_workers", "ask_for_schedule", "settings"),
    [
        (1, 0, True, {"limit_val_batches": 0}),
        (3, 0, True, {"val_check_interval": 4}),
        (2, 2, True, {"limit_val_batches": 0}),
        (2, 0, False, {"reload_dataloaders_every_n_epochs": 1}),
        (2, 0, True, {"limit_train_batches": 7, "limit_val_batches": 0}),
    ],
)
def test_a_stopped_run_goes_on_with_the_very_next_rows(
    pool: Pool,
    store_dir: str,
    tmp_path: Path,
    accumulate: int,
    num_workers: int,
    ask_for_schedule: bool,
    settings: dict[str, Any],
) -> None:
    def run(ckpt_path: str | None = None, **more: Any) -> list[Any]:
        data = pool.data(store_dir, num_workers=num_workers)
        recorder = Recorder(ask_for_schedule)
        return fit(
            data, module=recorder, ckpt_path=ckpt_path, accumulate_grad_batches=accumulate, **settings, **more
        ).seen

    keep_all = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    unbroken = run(callbacks=[keep_all], enable_checkpointing=True)
    steps = unbroken[-1][0] + 1
    # In the first epoch, at its very end, and in the second one.
    for stop in (1, steps // 2, steps // 2 + 1):
        rest = run(ckpt_path=str(tmp_path / f"step={stop}.ckpt"))
        assert rest == [entry for entry in unbroken if entry[0] >= stop], f"stopped after step {stop}"


@pytest.mark.parametrize("with_validation", [True, False])
def test_checkpoints_of_an_epochs_end_and_runs_counted_in_steps(
    pool: Pool, store_dir: str, tmp_path: Path, with_validation: bool
) -> None:
    limits = {} if with_validation else {"limit_val_batches": 0}
    for name, settings in {"epochs": {}, "steps": {"max_epochs": -1, "max_steps": 22}}.items():
        ends = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        unbroken = fit(pool.data(store_dir), callbacks=[ends], enable_checkpointing=True, **settings, **limits).seen
        rest = fit(pool.data(store_dir), ckpt_path=str(tmp_path / name / "epoch=0.ckpt"), **settings, **limits).seen
        assert rest == [entry for entry in unbroken if entry[0] >= 11], name
        assert len(unbroken) == 22


def test_changed_rows_or_settings_stop_a_resumed_epoch(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(pool.data(store_dir), callbacks=[checkpoint], enable_checkpointing=True, max_epochs=1)
    with pytest.raises(ValueError, match=r"`rows_per_step` was 2 and is 4.*epoch's end"):
        fit(pool.data(store_dir, batch_size=4), ckpt_path=str(tmp_path / "step=2.ckpt"))
    changes = {"seed": (0, 1), "max_repeats": (4, 1), "num_buckets": (20, 5), "exact": (False, True)}
    for name, (old, new) in changes.items():
        with pytest.raises(ValueError, match=f"`{name}` was {old} and is {new}"):
            fit(pool.data(store_dir, **{name: new}), ckpt_path=str(tmp_path / "step=2.ckpt"))


@pytest.mark.timeout(120)
def test_two_processes_take_the_steps_of_one(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    results = {}
    for name, devices, accumulate in (("one", 1, 4), ("two", 2, 2)):
        (tmp_path / name).mkdir()
        parallel = {"devices": devices, "strategy": "ddp_fork"} if devices > 1 else {"devices": 1}
        fit(
            pool.data(store_dir, validation=[QuestionSource("word_problems", split="validation", limit=3)]),
            module=FileRecorder(tmp_path / name),
            accumulate_grad_batches=accumulate,
            **parallel,
        )
        results[name] = read_ranks(tmp_path / name)
    assert [len(ranks) for ranks in results.values()] == [1, 2]
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


@pytest.mark.timeout(120)
def test_a_process_without_validation_questions_keeps_up(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    fit(
        pool.data(store_dir, validation=[QuestionSource("word_problems", split="validation", limit=1)]),
        module=FileRecorder(tmp_path),
        max_epochs=1,
        devices=2,
        strategy="ddp_fork",
    )
    first, second = read_ranks(tmp_path)
    assert len(first["validated"]) == 8
    assert second["validated"] == []


@pytest.mark.timeout(120)
def test_two_processes_go_on_with_the_very_next_rows(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    parallel = {"devices": 2, "strategy": "ddp_fork", "accumulate_grad_batches": 2}
    for name in ("whole", "rest"):
        (tmp_path / name).mkdir()
    keep_all = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(
        pool.data(store_dir),
        module=FileRecorder(tmp_path / "whole"),
        callbacks=[keep_all],
        enable_checkpointing=True,
        **parallel,
    )
    fit(
        pool.data(store_dir),
        module=FileRecorder(tmp_path / "rest"),
        ckpt_path=str(tmp_path / "step=2.ckpt"),
        **parallel,
    )
    for whole, rest in zip(read_ranks(tmp_path / "whole"), read_ranks(tmp_path / "rest"), strict=True):
        assert rest["seen"] == [entry for entry in whole["seen"] if entry[0] >= 2]
