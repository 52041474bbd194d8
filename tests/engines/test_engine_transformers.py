import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from support.engine_contract import EDT, QUESTIONS, EngineContract, Reference
from support.other_models import plain_copy
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.engines.sampling.sampler import is_complete, store_fingerprint
from selfcal_lightning.engines.settings import LevelSettings
from selfcal_lightning.engines.transformers import slots as slot_state
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import CachedModel
from selfcal_lightning.engines.transformers.prompt_states import decoder_layers
from selfcal_lightning.engines.transformers.slots import SlotRows
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, Request, SamplingSettings

SMALL: dict[str, Any] = {
    "vocab_size": 704, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 4,
}  # fmt: skip
PROMPTS = [[5, 9, 11], [7], [5, 9, 11, 40, 41, 42, 43, 44], [12, 13, 14, 15]]
EACH = LevelSettings(average=False)
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 24},
    "Qwen2 sliding": {
        "use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "Gemma3Text": {"sliding_window": 24, "layer_types": MIXED_LAYERS},
    "Phi3": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "Olmo2": {},
}  # fmt: skip


class TestTransformersEngine(EngineContract):
    draws_by_position = True

    def make_engine(self, path: str) -> Engine:
        return TransformersEngine(path, dtype="float32", device="cpu", max_batch=16, max_context=self.max_context)


def _random_model(name: str, **options: Any) -> PreTrainedModel:
    config = getattr(transformers, f"{name.split()[0]}Config")(**{**SMALL, **options})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


class _Plain(Reference):
    def __init__(self, model: PreTrainedModel, chat: ChatFormat) -> None:
        self.model, self.chat = model, chat


@pytest.mark.parametrize("name", [*ARCHITECTURES, "Qwen3 eager"])
def test_architectures_read_like_a_plain_forward(name: str, chat: ChatFormat) -> None:
    model, attention = _random_model(name, **ARCHITECTURES.get(name, {})), "eager" if "eager" in name else "sdpa"
    model.set_attn_implementation(attention)
    reference = _Plain(model, chat)
    engine = TransformersEngine.from_model(model, chat, max_batch=4)
    requests = reference.requests(SamplingSettings(max_new_tokens=30), count=3)
    responses = generate(engine, requests)
    for request, response in zip(requests, responses, strict=True):
        assert response.logprob == pytest.approx(reference.logprob(request.prompt_ids, response.token_ids), abs=1e-3)
        yes, _ = reference.masses(request.prompt_ids + response.token_ids)
        assert response.yes_mass == pytest.approx(yes, abs=1e-5)
    prompts = [request.prompt_ids for request in requests]
    # Two responses asked about at every few tokens, each of which is read once for all its queries.
    for request, response in zip(requests[:2], responses, strict=False):
        ends = range(0, len(response.token_ids) + 1, 7)
        prompts += [(*request.prompt_ids, *response.token_ids[:end], *chat.query.suffix_ids) for end in ends]
    table = engine.next_token_probabilities(prompts, range(704))
    for prompt, row in zip(prompts, table, strict=True):
        expected_row = reference.next_probabilities(prompt)
        torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), expected_row, atol=1e-5, rtol=0.0)
    assert model.config._attn_implementation == attention


def test_unsupported_models_are_refused_by_name(chat: ChatFormat) -> None:
    model = _random_model("Qwen2")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match=r"one of \('sdpa', 'eager'.*'flash_attention_2'"):
        TransformersEngine.from_model(model, chat)
    model.config._attn_implementation = "sdpa"
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match=r"but got \['linear_attention'\]"):
        TransformersEngine.from_model(model, chat)
    with pytest.raises(ValueError, match="Expected `max_context`"):
        TransformersEngine(chat.tokenizer.name_or_path, max_context=10**6)


@pytest.mark.slow
def test_texts_do_not_depend_on_the_number_of_slots(tiny_model: str, reference: Reference) -> None:
    requests = reference.requests(EDT, count=12)
    texts = []
    for max_batch in (1, 5, 128):
        engine = TransformersEngine(tiny_model, dtype="float32", max_batch=max_batch)
        chosen = requests[::6] if max_batch == 1 else requests
        texts.append({response.request_id: response.text for response in generate(engine, chosen)})
    assert texts[1] == texts[2]
    assert texts[0].items() <= texts[1].items()


class _Spy(CachedModel):
    """Counts the tokens of prompts that are encoded, by prompt."""

    seen: Counter[tuple[int, ...]]

    def extend(self, slots: torch.Tensor, starts: torch.Tensor, ids: torch.Tensor, *args: Any, **kw: Any) -> Any:
        if ids.shape[1] > 1 and kw.get("keep") is None:
            self.seen.update(tuple(row) for row in ids.tolist())
        return super().extend(slots, starts, ids, *args, **kw)


