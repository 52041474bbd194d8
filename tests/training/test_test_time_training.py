import json
import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from support.command_lines import nested
from support.module_batches import configured, largest_difference, quiet_trainer, trained_state
from support.processes import run_processes
from support.ssc_pools import TRAIN, MakeSamples, Pool, random_samples
from support.training_runs import SaveAt, trainer_with

import selfcal_lightning.adaptation.module as adaptation
from selfcal_lightning.adaptation import runs
from selfcal_lightning.adaptation.module import PolicySettings, policy_parts
from selfcal_lightning.adaptation.monitors import RoundMonitors, collapse
from selfcal_lightning.callbacks import adaptation_guard
from selfcal_lightning.callbacks.adaptation_guard import AdaptationGuard, restore
from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.commands.selection import run_select
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.lora import LoraSettings, adapter_difference, adapter_state
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.training.rounds import adapter_folder, keep_adapter

AT_ONE = SamplingSettings(temperature=1.0, edt_scale=None)
SHALLOW = True


def varied(question: Question, rng: np.random.Generator) -> list[dict[str, Any]]:
    """Four responses: two agree, one differs, one cannot be read."""
    answers = ("7", "7", "8", None)
    return [
        {"text": "1+1=2. " * int(rng.integers(1, 4)) + f"It is {answer}.", "answer": answer, "correct": answer == "7",
         "yes_mass": 0.5, "no_mass": 0.5}
        for answer in answers
    ]  # fmt: skip


@pytest.fixture(scope="module")
def store(pool: Pool) -> str:
    return pool.write("groups", varied, sampling=AT_ONE)


def module_of(model: str, **changes: Any) -> adaptation.TestTimeTrainingModule:
    lora = LoraSettings(r=4, alpha=8, dropout=0.0, activated=False)
    return adaptation.TestTimeTrainingModule(model, **{"lora": lora, "lr": 1e-2, **changes})


def data_of(model: str, store: str, **changes: Any) -> RolloutDataModule:
    return RolloutDataModule(model, store, **{"num_samples": 4, "batch_size": 12, "max_length": 256, **changes})


def test_the_parts_by_hand() -> None:
    """Two responses of two tokens and one; token ratios 2, 1 and 1/2, advantages 1 and -1."""
    logprob = torch.tensor([-1.0, -1.0, -2.0], requires_grad=True)
    behaviour = torch.tensor([-1.0 - math.log(2), -1.0, -2.0 + math.log(2)])
    longs, nothing = torch.zeros(3, dtype=torch.long), torch.full((2,), math.nan)
    batch = adaptation.PolicyBatch(
        input_ids=longs[:2, None], attention_mask=longs[:2, None] + 1, query_position=longs[:2],
        label_row=torch.tensor([0, 0, 1]), label_position=longs, label_id=longs, target=nothing, correct=nothing,
        advantage=torch.tensor([1.0, -1.0]), generation_weight=torch.tensor([2.0, 1.0]), row=longs[:2],
        generation_total=torch.tensor(3.0), calibration_weight=torch.zeros(2), calibration_total=torch.tensor(0.0),
        question_index=longs[:2], task=("t",) * 2,
    )  # fmt: skip
    reference, logits = torch.tensor([-1.0, -1.0, -3.0]), torch.zeros(3, 4)
    parts = policy_parts(batch, logprob, behaviour=behaviour, reference=reference, logits=logits)
    # Clipped to 1.28 and to .8: -(1.28 + 1) of the first response, +.8 of the second, over three tokens.
    assert parts.gradient.item() == pytest.approx((-1.28 - 1.0 + 0.8) / 3)
    # k3 of d = log reference - log p: e^0 - 0 - 1 twice, e^-1 + 1 - 1 once.
    assert parts.divergence.item() == pytest.approx(math.exp(-1) / 3)
    assert parts.entropy.item() == pytest.approx(math.log(4))
    assert parts.clipped.item() == pytest.approx(2 / 3)
    parts.gradient.backward()
    assert logprob.grad.tolist() == pytest.approx([0.0, -1 / 3, 0.0]), "what is clipped has no gradient"

    # One ratio a response: sqrt(2) of the first one, 1/2 of the second, both clipped at .1.
    policy = PolicySettings(ratio="sequence", clip_low=0.1, clip_high=0.1)
    parts = policy_parts(batch, logprob, behaviour=behaviour, reference=None, logits=None, policy=policy)
    assert parts.gradient.item() == pytest.approx((-1.1 * 2 + 0.9) / 3)
    assert parts.divergence.item() == parts.entropy.item() == 0.0

    # Sampled by the model itself, responses weighing alike: the mean advantage, and REINFORCE's gradient.
    logprob.grad = None
    weight = {"generation_weight": torch.ones(2), "generation_total": torch.tensor(2.0)}
    batch = batch.replace(advantage=torch.tensor([1.0, -0.5]), **weight)
    parts = policy_parts(batch, logprob, behaviour=None, reference=None, logits=None)
    assert parts.gradient.item() == pytest.approx(-0.25)
    parts.gradient.backward()
    assert logprob.grad.tolist() == pytest.approx([-0.25, -0.25, 0.25])


