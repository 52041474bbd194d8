import hashlib
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from support.module_batches import MIXED, batch_of
from support.other_models import activated, changed_copy, checkpoint, plain_copy, reference_p_true, shaken, snapshot
from support.processes import files_of_at_most
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from selfcal_lightning.cli import run
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.engines.vllm.records import lora_rank
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.folders import MANIFEST, check_files, list_files, read_invocation_ids, read_manifest
from selfcal_lightning.models.lora import read_adapter_state
from selfcal_lightning.records import Message
from selfcal_lightning.training.export import describe_folder, place_aside, replacing, write_export
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

IDS = torch.arange(10, 34).view(2, 12)


@pytest.fixture(scope="module")
def module(tiny_model: str) -> SelfCalibrationModule:
    return shaken(tiny_model)


@pytest.fixture
def adapter(module: SelfCalibrationModule, tmp_path: Path) -> Path:
    metrics = {"val/x": 0.5, "val/undefined": float("nan")}
    return write_export(module, tmp_path / "adapter", store={"digests": {"0": "abc"}}, metrics=metrics)


def test_a_card_with_a_chinese_query_is_written_in_any_locale(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(adapter)
    prompt = {**manifest["prompt"], "query": "答案正确吗?"}
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "latin-1")  # as where LANG is en_US
    describe_folder(adapter, {**manifest, "prompt": prompt})
    assert prompt["query"] in (adapter / "README.md").read_bytes().decode()


def test_adapter_folder_says_what_it_is(module: SelfCalibrationModule, adapter: Path, tiny_model: str) -> None:
    manifest = read_manifest(adapter)
    assert (manifest["kind"], manifest["base_model"]["model"]) == ("adapter", tiny_model)
    assert manifest["prompt"] == module.chat.describe()
    assert manifest["p_true"] == "normalised"
    assert manifest["store"] == {"digests": {"0": "abc"}}
    assert manifest["metrics"] == {"val/x": 0.5}
    assert set(manifest["versions"]) >= {"torch", "transformers", "peft"}
    assert AutoTokenizer.from_pretrained(adapter).chat_template
    card = (adapter / "README.md").read_text()
    assert "P(Yes) / (P(Yes) + P(No))" in card
    assert "More Information Needed" not in card


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_merged_model_has_the_adapters_logits(
    module: SelfCalibrationModule, adapter: Path, tmp_path: Path, tiny_model: str, source: str
) -> None:
    given = str(adapter) if source == "adapter" else checkpoint(module, tmp_path / "last.ckpt")
    written = run_export(given, str(tmp_path / "merged"), dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
    expected = module.model(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=0)
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    assert (base(IDS).logits - expected).abs().max() > 0.1
    assert merged.generation_config.eos_token_id == base.generation_config.eos_token_id
    template = AutoTokenizer.from_pretrained(tiny_model).chat_template
    assert AutoTokenizer.from_pretrained(written).chat_template == template
    manifest = read_manifest(Path(written))
    assert manifest["kind"] == "merged"
    assert manifest["base_model"]["model"] == tiny_model


@pytest.mark.vllm
@pytest.mark.slow
def test_merged_model_loads_in_vllm(module: SelfCalibrationModule, adapter: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from selfcal_lightning.engines.vllm.engine import VLLMEngine

    written = run_export(str(adapter), str(tmp_path / "merged"), dtype="float32")
    prompt, asked = IDS[0].tolist(), [*module.chat.query.yes_ids, *module.chat.query.no_ids]
    engine = VLLMEngine(written, dtype="float32")
    try:
        (probabilities,) = engine.next_token_probabilities([prompt], asked)
    finally:
        engine.close()
    expected = module.model(torch.tensor([prompt])).logits[0, -1].softmax(-1)[asked]
    torch.testing.assert_close(torch.tensor(probabilities), expected, atol=1e-4, rtol=0)


def test_fully_trained_model_is_exported_whole(tiny_model: str, tmp_path: Path) -> None:
    module = shaken(tiny_model, lora=None, gradient_checkpointing=True, recompute_above=6000)
    folder = write_export(module, tmp_path / "full")
    assert read_manifest(folder)["kind"] == "model"
    expected = module.model(IDS).logits
    for written in (folder, run_export(checkpoint(module, tmp_path / "f.ckpt"), str(tmp_path / "m"), dtype="float32")):
        loaded = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32).eval()
        torch.testing.assert_close(loaded(IDS).logits, expected, atol=1e-4, rtol=0)


def test_an_export_has_neither_the_attention_nor_the_type_of_its_training(tiny_model: str, tmp_path: Path) -> None:
    base = load_causal_lm(tiny_model, dtype="float16")
    base.save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "half")
    module = shaken(str(tmp_path / "half"))
    module.hparams["attn_implementation"] = "flash_attention_2"
    given = checkpoint(module, tmp_path / "last.ckpt")
    merged = AutoModelForCausalLM.from_pretrained(run_export(given, str(tmp_path / "merged")))
    assert merged.dtype == torch.float16
    torch.testing.assert_close(merged.float().eval()(IDS).logits, module.model(IDS).logits, atol=0.05, rtol=0)
    adapter = Path(run_export(given, str(tmp_path / "adapter"), merge=False))
    assert read_manifest(adapter)["hyper_parameters"]["attn_implementation"] == "flash_attention_2"


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_another_base_model_is_refused(
    module: SelfCalibrationModule, adapter: Path, tmp_path: Path, tiny_model: str, source: str
) -> None:
    given = str(adapter) if source == "adapter" else checkpoint(module, tmp_path / "last.ckpt")
    other = changed_copy(tiny_model, tmp_path / "other")
    with pytest.raises(ValueError, match=r"(?s)/other") as raised:
        run_export(given, str(tmp_path / "merged"), base_model=other)
    assert tiny_model in str(raised.value)
    assert not (tmp_path / "merged").exists()


