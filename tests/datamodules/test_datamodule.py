import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support.module_batches import NO_DROPOUT, module_of, quiet_trainer
from support.ssc_pools import TRAIN, MakeSamples, Pool, fit, random_samples

from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.datamodules.questions import QuestionSource, check_disjoint, load_questions, task_shares
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.records import Question

SHALLOW = True


def test_an_epoch_has_the_number_of_steps_that_the_settings_say(pool: Pool, store_dir: str) -> None:
    data = pool.data(store_dir, total_tuples=23)
    seen = fit(data, max_epochs=2, accumulate_grad_batches=3).seen
    assert data.steps_per_epoch == 4
    assert len(seen) == 2 * 4 * 3
    rows = [[row for *_, batch, _, _ in seen[start : start + 12] for row in batch if row >= 0] for start in (0, 12)]
    assert [len(part) for part in rows] == [23, 23]
    assert Counter(rows[0]) != Counter(rows[1])


def always(*responses: tuple[str | None, bool | None, float | None, float | None]) -> MakeSamples:
    """The same responses to every question: answer, whether right, and both masses."""
    made = [
        {"text": "abcdefgh"[place], "answer": answer, "correct": correct, "yes_mass": yes, "no_mass": no}
        for place, (answer, correct, yes, no) in enumerate(responses)
    ]
    return lambda question, rng: made


def test_targets_are_soft_self_consistency_by_hand(pool: Pool) -> None:
    make = always(("7", True, 0.3, 0.1), ("7", True, 0.1, 0.1), ("8", False, 0.1, 0.3), (None, False, 0.4, 0.1))
    # Normalised confidences .75, .5, .25 (the unreadable one is left out): 1.25 / 1.5 and .25 / 1.5.
    expected = {
        ("ssc", "normalised", True): [1.25 / 1.5, 1.25 / 1.5, 0.25 / 1.5],
        ("ssc", "raw", True): [0.8, 0.8, 0.2],
        ("ssc", "raw", False): [0.4 / 0.9, 0.4 / 0.9, 0.1 / 0.9, 0.4 / 0.9],
        ("consistency", "normalised", True): [2 / 3, 2 / 3, 1 / 3],
        ("leave_one_out", "normalised", True): [0.5, 0.5, 0.0],
        ("leave_one_out", "normalised", False): [1 / 3, 1 / 3, 0.0, 0.0],
        ("leave_one_out_ssc", "normalised", True): [0.5 / 0.75, 0.75, 0.0],
        ("leave_one_out_ssc", "raw", True): [0.5, 0.75, 0.0],
        ("p_true", "normalised", True): [0.75, 0.5, 0.25],
        ("p_true", "raw", True): [0.3, 0.1, 0.1],
        ("label", "normalised", True): [1.0, 1.0, 0.0],
    }
    path = pool.write("by_hand", make)
    for (target, p_true, drop_none), values in expected.items():
        data = pool.data(path, num_samples=4, target=target, p_true=p_true, drop_none=drop_none)
        table = data.train_dataloader().dataset.table
        assert table.target[: len(values)] == pytest.approx(values), (target, p_true, drop_none)
        assert len(table) == 12 * len(values)
        assert sum(table.dropped.values()) == 12 * (4 - len(values))
    assert (pool.data(path, num_samples=2).train_dataloader().dataset.table.target == 1.0).all(), "of the first two"
    batches = list(pool.data(path, num_samples=4).val_dataloader())
    assert sum(batch.batch_size for batch in batches) == 20
    unreadable = torch.cat([batch.target for batch in batches]).isnan()
    assert unreadable.sum() == 5
    assert (torch.cat([batch.correct for batch in batches])[unreadable] == 0).all()
    assert len(torch.cat([batch.question_index for batch in batches]).unique()) == 5


