from dataclasses import replace
from itertools import permutations
from math import comb
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.store_samples import write_number_pool
from support.strategy_pools import make_entry, random_pool, with_samples

from selfcal_lightning.confidence.fusion import WeighedPool, fit_confidences, weigh_pool
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import RecordedPool, texts_digest
from selfcal_lightning.evaluation import strategies
from selfcal_lightning.evaluation.calibration import compare_votes, vote_hits
from selfcal_lightning.evaluation.curves import (
    Reshuffles,
    StrategyCurve,
    StrategySettings,
    check_pool,
    evaluate_jobs,
    make_jobs,
)
from selfcal_lightning.evaluation.inputs import Inputs, check_inputs
from selfcal_lightning.evaluation.outputs import show_briefly
from selfcal_lightning.evaluation.statistics import (
    break_even_rows,
    budget_rows,
    consensus_rows,
    resample_curves,
    saving_rows,
)
from selfcal_lightning.inference import vectorised as orders
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.thresholds import GridOutcome
from selfcal_lightning.inference.vectorised import with_setting
from selfcal_lightning.inference.voting import SelfConsistency

ALL = (
    "self_consistency", "adaptive_consistency", "adaptive_beta", "adaptive_entropy", "window_stopping",
    "window_sliding", "early_stopping", "best_of_n", "cisc", "borda", "cges", "pass_at_n",
)  # fmt: skip


def recorded(entries: list) -> RecordedPool:
    return RecordedPool(tuple(entries))


def pool_of(seed: int, *, num_questions: int = 12, prefix: str = "q") -> RecordedPool:
    """A random pool without its shortest questions; every sample of a readable answer has a P(True)."""
    entries = [e for e in random_pool(seed, num_questions=6 * num_questions) if len(e.samples) >= 5]
    assert len(entries) >= num_questions
    named = [replace(e, question=replace(e.question, id=f"{prefix}{i}")) for i, e in enumerate(entries[:num_questions])]
    unsure = {"yes_mass": 0.5, "no_mass": 0.5}
    return recorded(
        with_samples(named, lambda s: replace(s, **unsure) if s.answer is not None and s.yes_mass is None else s)
    )


@pytest.mark.parametrize("seed", range(3))
def test_recorded_order_is_the_replay_of_solve(seed: int) -> None:
    pool, width = pool_of(seed), 5
    jobs = make_jobs(ALL, ["p_true"], width=width, thresholds=(0.0, 0.5, 0.8, 1.0))
    reshuffles = Reshuffles(pool, [None, "p_true"], width=width, num_reshuffles=0, seed=0, query_tokens={"p_true": 3})
    for job, curve in zip(jobs, evaluate_jobs(reshuffles, jobs), strict=True):
        for row, setting in enumerate(job.grid):
            strategy = with_setting(job.strategy, setting)
            for column, entry in enumerate(pool.entries):
                cut = replace(entry, samples=entry.samples[:width])
                verdict = replay(strategy, cut)
                where = f"{job.label} {job.strategy.confidence} at {setting}, {entry.question.id}"
                assert curve.outcome.correct[row, column] == float(bool(verdict.correct)), where
                assert curve.outcome.samples[row, column] == verdict.samples_used, where
                used = entry.samples[: verdict.samples_used]
                query = 3 if job.strategy.confidence else 0
                assert curve.outcome.tokens[row, column] == sum(len(s.token_ids or ()) + query for s in used), where


def test_reshuffles_are_unbiased() -> None:
    """Means over orders are those of drawing without replacement: pass@1 exactly, pass@k by its closed form."""
    pool, width = pool_of(4, num_questions=6), 4
    jobs = make_jobs(["self_consistency", "pass_at_n"], [], width=width)
    reshuffles = Reshuffles(pool, [None], width=width, num_reshuffles=4000, seed=1)
    votes, oracle = evaluate_jobs(reshuffles, jobs)
    for column, entry in enumerate(pool.entries):
        n, right = len(entry.samples), sum(bool(sample.correct) for sample in entry.samples)
        assert votes.outcome.correct[0, column] == pytest.approx(right / n, abs=0.03)
        expected = [1.0 - comb(n - right, k) / comb(n, k) for k in range(1, width + 1)]
        assert oracle.outcome.correct[:, column] == pytest.approx(expected, abs=0.03)


def test_a_large_pool_goes_through_some_questions_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(5)
    jobs = make_jobs(ALL, ["p_true"], width=5, thresholds=(0.0, 0.5, 0.8, 1.0))

    def run() -> list[StrategyCurve]:
        finished: list[int] = []
        curves = evaluate_jobs(
            Reshuffles(pool, [None, "p_true"], width=5, num_reshuffles=6, seed=3), jobs, progress=finished.append
        )
        assert sum(finished) == 6 * len(jobs)
        return curves

    whole = run()
    monkeypatch.setattr(orders, "ROWS_AT_ONCE", 5)
    for one, other in zip(whole, run(), strict=True):
        np.testing.assert_array_equal(one.outcome.sum_correct, other.outcome.sum_correct)
        np.testing.assert_array_equal(one.outcome.sum_samples, other.outcome.sum_samples)
        np.testing.assert_array_equal(one.outcome.sum_tokens, other.outcome.sum_tokens)


