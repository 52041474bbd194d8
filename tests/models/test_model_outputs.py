from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.dispatch_modes import PeakBytes, Waits
from support.module_batches import MIXED as ROWS
from support.module_batches import NO_DROPOUT, batch_of, module_of
from support.packed_rows import SIZES, collated, copy_tokenizer, stored_rows
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional as F  # noqa: N812
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning import records
from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import load_network
from selfcal_lightning.models import causal_lm
from selfcal_lightning.models import outputs as output_layer
from selfcal_lightning.models.causal_lm import confidence_from_logits, forward_arguments, load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.outputs import HiddenOutputs, LogitOutputs, ModelOutputs, run_outputs
from selfcal_lightning.training.rounds import Probe, _network_logprobs
from selfcal_lightning.training.self_calibration import StepLog

SHALLOW = True
SMALL = {"vocab_size": 90, **SIZES}
ENDING = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "phi3", "mistral"), SMALL),
    "phi": {**SMALL, "partial_rotary_factor": 0.5},  # whose output layer has a bias
    "gpt2": {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, "eos_token_id": 2},
}
CHANGING = {
    "gemma2": {**SMALL, "final_logit_softcapping": 5.0},
    "gemma3_text": {**SMALL, "final_logit_softcapping": 5.0},
    "cohere": {**SMALL, "logit_scale": 0.25},
    "granite": {**SMALL, "logits_scaling": 4.0},
}
QUERY = records.ConfidenceQuery(suffix_ids=(1,), yes_ids=(3, 5), no_ids=(4,))
IDS = torch.tensor([[3, 8, 4, 9, 11, 2, 7], [5, 6, 7, 8, 9, 10, 11]])
QUERIES, LABELS, TOKENS = torch.tensor([6, 12]), torch.tensor([1, 2, 9, 2]), torch.tensor([4, 9, 10, 7])


def _model(family: str, *, dtype: torch.dtype = torch.float32, head_scale: float = 1.0) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**ENDING, **CHANGING}[family], tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval().requires_grad_(False)
    head = model.get_output_embeddings()
    head.weight.data *= head_scale
    if head.bias is not None:
        head.bias.data.normal_()
    return model


def _outputs(model: PreTrainedModel) -> ModelOutputs:
    arguments = forward_arguments(model, IDS, torch.ones_like(IDS))
    return run_outputs(model, arguments, queries=QUERIES, labels=LABELS, query=QUERY)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("family", [*ENDING, *CHANGING])
def test_what_is_read_is_what_plain_logits_say(family: str, trained: bool) -> None:
    model = _model(family)
    model.get_output_embeddings().requires_grad_(trained)
    logits = model(input_ids=IDS).logits.flatten(0, 1).double()
    p = logits.softmax(-1)[QUERIES]
    yes, no = p[:, [3, 5]].sum(-1), p[:, 4]
    outputs = _outputs(model)
    assert type(outputs) is (HiddenOutputs if family in ENDING and not trained else LogitOutputs)
    for normalised, expected in ((True, yes / (yes + no)), (False, yes)):
        found = outputs.confidence(QUERY, normalised=normalised)
        torch.testing.assert_close(found.p_true.double(), expected, atol=1e-5, rtol=0)
        trained_on = outputs.p_true(QUERY, normalised=normalised).double()
        torch.testing.assert_close(trained_on, found.p_true.double(), atol=1e-5, rtol=0)
        torch.testing.assert_close((found.yes_mass.double(), found.no_mass.double()), (yes, no), atol=1e-5, rtol=0)
    expected = F.cross_entropy(logits[LABELS], TOKENS, reduction="none")
    torch.testing.assert_close(outputs.token_losses(TOKENS).double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [*ENDING, *CHANGING])
