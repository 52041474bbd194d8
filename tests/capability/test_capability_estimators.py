from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.capability_pools import capability_store, made_up
from support.fakes import FakeChat, ReplyingEngine, fake_questions
from support.store_samples import annotate, make_store, write

from selfcal_lightning.capability import evaluation as estimates
from selfcal_lightning.capability.estimators import RESPONSE_ESTIMATORS, VERBAL_ESTIMATORS, verbalized_before
from selfcal_lightning.capability.evaluation import decompose_errors, definition_gap
from selfcal_lightning.capability.question_table import load_capability_pool, question_table
from selfcal_lightning.commands.capability import run_score_questions
from selfcal_lightning.confidence.verbalized import NUMBERS, TEN_WORDS
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import load_some
from selfcal_lightning.metrics.bootstrap import resample_weights
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose responses have P(True) and one confidence more, a question of the test split without both."""
    folder = capability_store(tmp_path_factory.mktemp("estimators") / "store")
    index = SampleStore(folder).index()
    values = np.where(index.correct == 1.0, 0.75, 0.25)
    values[index.question_id == "word_problems/test_id/000000"] = np.nan
    annotate(folder, "verbalized_words", values)
    return folder


def test_words_before_an_answer() -> None:
    questions = fake_questions(3)
    known = {questions[0].text: r"\boxed{likely}", questions[1].text: "well"}
    engine = ReplyingEngine(lambda prompt: next((r for text, r in known.items() if text in prompt), r"\boxed{0.1}"))
    found = verbalized_before(engine, FakeChat("How sure?"), questions, TEN_WORDS)
    assert found == [pytest.approx(0.65), None, pytest.approx(0.1)]
    assert len(engine.requests) == 5, "one that says nothing is asked three times"
    assert all("How sure?" in prompt for prompt in engine.asked)
    short = ReplyingEngine(lambda _: r"\boxed{1}", max_context=200)
    assert verbalized_before(short, FakeChat(), questions, NUMBERS) == [None] * 3, "no reply has room"


@pytest.mark.parametrize("name", VERBAL_ESTIMATORS)
def test_every_name_is_scored_into_a_store_and_judged(name: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ReplyingEngine(lambda prompt: rf"\boxed{{0.{1 + len(prompt) % 8}}}")
    monkeypatch.setattr("selfcal_lightning.capability.features.open_engine", lambda *_, **__: engine)
    values = run_score_questions(name, store_dir=str(store), split="test", model="bundled", overwrite=True)
    assert len(values) == 24
    assert None not in values
    record = QuestionAnnotation(store, name).record
    assert (record.origin["estimator"], record.origin["attempts"]) == (name, 3)
    test = estimates.test_questions(
        load_capability_pool(str(store), split="test", task=None), [name, "random"], estimate_samples=4
    )
    assert (test.costs, set(test.truth.num_samples.tolist())) == ({name: 0, "random": 0}, {8})
    np.testing.assert_allclose(test.estimates[name], values)


def test_means_over_responses(store: Path) -> None:
    read = load_capability_pool(str(store), split="test", task=None, confidences=["verbalized_words"])
    test = estimates.test_questions(read, ["verbalized_words", "oracle"], estimate_samples=4)
    assert test.num_dropped == 1, "nobody knows the mean of nothing"
    np.testing.assert_allclose(test.estimates["verbalized_words"], 0.25 + 0.5 * test.estimates["oracle"])
    assert (test.costs, test.needs_labels) == ({"verbalized_words": 4, "oracle": 4}, {"oracle"})
    with pytest.raises(InputError, match="has the confidence 'p_true'"):
        estimates.test_questions(read, ["p_true"], estimate_samples=4)


def test_p_true_of_the_responses_is_averaged(store: Path) -> None:
    read = load_capability_pool(str(store), split="test", task=None)

    def asked(entry: QuestionSamples) -> QuestionSamples:
        masses = [0.1 * (1 + sample.index) for sample in entry.samples]
        samples = [
            replace(sample, yes_mass=yes, no_mass=1.0 - yes, confidences={"own": 0.25 * (1 + sample.index)})
            for sample, yes in zip(entry.samples, masses, strict=True)
        ]
        return replace(entry, samples=(replace(samples[0], yes_mass=None), *samples[1:]))

    pool = replace(read.pool, entries=tuple(map(asked, read.pool.entries)))
    test = estimates.test_questions(replace(read, pool=pool), ["p_true", "own"], estimate_samples=3)
    np.testing.assert_allclose(test.estimates["p_true"], (0.2 + 0.3) / 2)
    np.testing.assert_allclose(test.estimates["own"], 0.5)


def test_random_numbers_are_the_same_every_time_and_uniform() -> None:
    names = SimpleNamespace(question_id=[f"q{number}" for number in range(4000)])
    values, again = (RESPONSE_ESTIMATORS["random"].estimate(names) for _ in range(2))
    assert (values == again).all()
    assert np.histogram(values, bins=10, range=(0.0, 1.0))[0] == pytest.approx(np.full(10, 400), abs=90)


def test_the_gap_between_the_targets_by_hand() -> None:
    questions = load_some("word_problems", "test_id", limit=24)
    read: Any = [made_up(question, "test", samples=400) for question in questions]
    table = question_table(read)
    test = estimates.TestQuestions(table, {"p": table.expected_accuracy}, {"p": 0}, frozenset())
    share = table.expected_accuracy
    gap = definition_gap(test)
    # E |c - y| = 2 c (1 - c); five draws of 24 questions come near it.
    assert gap.mae == pytest.approx(np.mean(2 * share * (1 - share)), abs=0.08)
    assert 0.2 < (gap.kendall or 0.0) < (gap.spearman or 0.0) < 1.0
    (row,) = decompose_errors(test, resample_weights(len(table), num_resamples=10))
    assert row.response.value == pytest.approx(np.mean(share * (1 - share)))
    assert row.capability.value == pytest.approx(-np.mean(share * (1 - share)) / 399)
    assert row.response.value == pytest.approx(row.capability.value + row.spread.value)


def entry(name: str, answers: list, *, judged: bool = True, logprob: float | None = -2.0) -> QuestionSamples:
    samples = tuple(
        Sample(name, index, 0, "", (1, 2, 3, 4), "stop", answer, answer == "7" if judged else None, logprob)
        for index, answer in enumerate(answers)
    )
    return QuestionSamples(Question(name, "t", (Message("user", name),)), samples, "test")


def test_counts_by_hand() -> None:
    table = question_table([entry("a", ["7", "7", "8", "7"]), entry("b", [None, "8", "8", "9"])])
    assert table.question_id.tolist() == ["a", "b"]
    assert table.num_correct.tolist() == [3.0, 0.0]
    assert table.expected_accuracy.tolist() == [0.75, 0.0]
    # Pairs: 3 of 6 agree on 7; 1 of 6 on 8, and the unreadable one agrees with nothing.
    assert table.agreeing_pairs.tolist() == [3 * 2 / 12, 2 / 12]
    assert table.top_share.tolist() == [0.75, 0.5]
    assert table.mean_logprob.tolist() == [-0.5, -0.5]
    assert np.isnan(question_table([entry("a", ["7"], logprob=None)]).mean_logprob[0])


def test_an_estimate_and_its_truth_come_from_different_responses() -> None:
    entries = [entry("a", ["7", "7", "8", "9"])]
    first, rest = question_table(entries, stop=2), question_table(entries, start=2)
    assert (first.agreeing_pairs[0], rest.expected_accuracy[0]) == (1.0, 0.0)
    assert first.num_samples[0] + rest.num_samples[0] == 4
    with pytest.raises(InputError, match="1 of 1 questions, such as 'a', have no response from number 4"):
        question_table(entries, start=4)


def test_targets_by_hand() -> None:
    entries = [entry("a", ["7", "8"]), entry("b", ["8", "8"])]
    table = question_table(entries)
    assert table.targets("agreeing_pairs").tolist() == [0.0, 1.0]
    assert table.targets("top_share").tolist() == [0.5, 1.0]
    assert table.targets("label").tolist() == [0.5, 0.0]
    table = question_table([entry("a", ["7", "8"], judged=False), entry("b", ["8", "8"])])
    assert np.isnan(table.expected_accuracy).tolist() == [True, False]
    assert table.targets("agreeing_pairs").tolist() == [0.0, 1.0], "which needs none"


def test_failed_requests_and_unread_responses_are_wrong() -> None:
    failed = Sample("a", 2, 0, "", (), None, None, None)
    whole = entry("a", ["7", "8"])
    table = question_table([replace(whole, samples=(*whole.samples, failed))])
    assert table.targets("label").tolist() == [1 / 3]
    alone = replace(whole, samples=(failed,))
    assert np.isnan(question_table([alone]).num_correct).all(), "nobody knows the right answer"
    known = replace(alone, question=replace(alone.question, reference="7"))
    assert question_table([known]).num_correct.tolist() == [0.0]
    unread = Sample("a", 2, 0, "no answer here", (1, 2), "stop", None, None)
    mixed = replace(whole, samples=(*whole.samples, unread))
    assert mixed.verdicts == [True, False, False]
    assert question_table([mixed]).num_correct.tolist() == [1.0]
    assert question_table([mixed], start=2).num_correct.tolist() == [0.0], "others are judged, so it has a reference"


def test_a_store_gives_the_view(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    questions = [Question(f"q{i}", "t", (Message("user", "?"),), "0") for i in range(3)]
    write(store, questions)
    store.join()
    table = question_table(load_recorded_pool(tmp_path / "store", texts=False).entries)
    assert table.num_samples.tolist() == [4, 4, 4]
    assert table.num_correct.tolist() == [2.0, 2.0, 2.0], "one of the four has no answer, and is wrong"
    assert table.select(np.array([2, 0])).question_id.tolist() == ["q2", "q0"]