def test_imported_records_bring_their_targets(pool: Pool) -> None:
    texts = {"7": "The answer is 7.", "8": "The answer is 8. " * 5}
    given = {"7": {"ssc": 0.9, "consistency": 0.6}, "8": {"ssc": 0.1, "consistency": 0.4}}
    made = [{"text": texts[a], "answer": a, "correct": None, "confidences": given[a]} for a in texts]
    path = pool.write("imported", lambda question, rng: made, encoded=False)
    for target, values in {"ssc": [0.9, 0.1], "consistency": [0.6, 0.4]}.items():
        data = pool.data(path, target=target)
        loader = data.train_dataloader()
        assert loader.dataset.table.target[:2].tolist() == values
        batch = next(iter(loader))
        # No end-of-turn label where nobody knows whether the model stopped.
        labels = batch.label_row.bincount(minlength=batch.batch_size)
        assert torch.equal(labels > 3, batch.generation_weight > 0)
        assert labels.sum() < batch.attention_mask.sum()


@pytest.mark.parametrize("packing", ["shared_prefix", "off"])
@pytest.mark.parametrize(("encoded", "stated"), [(True, None), (False, None), (False, 1)])
def test_no_micro_batch_exceeds_the_token_budget(packing: str, encoded: bool, stated: int | None, pool: Pool) -> None:
    """Texts that were made elsewhere are counted by the model's tokenizer, not guessed, nor as they were there."""
    path = pool.write(f"budget-{encoded}-{stated}-{packing}", encoded=encoded, stated=stated)
    settings = {"packing": packing, "batch_size": 4, "pad_to_multiple_of": 1}
    largest = max(batch.input_ids.numel() for batch in pool.data(path, **settings).train_dataloader())
    exact = pool.data(path, token_budget=largest, **settings).train_dataloader()
    assert max(batch.input_ids.numel() for batch in exact) == largest
    with pytest.raises(ValueError, match=rf"{largest} tokens exceeds `token_budget` {largest - 1}\. Divide"):
        list(pool.data(path, token_budget=largest - 1, **settings).train_dataloader())
    with pytest.raises(ValueError, match="lower `max_length`"):
        list(pool.data(path, token_budget=90, **settings).train_dataloader())


def test_validation_rows_share_prompts_and_may_be_one_a_question(pool: Pool, store_dir: str) -> None:
    """Five questions of eight responses in batches of eight: a batch holds the ends of two questions at most."""
    batches = list(pool.data(store_dir, packing="shared_prefix", validation_batch_size=8).val_dataloader())
    assert sum(batch.batch_size for batch in batches) == 40
    assert max(len(batch.trees) for batch in batches) <= 2
    batches = list(pool.data(store_dir, num_samples=1).val_dataloader())
    assert sum(batch.batch_size for batch in batches) == 5
    assert all(batch.target.isnan().all() for batch in batches)
    assert not any(batch.correct.isnan().any() for batch in batches)


def test_sharing_next_to_nothing_is_warned_of(pool: Pool, store_dir: str, recwarn: pytest.WarningsRecorder) -> None:
    settings = {"total_tuples": 64, "max_repeats": 1}
    for packing, batch_size in (("shared_prefix", 16), ("off", 1)):
        pool.data(store_dir, packing=packing, batch_size=batch_size, **settings).train_dataloader()
    assert not [one for one in recwarn if "next to nothing" in str(one.message)]
    with pytest.warns(UserWarning, match=r"0 % of the tokens, .* 1\.0 responses to a prompt\. Raise `batch_size`"):
        pool.data(store_dir, packing="shared_prefix", batch_size=1, **settings).train_dataloader()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    for module in ("stored_data", "stored_rows"):
        monkeypatch.setattr(f"selfcal_lightning.datamodules.ssc.{module}.rank_zero_info", said.append)
    return said


