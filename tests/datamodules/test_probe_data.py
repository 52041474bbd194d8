"""The data module of probes: who is trained on and who is set aside, noise on targets, the order, refusals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.capability_pools import SPLITS, capability_store, give_states

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.probe import EpochOrder, ProbeDataModule, set_aside
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.records import Message, Question


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = capability_store(tmp_path_factory.mktemp("probe_data") / "store")
    give_states(folder)
    return str(folder)


def ready(store: str, stage: str = "fit", **settings: Any) -> ProbeDataModule:
    data = ProbeDataModule("bundled", store, **settings)
    data.setup(stage)
    return data


def test_features_are_standardised_by_the_training_questions(store: str) -> None:
    data = ready(store, batch_size=None)
    (batch,) = data.train_dataloader()
    assert batch.features.shape == (36, 8)
    np.testing.assert_allclose(batch.features.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(batch.features.std(0, correction=0), 1.0, atol=1e-5)
    (held_out,) = data.val_dataloader()
    assert len(held_out.target) == 4
    assert ready(store, features="last_token").basis.centre.shape == (4,)


def test_a_split_validates_or_a_share_is_set_aside(store: str) -> None:
    named = ready(store, validation_split="calibration")
    assert [len(named._rows[role].entries) for role in ("train", "validation")] == [40, 24]
    aside = ready(store, validation_share=0.25)
    ids = [{entry.question.id for entry in aside._rows[role].entries} for role in ("train", "validation")]
    assert [len(one) for one in ids] == [30, 10]
    assert not ids[0] & ids[1]
    assert aside.basis.fitted_on.num_questions == 30, "those that are set aside are not fitted on"
    again = ready(store, validation_share=0.25)
    assert {entry.question.id for entry in again._rows["validation"].entries} == ids[1]
    (batch,) = ready(store, "test").__dict__["_rows"].values()
    assert len(batch.entries) == SPLITS["test"][1]


def test_questions_of_one_content_stay_together() -> None:
    same = (Message("user", "1 + 1?"),)
    questions = [Question(f"q{n}", "t", same if n < 4 else (Message("user", f"{n} + 1?"),)) for n in range(12)]
    for seed in range(20):
        aside = set_aside(questions, 0.3, seed=seed)
        assert len(set(aside[:4].tolist())) == 1
        assert aside.any()


def test_noise_is_that_of_so_few_responses(store: str) -> None:
    plain = ready(store, target="label")._rows["train"]
    single = ready(store, target="label", target_draws=1)
    few = ready(store, target="label", target_draws=3)._rows["train"].target
    verdicts = single._rows["train"].target
    assert set(verdicts.tolist()) == {0.0, 1.0}
    assert set((few * 3).round(9).tolist()) <= {0.0, 1.0, 2.0, 3.0}
    sure = (plain.target == 0.0) | (plain.target == 1.0)
    assert (verdicts == plain.target)[sure].all(), "where all responses agree there is no noise"
    assert single.basis.draws == 1
    held_out = single._rows["validation"].target
    assert not set(held_out.tolist()) <= {0.0, 1.0}, "what is validated on has none"
    np.testing.assert_array_equal(ready(store, target="label", target_draws=1)._rows["train"].target, verdicts)


def _trainer(epoch: int, ready: int) -> Any:
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    epochs = SimpleNamespace(current=SimpleNamespace(ready=epoch + 1, processed=epoch))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), epoch_progress=epochs)
    return SimpleNamespace(fit_loop=loop, limit_train_batches=1.0)


def test_an_order_goes_on_where_it_stopped() -> None:
    whole = list(EpochOrder(10, 4, seed=3, trainer=_trainer(2, 0)))
    assert sorted(row for batch in whole for row in batch) == list(range(10))
    assert [len(batch) for batch in whole] == [4, 4, 2]
    assert list(EpochOrder(10, 4, seed=3, trainer=_trainer(2, 1))) == whole[1:]
    assert list(EpochOrder(10, 4, seed=3, trainer=_trainer(1, 0))) != whole
    assert list(EpochOrder(10, 4, seed=4, trainer=_trainer(2, 0))) != whole


def test_the_plan_reads_no_states(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcal_lightning.datamodules.probe.read_features", None)
    data = ProbeDataModule("bundled", store, validation_split="calibration")
    for max_epochs, max_steps, limit, steps in ((3, -1, 1.0, 6), (-1, 1000, 1.0, 1000), (3, 4, 1.0, 4), (3, -1, 1, 3)):
        trainer = SimpleNamespace(max_epochs=max_epochs, max_steps=max_steps, limit_train_batches=limit)
        plan = data.plan_run("fit", trainer, None, data)
        assert [(one.split, one.number) for one in plan.questions] == [("train", 40), ("validation", 24)]
        assert (plan.training[0].steps, plan.training[0].rows_per_step) == (steps, 32)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"target": "labels"}, "`target` to be one of .*label.*, but got 'labels'"),
        ({"features": "first"}, "`features` to be one of .*, but got 'first'"),
        ({"validation_share": 0.6}, r"`validation_share` must lie in \(0, 0.5\], but got 0.6"),
        ({"batch_size": 0}, "`batch_size` to be at least 1, but got 0"),
        ({"target_draws": 0}, "`target_draws` to be at least 1, but got 0"),
        ({"target_draws": -1}, "`target_draws` to be at least 1"),
        ({"engine": EngineSettings("vllm")}, "to be transformers where hidden states are read"),
        ({"validation_split": "train"}, "`train_split` and `validation_split` to share no question"),
        ({"train_split": "nothing"}, "nothing"),
    ],
)
def test_what_cannot_be(store: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ready(store, **settings)


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no store"):
        ready(str(tmp_path / "none"))
