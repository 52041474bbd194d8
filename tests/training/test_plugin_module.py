import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.probe_plugin import FILE, LinearProbe, write_configuration
from support.training_runs import trainer_of

from selfcal_lightning.cli import run
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.commands.lightning_cli import links_of
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE, complete_arguments
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.folders import check_files, read_manifest
from selfcal_lightning.training.modules import CLASS_KEY

pytestmark = pytest.mark.slow
PROBE = "support.probe_plugin.LinearProbe"
STEPS = 8
Fit = Callable[..., tuple[int, Path]]


@pytest.fixture(scope="module")
def fit(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Fit:
    """Run ``selfcal fit`` on the plug-in in a folder by name, for two epochs of four steps on shared samples."""
    root = tmp_path_factory.mktemp("plugin")
    rows = {
        "store_dir": str(root / "store"), "num_samples": 4, "total_tuples": 16, "batch_size": 4, "max_length": 400,
        "packing": "off", "train": [{"task": "word_problems", "split": "train", "limit": 8}],
        "validation": [{"task": "word_problems", "split": "validation", "limit": 3}],
    }  # fmt: skip

    def fit_in(name: str, *options: str, stop_at: int | None = None) -> tuple[int, Path]:
        folder, model, ours = root / name, (PROBE, {"base_model": tiny_model}), "selfcal_lightning.callbacks"
        callbacks = {
            f"{ours}.generation.SSCGeneration": {"sampling": {"max_new_tokens": 60}},
            f"{ours}.calibration_curve.CalibrationCurve": {"save_images": False},
            f"{ours}.adapter_export.AdapterExport": {"output_dir": str(folder / "probe")},
        }
        given = {"callbacks": callbacks, "stop_at": stop_at, "max_epochs": 2}
        config = write_configuration(folder, model=model, data=(DATA_MODULE, rows), **given)
        return run(["fit", "--config", str(config), *options]), folder

    return fit_in


@pytest.fixture(scope="module")
def whole(fit: Fit) -> Path:
    status, folder = fit("whole")
    assert status == 0
    return folder


def test_a_run_of_the_plug_in_ends_in_an_export(whole: Path, tiny_model: str) -> None:
    manifest = read_manifest(whole / "probe")
    check_files(whole / "probe")
    assert (manifest["kind"], manifest["module"]) == ("module", PROBE)
    assert manifest["hyper_parameters"]["lr"] == 0.05
    assert manifest["training"]["steps"] == STEPS
    assert "val/calibration/ECE" in manifest["metrics"]
    weights = load_file(whole / "probe" / FILE)
    assert weights.keys() == {"weight", "bias"}
    assert weights["weight"].abs().max() > 0.01
    assert f"What `{PROBE}` trains on top of" in (whole / "probe" / "README.md").read_text()
    checkpoint = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["state_dict"].keys() == {"head.weight", "head.bias"}, "not the trunk"
    assert checkpoint[CLASS_KEY] == PROBE


def test_a_broken_run_ends_as_an_unbroken_one(fit: Fit, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, folder = fit("broken", stop_at=3)
    assert status == 1
    assert "stopped at step 3" in capsys.readouterr().err
    assert not (folder / "probe").exists()
    torch.rand(17)  # the next start finds other random numbers
    assert fit("broken", "--ckpt_path", "last")[0] == 0
    for name, value in load_file(whole / "probe" / FILE).items():
        assert torch.equal(load_file(folder / "probe" / FILE)[name], value), name
    ends = [torch.load(each / "checkpoints" / "last.ckpt", weights_only=True) for each in (whole, folder)]
    assert [end["global_step"] for end in ends] == [STEPS, STEPS]
    moments = [end["optimizer_states"][0]["state"][0]["exp_avg"] for end in ends]
    assert torch.equal(*moments)


def test_a_checkpoint_of_the_plug_in_is_exported(whole: Path, tmp_path: Path) -> None:
    checkpoint = str(whole / "checkpoints" / "last.ckpt")
    with pytest.raises(InputError, match=rf"the class that the checkpoint is of, {PROBE}.*if you trust"):
        run_export(checkpoint, str(tmp_path / "out"), merge=False)
    with pytest.raises(InputError, match="can be merged, but got LinearProbe"):
        run_export(checkpoint, str(tmp_path / "out"), module=PROBE)
    assert not (tmp_path / "out").exists()
    run_export(checkpoint, str(tmp_path / "out"), merge=False, module=PROBE)
    for name, value in load_file(whole / "probe" / FILE).items():
        assert torch.equal(load_file(tmp_path / "out" / FILE)[name], value)
    assert read_manifest(tmp_path / "out")["module"] == PROBE


def test_a_checkpoint_never_decides_what_is_imported(whole: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(whole / "checkpoints" / "last.ckpt", weights_only=True)
    torch.save({**checkpoint, CLASS_KEY: "antigravity.Nothing"}, tmp_path / "evil.ckpt")
    with pytest.raises(InputError, match=r"antigravity\.Nothing, but got none"):
        run_export(str(tmp_path / "evil.ckpt"), str(tmp_path / "out"), merge=False)
    run_export(str(tmp_path / "evil.ckpt"), str(tmp_path / "out"), merge=False, module=PROBE)
    assert "antigravity" not in sys.modules


def test_an_export_of_the_plug_in_is_taken_up_again(whole: Path, tiny_model: str) -> None:
    """``predict`` writes its confidences into the store, from the folder and from the checkpoint alike."""
    config, store = str(whole / "config.yaml"), SampleStore(whole.parent / "store")
    export, checkpoint = str(whole / "probe"), str(whole / "checkpoints" / "last.ckpt")
    for name, options in {"mine": ["--adapter", export], "same": ["--ckpt_path", checkpoint]}.items():
        assert run(["predict", "--config", config, "--confidence_writer.name", name, *options]) == 0
    index = store.index(split="validation", round=0, confidences=["mine", "same"])
    assert (index.confidences["mine"] == index.confidences["same"]).all()
    assert len(set(index.confidences["mine"].tolist())) > 3
    loaded = LinearProbe(tiny_model)
    loaded.load_export(whole / "probe")
    loaded.configure_model()
    assert torch.equal(loaded.head.weight, load_file(whole / "probe" / FILE)["weight"])


def test_the_plug_in_says_what_it_supports(tiny_model: str) -> None:
    probe = LinearProbe(tiny_model)
    probe.check_support(trainer_of("DDP"))
    with pytest.raises(InputError, match="FSDP2 does not support probe: its trunk is loaded whole"):
        probe.check_support(trainer_of("FSDP2"))


def test_classes_say_which_arguments_they_share_and_have_a_help_of_their_own() -> None:
    linked = ("base_model", "revision", "query", "prompt", "p_true")
    assert links_of(["--model", MODULE, "--data", DATA_MODULE]) == linked
    assert links_of(["--model", PROBE]) == linked[:3], "the probe has no others"
    assert links_of(["--model", "no.such.Class"]) == linked, "the parser judges"
    for asked, own in (([], MODULE), (["--model", PROBE], PROBE)):
        assert complete_arguments([*asked, "--model.help"])[-1] == own