def test_pools_that_cannot_be_evaluated() -> None:
    for entries, max_samples, message in (
        ([make_entry(["a", "b"], [0.5] * 2), make_entry(["a"], [0.5], name="short")], 2, r"'short'\), but got 2"),
        ([make_entry([None, None], [0.5, 0.5])], None, "got none in 2 responses"),
    ):
        with pytest.raises(ValueError, match=message):
            check_pool(recorded(entries), "the pool", max_samples=max_samples)


def curve(label: str, confidence: str | None, parameter: str, points: list) -> StrategyCurve:
    """Build a curve from (setting, correctness of each question, samples and tokens of each question)."""
    correct = np.array([point[1] for point in points])
    samples = np.array([[point[2]] * correct.shape[1] for point in points])
    settings = tuple(point[0] for point in points)
    outcome = GridOutcome(settings, correct, samples, 10 * samples)
    return StrategyCurve(label, confidence, parameter, outcome, SelfConsistency(4))


VOTES = curve(
    "self_consistency", None, "max_samples", [(1, [1, 0, 0, 0], 1), (2, [1, 1, 0, 0], 2), (4, [1, 1, 1, 0], 4)]
)
STOP = curve(
    "early_stopping", "c", "threshold", [(0.2, [1, 1, 0, 0], 1), (0.6, [1, 1, 1, 0], 3), (0.9, [1, 0, 0, 0], 4)]
)


def test_budgets_and_savings_by_hand() -> None:
    resampled = resample_curves({"base": [VOTES, STOP]}, None, num_resamples=200, seed=0)
    at = {(row.contender.strategy, row.budget): row for row in budget_rows(resampled, [2, 4])}
    # Without calibration questions the dearest setting within the budget is taken, though a cheaper one is better.
    assert (at["early_stopping", 4].setting, at["early_stopping", 4].accuracy.value) == (0.9, 0.25)
    assert at["early_stopping", 4].change.value == -0.5
    assert (at["early_stopping", 2].setting, at["early_stopping", 2].change.value) == (0.2, 0.0)
    assert at["early_stopping", 2].change_to_full.value == -0.25
    same = at["self_consistency", 4].change
    assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
    savings = {(row.contender.strategy, row.target): row for row in saving_rows(resampled, [2, 4])}
    # Two votes reach .5, as does the threshold .2 with one sample; four reach .75, as does .6 with three.
    assert savings["early_stopping", 2].samples.value == 1.0
    assert savings["early_stopping", 2].saving.value == 0.5
    assert savings["early_stopping", 4].samples.value == 3.0
    assert savings["early_stopping", 4].saved_tokens.value == 10.0
    even = [row for row in break_even_rows(list(savings.values()), 95.0) if row.target == 4]
    assert {row.contender.strategy: row.questions for row in even} == {"self_consistency": None, "early_stopping": 10}


def test_settings_come_from_the_calibration_questions() -> None:
    # On the calibration questions .2 is the best within four samples, whatever it does on the test questions.
    elsewhere = curve("early_stopping", "c", "threshold", [(0.2, [1, 1], 1), (0.6, [0, 0], 3), (0.9, [0, 0], 4)])
    votes = curve("self_consistency", None, "max_samples", [(1, [0, 0], 1), (2, [1, 0], 2), (4, [1, 0], 4)])
    resampled = resample_curves({"base": [VOTES, STOP]}, {"base": [votes, elsewhere]}, num_resamples=50, seed=0)
    (row,) = [r for r in budget_rows(resampled, [4]) if r.contender.confidence]
    assert (row.setting, row.accuracy.value) == (0.2, 0.5)
    (saving,) = [r for r in saving_rows(resampled, [4]) if r.contender.confidence]
    assert (saving.chosen.setting, saving.chosen.change.value, saving.chosen.saving.value) == (0.2, -0.25, 0.75)


def evaluate(test: RecordedPool, calibration: RecordedPool | None, **options: object) -> strategies.StrategyReport:
    few = "self_consistency", "adaptive_consistency", "early_stopping"
    settings = StrategySettings(**{"strategies": few, "num_reshuffles": 3, "num_resamples": 40, **options})
    calibrated = {"model": strategies.calibrate_side(test, calibration, [], settings)}
    inputs = check_inputs(Inputs({"test": {"model": test}}, {} if calibration is None else {"model": calibration}))
    prepared = strategies.prepare_test("test", inputs.tests["test"], calibrated, settings)
    sides = {"model": strategies.SideStrategies("model", calibrated["model"], settings)}
    return strategies.report_on(prepared, strategies.run_strategies(prepared, sides, settings), settings)


