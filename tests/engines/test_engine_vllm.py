"""The vLLM engine against real vLLM: the shared contract, exactness of EDT, crashes, adapters and its environment."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engine_contract import EDT, GREEDY, QUESTIONS, EngineContract, Reference
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.functional.sampling import dynamic_temperature, tempered_probabilities
from selfcal_lightning.records import Request, SamplingSettings

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)"),
]

CONTEXT = 256
POISON_SEED = 666
POISON = f'''
import os
from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

class Poison(DynamicTemperature):
    """Kills the process as soon as a request with the seed {POISON_SEED} runs."""

    @classmethod
    def validate_params(cls, sampling_params):
        pass

    def update_state(self, batch_update):
        for _, params, *_ in batch_update.added if batch_update else ():
            if params.seed == {POISON_SEED}:
                os._exit(9)

    def apply(self, logits, ctx=None):
        return logits
'''
TELLING_SCHEDULER = """
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

class TellingScheduler(AsyncScheduler):
    def _preempt_request(self, *args, **options):
        print("preempted", flush=True)
        return super()._preempt_request(*args, **options)
"""


def _engine(path: str, **options: object) -> VLLMEngine:
    settings = {"max_context": CONTEXT, "kv_cache_memory_bytes": 1 << 28, "max_batch": 128, "start_timeout": 300.0}
    return VLLMEngine(path, **{**settings, **options})


def _texts(engine: VLLMEngine, requests: list[Request]) -> dict[str, str]:
    return {response.request_id: response.text for response in generate(engine, requests)}


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


@pytest.fixture(scope="module")
def vllm_engine(tiny_model: str) -> Iterator[VLLMEngine]:
    """One engine for the tests that leave it whole; the launcher's variables stand in its parent's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            patch.setenv(name, "1")
        engine = _engine(tiny_model)
        assert engine.pid is None
        assert engine.max_context == CONTEXT
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def reference(tiny_model: str) -> Reference:
    return Reference(tiny_model)


class TestContract(EngineContract):
    max_context = CONTEXT

    def make_engine(self, path: str) -> VLLMEngine:
        return _engine(path)

    @pytest.fixture(scope="class")
    def engine(self, vllm_engine: VLLMEngine) -> VLLMEngine:
        return vllm_engine


def test_the_child_sees_nothing_of_the_launcher(vllm_engine: VLLMEngine) -> None:
    environment = Path(f"/proc/{vllm_engine.pid}/environ").read_bytes().split(b"\0")
    names = {entry.split(b"=")[0].decode() for entry in environment}
    launcher = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert not names & launcher
    assert os.getpgid(vllm_engine.pid) == vllm_engine.pid


def test_queries_are_answered_from_the_prefix_cache(vllm_engine: VLLMEngine, reference: Reference) -> None:
    before = vllm_engine.statistics()
    prompt = reference.prompt(" ".join(QUESTIONS))
    sampling = replace(EDT, max_new_tokens=48)
    generate(vllm_engine, [Request(str(j), prompt, sampling, seed=j, query=reference.chat.query) for j in range(32)])
    after = vllm_engine.statistics()
    tokens = after.query_tokens - before.query_tokens
    cached = after.query_cached_tokens - before.query_cached_tokens
    assert 32 * len(prompt) < tokens
    assert cached / tokens > 0.5
    assert after.query_hit_rate is not None
    shared = (after.prompt_cached_tokens - before.prompt_cached_tokens) / (after.prompt_tokens - before.prompt_tokens)
    assert shared > 0.5


def test_cancelling_saves_steps(vllm_engine: VLLMEngine, reference: Reference) -> None:
    prompt, hot = reference.prompt(QUESTIONS[0]), SamplingSettings(temperature=2.0, edt_scale=None, max_new_tokens=150)
    long = [Request(str(j), prompt, hot, seed=j) for j in range(4)]
    start = vllm_engine.statistics().steps
    generate(vllm_engine, long)
    whole = vllm_engine.statistics().steps - start
    vllm_engine.submit(long)
    vllm_engine.cancel([request.id for request in long])
    assert vllm_engine.poll() == []
    vllm_engine.next_token_probabilities([long[0].prompt_ids], [5])
    assert vllm_engine.statistics().steps - start - whole < whole / 2
    assert vllm_engine.statistics().cancelled >= 4