def test_folders_that_hold_something_or_what_is_trained_are_kept(
    adapter: Path, tmp_path: Path, module: SelfCalibrationModule, tiny_model: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="`output_dir` must be new or empty"):
        run_export(str(adapter), str(tmp_path / "full"))
    with pytest.raises(ValueError, match="which holds other files"):
        run_export(str(adapter), str(tmp_path / "full"), overwrite=True)
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
    other = write_export(module, tmp_path / "other")
    whole = write_export(shaken(tiny_model, lora=None), tmp_path / "whole")
    for target, what in {adapter: "an adapter", other: "an adapter", whole: "a trained model"}.items():
        before = snapshot(target)
        with pytest.raises(ValueError, match=rf"which holds {what}: that is never replaced here"):
            run_export(str(adapter), str(target), overwrite=True)
        assert snapshot(target) == before


@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_the_output_lies_apart_from_what_is_merged(
    module: SelfCalibrationModule, adapter: Path, tmp_path: Path, tiny_model: str, source: str
) -> None:
    read, above = tmp_path / "read", tmp_path / "read" / "above"
    above.mkdir(parents=True)
    base = Path(plain_copy(tiny_model, above / "base"))
    own = adapter.rename(read / "own") if source == "adapter" else Path(checkpoint(module, read / "last.ckpt"))
    for folder in (base, above, read):  # as if a merged model lay there, which could be replaced
        (folder / MANIFEST).write_text(json.dumps({"kind": "merged", "format": 2, "files": list_files(folder)}))
    before = snapshot(read)
    for target in (base, above, read, base / "merged" / "here", *([own / "merged"] if source == "adapter" else [])):
        with pytest.raises(ValueError, match=r"`output_dir` to lie apart from the (adapter|checkpoint|base model)"):
            run_export(str(own), str(target), base_model=str(base), overwrite=True)
    assert snapshot(read) == before