def test_a_prompt_is_encoded_once_for_all_its_samples(tiny_model: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, dtype="float32", max_batch=8)
    engine._model = _Spy(engine._model.network)
    engine._model.seen = Counter()
    requests = reference.requests(EDT, count=20)
    generate(engine, requests)
    assert len(engine._model.seen) == len(QUESTIONS)
    assert set(engine._model.seen.values()) == {1}
    generate(engine, [request for request in requests if request.id.startswith("2/")][:1])
    assert set(engine._model.seen.values()) == {1}


def test_a_model_in_training_is_given_back_as_it_was(tiny_model: str, chat: ChatFormat, reference: Reference) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attention_dropout=0.5)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    engine = TransformersEngine.from_model(model, chat, source=tiny_model)
    requests = reference.requests(EDT, count=3)
    state = torch.get_rng_state()
    texts = [response.text for response in generate(engine, requests)]
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert texts == [r.text for r in generate(TransformersEngine(tiny_model, dtype="float32"), requests)]
    model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
    assert model.lm_head.weight.grad is not None


def test_weights_may_change_while_nothing_is_in_flight(tiny_model: str, chat: ChatFormat) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    engine = TransformersEngine.from_model(model, chat)
    plain = _Plain(model, chat)
    before = engine.describe()["weights_sha256"]
    for _ in range(2):
        requests = plain.requests(EDT, count=2)
        for request, response in zip(requests, generate(engine, requests), strict=True):
            yes, _ = plain.masses(request.prompt_ids + response.token_ids)
            assert response.yes_mass == pytest.approx(yes, abs=1e-5)
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(0.5)
    assert engine.describe()["weights_sha256"] != before


def test_an_adapter_is_served_and_named(tiny_model: str, chat: ChatFormat, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32),
        LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    ).eval()
    tuned.save_pretrained(tmp_path)
    engine = TransformersEngine(tiny_model, adapter=str(tmp_path), dtype="float32")
    plain = _Plain(tuned, chat)
    requests = plain.requests(EDT, count=2)
    from_memory = TransformersEngine.from_model(tuned, chat, source=tiny_model, adapter_sha256="abc")
    for request, a, b in zip(requests, generate(engine, requests), generate(from_memory, requests), strict=True):
        assert a.yes_mass == pytest.approx(plain.masses(request.prompt_ids + a.token_ids)[0], abs=1e-5)
        assert a.text == b.text
    base = TransformersEngine(tiny_model, dtype="float32").describe()
    facts = engine.describe()
    assert facts["weights_sha256"] == base["weights_sha256"] == from_memory.describe()["weights_sha256"]
    assert base["adapter_sha256"] is None
    assert facts["adapter_sha256"] is not None
    assert from_memory.describe()["adapter_sha256"] == "abc"
    json.dumps(facts)


