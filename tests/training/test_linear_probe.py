from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from support.capability_pools import SPLITS, capability_store, chance, give_states
from support.module_batches import quiet_trainer
from support.probe_plugin import write_configuration
from support.training_runs import trainer_of

from selfcal_lightning.capability.probe import WEIGHTS, load_probe
from selfcal_lightning.capability.probe_module import LinearProbeModule
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.cli import run
from selfcal_lightning.commands.capability import run_score_questions
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.datamodules.probe import EpochOrder, ProbeDataModule, set_aside
from selfcal_lightning.metrics.discrimination import spearman
from selfcal_lightning.models.folders import check_files, read_manifest
from selfcal_lightning.records import Message, Question

MODULE = "selfcal_lightning.capability.probe_module.LinearProbeModule"
MLP = {"head": "mlp", "hidden_size": 6, "lr": 0.02}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = capability_store(tmp_path_factory.mktemp("probes") / "store")
    give_states(folder)
    return folder


def trained(
    store: Path, data: dict[str, Any] | None = None, *, epochs: int = 60, ckpt_path: str | None = None, **model: Any
) -> LinearProbeModule:
    module = LinearProbeModule("bundled", **{"lr": 0.03, **model})
    trainer = quiet_trainer(max_epochs=epochs, check_val_every_n_epoch=epochs, num_sanity_val_steps=0)
    trainer.fit(module, datamodule=ProbeDataModule("bundled", str(store), **(data or {})), ckpt_path=ckpt_path)
    module.logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return module


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss": "mse"},
        {"loss": "ranknet"},
        {"head": "mlp", "hidden_size": 8},
        {"head": "classifier", "num_classes": 5},
        {"optimizer": "sgd", "schedule": "constant", "warmup_steps": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "default",
)
def test_a_trained_probe_is_used_as_a_fitted_one(store: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    module = trained(store, {"target": "label", "validation_split": "calibration"}, epochs=15, **settings)
    assert module.logged["val/capability/Spearman"] > 0.3
    assert {"train/loss", "val/loss", "val/target/MSE", "val/capability/MSE"} <= set(module.logged)
    module.save_export(tmp_path)
    probe = load_probe(tmp_path)
    assert (probe.target, probe.pooling, probe.fitted_on.num_questions, probe.penalty) == ("label", "both", 40, None)
    assert probe.digest == module.probe.digest
    values = run_score_questions(probe=str(tmp_path), store_dir=str(store), split="test", name="own", overwrite=True)
    pool = load_capability_pool(str(store), split="test", task=None)
    assert (spearman(values, [chance(question) for question in pool.questions]) or 0.0) > 0.3
    assert all(value is not None and 0.0 <= value <= 1.0 for value in values)


def test_lbfgs_finds_the_least_of_its_function(store: Path) -> None:
    """All questions at once, so that the least is known from another optimiser."""
    data = ProbeDataModule("bundled", str(store), batch_size=None)
    settings = {"optimizer": "lbfgs", "lr": 1.0, "schedule": "constant", "weight_decay": 0.05}
    module = trained(store, {"batch_size": None}, epochs=10, **settings)
    data.setup("fit")
    columns = data._rows["train"].dataset(data.basis.centre, data.basis.scale).tensors
    x, y = (column.double().numpy() for column in columns[:2])

    def loss(w: np.ndarray) -> float:
        z = x @ w[1:] + w[0]
        return float(np.mean(np.logaddexp(0.0, z) - y * z) + 0.025 * (w[1:] ** 2).sum())

    best = minimize(loss, np.zeros(x.shape[1] + 1), method="BFGS", options={"gtol": 1e-8}).x
    np.testing.assert_allclose(module.probe.head.weights[0][0], best[1:], atol=2e-3)
    assert module.probe.head.biases[0][0] == pytest.approx(best[0], abs=2e-3)


def configuration(store: Path, folder: Path, *, stop_at: int | None = None) -> Path:
    """Write the settings of six epochs of three steps, a checkpoint after each step, and return the file."""
    export = {"output_dir": str(folder / "probe"), "monitor": "val/target/MSE"}
    data = ("selfcal_lightning.datamodules.probe.ProbeDataModule", {"store_dir": str(store), "batch_size": 16})
    callbacks = {"selfcal_lightning.callbacks.adapter_export.AdapterExport": export}
    model = (MODULE, {"base_model": "bundled", **MLP})
    return write_configuration(folder, model=model, data=data, callbacks=callbacks, stop_at=stop_at, max_epochs=6)


@pytest.fixture(scope="module")
def whole(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert run(["fit", "--config", str(configuration(store, folder))]) == 0
    return folder


def test_a_run_ends_in_a_folder_with_a_manifest(whole: Path) -> None:
    for name in ("probe", "probe-best"):
        check_files(whole / name)
        manifest = read_manifest(whole / name)
        assert (manifest["kind"], manifest["module"]) == ("module", MODULE)
        assert manifest["training"]["rows"]["target"] == "agreeing_pairs"
        assert len(load_probe(whole / name).head.weights) == 2
    assert manifest["metrics"]["val/target/MSE"] < 0.2
    checkpoint = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    assert set(checkpoint["state_dict"]) == {f"layers.{at}.{kind}" for at in (0, 1) for kind in ("weight", "bias")}


@pytest.mark.slow
def test_a_broken_run_ends_where_the_unbroken_one_does(store: Path, whole: Path, tmp_path: Path) -> None:
    assert run(["fit", "--config", str(configuration(store, tmp_path, stop_at=8))]) == 1
    assert not (tmp_path / "probe").exists()
    torch.rand(17)  # the next start finds other random numbers
    config = configuration(store, tmp_path)
    assert run(["fit", "--config", str(config), "--ckpt_path", f"{tmp_path}/checkpoints/last.ckpt"]) == 0
    for name in ("probe", "probe-best"):
        assert (tmp_path / name / WEIGHTS).read_bytes() == (whole / name / WEIGHTS).read_bytes()


def test_settings_must_agree(store: Path, whole: Path) -> None:
    last, model, rows = str(whole / "checkpoints" / "last.ckpt"), MLP, {"batch_size": 16}
    for changed, words in (
        ({"lr": 0.5}, "`lr` was 0.02 and is 0.5"),
        ({"target": "label"}, "`target` was 'agreeing_pairs' and is 'label'"),
        ({"validation_share": 0.3}, "36 questions were others"),
        ({"batch_size": 8}, "another order of questions: `batch_size` was 16"),
    ):
        data, settings = (rows, model | changed) if "lr" in changed else (rows | changed, model)
        with pytest.raises(InputError, match=words):
            trained(store, data, epochs=7, ckpt_path=last, **settings)


@pytest.mark.slow
def test_a_checkpoint_is_tested_and_exported(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, last = str(whole / "config.yaml"), str(whole / "checkpoints" / "last.ckpt")
    assert run(["test", "--config", config, "--ckpt_path", last]) == 0
    assert "test/capability/Skill" in capsys.readouterr().out
    assert run(["validate", "--config", config, "--ckpt_path", last, "--data.init_args.batch_size", "8"]) == 0
    assert "val/target/MSE" in capsys.readouterr().out
    assert run(["validate", "--config", config, "--ckpt_path", last, "--data.init_args.seed", "1"]) == 1
    assert "questions were others" in capsys.readouterr().err
    assert run(["validate", "--config", config]) == 1
    assert "Expected a trained probe" in capsys.readouterr().err
    run_export(last, str(tmp_path / "out"), merge=False, module=MODULE)
    assert load_probe(tmp_path / "out").digest == load_probe(whole / "probe").digest
    assert run(["test", "--config", config]) == 1
    assert "needs a trained probe" in capsys.readouterr().err


def test_an_export_is_taken_up(whole: Path) -> None:
    module = LinearProbeModule("bundled", head="mlp", hidden_size=6)
    module.load_export(whole / "probe")
    module.configure_model()
    assert module.probe.digest == load_probe(whole / "probe").digest
    other = LinearProbeModule("bundled")
    other.load_export(whole / "probe")
    with pytest.raises(InputError, match="but got layers 8 -> 6 -> 1, relu"):
        other.configure_model()


def test_runs_that_it_is_not_made_for() -> None:
    module, trainer = LinearProbeModule("bundled"), trainer_of("one process")
    made_for = {**vars(trainer), "world_size": 1, "accumulate_grad_batches": 1}
    module.check_support(SimpleNamespace(**made_for))
    for changed, words in (
        ({"world_size": 2}, "one process .* but got 2 processes"),
        ({"precision": "bf16-true"}, "32-true or 64-true .* but got bf16-true"),
        ({"accumulate_grad_batches": 4}, "`trainer.accumulate_grad_batches` 1 .* but got 4"),
    ):
        with pytest.raises(InputError, match=words):
            module.check_support(SimpleNamespace(**made_for | changed))


def ready(store: Path | str, stage: str = "fit", **settings: Any) -> ProbeDataModule:
    data = ProbeDataModule("bundled", str(store), **settings)
    data.setup(stage)
    return data


def test_rows_are_standardised_by_those_that_train_and_the_others_validate(store: Path) -> None:
    data = ready(store, batch_size=None)
    (batch,) = data.train_dataloader()
    assert batch.features.shape == (36, 8)
    np.testing.assert_allclose(batch.features.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(batch.features.std(0, correction=0), 1.0, atol=1e-5)
    (held_out,) = data.val_dataloader()
    assert len(held_out.target) == 4
    assert ready(store, features="last_token").basis.centre.shape == (4,)
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


def test_noise_is_that_of_so_few_responses(store: Path) -> None:
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


def order(epoch: int, ready: int, *, seed: int = 3) -> list[list[int]]:
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    epochs = SimpleNamespace(current=SimpleNamespace(processed=epoch, completed=epoch))
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress), epoch_progress=epochs)
    return list(EpochOrder(10, 4, seed=seed, trainer=SimpleNamespace(fit_loop=loop, limit_train_batches=1.0)))


def test_an_order_goes_on_where_it_stopped() -> None:
    whole = order(2, 0)
    assert sorted(row for batch in whole for row in batch) == list(range(10))
    assert [len(batch) for batch in whole] == [4, 4, 2]
    assert order(2, 1) == whole[1:]
    assert whole not in (order(1, 0), order(2, 0, seed=4))


def test_the_plan_reads_no_states(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcal_lightning.datamodules.probe.read_features", None)
    data = ProbeDataModule("bundled", str(store), validation_split="calibration")
    for max_epochs, max_steps, limit, steps in ((3, -1, 1.0, 6), (-1, 1000, 1.0, 1000), (3, 4, 1.0, 4), (3, -1, 1, 3)):
        trainer = SimpleNamespace(max_epochs=max_epochs, max_steps=max_steps, limit_train_batches=limit)
        plan = data.plan_run("fit", trainer, None, data)
        assert [(one.split, one.number) for one in plan.questions] == [("train", 40), ("validation", 24)]
        assert (plan.training[0].steps, plan.training[0].rows_per_step) == (steps, 32)


def test_splits_share_no_question(store: Path) -> None:
    with pytest.raises(InputError, match="`train_split` and `validation_split` to share no question"):
        ready(store, validation_split="train")
