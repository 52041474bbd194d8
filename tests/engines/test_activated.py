import json
import os
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.engine_contract import EDT, QUESTIONS, Reference, masses
from support.openai_models import RealModel
from support.openai_server import ADAPTER, FakeServer, over_server, small_vllm, vllm_serving
from support.other_models import change_json, plain_copy, write_adapter
from transformers import AutoModelForCausalLM

from selfcal_lightning.engines.activated_probe import check_equals_module, try_adapter
from selfcal_lightning.engines.base import ADAPTER_VARIABLE, Engine, generate
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.transformers import engine as engine_module
from selfcal_lightning.engines.transformers import model as transformers_model
from selfcal_lightning.engines.transformers import slots as transformers_sleep
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.engines.vllm import plugin as vllm_plugin
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.process import worker_environment
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.models import activated as activation
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, Response, SamplingSettings

SHORT = SamplingSettings(max_new_tokens=9)


class ReferencePeft:
    """PEFT's own activated forward, one whole sequence at a time."""

    def __init__(self, tiny_model: str, adapter: str) -> None:
        base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        self.model = PeftModel.from_pretrained(base, adapter).eval()

    @torch.no_grad()
    def next_probabilities(self, ids: tuple[int, ...]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0, -1].double().softmax(-1)


def without_confidence(response: Response) -> tuple[Any, ...]:
    return response.text, response.token_ids, response.finish, response.logprob


