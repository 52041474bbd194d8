"""The baseline that a trained confidence has to face: a linear probe of the prompt, fitted without labels in seconds.

What it says of a question is the confidence in every response to it: it cannot tell a right response from a wrong one
to the same question, and yet it knows much of what a self-calibrated P(True) knows, before there is a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from selfcal_lightning.capability.probe import Pooling
from selfcal_lightning.capability.probe_fitting import fit_probe
from selfcal_lightning.capability.question_table import Target
from selfcal_lightning.confidence.fitting.calibration_split import check_disjoint
from selfcal_lightning.engines.hidden_states import PromptStates
from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.base import Floats
from selfcal_lightning.records import QuestionSamples

LABEL_FREE_PROBE = "probe"


def label_free_confidences(
    train_states: PromptStates,
    train: Sequence[QuestionSamples],
    test_states: PromptStates,
    test: Sequence[QuestionSamples],
    *,
    target: Target = "agreeing_pairs",
    pooling: Pooling = "both",
    name: str = LABEL_FREE_PROBE,
) -> tuple[QuestionSamples, ...]:
    """Fit a probe on training questions and put its confidence on every response to other questions.

    Args:
        train_states: Hidden states of the training prompts, in the order of ``train``; ``prompt_features`` reads them.
        train: Training questions with two or more responses each; nothing else is looked at than whether these agree.
        test_states: Hidden states of the test prompts, of the same model.
        test: Test questions with their responses.
        target: What the probe is fitted to; "label" is another baseline, which needs labels.
        pooling: Which vectors are the features.
        name: Name of the confidence on the responses.

    Returns:
        The test questions; each response has the confidence ``name``, the same for all responses to a question.

    Raises:
        InputError: A test question was trained on, states and questions do not fit, or the target cannot be.
    """
    check_disjoint(
        (entry.question for entry in train), (entry.question for entry in test), names=("`train`", "`test`"),
        way_out="Split the questions.",
    )  # fmt: skip
    probe = fit_probe(train_states, train, target=target, pooling=pooling, origin={}, sampling=None)
    return with_question_confidence(test, probe.predict(test_states), name=name)


def with_question_confidence(
    entries: Sequence[QuestionSamples], values: Floats | Sequence[float], *, name: str
) -> tuple[QuestionSamples, ...]:
    """Put the value of each question on all of its responses, as the confidence ``name``.

    Raises:
        InputError: There are more or fewer values than questions.
    """
    if len(values) != len(entries):
        raise InputError(f"Expected a value for each of {len(entries):,} questions, but got {len(values):,}.")
    return tuple(
        replace(
            entry,
            samples=tuple(
                replace(sample, confidences={**sample.confidences, name: float(value)}) for sample in entry.samples
            ),
        )
        for entry, value in zip(entries, values, strict=True)
    )
