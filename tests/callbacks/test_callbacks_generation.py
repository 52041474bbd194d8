import csv
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from safetensors.torch import save_file
from support.module_batches import largest_difference, trained_state
from support.training_runs import SaveAt, data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.generation import ResumedAt, SSCGeneration, resumed_at
from selfcal_lightning.commands.pools import run_drop_rounds
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.engines.sampling.sampler import generate_samples
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import MANIFEST, list_files, read_manifest, weights_sha256
from selfcal_lightning.models.lora import LoraSettings, adapter_difference, read_adapter_state
from selfcal_lightning.training.rounds import AdapterMismatchError, adapter_folder
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

ROWS = {"regenerate_every_n_epochs": 1, "target": "p_true", "drop_none": False}  # two layers write no answers
SHALLOW = True
Whole = tuple[Path, SelfCalibrationModule]


class SaveAfterValidation(Callback):
    """Writes ``validation.ckpt`` after the validation at the end of the first epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(self.folder / "validation.ckpt")


def run(
    tiny_model: str, store: Path, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any
) -> SelfCalibrationModule:
    """Train three epochs of four steps, a new round every epoch."""
    data = {**ROWS, **settings.pop("data", {})}
    lora = LoraSettings(r=4, dropout=0.2, activated=False)
    module = module_of(tiny_model, **{"lora": lora, **settings.pop("model", {})})
    trainer = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1, **settings}
    rows = data_module(tiny_model, store, **data)
    trainer_with(generation(max_new_tokens=60), *callbacks, **trainer).fit(module, datamodule=rows, ckpt_path=ckpt_path)
    return module


def copy_of_round_0(store: Path, target: Path) -> Path:
    """A store that has only what the base model sampled; saves the tests the sampling."""
    shutil.copytree(store, target)
    run_drop_rounds(str(target))
    return target


def texts(store: Path, round: int) -> dict[str, list[tuple[str, float | None]]]:
    groups = SampleStore(store).samples(split="train", round=round)
    return {group.question.id: [(sample.text, sample.yes_mass) for sample in group.samples] for group in groups}


@pytest.fixture(scope="module")
def whole(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """An unbroken run: its folder, with the store and checkpoints, and its module."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(tiny_model, folder / "store", SaveAt(folder, 2, 4, 6), SaveAfterValidation(folder))


@pytest.mark.slow
def test_every_round_is_what_its_adapter_samples(tiny_model: str, whole: Whole) -> None:
    store = whole[0] / "store"
    rounds = SampleStore(store).manifest.rounds
    hashes = [record.fingerprint.model.adapter_sha256 for record in rounds.values()]
    assert hashes == [None, *(weights_sha256(str(adapter_folder(store, round))) for round in (1, 2))]
    assert len(set(hashes)) == 3
    assert SampleStore(store).question_ids(split="validation", round=1) == set()

    chat = ChatFormat(load_tokenizer(tiny_model))
    engine = TransformersEngine(tiny_model, adapter=str(adapter_folder(store, 2)), chat=chat)
    callback, questions = generation(max_new_tokens=60), data_module(tiny_model, store).questions("train")
    generate_samples(
        questions, whole[0] / "again", split="train", engine=engine, chat=chat, sampling=callback.sampling,
        seed=callback.seed, num_samples=4, round=2, progress=False,
    )  # fmt: skip
    SampleStore(whole[0] / "again").join()
    mine, theirs = texts(store, 2), texts(whole[0] / "again", 2)
    same = [one[0] == other[0] for name in mine for one, other in zip(mine[name], theirs[name], strict=True)]
    assert sum(same) >= 31  # the merged adapter rounds otherwise than the one beside the weights
    gaps = [abs(one[1] - two[1]) for n in mine for one, two in zip(mine[n], theirs[n], strict=True) if one[0] == two[0]]
    assert max(gaps) < 1e-4
    assert texts(store, 1).keys() == texts(store, 2).keys() == texts(store, 0).keys()
    assert texts(store, 1) != texts(store, 2)


