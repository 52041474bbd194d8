"""What an epoch holds for an activated adapter: every response about once, and none that trains nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.module_batches import NO_DROPOUT, module_of, quiet_trainer
from support.ssc_pools import Pool

from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule

ACTIVATED = replace(NO_DROPOUT, activated=True)
PLAIN = {"total_tuples": None, "generation_ratio": None, "num_buckets": None}


def connected(data: SSCDataModule, *, activated: bool) -> SSCDataModule:
    """Return the data module as a trainer sees it that trains such an adapter."""
    trainer = quiet_trainer()
    trainer.strategy.connect(module_of(data.base_model, lora=replace(NO_DROPOUT, activated=activated)))
    data.trainer = trainer
    return data


@pytest.mark.parametrize("named", [True, False])
def test_every_response_is_drawn_about_once(named: bool, pool: Pool, store_dir: str) -> None:
    sources = {} if named else {"train": None, "validation": None}
    data = connected(pool.data(store_dir, **PLAIN, **sources), activated=True)
    assert data.steps_per_epoch * data.rows_per_step == 12 * 8
    loader = data.train_dataloader()
    draw = loader.batch_sampler.draw(0)
    rows = np.bincount(draw.rows, minlength=len(loader.dataset.table))
    # An unreadable response has no target: its place goes to another one.
    assert len(rows) < 12 * 8 == rows.sum()
    assert (rows.min(), rows.max()) == (1, 2)
    assert draw.calibration_weight.all()
    assert not draw.generation_weight.any()
    batch = next(iter(loader))
    assert (batch.calibration_total, batch.generation_total) == (2.0, 0.0)


def test_joint_training_draws_as_ever(pool: Pool, store_dir: str) -> None:
    joint = connected(pool.data(store_dir, **PLAIN), activated=False).mixture({"word_problems": 1.0})
    alone = pool.data(store_dir, **PLAIN).mixture({"word_problems": 1.0})
    for mixture in (joint, alone):
        assert (mixture.total_tuples, mixture.generation_ratio, mixture.num_buckets) == (100_000, 0.7, 20)
        assert not mixture.exact


def test_what_is_stated_is_kept(pool: Pool, store_dir: str) -> None:
    data = connected(pool.data(store_dir, total_tuples=20, generation_ratio=0.0, num_buckets=20), activated=True)
    mixture = data.mixture({"word_problems": 1.0})
    assert (mixture.total_tuples, mixture.generation_ratio, mixture.num_buckets) == (20, 0.0, 20)
    assert data.training_settings()["num_buckets"] == 20


def test_the_target_follows_from_what_is_trained(pool: Pool, store_dir: str) -> None:
    joint, activated = (connected(pool.data(store_dir), activated=awake) for awake in (False, True))
    assert (joint.row_target, activated.row_target) == ("ssc", "leave_one_out_ssc")
    assert pool.data(store_dir).row_target == "ssc"
    assert connected(pool.data(store_dir, target="ssc"), activated=True).row_target == "ssc"
    assert activated.training_settings()["target"] == "leave_one_out_ssc"
    (recipe,) = activated.recipes()
    assert recipe.target == "leave_one_out_ssc"


def test_generation_samples_are_refused_before_any_is_drawn(pool: Pool, tmp_path: Path) -> None:
    data = pool.data(str(tmp_path / "no store"), generation_ratio=0.3)
    with pytest.raises(ValueError, match=r"`generation_ratio` must be 0 with an activated adapter.*but got 0\.3"):
        quiet_trainer().fit(module_of(pool.model, lora=ACTIVATED), datamodule=data)
    connected(data, activated=False).setup("fit")
    connected(data, activated=True).setup("validate")