def test_the_table_of_rows_and_the_worth_of_the_targets_are_printed(
    pool: Pool, store_dir: str, lines: list[str]
) -> None:
    table = pool.data(store_dir, target="consistency", max_length=110).train_dataloader().dataset.table
    right = table.correct.astype(bool)
    pairs = table.target[right][:, None] - table.target[~right][None, :]
    ranking = ((pairs > 0) + (pairs == 0) / 2).mean()
    text = "\n".join(lines)
    for said in (
        f"22 tuples in an epoch, from {len(table)} rows with a target",
        f"dropped: {table.dropped['word_problems', 'unreadable']} unreadable",
        f"{table.num_cut} responses are cut",
        f"targets: mean {table.target.mean():.3f}; compared with {len(table)} labels: {right.mean():.3f} right, ECE ",
        f"AUROC {ranking:.3f}",
    ):
        assert said in text
    unlabelled = pool.write("no_labels", lambda *given: [{**one, "correct": None} for one in random_samples(*given)])
    pool.data(unlabelled).train_dataloader()
    assert "; no labels to compare them with" in lines[-1]


def test_errors_say_what_is_missing_and_the_way_out(pool: Pool, store_dir: str) -> None:
    one, alone = ("7", None, 0.2, 0.2), (None, None, 0.2, 0.2)
    unsure = {"fill": False, "total_tuples": 20, "generation_ratio": 0.9, "eta": 1.0}
    cases: list[tuple[str, dict[str, Any], str]] = [
        (store_dir, {"round": 3}, "samples of round 3 for the split 'train'.*SSCGeneration.*--store_split train"),
        (store_dir, {"train": [QuestionSource("word_problems", split="train", limit=20)]}, "for 8 of the 20"),
        (store_dir, {"max_length": 20}, r"too short for every question of the split 'train'\. Raise it"),
        (store_dir, {"query": "Right? (Yes/No)"}, "`query` was 'Is the answer correct"),
        (store_dir, unsure, r"at least one row for each, but got .* set `fill=True`"),
        (pool.write("silent", always(alone, alone, alone)), {}, "unreadable.*max_new_tokens"),
        (pool.write("unasked", always(*[("7", None, None, None)] * 3)), {}, "no confidence.*target='consistency'"),
        (pool.write("sure", always(*[("7", None, 0.0, 0.2)] * 3)), {}, "zero confidence mass"),
        (pool.write("unlabelled", always(one, one, one)), {"target": "label"}, "no label"),
        (pool.write("single", always(one)), {}, "at least 2 responses"),
        (pool.write("alone", always(one, alone, alone)), {"target": "leave_one_out"}, "Generate more samples"),
        (store_dir, {"target": "leave_one_out", "num_samples": 1}, "no other to agree with"),
    ]
    for path, settings, message in cases:
        with pytest.raises(ValueError, match=f"(?s){message}"):
            list(pool.data(path, **settings).train_dataloader())


