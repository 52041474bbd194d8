import math
from dataclasses import replace
from typing import Any

import pytest

from selfcal_lightning.adaptation import rewards as sut
from selfcal_lightning.adaptation.group_rewards import FUSED_FROM, group_rewards
from selfcal_lightning.adaptation.picking import fit_votes
from selfcal_lightning.confidence.base import MissingConfidenceError
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question, QuestionSamples, Sample

SOURCE = "selfcal/word_problems"
TEXTS = [
    "The answer is 7. Confidence: 0.8",
    "The answer is 8.\n<confidence>30%</confidence>",
    "The answer is 7.",
    "The answer is 7. Confidence: 1.7",
]
COLUMNS = {"answer": ["7"] * 4, "data_source": [SOURCE] * 4, "trainer_state": None}


@pytest.mark.parametrize(
    ("text", "value", "number"),
    [
        ("Confidence: 0.8", 0.8, 0.8),
        ("**Confidence:** 80 %", 0.8, 0.8),
        ("Confidence: **80%**", 0.8, 0.8),
        (r"Confidence: `80\%`", 0.8, 0.8),
        ("my confidence is .5.", 0.5, 0.5),
        ("Confidence: 0.2, no: Confidence = 1", 1.0, 1.0),
        ("<confidence> 9e-1 </confidence>", 0.9, 0.9),
        ("Confidence: 80", None, 80.0),
        ("Confidence: -0.1", None, -0.1),
        ("Confidence: high", None, None),
        ("", None, None),
    ],
)
def test_stated_confidences(text: str, value: float | None, number: float | None) -> None:
    found = sut.stated_confidence(text)
    assert (found.value, found.number) == (value, number)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (sut.correctness_reward, [1.0, 0.0, 1.0, 1.0]),
        (sut.rlcr_reward, [1 - 0.04, -0.09, 0.0, 0.0]),
        (sut.log_reward, [1 + math.log(0.8) / math.log(100), math.log(0.7) / math.log(100), 0.0, 0.0]),
        (sut.group_confidence_reward, [-(0.05**2), -(0.45**2), -1.0, -1.0]),  # three of four are right
        (sut.soft_consistency_reward, [0.8 / 1.1, 0.3 / 1.1, 0.8 / 1.1, 0.8 / 1.1]),
    ],
)
def test_rewards_by_hand(reward: object, expected: list[float]) -> None:
    logged: dict[str, float] = {}
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    for completions in (TEXTS, chats):
        found = reward(["q"] * 4, completions, completion_ids=[[1]] * 4, **COLUMNS, log_metric=logged.__setitem__)
        assert found == pytest.approx(expected)
    wanted = {"mean": 0.55, "std": 0.25, "outside": 0.25, "missing": 0.25}
    assert logged == pytest.approx({f"confidence/{name}": value for name, value in wanted.items()})


def test_groups_are_prompts_and_unknown_stays_none() -> None:
    columns = {**COLUMNS, "answer": ["7", "8", None, "7"]}
    assert sut.rlcr_reward("abcd", TEXTS, **columns)[2] is None
    assert sut.group_confidence_reward(["a", "b", "c", "a"], TEXTS, **columns) == pytest.approx(
        [-0.04, -0.49, None, -1.0]
    )
    assert sut.soft_consistency_reward(["a", "a", "b", "b"], TEXTS, data_source=[SOURCE] * 4) == pytest.approx(
        [0.8 / 1.1, 0.3 / 1.1, None, None]
    )
    assert sut.confidence_metrics(["7"])["confidence/std"] is None


def test_verl() -> None:
    found = sut.compute_score(SOURCE, TEXTS[0], "7", {"index": 0})
    assert (found["score"], found["correct"], found["confidence"]) == (pytest.approx(0.96), 1.0, 0.8)
    outside = sut.compute_score(SOURCE, TEXTS[3], "7")
    assert (outside["score"], outside["confidence_outside"]) == (0.0, 1.0)
    assert math.isnan(outside["confidence"])
    assert sut.compute_score(SOURCE, TEXTS[0], "")["has_label"] == 0.0


def test_the_log_score_is_proper() -> None:
    grid = [at / 100 for at in range(1, 100)]
    for truth in (0.1, 0.37, 0.9):
        assert max(grid, key=lambda q, p=truth: sut.log_score(q, p)) == truth
        assert max(grid, key=lambda q, p=truth: p * sut.brier_score(q, 1) + (1 - p) * sut.brier_score(q, 0)) == truth


def test_the_mask_covers_the_statement_and_advantages_follow_it() -> None:
    import torch
    from transformers import AutoTokenizer

    from selfcal_lightning.models.folders import BUNDLED_MODEL

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    texts = ["So 7. Confidence: 0.85 done", "So 7."]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    masks = sut.confidence_token_mask(rows, tokenizer)
    covered = [tokenizer.decode([i for i, on in zip(*row, strict=True) if on]) for row in zip(rows, masks, strict=True)]
    assert [text.strip() for text in covered] == ["Confidence: 0.85", ""]
    mask = torch.tensor([[False, True, False], [False] * 3])
    found = sut.token_advantages(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.25]), mask)
    assert found.tolist() == [[1.0, 0.5, 1.0], [-1.0] * 3]


GROUP_ANSWERS = ("12", "12", "13", None)
SOLUTIONS = ("3*4=12. It is 12.", "3*4=13. It is 12.", "3*4=12. It is 13.", "3*4=12.")
YES = (0.6, 0.3, 0.3, 0.9)


def group(name: str = "q", **fields: tuple[Any, ...]) -> QuestionSamples:
    columns = {"answer": GROUP_ANSWERS, "text": SOLUTIONS, "correct": (False, True, True, None), **fields}
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
def test_rewards_of_a_group_by_hand(name: Any, expected: list[float]) -> None:
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