def test_report_with_calibration_questions() -> None:
    report = evaluate(pool_of(1), pool_of(7, num_questions=24, prefix="c"), max_samples=5)
    names = {row.contender.confidence for row in report.budgets}
    assert names == {None, "p_true", "sequence_logprob_platt", "mean_logprob_platt", "fused"}
    assert {row.name for row in report.confidences["model"]} == names - {None}
    assert report.width == 5
    findings = [text for text in report.findings if "chance alone" not in text]
    assert len(findings) == 4
    assert all("AUROC within questions" in text for text in findings)
    assert any(row.chosen is not None for row in report.savings)
    assert not any("No calibration split" in note for note in report.notes)


def test_short_and_lone_questions_are_told() -> None:
    entries = [make_entry(["a"] * 4, [0.5] * 4, name="long"), make_entry(["a", "b"], [0.5, 0.5], name="short")]
    report = evaluate(recorded(entries), None)
    assert report.width == 2
    assert any("end at 2 samples, as many as 'short' has" in note and "up to 4" in note for note in report.notes)
    report = evaluate(recorded([make_entry(["a", "b", "a"], [0.5, 0.25, 0.75])]), None)
    assert any("One question only" in note for note in report.notes)
    assert all(row.accuracy.low is None for row in report.budgets)
    assert all(row.change.high is None for row in report.budgets)


def test_each_test_set_has_its_own_budget_in_the_short_tables(capsys: pytest.CaptureFixture) -> None:
    wide, narrow = evaluate(pool_of(1), None, max_samples=4), evaluate(pool_of(2), None, max_samples=2)
    show_briefly([wide, replace(narrow, test="narrow")], Console(width=100))
    printed = capsys.readouterr().out
    for test, width in (("test", 4), ("narrow", 2)):
        assert f"{test}, model" in printed
        assert f"no more than {width} samples" in printed
        assert f"12 questions of {test}; {width} samples each." in printed
    show_briefly([wide, replace(wide, test="other")], Console(width=100))
    assert "12 questions of test, 12 questions of other; 4 samples each." in capsys.readouterr().out


def test_costs_of_a_fused_confidence_include_the_query_of_its_parts() -> None:
    pool = replace(pool_of(3, num_questions=20), query_tokens=7)
    names = ["p_true", "sequence_logprob_platt", "fused"]
    scorers = fit_confidences(pool, names)
    weighed = weigh_pool(pool, names, scorers, fitting=[scorer.name for scorer in scorers])
    assert weighed.query_tokens == {"p_true": 7, "fused": 7}


def test_a_confidence_below_zero_is_compared_and_weighs_nothing() -> None:
    negative = recorded(
        with_samples(pool_of(3).entries, lambda s: replace(s, confidences={"steady": -0.1 * s.index - 0.1}))
    )
    report = evaluate(negative, None, strategies=("standardised", "borda"), confidences=("steady",))
    assert {(row.contender.strategy, row.contender.confidence) for row in report.curves} == {
        ("self_consistency", None), ("standardised", "steady"), ("borda", "steady")
    }  # fmt: skip
    assert [row.confidence for row in report.consensus] == [None]
    with pytest.raises(ValueError, match="at least 0 where it weighs votes"):
        evaluate(negative, None, strategies=("self_consistency",), confidences=("steady",))


@pytest.mark.parametrize("negative", [{"q"}, {"c"}])
def test_a_reward_below_zero_on_some_questions_alone_weighs_nothing(negative: set[str]) -> None:
    def rewarded(seed: int, prefix: str) -> RecordedPool:
        pool, lowest = pool_of(seed, num_questions=24, prefix=prefix), -1.0 if prefix in negative else 1.0
        return recorded(with_samples(pool.entries, lambda s: replace(s, confidences={"reward": lowest + s.index})))

    report = evaluate(rewarded(1, "q"), rewarded(7, "c"), strategies=("borda",), confidences=("reward",))
    assert [(row.contender.strategy, row.contender.confidence) for row in report.curves] == [
        ("self_consistency", None), ("borda", "reward")
    ]  # fmt: skip
    assert all(row.calibration is not None for row in report.curves)