def test_many_ids_are_scored_in_parts(vllm_engine: VLLMEngine, reference: Reference) -> None:
    prompt = reference.prompt(QUESTIONS[1])
    expected = reference.next_probabilities(prompt)
    (row,) = vllm_engine.next_token_probabilities([prompt], range(len(expected)))
    torch.testing.assert_close(torch.tensor(row, dtype=torch.float64), expected, atol=1e-5, rtol=0.0)
    assert sum(row) == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(ValueError, match=f"0 to {len(expected) - 1}"):
        vllm_engine.next_token_probabilities([prompt], [len(expected)])


def test_p_true_agrees_with_transformers_and_the_module_on_the_same_ids(
    vllm_engine: VLLMEngine, reference: Reference, tiny_model: str
) -> None:
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

    query = reference.chat.query
    responses = generate(vllm_engine, requests := reference.requests(EDT, count=4))
    masses = torch.tensor([[r.yes_mass, r.no_mass] for r in responses])
    rows = [q.prompt_ids + r.token_ids + query.suffix_ids for q, r in zip(requests, responses, strict=True)]

    other = TransformersEngine(tiny_model, dtype="float32", max_context=CONTEXT)
    ids, num_yes = [*query.yes_ids, *query.no_ids], len(query.yes_ids)
    ours = torch.tensor(vllm_engine.next_token_probabilities(rows, ids))
    theirs = torch.tensor(other.next_token_probabilities(rows, ids))
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0.0)
    split = torch.stack([theirs[:, :num_yes].sum(1), theirs[:, num_yes:].sum(1)], dim=1)
    torch.testing.assert_close(masses, split, atol=1e-4, rtol=0.0)
    assert vllm_engine.describe()["weights_sha256"] == other.describe()["weights_sha256"]
    other.close()

    torch.testing.assert_close(masses, _module_masses(tiny_model, rows), atol=1e-4, rtol=0.0)


def _module_masses(path: str, rows: list[tuple[int, ...]]) -> torch.Tensor:
    """Return the Yes and No masses of the training module, [rows, 2], float32."""
    from selfcal_lightning.modules.batch import SSCBatch
    from selfcal_lightning.modules.self_calibration import SelfCalibrationModule

    module = SelfCalibrationModule(path, lora=None, torch_dtype="float32")
    module.configure_model()
    module.eval()
    size, lengths = len(rows), torch.tensor([len(row) for row in rows])
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    ones = torch.ones(size)
    batch = SSCBatch(
        input_ids=ids,
        attention_mask=mask,
        query_position=torch.arange(size) * mask.shape[1] + lengths - 1,
        label_position=torch.zeros(0, dtype=torch.long),
        label_id=torch.zeros(0, dtype=torch.long),
        label_row=torch.zeros(0, dtype=torch.long),
        target=ones,
        correct=ones,
        calibration_weight=ones,
        generation_weight=ones,
        calibration_total=ones.sum(),
        generation_total=ones.sum(),
        question_index=torch.arange(size),
        task=("test",) * size,
    )
    with torch.no_grad():
        confidence = module.confidence(batch)
    return torch.stack([confidence.yes_mass, confidence.no_mass], dim=1)


def test_a_killed_child_is_replaced_and_every_response_arrives(vllm_engine: VLLMEngine, reference: Reference) -> None:
    requests = reference.requests(EDT, count=16)
    expected = _texts(vllm_engine, requests)
    before, pid = vllm_engine.statistics(), vllm_engine.pid
    vllm_engine.submit(requests)
    os.kill(pid, signal.SIGKILL)  # at once: on a quick machine all responses would be there after a poll
    responses = vllm_engine.poll()
    while len(responses) < len(requests):
        responses += vllm_engine.poll()
    assert {response.request_id: response.text for response in responses} == expected
    after = vllm_engine.statistics()
    assert (after.crashes - before.crashes, after.starts - before.starts) == (1, 1)
    assert after.steps > before.steps
    assert vllm_engine.pid != pid
    _wait_for_end(pid)


