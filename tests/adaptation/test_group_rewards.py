from dataclasses import replace
from typing import Any

import pytest

from selfcal_lightning.adaptation.group_rewards import FUSED_FROM, group_rewards
from selfcal_lightning.adaptation.picking import fit_votes
from selfcal_lightning.confidence.base import MissingConfidenceError
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question, QuestionSamples, Sample

ANSWERS = ("12", "12", "13", None)
TEXTS = ("3*4=12. It is 12.", "3*4=13. It is 12.", "3*4=12. It is 13.", "3*4=12.")
YES = (0.6, 0.3, 0.3, 0.9)


def group(name: str = "q", **fields: tuple[Any, ...]) -> QuestionSamples:
    columns = {"answer": ANSWERS, "text": TEXTS, "correct": (False, True, True, None), **fields}
    samples = tuple(
        Sample(
            name, at, 0, columns["text"][at], None, None, columns["answer"][at], columns["correct"][at],
            logprob=-1.0 - at, num_tokens=2, yes_mass=YES[at], no_mass=1.0 - YES[at],
            confidences={"token_entropy": -0.5 * at, "self_certainty": 2.0 + at},
        )
        for at in range(4)
    )  # fmt: skip
    return QuestionSamples(Question(name, "word_problems", (), "13"), samples, "train", None)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("majority", [1.0, 1.0, 0.0, 0.0]),
        ("vote_share", [2 / 3, 2 / 3, 1 / 3, 0.0]),
        ("ssc", [0.75, 0.75, 0.25, 0.0]),
        ("self_certainty", [2.0, 3.0, 4.0, 5.0]),
        ("entropy", [0.0, -0.5, -1.0, -1.5]),
        ("equations", [1.0, 0.0, 0.0, 0.0]),
        ("reference", [0.0, 1.0, 1.0, 0.0]),
    ],
)
def test_rewards_by_hand(name: Any, expected: list[float]) -> None:
    (found,) = group_rewards(name, [group()])
    assert found == pytest.approx(expected)
    unlabelled = replace(group(correct=(None,) * 4), question=Question("q", "word_problems", ()))
    if name != "reference":
        assert group_rewards(name, [unlabelled]) == [pytest.approx(expected)]


def test_fused_is_fitted_to_votes_and_follows_the_likelihood() -> None:
    entries = [group(f"q{at}") for at in range(6)]
    fusion = fit_votes(entries, FUSED_FROM)
    found = group_rewards("fused", entries, fusion=fusion)[0]
    assert found[0] > found[1] > found[2] > found[3] == 0.0
    with pytest.raises(InputError, match="`fusion`"):
        group_rewards("fused", entries)


def test_what_nobody_can_judge_is_none_or_refused() -> None:
    no_equations = group("p", text=("It is 12.",) * 4)
    assert group_rewards("equations", [group(), no_equations])[1] == [None] * 4
    refused: tuple[tuple[Any, Any, str], ...] = (
        ("equations", no_equations, "no response has an equation"),
        ("majority", group(answer=(None, "", None, None)), "no response can be read"),
        ("reference", group(correct=(None,) * 4), "no response was judged"),
    )
    for name, entry, message in refused:
        with pytest.raises(InputError, match=message):
            group_rewards(name, [entry])
    bare = replace(group(), samples=tuple(replace(sample, confidences={}) for sample in group().samples))
    with pytest.raises(MissingConfidenceError, match="token_entropy"):
        group_rewards("entropy", [bare])
