from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.strategy_pools import make_entry

from selfcal_lightning.adaptation import evaluation
from selfcal_lightning.adaptation.monitors import collapse, round_monitors
from selfcal_lightning.adaptation.runs import Evaluation, QuestionSlice, load_sets
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import SamplingSettings


def sampled(*answers: Sequence[str | None], yes: float = 0.5) -> evaluation.SampledSet:
    """Questions whose right answer is 7."""
    rows = enumerate(answers)
    return evaluation.SampledSet(
        tuple(make_entry(group, [yes] * len(group), gold="7", name=f"q{number}") for number, group in rows)
    )


def test_numbers_by_hand() -> None:
    one = sampled(["7", "7", "8", None], ["8", "9", "8", "7"])
    assert one.accuracy().tolist() == [0.5, 0.25]
    assert one.majority(4).tolist() == [1.0, 0.0]
    assert one.majority(1).tolist() == [1.0, 0.0]
    assert one.solved(3).tolist() == [1.0, 0.0]
    assert one.solved(4).tolist() == [1.0, 1.0]
    assert one.distinct().tolist() == [2.0, 3.0]
    assert one.unreadable().tolist() == [0.25, 0.0]
    assert one.first(2).accuracy().tolist() == [1.0, 0.0]


def test_a_comparison_holds_both_models_and_says_what_it_comes_to() -> None:
    base = sampled(*[["7", "8"]] * 6, yes=0.9)
    adapted = sampled(*[["7", "7"]] * 6, yes=0.9)
    greedy, better = sampled(*[["8"]] * 6), sampled(*[["7"]] * 6)
    found = evaluation.compare_set(
        "inductive", base=base, adapted=adapted, base_greedy=greedy, adapted_greedy=better,
        others={"temperature 1": base}, equal_tokens=base,
    )  # fmt: skip
    more = "base, majority of 2, as many tokens as the adaptation"
    assert list(found.rows) == ["base", "base, temperature 1", "base, greedy", more, "adapted"]
    assert found.changes["pass@1"].difference == Estimate(0.5, 0.5, 0.5)
    assert found.changes["pass@2"].difference.value == 0.0
    assert found.changes["ece"].before == pytest.approx(0.4, abs=0.02)
    assert found.verdict == "a gain of pass@1 beyond the base model's greedy response"
    text = evaluation.adaptation_markdown([found])
    assert "| inductive (6) | adapted | 1.000 | 1.000 |" in text
    assert "**+0.500 [+0.500, +0.500]**" in text
    sharpened = evaluation.compare_set(
        "inductive", base=base, adapted=adapted, base_greedy=better, adapted_greedy=better, others={}
    )
    assert sharpened.verdict.startswith("sharpening")


def test_a_change_within_its_interval_is_no_gain() -> None:
    unsure, worse = Estimate(0.1, -0.1, 0.2), Estimate(-0.2, -0.3, -0.1)
    assert evaluation.verdict({"pass@1": evaluation.Change(0.5, 0.6, unsure)}) == "no gain of pass@1 is shown"
    assert evaluation.verdict({"pass@1": evaluation.Change(0.5, 0.3, worse)}) == "a loss of pass@1"
    rounded = evaluation.Change(0.5, 0.5, Estimate(-1e-9, -0.0004, 0.1))
    assert evaluation.change_cell(rounded) == "+0.000 [+0.000, +0.100]"


def test_sets_must_not_share_questions() -> None:
    first, near, far = (QuestionSlice("word_problems", split="test_id", offset=at, limit=4) for at in (0, 2, 4))
    apart = load_sets({"transductive": first, "inductive": far})
    assert [len(questions) for questions in apart.values()] == [4, 4]
    with pytest.raises(InputError, match="`transductive` and `inductive` share 2 questions"):
        load_sets({"transductive": first, "inductive": near})


def test_an_evaluation_reads_the_questions_that_it_asks_for(tmp_path: Path) -> None:
    names = []
    for limit in (3, 2):
        slices = {"inductive": QuestionSlice("word_problems", split="test_id", limit=limit)}
        sampling, engine = SamplingSettings(max_new_tokens=4), EngineSettings()
        evaluation = Evaluation(
            resolve_model("bundled"), None, tmp_path, slices, sampling, (), 1, engine, 0, DEFAULT_QUERY, None, tmp_path,
            tmp_path,
        )  # fmt: skip
        names.append(evaluation._sample("inductive", "base", sampling, num_samples=1).names)
    assert (len(names[0]), names[1]) == (3, names[0][:2])


def test_a_collapse_is_seen_where_the_votes_rise() -> None:
    """Round 0 agrees with itself at 1/3; sharpening onto its answers is fine, agreeing on others is not."""
    earlier = [["7", "7", "8"]] * 4
    nothing = [[0.5] * 3] * 4

    def seen(answers: list[list[str | None]], fall: float, *, first: bool = False) -> list[str]:
        limits = {"agreement": 0.1, "unreadable": 0.02, "logprob_fall": 0.05}
        zero = round_monitors(earlier, earlier, confidences=nothing, lengths=[[]] * 4, is_first=True)
        now = round_monitors(answers, earlier, confidences=nothing, lengths=[[]] * 4, is_first=first)
        return collapse(replace(now, logprob_fall=fall), zero, **limits)

    assert seen([["7", "7", "7"]] * 4, 0.04) == []
    assert "agreement" in seen([["9", "9", "9"]] * 4, 0.0)[0]
    assert "cannot be read" in seen([["7", "7", None]] * 4, 0.0)[0]
    assert "has lost 0.060 nats" in seen([["7", "7", "8"]] * 4, 0.06)[0]
    assert "nan" in seen([["7", "7", "8"]] * 4, float("nan"))[0], "a model that is broken altogether"
