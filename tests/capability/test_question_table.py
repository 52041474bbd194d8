from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.store_samples import make_store, write

from selfcal_lightning.capability.question_table import question_table
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import load_recorded_pool
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


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


def test_targets_and_what_they_need() -> None:
    entries = [entry("a", ["7", "8"]), entry("b", ["8", "8"])]
    table = question_table(entries)
    assert table.targets("agreeing_pairs").tolist() == [0.0, 1.0]
    assert table.targets("top_share").tolist() == [0.5, 1.0]
    assert table.targets("label").tolist() == [0.5, 0.0]
    with pytest.raises(InputError, match="Expected `target` to be one of agreeing_pairs, top_share, label"):
        table.targets("pairs")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"at least 2 responses to a question, got 1 for 2 of 2 questions"):
        question_table(entries, stop=1).targets("agreeing_pairs")


def test_unjudged_responses_give_no_label() -> None:
    table = question_table([entry("a", ["7", "8"], judged=False), entry("b", ["8", "8"])])
    assert np.isnan(table.expected_accuracy).tolist() == [True, False]
    assert table.targets("agreeing_pairs").tolist() == [0.0, 1.0], "which needs none"
    with pytest.raises(InputError, match="`target` 'label' needs reference answers, but got 1 of 2"):
        table.targets("label")


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
