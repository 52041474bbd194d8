import pytest

from selfcal_lightning.evaluation.metrics import verdict


def keys(metric: str, before: float, after: float, low: float, high: float) -> dict[str, float]:
    own = f"own.t.{metric}"
    ends = {f"{own}.before": before, f"{own}.after": after, f"{own}.change": after - before}
    return ends | {f"{own}.change.low": low, f"{own}.change.high": high}


UNCLEAR = [f"no clear change of {what}" for what in ("calibration", "ranking", "weighted")]


@pytest.mark.parametrize(
    ("ece", "auroc", "votes", "expected"),
    [
        ((-0.2, -0.1), (0.01, 0.3), (0.01, 0.1), ["better calibration", "better ranking", "better weighted"]),
        ((0.1, 0.2), (-0.3, -0.1), (-0.2, -0.1), ["worse calibration", "worse ranking", "worse weighted votes of 4"]),
        ((-0.1, 0.1), (-0.1, 0.1), (0.0, 0.1), UNCLEAR),
    ],
)
def test_a_change_is_named_where_its_interval_has_no_zero(
    ece: tuple, auroc: tuple, votes: tuple, expected: list
) -> None:
    results = keys("ece", 0.3, 0.2, *ece) | keys("auroc", 0.6, 0.85, *auroc) | {"own.t.num_questions.before": 200}
    results |= keys("weighted_votes_4", 0.5, 0.55, *votes) | keys("weighted_votes_2", 0.5, 0.5, 0, 0)
    results |= {"own.t.weighted_votes_4.change": 0.05, "own.t.weighted_votes_2.change": 0.0}
    (sentence,) = verdict(results)
    assert all(words in sentence for words in [*expected, "(ECE .300 -> .200)", "(AUROC .600 -> .850)"])
    assert "too few" not in sentence
    assert "within a question" not in sentence
    (sentence,) = verdict(results | keys("within_question_auroc", 0.87, 0.83, -0.07, -0.01))
    assert "worse ranking within a question (AUROC .870 -> .830)" in sentence


def test_few_questions_and_unknown_numbers_are_said() -> None:
    numbers = {"own.t.ece.{}": 0.1, "own.t.ece.{}.low": 0.0, "own.t.auroc.{}": None, "own.t.num_questions.{}": 8}
    for side in ("llama", "qwen2.5", "before"):  # a test set of one of two pools alone has no after
        (sentence,) = verdict({key.format(side): value for key, value in numbers.items()})
        few = "8 questions are too few to tell much."
        assert sentence == f"t, {side}: ECE .100, AUROC unknown, pass@1 unknown; {few}"