def test_packed_groups_have_the_gradients_of_rows_apart(tiny_model: str, store: str) -> None:
    found = {}
    settings = {"target": "anchor", "kl": 0.1, "entropy": 0.01}
    for packing in ("shared_prefix", "off"):
        module = configured(module_of(tiny_model, **settings))
        shaken(module)
        data = data_of(tiny_model, store, target="anchor", packing=packing, batch_size=12)
        batch, *_ = data.train_dataloader()
        module.trainer = trainer_with(max_steps=1)
        module._epoch_taken_up = 0  # the batch is of round 0
        loss = module.training_step(batch, 0)
        loss.backward()
        gradients = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
        found[packing] = batch, loss, gradients
    packed, apart = found["shared_prefix"], found["off"]
    assert packed[0].input_ids.numel() < 0.7 * apart[0].input_ids.numel()
    assert packed[1].item() == pytest.approx(apart[1].item(), abs=1e-5)
    for name, value in apart[2].items():
        torch.testing.assert_close(packed[2][name], value, atol=1e-5, rtol=1e-4)


def shaken(module: adaptation.TestTimeTrainingModule) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.05, generator=generator)


def test_round_0_is_the_adapter_asleep_and_a_later_one_its_own(tiny_model: str, store: str) -> None:
    module = configured(module_of(tiny_model, kl=0.1))
    (batch,) = data_of(tiny_model, store, batch_size=48).train_dataloader()
    base = module.response_logprobs(batch)
    with torch.no_grad():
        logits = module._outputs(batch, batch.label_position).token_logits()
    assert torch.allclose(logits.log_softmax(-1).gather(1, batch.label_id[:, None])[:, 0], base, atol=1e-5)
    shaken(module)
    sampled_by = adapter_state(module.model)
    before = module.response_logprobs(batch)
    assert (before - base).abs().max() > 1e-3
    behaviour, reference = module._earlier(batch)
    assert torch.equal(behaviour, base)
    assert torch.equal(reference, base)
    with torch.no_grad():
        for name, value in module.named_parameters():
            if "lora_B" in name:
                value.mul_(-1.0)
    now = adapter_state(module.model)
    module._round_state = sampled_by
    behaviour, reference = module._earlier(batch)
    assert torch.equal(behaviour, before), "of the adapter that sampled the round"
    assert torch.equal(reference, base)
    assert all(torch.equal(value, now[name]) for name, value in adapter_state(module.model).items())
    module._is_sampled_from = True
    assert module._earlier(batch)[0] is None, "one step a round needs no ratio"


