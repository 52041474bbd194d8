import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from support.command_lines import nested
from support.module_batches import NO_DROPOUT
from support.other_models import activated, shaken
from support.training_runs import data_module, generation, trainer_with

from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter
from selfcal_lightning.cli import run
from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.domain import Domain
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation.inputs import TestSet
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.training.export import write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

ACTIVATED = replace(NO_DROPOUT, activated=True)
OPTIONS: dict = {"task": "word_problems", "split": "validation", "limit": 3, "num_samples": 4}
OPTIONS |= {"max_new_tokens": 40, "dtype": "float32", "store_split": "validation"}


@pytest.fixture(scope="module")
def module(tiny_model: str) -> SelfCalibrationModule:
    return activated(tiny_model, std=0.15)


@pytest.fixture(scope="module")
def adapter(module: SelfCalibrationModule, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_export(module, tmp_path_factory.mktemp("export") / "adapter"))


@pytest.fixture(scope="module")
def base_store(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "store"
    run_generate(tiny_model, str(folder), **nested(**OPTIONS))
    return folder


@pytest.fixture(scope="module")
def own_store(tiny_model: str, adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sampled with the adapter at hand: its confidences come with the samples."""
    folder = tmp_path_factory.mktemp("own") / "store"
    run_generate(tiny_model, str(folder), adapter=adapter, **nested(**OPTIONS))
    return folder


def texts(store: Path) -> list:
    return [[(s.text, s.finish, s.answer, s.logprob) for s in entry.samples] for entry in SampleStore(store).samples()]


def test_generate_samples_the_base_and_says_so(
    tiny_model: str, adapter: str, base_store: Path, own_store: Path, capsys: pytest.CaptureFixture
) -> None:
    assert texts(own_store) == texts(base_store)
    base, own = (SampleStore(store).index() for store in (base_store, own_store))
    assert np.abs(base.p_true - own.p_true).max() > 0.003
    models = [SampleStore(store).round_manifest().fingerprint.model.as_json() for store in (base_store, own_store)]
    assert models[0]["adapter_sha256"] is models[1]["adapter_sha256"] is None
    assert "activated_adapter_sha256" not in models[0]
    assert models[1]["activated_adapter_sha256"] is not None
    # Samples with other confidences are never mixed, whichever came first.
    for store, asked in ((base_store, {"adapter": adapter}), (own_store, {})):
        with pytest.raises(ValueError, match=r"model\.activated_adapter_sha256"):
            run_generate(tiny_model, str(store), **nested(**OPTIONS, **asked))
    capsys.readouterr()
    run_generate(tiny_model, str(own_store), adapter=adapter, **nested(**OPTIONS))
    assert "nothing is sampled" in capsys.readouterr().err


def test_score_asks_the_adapter(module: SelfCalibrationModule, adapter: str, base_store: Path, own_store: Path) -> None:
    with pytest.raises(ValueError, match="bring 'p_true' of another model or query"):
        run_score("p_true", str(base_store), adapter=adapter)
    engine = EngineSettings(dtype="float32")
    (report,) = run_score("p_true", str(base_store), adapter=adapter, name="p_true_activated", engine=engine)
    assert report.scored == 12
    index = SampleStore(base_store).index(confidences=["p_true_activated"])
    assert index.confidences["p_true_activated"] == pytest.approx(SampleStore(own_store).index().p_true, abs=1e-5)
    # Texts are the base model's: its statistics are those that the rows bring, and have one origin with and without.
    assert run_score("mean_logprob", str(own_store))[0].reused == 12
    assert run_score(["token_entropy"], str(base_store), engine=engine)[0].scored == 12
    assert run_score(["token_entropy"], str(base_store), adapter=adapter, engine=engine)[0].reused == 12
    assert run_score("p_true", str(own_store), adapter=adapter)[0].reused == 12
    with pytest.raises(ValueError, match="bring 'p_true' of another model"):
        run_score("p_true", str(own_store))


def test_answer_is_the_adapters(tiny_model: str, adapter: str, base_store: Path, capsys: pytest.CaptureFixture) -> None:
    question = next(iter(SampleStore(base_store).samples())).question
    found = {}
    for name, more in {"base": [], "adapter": ["--adapter", adapter]}.items():
        arguments = ["answer", "--model", tiny_model, "--question", question.text, "--threshold", "0", "--json"]
        assert run([*arguments, "--engine.dtype", "float32", "--sampling.max_new_tokens", "40", *more]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert found["base"]["response"] == found["adapter"]["response"]
    assert abs(found["base"]["confidence"] - found["adapter"]["confidence"]) > 1e-3


@pytest.mark.slow
def test_evaluate_scores_again(tiny_model: str, adapter: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = {"num_samples": 4, "max_new_tokens": 40, "dtype": "float32", "num_resamples": 20, "strategies": []}
    tests = [TestSet("id", "word_problems", split="test_id", limit=4)]
    both = {"before": tiny_model, "output_dir": str(tmp_path / "out"), "tests": tests, **nested(**options)}
    results = run_evaluate(adapter=adapter, **both)
    printed = capsys.readouterr().out
    assert "The same responses, scored by both" in printed
    assert printed.count("Sampling id from") == 1
    assert [path.name for path in (tmp_path / "out" / "samples").iterdir()] == ["before"]
    for metric in ("pass_at_1", "unreadable"):
        assert results[f"own.id.{metric}.before"] == results[f"own.id.{metric}.after"]
    assert results["own.id.pass_at_1.change"] == 0.0
    assert results["own.id.mean_confidence.before"] != results["own.id.mean_confidence.after"]
    index = SampleStore(tmp_path / "out" / "samples" / "before").index(split="id")
    assert results["own.id.mean_confidence.before"] == pytest.approx(index.p_true.mean(), abs=1e-6)
    alone = run_evaluate(
        model=tiny_model, adapter=adapter, output_dir=str(tmp_path / "alone"), tests=tests, **nested(**options)
    )
    assert alone["own.id.mean_confidence.model"] == pytest.approx(results["own.id.mean_confidence.after"], abs=1e-6)
    assert run_evaluate(adapter=adapter, **both)
    assert "(16 had it before)" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`before` alone or with one of `after` and `adapter`"):
        run_evaluate(before=tiny_model, after=tiny_model, adapter=adapter, tests=tests)


def test_evaluate_samples_joint_adapters_itself(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    joint = str(write_export(shaken(tiny_model), tmp_path / "joint"))
    options: dict = {
        "output_dir": str(tmp_path / "out"), "num_samples": 2, "sampling": SamplingSettings(max_new_tokens=20),
        "tests": [TestSet("id", "word_problems", split="test_id", limit=2)], "num_resamples": 5, "strategies": [],
    }  # fmt: skip
    alone = run_evaluate(before=tiny_model, **options)
    capsys.readouterr()
    results = run_evaluate(before=tiny_model, adapter=joint, **options)
    assert capsys.readouterr().err.count("nothing is sampled") == 1
    assert results["own.id.pass_at_1.before"] == alone["own.id.pass_at_1.before"]
    assert sorted(path.name for path in (tmp_path / "out" / "samples").iterdir()) == ["after", "before"]
    assert results["own.id.num_responses.after"] == 4


def test_questions_that_were_trained_on_are_told(
    tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = SimpleNamespace(distance=lambda states: np.ones(len(states)), threshold=0.5)
    monkeypatch.setattr(Domain, "of", lambda folder: far if Path(folder).name == "joint" else None)
    taught = OPTIONS | {"split": "test_id", "store_split": "train", "limit": 2, "num_samples": 2}
    run_generate(tiny_model, str(tmp_path / "store"), **nested(**taught))
    joint = write_export(shaken(tiny_model), tmp_path / "joint", store={"path": str(tmp_path / "store"), "digests": {}})
    results = run_evaluate(
        before=tiny_model, adapter=str(joint), output_dir=str(tmp_path / "out"), num_samples=2,
        sampling=SamplingSettings(max_new_tokens=20),
        tests=[TestSet("v1.1", "word_problems", split="test_id", limit=3)], num_resamples=5, strategies=[],
    )  # fmt: skip
    assert results["own.v1.1.trained_on.after"] == 2
    assert "own.v1.1.trained_on.before" not in results
    assert results["own.v1.1.unlike_training.after"] == 3
    told = capsys.readouterr().err
    assert "'after' was trained on 2 of these questions" in told
    assert "v1.1: 3 of 3 questions are unlike those that 'after' was trained on" in told


def write_config(folder: Path, tiny_model: str, store: Path, lora: dict) -> str:
    source = {"task": "word_problems", "split": "validation", "limit": 3}
    config = {
        "trainer": {
            "accelerator": "cpu", "devices": 1, "use_distributed_sampler": False, "enable_progress_bar": False,
            "default_root_dir": str(folder), "logger": False, "enable_model_summary": False,
        },
        "model": {"class_path": "selfcal_lightning.training.self_calibration.SelfCalibrationModule",
                  "init_args": {"base_model": tiny_model, "lora": lora}},
        "data": {"class_path": "selfcal_lightning.datamodules.ssc.datamodule.SSCDataModule",
                 "init_args": {"store_dir": str(store), "num_samples": 4, "max_length": 400, "validation": [source]}},
    }  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return str(folder / "config.yaml")


@pytest.mark.slow
def test_predict_takes_an_exported_adapter(
    tiny_model: str, adapter: str, base_store: Path, own_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    lora = {**asdict(ACTIVATED), "target_modules": list(ACTIVATED.target_modules)}
    config = write_config(tmp_path, tiny_model, base_store, lora)
    arguments = ["predict", "--config", config, "--confidence_writer.name", "predicted"]
    assert run([*arguments, "--adapter", adapter]) == 0
    said = capsys.readouterr().err
    assert "wrote 'predicted' of 12 responses" in said
    assert "No checkpoint is loaded" not in said
    index = SampleStore(base_store).index(confidences=["predicted"])
    assert index.confidences["predicted"] == pytest.approx(SampleStore(own_store).index().p_true, abs=1e-5)
    for more, message in (
        (["--adapter", adapter, "--ckpt_path", "a.ckpt"], "Expected either `ckpt_path` or `adapter`"),
        (["--adapter", str(tmp_path)], "Expected `adapter` to be the folder of a LoRA adapter"),
        (
            ["--adapter", adapter, "--model.init_args.lora.activated", "false"],
            "`lora` must have the settings of the adapter",
        ),
        (["--adapter", adapter, "--model.init_args.query", "Sure? (Yes/No)"], "`query` must be"),
    ):
        assert run([*arguments, *more]) == 1
        assert message in capsys.readouterr().err


def test_predicted_values(module: SelfCalibrationModule, tiny_model: str, base_store: Path, own_store: Path) -> None:
    for packing in ("shared_prefix", "off"):
        data = data_module(tiny_model, base_store, packing=packing, train=None)
        trainer_with(ConfidenceWriter(f"by_{packing}")).predict(module, datamodule=data, return_predictions=False)
        values = SampleStore(base_store).index(confidences=[f"by_{packing}"]).confidences[f"by_{packing}"]
        assert values == pytest.approx(SampleStore(own_store).index().p_true, abs=1e-5)


def test_later_rounds_are_refused_with_the_reason(tiny_model: str, tmp_path: Path) -> None:
    data = data_module(tiny_model, tmp_path / "store", regenerate_every_n_epochs=1)
    trainer = trainer_with(generation(), max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(ValueError, match="needs joint training"):
        trainer.fit(SelfCalibrationModule(tiny_model, lora=ACTIVATED), datamodule=data)
    assert not (tmp_path / "store").exists()