class ActivatedContract:
    """What an engine with an activated adapter must do: the base model's samples, the adapter's confidences.

    A test module subclasses it and overrides ``make_engine``; a ``reference`` and an ``adapter`` are fixtures.
    """

    equal_fields = 4  # of text, token ids, finish and logprob, those that are the same with and without the adapter
    refusal: type[Exception] = ValueError

    def make_engine(self, model: str, **options: Any) -> Engine:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    def engines(self, tiny_model: str, adapter: str) -> Iterator[tuple[Engine, Engine]]:
        """The engine of the base model and the one with the adapter."""
        pair = self.make_engine(tiny_model), self.make_engine(tiny_model, adapter=adapter)
        yield pair
        for engine in pair:
            engine.close()

    @pytest.mark.parametrize("sampling", [EDT, SHORT], ids=["whole", "cut"])
    def test_samples_are_the_bases_and_confidences_the_adapters(
        self, sampling: SamplingSettings, tiny_model: str, adapter: str, reference: Reference, engines: Any
    ) -> None:
        requests = reference.requests(sampling, count=4)
        plain, asked = (generate(engine, requests) for engine in engines)
        same = slice(self.equal_fields)
        assert [without_confidence(r)[same] for r in asked] == [without_confidence(r)[same] for r in plain]
        assert {r.finish for r in asked} >= {"length" if sampling is SHORT else "stop"}
        peft, query = ReferencePeft(tiny_model, adapter), reference.chat.query
        for request, response in zip(requests, asked, strict=True):
            p = peft.next_probabilities((*request.prompt_ids, *response.token_ids, *query.suffix_ids))
            assert (response.yes_mass, response.no_mass) == pytest.approx(masses(p, query), abs=1e-5)
        moved = max(abs(one.yes_mass - other.yes_mass) for one, other in zip(asked, plain, strict=True))
        assert moved > 0.05, "the adapter matters"
        again = [[without_confidence(r)[same] for r in generate(engine, requests)] for engine in engines]
        assert again[0] == again[1], "the adapter has left nothing behind"

    def test_queries_read_the_adapter(self, tiny_model: str, adapter: str, reference: Reference, engines: Any) -> None:
        engine, suffix, peft = engines[1], reference.chat.query.suffix_ids, ReferencePeft(tiny_model, adapter)
        prompts = [reference.prompt(question) for question in QUESTIONS]
        asked = [(*prompt, *reference.chat.response_ids(f"It is {i}."), *suffix) for i, prompt in enumerate(prompts)]
        # A query without a context is none, and one that is not at the end was answered already: the base model's.
        plain = [*prompts, suffix, (7, *suffix, 9)]
        wanted = torch.stack([*map(reference.next_probabilities, plain), *map(peft.next_probabilities, asked)])[:, :100]
        base = torch.stack([reference.next_probabilities(ids) for ids in asked])[:, :100]
        for _ in range(2):  # the second time from a cache, where there is one
            found = engine.next_token_probabilities([*plain, *asked], range(100))
            bare = engine.next_token_probabilities(asked, range(100), with_adapter=False)
            # Without AVX-512 vLLM adds in another order: 1.1e-5.
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, atol=2e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(bare, dtype=torch.float64), base, atol=1e-5, rtol=0)
        assert ((wanted[len(plain) :] - base).abs().amax(1) > 0.02).all(), "the adapter matters"

    def test_what_it_is_says_whose_samples_and_whose_confidences(self, engines: Any) -> None:
        base, facts = (engine.describe() for engine in engines)
        assert base.pop("activated_adapter_sha256", None) is base["adapter_sha256"] is None
        assert facts.pop("activated_adapter_sha256") is not None
        assert facts == base
        json.dumps(facts)

    def test_another_query_is_refused(self, tiny_model: str, adapter: str, reference: Reference, engines: Any) -> None:
        other = ChatFormat(load_tokenizer(tiny_model), query="Right? (Yes/No)")
        with pytest.raises(ValueError, match="the confidence query that the activated adapter was trained on"):
            self.make_engine(tiny_model, adapter=adapter, chat=other).submit([])
        request = Request("a", reference.prompt(QUESTIONS[0]), SHORT, seed=0, query=other.query)
        with pytest.raises(ValueError, match="Set `query` to the text in the adapter's manifest"):
            engines[1].submit([request])
        assert engines[1].poll() == []
        assert generate(engines[1], [replace(request, query=None)])[0].yes_mass is None

    def test_an_adapter_that_does_nothing_is_refused(self, tiny_model: str, adapter: str, tmp_path: Path) -> None:
        folder = plain_copy(adapter, tmp_path / "nothing")
        weights = load_file(f"{folder}/adapter_model.safetensors")
        zeros = {name: value * (0.0 if "lora_B" in name else 1.0) for name, value in weights.items()}
        save_file(zeros, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})
        with pytest.raises(self.refusal, match=r"to change what follows its query, but"):
            self.make_engine(tiny_model, adapter=folder).submit([])


def check_half_precision(engine: Engine, reference: Reference, model: str, adapter: str) -> None:
    """Compare confidences in bfloat16 with PEFT's in float32."""
    requests, peft, query = reference.requests(EDT, count=2), ReferencePeft(model, adapter), reference.chat.query
    for request, response in zip(requests, generate(engine, requests), strict=True):
        p = peft.next_probabilities((*request.prompt_ids, *response.token_ids, *query.suffix_ids))
        assert response.yes_mass == pytest.approx(masses(p, query)[0], abs=0.05)


ROOT = Path(__file__).resolve().parents[2]
QUERY = (11, 12, 13)


@pytest.fixture(scope="module")
def adapter(tiny_model: str, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("adapter"), reference.chat.query.suffix_ids)


class TestActivated(ActivatedContract):
    max_batch = 5

    def make_engine(self, model: str, **options: Any) -> TransformersEngine:
        return TransformersEngine(model, dtype="float32", max_batch=self.max_batch, **options)


@pytest.mark.slow
class TestActivatedInOneBatch(TestActivated):
    max_batch = 64


@pytest.mark.slow
def test_half_precision(tiny_model: str, adapter: str, reference: Reference) -> None:
    half = {"dtype": "bfloat16", "device": "cpu"}
    engine, requests = TransformersEngine(tiny_model, adapter=adapter, **half), reference.requests(EDT, count=2)
    plain, asked = (generate(one, requests) for one in (TransformersEngine(tiny_model, **half), engine))
    assert [without_confidence(r) for r in asked] == [without_confidence(r) for r in plain]
    check_half_precision(engine, reference, tiny_model, adapter)