def test_a_link_to_the_adapter_is_the_adapter(adapter: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(adapter)
    (adapter / MANIFEST).unlink()
    with pytest.raises(ValueError, match="which holds other files"):
        run_export(str(adapter), str(tmp_path / "link"), overwrite=True)
    with pytest.raises(ValueError, match="lie apart from the adapter"):
        run_export(str(adapter), str(tmp_path / "link" / "merged"))


def test_what_somebody_put_into_an_earlier_export_is_not_lost(adapter: Path, tmp_path: Path) -> None:
    merged = run_export(str(adapter), str(tmp_path / "merged"))
    notes = Path(merged) / "evaluation" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    with pytest.raises(ValueError, match=r"earlier export with other files in it, such as 'evaluation/notes.txt'"):
        run_export(str(adapter), merged, overwrite=True)
    assert notes.read_text() == "mine"
    notes.unlink()
    run_export(str(adapter), merged, overwrite=True)


def test_a_full_disk_leaves_what_was_there(adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    merged = run_export(str(adapter), str(tmp_path / "merged"))
    before = snapshot(Path(merged))
    with files_of_at_most(100_000):
        assert run(["export", "--adapter", str(adapter), "--output_dir", merged, "--overwrite", "true"]) == 1
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert f"No space to write {merged}: got" in told
    assert "bytes free. What was there before is untouched" in told
    assert snapshot(Path(merged)) == before
    assert not list(tmp_path.glob(".merged*"))


def test_something_else_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`adapter` to be a checkpoint file or a folder"):
        run_export(str(tmp_path), str(tmp_path / "merged"))
    with pytest.raises(ValueError, match=r"`module` together with a checkpoint"):
        run_export(str(tmp_path), str(tmp_path / "merged"), module="mine.Module")
    lightning = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 1, "state_dict": {}}
    torch.save({"run": test_something_else_is_no_adapter}, tmp_path / "code.ckpt")
    torch.save({"hyper_parameters": {"lr": 0.1}, **lightning}, tmp_path / "other.ckpt")
    for name, message in {"code": "cannot be read", "other": "names no base model"}.items():
        with pytest.raises(ValueError, match=message):
            run_export(str(tmp_path / f"{name}.ckpt"), str(tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


def test_a_link_stays_and_the_folder_that_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "disk" / "place").mkdir(parents=True)
    (tmp_path / "adapter").symlink_to(tmp_path / "disk" / "place")
    for content in ("first", "second"):
        with replacing(tmp_path / "adapter") as fresh:
            (fresh / "weights").write_text(content)
        assert (tmp_path / "disk" / "place" / "weights").read_text() == content
    with replacing(tmp_path / "adapter", keep=place_aside(tmp_path / "adapter")):
        pass
    (kept,) = (tmp_path / "disk").glob("place-*")
    assert (kept / "weights").read_text() == "second"
    assert (tmp_path / "adapter").is_symlink()


def test_a_folder_is_replaced_in_one_step_and_what_a_kill_left_behind_is_cleared_away(tmp_path: Path) -> None:
    folder, mine = tmp_path / "adapter", tmp_path / "adapter.bak"
    for left in (mine, tmp_path / ".adapter.new", tmp_path / ".adapter.old"):
        left.mkdir()
        (left / "weights").write_text(left.name)
    for before, content in ((None, "first"), ("first", "second")):
        with pytest.raises(FileNotFoundError), replacing(folder) as fresh:
            (fresh / "absent" / "half").write_text("written")
        assert before or (tmp_path / ".adapter.old" / "weights").is_file(), "the only copy of an export"
        with replacing(folder) as fresh:
            assert not list(fresh.iterdir())
            (fresh / "weights").write_text(content)
            assert before is None or (folder / "weights").read_text() == before
        assert (folder / "weights").read_text() == content
        assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "adapter.bak"]
    assert (mine / "weights").read_text() == "adapter.bak"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)


