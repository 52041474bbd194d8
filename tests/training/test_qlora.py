import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from support import module_batches, training_runs
from support.other_models import reference_p_true
from support.processes import run_processes
from support.training_runs import Record
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.commands.export import run_export
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings, adapter_state, set_adapter_state
from selfcal_lightning.models.quantization import build_optimizer, quantized_layers
from selfcal_lightning.training.self_calibration import SelfCalibrationModule

pytest.importorskip("bitsandbytes", reason="needs the extra qlora")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
# Tensors of 4,096 elements (q_proj, A of v_proj) and of 2,048 (B of v_proj).
WIDE = replace(module_batches.NO_DROPOUT, r=32, alpha=16)
SHALLOW = True


def test_checkpointed_activations_change_nothing(tiny_model: str, chat: ChatFormat) -> None:
    states = []
    for gradient_checkpointing in (False, True):
        module = module_batches.qlora(tiny_model, gradient_checkpointing=gradient_checkpointing)
        batch = module_batches.batch_of(module_batches.MIXED[:8], chat)
        module_batches.quiet_trainer(max_epochs=3).fit(module, DataLoader([batch], batch_size=None))
        states.append(module_batches.trained_state(module))
    assert module_batches.largest_difference(*states) < 1e-6
    assert max(value.abs().max() for name, value in states[0].items() if "lora_B" in name) > 1e-2


