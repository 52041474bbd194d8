import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from support.other_models import plain_copy
from support.probe_plugin import StopAt
from support.reward_models import head_of, stand_in
from support.ssc_pools import TRAIN, VALIDATION, Pool
from support.training_runs import Record, generation, trainer_with
from transformers import AutoModelForTokenClassification

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.rewards import RewardDataModule
from selfcal_lightning.models.folders import check_files, read_manifest
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.rewards.formats import quantiles_of, reward_format
from selfcal_lightning.rewards.heads import folded_outputs, monotone_quantiles
from selfcal_lightning.rewards.module import TRAINED_FILE, QuantileRewardModule, RewardBatch, reward_losses
from selfcal_lightning.rewards.reading import check_rewards, completed, open_rewards, read_reward_file
from selfcal_lightning.training.modules import trained_parameters

LORA = LoraSettings(r=2, dropout=0.1, activated=False)
FULL: dict[str, Any] = {"lora": None, "full": True}
SHALLOW = True
Whole = tuple[Path, dict[str, float]]


def module_of(model: str, **changes: Any) -> QuantileRewardModule:
    settings: dict[str, Any] = {"lora": LORA, "steps": "sentence", "lr": 1e-2, "head_lr": 1e-2, **changes}
    return QuantileRewardModule(model, **settings)


def data_of(model: str, store: str, **changes: Any) -> RewardDataModule:
    settings: dict[str, Any] = {
        "train": TRAIN, "validation": VALIDATION, "batch_size": 24, "num_samples": 4, "max_length": 256,
        "steps": "sentence", **changes,
    }  # fmt: skip
    return RewardDataModule(model, store, **settings)