def test_a_store_of_another_wording_is_refused(pool: Pool, store_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = pool.data(store_dir)
    renamed = [Question(q.id, q.task, q.messages[:0], q.reference, q.text) for q in data.questions("train")]
    monkeypatch.setattr(data, "_questions", {"train": renamed, "validation": []})
    with pytest.raises(ValueError, match="12 with other messages or references"):
        data.train_dataloader()


def test_sources_cut_the_store_and_without_them_it_is_said(pool: Pool, store_dir: str, lines: list[str]) -> None:
    pool.data(store_dir).val_dataloader()
    assert lines == []
    pool.data(store_dir, validation=[]).val_dataloader()
    assert len(lines) == 1
    assert lines[0].startswith(f"Validation: 40 responses to 5 questions, all that the store {store_dir} holds for it")
    assert "`validation` names no sources. Set `trainer.limit_val_batches: 0`" in lines[0]
    fewer = pool.data(store_dir, train=[QuestionSource("word_problems", split="train", limit=3)])
    assert len(set(fewer.train_dataloader().dataset.table.index.question_id)) == 3
    everything = pool.data(store_dir, train=[], validation=[])
    assert len(set(everything.train_dataloader().dataset.table.index.question_id)) == 12
    assert sum(batch.batch_size for batch in everything.val_dataloader()) == 40


def test_splits_are_by_question(pool: Pool, store_dir: str) -> None:
    same = pool.data(store_dir, validation=[QuestionSource("word_problems", split="train", limit=2)])
    with pytest.raises(ValueError, match="share no question, but got 2 in both"):
        same.questions("train")
    with pytest.raises(ValueError, match="`train` repeats 12 question ids"):
        pool.data(store_dir, train=TRAIN * 2).questions("train")
    questions = load_questions(TRAIN, role="train")
    copies = [Question(f"other {q.id}", q.task, q.messages, q.reference, q.text) for q in questions]
    with pytest.raises(ValueError, match=r"share no question, but got 12 in both, for example .* and 'other .*two ids"):
        check_disjoint(questions, copies)
    relabelled = [replace(question, reference="another") for question in copies]
    with pytest.warns(UserWarning, match="12 of 12 validation questions are worded exactly"):
        check_disjoint(questions, relabelled)


def test_one_file_read_as_two_splits_is_refused(pool: Pool, tmp_path: Path, store_dir: str) -> None:
    """Its lines have one id in one split and another in the other."""
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": f"{i} + {i}?", "answer": 2 * i}) + "\n" for i in range(9)))
    options = {"task": "local_number", "path": str(file)}
    train, validation = (QuestionSource(split=split, **options) for split in ("train", "validation"))
    ids = [{q.id for q in load_questions([one], role=one.split)} for one in (train, validation)]
    assert not ids[0] & ids[1]
    message = r"Expected `train` and `validation` to share no question, but got 9 in both, .*\(`offset` and `limit`\)"
    with pytest.raises(ValueError, match=message):
        pool.data(store_dir, train=[train], validation=[validation]).questions("train")
    parts = [QuestionSource(split="train", limit=6, **options)], [QuestionSource(split="dev", offset=6, **options)]
    assert len(pool.data(store_dir, train=parts[0], validation=parts[1]).questions("validation")) == 3


def test_splits_that_the_store_holds_share_no_question(pool: Pool, tmp_path: Path) -> None:
    lines = [
        {"id": f"{split}-{i}", "task": "local_number", "split": split, "question": f"{i} + 1?", "reference": str(i + 1),
         "responses": [{"text": f"It is {i + 1}.", "confidence": {"p_true": 0.5}, "tokens": [5, 6]}] * 4}
        for split, numbers in (("train", range(6)), ("validation", range(5, 9)))
        for i in numbers
    ]  # fmt: skip
    (tmp_path / "pool.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    import_pool(tmp_path / "pool.jsonl", tmp_path / "store")
    data = pool.data(str(tmp_path / "store"), train=[], validation=[], num_samples=4)
    with pytest.raises(ValueError, match="share 1 questions, such as 'train-5' and 'validation-5"):
        data.val_dataloader()


def test_shares_and_offsets_of_sources() -> None:
    stated, silent = QuestionSource("gsm8k", share=0.6), QuestionSource("svamp")
    with pytest.raises(ValueError, match="`share` for all 2 training sources or for none, but got 1"):
        task_shares([stated, silent])
    with pytest.raises(ValueError, match=r"at most 1, but got 1\.2"):
        task_shares([stated, stated])
    source = QuestionSource("word_problems", split="validation", offset=498)
    wanted = [f"word_problems/validation/{number:06d}" for number in (498, 499)]
    assert [q.id for q in load_questions([source], role="validation")] == wanted
    with pytest.raises(ValueError, match=r"`validation` source .*`offset` to be less than the 500 questions"):
        load_questions([replace(source, offset=500)], role="validation")


def test_trainers_that_reorder_rows_are_refused(pool: Pool, store_dir: str) -> None:
    data = pool.data(store_dir)
    data.trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp_fork", logger=False)
    with pytest.raises(ValueError, match="`use_distributed_sampler=False` with 2 processes"):
        data.setup("fit")
    with pytest.raises(ValueError, match="GradientAccumulationScheduler"):
        fit(pool.data(store_dir), callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})])