def test_a_likelier_answer_is_learnt(tiny_model: str, store: str) -> None:
    """The policy gradient raises what the majority says, and lowers the rest."""
    module, data = module_of(tiny_model, target="round"), data_of(tiny_model, store, target="round", batch_size=48)
    (batch,) = data.train_dataloader()
    trainer_with(max_epochs=3, limit_val_batches=0).fit(module, datamodule=data)
    gain = module.response_logprobs(batch) - configured(module_of(tiny_model)).response_logprobs(batch)
    of_rows = torch.zeros(batch.batch_size).index_add(0, batch.label_row, gain)
    assert of_rows[batch.advantage > 0].mean() > 0.1 > -0.1 > of_rows[batch.advantage < 0].mean()


def trained_by(world: int, model: str, store: str, batch_size: int) -> dict[str, torch.Tensor]:
    """Two steps of 24 responses."""
    learnt = {"reward": "majority", "target": "anchor"}
    module = module_of(model, lr=1e-3, kl=0.1, **learnt)
    accumulate = 24 // (batch_size * world)
    trainer = trainer_with(max_epochs=1, limit_val_batches=0, accumulate_grad_batches=accumulate, devices=world)
    trainer.fit(module, datamodule=data_of(model, store, group_size=3, batch_size=batch_size, **learnt))
    return trained_state(module)


@pytest.mark.slow
def test_processes_do_not_change_the_trajectory(tiny_model: str, store: str, tmp_path: Path) -> None:
    """In one process, in micro-batches, and by two processes, which cut groups apart."""
    whole, parts = trained_by(1, tiny_model, store, 24), trained_by(1, tiny_model, store, 8)
    two = run_processes(trained_by, tmp_path, 2, tiny_model, store, 12)
    start = configured(module_of(tiny_model))
    assert largest_difference(whole, trained_state(start)) > 1e-3
    assert all(largest_difference(state, whole) < 1e-5 for state in (parts, *two))


def test_a_selection_becomes_likelier(tiny_model: str, store: str, tmp_path: Path) -> None:
    run_select(store, str(tmp_path), pick="share", keep="share", keep_count=6)
    learnt = {"reward": "none", "selection": str(tmp_path)}
    data = data_of(tiny_model, store, **learnt)
    module = module_of(tiny_model, reward="none")
    (batch,) = data.train_dataloader()
    trainer = trainer_with(AdaptationGuard(questions=2, logprob_fall=9.0), max_epochs=3, limit_val_batches=0)
    trainer.fit(module, datamodule=data)
    gain = module.response_logprobs(batch) - configured(module_of(tiny_model, reward="none")).response_logprobs(batch)
    assert gain[batch.generation_weight[batch.label_row] > 0].mean() > 0.1