@pytest.mark.slow
def test_out_of_memory_halves_the_batch_and_loses_nothing(
    tiny_model: str, reference: Reference, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    requests = reference.requests(EDT, count=8)
    expected = [r.text for r in generate(TransformersEngine(tiny_model, dtype="float32"), requests)]
    extend = CachedModel.extend

    def scarce(self: CachedModel, slots: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(slots) > 6:
            raise torch.cuda.OutOfMemoryError
        return extend(self, slots, *args, **kwargs)

    monkeypatch.setattr(CachedModel, "extend", scarce)
    engine = TransformersEngine(tiny_model, dtype="float32", max_batch=16)
    with caplog.at_level(logging.WARNING):
        assert [r.text for r in generate(engine, requests)] == expected
    assert engine.batch_size == 4
    assert "going on with 4" in caplog.text
    monkeypatch.setattr(CachedModel, "extend", Mock(side_effect=torch.cuda.OutOfMemoryError))
    engine.submit(requests[:1])
    with pytest.raises(torch.cuda.OutOfMemoryError):
        engine.poll()
    assert engine.batch_size == 1


def test_short_memory_loses_no_response(tiny_model: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, gather, moved = reference.requests(EDT, count=8), SlotRows.gather, []
    expected = [response.text for response in generate(TransformersEngine(tiny_model, dtype="float32"), requests)]

    def scarce(self: SlotRows, sources: list[int]) -> None:
        moved.append(len(sources))
        if len(moved) == 1:
            raise torch.cuda.OutOfMemoryError
        gather(self, sources)

    monkeypatch.setattr(SlotRows, "gather", scarce)
    engine = TransformersEngine(tiny_model, dtype="float32", max_batch=16)
    assert [response.text for response in generate(engine, requests)] == expected
    assert moved


def test_overwritten_prompts_are_redone(tiny_model: str, reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(tiny_model, dtype="float32", max_batch=1)
    first, second = reference.requests(EDT, count=1)[:2]
    second = replace(second, prompt_ids=(*second.prompt_ids[:-1], 5, 6, 7))
    (expected,) = generate(engine, [first])
    with monkeypatch.context() as patch:
        patch.setattr(slot_state, "_copy", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            generate(engine, [second])
    assert generate(engine, [first]) == [expected]


def test_only_what_was_begun_is_thrown_away_and_a_closed_engine_says_so(tiny_model: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, dtype="float32", max_batch=4)
    requests = reference.requests(EDT, count=3)
    assert engine.cancel(engine.submit(requests)) == {}, "nothing was begun before the first poll"
    ids = engine.submit(requests)
    early = {response.request_id for response in engine.poll()}
    assert engine.cancel(ids).keys() == set(ids[:4]) - early, "four slots: what waits for one costs nothing"
    engine.submit(requests)
    engine.close()
    engine.cancel(["0/0"])
    with pytest.raises(RuntimeError, match="has been closed"):
        engine.poll()


def _loud_model(path: str, folder: Path) -> str:
    """Write the bundled model in bfloat16 with logits as large as those of large models, unsure of Yes and No."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    head = torch.nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    head.weight.data = model.lm_head.weight.data.clone() * 2.0
    model.lm_head = head
    plain_copy(path, folder)
    model.bfloat16().save_pretrained(folder)
    return str(folder)


def test_p_true_in_half_precision_is_read_in_float32(tiny_model: str, tmp_path: Path) -> None:
    """Both ways to it, against float64 over the hidden states of the model; its own logits take coarse steps."""
    path = _loud_model(tiny_model, tmp_path / "loud")
    engine = TransformersEngine(path, dtype="bfloat16", device="cpu")
    assert (engine.describe()["dtype"], engine.describe()["head_dtype"]) == ("bfloat16", "float32")
    network, chat, states = engine._model.network, engine.chat, []
    head = network.get_output_embeddings()
    prompts = [chat.prompt_ids([Message("user", f"What is {i} + {i * i}?")]) for i in range(40)]
    sampling = SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=8)
    requests = [Request(str(i), prompt, sampling, seed=i, query=chat.query) for i, prompt in enumerate(prompts)]
    responses = generate(engine, requests)
    sequences = [(*p, *r.token_ids, *chat.query.suffix_ids) for p, r in zip(prompts, responses, strict=True)]
    yes_ids, no_ids = list(chat.query.yes_ids), list(chat.query.no_ids)
    handle = head.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0][0, -1]))
    table = [engine.next_token_probabilities([ids], [*yes_ids, *no_ids])[0] for ids in sequences]
    handle.remove()
    hidden = torch.stack(states)
    exact = (hidden.double() @ head.weight.double().T).softmax(-1)
    found = torch.tensor(table, dtype=torch.float64)
    torch.testing.assert_close(found, exact[:, [*yes_ids, *no_ids]], atol=1e-6, rtol=1e-4)
    coarse = (hidden @ head.weight.T).double()[:, [*yes_ids, *no_ids]].softmax(-1)[:, : len(yes_ids)].sum(1)
    sharp = exact[:, [*yes_ids, *no_ids]] / exact[:, [*yes_ids, *no_ids]].sum(1, keepdim=True)
    assert (coarse - sharp[:, : len(yes_ids)].sum(1)).abs().max() > 2e-3
    # In the sampling batch the hidden states themselves are rounded otherwise; the steps of the logits are gone.
    p_true = torch.tensor([r.yes_mass / (r.yes_mass + r.no_mass) for r in responses], dtype=torch.float64)
    assert (p_true - sharp[:, : len(yes_ids)].sum(1)).abs().max() < 0.05
    assert len(p_true.unique()) > 30
    assert network.get_output_embeddings()._forward_hooks == {}


def test_a_store_knows_the_dtype_of_the_output_layer(tiny_model: str, tmp_path: Path) -> None:
    """It is found without the model, and another one is refused: P(True) differs."""
    chat, sampling = ChatFormat(load_tokenizer(tiny_model)), SamplingSettings(max_new_tokens=8)
    single, half = (
        store_fingerprint(TransformersEngine(tiny_model, dtype=dtype, device="cpu"), chat, sampling, 0)
        for dtype in ("float32", "bfloat16")
    )
    assert (single.model.head_dtype, half.model.head_dtype) == (None, "float32")
    settings = {"model": tiny_model, "revision": None, "chat": chat, "sampling": sampling, "seed": 0, "num_samples": 2}
    for name, fingerprint in (("single", single), ("half", half)):
        SampleStore.create_or_open(tmp_path / name, fingerprint, num_samples=2, engine={})
        assert is_complete(tmp_path / name, {}, **settings)
    with pytest.raises(ValueError, match=r"model\.head_dtype: None in the store, 'float32' asked for"):
        SampleStore.create_or_open(tmp_path / "single", half, num_samples=2, engine={})


def test_a_response_is_read_once_for_all_its_steps(shallow_model: str) -> None:
    engine = TransformersEngine(shallow_model, device="cpu", dtype="float32")
    query, response = engine.chat.query.suffix_ids, tuple(range(20, 60))
    prompts = [(*response[:end], *query) for end in (10, 20, 30, 40)]
    sizes: list[torch.Size] = []
    embedding = engine._model.network.get_input_embeddings()
    with embedding.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape)):
        together = engine.next_token_probabilities(prompts, range(50))
    assert sizes == [(1, len(response) + 4 * len(query))]
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = engine.next_token_probabilities([prompt], range(50))
        torch.testing.assert_close(torch.tensor(row), torch.tensor(alone), atol=1e-6, rtol=0.0)


@pytest.fixture(scope="module")
def plain_engine(tiny_model: str) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_model)
    yield engine
    engine.close()


def plain_states(network: torch.nn.Module, prompt: list[int]) -> NDArray[np.float32]:
    """Return what transformers gives for one prompt without padding, [levels, tokens, D]."""
    with torch.no_grad():
        states = network(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return torch.cat(states).numpy()


def test_they_are_the_model_s_own_states(plain_engine: TransformersEngine, tiny_model: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    states = plain_engine.prompt_states(PROMPTS, EACH)
    assert states.last_token.shape == states.token_mean.shape == (4, network.config.num_hidden_layers + 1, 128)
    for row, prompt in enumerate(PROMPTS):
        expected = plain_states(network, prompt)
        np.testing.assert_allclose(states.last_token[row], expected[:, -1], atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(states.token_mean[row], expected.mean(1), atol=2e-4, rtol=1e-4)


def test_levels_are_chosen_and_averaged(plain_engine: TransformersEngine) -> None:
    each = plain_engine.prompt_states(PROMPTS, EACH).last_token
    some = plain_engine.prompt_states(PROMPTS, LevelSettings((0, 3, -1), average=False)).last_token
    np.testing.assert_array_equal(some, each[:, [0, 3, each.shape[1] - 1]])
    mean = plain_engine.prompt_states(PROMPTS, LevelSettings((0, 3, -1))).last_token
    np.testing.assert_allclose(mean[:, 0], some.mean(1), rtol=1e-5)


def test_the_last_level_is_read_behind_or_before_the_final_norm(
    plain_engine: TransformersEngine, tiny_model: str
) -> None:
    norm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_decoder().norm
    behind = plain_engine.prompt_states(PROMPTS, LevelSettings((-1,))).last_token
    before = plain_engine.prompt_states(PROMPTS, LevelSettings((-1,), final_norm=False)).last_token
    assert np.abs(before).mean() > 2 * np.abs(behind).mean()
    with torch.no_grad():
        np.testing.assert_allclose(norm(torch.from_numpy(before)).numpy(), behind, atol=1e-4, rtol=1e-4)
    inner = [LevelSettings((2,), final_norm=norm) for norm in (True, False)]
    np.testing.assert_array_equal(*(plain_engine.prompt_states(PROMPTS, levels).last_token for levels in inner))


def test_levels_that_there_are_not_are_refused(plain_engine: TransformersEngine) -> None:
    for levels in ((9,), (1, 1), (0, -9)):
        with pytest.raises(InputError, match="`levels` to be distinct and from 0, the embedding, to 8"):
            plain_engine.prompt_states(PROMPTS, LevelSettings(levels))


def test_models_of_another_build(tiny_model: str) -> None:
    """GPT-2 names its parts otherwise, and adds positions before its first layer."""
    network = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2)).eval()
    chat = TransformersEngine(tiny_model).chat
    states = TransformersEngine.from_model(network, chat).prompt_states(PROMPTS, EACH)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(states.last_token[row], plain_states(network, prompt)[:, -1], atol=1e-5, rtol=1e-4)
    network.get_decoder().twin = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    with pytest.raises(InputError, match="one list of its 3 layers, but got 2 in GPT2Model"):
        decoder_layers(network.get_decoder())