def fit(pool: Pool, store: str, folder: Path, *more: Any, ckpt_path: str | None = None, **changes: Any) -> Trainer:
    """Two epochs of two steps, a checkpoint after each step."""
    kept = ModelCheckpoint(dirpath=folder / "checkpoints", save_last=True, every_n_train_steps=1)
    trainer = trainer_with(*more, AdapterExport(str(folder / "model")), kept, max_epochs=2, enable_checkpointing=True)
    trainer.fit(module_of(pool.model, **changes), datamodule=data_of(pool.model, store), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def whole(pool: Pool, store_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("reward")
    trainer = fit(pool, store_dir, folder)
    return folder, {name: value.item() for name, value in trainer.callback_metrics.items()}


def test_the_loss_by_hand_weighs_responses_not_steps() -> None:
    gap = math.log(math.expm1(1.0))  # quantiles at log-odds -1 and 1 around a mean of log-odds 0
    raw = torch.tensor([[0.0, gap, gap]] * 4, requires_grad=True)
    zeros, ones, target = torch.zeros(4, dtype=torch.long), torch.ones(2), torch.tensor([1.0, 1.0, 0.0, math.nan])
    batch = RewardBatch(
        input_ids=zeros[:2, None], attention_mask=zeros[:2, None], place=zeros, place_row=torch.tensor([0, 0, 1, 1]),
        place_kind=zeros, place_target=target, place_rate=target, place_rollouts=zeros + 1, last_place=zeros[:2],
        target=ones, correct=ones, weight=ones, total=torch.tensor(2.0), question_index=zeros[:2], task=("t",) * 2,
        row=torch.arange(2),
    )  # fmt: skip
    entropy, pinball = reward_losses(raw, batch, (0.1, 0.9))
    low, high = 1 / (1 + math.e), math.e / (1 + math.e)
    right = (0.1 * (1 - low) + 0.9 * (1 - high)) / 2
    wrong = (0.9 * low + 0.1 * high) / 2
    assert entropy.item() == pytest.approx(math.log(2))
    assert pinball.item() == pytest.approx((right + wrong) / 2)
    pinball.backward()
    assert raw.grad[:, 0].abs().sum() == 0.0, "quantiles do not pull the mean"
    assert raw.grad[:3, 1:].abs().min() > 0.0
    assert raw.grad[3].abs().sum() == 0.0, "a place without a target teaches nothing"


def test_packed_rows_have_the_outputs_of_rows_that_stand_apart(pool: Pool, store_dir: str) -> None:
    module = module_of(pool.model, lora=None)
    module.configure_model()
    torch.nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(0))
    batches = {}
    for packing in ("shared_prefix", "off"):
        data = data_of(pool.model, store_dir, packing=packing, validation_batch_size=40)
        (batch,) = data.val_dataloader()
        order = torch.argsort(batch.row[batch.place_row] * 1000 + torch.arange(len(batch.place)) % 1000, stable=True)
        with torch.no_grad():
            raw = module.raw_outputs(batch)
        batches[packing] = batch, raw[order], batch.place_target[order]
    packed, apart = batches["shared_prefix"][0], batches["off"][0]
    assert packed.input_ids.numel() < 0.7 * apart.input_ids.numel()
    assert len(packed.trees) == len(VALIDATION) * 5
    torch.testing.assert_close(batches["shared_prefix"][1], batches["off"][1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batches["shared_prefix"][2], batches["off"][2], equal_nan=True)


def test_places_are_the_prompt_and_the_ends_of_sentences(pool: Pool, store_dir: str) -> None:
    (batch,) = data_of(pool.model, store_dir, packing="off", validation_batch_size=40).val_dataloader()
    for row in range(3):
        ids, places = batch.input_ids[row].tolist(), (batch.place_row == row).nonzero().flatten()
        spots = (batch.place[places] - row * batch.input_ids.shape[1]).tolist()
        texts = [pool.chat.tokenizer.decode(ids[: spot + 1]) for spot in spots]
        assert texts[0].endswith("<|assistant|>")
        assert all(text.endswith(".") for text in texts[1:])
        assert len(spots) == 1 + texts[-1].count("1+1=2.") + 1
        assert batch.last_place[row] == places[-1]
        assert batch.place_kind[places].tolist()[:: len(places) - 1] == [0, 4]


def test_a_run_logs_calibration_at_the_ends_and_at_every_place(whole: Whole) -> None:
    folder, logged = whole
    assert math.isfinite(logged["val/discrimination/AUROC"])
    for name in ("Brier", "ECE", "Pinball", "BelowLow"):
        assert all(math.isfinite(logged[f"val/{place}steps/{name}"]) for place in ("", "first/", "end/")), name
    assert logged["val/end/steps/Brier"] == pytest.approx(logged["val/calibration/Brier"], abs=1e-6)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert {name.split(".")[0] for name in checkpoint["state_dict"]} == {"head", "model"}
    assert all("lora" in name or "head" in name for name in checkpoint["state_dict"]), "not the trunk"


TRAINED = pytest.mark.parametrize("trained", [{}, pytest.param(FULL, marks=pytest.mark.slow)], ids=["lora", "full"])


@pytest.mark.slow
@TRAINED
def test_broken_runs_end_as_unbroken_ones(trained: dict[str, Any], pool: Pool, store_dir: str, tmp_path: Path) -> None:
    whole, first, rest = Record(), Record(), Record()
    fit(pool, store_dir, tmp_path / "whole", whole, **trained)
    with pytest.raises(ArithmeticError):
        fit(pool, store_dir, tmp_path / "broken", first, StopAt(3), **trained)
    torch.rand(17)  # the next start finds other random numbers
    last = str(tmp_path / "broken" / "checkpoints" / "last.ckpt")
    fit(pool, store_dir, tmp_path / "broken", rest, ckpt_path=last, **trained)
    ends = [load_file(tmp_path / name / "model" / TRAINED_FILE) for name in ("whole", "broken")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert (len(first.losses), len(rest.losses)) == (3, 1), "in the middle of the second epoch"
    assert [*first.losses, *rest.losses] == whole.losses
    assert [*first.norms, *rest.norms] == whole.norms


@TRAINED
def test_two_processes_end_where_one_does(trained: dict[str, Any], pool: Pool, store_dir: str, tmp_path: Path) -> None:
    start = {"lr": 1e-3, "head_lr": 1e-3, "lora": LoraSettings(r=2, dropout=0.0, activated=False), **trained}
    ends = {}
    for name, settings in {"one": {}, "two": {"devices": 2, "strategy": "ddp_fork"}}.items():
        trainer = trainer_with(AdapterExport(str(tmp_path / name)), max_epochs=2, limit_val_batches=0, **settings)
        data = data_of(pool.model, store_dir, batch_size=24 // settings.get("devices", 1))
        trainer.fit(module_of(pool.model, **start), datamodule=data)
        ends[name] = load_file(tmp_path / name / TRAINED_FILE)
    assert ends["one"].keys() == ends["two"].keys()
    before = module_of(pool.model, **start)
    before.configure_model()
    moved = [(ends["one"][name] - value).abs().max() for name, value in trained_parameters(before).items()]
    assert min(moved) > 2e-4, "the trunk learns as well, once the outputs say something"
    for name, value in ends["one"].items():
        torch.testing.assert_close(ends["two"][name], value, atol=1e-5, rtol=0.0)


def stock_class(folder: Path, outputs: list[str]) -> Any:
    """Load an export as the class of transformers that it says it is of."""
    stock, loading = AutoModelForTokenClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert list(stock.config.id2label.values()) == outputs
    return stock.eval()


def test_its_export_is_read_as_it_was_trained(whole: Whole, pool: Pool, store_dir: str) -> None:
    folder = whole[0] / "model"
    check_files(folder)
    manifest = read_manifest(folder)
    assert (manifest["kind"], manifest["outputs"]) == ("module", ["mean", "gap_below", "gap_above"])
    assert "softplus" in (folder / "README.md").read_text()
    module = module_of(pool.model)
    module.load_export(folder)
    module.configure_model()
    module.eval()
    (batch,) = data_of(pool.model, store_dir, validation_batch_size=40).val_dataloader()
    with torch.no_grad():
        scores = module.scores(batch)
    trained = batch.at_ends(scores.mean)[batch.row.argsort()].tolist()
    samples = list(SampleStore(store_dir, num_samples=4).samples(split="validation"))
    reader = open_rewards(RewardSettings(str(folder)))
    read = [row[-1] for question in reader.read(samples) for row in question]
    assert read == pytest.approx(trained, abs=1e-5)
    lower = [row[-1].low for question in reader.read_scores(samples) for row in question]
    assert all(low < mean for low, mean in zip(lower, read, strict=True))
    asked = [reader.score_paths(entry.question, [()])[0].mean for entry in samples]
    starts = scores.mean[batch.place_kind == 0].reshape(len(samples), -1)
    assert sorted(asked) == pytest.approx(sorted(starts[:, 0].tolist()), abs=1e-5)
    stock = stock_class(folder, ["mean", "gap_below", "gap_above"])
    with torch.no_grad():
        raw = stock(torch.tensor([[*samples[0].prompt_ids, *samples[0].samples[0].token_ids]])).logits[0, -1]
    assert monotone_quantiles(raw).mean.item() == pytest.approx(read[0], abs=1e-5)


def test_a_checkpoint_is_exported_and_a_folder_tells_its_format_and_steps(whole: Whole, tmp_path: Path) -> None:
    path = "selfcal_lightning.rewards.module.QuantileRewardModule"
    checkpoint = str(whole[0] / "checkpoints" / "last.ckpt")
    run_export(checkpoint, str(tmp_path / "out"), merge=False, module=path)
    mine, theirs = (load_file(folder / TRAINED_FILE) for folder in (tmp_path / "out", whole[0] / "model"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    folder = str(whole[0] / "model")
    assert check_rewards(RewardSettings(folder)).has_quantiles
    assert completed(RewardSettings(folder)).steps == "sentence"
    with pytest.raises(InputError, match=r"`reward\.format` 'quantile-prm'.* but got 'trl-prm'"):
        check_rewards(RewardSettings(folder, "trl-prm"))
    with pytest.raises(InputError, match=r"`reward\.steps` 'sentence'.* but got 'line'"):
        check_rewards(RewardSettings(folder, steps="line"))


def test_a_damaged_description_is_refused(tmp_path: Path) -> None:
    content = {"format": "quantile-prm", "steps": "line", "levels": [0.1, 0.9], "target": "outcome"}
    for levels, message in (
        ([0.9, 0.1], r"`levels` in .* to rise within \(0, 1\)"),
        ([0.1, 0.5, 0.9], "must hold format"),
    ):
        (tmp_path / "reward.json").write_text(json.dumps({**content, "levels": levels}))
        with pytest.raises(InputError, match=message):
            read_reward_file(tmp_path)


def test_a_trunk_is_not_trained_in_half_precision(pool: Pool, store_dir: str) -> None:
    module = module_of(pool.model, lora=None, full=True, torch_dtype="bfloat16")
    with pytest.raises(InputError, match=r"`torch_dtype` to keep weights in float32 with `full: true`.*bf16-mixed"):
        trainer_with(max_steps=1).fit(module, datamodule=data_of(pool.model, store_dir))
    module = module_of(pool.model, lora=None, full=True)
    with pytest.raises(InputError, match=r"`trainer\.precision` to keep weights in float32"):
        module._check_trunk_can_learn(trainer_with(precision="bf16-true"))
    module._check_trunk_can_learn(trainer_with(precision="bf16-mixed"))


def test_votes_are_learnt_without_labels(pool: Pool) -> None:
    def unlabelled(question: Any, rng: Any) -> list[dict[str, Any]]:
        answers = ["7", "7", "7", "8", None]
        return [{"text": f"So it is {a}. The answer is {a}.", "answer": a, "correct": None} for a in answers]

    store = pool.write("unlabelled", unlabelled)
    (batch,) = data_of(pool.model, store, target="vote_share", num_samples=5, validation_batch_size=40).val_dataloader()
    assert sorted(set(batch.target.tolist())) == [0.0, 0.25, 0.75]
    assert batch.place_rate.isnan().all()
    with pytest.raises(InputError, match=r"has a target \('outcome'\): no label"):
        data_of(pool.model, store, num_samples=5).train_dataloader()


def test_responses_without_steps_teach_the_question_alone_and_get_no_score(pool: Pool) -> None:
    def blank(question: Any, rng: Any) -> list[dict[str, Any]]:
        texts = {"": None, "So 7. The answer is 7.": "7", "  ": None, "It is 8.": "8"}
        return [{"text": text, "answer": answer, "correct": answer == "7"} for text, answer in texts.items()]

    store = pool.write("blank", blank)
    data = data_of(pool.model, store, validation_batch_size=40)
    (batch,) = data.val_dataloader()
    numbers = torch.bincount(batch.place_row).reshape(-1, 4)
    assert numbers.tolist() == [[1, 3, 1, 2]] * len(numbers)
    assert batch.last_place.reshape(-1, 4)[:, [0, 2]].eq(-1).all()
    trainer = trainer_with(max_steps=2)
    trainer.fit(module_of(pool.model), datamodule=data)
    logged = trainer.callback_metrics
    assert (logged["val/count/WithoutConfidence"], logged["val/count/Responses"]) == (len(batch.last_place) / 2, 20)
    assert math.isfinite(logged["val/calibration/Brier"])


def test_steps_that_are_cut_off_are_no_places(pool: Pool, store_dir: str) -> None:
    (whole,) = data_of(pool.model, store_dir, validation_batch_size=40).val_dataloader()
    longest = max(tree.prompt for tree in whole.trees) + 12
    (cut,) = data_of(pool.model, store_dir, validation_batch_size=40, max_length=longest).val_dataloader()
    assert len(cut.place) < len(whole.place)
    assert max(tree.prompt + max(tree.branches) for tree in cut.trees) <= longest
    kept, had = (torch.bincount(batch.place_row)[batch.row.argsort()] for batch in (cut, whole))
    ends = (cut.last_place >= 0)[cut.row.argsort()]
    assert torch.equal(ends, kept == had), "a cut response has no end"
    assert set(ends.tolist()) == {True, False}


def test_tokens_of_another_tokenizer_are_refused(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    """The chat template and the query are the same; the digits 1 and 2 have changed places."""
    file = Path(plain_copy(pool.model, tmp_path / "other"), "tokenizer.json")
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    file.write_text(json.dumps(tokens))
    data = data_of(str(file.parent), store_dir)
    with pytest.raises(InputError, match=r"not in the tokens of `base_model`.*Train on the policy that sampled them"):
        data.train_dataloader()


# ---- from a public reward model

FORMATS = ("qwen2.5-math-prm", "math-shepherd", "rlhflow-prm", "reasoneval", "skywork-o1-prm", "trl-prm")


@pytest.fixture(scope="module")
def publics(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("publics")
    return {name: stand_in(tiny_model, folder / name, reward_format(name)) for name in FORMATS}


def public_module(publics: dict[str, str], name: str, **changes: Any) -> QuantileRewardModule:
    return module_of(publics[name], **{"format": name, "lora": None, **changes})


def public_data(publics: dict[str, str], name: str, store: str, **changes: Any) -> RewardDataModule:
    settings = {"format": name, "num_samples": 2, "max_length": 400, "validation_batch_size": 40, **changes}
    return data_of(publics[name], store, **settings)


def scores_of(module: QuantileRewardModule, data: RewardDataModule) -> list[list[float]]:
    """Return the means of the validation responses, in the order of the store."""
    (batch,) = data.val_dataloader()
    module.eval()
    with torch.no_grad():
        mean = module.scores(batch).mean
    rows = sorted(set(batch.row.tolist()))
    numbers = batch.row.tolist()
    return [mean[batch.place_row == numbers.index(row)].tolist() for row in rows]


def assert_read_alike(scores: list[list[float]], settings: RewardSettings, store: str) -> None:
    """Hold scores of the validation responses against those that are read by ``settings``."""
    samples = list(SampleStore(store, num_samples=2).samples(split="validation"))
    read = [row for question in open_rewards(settings).read(samples) for row in question]
    for own, theirs in zip(scores, read, strict=True):
        assert own == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_it_starts_as_the_public_model(name: str, publics: dict[str, str], pool: Pool, store_dir: str) -> None:
    module = public_module(publics, name)
    module.configure_model()
    for packing in ("off", "shared_prefix"):
        scores = scores_of(module, public_data(publics, name, store_dir, packing=packing))
        assert_read_alike(scores, RewardSettings(publics[name], name, "sentence"), store_dir)


def test_no_chat_is_needed_where_the_format_has_none(tiny_model: str, store_dir: str, tmp_path: Path) -> None:
    folder = Path(stand_in(tiny_model, tmp_path / "m", reward_format("math-shepherd")))
    (folder / "chat_template.jinja").unlink()
    publics = {"math-shepherd": str(folder)}
    module = public_module(publics, "math-shepherd")
    module.configure_model()
    assert len(scores_of(module, public_data(publics, "math-shepherd", store_dir))) == 5 * 2


def fit_public(publics: dict[str, str], name: str, store: str, folder: Path, **changes: Any) -> Trainer:
    trainer = trainer_with(AdapterExport(str(folder)), max_steps=2)
    trainer.fit(public_module(publics, name, **changes), datamodule=public_data(publics, name, store))
    return trainer


def test_all_weights_are_exported_as_a_stock_class(publics: dict[str, str], store_dir: str, tmp_path: Path) -> None:
    """A mean of two rows, in a stock class of four named outputs."""
    name, folder = "reasoneval", tmp_path / "model"
    module = fit_public(publics, name, store_dir, folder, full=True).lightning_module
    before, after = load_file(Path(publics[name]) / "model.safetensors"), load_file(folder / "model.safetensors")
    trunk = [key for key in before if key.startswith("model.")]
    assert trunk
    assert all(not torch.equal(before[key], after[key]) for key in trunk if "embed" not in key)
    trained = scores_of(module.cpu(), public_data(publics, name, store_dir, packing="off"))
    assert_read_alike(trained, RewardSettings(str(folder)), store_dir)
    stock = stock_class(folder, ["mean_1", "mean_2", "gap_below", "gap_above"])
    assert "log(exp(mean_1) + exp(mean_2))" in (folder / "README.md").read_text()
    writer = public_data(publics, name, store_dir).collator().writer
    first = next(SampleStore(store_dir).samples(split="validation"))
    written = writer.write(first.question, first.samples[0].text)
    with torch.no_grad():
        raw = stock(torch.tensor([written.ids])).logits[0, list(written.positions)]
    assert monotone_quantiles(folded_outputs(raw)).mean.tolist() == pytest.approx(trained[0], abs=1e-5)
    again = public_module(publics, name, full=True)
    again.load_export(folder)
    again.configure_model()
    found = scores_of(again, public_data(publics, name, store_dir, packing="off"))
    assert found == [pytest.approx(row, abs=1e-6) for row in trained]


def test_a_head_of_two_layers_is_no_classifier(publics: dict[str, str], store_dir: str, tmp_path: Path) -> None:
    name, folder = "qwen2.5-math-prm", tmp_path / "model"
    lora = LoraSettings(r=2, activated=False)
    module = fit_public(publics, name, store_dir, folder, lora=lora).lightning_module
    trained, head = load_file(folder / TRAINED_FILE), head_of(reward_format(name))
    assert not torch.equal(trained["head.0.weight"], head["score.0.weight"]), "its first layer too"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaModel"]
    stated = json.loads((folder / "reward.json").read_text())["format"]
    assert stated == quantiles_of(reward_format(name)).name == "quantiles-of-qwen2.5-math-prm"
    trained_scores = scores_of(module.cpu(), public_data(publics, name, store_dir, packing="off"))
    assert_read_alike(trained_scores, RewardSettings(str(folder)), store_dir)


def test_starts_that_cannot_be(publics: dict[str, str], store_dir: str) -> None:
    """What else a model may lack is refused by the same checks as in `test_damaged_models`."""
    module = public_module(publics, "trl-prm")
    with pytest.raises(InputError, match=r"`format` is 'trl-prm' in the module"):
        trainer_with(max_steps=1).fit(module, datamodule=public_data(publics, "reasoneval", store_dir))
    with pytest.raises(InputError, match=r"no `SSCGeneration` with .*`format='trl-prm'`"):
        trainer_with(generation(), max_steps=1).fit(module, datamodule=public_data(publics, "trl-prm", store_dir))
    with pytest.raises(InputError, match=r"score\.weight, score\.bias is missing"):
        public_module(publics, "reasoneval", format="trl-prm").configure_model()


def test_responses_that_cannot_be_written_are_counted_and_teach_nothing(publics: dict[str, str], pool: Pool) -> None:
    def spoofed(question: Any, rng: Any) -> list[dict[str, Any]]:
        texts = ["It is 7.", "It is <extra_0> 8.", " "]
        return [{"text": text, "answer": "7", "correct": index == 0} for index, text in enumerate(texts)]

    store = pool.write("spoofed", spoofed, encoded=False)
    name = "qwen2.5-math-prm"
    data = public_data(publics, name, store, num_samples=3, total_tuples=12)
    (batch,) = data.val_dataloader()
    assert len(batch.place) == 5
    assert batch.last_place.tolist().count(-1) == 10
    (training,) = data.train_dataloader()
    assert training.batch_size == 12
    assert not training.last_place.eq(-1).any()