def test_the_guard_compares_the_questions_that_are_learnt(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store may hold others, which no later round samples."""
    own = next(SampleStore(store).samples(split="train")).question
    sizes = []
    monkeypatch.setattr(adaptation_guard, "round_monitors", lambda answers, *_, **__: sizes.append(len(answers)))
    for learnt in ([own], []):
        data = SimpleNamespace(store_dir=store, num_samples=4, questions=lambda _, learnt=learnt: learnt)
        AdaptationGuard()._monitors(data, 0)
    assert sizes[0] == 1 < sizes[1], "all, where none are named"


@pytest.mark.parametrize("fall", [math.nan, math.inf])
def test_the_report_of_the_guard_is_json_where_the_weights_diverge(tmp_path: Path, fall: float) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True, loggers=[], global_step=1)
    lost = RoundMonitors(0.5, None, None, 0.25, None, None, logprob_fall=fall)
    problems = collapse(lost, lost, agreement=1.0, unreadable=1.0, logprob_fall=0.05)
    assert problems == [f"a token of round 0 has lost {fall} nats"]
    (tmp_path / "guard.json").write_text('{"0": {"logprob_fall": NaN}}')  # of an earlier run
    AdaptationGuard(str(tmp_path / "guard.json"))._keep(trainer, 1, lost, problems)
    row = json.loads((tmp_path / "guard.json").read_text(), parse_constant=pytest.fail)["1"]
    assert row == {**vars(lost), "logprob_fall": None, "problems": problems}


def test_what_the_module_states_and_the_data_must_agree(tiny_model: str, store: str) -> None:
    with pytest.raises(InputError, match="`target` is None in the module"):
        trainer_with(max_epochs=1).fit(module_of(tiny_model), datamodule=data_of(tiny_model, store, target="round"))


def test_an_evaluation_reads_as_many_samples_as_it_asked_for(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of another evaluation, whose base model drew more, may be shared."""
    place, sampling = Path(store), SamplingSettings()
    slices = {place.parent.name: runs.QuestionSlice("word_problems")}
    parents = [place.parents[1]] * 2
    evaluation = runs.Evaluation("m", None, place, slices, sampling, [], 2, EngineSettings(), 0, "?", None, *parents)
    monkeypatch.setattr(runs, "sample_questions", lambda run: None)
    asked = [entry.question for entry in runs.read_set(place).entries]
    monkeypatch.setattr(runs.GenerationSettings, "questions", lambda run: asked[1:])
    found = evaluation._sample(place.parent.name, place.name, sampling, num_samples=3)
    assert [entry.question for entry in found.entries] == asked[1:]
    assert {len(entry.samples) for entry in found.entries} == {3}


def adapted(
    model: str, folder: Path, *callbacks: Callback, ckpt_path: str | None = None, devices: int = 1, **changes: Any
) -> adaptation.TestTimeTrainingModule:
    """Two rounds of two steps on six questions; processes share a step."""
    learnt = {"reward": "vote_share", "target": "anchor"}
    module = module_of(model, **{"lr": 2e-3, "kl": 0.05, **learnt, **changes})
    dealt = {"batch_size": 12 // devices, "group_size": 3}
    train = [QuestionSource("word_problems", split="test_id", limit=6)]
    data = data_of(model, str(folder / "store"), train=train, regenerate_every_n_epochs=1, **dealt, **learnt)
    sampling = nested(temperature=1.0, edt_scale=None, max_new_tokens=100)
    trainer_with(
        SSCGeneration(**sampling, shard_by_shard=True), *callbacks, max_epochs=2, reload_dataloaders_every_n_epochs=1,
        limit_val_batches=0, devices=devices, strategy="ddp" if devices > 1 else "auto",
    ).fit(module, datamodule=data, ckpt_path=ckpt_path)  # fmt: skip
    return module


def test_a_round_of_one_reward_ends_the_training_in_order(pool: Pool, tiny_model: str, tmp_path: Path) -> None:
    """Also where it is resumed with that round."""

    def unanimous(question: Question, rng: np.random.Generator) -> list[dict[str, Any]]:
        return [{**one, "answer": "7"} for one in varied(question, rng)]

    store = pool.write("unanimous", varied, sampling=AT_ONE)
    pool.write("unanimous", unanimous, sampling=AT_ONE, round=1)

    def trained(ckpt_path: str | None = None, **changes: Any) -> adaptation.TestTimeTrainingModule:
        module = module_of(tiny_model, **changes)
        data = data_of(tiny_model, store, regenerate_every_n_epochs=1, **changes)
        trainer_with(
            SaveAt(tmp_path), max_epochs=2, reload_dataloaders_every_n_epochs=1, limit_val_batches=0
        ).fit(module, datamodule=data, ckpt_path=ckpt_path)  # fmt: skip
        return module

    ended = trained()
    steps = ended.trainer.global_step
    assert (ended.trainer.current_epoch, ended.trainer.should_stop, steps) == (1, True, 4)
    keep_adapter(ended, store, round=1, training="t")
    again = trained(str(tmp_path / f"{steps}.ckpt"))
    assert (again.trainer.global_step, again.trainer.should_stop) == (steps, True)
    assert all(torch.equal(one, adapter_state(ended.model)[name]) for name, one in adapter_state(again.model).items())
    assert trained(target="anchor").trainer.global_step == 2 * steps, "P(True) continues alone"


@pytest.mark.slow
def test_rounds_resume_exactly(bundled_model: str, tmp_path: Path) -> None:
    whole = adapted(bundled_model, tmp_path, SaveAt(tmp_path))
    for step in (1, 3):  # in the middle of round 0, and of round 1
        resumed = adapted(bundled_model, tmp_path, ckpt_path=str(tmp_path / f"{step}.ckpt"))
        assert largest_difference(adapter_state(resumed.model), adapter_state(whole.model)) == 0.0, step
    assert adapter_difference(whole.model, adapter_folder(tmp_path / "store", 1)) > 0.0
    restore(whole, str(tmp_path / "store"), 1)
    assert adapter_difference(whole.model, adapter_folder(tmp_path / "store", 1)) == 0.0


@pytest.mark.slow
def test_the_guard_restores_what_a_rate_wrecks_also_after_a_kill(bundled_model: str, tmp_path: Path) -> None:
    """Without a label it is seen, and the base model restored; a run that was killed then and resumed stops again."""

    def is_base(module: adaptation.TestTimeTrainingModule) -> bool:
        return not any(value.any() for name, value in adapter_state(module.model).items() if "lora_B" in name)

    guard = AdaptationGuard(str(tmp_path / "guard.json"), questions=4)
    wrecked = adapted(bundled_model, tmp_path, guard, lr=0.3)
    assert guard.stopped
    assert wrecked.trainer.current_epoch == 1, "stopped after the first epoch"
    assert is_base(wrecked)
    kept = adapter_folder(tmp_path / "store", 1).with_suffix(".ckpt")
    assert any(value.any() for name, value in torch.load(kept)["state_dict"].items() if "lora_B" in name)
    again = AdaptationGuard(questions=4)
    assert is_base(adapted(bundled_model, tmp_path, again, lr=0.3, ckpt_path=str(kept)))
    assert again.stopped == guard.stopped
    assert '"problems": [\n   "' in (tmp_path / "guard.json").read_text()


def adapted_by_two(model: str, folder: Path, lr: float, ckpt_path: str | None = None) -> dict[str, Any]:
    """What one of two processes holds in the end; the second one's own guard would let everything pass."""
    off = {"unreadable": 1.0, "logprob_fall": 1e3} if os.environ["RANK"] == "1" else {}
    guard = AdaptationGuard(str(folder / "guard.json"), questions=4, agreement=1.0, **off)
    module = adapted(model, folder, guard, SaveAt(folder), devices=2, lr=lr, ckpt_path=ckpt_path)
    return {"state": adapter_state(module.model), "epoch": module.trainer.current_epoch, "stopped": guard.stopped}


@pytest.mark.slow
def test_two_processes_take_the_rounds_of_one(bundled_model: str, tmp_path: Path) -> None:
    guard = AdaptationGuard(str(tmp_path / "guard.json"), questions=4, agreement=1.0)
    alone = adapter_state(adapted(bundled_model, tmp_path / "one", guard).model)
    first, second = run_processes(adapted_by_two, tmp_path / "two", bundled_model, tmp_path / "two", 2e-3)
    assert not guard.stopped
    assert first["stopped"] == second["stopped"] == []
    for name, value in alone.items():
        assert torch.equal(first["state"][name], second["state"][name])
        torch.testing.assert_close(first["state"][name], value, atol=1e-5, rtol=1e-4)
    for round in (0, 1):
        one, two = (SampleStore(tmp_path / name / "store").index(round=round) for name in ("one", "two"))
        assert two.answer.tolist() == one.answer.tolist()
    found, expected = (json.loads((place / "guard.json").read_text()) for place in (tmp_path / "two", tmp_path))
    assert found.keys() == expected.keys() == {"0", "1", "2"}
    assert found["2"]["logprob_fall"] == pytest.approx(expected["2"]["logprob_fall"], abs=1e-5)
    # In the middle of round 1, by both processes.
    broken = str(tmp_path / "two" / "3.ckpt")
    for one in run_processes(adapted_by_two, tmp_path / "two", bundled_model, tmp_path / "two", 2e-3, broken):
        assert all(torch.equal(one["state"][name], value) for name, value in first["state"].items())


@pytest.mark.slow
def test_the_guard_stops_all_processes_and_restores_in_each(bundled_model: str, tmp_path: Path) -> None:
    for one in run_processes(adapted_by_two, tmp_path, bundled_model, tmp_path, 0.3):
        assert one["stopped"]
        assert one["epoch"] == 1
        assert not any(value.any() for name, value in one["state"].items() if "lora_B" in name)


# ---- what is read of a store: advantages, anchored targets, and no gold answer


def answers_of(*answers: str | None) -> MakeSamples:
    """The same wrong responses to every question, each with P(True) 1/2."""
    same = {"correct": False, "yes_mass": 0.5, "no_mass": 0.5}
    made = [{"text": f"1+1=2. It is {answer}.", "answer": answer, **same} for answer in answers]
    return lambda question, rng: made


def stored(pool: Pool, store: str, **changes: Any) -> RolloutDataModule:
    return data_of(pool.model, store, **{"batch_size": 48, **changes})


def batches(data: RolloutDataModule) -> list[adaptation.PolicyBatch]:
    return list(data.train_dataloader())


@pytest.fixture(scope="module")
def plain(pool: Pool) -> str:
    """Round 0: 7, 7, 8 and an unreadable one to every question, drawn at temperature 1."""
    return pool.write("plain", answers_of("7", "7", "8", None), sampling=AT_ONE)


def test_advantages_targets_and_weights_by_hand(pool: Pool, plain: str) -> None:
    (batch,) = batches(stored(pool, plain, target="round", scale="none"))
    assert batch.batch_size == 48
    order = torch.argsort(batch.row)
    # Rewards 1, 1, 0, 0 of the majority, less their mean; shares of equal confidences among the readable ones.
    assert batch.advantage[order][:4].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.target[order][:3].tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert batch.calibration_weight[order][:4].tolist() == [1.0, 1.0, 1.0, 0.0]
    for max_length in (256, 120):  # the second cuts responses
        (batch,) = batches(stored(pool, plain, max_length=max_length))
        assert torch.equal(batch.generation_weight, torch.bincount(batch.label_row, minlength=48).float())
        assert batch.generation_total.item() == len(batch.label_id)
    (batch,) = batches(stored(pool, plain, normalise="responses"))
    assert batch.generation_weight.tolist() == [1.0] * 48


def test_every_setting_of_a_draw_is_in_the_digest(pool: Pool, plain: str) -> None:
    """It is kept with each round: without one of them, a training that was begun before does not go on."""
    names = {"drop_none", "eta", "exact", "fill", "max_repeats", "p_true", "round_rule", "teacher", "teacher_share"}
    assert names <= stored(pool, plain).training_settings().keys()


def test_a_later_round_is_held_against_round_0(pool: Pool) -> None:
    store = pool.write("anchored", answers_of("7", "7", "8", None), sampling=AT_ONE)
    pool.write("anchored", answers_of("8", "8", "9", "8"), sampling=AT_ONE, round=1)
    found = {}
    for target in ("round", "anchor", "mix"):
        (batch,) = batches(stored(pool, store, target=target, round=1))
        found[target] = batch.target[torch.argsort(batch.row)][:4].tolist()
    assert found["round"] == pytest.approx([0.75, 0.75, 0.25, 0.75])
    assert found["anchor"] == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3])
    assert found["mix"] == pytest.approx([(a + b) / 2 for a, b in zip(found["round"], found["anchor"], strict=True)])


