"""The published arithmetic: curves and tables of the reference system, number by number."""

import pytest
from support.house import Vectors
from support.strategy_pools import SCORE, entries_of_rows

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation.paper import PaperCurve, aggregation_csv, metric_csv, metric_rows, paper_curves

# Names of the vectors -> ours. What the reference calls "es" is adaptive consistency with confidence.
THRESHOLD_CURVES = {"threshold_based": "Early stopping", "es": "ASC w/ conf.", "asc": "ASC"}
SIZE_CURVES = {
    "self_consistency_n": "SC",
    "weighted_sc_n": "SC w/ conf.",
    "highest_confidence_n": "Best-of-n",
    "pass_n": "pass@N",
}


def pool_of(rows: list[dict]) -> RecordedPool:
    return RecordedPool(tuple(entries_of_rows(rows)))


def by_method(rows: list[dict]) -> dict[str, PaperCurve]:
    return {curve.method: curve for curve in paper_curves(pool_of(rows), SCORE)}


def test_curves_of_the_reference(vectors: Vectors) -> None:
    cases = vectors("offline_analysis_curves")["cases"]
    assert cases
    for case in cases:
        curves, expected = by_method(case["rows"]), case["out"]
        picked = [round(100 * value) for value in expected["thresholds_sampled"]]
        for name, method in THRESHOLD_CURVES.items():
            assert curves[method].accuracy[picked].tolist() == pytest.approx(expected[name]["accuracy"], abs=1e-6)
            assert curves[method].used[picked].tolist() == pytest.approx(expected[name]["avg_used"], abs=1e-6)
        for name, method in SIZE_CURVES.items():
            assert list(curves[method].settings) == expected[name]["n"], case["name"]
            assert curves[method].accuracy.tolist() == pytest.approx(expected[name]["accuracy"], abs=1e-6)
            assert curves[method].used.tolist() == pytest.approx(expected[name]["avg_used"], abs=1e-6)


def test_windows_of_the_reference_up_to_the_one_that_it_gives_up(vectors: Vectors) -> None:
    compared = 0
    for case in vectors("offline_analysis_curves")["cases"]:
        curve, expected = by_method(case["rows"])["ESC"], case["out"]["sliding_window_ESC"]
        # The last window of the reference is plain self-consistency where a question never agreed; else it is genuine.
        for position, window in enumerate(expected["w"][:-1]):
            at = curve.settings.index(window)
            assert curve.accuracy[at] == pytest.approx(expected["accuracy"][position], abs=1e-6)
            assert curve.used[at] == pytest.approx(expected["avg_used"][position], abs=1e-6)
            compared += 1
    assert compared >= 3


def test_metric_table_of_the_reference(vectors: Vectors) -> None:
    for case in vectors("offline_analysis_curves")["cases"]:
        rows = metric_rows(list(by_method(case["rows"]).values()))
        for expected in case["out"]["metric_csv"]:
            found = rows[expected["X"]]
            for method, value in expected.items():
                # The reference's windows end where a question never agrees (see above); ours continue.
                if method not in ("X", "ESC"):
                    assert found[method] == pytest.approx(value, abs=1e-6), (case["name"], expected["X"], method)


def test_aggregation_table_of_the_reference(vectors: Vectors) -> None:
    for case in vectors("offline_analysis_curves")["cases"]:
        lines = [line.split(",") for line in aggregation_csv(list(by_method(case["rows"]).values())).splitlines()]
        expected = case["out"]["aggregation_results_csv"]
        assert lines[0] == list(expected)
        columns = zip(*(expected[name] for name in lines[0]), strict=True)
        for line, (method, accuracy, used) in zip(lines[1:], columns, strict=True):
            assert line[0] == method
            if method != "ESC":
                assert [float(value) for value in line[1:]] == pytest.approx([accuracy, used], abs=1e-6)


def test_unreadable_answers_are_dropped_before_anything_is_counted() -> None:
    rows = [
        {"prompt": "q0", "answer": None, "confidence": 0.9, "is_correct": False},
        {"prompt": "q0", "answer": "T", "confidence": 0.4, "is_correct": True},
        {"prompt": "q0", "answer": "F", "confidence": 0.3, "is_correct": False},
        {"prompt": "q1", "answer": None, "confidence": 0.9, "is_correct": False},
    ]
    curves = by_method(rows)
    # q1 is left out, and the first *readable* response of q0 is the first of all: both published, both flattering.
    assert curves["SC"].accuracy[0] == 1.0
    assert curves["SC"].used[0] == 1.0
    with pytest.raises(ValueError, match="at least one readable response"):
        paper_curves(pool_of(rows[3:]), SCORE)


def test_tables_read_as_published() -> None:
    rows = [
        {"prompt": "q", "answer": answer, "confidence": c, "is_correct": answer == "T"}
        for answer, c in (("F", 0.2), ("T", 0.9), ("T", 0.5))
    ]
    curves = list(by_method(rows).values())
    lines = aggregation_csv(curves).splitlines()
    assert lines[0] == "Method,Accuracy(%),Avg_Responses_Used"
    # With the threshold 1 nothing stops early: the weighted vote over all three.
    assert lines[1] == "Early stopping,100.0,3.0"
    table = metric_csv(curves).splitlines()
    assert table[0] == "X,Early stopping,ASC w/ conf.,ASC,SC,SC w/ conf.,Best-of-n,ESC"
    # At most two responses: SC and its weighted form stand at n = 2, where F came first and T weighs more.
    assert dict(zip(table[0].split(","), table[1].split(","), strict=True))["SC"] == "0"
    assert dict(zip(table[0].split(","), table[1].split(","), strict=True))["SC w/ conf."] == "100"
    rows = [{"prompt": "q", "answer": "T", "confidence": 0.5, "is_correct": True}] * 3
    assert [curve.method for curve in paper_curves(pool_of(rows), None)] == ["ASC", "SC", "ESC", "pass@N"]