@pytest.mark.slow
def test_drift_is_logged(bundled_model: str, tmp_path: Path) -> None:
    sources = [QuestionSource("word_problems", split="train", limit=2)]
    two = {"train": sources, "validation": [], "target": "ssc", "drop_none": True}
    logger = CSVLogger(tmp_path, name="logs", version="0")
    run(bundled_model, tmp_path / "store", logger=logger, log_every_n_steps=1, data=two)
    with (tmp_path / "logs" / "0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("round/Number")]
    assert [(float(row["round/Number"]), int(row["step"])) for row in rows] == [(0.0, 0), (1.0, 4), (2.0, 8)]
    assert all(row["round/calibration/ECE"] and row["round/accuracy/PassAt1"] for row in rows)
    assert [bool(row["round/shift/MeanAbsolute"]) for row in rows] == [False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "2",  # inside the first epoch: rounds 1 and 2 are there and are reused
        "4",  # after its last batch: Lightning leaves out the end of the epoch
        "validation",
        "6",  # inside the second one
        "round-001",  # the checkpoint that the callback wrote
    ],
)
@pytest.mark.parametrize("samples", ["kept", "lost"])
def test_resumed_runs_end_as_the_whole(tiny_model: str, whole: Whole, tmp_path: Path, name: str, samples: str) -> None:
    folder, module = whole
    store = tmp_path / "store"
    if samples == "kept":
        shutil.copytree(folder / "store", store)
    else:
        copy_of_round_0(folder / "store", store)
        if name == "6":  # it needs the round of its epoch, whose adapter is kept
            shutil.copytree(adapter_folder(folder / "store", 1), adapter_folder(store, 1))
    path = adapter_folder(folder / "store", 1).with_suffix(".ckpt") if name == "round-001" else folder / f"{name}.ckpt"
    resumed = run(tiny_model, store, ckpt_path=path)
    assert largest_difference(trained_state(resumed), trained_state(module)) == 0.0
    for round in (1, 2):
        assert texts(store, round) == texts(folder / "store", round)


@pytest.mark.slow
def test_a_finished_run_goes_on_with_a_new_round(tiny_model: str, whole: Whole, tmp_path: Path) -> None:
    store = copy_of_round_0(whole[0] / "store", tmp_path / "store")
    module = run(tiny_model, store, max_epochs=1)
    module.trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert not adapter_folder(store, 1).exists()  # nobody would have read it
    run(tiny_model, store, ckpt_path=tmp_path / "after.ckpt", max_epochs=2)
    assert adapter_difference(module.model, adapter_folder(store, 1)) == 0.0
    assert len(texts(store, 1)) == 8


@pytest.mark.slow
def test_without_its_round_a_run_resumed_inside_an_epoch_fails(tiny_model: str, whole: Whole, tmp_path: Path) -> None:
    store = copy_of_round_0(whole[0] / "store", tmp_path / "store")
    with pytest.raises(ValueError, match="no samples of round 1 for the split 'train'"):
        run(tiny_model, store, ckpt_path=whole[0] / "6.ckpt")
    assert not adapter_folder(store, 1).exists()