def test_logits_only_where_asked(family: str) -> None:
    model, mask = _model(family), torch.ones_like(IDS)
    mask[0, 5:] = 0
    places, head = torch.tensor([2, 3, 4, 13]), model.get_output_embeddings()
    full = model(input_ids=IDS, attention_mask=mask).logits.flatten(0, 1)[places]
    seen: list[tuple[int, ...]] = []
    head.register_forward_hook(lambda module, arguments, output: seen.append(tuple(output.shape)))
    for given in (head, None):
        found = causal_lm.selected_logits(model, given, forward_arguments(model, IDS, mask), places)
        torch.testing.assert_close(found, full, atol=1e-5, rtol=0)
    assert seen == [(4, 90), (2, 7, 90)]


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("normalised", [True, False])
def test_gradients_are_those_of_plain_logits(family: str, normalised: bool) -> None:
    model = _model(family)
    weight = model.model.layers[0].mlp.up_proj.weight.requires_grad_()
    logits = model(input_ids=IDS).logits.flatten(0, 1)
    p = logits.softmax(-1)[QUERIES]
    yes, no = p[:, [3, 5]].sum(-1), p[:, 4]
    confidence = yes / (yes + no) if normalised else yes
    (confidence.sum() + F.cross_entropy(logits[LABELS], TOKENS)).backward()
    expected, weight.grad = weight.grad, None
    outputs = _outputs(model)
    (outputs.p_true(QUERY, normalised=normalised).sum() + outputs.token_losses(TOKENS).mean()).backward()
    torch.testing.assert_close(weight.grad, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_p_true_of_a_model_in_bfloat16_is_read_in_float32(family: str) -> None:
    """Against float64 over the model's own hidden states, at logits as large as those of large models."""
    model = _model(family, dtype=torch.bfloat16, head_scale=8.0)
    states: list[Tensor] = []
    head = model.get_output_embeddings()
    head.weight.data[4:6] = head.weight[3] + 0.02 * torch.randn(2, 32).bfloat16()  # neither sure of Yes nor of No
    handle = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    plain = model(input_ids=IDS).logits.flatten(0, 1)[QUERIES]
    handle.remove()
    exact = states[0].flatten(0, 1)[QUERIES].double() @ head.weight.double().T
    exact = exact / 4.0 if family == "granite" else exact
    yes, no = exact[:, [3, 5]].logsumexp(-1), exact[:, 4]
    coarse = plain.double()[:, [3, 5]].logsumexp(-1) - plain.double()[:, 4]
    assert plain.abs().max() > 10.0
    found = _outputs(model).p_true(QUERY, normalised=True)
    assert found.dtype == torch.float32
    exact = torch.sigmoid(yes - no)
    assert (found - exact).abs().max() < 1e-5 < 2e-3 < (torch.sigmoid(coarse) - exact).abs().max()


def test_tiny_masses_and_sure_responses_are_still_told_apart() -> None:
    tiny = torch.zeros(1, 9)
    tiny[0, 0] = 300.0
    assert confidence_from_logits(tiny, QUERY).p_true.item() == pytest.approx(2 / 3, abs=1e-5)
    logits = torch.full((2, 9), -60.0)
    logits[:, 3], logits[0, 4], logits[1, 4] = 0.0, -20.0, -22.0
    states, weight = torch.tensor([[1.0], [1.1]]), torch.tensor([[0.0]] * 4 + [[-20.0]] + [[-60.0]] * 4)
    hidden = HiddenOutputs(states, states[:0], weight, None).confidence(QUERY, normalised=True)
    for first, second in (confidence_from_logits(logits, QUERY).p_true.tolist(), hidden.p_true.tolist()):
        assert first < second < 1.0


@pytest.mark.parametrize("shared_prefix", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize("omega", [0.1, 0.0])
def test_a_micro_step_waits_for_no_device(tiny_model: str, chat: ChatFormat, shared_prefix: bool, omega: float) -> None:
    """Masks as indices, `unique` and `item` each emptied the queue of a GPU, several times a micro-step.

    Rows that stand apart still wait where transformers makes their mask: it asks whether there is any padding.
    """
    module = module_of(tiny_model, lora=NO_DROPOUT, omega=omega, gradient_checkpointing=True)
    module.configure_model()
    batch = collated(chat, stored_rows(chat), shared_prefix=shared_prefix)
    module._losses(batch)  # what is found out once
    log = StepLog()
    with Waits() as watch:
        calibration, generation, confidence = module._losses(batch)
        log.add(batch, calibration, generation, confidence, eta=0.75)
        (calibration + generation).backward()
    if not shared_prefix:
        watch.where = {name: n for name, n in watch.where.items() if "outputs.py" not in name or n > 2}
    assert watch.where == {}


def test_a_large_vocabulary_makes_few_logits(chat: ChatFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes for each token that is asked for and entry of the vocabulary; it once took 12."""
    monkeypatch.setattr(output_layer, "_TILE_ELEMENTS", 2**20)
    vocabulary = 40_000
    config = AutoConfig.for_model("llama", **{**SMALL, "vocab_size": vocabulary, "tie_word_embeddings": False})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    copy_tokenizer(chat.tokenizer.name_or_path, tmp_path)
    module = module_of(str(tmp_path), torch_dtype="bfloat16", omega=1.0)
    module.configure_model()
    rows = [row for row in ROWS if row.generation_weight] * 20
    batch = batch_of(rows, chat)
    with PeakBytes(least=4 << 20) as watch:
        calibration, generation, _ = module._losses(batch)
        (calibration + generation).backward()
    assert len(batch.label_id) > 800
    assert watch.peak / len(batch.label_id) / vocabulary < 1.0


# ---- no call of attention may choose cuDNN, which builds a plan for every shape; ours never repeat


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[bool, tuple[int, ...]]]]:
    """Whether cuDNN was allowed, and the shape of the keys, at every call of PyTorch's attention."""
    seen: list[tuple[bool, tuple[int, ...]]] = []
    plain, allowed = torch.nn.functional.scaled_dot_product_attention, cuda.cudnn_sdp_enabled()

    def spy(query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        seen.append((cuda.cudnn_sdp_enabled(), tuple(key.shape)))
        return plain(query, key, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    # PyTorch's own masks know the function by its identity: what a look at a model finds here must not outlive the spy.
    monkeypatch.setattr("selfcal_lightning.models.packing._PROBED", {})
    cuda.enable_cudnn_sdp(True)
    yield seen
    cuda.enable_cudnn_sdp(allowed)


def _is_pinned(calls: list[tuple[bool, tuple[int, ...]]]) -> bool:
    return bool(calls) and not any(allowed for allowed, _ in calls)


def test_the_engine_and_the_readers_leave_cudnn_out(tiny_model: str, chat: ChatFormat, calls: list[Any]) -> None:
    """The engine has few widths: each token once made a new shape, 150 of them here."""
    engine = TransformersEngine(tiny_model, chat=chat, max_batch=8)
    assert cuda.cudnn_sdp_enabled(), "making an engine changes nothing for others"
    sampling = records.SamplingSettings(max_new_tokens=150, temperature=2.0, edt_scale=None)
    prompt = chat.prompt_ids([records.Message("user", "What is 5 + 3?")])
    generate(engine, [records.Request(str(i), prompt, sampling, seed=i, query=chat.query) for i in range(8)])
    widths = {shape[2] for _, shape in calls}
    assert len(widths) <= 4
    assert all(width % 64 == 0 for width in widths)
    engine.next_token_probabilities([prompt], [5])
    assert _is_pinned(calls)
    calls.clear()
    # The other readers.
    network = load_network(tiny_model, revision=None, adapter=None, dtype="float32", device="cpu")
    response = chat.response_ids("It is 3.")
    sample = records.Sample("q", 0, 0, "It is 3.", response, "stop", "3", True)
    entry = records.QuestionSamples(records.Question("q", "word_problems", ()), (sample,), "test", prompt)
    TokenReader(network, chat).read([entry])
    assert _is_pinned(calls)
    calls.clear()
    _network_logprobs(network, [Probe((*prompt, *response), (len(prompt),))])
    assert _is_pinned(calls)
    assert cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_training_on_a_gpu_leaves_cudnn_out_in_the_backward_pass_too(
    tiny_model: str, chat: ChatFormat, calls: list[Any], gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = module_of(tiny_model, gradient_checkpointing=gradient_checkpointing)
    assert cuda.cudnn_sdp_enabled()
    with monkeypatch.context() as patch:  # the model stays where this machine has memory
        patch.setattr(type(module), "device", torch.device("cuda", 0))
        patch.setattr(
            "selfcal_lightning.models.causal_lm.load_causal_lm",
            lambda *names, device, **rest: load_causal_lm(*names, **rest),
        )
        module.configure_model()
    assert not cuda.cudnn_sdp_enabled()
    calibration, generation, _ = module._losses(batch_of(ROWS[:4], chat))
    forward = len(calls)
    (calibration + generation).backward()
    assert (len(calls) > forward) == gradient_checkpointing, "activations are recomputed"
    assert _is_pinned(calls)
