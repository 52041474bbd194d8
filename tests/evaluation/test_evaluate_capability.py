import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.capability_pools import capability_store
from support.store_samples import write_number_pool

from selfcal_lightning.capability import evaluation
from selfcal_lightning.capability.budgets import compare_budgets, compare_mixing, pass_at_k_curves
from selfcal_lightning.capability.question_table import QuestionTable, load_capability_pool
from selfcal_lightning.cli import run
from selfcal_lightning.commands.capability import run_evaluate_capability, run_fit_probe, run_score_questions
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.metrics.bootstrap import resample_weights
from selfcal_lightning.metrics.capability import skill, squared_error


def judged(shares: list[int], size: int, estimates: dict[str, list[float]]) -> evaluation.TestQuestions:
    """Return questions with so many right ones of ``size`` responses."""
    correct = np.array(shares, dtype=np.float64)
    nothing = np.full(len(shares), np.nan)
    table = QuestionTable(
        np.array([f"q{i}" for i in range(len(shares))], dtype=object), np.full(len(shares), size), correct,
        nothing, nothing, nothing,
    )  # fmt: skip
    columns = {name: np.array(values) for name, values in estimates.items()}
    return evaluation.TestQuestions(table, columns, dict.fromkeys(columns, 0), frozenset())


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose questions have the values of a probe, without those of the training split."""
    folder = tmp_path_factory.mktemp("evaluation")
    store = str(capability_store(folder / "store"))
    run_fit_probe(store, str(folder / "probe"))
    for split in ("test", "calibration"):
        run_score_questions(probe=str(folder / "probe"), store_dir=store, split=split)
    return folder


def drawn(test: evaluation.TestQuestions, num_resamples: int) -> np.ndarray:
    return resample_weights(len(test.truth), num_resamples=num_resamples)


def test_numbers_by_hand() -> None:
    test = judged([0, 2, 4, 3], 4, {"good": [0.1, 0.4, 0.9, 0.8], "bad": [0.5] * 4, "score": [-3.0, -1.0, 0.0, -0.5]})
    found = evaluation.compare_estimators(test, drawn(test, 50))
    good, bad, score = found.rows
    counts = np.array([0, 2, 4, 3]), 4
    assert good.mse.value == pytest.approx(squared_error(test.estimates["good"], *counts))
    assert good.skill.value == pytest.approx(skill(test.estimates["good"], *counts))
    assert (good.difference, good.spearman.value) == (None, pytest.approx(1.0))
    assert bad.difference.value == pytest.approx(squared_error([0.5] * 4, *counts) - good.mse.value)
    assert (score.mse, score.ece, score.spearman.value) == (None, None, pytest.approx(1.0)), "it is no probability"
    assert found.constant == pytest.approx(squared_error([9 / 16] * 4, *counts))
    # Unbiased c* (1 - c*): n / (n - 1) times that of the share.
    assert found.single == pytest.approx(np.mean([0, 1 / 4, 0, 3 / 16]) * 4 / 3)
    assert good.mse.low <= good.mse.value <= good.mse.high


def test_questions_that_are_as_hard_as_one_another(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool = write_number_pool(tmp_path / "pool.jsonl", {f"q{i}": [{"text": "", "answer": "1"}] * 4 for i in range(4)})
    options: dict = {"estimator": ["agreeing_pairs"], "num_resamples": 5}
    found = run_evaluate_capability(str(pool), str(tmp_path / "out"), **options)
    assert found.constant is None
    assert json.loads((tmp_path / "out" / "capability.json").read_text())["comparison"]["constant"] is None
    assert "best constant has an MSE of unknown" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "out" / "cost.png").is_file()


def test_pass_at_k_by_hand() -> None:
    test = judged([2, 0], 4, {"p": [0.5, 0.0]})
    (curve,) = pass_at_k_curves(test, drawn(test, 20))
    assert (curve.way, curve.k) == ("1 - (1 - p)^k", (1, 2, 4))
    assert curve.actual == pytest.approx((0.25, (1 - 1 / 6) / 2, 0.5))
    assert curve.predicted == pytest.approx((0.25, 0.375, 15 / 32))
    assert curve.curve_error.value == pytest.approx((0.0 + 5 / 12 - 3 / 8 + 1 / 32) / 3)
    assert curve.instance_mse[1].value == pytest.approx((5 / 6 - 3 / 4) ** 2 / 2)
    power, beta, inflated, maps = pass_at_k_curves(test, drawn(test, 20), test)
    assert inflated.way == "an inflated Beta around p"
    assert beta.predicted[0] == pytest.approx(power.predicted[0])
    assert beta.predicted[-1] <= power.predicted[-1], "a mean over capabilities lies below the power of their mean"
    assert maps.curve_error.value == pytest.approx(0.0), "on the very questions that it was fitted on"


def test_budgets_by_hand() -> None:
    test = judged([4, 1, 0], 4, {"right": [1.0, 0.25, 0.0], "wrong": [0.0, 0.0, 1.0], "score": [-1.0, -2.0, -3.0]})
    even, right, wrong, oracle, *sequential = compare_budgets(test, drawn(test, 20), budgets=[1, 2])
    # Evenly: 1, 1/4 and 0; then 1, 1 - C(3, 2) / C(4, 2) = 1/2 and 0.
    assert [estimate.value for estimate in even.solved] == pytest.approx([5 / 12, 1 / 2])
    # One for the first question, all others for the second: 1/2 of two samples, 1 of four.
    assert [estimate.value for estimate in right.solved] == pytest.approx([1 / 2, 2 / 3])
    assert [estimate.value for estimate in right.gain] == pytest.approx([1 / 12, 1 / 6])
    assert wrong.solved[1].value <= even.solved[1].value
    assert [estimate.value for estimate in oracle.solved] == pytest.approx([1 / 2, 2 / 3])
    assert [row.way for row in sequential] == ["one at a time", "right, one at a time", "wrong, one at a time"]
    # A sample each; then the first question is closed, and the second, of 1 right in 4, gets two more.
    assert [estimate.value for estimate in sequential[0].solved] == pytest.approx([5 / 12, 7 / 12], abs=0.1)
    # The first is known to be right, so the others have all of the rest: 3 of 4 samples hold the right one, then all.
    assert sequential[1].solved[1].value == pytest.approx(2 / 3)
    assert sequential[2].solved[1].value < sequential[1].solved[1].value
    assert len(compare_budgets(test, drawn(test, 2), test, budgets=[1])) == 9, "with the Beta gain of both"


def test_one_at_a_time_draws_no_more_of_a_question_than_a_plan_can() -> None:
    test = judged([4] * 9 + [1], 4, {"p": [0.5] * 10})
    test.truth.num_samples[9] = 20
    rows = {row.way: row.solved[0].value for row in compare_budgets(test, drawn(test, 0), budgets=[4])}
    # Four of the last question's 20 responses, the most that a plan gives it, hold the right one at 1/5.
    assert rows[evaluation.ORACLE] == pytest.approx((9 + 1 / 5) / 10)
    assert rows["one at a time"] == pytest.approx(rows[evaluation.ORACLE], abs=0.03)


def test_the_order_of_the_rows_decides_nothing(tmp_path: Path) -> None:
    answers = {f"q{i}": ["12"[i % 3 > 0], "2", "3", *"11"[: i % 3], *"22"[i % 3 :], "1"] for i in range(12)}
    rows = {name: [{"text": "", "answer": one} for one in found] for name, found in answers.items()}
    results = []
    for order in (rows, dict(reversed(rows.items()))):
        pool = write_number_pool(tmp_path / "pool.jsonl", order)
        run_evaluate_capability(str(pool), str(tmp_path / "out"), estimator="top_share", estimate_samples=2)
        results.append(json.loads((tmp_path / "out" / "capability.json").read_text()))
    assert results[0] == results[1]


def test_a_uniform_allocation_is_mixed_in_by_hand() -> None:
    test = judged([4, 1, 0], 4, {"right": [1.0, 0.25, 0.0]})
    right, oracle = compare_mixing(test, drawn(test, 20), uniform_shares=[0.0, 0.5, 1.0])
    assert (right.way, right.budget) == ("right, geometric gain", 2)
    # The plan is 1, 4 and 1 of the samples, the uniform allocation 2, 2 and 2; of 3 the second has a right one at 3/4.
    assert [each.value for each in right.gain] == pytest.approx([1 / 6, 1 / 12, 0.0])
    assert [each.value for each in oracle.gain] == pytest.approx([1 / 6, 1 / 12, 0.0])


def test_abstention_by_hand() -> None:
    test = judged([4, 1, 0, 3], 4, {"right": [1.0, 0.25, 0.0, 0.75], "wrong": [0.0, 0.5, 1.0, 0.9]})
    right, wrong, oracle = evaluation.compare_abstention(test, drawn(test, 20), left_out=[0.25, 0.5])
    assert [each.value for each in right.lost] == pytest.approx([0.0, 1 / 8])
    assert [each.value for each in right.pass_at_1] == pytest.approx([2 / 3, 7 / 8])
    assert [each.value for each in wrong.lost] == pytest.approx([1 / 2, 5 / 8])
    assert [each.value for each in oracle.lost] == pytest.approx([0.0, 1 / 8])
    nobody = judged([0, 0], 4, {"p": [0.1, 0.2]})
    assert evaluation.compare_abstention(nobody, drawn(nobody, 0))[0].lost[0].value is None, "nothing can be lost"


def test_an_estimate_is_not_judged_by_the_responses_that_it_read(written: Path) -> None:
    read = load_capability_pool(str(written / "store"), split="test", task=None)
    test = evaluation.test_questions(read, ["oracle", "probe", "agreeing_pairs"], estimate_samples=3)
    assert set(test.truth.num_samples.tolist()) == {5}
    right = [sum(bool(s.correct) for s in entry.samples) for entry in read.pool.entries]
    np.testing.assert_allclose(3 * test.estimates["oracle"] + test.truth.num_correct, right)
    assert test.costs == {"oracle": 3, "probe": 0, "agreeing_pairs": 3}
    assert test.needs_labels == {"oracle"}
    alone = evaluation.test_questions(read, ["probe"], estimate_samples=3)
    assert set(alone.truth.num_samples.tolist()) == {8}, "none is kept back where nothing reads responses"


def test_what_is_written(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "out"
    command = [
        "evaluate-capability", "--pool", str(written / "store"), "--output_dir", str(output), "--split", "test",
        "--calibration_split", "calibration", "--estimator", "[probe,agreeing_pairs,oracle]", "--num_resamples", "40",
        "--estimate_samples", "4",
    ]  # fmt: skip
    for _ in range(2):  # an earlier evaluation is replaced
        assert run(command) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown, "names are broken into lines, not cut off"
    assert "estimates of capability" in shown
    assert "24 questions, judged by at least 4 responses each" in " ".join(shown.split())
    record = json.loads((output / "capability.json").read_text())
    names = [row["name"] for row in record["comparison"]["rows"]]
    assert names == [*(plain := ["probe", "agreeing_pairs", "oracle"]), *(f"{name} + isotonic" for name in plain)]
    assert len(record["pass_at_k"]) == 3 * 4, "three estimates by four ways"
    assert [row["name"] for row in record["abstention"]][:3] == plain
    assert (output / "capability.md").read_text().startswith("| estimate | samples | labels | MSE |")
    mse = {row["name"]: row["mse"]["value"] for row in record["comparison"]["rows"]}
    assert all(row["capability"]["value"] == pytest.approx(mse[row["name"]]) for row in record["decomposition"])
    for name in ("capability_reliability", "pass_at_k", "budgets", "uniform_share", "decomposition", "cost"):
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (output / "capability.json").write_text("{}")
    assert run(command) == 1
    assert "hold an earlier evaluation of capability" in capsys.readouterr().err


def test_what_cannot_be_judged_is_refused(written: Path, tmp_path: Path) -> None:
    whole, own = str(written / "store"), str(shutil.copytree(written / "store", tmp_path / "own"))
    run_score_questions(probe=str(written / "probe"), store_dir=own, split="train")
    QuestionAnnotation(own, "mine").write({("no question", ""): 0.5}, origin={"by": "hand"})
    unjudged = str(capability_store(tmp_path / "unjudged", judged=False))
    for store, options, message in (
        (whole, {"estimate_samples": 8}, "no response from number 8 on"),
        (whole, {"estimate_samples": 7}, "got 1 for 24 of 24 questions with `estimate_samples` 7"),
        (whole, {"calibration_split": "test"}, "calibration_split"),
        (own, {"split": "train"}, "'probe' was fitted on 40 of 40"),
        (own, {"estimator": ["mine"]}, "None of 24 questions of .* has a value of mine"),
        (unjudged, {"estimator": ["oracle"]}, "`estimator` 'oracle' needs reference answers"),
        (unjudged, {"estimator": ["agreeing_pairs"]}, "`pool` .* needs reference answers"),
    ):
        with pytest.raises(InputError, match=message):
            run_evaluate_capability(store, str(tmp_path / "out"), **{"split": "test", **options})
    assert not (tmp_path / "out").exists()
