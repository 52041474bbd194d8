"""What test-time training reads of a store: advantages, anchored targets, and no gold answer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.module_batches import quiet_trainer
from support.ssc_pools import TRAIN, MakeSamples, Pool, random_samples

from selfcal_lightning.adaptation.module import PolicyBatch
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.commands.selection import run_select
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.records import Question, SamplingSettings

AT_ONE = SamplingSettings(temperature=1.0, edt_scale=None)
Fields = list[dict[str, Any]]


def answers_of(*answers: str | None) -> MakeSamples:
    """The same wrong responses to every question, each with P(True) 1/2."""
    same = {"correct": False, "yes_mass": 0.5, "no_mass": 0.5}
    made = [{"text": f"1+1=2. It is {answer}.", "answer": answer, **same} for answer in answers]
    return lambda question, rng: made


def data_of(pool: Pool, store: str, **changes: Any) -> RolloutDataModule:
    settings: dict[str, Any] = {"num_samples": 4, "batch_size": 48, "max_length": 256, **changes}
    return RolloutDataModule(pool.model, store, **settings)


def batches(data: RolloutDataModule) -> list[PolicyBatch]:
    return list(data.train_dataloader())


@pytest.fixture(scope="module")
def plain(pool: Pool) -> str:
    """Round 0: 7, 7, 8 and an unreadable one to every question, drawn at temperature 1."""
    return pool.write("plain", answers_of("7", "7", "8", None), sampling=AT_ONE)


def test_advantages_targets_and_weights_by_hand(pool: Pool, plain: str) -> None:
    (batch,) = batches(data_of(pool, plain, target="round", scale="none"))
    assert batch.batch_size == 48
    order = torch.argsort(batch.row)
    # Rewards 1, 1, 0, 0 of the majority, less their mean; shares of equal confidences among the readable ones.
    assert batch.advantage[order][:4].tolist() == [0.5, 0.5, -0.5, -0.5]
    assert batch.target[order][:3].tolist() == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert batch.calibration_weight[order][:4].tolist() == [1.0, 1.0, 1.0, 0.0]
    for max_length in (256, 120):  # the second cuts responses
        (batch,) = batches(data_of(pool, plain, max_length=max_length))
        assert torch.equal(batch.generation_weight, torch.bincount(batch.label_row, minlength=48).float())
        assert batch.generation_total.item() == len(batch.label_id)
    (batch,) = batches(data_of(pool, plain, normalise="responses"))
    assert batch.generation_weight.tolist() == [1.0] * 48


def test_every_setting_of_a_draw_is_in_the_digest(pool: Pool, plain: str) -> None:
    """It is kept with each round: without one of them, a training that was begun before does not go on."""
    names = {"drop_none", "eta", "exact", "fill", "max_repeats", "p_true", "round_rule", "teacher", "teacher_share"}
    assert names <= data_of(pool, plain).training_settings().keys()


def test_a_later_round_is_held_against_round_0(pool: Pool) -> None:
    store = pool.write("anchored", answers_of("7", "7", "8", None), sampling=AT_ONE)
    pool.write("anchored", answers_of("8", "8", "9", "8"), sampling=AT_ONE, round=1)
    found = {}
    for target in ("round", "anchor", "mix"):
        (batch,) = batches(data_of(pool, store, target=target, round=1))
        found[target] = batch.target[torch.argsort(batch.row)][:4].tolist()
    assert found["round"] == pytest.approx([0.75, 0.75, 0.25, 0.75])
    assert found["anchor"] == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3])
    assert found["mix"] == pytest.approx([(a + b) / 2 for a, b in zip(found["round"], found["anchor"], strict=True)])


def test_questions_of_the_store_that_are_not_trained_on_do_not_count(pool: Pool) -> None:
    store = pool.write("wider", answers_of("7", "7", "8", None), sampling=AT_ONE)
    pool.write("wider", answers_of("8", "8", "9", "8"), sampling=AT_ONE, round=1)
    last = [replace(TRAIN[0], offset=6, limit=6)]
    data = data_of(pool, store, target="anchor", round=1, train=last, reward="reference", batch_size=24)
    (batch,) = batches(data)
    assert batch.target[torch.argsort(batch.row)].tolist() == pytest.approx([1 / 3, 1 / 3, 0.0, 1 / 3] * 6)
    (anchors,) = data.anchor_batches(questions=4, samples=2)
    assert anchors.batch_size == 4 * 2


def test_nothing_of_the_gold_answers_reaches_the_module(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    """Two stores that differ in nothing but which responses are right give the same batches."""

    def shown(store: str, **changes: Any) -> list[dict[str, Any]]:
        return [batch.__dict__ for batch in batches(data_of(pool, store, num_samples=8, target="anchor", **changes))]

    def wrong(question: Question, rng: np.random.Generator) -> Fields:
        return [{**fields, "correct": False} for fields in random_samples(question, rng)]

    one = shown(pool.write("judged", random_samples, sampling=AT_ONE))
    two = shown(pool.write("misjudged", wrong, sampling=AT_ONE))
    for first, second in zip(one, two, strict=True):
        assert first["correct"].isnan().all()
        for name, value in first.items():
            same = torch.equal(value.nan_to_num(), second[name].nan_to_num()) if torch.is_tensor(value) else None
            assert same is not False, name
            assert same is not None or value == second[name]
    data = data_of(pool, str(pool.folder / "judged"), train=TRAIN)
    assert {question.reference for question in data.questions("train")} == {None}
    (pool_batch, *_) = data_of(pool, str(pool.folder / "judged"), num_samples=8).val_dataloader()
    assert pool_batch.correct.isnan().all()
    (asked,) = batches(data_of(pool, str(pool.folder / "judged"), num_samples=8, reward="reference", batch_size=96))
    assert not asked.correct.isnan().all()
    assert data_of(pool, str(pool.folder / "judged"), train=TRAIN, reward="reference").questions("train")[0].reference


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (answers_of("7", "7", "8"), {"sampling": SamplingSettings()}, "edt_scale 0.8"),
        (answers_of("7", "7", "8"), {"sampling": replace(AT_ONE, top_p=0.9)}, "top_p 0.9"),
        (answers_of("7", "7", "8"), {}, "no record of its sampling"),
        (answers_of("7", "7", "7"), {"sampling": AT_ONE}, "same for all responses to each of 12 questions"),
        (answers_of(None, ""), {"sampling": AT_ONE}, "no response can be read"),
        (answers_of("7"), {"sampling": AT_ONE}, "12 of 12 questions have 1"),
    ],
)
def test_stores_of_no_use(pool: Pool, tmp_path: Any, make: MakeSamples, changes: dict[str, Any], message: str) -> None:
    store = Pool(pool.model, tmp_path).write("store", make, **changes)
    with pytest.raises(InputError, match=message):
        data_of(pool, store).train_dataloader()


def test_constant_groups_are_counted_and_leave_the_gradient(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    def make(question: Question, rng: np.random.Generator) -> Fields:
        same = question.id.endswith(("0", "2", "4", "6", "8"))
        return answers_of(*(["7", "7", "7"] if same else ["7", "7", "8"]))(question, rng)

    store = pool.write("half", make, sampling=AT_ONE)
    index = SampleStore(store).index(split="train")
    same = sum(len({s.answer for s in entry.samples}) == 1 for entry in counted_samples(SampleStore(store), index))
    with caplog.at_level("INFO"):
        (batch,) = batches(data_of(pool, store, num_samples=3))
    assert f"{same} of 12 groups have one reward throughout" in caplog.text
    assert batch.batch_size == 3 * (12 - same)
    (batch,) = batches(data_of(pool, store, num_samples=3, target="round"))
    assert batch.batch_size == 36, "their confidence is learnt all the same"


def test_a_later_round_of_one_reward_ends_the_training_instead(pool: Pool) -> None:
    """In round 0 it is a mistake, later what sharpening comes to; P(True) may still be learnt."""
    store = pool.write("sharpened", answers_of("7", "7", "8"), sampling=AT_ONE)
    pool.write("sharpened", answers_of("7", "7", "7"), sampling=AT_ONE, round=1)
    rounds = {"num_samples": 3, "regenerate_every_n_epochs": 1}
    data = data_of(pool, store, **rounds)
    assert [data.teaches(epoch) for epoch in (0, 1, 2)] == [True, False, True], "the third was not sampled"
    assert data_of(pool, store, target="anchor", **rounds).teaches(1)
    (batch,) = batches(data_of(pool, store, num_samples=3, round=1))
    assert batch.generation_total.item() == 0.0, "Lightning asks for the loader of the next epoch, and leaves it"
    (batch,) = batches(data_of(pool, store, num_samples=3, round=1, target="anchor"))
    assert (batch.generation_total.item(), batch.calibration_total.item()) == (0.0, 36.0)


def test_statistics_of_tokens_are_read_from_where_score_puts_them(pool: Pool, shallow_model: str) -> None:
    store = pool.write("statistics", answers_of("7", "71", "8"), sampling=AT_ONE)
    with pytest.raises(InputError, match="token_entropy"):
        batches(data_of(pool, store, num_samples=3, reward="entropy"))
    run_score("token_entropy", store, model=shallow_model, split="train")
    (batch,) = batches(data_of(pool, store, num_samples=3, reward="entropy", scale="none"))
    index = SampleStore(store).index(split="train", confidences=["token_entropy"])
    entropy = index.confidences["token_entropy"].reshape(12, 3)
    wanted = (entropy - entropy.mean(axis=1, keepdims=True)).flatten()
    assert batch.advantage[torch.argsort(batch.row)].tolist() == pytest.approx(wanted, abs=1e-6)


def test_a_selection_is_learnt_as_it_is(pool: Pool, plain: str, tmp_path: Path) -> None:
    """One response to each question that is kept, at any sampling; the others carry no likelihood."""
    run_select(plain, str(tmp_path / "selection"), pick="share", keep="share", keep_count=5)
    learnt = {"reward": "none", "selection": str(tmp_path / "selection")}
    data_of(pool, plain, num_samples=1, **learnt).check_run("fit", quiet_trainer())
    data = data_of(pool, plain, **learnt)
    (batch,) = batches(data)
    assert data.steps_per_epoch == 1
    assert batch.generation_weight.tolist() == [1.0] * 5
    assert batch.generation_total.item() == 5.0
    assert len(batch.label_id) > 5
    (both,) = batches(data_of(pool, plain, target="round", **learnt))
    assert (both.generation_total.item(), both.calibration_total.item()) == (5.0, 36.0)

    other = Pool(pool.model, tmp_path).write("other", answers_of("7", "7", "8", "9"), sampling=AT_ONE)
    with pytest.raises(InputError, match="sampled again"):
        batches(data_of(pool, other, **learnt))
    with pytest.raises(InputError, match="selection"):
        batches(data_of(pool, plain, reward="none", selection=str(tmp_path / "nothing")))


def test_a_selection_of_another_round_is_refused(pool: Pool, tmp_path: Path) -> None:
    store = pool.write("two-rounds", answers_of("7", "7", "8", "9"), sampling=AT_ONE)
    pool.write("two-rounds", answers_of("8", "8", "9", "7"), sampling=AT_ONE, round=1)
    run_select(store, str(tmp_path / "selection"), pick="share", keep="share", keep_count=5)
    learnt = {"reward": "none", "selection": str(tmp_path / "selection")}
    with pytest.raises(InputError, match="`round` is 1, but the selection was made from round 0"):
        batches(data_of(pool, store, round=1, **learnt))
    run_select(store, str(tmp_path / "second"), pick="share", keep="share", keep_count=5, round=1)
    (batch,) = batches(data_of(pool, store, round=1, reward="none", selection=str(tmp_path / "second")))
    assert batch.generation_total.item() == 5.0
