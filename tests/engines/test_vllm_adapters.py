"""What our changes to vLLM's adapters do, part by part, against vLLM's own classes: who is awake, and what it costs."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from selfcal_lightning.engines.activated_probe import check_equals_module, try_adapter
from selfcal_lightning.engines.base import ADAPTER_VARIABLE
from selfcal_lightning.engines.vllm import plugin as vllm_plugin
from selfcal_lightning.engines.vllm.process import worker_environment

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM (make setup-vllm)")
QUERY = (11, 12, 13)


@pytest.fixture
def activated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of our changes, which knows one adapter in ``tmp_path`` and has changed nothing in this process."""
    from selfcal_lightning.engines.vllm import activated as vllm_activated

    monkeypatch.setattr(vllm_activated, "_QUERIES", {str(tmp_path.resolve()): QUERY})
    return vllm_activated


def lora(path: Path | str, number: int = 1) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(f"adapter-{number}", number, str(path))


@needs_vllm
def test_a_query_wakes_at_the_end_of_a_prompt_alone(activated: Any, tmp_path: Path) -> None:
    ours, other = lora(tmp_path), lora("/elsewhere")
    assert activated.wakes_at(ours, [1, 2, *QUERY]) == 2
    assert activated.wakes_at(ours, np.array([1, 2, *QUERY])) == 2
    for asleep in ([*QUERY], [1, 2, *QUERY, 3], [1, 2, 3], None):
        assert activated.wakes_at(ours, asleep) == activated.NEVER
    assert activated.wakes_at(other, [1, 2, *QUERY]) is None
    assert activated.wakes_at(None, [1, 2, *QUERY]) is None


@needs_vllm
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


@needs_vllm
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


@needs_vllm
def test_an_untried_version_is_refused(activated: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import vllm

    (tmp_path / "adapter_config.json").write_text('{"alora_invocation_tokens": [11, 12, 13]}')
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"Expected vLLM 0\.32\.0, which .* but got 0\.33\.1.*`engine: transformers`"):
        activated.wake_at_query(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    with pytest.raises(ValueError, match="Expected the folder of an activated adapter"):
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


@needs_vllm
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


@needs_vllm
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


def test_the_probe_fits_a_short_context() -> None:
    with pytest.raises(ValueError, match="leave room for a prompt before the query, but got 3"):
        try_adapter(lambda _: [], QUERY, vocabulary=50, longest=3, exact=True, engine="vLLM")