def test_unreadable_responses_are_never_generation_samples(pool: Pool) -> None:
    answers = [None, None, None, None, "7"]
    path = pool.write("mostly_unreadable", always(*((answer, None, 0.5, 0.5) for answer in answers)))
    data = pool.data(path, num_samples=5, drop_none=False, eta=0.75)
    table = data.train_dataloader().dataset.table
    assert table.target[:5].tolist() == [0.8, 0.8, 0.8, 0.8, 0.2]
    assert not table.confident(0.75).any()
    assert table.confident(0.1).sum() == 12


PLAIN = {"total_tuples": None, "generation_ratio": None, "num_buckets": None}


def connected(data: SSCDataModule, *, activated: bool) -> SSCDataModule:
    """Return the data module as a trainer sees it that trains such an adapter."""
    trainer = quiet_trainer()
    trainer.strategy.connect(module_of(data.base_model, lora=replace(NO_DROPOUT, activated=activated)))
    data.trainer = trainer
    return data


@pytest.mark.parametrize("named", [True, False])
def test_every_response_is_drawn_about_once(named: bool, pool: Pool, store_dir: str) -> None:
    sources = {} if named else {"train": None, "validation": None}
    data = connected(pool.data(store_dir, **PLAIN, **sources), activated=True)
    assert data.steps_per_epoch * data.rows_per_step == 12 * 8
    loader = data.train_dataloader()
    draw = loader.batch_sampler.draw(0)
    rows = np.bincount(draw.rows, minlength=len(loader.dataset.table))
    # An unreadable response has no target: its place goes to another one.
    assert len(rows) < 12 * 8 == rows.sum()
    assert (rows.min(), rows.max()) == (1, 2)
    assert draw.calibration_weight.all()
    assert not draw.generation_weight.any()
    batch = next(iter(loader))
    assert (batch.calibration_total, batch.generation_total) == (2.0, 0.0)


def test_joint_training_draws_as_ever_and_what_is_stated_is_kept(pool: Pool, store_dir: str) -> None:
    stated = {"total_tuples": 20, "generation_ratio": 0.0, "num_buckets": 20}
    joint, data = (connected(pool.data(store_dir, **own), activated=own is stated) for own in (PLAIN, stated))
    for one, wanted in ((joint, (100_000, 0.7, 20, False)), (data, (20, 0.0, 20, True))):
        mixture = one.mixture({"word_problems": 1.0})
        assert (mixture.total_tuples, mixture.generation_ratio, mixture.num_buckets, mixture.exact) == wanted
    assert data.training_settings()["num_buckets"] == 20


def test_the_target_follows_from_what_is_trained(pool: Pool, store_dir: str) -> None:
    activated = connected(pool.data(store_dir), activated=True)
    (recipe,) = activated.recipes()
    assert recipe.target == activated.training_settings()["target"] == "leave_one_out_ssc"
    for joint in (connected(pool.data(store_dir), activated=False), pool.data(store_dir)):
        assert joint.row_target == "ssc"
    assert connected(pool.data(store_dir, target="ssc"), activated=True).row_target == "ssc"


def test_generation_samples_are_refused_before_any_is_drawn(pool: Pool, tmp_path: Path) -> None:
    data = pool.data(str(tmp_path / "no store"), generation_ratio=0.3)
    with pytest.raises(ValueError, match=r"`generation_ratio` must be 0 with an activated adapter.*but got 0\.3"):
        quiet_trainer().fit(module_of(pool.model, lora=replace(NO_DROPOUT, activated=True)), datamodule=data)
    connected(data, activated=False).setup("fit")
    connected(data, activated=True).setup("validate")
