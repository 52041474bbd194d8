"""The transformers engine with an activated adapter: the base model's samples, the adapter's confidences."""

from typing import Any

import pytest
import torch
from support.activated_reference import ActivatedContract, ReferencePeft, check_half_precision, without_confidence
from support.engine_reference import EDT, QUESTIONS, Reference

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers import engine as engine_module
from selfcal_lightning.engines.transformers import model as transformers_model
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.model import CachedModel, load_network
from selfcal_lightning.models import activated as activation


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
    TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
    asleep = transformers_model.adapter_asleep
    monkeypatch.setattr(transformers_model, "adapter_asleep", lambda model, asleep_=True, **_: asleep(model))
    with pytest.raises(ValueError, match="but got one that never wakes"):
        TransformersEngine(tiny_model, adapter=adapter, dtype="float32")