def test_nothing_is_encoded_twice(tiny_model: str, adapter: str, reference: Reference) -> None:
    fed: dict[bool, int] = {True: 0, False: 0}

    class Spy(CachedModel):
        def extend(self, slots: torch.Tensor, starts: torch.Tensor, ids: torch.Tensor, *args: Any, **kw: Any) -> Any:
            fed[kw.get("awake", False)] += ids.numel() if ids.shape[1] > 1 or kw.get("awake") else 0
            return super().extend(slots, starts, ids, *args, **kw)

    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32", max_batch=64)
    engine._model = Spy(engine._model.network)
    requests = reference.requests(EDT, count=4)
    generate(engine, requests)
    longest = max(len(reference.prompt(question)) for question in QUESTIONS)
    assert fed[True] == len(requests) * len(reference.chat.query.suffix_ids)
    assert fed[False] == len(QUESTIONS) * (longest - 1), "prompts alone, without their last tokens"


def test_what_responses_share_is_read_once(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    fed = []
    network = engine._require_model().network
    network.register_forward_pre_hook(lambda _, args, kw: fed.append(tuple(kw["input_ids"].shape)), with_kwargs=True)
    prompt, suffix = reference.prompt(QUESTIONS[0]), reference.chat.query.suffix_ids
    responses = [reference.chat.response_ids(text) for text in ("", "It is 1.", "It is 12, or 3.", "It is 1.5")]
    asked = [(*prompt, *response, *suffix) for response in responses]
    asked += [(*reference.prompt(QUESTIONS[1]), *suffix), (7, *suffix)]
    found = torch.tensor(engine.next_token_probabilities(asked, range(100)), dtype=torch.float64)
    stems, rests, queries = fed
    assert stems[0] == 3, "two prompts, and what has none"
    assert rests == (3, max(map(len, responses)))
    assert queries == (len(asked), len(suffix))
    peft = ReferencePeft(tiny_model, adapter)
    wanted = torch.stack([peft.next_probabilities(ids)[:100] for ids in asked])
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_an_adapter_without_sleep_is_refused(tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = activation._adapted_layers
    monkeypatch.setattr(activation, "_adapted_layers", lambda model: layers(model)[1:])
    with pytest.raises(ValueError, match="to leave the base model as it is while it sleeps, but logits differ"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32")


def test_an_adapter_that_never_wakes_is_refused(tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = load_network(tiny_model, revision=None, adapter=adapter, dtype="float32", device="cpu")
    monkeypatch.setattr(engine_module, "load_network", lambda *args, **settings: network)
    asleep = transformers_model.adapter_asleep
    monkeypatch.setattr(transformers_model, "adapter_asleep", lambda model, asleep_=True, **_: asleep(model))
    with pytest.raises(ValueError, match="but got one that never wakes"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32")


def _engine(base_url: str, model: str, **options: object) -> OpenAIEngine:
    return over_server(base_url, model, **{"served_model": ADAPTER, **options})


@pytest.fixture(scope="module")
def server(tiny_model: str, adapter: str) -> Iterator[FakeServer]:
    asked = RealModel(tiny_model, adapter=adapter)
    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model), adapter=asked)
    yield server
    server.close()


class TestActivatedOverServer(ActivatedContract):
    equal_fields = 3

    @pytest.fixture(autouse=True, scope="class")
    def _know_the_server(self, server: FakeServer, request: pytest.FixtureRequest) -> None:
        request.cls.base_url = server.base_url

    def make_engine(self, model: str, **options: object) -> OpenAIEngine:
        name = ADAPTER if options.get("adapter") else "tiny"
        return _engine(self.base_url, model, **{"adapter": None, "served_model": name, **options})


def test_a_server_without_plugin_is_refused(tiny_model: str, adapter: str, tmp_path: Path) -> None:
    """It loads the same weights as an adapter that is always awake."""
    always = plain_copy(adapter, tmp_path / "always")
    change_json(tmp_path / "always" / "adapter_config.json", alora_invocation_tokens=None)
    asked = RealModel(tiny_model, adapter=always)
    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model), adapter=asked)
    engine = _engine(server.base_url, tiny_model, adapter=adapter)
    said = r"it reads more than its query.* Start vLLM's server with the environment variable SELFCAL_"
    with pytest.raises(ValueError, match=said):
        engine.submit([])
    engine.close()
    server.close()


def test_another_adapter_is_refused(server: FakeServer, tiny_model: str, reference: Reference, tmp_path: Path) -> None:
    other = write_adapter(tiny_model, tmp_path, reference.chat.query.suffix_ids, lora_alpha=600)
    engine = _engine(server.base_url, tiny_model, adapter=other)
    with pytest.raises(ValueError, match=r"Expected the server to give the probabilities of the module that trained"):
        engine.submit([])
    engine.close()
    unknown = _engine(server.base_url, tiny_model, adapter=other, dtype=None)  # what is not float32 is not compared
    unknown.submit([])
    unknown.close()


def test_a_name_that_is_no_adapters_is_refused(server: FakeServer, tiny_model: str, adapter: str) -> None:
    for name in ("tiny", "nobody"):
        engine = _engine(server.base_url, tiny_model, adapter=adapter, served_model=name)
        with pytest.raises(ValueError, match=rf"name for an adapter on one of its models, but got '{name}'. It has: t"):
            engine.submit([])
        engine.close()


def _plugin_path(folder: Path) -> Path:
    """Write what pip would write of our entry points, so that a server finds the plugin of this checkout."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups.items()]
    info = folder / "selfcal_plugin_under_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: selfcal-plugin-under-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def vllms_server(tiny_model: str, adapter: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    environment = worker_environment(os.environ, on_cpu=True, activated_adapter=adapter)
    environment["PYTHONPATH"] = os.pathsep.join([str(_plugin_path(folder)), environment["PYTHONPATH"]])
    words = ["--enable-lora", "--max-loras", "2", "--lora-modules", f"{ADAPTER}={adapter}"]
    with vllm_serving(tiny_model, folder, environment, *words) as base_url:
        yield base_url


@pytest.mark.slow
@pytest.mark.vllm
class TestActivatedOnVLLMsServer(TestActivatedOverServer):
    @pytest.fixture(autouse=True, scope="class")
    def _know_the_server(self, vllms_server: str, request: pytest.FixtureRequest) -> None:
        request.cls.base_url = vllms_server


@pytest.mark.slow
@pytest.mark.vllm
class TestActivatedInVLLM(ActivatedContract):
    refusal = EngineCrashedError

    def make_engine(self, model: str, **options: Any) -> VLLMEngine:
        return small_vllm(model, **options)

    def test_the_query_finds_what_sampling_left(self, reference: Reference, engines: Any) -> None:
        prompt = reference.prompt(" ".join(QUESTIONS))
        long = SamplingSettings(max_new_tokens=48)
        requests = [Request(str(j), prompt, long, seed=j, query=reference.chat.query) for j in range(32)]
        rates = []
        for engine in engines:
            before = engine.statistics()
            generate(engine, requests)
            after = engine.statistics()
            tokens = after["query_tokens"] - before["query_tokens"]
            assert tokens > 32 * len(prompt)
            rates.append((after["query_cached_tokens"] - before["query_cached_tokens"]) / tokens)
            prompts, cached = after["prompt_tokens"], after["prompt_cached_tokens"]
            assert (cached - before["prompt_cached_tokens"]) / (prompts - before["prompt_tokens"]) > 0.5
        assert rates[1] == rates[0] > 0.5

    def test_samples_and_queries_in_one_batch_stay_apart(self, reference: Reference, engines: Any) -> None:
        """Every step holds the tokens of both: samples are drawn while the queries of others are read."""
        query = reference.chat.query
        requests = [
            Request(f"{i}/{j}", reference.prompt(question), SamplingSettings(max_new_tokens=8 + 5 * j), j, query)
            for i, question in enumerate(QUESTIONS)
            for j in range(12)
        ]
        together = generate(engines[1], requests)
        alone = [generate(engines[1], [request])[0] for request in requests[::5]]
        for one, other in zip(alone, together[::5], strict=True):
            assert without_confidence(one)[:3] == without_confidence(other)[:3]
            assert one.yes_mass == pytest.approx(other.yes_mass, abs=1e-5)


@pytest.mark.slow
@pytest.mark.vllm
def test_half_precision_in_vllm(tiny_model: str, adapter: str, reference: Reference) -> None:
    engine = small_vllm(tiny_model, adapter=adapter, dtype="bfloat16")
    check_half_precision(engine, reference, tiny_model, adapter)
    engine.close()


@pytest.mark.slow
@pytest.mark.vllm
def test_a_base_of_other_weights_is_refused(tiny_model: str, adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    load = transformers_sleep.load_network

    def load_another(model: str, **settings: object) -> torch.nn.Module:
        network, noise = load(model, **settings), torch.Generator().manual_seed(0)
        for parameter in network.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
        return network

    monkeypatch.setattr(transformers_sleep, "load_network", load_another)
    engine = small_vllm(tiny_model, adapter=adapter)
    with pytest.raises(ValueError, match=r"of the module that trained the activated adapter to 0.0001 in float32"):
        engine.submit([])
    assert engine.pid is None


@pytest.fixture
def activated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of our changes, which knows one adapter in ``tmp_path`` and has changed nothing in this process."""
    from selfcal_lightning.engines.vllm import activated as vllm_activated

    monkeypatch.setattr(vllm_activated, "_QUERIES", {str(tmp_path.resolve()): QUERY})
    return vllm_activated


def lora(path: Path | str, number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, str(path))


@pytest.mark.vllm
def test_a_query_wakes_at_the_end_of_a_prompt_alone(activated: Any, tmp_path: Path) -> None:
    ours, other = lora(tmp_path), lora("/elsewhere")
    assert activated.wakes_at(ours, [1, 2, *QUERY]) == 2
    assert activated.wakes_at(ours, np.array([1, 2, *QUERY])) == 2
    for asleep in ([*QUERY], [1, 2, *QUERY, 3], [1, 2, 3], None):
        assert activated.wakes_at(ours, asleep) == activated.NEVER
    assert activated.wakes_at(other, [1, 2, *QUERY]) is None
    assert activated.wakes_at(None, [1, 2, *QUERY]) is None


@pytest.mark.vllm
def test_blocks_before_the_query_are_the_base_models(activated: Any, tmp_path: Path) -> None:
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys as vllms

    def request(adapter: Any, prompt: list[int]) -> Any:
        known = {"mm_features": [], "cache_salt": "salt", "prompt_embeds": None, "prompt_embeds_per_block_hashes": {}}
        return SimpleNamespace(lora_request=adapter, prompt_token_ids=prompt, **known)

    prompt = [*range(20, 30), *QUERY]
    asked, bare = request(lora(tmp_path), prompt), request(None, prompt)
    for start in range(0, 12, 4):
        ours = activated._block_keys(vllms, asked, start, start + 4, 0)
        base, named = vllms(bare, start, start + 4, 0), vllms(asked, start, start + 4, 0)
        assert ours == (base if start + 4 <= 10 else named)
        assert named != base
        assert activated._block_keys(vllms, bare, start, start + 4, 0) == base
    always = request(lora("/elsewhere"), prompt)
    assert activated._block_keys(vllms, always, 0, 4, 0) == vllms(always, 0, 4, 0)


@pytest.mark.vllm
def test_model_runner_v2_gives_no_adapter_to_tokens_before_the_query(activated: Any, tmp_path: Path) -> None:
    """Its kernels need Triton, which has no CPUs: what it asks of us is held here, with its own state of adapters."""
    from vllm.v1.worker.gpu.lora_utils import LoraState

    state, computed = LoraState(8), np.zeros(8, dtype=np.int32)
    runner = SimpleNamespace(lora_state=state, req_states=SimpleNamespace(num_computed_tokens_np=computed))
    ours, always = lora(tmp_path, 1), lora("/elsewhere", 2)
    prompts = {
        "asked": (3, ours, [*range(20, 25), *QUERY], 2),  # two of its eight tokens were found in the cache
        "base": (0, None, [5, 6, 7], 0),
        "always": (5, always, [5, 6, *QUERY], 0),
        "sampled": (2, ours, [5, 6, 7, 8], 0),
        "answered": (4, ours, [5, 6, *QUERY], 7),  # it samples behind its query
    }

    def add(runner: Any, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            slot, adapter, _, found = prompts[new.req_id]
            state.add_request(new.req_id, slot, adapter)
            computed[slot] = found

    new = [
        SimpleNamespace(req_id=name, lora_request=adapter, prefill_token_ids=[*prompt, 99], prompt_len=len(prompt))
        for name, (_, adapter, prompt, _) in prompts.items()
    ]
    activated._add_requests_v2(runner, add, SimpleNamespace(scheduled_new_reqs=new))
    names, scheduled = list(prompts), np.array([6, 3, 5, 4, 1], dtype=np.int32)
    slots = np.array([prompts[name][0] for name in names])
    sampled, tokens, active = activated._lora_inputs_v2(state, LoraState.make_lora_inputs, names, slots, scheduled)
    assert tokens == (*[0] * 3, *[1] * 3, *[0] * 3, *[2] * 5, *[0] * 4, 1)
    assert sampled == (1, 0, 2, 0, 1)
    assert active == {ours, always}
    state.remove_request("asked")
    activated._add_requests_v2(runner, add, SimpleNamespace(scheduled_new_reqs=[]))
    assert set(activated._REQUESTS_V2[state][1]) == {"always", "sampled", "answered"}


@pytest.mark.vllm
def test_an_untried_version_is_refused(activated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    (tmp_path / "adapter_config.json").write_text('{"alora_invocation_tokens": [11, 12, 13]}')
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"Expected vLLM 0\.32\.0, which .* but got 0\.33\.1.*`engine: transformers`"):
        activated.wake_at_query(str(tmp_path))


def test_the_plugin_is_off_when_no_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADAPTER_VARIABLE, raising=False)
    vllm_plugin.register()
    environment = worker_environment({ADAPTER_VARIABLE: "/stale"}, on_cpu=True)
    assert ADAPTER_VARIABLE not in environment
    assert worker_environment({}, on_cpu=True, activated_adapter="/new")[ADAPTER_VARIABLE] == "/new"


def _mapping(tokens: list[int], sampled: list[int]) -> Any:
    from vllm.lora.layers import LoRAMapping

    return LoRAMapping(tuple(tokens), tuple(sampled), is_prefill=True)


@pytest.mark.vllm
def test_masked_products_are_vllms_own_where_it_is_right() -> None:
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    from selfcal_lightning.engines.vllm.punica import MaskedProducts

    draw = torch.Generator().manual_seed(0)
    tokens, sampled, slots = [0, 0, 7, 7, 0, 9, 9, 0], [0, 7, 9], [7, 9, None]
    a = tuple(torch.randn(3, 1, 4, 6, generator=draw) for _ in range(2))
    b = tuple(torch.randn(3, 1, width, 4, generator=draw) for width in (5, 3))
    for stacked in (*a, *b):
        stacked[2] = 0.0  # vLLM's own takes "no adapter" for the last slot: here it is empty
    x, start = torch.randn(8, 6, generator=draw), torch.randn(8, 8, generator=draw)
    results = []
    for kind in (PunicaWrapperCPU, MaskedProducts):
        punica, y, logits = kind(64, 64, "cpu"), start.clone(), start[:3, :5].clone()
        punica.update_metadata(_mapping(tokens, sampled), slots, 3, 100)
        punica.add_lora_linear(y, x, a, b, 2.0, (5, 3))
        punica.add_lora_logits(logits, x[:3], a[0], b[0], 1.0)
        results.append((y, logits))
    for own, theirs in zip(*results, strict=True):
        torch.testing.assert_close(own, theirs)
    asleep = torch.tensor([token == 0 for token in tokens])
    assert torch.equal(results[1][0][asleep], start[asleep])
    assert not torch.isclose(results[1][0][~asleep], start[~asleep]).any()


@pytest.mark.vllm
def test_tokens_without_an_adapter_get_none_when_all_slots_are_taken() -> None:
    from selfcal_lightning.engines.vllm.punica import MaskedProducts

    punica, x, y = MaskedProducts(8, 8, "cpu"), torch.ones(4, 6), torch.zeros(4, 5)
    a, b = (torch.ones(1, 1, 2, 6),), (torch.ones(1, 1, 5, 2),)
    for tokens, changed in (([0, 4, 0, 4], [False, True, False, True]), ([0] * 4, [False] * 4)):
        y.zero_()
        punica.update_metadata(_mapping(tokens, [4]), [4], 1, 100)
        punica.add_lora_linear(y, x, a, b, 1.0, (5,))
        assert y.ne(0.0).any(1).tolist() == changed


def _try(*, exact: bool, **changes: float) -> None:
    given = {"base": 0.2, "asleep": 0.2, "base_asked": 0.3, "awake": 0.5, "base_again": 0.3, **changes}
    answers = {name: [[p, 0.1], [0.4, 0.1]] for name, p in given.items()}
    asked = iter([["base"], ["awake", "base_asked", "asleep"], ["base_again"]])
    prompts: list[Any] = []

    def ask(groups: Any) -> list[list[list[float]]]:
        prompts.extend(groups)
        return [answers[name] for name in next(asked)]

    contexts, awake = try_adapter(ask, QUERY, vocabulary=50, longest=20, exact=exact, engine="vLLM")
    assert awake == answers["awake"]
    queries = [(*context, *QUERY) for context in contexts]
    assert [len(query) for query in queries] == [8, 20]
    wanted = [(contexts, False), (queries, True), (queries, False), (contexts, True), (queries, False)]
    assert prompts == wanted, "base model, awake, base model again, asleep, and the cache of the base model"


def test_the_self_test_tells_what_is_wrong() -> None:
    _try(exact=True)
    _try(exact=False, asleep=0.201)
    for changes, said in (
        ({"asleep": 0.201}, "leave the base model as it is while it sleeps, but in vLLM .* differ by 0.00499"),
        ({"base_again": 0.301}, "out of the base model's cache"),
        ({"awake": 0.3}, "change what follows its query, but in vLLM"),
    ):
        with pytest.raises(ValueError, match=said):
            _try(exact=True, **changes)
    with pytest.raises(ValueError, match="as much as noise"):  # in half precision rounding alone moves as much
        _try(exact=False, asleep=0.21, awake=0.31)
    check_equals_module([[0.2, 0.1]], [[0.2, 0.10005]], engine="vLLM")
    with pytest.raises(ValueError, match=r"to 0\.0001 in float32, but they differ by 0\.0002"):
        check_equals_module([[0.2, 0.1]], [[0.2, 0.1002]], engine="vLLM")
