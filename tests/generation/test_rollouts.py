"""Rollouts from prefixes of stored responses: distinct, resumable, of the same policy; their rates and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.options import nested
from support.recorded_pools import SAMPLING, sample_store

from selfcal_lightning.cli import run
from selfcal_lightning.datamodules.rewards import RewardDataModule
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.errors import InputError
from selfcal_lightning.generation.rollouts import RolloutSource
from selfcal_lightning.pipelines.rewards.import_prefixes import run_import_prefixes
from selfcal_lightning.pipelines.rewards.rollout import run_rollout
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.rewards.prefixes import prefix_id
from selfcal_lightning.rewards.rates import read_rates
from selfcal_lightning.rewards.steps import token_step_ends
from selfcal_lightning.store.sample_store import SampleStore

NUM_QUESTIONS, ROLLOUTS = 2, 2


@pytest.fixture(scope="module")
def sampled(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    engine = TransformersEngine(tiny_model)
    store = sample_store(engine, tmp_path_factory.mktemp("samples") / "store", num_questions=NUM_QUESTIONS)
    engine.close()
    return store


def rollout(sampled: SampleStore, folder: Path, **changes: Any) -> Any:
    settings = {"split": "calibration", "num_rollouts": ROLLOUTS, "steps": "sentence", **changes}
    return run_rollout(str(sampled.path), str(folder), **settings)


@pytest.fixture(scope="module")
def rolled(sampled: SampleStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    folder = tmp_path_factory.mktemp("rollouts")
    report = rollout(sampled, folder / "store", export=str(folder / "records.jsonl"))
    return folder / "store", folder / "records.jsonl", report


def inner_prefixes(sampled: SampleStore, chat: ChatFormat) -> dict[str, set[tuple[int, ...]]]:
    found: dict[str, set[tuple[int, ...]]] = {}
    for entry in sampled.samples():
        for sample in entry.samples:
            for end in token_step_ends(chat.tokenizer, sample.token_ids or (), "sentence")[:-1]:
                found.setdefault(entry.question.id, set()).add(tuple((sample.token_ids or ())[:end]))
    return found


def test_every_distinct_inner_prefix_is_rolled_out_and_nothing_else(
    sampled: SampleStore, rolled: tuple[Path, Path, Any], chat: ChatFormat
) -> None:
    store, records, report = rolled
    wanted = {prefix_id(q, p): (q, p) for q, ps in inner_prefixes(sampled, chat).items() for p in ps}
    assert report.prefixes == report.rolled_out == len(wanted) > NUM_QUESTIONS
    questions = {entry.question.id: entry for entry in SampleStore(store).samples()}
    assert questions.keys() == wanted.keys()
    for name, entry in questions.items():
        prefix = wanted[name][1]
        assert len(entry.samples) == ROLLOUTS
        for sample in entry.samples:
            assert (sample.token_ids or ())[: len(prefix)] == prefix
            assert sample.text == chat.decode(sample.token_ids or ())
            assert (sample.logprob, sample.yes_mass) == (None, None)
    rates = read_rates(str(store))
    assert {name: rate.share for name, rate in rates.items()} == {
        name: np.mean([bool(sample.correct) for sample in entry.samples]) for name, entry in questions.items()
    }
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert {frozenset(line) for line in lines} == {frozenset({"question", "reasoning_prefix", "success_prob"})}
    texts = {chat.decode(prefix): rates[name].share for name, (_, prefix) in wanted.items()}
    assert {line["reasoning_prefix"]: line["success_prob"] for line in lines} == texts


def test_a_run_goes_on_and_takes_more_prefixes(
    sampled: SampleStore, rolled: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    few = rollout(sampled, tmp_path / "store", prefixes=1, responses=1)
    assert few.prefixes <= NUM_QUESTIONS
    parts = {"first": rollout(sampled, tmp_path / "store", shard="0/2"), "rest": rollout(sampled, tmp_path / "store")}
    assert parts["rest"].rolled_out == rolled[2].rolled_out > few.rolled_out
    mine, theirs = (
        {(s.question_id, s.index): s.token_ids for entry in SampleStore(path).samples() for s in entry.samples}
        for path in (tmp_path / "store", rolled[0])
    )
    assert mine == theirs, "the same rollouts, however they were shared out"


@pytest.mark.parametrize("target", ["success_rate", "hard"])
def test_rates_are_targets_inside_of_responses(
    sampled: SampleStore, rolled: tuple[Path, Path, Any], tiny_model: str, target: Any
) -> None:
    data = RewardDataModule(
        tiny_model, str(sampled.path), num_samples=3, target=target, steps="sentence", rollouts=str(rolled[0])
    )
    rates, collator = read_rates(str(rolled[0])), data.collator()
    rows = [row for question in sampled.rows() for row in question]
    for row in rows:
        first, *inner, last = collator.places(row, 1.0, 1.0)
        assert (first.target, last.target) == (1.0, 1.0)
        for place in inner:
            rate = rates[prefix_id(row.question.id, (row.sample.token_ids or ())[: place.length])]
            assert place.rate == rate
            assert place.target == (rate.share if target == "success_rate" else float(rate.share > 0))
    assert any(len(collator.places(row, 1.0, 1.0)) > 2 for row in rows)


def test_rollouts_of_another_policy_are_refused(
    sampled: SampleStore, rolled: tuple[Path, Path, Any], tmp_path: Path, shallow_model: str
) -> None:
    with pytest.raises(InputError, match=r"`model` to be the policy that sampled the responses.*Leave `model` out"):
        rollout(sampled, tmp_path / "store", model=shallow_model)
    fingerprint = sampled.round_manifest().fingerprint
    warmer = nested(temperature=1.5, max_new_tokens=SAMPLING.max_new_tokens)["sampling"]
    other = type(fingerprint)(fingerprint.model, fingerprint.prompt, warmer, 0)
    with pytest.raises(InputError, match=r"to be of the policy that sampled .* sampling\.temperature"):
        read_rates(str(rolled[0]), policy=other)
    with pytest.raises(InputError, match="`rollouts` to be a folder that `selfcal rollout` filled"):
        read_rates(str(sampled.path))


def test_what_cannot_be_rolled_out_is_refused(sampled: SampleStore, tmp_path: Path, chat: ChatFormat) -> None:
    with pytest.raises(InputError, match=r"responses of more than one step .* by the rule 'line'"):
        rollout(sampled, tmp_path / "store", steps="line")
    with pytest.raises(InputError, match="responses of the split 'test', but got none"):
        rollout(sampled, tmp_path / "store", split="test")
    with pytest.raises(InputError, match="`prefixes` to be at least 1, but got 0"):
        rollout(sampled, tmp_path / "store", prefixes=0)
    with pytest.raises(InputError, match="`store_dir` to be another folder"):
        rollout(sampled, sampled.path)
    source = RolloutSource(str(sampled.path), "calibration", 1, 3, None, "sentence")
    assert all(len(prefix.prefix_ids) < 12 for prefix in source.read(chat, longest=12)), "no room for a continuation"


def test_the_verb_is_known(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["rollout", "--samples_dir", str(tmp_path), "--store_dir", str(tmp_path / "out")]) == 1
    assert "Expected `samples_dir` to be a sample store" in capsys.readouterr().err


def test_records_of_prefixes_are_imported_and_learnt_at_their_ends(
    rolled: tuple[Path, Path, Any], tiny_model: str, tmp_path: Path
) -> None:
    lines = [json.loads(line) for line in rolled[1].read_text().splitlines()]
    options = ["--path", str(rolled[1]), "--store_dir", str(tmp_path / "store"), "--task", "word_problems"]
    assert run(["import-prefixes", *options]) == 0
    data = RewardDataModule(
        tiny_model, str(tmp_path / "store"), num_samples=99, target="success_prob", steps="sentence", packing="off",
        batch_size=len(lines), total_tuples=len(lines),
    )  # fmt: skip
    (batch,) = data.train_dataloader()
    known = ~batch.place_target.isnan()
    assert sorted(batch.place_target[known].tolist()) == pytest.approx(sorted(line["success_prob"] for line in lines))
    assert (batch.place_kind[known] > 0).all(), "nothing is known of the question alone"
    ends = (batch.attention_mask.sum(1) - 1).tolist()
    width = batch.input_ids.shape[1]
    places, rows = batch.place[known].tolist(), batch.place_row[known].tolist()
    assert [place - width * row for place, row in zip(places, rows, strict=True)] == ends


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "q", "reasoning_prefix": "p"}, "the fields success_prob, but got only"),
        ({"question": "q", "reasoning_prefix": "p", "success_prob": 1.5}, r"`success_prob` to lie in \[0, 1\]"),
        ({"question": " ", "reasoning_prefix": "p", "success_prob": 1}, "`question` to be text"),
        ({"question": "q", "reasoning_prefix": "", "success_prob": 1}, "records with a `reasoning_prefix`"),
    ],
)
def test_bad_records_are_refused(record: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(json.dumps(record))
    with pytest.raises(InputError, match=message):
        run_import_prefixes(str(tmp_path / "r.jsonl"), str(tmp_path / "s"), "local_number")
