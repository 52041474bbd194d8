import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.openai_server import small_vllm
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models import lora
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import weights_sha256
from selfcal_lightning.records import Question, Request, Sample, SamplingSettings
from selfcal_lightning.training import rounds
from selfcal_lightning.training.rounds import AdapterMismatchError, Probe, check_adapter, make_probes


@dataclass(frozen=True)
class Trained:
    """The trainer's model, the folder of its adapter, that of the adapter before, and what they are compared on."""

    base: str
    network: PreTrainedModel
    adapter: str
    previous: str
    probes: list[Probe]
    chat: ChatFormat

    def engine(self, adapter: str | None, **options: Any) -> TransformersEngine:
        return TransformersEngine(self.base, adapter=adapter, chat=self.chat, **options)


def rows_of(chat: ChatFormat, texts: Sequence[str]) -> list[StoredRow]:
    questions = get_task("word_problems").load("train", limit=len(texts))
    rows = []
    for question, text in zip(questions, texts, strict=True):
        sample = Sample(question.id, 0, 0, text, chat.response_ids(text), "stop", None, None)
        rows.append(StoredRow(question, sample, "train", tuple(chat.prompt_ids(question.messages))))
    return rows


@pytest.fixture(scope="module")
def trained(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Two adapters a small step apart, as after an epoch of training; the network holds the later one."""
    folder = tmp_path_factory.mktemp("adapters")
    chat = ChatFormat(load_tokenizer(tiny_model))
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    network = lora.attach_lora(base, lora.LoraSettings(r=8, activated=False))
    generator = torch.Generator().manual_seed(0)
    for name in ("previous", "adapter"):
        for key, parameter in network.named_parameters():
            if "lora_B" in key:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        lora.save_adapter(network, folder / name)
    sampling = SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=60)
    requests = [Request(row.question.id, row.prompt_ids, sampling, seed=1) for row in rows_of(chat, [""] * 6)]
    responses = generate(TransformersEngine.from_model(network, chat), requests)  # the model's own, as in a round
    probes = make_probes(rows_of(chat, [response.text for response in responses]), chat)
    return Trained(tiny_model, network.eval(), str(folder / "adapter"), str(folder / "previous"), probes, chat)


def test_probes_spread_over_the_response_and_end_with_yes(tiny_model: str) -> None:
    chat = ChatFormat(load_tokenizer(tiny_model))
    (row,) = rows_of(chat, ["12+12=24. The answer is 24."])
    prompt, response = len(row.prompt_ids), row.sample.token_ids
    (probe,) = make_probes([row], chat, max_tokens=4)
    thirds = [prompt + place * len(response) // 3 for place in range(3)]
    assert probe.places == (*thirds, len(probe.ids) - 1)
    assert probe.ids[prompt : prompt + len(response)] == response
    assert probe.ids[-1] in chat.query.yes_ids
    assert probe.ids[prompt + len(response) : -1] == chat.query.suffix_ids
    (longest,) = make_probes([row], chat, max_tokens=1000)
    assert longest.places == (*range(prompt, prompt + len(response)), len(probe.ids) - 1)
    assert make_probes([row], chat, max_length=len(probe.ids) - 1) == []
    untold = StoredRow(Question("q", "t", ()), Sample("q", 0, 0, "text", None, None, None, None), "train", None)
    assert make_probes([untold], chat) == []


def table(p: float) -> Any:
    facts = {"engine": "table", "dtype": "float32"}
    return SimpleNamespace(
        next_token_probabilities=lambda prompts, ids, **_: [[p] * len(ids) for _ in prompts], describe=lambda: facts
    )


def difference(engine: Engine, trained: Trained, probes: Sequence[Probe]) -> float:
    return rounds._distance(rounds._engine_logprobs(engine, probes), rounds._network_logprobs(trained.network, probes))


def test_the_difference_is_the_mean_over_tokens_and_a_number(trained: Trained) -> None:
    probes = trained.probes[:2]
    expected = []
    for probe in probes:  # one plain forward pass over the whole sequence
        with torch.no_grad():
            logprobs = trained.network(torch.tensor([probe.ids])).logits[0].double().log_softmax(-1)
        expected += [abs(math.log(0.25) - logprobs[place - 1, probe.ids[place]].item()) for place in probe.places]
    assert difference(table(0.25), trained, probes) == pytest.approx(sum(expected) / len(expected), abs=1e-6)
    for p in (math.nan, 0.0):
        with pytest.raises(AdapterMismatchError):
            check_adapter(table(p), trained.network, trained.probes[:1])
    with pytest.raises(ValueError, match="token ids"):
        check_adapter(table(0.5), trained.network, [])


def refuses(engine: Engine, trained: Trained, bound: str) -> float:
    """The check fails, and the two adapters do differ by more than its bound."""
    with pytest.raises(AdapterMismatchError, match=f"at most {bound} in the mean"):
        check_adapter(engine, trained.network, trained.probes)
    return difference(engine, trained, trained.probes)


@pytest.mark.slow
def test_transformers_passes_with_the_adapter_but_not_with_the_previous_one(trained: Trained) -> None:
    assert check_adapter(trained.engine(trained.adapter), trained.network, trained.probes) < 1e-5
    live = TransformersEngine.from_model(trained.network, trained.chat)
    assert check_adapter(live, trained.network, trained.probes) < 1e-5
    for adapter in (trained.previous, None):
        assert refuses(trained.engine(adapter), trained, r"0\.0001") > 1e-4


@pytest.fixture(scope="module")
def half(trained: Trained) -> PreTrainedModel:
    """The weights in bfloat16 and the adapter in float32, as in training."""
    network = AutoModelForCausalLM.from_pretrained(trained.base, dtype=torch.bfloat16)
    return lora.load_adapter(network, trained.adapter).eval()


@pytest.mark.slow
def test_half_precision_has_a_wider_bound(trained: Trained, half: PreTrainedModel) -> None:
    right, stale = (trained.engine(name, dtype="bfloat16") for name in (trained.adapter, trained.previous))
    assert 1e-4 < check_adapter(right, half, trained.probes) <= 0.02
    with pytest.raises(AdapterMismatchError, match=r"at most 0\.02 in the mean"):
        check_adapter(stale, half, trained.probes)


@pytest.mark.slow
@pytest.mark.vllm
def test_vllm_passes_with_the_adapter_but_not_with_the_previous_one(tiny_model: str, trained: Trained) -> None:
    settings = {"chat": trained.chat, "max_context": 384}
    right = small_vllm(tiny_model, adapter=trained.adapter, **settings)
    assert right.describe()["adapter_sha256"] == weights_sha256(trained.adapter)
    assert check_adapter(right, trained.network, trained.probes) < 1e-4
    bare = trained.network.disable_adapter()
    prompts, asked = [probe.ids[:-1] for probe in trained.probes], list(trained.chat.query.yes_ids)
    without = right.next_token_probabilities(prompts, asked, with_adapter=False)
    served = right.next_token_probabilities(prompts, asked)
    with bare, torch.no_grad():
        expected = [trained.network(torch.tensor([ids])).logits[0, -1].softmax(-1)[asked].tolist() for ids in prompts]
    assert without == [pytest.approx(row, abs=1e-5) for row in expected]
    assert served != [pytest.approx(row, abs=1e-5) for row in expected]
    right.close()
    stale = small_vllm(tiny_model, adapter=trained.previous, **settings)
    refuses(stale, trained, r"0\.0001")
    stale.close()


class Noisy:
    """An engine whose kernels round otherwise: every log-probability is off by noise that a prompt always gets."""

    def __init__(self, engine: Engine, noise: float) -> None:
        self._engine, self._noise = engine, noise
        self.asked_without = 0

    def describe(self) -> dict[str, Any]:
        return self._engine.describe()

    def next_token_probabilities(self, prompts: Any, token_ids: Any, *, with_adapter: bool = True) -> list[list[float]]:
        self.asked_without += not with_adapter
        table = self._engine.next_token_probabilities(prompts, token_ids, with_adapter=with_adapter)
        rows = zip(prompts, table, strict=True)
        return [[p * math.exp(random.Random(str(prompt)).gauss(0.0, self._noise)) for p in row] for prompt, row in rows]


@pytest.mark.slow
def test_engines_whose_kernels_differ_are_held_against_themselves_without_the_adapter(
    trained: Trained, half: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Large models differ by .01 to .05 nats between engines: a fixed bound once ended rounds that were right."""
    right = Noisy(trained.engine(trained.adapter, dtype="bfloat16"), 0.06)
    assert 0.02 < check_adapter(right, half, trained.probes) < 0.1
    assert right.asked_without > 0
    assert "without the adapter" in caplog.text
    quiet = Noisy(trained.engine(trained.adapter, dtype="bfloat16"), 0.0)
    check_adapter(quiet, half, trained.probes)
    assert quiet.asked_without == 0, "where they agree nothing more is asked"


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.04, 0.06])
def test_noise_hides_no_earlier_adapter(trained: Trained, half: PreTrainedModel, noise: float) -> None:
    """Three adapters in a row, each a step from the other as after an epoch; the noise is larger than the step."""
    own = lora.adapter_state(half)

    @contextmanager
    def earlier() -> Iterator[None]:
        lora.set_adapter_state(half, lora.read_adapter_state(Path(trained.previous)))
        try:
            yield
        finally:
            lora.set_adapter_state(half, own)

    names = (trained.previous, trained.adapter, None)
    stale, right, bare = (Noisy(trained.engine(name, dtype="bfloat16"), noise) for name in names)
    with pytest.raises(AdapterMismatchError, match="nearer to the earlier one"):
        check_adapter(stale, half, trained.probes, earlier=earlier())
    check_adapter(right, half, trained.probes, earlier=earlier())
    with pytest.raises(AdapterMismatchError, match=r"nearer to the earlier one|at most 0\.\d+ in the mean"):
        check_adapter(bare, half, trained.probes)


def test_a_merged_adapter_keeps_the_fixed_bound(trained: Trained, half: PreTrainedModel) -> None:
    merged = Noisy(trained.engine(trained.adapter), 0.06)
    with pytest.raises(AdapterMismatchError, match=r"at most 0\.02 in the mean, but got"):
        check_adapter(merged, half, trained.probes)
