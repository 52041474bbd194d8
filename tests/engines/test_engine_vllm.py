import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.engine_contract import EDT, GREEDY, QUESTIONS, EngineContract, Reference
from support.openai_server import CONTEXT, small_vllm
from support.processes import is_running, wait_until
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.base import RequestsFailedError, generate
from selfcal_lightning.engines.transformers.slots import dynamic_temperature, tempered_probabilities
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.records import Request, SamplingSettings

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

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


def _texts(engine: VLLMEngine, requests: list[Request]) -> dict[str, str]:
    return {response.request_id: response.text for response in generate(engine, requests)}


@pytest.fixture(scope="module")
def vllm_engine(tiny_model: str) -> Iterator[VLLMEngine]:
    """One engine for the tests that leave it whole; the launcher's variables stand in its parent's environment."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
            patch.setenv(name, "1")
        engine = small_vllm(tiny_model)
        assert engine.pid is None
        assert engine.max_context == CONTEXT
    yield engine
    engine.close()


class TestContract(EngineContract):
    def make_engine(self, path: str) -> VLLMEngine:
        return small_vllm(path)

    @pytest.fixture(scope="class")
    def engine(self, vllm_engine: VLLMEngine) -> VLLMEngine:
        return vllm_engine


def test_cancelling_saves_steps(vllm_engine: VLLMEngine, reference: Reference) -> None:
    """What was cancelled takes no more steps and no place in a batch of 128."""
    prompt, hot = reference.prompt(QUESTIONS[0]), SamplingSettings(temperature=2.0, edt_scale=None, max_new_tokens=150)
    vllm_engine.submit([Request(str(j), prompt, hot, seed=j) for j in range(3 * 128)])
    cancelled = vllm_engine.statistics()["cancelled"]
    vllm_engine.cancel([str(j) for j in range(3 * 128)])
    assert vllm_engine.statistics()["cancelled"] == cancelled + 3 * 128
    assert vllm_engine.poll() == []
    vllm_engine.next_token_probabilities([prompt], [5])
    start = vllm_engine.statistics()["steps"]
    [response] = generate(vllm_engine, [Request("next", prompt, GREEDY, seed=0)])
    assert vllm_engine.statistics()["steps"] - start <= len(response.token_ids) + 3


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
    assert (after["crashes"] - before["crashes"], after["starts"] - before["starts"]) == (1, 1)
    assert after["steps"] > before["steps"]
    assert vllm_engine.pid != pid
    wait_until(lambda: not is_running(pid))


def test_processed_probabilities_are_those_of_dynamic_temperature(
    tiny_model: str, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cache too small for the batch (requests are preempted) and rows of many kinds, every token is exact."""
    (tmp_path / "telling_scheduler.py").write_text(TELLING_SCHEDULER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    logged = {"logprobs_mode": "processed_logprobs", "scheduler_cls": "telling_scheduler.TellingScheduler"}
    small = {"max_batch": 32, "kv_cache_memory_bytes": 3 << 19, "log_path": str(tmp_path / "vllm.log")}
    engine = small_vllm(tiny_model, engine_args=logged, **small)
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
        assert response.yes_mass == pytest.approx(reference.masses(prompt + response.token_ids)[0], abs=1e-5)
        checked += len(response.token_ids)
    assert checked > 1000
    engine.close()
    assert (tmp_path / "vllm.log").read_text().count("preempted") > 3


def test_a_poison_request_is_named_and_the_others_go_on(
    tiny_model: str, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "poison_processor.py").write_text(POISON)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    poison = {"logits_processors": ["poison_processor:Poison"]}
    engine = small_vllm(tiny_model, max_attempts=2, stall_timeout=15.0, engine_args=poison)
    requests = reference.requests(replace(EDT, max_new_tokens=12), count=3)
    requests[4] = replace(requests[4], seed=POISON_SEED)
    with pytest.raises(RequestsFailedError, match=requests[4].id) as caught:
        generate(engine, requests)
    assert set(caught.value.failures) == {requests[4].id}
    assert (engine.statistics()["quarantined"], engine.statistics()["crashes"]) == (1, 2)
    assert engine.poll() == []
    expected = _texts(engine, requests[:4])

    os.kill(engine.pid, signal.SIGSTOP)  # a child that hangs is as good as a dead one
    assert _texts(engine, requests[:4]) == expected
    assert engine.statistics()["crashes"] == 3

    pid = engine.pid
    engine._process.channel.close()  # what the kernel does when the parent is killed
    wait_until(lambda: not is_running(pid))


@pytest.mark.parametrize("asked", [None, "model"])
def test_p_true_in_half_precision_is_read_in_float32_unless_the_model_s_own_layer_is_asked_for(
    tiny_model: str, reference: Reference, asked: str | None
) -> None:
    """The output layer multiplies the hidden states of half precision in float32; it once rounded P(True) to steps."""
    overrides = {} if asked is None else {"hf_overrides": {"head_dtype": asked}}
    engine = small_vllm(tiny_model, dtype="bfloat16", engine_args=overrides)
    described = engine.describe()
    assert (described["dtype"], described["head_dtype"]) == ("bfloat16", "float32" if asked is None else None)
    query = reference.chat.query
    ids = [*query.yes_ids, *query.no_ids]
    prompts = [reference.prompt(f"What is {i} + {i * i}?") + query.suffix_ids for i in range(60)]
    found = _on_grid(torch.tensor(engine.next_token_probabilities(prompts, ids)))
    engine.close()
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        logits = torch.stack([network(torch.tensor([prompt])).logits[0, -1] for prompt in prompts])
    coarse = _on_grid(logits.float().softmax(-1)[:, ids])
    assert coarse > 0.9
    assert found < 0.2 if asked is None else found > 0.9


def _on_grid(table: torch.Tensor) -> float:
    """Return the share of rows that give away rounded logits.

    Logits in bfloat16 differ by multiples of 1/256 and more, so that their differences take few values.
    """
    step = (table[:, 0].log() - table[:, -1].log()).mul(256).frac().abs()
    return ((step < 0.02) | (step > 0.98)).float().mean().item()


def test_closing_ends_the_child(vllm_engine: VLLMEngine) -> None:
    pid = vllm_engine.pid
    vllm_engine.close()
    wait_until(lambda: not is_running(pid))
    with pytest.raises(RuntimeError, match="closed"):
        vllm_engine.submit([])


def test_a_start_that_fails_says_why(tiny_model: str) -> None:
    engine = small_vllm(tiny_model, max_context=100_000)
    with pytest.raises(EngineCrashedError, match=r"max_context.*at most the model's 512.*100000"):
        engine.submit([])
    with pytest.raises(RuntimeError, match="closed"):
        engine.submit([])