@pytest.mark.slow
def test_a_round_is_completed(tiny_model: str, whole: Whole, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As on a GPU, where a resumed run arrives with weights that differ in the last digits."""
    store = copy_of_round_0(whole[0] / "store", tmp_path / "store")
    kept = adapter_folder(store, 1)
    shutil.copytree(adapter_folder(whole[0] / "store", 1), kept)
    state = {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in read_adapter_state(kept).items()}
    save_file(state, kept / "adapter_model.safetensors", metadata={"format": "pt"})
    manifest = read_manifest(kept)
    (kept / MANIFEST).write_text(json.dumps(manifest | {"files": list_files(kept)}))
    before: list[dict[str, torch.Tensor]] = []

    class Watch(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            assert pl_module.model.training
            before.append({name: value.detach().clone() for name, value in pl_module.named_parameters()})

    run(tiny_model, store, Watch())
    assert "The round is completed with the adapter on disk" in caplog.text
    record = SampleStore(store).round_manifest(1)
    assert record.fingerprint.model.adapter_sha256 == weights_sha256(str(kept))
    assert texts(store, 1) != texts(whole[0] / "store", 1)
    # Training went on with its own weights, not with those of the round.
    own = torch.load(adapter_folder(whole[0] / "store", 1).with_suffix(".ckpt"), weights_only=True)["state_dict"]
    assert all(torch.equal(before[1][name], value) for name, value in own.items())


@pytest.mark.slow
def test_rounds_of_another_training_are_refused_before_it_begins(tiny_model: str, whole: Whole) -> None:
    with pytest.raises(ValueError, match=r"Round 1 of the store was sampled in a training with other settings"):
        run(tiny_model, whole[0] / "store", model={"lr": 3e-3})


@pytest.mark.slow
def test_a_stale_adapter_fails(tiny_model: str, whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = copy_of_round_0(whole[0] / "store", tmp_path / "store")
    start = SSCGeneration._start

    def stale(self: SSCGeneration, trainer: Trainer, module: Any, chat: Any, adapter: str | None) -> Any:
        if adapter is None:
            return start(self, trainer, module, chat, adapter)
        return TransformersEngine(tiny_model, chat=chat)  # what it served in round 0

    monkeypatch.setattr(SSCGeneration, "_start", stale)
    with pytest.raises(AdapterMismatchError, match=r"at most 0\.0001 in the mean"):
        run(tiny_model, store)
    assert list(SampleStore(store).manifest.rounds) == [0]


@pytest.mark.parametrize(
    ("epochs", "batches", "expected"),
    [
        ({"started": 1, "completed": 0}, (2, False), ResumedAt(0, False, 9)),
        ({"started": 1, "completed": 0}, (4, True), ResumedAt(1, True, 9)),
        ({"started": 1, "completed": 1}, (4, True), ResumedAt(1, True, 9)),
        ({"started": 1, "completed": 1}, (4, False), ResumedAt(1, True, 9)),
        ({"started": 2, "completed": 1}, (0, False), ResumedAt(1, True, 9)),
    ],
)
def test_where_a_checkpoint_goes_on(epochs: dict[str, int], batches: tuple[int, bool], expected: ResumedAt) -> None:
    progress = {"current": {"ready": batches[0]}, "is_last_batch": batches[1]}
    loops = {"fit_loop": {"epoch_progress": {"current": epochs}, "epoch_loop.batch_progress": progress}}
    assert resumed_at({"loops": loops, "global_step": 9}) == expected


# ---- the first round: the store is filled once


def test_both_splits_are_sampled_once(
    store: Path, bundled_model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [len(SampleStore(store).question_ids(split=split)) for split in ("train", "validation")]
    before = list(SampleStore(store).samples())
    samples = [sample for group in before for sample in group.samples]
    assert (questions, len(samples)) == ([8, 3], 44)
    assert all(sample.yes_mass is not None and sample.correct is not None for sample in samples)
    assert not list((store / "meetings").glob("*"))
    monkeypatch.setattr(SSCGeneration, "_start", Mock(side_effect=AssertionError("the engine must not be started")))
    trainer_with(generation()).fit(module_of(bundled_model), datamodule=data_module(bundled_model, store))
    trainer_with(generation()).validate(module_of(bundled_model), datamodule=data_module(bundled_model, store))
    assert list(SampleStore(store).samples()) == before
    assert f"samples of all 11 questions are reused from {store}" in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes_sample_what_one_does(store: Path, bundled_model: str, tmp_path: Path) -> None:
    trainer = trainer_with(generation(), devices=2, strategy="ddp_fork")
    trainer.fit(module_of(bundled_model), datamodule=data_module(bundled_model, tmp_path / "store"))
    drawn, by_one = texts(tmp_path / "store", 0), texts(store, 0)
    assert drawn.keys() == by_one.keys()
    assert all([text for text, _ in drawn[name]] == [text for text, _ in by_one[name]] for name in by_one)


def test_what_cannot_be_sampled_is_refused(bundled_model: str, store: Path) -> None:
    for changed in ({"temperature": 0.5}, {"seed": 7}):
        data = data_module(bundled_model, store)
        with pytest.raises(ValueError, match=r"sampled with the same settings.*" + next(iter(changed))):
            trainer_with(generation(**changed)).fit(module_of(bundled_model), datamodule=data)


@pytest.mark.slow
def test_test_and_predict_sample_their_split_before_the_weights_are_there(bundled_model: str, tmp_path: Path) -> None:
    train, test = (QuestionSource("word_problems", split=name, limit=n) for name, n in (("train", 1), ("test_id", 2)))
    store = SampleStore(tmp_path / "store")
    unloaded: list[int] = []

    class Watch(Callback):
        def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
            unloaded.append(0 if pl_module.model is not None else len(store.question_ids()))

    data = data_module(bundled_model, store.path, test=[test], predict_split="train", train=[train])
    trainer_with(generation(), Watch()).test(module_of(bundled_model), datamodule=data, verbose=False)
    assert len(store.question_ids()) == len(store.question_ids(split="test")) == 2
    trainer_with(generation(), Watch()).predict(module_of(bundled_model), datamodule=data)
    assert len(store.question_ids(split="train")) == 1
    assert len(store.question_ids()) == 3
    assert unloaded == [2, 3]
