"""Free text that stands inside a sentence."""

from __future__ import annotations

import pytest

from selfcal_lightning.data.tasks.registry import get_task

TASK = get_task("local_text")
RIGHT = [
    ("The capital of Germany is Berlin.", "Berlin"),
    ("Answer: **Berlin**, Germany", "Berlin"),
    ("Berlin is the capital, not Bonn.", "Berlin"),
    ("It's Reykjavik!", "Reykjavík"),
    ("Red, white and blue.", "red, white, and blue"),
    ("That was the Fab Four.", ["The Beatles", "Fab Four"]),
    ("No, it is not.", "no"),
    ("He owns 14 cows", "14"),
]
WRONG = [
    ("It is not Berlin.", "Berlin"),
    ("Bonn rather than Berlin", "Berlin"),
    ("Berlin or Bonn", "Berlin"),
    ("Bonn, Mainz, Berlin, Rome", "Berlin"),
    ("A Berliner", "Berlin"),
    ("There is no doubt: yes.", "no"),
    ("He owns 14 cows", "4"),
    ("", "Berlin"),
]


@pytest.mark.parametrize(
    ("text", "reference", "correct"), [(*row, True) for row in RIGHT] + [(*row, False) for row in WRONG]
)
def test_the_reference_is_found_in_a_sentence(text: str, reference: str | list[str], correct: bool) -> None:
    gold = TASK.dataset.answers.canonical(reference)  # type: ignore[attr-defined]
    assert TASK.verify(TASK.extract(text), gold) is correct


def test_votes_for_a_sentence_and_for_its_answer_fall_together() -> None:
    texts = ["Berlin is the capital.", "bonn", "The capital is Berlin", "berlin", "It is not Berlin", "Berlin or Bonn"]
    grouped = TASK.group([TASK.extract(text) for text in texts])
    assert [grouped.index(answer) for answer in grouped] == [0, 1, 2, 0, 4, 5]