def test_wrong_consensus_by_hand() -> None:
    entries = [
        make_entry(["a", "a", "a"], [0.5, 0.5, 0.5], name="right"),
        make_entry(["b", "b", "b"], [0.5, 0.5, 0.5], name="wrong"),
        # Two of three votes, but all of the weight.
        make_entry(["a", "a", "b"], [0.5, 0.5, 0.0], name="weighted"),
        make_entry([None, None, None], [0.5, 0.5, 0.5], name="mute"),
    ]
    rows = consensus_rows("base", WeighedPool(recorded(entries), ("p_true",), (), {}))
    votes, weighted = rows
    assert (votes.share.value, votes.correct.value, votes.correct.count) == (0.5, 0.5, 2)
    assert (weighted.share.value, weighted.correct.count) == (0.75, 3)
    assert weighted.correct.value == pytest.approx(2 / 3)
    # The two shares of 1 hold one error, the question with 2/3 none, the mute one is answered last and wrong.
    assert votes.curve.risk.tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 2])


def voted(weights: list[list[float]]) -> RecordedPool:
    texts = ["abab", "bbac", "a-bb"]
    answers = [[None if letter == "-" else letter for letter in text] for text in texts]
    rows = enumerate(zip(answers, weights, strict=True))
    return RecordedPool(tuple(make_entry(given, sure, name=f"q{number}") for number, (given, sure) in rows))


FLAT = [[0.5] * 4] * 3
SHARP = [[0.9, 0.1, 0.8, 0.1], [0.1, 0.1, 0.9, 0.1], [0.9, 0.9, 0.1, 0.1]]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_hits_are_those_of_the_strategy_in_every_order(is_weighted: bool) -> None:
    pool = voted(SHARP)
    orders = Reshuffles(pool, [None, "p_true"], width=4, num_reshuffles=5_000, seed=3)
    found = vote_hits(orders, "p_true", [1, 2, 4])[is_weighted]
    for place, width in enumerate([1, 2, 4]):
        strategy = SelfConsistency(max_samples=width, confidence="p_true" if is_weighted else None)
        for at, group in enumerate(pool.entries):
            verdicts = [replay(strategy, replace(group, samples=order)) for order in permutations(group.samples)]
            hits = [verdict.answer == group.question.reference for verdict in verdicts]
            assert found[place, at] == pytest.approx(np.mean(hits), abs=0.03)


def test_weights_that_tell_right_from_wrong_raise_the_weighted_vote_only(tmp_path: Path) -> None:
    sides = {"before": voted(FLAT), "after": voted(SHARP)}
    keys = compare_votes(Inputs({"id": sides}, {}, {"id": True}), tmp_path, num_reshuffles=200, num_resamples=50)
    for width in (1, 2, 4):
        assert keys[f"own.id.votes_{width}.before"] == keys[f"own.id.votes_{width}.after"]
        assert keys[f"own.id.weighted_votes_{width}.before"] == keys[f"own.id.votes_{width}.before"]
    assert keys["own.id.weighted_votes_4.after"] == 1.0
    assert keys["own.id.votes_4.before"] < 1.0
    assert keys["own.id.votes_2.before.low"] <= keys["own.id.votes_2.before"] <= keys["own.id.votes_2.before.high"]
    for kind in ("votes", "weighted_votes"):
        change = keys[f"own.id.{kind}_4.change"]
        assert change == pytest.approx(keys[f"own.id.{kind}_4.after"] - keys[f"own.id.{kind}_4.before"])
    assert (keys["own.id.votes_4.change.low"], keys["own.id.votes_4.change.high"]) == (0.0, 0.0)
    assert keys["own.id.weighted_votes_4.change.low"] >= 0.0
    assert keys["own.id.same_texts"] is True
    assert {path.name for path in tmp_path.iterdir()} == {"votes.md", "votes.png"}
    header = (tmp_path / "votes.md").read_text().splitlines()[0]
    assert header.endswith(
        "| before, counted | before, weighted | after, counted | after, weighted | change, weighted |"
    )


def test_texts_are_told_apart_without_keeping_them(tmp_path: Path) -> None:
    texts = {"one": ["It is 1.", "It is 2."], "swapped": ["It is 2.", "It is 1."], "other": ["It is 1.", "It is 3."]}
    digests = {}
    for name, said in texts.items():
        file = write_number_pool(tmp_path / f"{name}.jsonl", {"a": [{"text": text} for text in said]}, split="test")
        import_pool(file, tmp_path / name)
        digests[name] = texts_digest(file)
        assert texts_digest(tmp_path / name, split="test") == digests[name]
    assert len(set(digests.values())) == 3


def test_one_side_alone_and_no_confidence_have_nothing_to_compare(tmp_path: Path) -> None:
    assert compare_votes(Inputs({"id": {"model": voted(FLAT)}}, {}), tmp_path) == {}
    bare = tuple(with_samples(voted(FLAT).entries, lambda sample: replace(sample, yes_mass=None, no_mass=None)))
    sides = {"before": RecordedPool(bare), "after": RecordedPool(bare)}
    assert compare_votes(Inputs({"id": sides}, {}), tmp_path) == {}
    assert not list(tmp_path.iterdir())
