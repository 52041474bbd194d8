"""The label-free probe as a confidence in responses: it ranks questions, and never looks at a verdict."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from selfcal_lightning.capability.probe import label_free_confidences, with_question_confidence
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.hidden_states import PromptStates
from selfcal_lightning.metrics.discrimination import auroc
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


def questions(size: int, seed: int, prefix: str) -> tuple[PromptStates, list[QuestionSamples]]:
    """Return questions whose first feature tells how likely a response is right; wrong answers scatter."""
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(size, 1, 6)).astype(np.float32)
    entries = []
    for row in range(size):
        name, chance = f"{prefix}{row}", 1.0 / (1.0 + np.exp(-2.0 * states[row, 0, 0]))
        answers = ["7" if rng.random() < chance else str(rng.integers(100, 200)) for _ in range(6)]
        samples = tuple(Sample(name, i, 0, "", None, None, a, a == "7") for i, a in enumerate(answers))
        entries.append(QuestionSamples(Question(name, "t", (Message("user", name),)), samples, "s"))
    return PromptStates(states, np.zeros_like(states)), entries


def blind(entry: QuestionSamples) -> QuestionSamples:
    return replace(entry, samples=tuple(replace(sample, correct=None) for sample in entry.samples))


def test_it_ranks_responses_of_other_questions_without_a_label() -> None:
    states, train = questions(200, 0, "train")
    others, test = questions(100, 1, "test")
    found = label_free_confidences(states, [blind(entry) for entry in train], others, test)
    samples = [sample for entry in found for sample in entry.samples]
    confidence = [sample.confidences["probe"] for sample in samples]
    assert (auroc(confidence, [sample.correct for sample in samples]) or 0.0) > 0.75
    assert all(len({sample.confidences["probe"] for sample in entry.samples}) == 1 for entry in found)
    assert [entry.question.id for entry in found] == [entry.question.id for entry in test]
    labelled = label_free_confidences(states, train, others, test, target="label", name="labelled")
    assert labelled[0].samples[0].confidences["labelled"] == pytest.approx(confidence[0], abs=0.2)


def test_a_question_that_was_trained_on_is_refused() -> None:
    states, train = questions(20, 0, "train")
    with pytest.raises(InputError, match="`train`"):
        label_free_confidences(states, train, states, train)


def test_a_value_for_every_question() -> None:
    _, entries = questions(3, 0, "q")
    with pytest.raises(InputError, match="a value for each of 3 questions, but got 2"):
        with_question_confidence(entries, [0.1, 0.2], name="x")