def test_processed_probabilities_are_those_of_dynamic_temperature(
    tiny_model: str, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache too small for the batch (requests are preempted) and rows of many kinds, every token is exact."""
    (tmp_path / "telling_scheduler.py").write_text(TELLING_SCHEDULER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = _engine(
        tiny_model,
        max_batch=32,
        kv_cache_memory_bytes=3 << 19,
        engine_args={"logprobs_mode": "processed_logprobs", "scheduler_cls": "telling_scheduler.TellingScheduler"},
        log_path=str(tmp_path / "vllm.log"),
    )
    settings = [
        EDT,
        SamplingSettings(temperature=2.0, edt_scale=0.9, edt_theta=0.1, max_new_tokens=150),
        SamplingSettings(temperature=2.0, edt_scale=None, max_new_tokens=150),
        SamplingSettings(temperature=1.6, edt_scale=0.9, edt_theta=2.0, max_new_tokens=90),
        GREEDY,
    ]
    requests = [
        replace(request, sampling=settings[i % len(settings)])
        for i, request in enumerate(reference.requests(EDT, count=20))
    ]
    checked = 0
    for request, response in zip(requests, generate(engine, requests), strict=True):
        prompt, sampling = request.prompt_ids, request.sampling
        logits = reference.logits(prompt + response.token_ids)[len(prompt) - 1 : -1]
        temperature: float | torch.Tensor = sampling.temperature or 1.0  # greedy rows report the untempered model
        if sampling.edt_scale is not None:
            temperature = dynamic_temperature(
                logits, base=sampling.temperature, scale=sampling.edt_scale, theta=sampling.edt_theta
            )
        p = tempered_probabilities(logits, temperature)
        expected = p.gather(-1, torch.tensor(response.token_ids)[:, None]).log().sum().item()
        assert response.logprob == pytest.approx(expected, abs=1e-3)
        p = reference.next_probabilities(prompt + response.token_ids + request.query.suffix_ids)
        assert response.yes_mass == pytest.approx(p[list(request.query.yes_ids)].sum().item(), abs=1e-5)
        checked += len(response.token_ids)
    assert checked > 1000
    engine.close()
    assert (tmp_path / "vllm.log").read_text().count("preempted") > 3


@pytest.mark.slow
def test_a_poison_request_is_named_and_the_others_go_on(
    tiny_model: str, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison_processor.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = _engine(
        tiny_model, max_attempts=2, stall_timeout=15.0, engine_args={"logits_processors": ["poison_processor:Poison"]}
    )
    requests = reference.requests(replace(EDT, max_new_tokens=12), count=3)
    requests[4] = replace(requests[4], seed=POISON_SEED)
    seen: list[str] = []
    with pytest.raises(RequestsFailedError, match=requests[4].id) as caught:
        generate(engine, requests, on_finished=lambda response: seen.append(response.request_id))
    assert sorted(seen) == sorted({request.id for request in requests} - {requests[4].id})
    assert set(caught.value.failures) == {requests[4].id}
    assert (engine.statistics().quarantined, engine.statistics().crashes) == (1, 2)
    assert engine.poll() == []
    expected = _texts(engine, requests[:4])

    os.kill(engine.pid, signal.SIGSTOP)  # a child that hangs is as good as a dead one
    assert _texts(engine, requests[:4]) == expected
    assert engine.statistics().crashes == 3

    pid = engine.pid
    engine._process.channel.close()  # what the kernel does when the parent is killed
    _wait_for_end(pid)


def test_an_adapter_is_the_one_that_peft_would_apply(tiny_model: str, reference: Reference, tmp_path: Path) -> None:
    prompts = [reference.prompt(question) for question in QUESTIONS]
    plain = torch.stack([reference.next_probabilities(prompt) for prompt in prompts]).float()
    folder, expected = _random_adapter(tiny_model, tmp_path / "adapter", 0, prompts)
    engine = _engine(tiny_model, adapter=folder)
    answer = torch.tensor(engine.next_token_probabilities(prompts, range(plain.shape[1])))
    torch.testing.assert_close(answer, expected, atol=1e-4, rtol=0.0)
    assert (answer - plain).abs().max() > 1e-2
    assert engine.describe()["adapter_sha256"] is not None
    engine.close()


def test_p_true_in_half_precision_is_read_in_float32(tiny_model: str, reference: Reference) -> None:
    """The output layer multiplies the hidden states of half precision in float32; it once rounded P(True) to steps."""
    engine = _engine(tiny_model, dtype="bfloat16")
    described = engine.describe()
    assert (described["dtype"], described["head_dtype"]) == ("bfloat16", "float32")
    query = reference.chat.query
    ids = [*query.yes_ids, *query.no_ids]
    prompts = [reference.prompt(f"What is {i} + {i * i}?") + query.suffix_ids for i in range(60)]
    sharp = torch.tensor(engine.next_token_probabilities(prompts, ids))
    engine.close()
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = torch.stack([network(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    assert _on_grid(sharp) < 0.2 < 0.9 < _on_grid(logits.float().softmax(-1)[:, ids])


@pytest.mark.slow
def test_the_output_layer_of_the_model_itself_may_be_asked_for(tiny_model: str, reference: Reference) -> None:
    engine = _engine(tiny_model, dtype="bfloat16", engine_args={"hf_overrides": {"head_dtype": "model"}})
    assert engine.describe()["head_dtype"] is None
    query = reference.chat.query
    prompts = [reference.prompt(f"What is {i} + {i * i}?") + query.suffix_ids for i in range(60)]
    assert _on_grid(torch.tensor(engine.next_token_probabilities(prompts, [*query.yes_ids, *query.no_ids]))) > 0.9
    engine.close()


def _on_grid(table: torch.Tensor) -> float:
    """Return the share of rows that give away rounded logits.

    Logits in bfloat16 differ by multiples of 1/256 and more, so that their differences take few values.
    """
    step = (table[:, 0].log() - table[:, -1].log()).mul(256).frac().abs()
    return ((step < 0.02) | (step > 0.98)).float().mean().item()


def test_closing_ends_the_child(vllm_engine: VLLMEngine) -> None:
    pid = vllm_engine.pid
    vllm_engine.close()
    _wait_for_end(pid)
    with pytest.raises(RuntimeError, match="closed"):
        vllm_engine.submit([])


def test_a_start_that_fails_says_why(tiny_model: str) -> None:
    engine = _engine(tiny_model, max_context=100_000)
    with pytest.raises(EngineCrashedError, match=r"max_context.*at most the model's 512.*100000"):
        engine.submit([])
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([])


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 10.0
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_alive(pid)


def _random_adapter(path: str, folder: Path, seed: int, prompts: list[tuple[int, ...]]) -> tuple[str, torch.Tensor]:
    """Write an adapter with random weights and return its folder and PEFT's own next-token probabilities."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    model.save_pretrained(folder)
    with torch.no_grad():
        rows = [model(torch.tensor([list(prompt)])).logits[0, -1].softmax(-1) for prompt in prompts]
    return str(folder), torch.stack(rows)


class TestProcessor:
    """The logits processor by itself, in both of its forms, against ``dynamic_temperature`` row by row."""

    @pytest.fixture(scope="class")
    def logits(self) -> torch.Tensor:
        rows = torch.randn(8, 50, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 8)[:, None]
        rows[1, ::3] = -torch.inf
        rows[2] = 0.0  # all tied: the largest entropy
        rows[3] = torch.tensor([7.0] + 49 * [-torch.inf])  # one token left: no entropy
        return rows

    @staticmethod
    def expected(row: torch.Tensor, edt: tuple[float, float, float] | None) -> torch.Tensor:
        if edt is None:
            return row.softmax(-1)
        base, scale, theta = edt
        row = row.double()
        temperature = dynamic_temperature(row, base=base, scale=scale, theta=theta)
        return tempered_probabilities(row, temperature).float()

    @pytest.mark.parametrize("edt", [(0.8, 0.8, 1.0), (1.5, 0.3, 0.5), (2.0, 1.0, 0.0)])
    def test_rows_are_divided_by_their_temperature(self, logits: torch.Tensor, edt: tuple[float, float, float]) -> None:
        from selfcal_lightning.engines.vllm.dynamic_temperature import sharpen_logits_

        shared = sharpen_logits_(logits.clone(), *edt).softmax(-1)
        columns = torch.tensor(edt).repeat(len(logits), 1).split(1, dim=1)
        by_row = sharpen_logits_(logits.clone(), *columns).softmax(-1)
        expected = torch.stack([self.expected(row, edt) for row in logits])
        torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0.0)
        torch.testing.assert_close(by_row, shared, atol=1e-6, rtol=0.0)

    def test_the_second_runner_finds_its_slots(self, logits: torch.Tensor) -> None:
        """Hand-made batches for Model Runner V2, which needs a GPU as a whole: slots, reordered and reused."""
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors

        names = ("all_token_ids", "prompt_len", "prefill_len", "total_len")
        states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=6, vocab_size=50, **dict.fromkeys(names))
        name = "selfcal_lightning.engines.vllm.dynamic_temperature:DynamicTemperature"
        (processor,) = build_custom_logits_processors(None, states, False, [name])
        slots: dict[int, tuple[float, float, float] | None] = {}

        def admit(slot: int, edt: tuple[float, float, float] | None) -> None:
            slots[slot] = edt
            params = SamplingParams(temperature=1.0, extra_args=edt and {"edt": list(edt)})
            processor.validate_params(params)
            assert processor.add_request(slot, params) is (edt is not None)

        def check(order: list[int]) -> None:
            processor.apply_staged_writes()
            mapping = torch.tensor(order, dtype=torch.int32)
            rows = logits[: len(order)].clone()
            context = LogitsContext(mapping, mapping, mapping.numpy(), mapping * 0, mapping, mapping, mapping.numpy())
            expected = [self.expected(row, slots[slot]) for row, slot in zip(rows.clone(), order, strict=True)]
            torch.testing.assert_close(
                processor.apply(rows, context).softmax(-1), torch.stack(expected), atol=2e-5, rtol=0.0
            )

        admit(4, (0.8, 0.8, 1.0))
        admit(0, (1.5, 0.3, 0.5))
        check([0, 4])
        admit(2, None)
        check([4, 2, 0])
        admit(4, None)
        admit(5, (1.2, 0.9, 2.0))
        check([5, 0, 4, 2])
        check([2, 4])

    def test_a_mixed_step_waits_for_nothing_and_passes_over_the_vocabulary_a_few_times(
        self, logits: torch.Tensor
    ) -> None:
        """Nearly every step holds queries beside samples; they once cost a mask from the host and two whole copies."""
        from torch.utils._python_dispatch import TorchDispatchMode
        from vllm import SamplingParams
        from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext

        from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature, sharpen_logits_

        class Watch(TorchDispatchMode):
            def __init__(self) -> None:
                super().__init__()
                self.seen: list[str] = []
                self.passes = 0

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen.append(str(func))
                self.passes += any(isinstance(a, torch.Tensor) and a.numel() >= logits.numel() for a in args)
                return func(*args, **(kwargs or {}))

        states = SimpleNamespace(device=torch.device("cpu"), max_num_reqs=8)
        processor = DynamicTemperature(None, states)
        for slot in range(8):
            edt = {"edt": [0.8, 0.8, 1.0]} if slot % 2 else None
            processor.add_request(slot, SamplingParams(temperature=1.0, extra_args=edt))
        processor.apply_staged_writes()
        mapping = torch.arange(8, dtype=torch.int32)
        rows = logits.clone()
        context = LogitsContext(mapping, mapping, mapping.numpy(), mapping * 0, mapping, mapping, mapping.numpy())
        with Watch() as watch:
            sharpened = processor.apply(rows, context)
        # One is the cast of the slots' numbers, on the device.
        waiting = [name for name in watch.seen if any(part in name for part in ("copy", "clone", "where", "nonzero"))]
        assert waiting == ["aten._to_copy.default"]
        assert watch.passes <= 8
        plain = sharpen_logits_(logits.clone()[1::2], 0.8, 0.8, 1.0)
        assert torch.equal(sharpened[1::2], plain), "rows of EDT are those of a step of their own"
        finite = logits[::2] - logits[::2].amax(-1, keepdim=True)
        assert torch.equal(sharpened[::2], finite), "the others are shifted"

    def test_large_batches_are_worked_off_in_parts(self, logits: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
        from selfcal_lightning.engines.vllm import dynamic_temperature as vllm_edt

        columns = torch.rand(len(logits), 3, generator=torch.Generator().manual_seed(1)).add(0.2).clamp(max=1.0)
        whole = vllm_edt.sharpen_logits_(logits.clone(), *columns.split(1, dim=1))
        monkeypatch.setattr(vllm_edt, "_CHUNK_ELEMENTS", 3 * logits.shape[1] + 1)
        assert torch.equal(vllm_edt.sharpen_logits_(logits.clone(), *columns.split(1, dim=1)), whole)
        shared = vllm_edt.sharpen_logits_(logits.clone(), 0.8, 0.8, 1.0)
        monkeypatch.undo()
        assert torch.equal(vllm_edt.sharpen_logits_(logits.clone(), 0.8, 0.8, 1.0), shared)

    @pytest.mark.parametrize(
        ("edt", "temperature"),
        [([0.8, 0.8], 1.0), ([0.0, 0.8, 1.0], 1.0), ([0.8, 1.1, 1.0], 1.0), ([0.8, 0.8, 1.0], 0.7)],
    )
    def test_undefined_parameters_are_refused(self, edt: list[float], temperature: float) -> None:
        from vllm import SamplingParams

        from selfcal_lightning.engines.vllm.dynamic_temperature import DynamicTemperature

        with pytest.raises(ValueError, match="Expected `"):
            DynamicTemperature.validate_params(SamplingParams(temperature=temperature, extra_args={"edt": edt}))
