from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.probe_plugin import write_configuration
from support.ssc_pools import Pool
from support.training_runs import data_module, generation, module_of, trainer_with
from transformers import AutoModelForCausalLM

from selfcal_lightning.callbacks.confidence_writer import ConfidenceWriter, trained_sha256
from selfcal_lightning.cli import run
from selfcal_lightning.commands.trainer_start import DATA_MODULE, MODULE
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

NAME = "p_true_calibrated"
Given = dict[str, Any] | None


@pytest.fixture(scope="module")
def store(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with training and validation samples, and two checkpoints of a module trained on it."""
    folder = tmp_path_factory.mktemp("predict")
    for name, lr in (("one", 1e-2), ("two", 2e-2)):
        trainer = trainer_with(generation())
        trainer.fit(module_of(tiny_model, lr=lr), datamodule=data_module(tiny_model, folder / "store"))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
    return folder / "store"


def predict(
    tiny_model: str, store: Path, checkpoint: str | None, *, writer: Given = None, data: Given = None, **trainer: Any
) -> SelfCalibrationModule:
    module = module_of(tiny_model)
    path = None if checkpoint is None else store.with_name(f"{checkpoint}.ckpt")
    rows = data_module(tiny_model, store, **(data or {}))
    trainer = trainer_with(generation(), ConfidenceWriter(**(writer or {})), **trainer)
    trainer.predict(module, datamodule=rows, ckpt_path=path, return_predictions=False)
    return module


def index_of(store: Path, name: str = NAME, split: str = "validation") -> SampleIndex:
    return SampleStore(store).index(split=split, confidences=[name])


@torch.no_grad()
def _reference_one_by_one(module: SelfCalibrationModule, store: Path, split: str) -> list[float]:
    """P(True) of every row by hand, alone in its batch and without padding."""
    module.eval()
    query, values = module.chat.query, []
    for entry in SampleStore(store).samples(split=split):
        for sample in entry.samples:
            ids = torch.tensor([[*entry.prompt_ids, *sample.token_ids, *query.suffix_ids]])
            p = module.model(input_ids=ids).logits[0, -1].double().softmax(-1)
            yes, no = p[list(query.yes_ids)].sum(), p[list(query.no_ids)].sum()
            values.append((yes / (yes + no)).item())
    return values


def test_predict_writes_the_confidences(tiny_model: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = predict(tiny_model, store, "one")
    index = index_of(store)
    assert len(index) == 12
    assert index.confidences[NAME] == pytest.approx(_reference_one_by_one(module, store, "validation"), abs=1e-5)
    assert np.abs(index.confidences[NAME] - index.p_true).max() > 1e-3  # which are those of the base model
    folder = store / "annotations" / NAME
    said = f"wrote '{NAME}' of 12 responses to {folder}; 0 of 12 stored for 'validation' have none."
    assert said in capsys.readouterr().err
    samples = [s for group in SampleStore(store).samples(split="validation", confidences=[NAME]) for s in group.samples]
    assert [sample.confidences[NAME] for sample in samples] == index.confidences[NAME].tolist()


def test_unreadable_and_too_long_responses(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_predict(writer: ConfidenceWriter, max_length: int) -> SampleIndex:
        trainer_with(writer).predict(module_of(tiny_model), datamodule=pool.data(store_dir, max_length=max_length))
        return index_of(Path(store_dir), writer.name)

    pool = Pool(tiny_model, tmp_path)
    store_dir = pool.write()
    index = run_predict(ConfidenceWriter(), 256)
    assert sum(answer is None for answer in index.answer) > 0
    assert index.num_missing(NAME) == 0
    prompts = sorted(index.num_prompt_tokens)
    longest = int(prompts[-1]) + len(pool.chat.query.suffix_ids)
    short = run_predict(ConfidenceWriter("short"), longest)  # no room behind the longest prompt
    assert np.isnan(short.confidences["short"]).tolist() == (short.num_prompt_tokens == prompts[-1]).tolist()
    missing = short.num_missing("short")
    said = capsys.readouterr().err
    assert f"wrote 'short' of {len(short) - missing} responses" in said
    assert f"{missing} of {len(short)} stored for 'validation' have none" in said


def test_other_splits_are_added(tiny_model: str, store: Path) -> None:
    predict(tiny_model, store, "one", writer={"name": "all"})
    predict(tiny_model, store, "one", writer={"name": "all"}, data={"predict_split": "train", "num_samples": 2})
    validation, train = index_of(store, "all"), index_of(store, "all", "train")
    assert validation.num_missing("all") == 0
    assert np.isnan(train.confidences["all"]).tolist() == (train.sample_index >= 2).tolist()


@pytest.mark.slow
def test_a_process_without_questions_writes_its_part(tiny_model: str, store: Path) -> None:
    """That several with questions write what one does says `test_predict_writes_the_same_confidences`."""
    data = {"validation": [QuestionSource("word_problems", split="validation", limit=1)]}
    predict(tiny_model, store, "one", writer={"name": "both"}, data=data, devices=2, strategy="ddp_fork")
    assert len(index_of(store, "both")) - index_of(store, "both").num_missing("both") == 4
    assert len(list((store / "annotations" / "both").glob("*.parquet"))) == 2


def test_trained_in_memory_or_not_at_all(tiny_model: str, store: Path) -> None:
    with pytest.warns(UserWarning, match="No checkpoint is loaded: 'base' will be the confidence of the untrained"):
        predict(tiny_model, store, None, writer={"name": "base"})
    index = index_of(store, "base")
    assert index.confidences["base"] == pytest.approx(index.p_true, abs=1e-4)
    trainer = trainer_with(generation(), ConfidenceWriter())
    module = module_of(tiny_model)
    trainer.fit(module, datamodule=data_module(tiny_model, store))
    before = trained_sha256(module)
    trainer.predict(module, datamodule=data_module(tiny_model, store))  # trained as checkpoint "one" was
    assert trained_sha256(module) == before


def test_two_writers_of_one_name_are_refused(tiny_model: str, store: Path) -> None:
    trainer = trainer_with(ConfidenceWriter("twice"), ConfidenceWriter("twice"))
    with pytest.raises(ValueError, match="2 ConfidenceWriters have the name 'twice'"):
        trainer.predict(module_of(tiny_model), datamodule=data_module(tiny_model, store))


@pytest.mark.parametrize(("kind", "named"), [("use_dora", "magnitude"), ("use_rslora", "`use_rslora`")])
def test_another_kind_of_adapter_fails(tiny_model: str, tmp_path: Path, kind: str, named: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    lora = LoraConfig(r=4, lora_alpha=16, target_modules=list(LoraSettings().target_modules), **{kind: True})
    get_peft_model(base, lora).save_pretrained(tmp_path)
    module = module_of(tiny_model)
    module.load_export(tmp_path)
    with pytest.raises(ValueError, match=f"{named}.*not loaded here"):
        module.configure_model()


@pytest.mark.slow
def test_selfcal_predict(tiny_model: str, store: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    name = "by_the_verb"
    source = {"task": "word_problems", "split": "validation", "limit": 3}
    model = (MODULE, {"base_model": tiny_model, "lora": {"r": 4, "activated": False}})
    data = (DATA_MODULE, {"store_dir": str(store), "num_samples": 4, "max_length": 400, "validation": [source]})
    callbacks = {"selfcal_lightning.callbacks.generation.SSCGeneration": {"sampling": {"max_new_tokens": 60}}}
    config = write_configuration(tmp_path, model=model, data=data, callbacks=callbacks, stop_at=None, max_epochs=1)
    arguments = ["predict", "--config", str(config), "--confidence_writer.name", name]
    one, two = (["--ckpt_path", str(store.with_name(f"{name}.ckpt"))] for name in ("one", "two"))
    assert run([*arguments, *one]) == 0
    assert f"wrote '{name}' of 12 responses" in capfd.readouterr().err
    predict(tiny_model, store, "one", writer={"name": "here", "overwrite": True})
    before = index_of(store, name).confidences[name]
    assert before == pytest.approx(index_of(store, "here").confidences["here"], abs=1e-6)
    assert run([*arguments, *one]) == 0, "the same values once more"
    assert len(list((store / "annotations" / name).glob("*.parquet"))) == 1
    assert run([*arguments, *two]) == 1
    told = capfd.readouterr().err
    assert f"selfcal predict: error: Expected the confidences '{name}'" in told
    assert "trained_sha256" in told
    assert "Set `overwrite`" in told
    assert (index_of(store, name).confidences[name] == before).all()
    assert run([*arguments, *two, "--confidence_writer.overwrite", "true"]) == 0
    assert np.abs(index_of(store, name).confidences[name] - before).max() > 1e-4