def trained_by(world: int, tiny_model: str, chat: ChatFormat, optimizer: str) -> dict[str, torch.Tensor]:
    module = module_batches.qlora(tiny_model, lora=WIDE, lr=1e-3, optimizer=optimizer)
    module_batches.quiet_trainer(devices=world).fit(module, datamodule=module_batches.Planned(chat, 8 // world))
    return module_batches.trained_state(module)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_two_processes_take_the_steps_of_one(tiny_model: str, chat: ChatFormat, tmp_path: Path, optimizer: str) -> None:
    one = trained_by(1, tiny_model, chat, optimizer)
    first, second = run_processes(trained_by, tmp_path, 2, tiny_model, chat, optimizer)
    assert module_batches.largest_difference(first, second) == 0.0
    # In 8 bits, gradients that differ in the last bit of float32 may be rounded to neighbours.
    assert module_batches.largest_difference(one, first) < (1e-5 if optimizer == "adamw" else 2e-4)
    assert max(value.abs().max() for name, value in one.items() if "lora_B" in name) > 2e-3


def steps(tiny_model: str, chat: ChatFormat, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    """Train on one batch; return the losses, the adapter and the optimiser."""
    record = Record()
    module = module_batches.qlora(tiny_model, lora=WIDE, **settings)
    trainer = module_batches.quiet_trainer(callbacks=[record], max_epochs=8)
    trainer.fit(module, DataLoader([module_batches.batch_of(module_batches.MIXED[:8], chat)], batch_size=None))
    return record.losses, module_batches.trained_state(module), trainer.optimizers[0]


@pytest.fixture(scope="module")
def plain_steps(tiny_model: str, chat: ChatFormat) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    return steps(tiny_model, chat, optimizer="adamw")


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_optimisers_lower_the_loss(tiny_model: str, chat: ChatFormat, plain_steps: tuple, name: str) -> None:
    losses, state, optimizer = steps(tiny_model, chat, optimizer=name)
    plain_losses, plain_state, _ = plain_steps
    assert losses[0] == plain_losses[0]
    assert losses[-1] < 0.7 * losses[0]
    moments = {value.numel(): optimizer.state[value]["state1"].dtype for value in optimizer.param_groups[0]["params"]}
    if name == "paged_adamw":  # the same arithmetic as torch's
        assert moments == {4096: torch.float32, 2048: torch.float32}
        assert module_batches.largest_difference(state, plain_state) < 1e-4
    else:
        assert moments == {4096: torch.uint8, 2048: torch.float32}
        assert losses[-1] == pytest.approx(plain_losses[-1], rel=0.2)


def test_weight_decay_and_learning_rate_reach_the_optimiser() -> None:
    for name in ("adamw", "adamw_8bit", "paged_adamw", "paged_adamw_8bit"):
        weight = torch.nn.Parameter(torch.full((4096,), 2.0))
        weight.grad = torch.zeros_like(weight)
        build_optimizer(name, [weight], lr=0.5, weight_decay=0.1).step()
        torch.testing.assert_close(weight.data, torch.full((4096,), 2.0 * (1 - 0.5 * 0.1)))


@pytest.fixture(scope="module")
def checkpoints(tiny_model: str, chat: ChatFormat, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two epochs with dropout; the checkpoint of each epoch's end, and the module."""
    folder = tmp_path_factory.mktemp("qlora")
    torch.manual_seed(1)
    module = module_batches.qlora(tiny_model, lora=replace(WIDE, dropout=0.2), optimizer="paged_adamw_8bit")
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer = module_batches.quiet_trainer(max_epochs=2, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(module, datamodule=module_batches.Planned(chat, 8))
    return folder, module


def test_checkpoint_holds_the_adapter_and_8_bit_moments(checkpoints: tuple[Path, Any]) -> None:
    folder, module = checkpoints
    path = folder / "epoch=1.ckpt"
    checkpoint = torch.load(path, weights_only=True)
    assert checkpoint["hyper_parameters"]["quantization"] == "nf4"
    elements = sum(value.numel() for value in checkpoint["state_dict"].values())
    # Four bytes of weight an element, and two of moments where these are quantised; eight in 32 bits.
    assert 6 * elements < path.stat().st_size < 8 * elements
    loaded = SelfCalibrationModule.load_from_checkpoint(path)
    assert len(quantized_layers(loaded)) == 7 * loaded.model.config.num_hidden_layers
    states = map(module_batches.trained_state, (loaded, module))
    assert module_batches.largest_difference(*states) == 0.0


def _tensors(value: Any, place: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {place: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: found for key, inner in items for name, found in _tensors(inner, f"{place}/{key}").items()}


def test_a_run_resumes_exactly(
    checkpoints: tuple[Path, Any], tiny_model: str, chat: ChatFormat, tmp_path: Path
) -> None:
    folder, _ = checkpoints
    torch.manual_seed(2)
    module = module_batches.qlora(tiny_model, lora=replace(WIDE, dropout=0.2), optimizer="paged_adamw_8bit")
    trainer = module_batches.quiet_trainer(max_epochs=2)
    trainer.fit(module, datamodule=module_batches.Planned(chat, 8), ckpt_path=folder / "epoch=0.ckpt")
    trainer.save_checkpoint(tmp_path / "resumed.ckpt")
    paths = (tmp_path / "resumed.ckpt", folder / "epoch=1.ckpt", folder / "epoch=0.ckpt")
    resumed, whole, half = (torch.load(path, weights_only=True) for path in paths)
    assert (resumed["global_step"], half["global_step"]) == (6, 3)
    for part in ("state_dict", "optimizer_states"):
        here, there, before = (_tensors(checkpoint[part]) for checkpoint in (resumed, whole, half))
        assert here.keys() == there.keys()
        assert all(torch.equal(here[name], there[name]) for name in here)
        assert any(not torch.equal(here[name], before[name]) for name in here)
    assert torch.uint8 in {value.dtype for value in _tensors(resumed["optimizer_states"]).values()}


# ---- from samples to a merged model: what is sampled, written, merged and said

IDS = torch.arange(10, 34).view(2, 12)


class Run(NamedTuple):
    adapter: Path
    checkpoint: Path
    module: SelfCalibrationModule


def finished(bundled_model: str, folder: Path, *, max_epochs: int, **settings: Any) -> Run:
    module = training_runs.module_of(bundled_model, quantization="nf4", **settings)
    trainer = training_runs.trainer_with(
        training_runs.generation(), AdapterExport(str(folder / "adapter")), max_epochs=max_epochs
    )
    trainer.fit(module, datamodule=training_runs.data_module(bundled_model, folder / "store"))
    trainer.save_checkpoint(folder / "last.ckpt")
    module.eval()
    return Run(folder / "adapter", folder / "last.ckpt", module)


@pytest.fixture(scope="module")
def run(bundled_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"optimizer": "paged_adamw_8bit", "gradient_checkpointing": True, "lr": 3e-3}
    lora = LoraSettings(r=32, activated=False)
    return finished(bundled_model, tmp_path_factory.mktemp("qlora"), max_epochs=3, lora=lora, **settings)


def adapted(bundled_model: str, adapter: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter).eval()(IDS).logits


def logits(folder: str) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(IDS).logits


@pytest.mark.slow
def test_the_adapter_says_what_it_was_trained_on(run: Run) -> None:
    manifest = read_manifest(run.adapter)
    assert (manifest["kind"], manifest["quantization"]) == ("adapter", "nf4")
    assert manifest["hyper_parameters"]["optimizer"] == "paged_adamw_8bit"
    assert "bitsandbytes" in manifest["versions"]
    assert "trained on the base model in NF4 (QLoRA)." in (run.adapter / "README.md").read_text()
    tensors = load_file(run.adapter / "adapter_model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert all(".lora_" in name for name in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["adapter", "checkpoint"])
def test_merged_is_the_stored_base_with_the_adapter(run: Run, bundled_model: str, tmp_path: Path, source: str) -> None:
    written = run_export(str(getattr(run, source)), str(tmp_path / "merged"), dtype="float32")
    expected = adapted(bundled_model, run.adapter)
    torch.testing.assert_close(logits(written), expected, atol=1e-4, rtol=0)
    assert (logits(bundled_model) - expected).abs().max() > 0.1, "the adapter does something"
    assert (run.module.model(IDS).logits - expected).abs().max() > 0.1, "four bits are not what is stored"
    config = json.loads((Path(written) / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "float32"
    manifest = read_manifest(Path(written))
    assert (manifest["kind"], manifest["quantization"]) == ("merged", "nf4")
    assert manifest["hyper_parameters"]["quantization"] == "nf4"
    card = (Path(written) / "README.md").read_text()
    assert "trained on the base model in NF4 (QLoRA) and merged into the model as it is stored" in card
    if source == "adapter":  # a checkpoint holds no scores
        assert "responses of the base model before it was merged:" in card, "the scores are those of the 4-bit model"


@pytest.mark.slow
def test_merging_into_bfloat16_only_rounds(run: Run, bundled_model: str, tmp_path: Path) -> None:
    """By hand: W + alpha / r * B A, with eight significant bits; the update is rounded before the sum."""
    written = run_export(str(run.checkpoint), str(tmp_path / "merged"), dtype="bfloat16")
    merged, base = (load_file(Path(folder) / "model.safetensors") for folder in (written, bundled_model))
    adapter = load_file(run.adapter / "adapter_model.safetensors")
    for name, weight in base.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{key}.lora_A.weight" not in adapter:
            assert torch.equal(merged[name], weight)
            continue
        update = 16 / 32 * adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
        exact = weight.float() + update
        allowed = 2**-8 * (exact.abs() + update.abs())
        assert ((merged[name].float() - exact).abs() <= allowed).all()
        assert not torch.equal(merged[name], weight)


FOUR_BITS = BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
)


@pytest.fixture(scope="module")
def activated_run(bundled_model: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"lora": LoraSettings(r=8), "torch_dtype": "float32", "lr": 2e-2}
    return finished(bundled_model, tmp_path_factory.mktemp("qlora"), max_epochs=2, **settings)


@pytest.mark.slow
@torch.no_grad()
def test_plain_peft_on_a_4_bit_base_states_the_same_confidences(activated_run: Run, bundled_model: str) -> None:
    batch = module_batches.batch_of(module_batches.MIXED[:8], activated_run.module.chat)
    wanted = activated_run.module.confidence(batch).p_true.float()
    base = AutoModelForCausalLM.from_pretrained(bundled_model, dtype=torch.float32, quantization_config=FOUR_BITS)
    for module in base.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # else evaluation would compute in bfloat16 on some CPUs
    peft = PeftModel.from_pretrained(base, str(activated_run.adapter)).eval()
    found = reference_p_true(peft, batch, activated_run.module.chat)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    with peft.disable_adapter():
        asleep = reference_p_true(peft, batch, activated_run.module.chat)
        assert (asleep - wanted).abs().max() > 0.02, "something was learned"


@pytest.mark.slow
@torch.no_grad()
def test_plain_peft_reads_it_on_the_base_as_it_is_stored(activated_run: Run, bundled_model: str) -> None:
    batch = module_batches.batch_of(module_batches.MIXED[:8], activated_run.module.chat)
    found = AutoPeftModelForCausalLM.from_pretrained(activated_run.adapter, dtype=torch.float32).eval()
    stored = SelfCalibrationModule(bundled_model, lora=activated_run.module.lora, torch_dtype="float32")
    stored.configure_model()
    set_adapter_state(stored.model, adapter_state(activated_run.module.model))
    stored.eval()
    wanted = stored.confidence(batch).p_true.float()
    torch.testing.assert_close(reference_p_true(found, batch, stored.chat), wanted, atol=1e-5, rtol=0)
    apart = (activated_run.module.confidence(batch).p_true - wanted).abs().max()
    assert 1e-4 < apart < 0.3, "four bits are not what is stored, and near it"