def test_questions_of_the_store_that_are_not_trained_on_do_not_count(pool: Pool) -> None:
    store = pool.write("wider", answers_of("7", "7", "8", None), sampling=AT_ONE)
    pool.write("wider", answers_of("8", "8", "9", "8"), sampling=AT_ONE, round=1)
    last = [replace(TRAIN[0], offset=6, limit=6)]
    data = stored(pool, store, target="anchor", round=1, train=last, reward="reference", batch_size=24)
    (batch,) = batches(data)
    assert batch.target[torch.argsort(batch.row)].tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3] * 6)
    (anchors,) = data.anchor_batches(questions=4, samples=2)
    assert anchors.batch_size == 4 * 2


def test_nothing_of_the_gold_answers_reaches_the_module(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """Two stores that differ in nothing but which responses are right give the same batches."""

    def shown(store: str, **changes: Any) -> list[dict[str, Any]]:
        return [batch.__dict__ for batch in batches(stored(pool, store, num_samples=8, target="anchor", **changes))]

    def wrong(question: Question, rng: np.random.Generator) -> list[dict[str, Any]]:
        return [{**fields, "correct": False} for fields in random_samples(question, rng)]

    stores = {"judged": random_samples, "misjudged": wrong}
    both = [shown(pool.write(name, make, sampling=AT_ONE)) for name, make in stores.items()]
    for first, second in zip(*both, strict=True):
        assert first["correct"].isnan().all()
        for name, value in first.items():
            same = torch.equal(value.nan_to_num(), second[name].nan_to_num()) if torch.is_tensor(value) else None
            assert same is not False, name
            assert same is not None or value == second[name]
    judged = {"pool": pool, "store": str(pool.folder / "judged"), "num_samples": 8, "train": TRAIN}
    assert {question.reference for question in stored(**judged).questions("train")} == {None}
    (pool_batch, *_) = stored(**judged).val_dataloader()
    assert pool_batch.correct.isnan().all()
    asked = stored(**judged, reward="reference", batch_size=96)
    assert asked.questions("train")[0].reference
    assert not batches(asked)[0].correct.isnan().all()


def test_stores_of_no_use(pool: Pool) -> None:
    for answers, sampling, message in (
        ("778", SamplingSettings(), "edt_scale 0.8"),
        ("778", replace(AT_ONE, top_p=0.9), "top_p 0.9"),
        ("778", None, "no record of its sampling"),
        ("777", AT_ONE, "same for all responses to each of 12 questions"),
        ((None, ""), AT_ONE, "no response can be read"),
        ("7", AT_ONE, "12 of 12 questions have 1"),
    ):
        store = pool.write(message, answers_of(*answers), sampling=sampling)
        with pytest.raises(InputError, match=message):
            stored(pool, store).train_dataloader()


def test_constant_groups_are_counted_and_leave_the_gradient(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def make(question: Question, rng: np.random.Generator) -> list[dict[str, Any]]:
        same = question.id.endswith(("0", "2", "4", "6", "8"))
        return answers_of(*(["7", "7", "7"] if same else ["7", "7", "8"]))(question, rng)

    store = pool.write("half", make, sampling=AT_ONE)
    index = SampleStore(store).index(split="train")
    same = sum(len({s.answer for s in entry.samples}) == 1 for entry in counted_samples(SampleStore(store), index))
    with caplog.at_level("INFO"):
        (batch,) = batches(stored(pool, store, num_samples=3))
    assert f"{same} of 12 groups have one reward throughout" in caplog.text
    assert batch.batch_size == 3 * (12 - same)
    (batch,) = batches(stored(pool, store, num_samples=3, target="round"))
    assert batch.batch_size == 36, "their confidence is learnt all the same"


def test_a_later_round_of_one_reward_ends_the_training_instead(pool: Pool) -> None:
    """In round 0 it is a mistake, later what sharpening comes to; P(True) may still be learnt."""
    store = pool.write("sharpened", answers_of("7", "7", "8"), sampling=AT_ONE)
    pool.write("sharpened", answers_of("7", "7", "7"), sampling=AT_ONE, round=1)
    rounds = {"num_samples": 3, "regenerate_every_n_epochs": 1}
    data = stored(pool, store, **rounds)
    assert [data.teaches(epoch) for epoch in (0, 1, 2)] == [True, False, True], "the third was not sampled"
    assert stored(pool, store, target="anchor", **rounds).teaches(1)
    (batch,) = batches(stored(pool, store, num_samples=3, round=1))
    assert batch.generation_total.item() == 0.0, "Lightning asks for the loader of the next epoch, and leaves it"
    (batch,) = batches(stored(pool, store, num_samples=3, round=1, target="anchor"))
    assert (batch.generation_total.item(), batch.calibration_total.item()) == (0.0, 36.0)


def test_statistics_of_tokens_are_read_from_where_score_puts_them(pool: Pool, shallow_model: str) -> None:
    store = pool.write("statistics", answers_of("7", "71", "8"), sampling=AT_ONE)
    with pytest.raises(InputError, match="token_entropy"):
        batches(stored(pool, store, num_samples=3, reward="entropy"))
    run_score("token_entropy", store, model=shallow_model, split="train")
    (batch,) = batches(stored(pool, store, num_samples=3, reward="entropy", scale="none"))
    index = SampleStore(store).index(split="train", confidences=["token_entropy"])
    entropy = index.confidences["token_entropy"].reshape(12, 3)
    wanted = (entropy - entropy.mean(axis=1, keepdims=True)).flatten()
    assert batch.advantage[torch.argsort(batch.row)].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_selection_is_learnt_as_it_is(pool: Pool, plain: str, tmp_path: Path) -> None:
    """One response to each question that is kept, at any sampling; the others carry no likelihood."""
    run_select(plain, str(tmp_path / "selection"), pick="share", keep="share", keep_count=5)
    learnt = {"reward": "none", "selection": str(tmp_path / "selection")}
    stored(pool, plain, num_samples=1, **learnt).check_run("fit", quiet_trainer())
    data = stored(pool, plain, **learnt)
    (batch,) = batches(data)
    assert data.steps_per_epoch == 1
    assert batch.generation_weight.tolist() == [1.0] * 5
    assert batch.generation_total.item() == 5.0
    assert len(batch.label_id) > 5
    (both,) = batches(stored(pool, plain, target="round", **learnt))
    assert (both.generation_total.item(), both.calibration_total.item()) == (5.0, 36.0)

    other = Pool(pool.model, tmp_path).write("other", answers_of("7", "7", "8", "9"), sampling=AT_ONE)
    with pytest.raises(InputError, match="sampled again"):
        batches(stored(pool, other, **learnt))
    with pytest.raises(InputError, match="selection"):
        batches(stored(pool, plain, reward="none", selection=str(tmp_path / "nothing")))


def test_a_selection_of_another_round_is_refused(pool: Pool, tmp_path: Path) -> None:
    store = pool.write("two-rounds", answers_of("7", "7", "8", "9"), sampling=AT_ONE)
    pool.write("two-rounds", answers_of("8", "8", "9", "7"), sampling=AT_ONE, round=1)
    run_select(store, str(tmp_path / "selection"), pick="share", keep="share", keep_count=5)
    learnt = {"reward": "none", "selection": str(tmp_path / "selection")}
    with pytest.raises(InputError, match="`round` is 1, but the selection was made from round 0"):
        batches(stored(pool, store, round=1, **learnt))
    run_select(store, str(tmp_path / "second"), pick="share", keep="share", keep_count=5, round=1)
    (batch,) = batches(stored(pool, store, round=1, reward="none", selection=str(tmp_path / "second")))
    assert batch.generation_total.item() == 5.0