@pytest.mark.parametrize("at", [-1, -5000, -20000])
def test_a_flipped_bit_is_found_wherever_it_is_read(adapter: Path, tmp_path: Path, tiny_model: str, at: int) -> None:
    weights = adapter / "adapter_model.safetensors"
    flip(weights, at)
    for read in (
        lambda: run_export(str(adapter), str(tmp_path / "merged")),
        lambda: load_network(tiny_model, revision=None, adapter=str(adapter), dtype="float32", device="cpu"),
        lambda: read_adapter_state(adapter),
        lambda: lora_rank(str(adapter)),
    ):
        with pytest.raises(ValueError, match=rf"Expected {weights} to be the file that was exported, .* it is damaged"):
            read()
    assert not (tmp_path / "merged").exists()


def test_so_is_a_changed_configuration(adapter: Path, tmp_path: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(file.read_text().replace('"lora_alpha": 16', '"lora_alpha": 61'))
    with pytest.raises(ValueError, match=rf"Expected {file} to be the file that was exported"):
        run_export(str(adapter), str(tmp_path / "merged"))
    manifest = read_manifest(adapter)
    manifest["files"]["adapter_config.json"] = None  # the way out for who changed it on purpose
    (adapter / MANIFEST).write_text(json.dumps(manifest))
    run_export(str(adapter), str(tmp_path / "merged"))


@pytest.mark.parametrize(
    "load",
    [load_causal_lm, lambda folder: load_network(folder, revision=None, adapter=None, dtype="float32", device="cpu")],
    ids=["models", "engines"],
)
def test_so_is_a_damaged_merged_model(adapter: Path, tmp_path: Path, load: Callable[[str], Any]) -> None:
    merged = Path(run_export(str(adapter), str(tmp_path / "merged")))
    (merged / "README.md").write_text("my own card")
    load(str(merged))
    flip(merged / "model.safetensors", -100)
    with pytest.raises(ValueError, match=rf"Expected {merged / 'model.safetensors'} to be the file that was exported"):
        load(str(merged))
    (merged / "model.safetensors").rename(merged / "weights.safetensors")
    with pytest.raises(ValueError, match=r"to be there as selfcal_manifest\.json says, but it is missing"):
        check_files(merged)


def test_a_manifest_that_cannot_be_read_is_named(adapter: Path, tmp_path: Path) -> None:
    for content, message in {
        '{"kind": "adapter", "format": 3, "files": {}}': "to be 2, but got 3",
        '{"kind": "adapter",\n "base': ":2: Expected a JSON object",
        '{"kind": "adapter", "format": 2, "files": []}': r"map names to hashes, but got \[\]",
    }.items():
        (adapter / MANIFEST).write_text(content)
        with pytest.raises(ValueError, match=message):
            run_export(str(adapter), str(tmp_path / "merged"))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A hub that keeps the texts that were uploaded last, and the names of the other files."""
    hub = Mock()

    def upload(*, folder_path: str, **_: Any) -> None:
        files = Path(folder_path).iterdir()
        hub.uploaded = {file.name: "" if file.suffix == ".safetensors" else file.read_text() for file in files}

    hub.return_value.upload_folder.side_effect = upload
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    return hub


def test_push_creates_a_private_repository_and_never_shows_the_token(
    adapter: Path, tmp_path: Path, hub: Mock, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG")
    run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    hub.assert_called_once_with(token="hf_secret")  # noqa: S106
    hub.return_value.create_repo.assert_called_once_with("me/calibrated", private=True, exist_ok=True)
    assert hub.return_value.upload_folder.call_args.kwargs["repo_id"] == "me/calibrated"
    assert {"config.json", "generation_config.json", "model.safetensors", MANIFEST} <= hub.uploaded.keys()
    assert "hf_secret" not in caplog.text + "".join(capsys.readouterr())
    assert "hf_secret" not in json.dumps(read_manifest(tmp_path / "merged"))


def test_what_is_pushed_names_no_place_on_this_machine(
    tiny_model: str, tmp_path: Path, hub: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    base = plain_copy(tiny_model, tmp_path / "secret-base")
    facts = {"store": {"path": str(tmp_path / "secret-store"), "digests": {"0": "abc"}}}
    adapter = write_export(shaken(base), tmp_path / "secret-adapter", **facts, training={"at": "~/secret-notes"})
    written = Path(run_export(str(adapter), str(tmp_path / "secret-merged"), push="me/calibrated"))
    for name, text in hub.uploaded.items():
        assert "secret" not in text, name
        assert str(tmp_path) not in text, name
    manifest, kept = json.loads(hub.uploaded[MANIFEST]), read_manifest(written)
    assert manifest["base_model"] == {**kept["base_model"], "model": None}
    assert manifest["base_model"]["weights_sha256"] in hub.uploaded["README.md"], "it is named by its weights"
    assert "base_model:" not in hub.uploaded["README.md"]
    assert manifest["store"] == {"digests": {"0": "abc"}}
    assert manifest["prompt"] == kept["prompt"]
    assert manifest["hyper_parameters"] == {**kept["hyper_parameters"], "base_model": None}
    assert kept["base_model"]["model"] == base, "the folder itself still says where its base model lies"
    assert kept["store"]["path"] == str(tmp_path / "secret-store")
    assert "`--base_model OWNER/NAME`" in capsys.readouterr().err


def test_a_base_model_of_the_hub_is_named(tiny_model: str, tmp_path: Path, hub: Mock) -> None:
    snapshot = tmp_path / "models--org--m" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    base = plain_copy(tiny_model, snapshot)
    adapter = write_export(shaken(base), tmp_path / "adapter")
    run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    manifest = json.loads(hub.uploaded[MANIFEST])
    assert manifest["base_model"]["model"] == manifest["hyper_parameters"]["base_model"] == "org/m"
    assert "base_model: org/m\n" in hub.uploaded["README.md"]


def test_a_configuration_that_names_a_place_is_pushed_without_it_and_with_its_own_hash(
    adapter: Path, tmp_path: Path, hub: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_before = PreTrainedConfig.to_json_string

    def naming_a_place(*given: Any, **options: Any) -> str:
        return json.dumps(json.loads(as_before(*given, **options)) | {"_name_or_path": "/disk/secret"})

    monkeypatch.setattr(PreTrainedConfig, "to_json_string", naming_a_place)
    written = Path(run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated"))
    assert "secret" in (written / "config.json").read_text()
    pushed = hub.uploaded["config.json"]
    assert json.loads(pushed)["_name_or_path"] is None
    assert json.loads(hub.uploaded[MANIFEST])["files"]["config.json"] == hashlib.sha256(pushed.encode()).hexdigest()
    check_files(written)


def test_push_without_a_token_fails_at_once(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(ValueError, match="HF_TOKEN"):
        run_export(str(adapter), str(tmp_path / "merged"), push="me/calibrated")
    assert not (tmp_path / "merged").exists()


# ---- activated adapters: what plain PEFT makes of the folder, and that nothing merges it


@pytest.fixture(scope="module")
def asleep(tiny_model: str) -> SelfCalibrationModule:
    """A module whose adapter is active on the tokens of the confidence query alone."""
    return activated(tiny_model, std=0.3)


@pytest.fixture
def alora(asleep: SelfCalibrationModule, tmp_path: Path) -> Path:
    return write_export(asleep, tmp_path / "alora")


def test_the_folder_says_when_the_adapter_wakes(
    asleep: SelfCalibrationModule, alora: Path, adapter: Path, tiny_model: str
) -> None:
    config, suffix = json.loads((alora / "adapter_config.json").read_text()), asleep.chat.query.suffix_ids
    assert config["alora_invocation_tokens"] == list(suffix) == read_manifest(alora)["prompt"]["suffix_ids"]
    assert (config["base_model_name_or_path"], config["revision"]) == (tiny_model, None)
    assert (config["r"], config["lora_alpha"], sorted(config["target_modules"])) == (4, 8, ["q_proj", "v_proj"])
    assert read_invocation_ids(str(alora)) == suffix
    assert read_manifest(alora)["activated"] is True
    assert read_invocation_ids(str(adapter)) is None
    assert "alora" not in (adapter / "README.md").read_text().lower()


@torch.no_grad()
def test_plain_peft_states_the_same_confidences(asleep: SelfCalibrationModule, alora: Path) -> None:
    batch = batch_of(MIXED[:8], asleep.chat)
    wanted = asleep.confidence(batch).p_true.float()
    found = AutoPeftModelForCausalLM.from_pretrained(alora, dtype=torch.float32).eval()  # finds the base by itself
    torch.testing.assert_close(reference_p_true(found, batch, asleep.chat), wanted, atol=1e-5, rtol=0)
    with found.disable_adapter():
        assert (reference_p_true(found, batch, asleep.chat) - wanted).abs().max() > 0.02


@torch.no_grad()
def test_the_model_card_can_be_followed(asleep: SelfCalibrationModule, alora: Path, tmp_path: Path) -> None:
    card = (alora / "README.md").read_text()
    assert "must not be merged" in card
    script = tmp_path / "card.py"
    script.write_text(card.partition("```python\n")[2].partition("```")[0])
    confidence = runpy.run_path(str(script), init_globals={"folder": str(alora)})["confidence"]
    question, response = "Ann has 3 apples and buys 4 more.", "So it is 7"
    rows = asleep.chat.prompt_ids([Message("user", question)]), asleep.chat.response_ids(response)
    ids = torch.tensor([[*rows[0], *rows[1], *asleep.chat.query.suffix_ids]])
    row = batch_of(MIXED[:1], asleep.chat).replace(
        input_ids=ids, attention_mask=torch.ones_like(ids), query_position=torch.tensor([ids.shape[1] - 1])
    )
    found = confidence([{"role": "user", "content": question}], response)
    assert found == pytest.approx(asleep.confidence(row).p_true.item(), abs=1e-5)


@pytest.mark.parametrize("source", ["adapter", "checkpoint", "of PEFT alone"])
def test_merging_an_activated_adapter_is_refused(
    source: str, asleep: SelfCalibrationModule, alora: Path, tmp_path: Path
) -> None:
    given = checkpoint(asleep, tmp_path / "last.ckpt") if source == "checkpoint" else str(alora)
    if source == "of PEFT alone":
        (alora / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"change what the model generates.*`--adapter` with") as raised:
        run_export(given, str(tmp_path / "merged"))
    assert ("`--merge false`" in str(raised.value)) == (source == "checkpoint")
    assert not (tmp_path / "merged").exists()


def test_the_adapter_of_a_checkpoint_is_written(asleep: SelfCalibrationModule, alora: Path, tmp_path: Path) -> None:
    given = checkpoint(asleep, tmp_path / "a.ckpt")
    written = Path(run_export(given, str(tmp_path / "written"), merge=False))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (written / name).read_bytes() == (alora / name).read_bytes()
    mine, theirs = read_manifest(alora), read_manifest(written)
    for name in ("kind", "base_model", "prompt", "activated", "hyper_parameters", "quantization"):
        assert mine[name] == theirs[name]
    with pytest.raises(ValueError, match="A folder is an adapter already"):
        run_export(str(alora), str(tmp_path / "again"), merge=False)
    with pytest.raises(ValueError, match="`dtype` to be auto with `merge: false`"):
        run_export(given, str(tmp_path / "again"), merge=False, dtype="float32")
