import inspect
import json
import random
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from support.command_lines import Refused, nested
from support.recorded_pools import NUM_SAMPLES, SAMPLING
from support.store_samples import annotate, write_number_pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.answer import run_answer
from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.commands.fit_confidence import run_fit_threshold
from selfcal_lightning.confidence.fusion import Fusion, load_scorer, weigh_pool
from selfcal_lightning.confidence.scaling import Scaler, fit_scaler
from selfcal_lightning.confidence.splits import split_in_halves
from selfcal_lightning.core.files import sealed
from selfcal_lightning.data.pools.recorded import RecordedPool, load_pool, load_recorded_pool
from selfcal_lightning.evaluation.curves import StrategySettings
from selfcal_lightning.evaluation.thresholds import evaluate_given
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.inference.vectorised import SEED


def write_pool(
    path: Path, *, num_questions: int = 60, prefix: str = "q", widths: Sequence[int] = (4,), names: Sequence[str] = ()
) -> str:
    """Write number questions with ``widths`` responses in turn, right with their P(True); ``names`` carry it too."""
    draw = random.Random(prefix)

    def response() -> dict:
        sure = round(draw.random(), 3)
        answer = "1" if draw.random() < sure else str(draw.randint(2, 4))
        return {"text": "", "answer": answer, "tokens": 9, "confidence": dict.fromkeys(("p_true", *names), sure)}

    return str(
        write_number_pool(
            path, {f"{prefix}{i}": [response() for _ in range(widths[i % len(widths)])] for i in range(num_questions)}
        )
    )


def fit(pool: str, output: Path, *options: str) -> int:
    return run(["fit-threshold", "--pool", pool, "--output", str(output), *options])


@pytest.mark.parametrize("goal", [("--budget", "2"), ("--accuracy", ".5"), ("--risk", ".5")])
def test_the_budget_is_what_the_pool_can_test(goal: tuple, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl", widths=(3,), num_questions=120), tmp_path / "t.json"
    assert fit(pool, output, *goal) == 0
    content = json.loads(output.read_text())
    assert (content["fields"]["max_samples"], content["num_samples"]) == (3, 3)
    assert content["fitted_on"]["num_questions"] == 60, "the second half, with the first as guide of a risk"
    assert content["promise"] in capsys.readouterr().out
    output.unlink()
    assert fit(pool, output, *goal, "--max_samples", "16") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "`max_samples` of early_stopping to be at most 3, the fewest responses that a calibration" in message
    assert "another procedure" in message
    assert not output.exists()


def test_questions_of_uneven_width_give_what_all_of_them_have(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl", widths=(5, 2, 8)), tmp_path / "t.json"
    assert fit(pool, output, "--budget", "2") == 0
    assert "Questions have 2 ('q1') to 8 responses; early_stopping draws at most 2" in capsys.readouterr().err
    assert FittedThreshold.load(output).fields["max_samples"] == 2


def test_an_oracle_is_fitted_and_used_by_nobody(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl"), tmp_path / "t.json"
    assert fit(pool, output, "--strategy", "pass_at_n", "--budget", "2", "--max_samples", "4") == 1
    assert "one that can answer, but got 'pass_at_n', which knows the reference" in capsys.readouterr().err
    assert not output.exists()
    assert fit(pool, output, "--strategy", "self_consistency", "--budget", "2") == 0
    content = json.loads(output.read_text())
    oracle = {**content, "strategy": "pass_at_n", "fields": {"max_samples": content["fields"]["max_samples"]}}
    output.write_bytes(sealed(oracle))
    assert run(["answer", "--model", "bundled", "--question", "1 + 1?", "--threshold_file", str(output)]) == 1
    assert "'pass_at_n', which knows the reference" in capsys.readouterr().err
    test = write_pool(tmp_path / "test.jsonl", prefix="t", num_questions=8)
    with pytest.raises(ValueError, match="'pass_at_n', which knows the reference"):
        evaluate(tmp_path, test, fitted_thresholds=[str(output)])


def test_a_file_that_says_more_than_was_tested_is_refused(tmp_path: Path) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl"), tmp_path / "t.json"
    assert fit(pool, output, "--budget", "2") == 0
    content = json.loads(output.read_text())
    output.write_bytes(sealed({**content, "fields": {**content["fields"], "max_samples": 16}}))
    with pytest.raises(ValueError, match=r"`max_samples` to lie between 1 and 4, .* but got 16"):
        FittedThreshold.load(output)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--risk", ".05", "--delta", ".05"), "would not help"),
        (("--risk", ".6", "--delta", ".0001", "--use_all", "true"), "more would be needed"),
        (("--risk", ".5", "--grid", "[0.999]"), "the grid lies above all confidences, of which 0.9.*`use_all` false"),
    ],
)
def test_a_failed_search_is_told(options: tuple, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl", num_questions=12), tmp_path / "t.json"
    assert fit(pool, output, *options) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert re.search(reason, message)
    assert not output.exists()
    named = [name for name in re.findall(r"`(\w+)`", message) if not name.startswith("selfcal")]
    known = inspect.signature(run_fit_threshold).parameters
    assert named
    assert set(named) <= set(known)


def test_what_depends_on_the_other_responses_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool = write_pool(tmp_path / "pool.jsonl", names=["response_consistency"])
    arguments = ["--budget", "2", "--confidence", "response_consistency"]
    assert fit(pool, tmp_path / "t.json", *arguments) == 1
    assert "response_consistency, which depend on the other responses" in capsys.readouterr().err
    scaler = str(tmp_path / "scaler.json")
    options = ["--kind", "platt", "--source", "response_consistency", "--name", "calm", "--figure", "false"]
    assert run(["fit-confidence", "--pool", pool, "--output", scaler, *options]) == 0
    assert "for recorded pools only" in capsys.readouterr().out
    assert fit(pool, tmp_path / "t.json", "--budget", "2", "--confidence", "calm", "--scorers", f"[{scaler}]") == 1
    assert "calm, which depend on the other responses" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()


def test_max_samples_is_given_once(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool = write_pool(tmp_path / "pool.jsonl")
    assert fit(pool, tmp_path / "t.json", "--budget", "2", "--max_samples", "2", "--settings.max_samples", "3") == 1
    assert "Expected `max_samples` once" in capsys.readouterr().err
    assert fit(pool, tmp_path / "t.json", "--budget", "2", "--settings.max_samples", "3") == 0
    assert FittedThreshold.load(tmp_path / "t.json").fields["max_samples"] == 3


def evaluate(folder: Path, test: str, **options: object) -> dict:
    options = {"strategies": ["early_stopping"], "num_resamples": 10, **options}
    return run_evaluate(output_dir=str(folder / "evaluation"), pools={"m": test}, **nested(**options))


@pytest.mark.parametrize(("strategy", "budget"), [("early_stopping", 2), ("adaptive_consistency", 4), ("cges", 2)])
def test_fit_threshold_and_evaluate_choose_one_threshold(strategy: str, budget: int, tmp_path: Path) -> None:
    """By all their defaults: the same half of the questions, the same orders and the same values to choose from."""
    pool = write_pool(tmp_path / "pool.jsonl", num_questions=80, prefix="c")
    test = write_pool(tmp_path / "test.jsonl", num_questions=10, prefix="t")
    evaluate(tmp_path, test, calibration_pools={"m": pool}, strategies=[strategy], confidences=["p_true"])
    weighted = "" if strategy == "adaptive_consistency" else "_p_true"
    folder = tmp_path / "evaluation" / "fitted" / "m" / "thresholds"
    theirs = FittedThreshold.load(folder / f"{strategy}{weighted}_budget_{budget}.json")
    settings = ["--settings", json.dumps({"evidence": theirs.fields["evidence"]})] if strategy == "cges" else []
    assert fit(pool, tmp_path / "t.json", "--strategy", strategy, "--budget", str(budget), *settings) == 0
    mine = FittedThreshold.load(tmp_path / "t.json")
    assert mine.threshold == theirs.threshold
    assert (mine.fields, mine.achieved, mine.fitted_on) == (theirs.fields, theirs.achieved, theirs.fitted_on)
    assert (mine.promise, mine.message) == (theirs.promise, theirs.message)


def test_scorers_are_known_by_what_they_compute(tmp_path: Path) -> None:
    """Two scalers of one name, fitted on the same questions, are not one scorer."""
    pool = write_pool(tmp_path / "pool.jsonl", prefix="c")
    entries = load_pool(pool)
    one, other = (fit_scaler(entries[:20], kind, name="calm") for kind in ("platt", "isotonic"))
    unread = fit_scaler(entries[:20], "platt", name="unread")
    for scorer in (one, other, unread):
        scorer.save(tmp_path / f"{scorer.map.kind}-{scorer.name}.json")
    assert load_scorer(tmp_path / "platt-calm.json") == one
    assert one.fitted_on == other.fitted_on
    calibration = write_pool(tmp_path / "more.jsonl", prefix="m")
    given = ["--confidence", "calm", "--scorers", f"[{tmp_path / 'platt-calm.json'}]"]
    assert fit(calibration, tmp_path / "t.json", "--budget", "2", *given) == 0
    test = write_pool(tmp_path / "test.jsonl", prefix="t", num_questions=8)
    options = {"fitted_thresholds": [str(tmp_path / "t.json")], "confidences": ["p_true"]}
    for scorers in (["isotonic-calm"], []):
        with pytest.raises(ValueError, match=r"was fitted with, \['calm'\], but got"):
            evaluate(tmp_path, test, scorers=[str(tmp_path / f"{name}.json") for name in scorers], **options)
    results = evaluate(
        tmp_path, test, scorers=[str(tmp_path / f"{name}.json") for name in ("platt-unread", "platt-calm")], **options
    )
    assert len(results["fitted_thresholds"]) == 1


def test_evaluate_judges_the_procedure_of_the_file_only(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pool, output = write_pool(tmp_path / "pool.jsonl", names=["mine"]), tmp_path / "t.json"
    assert fit(pool, output, "--budget", "2", "--confidence", "mine") == 0
    options = {"fitted_thresholds": [str(output)], "confidences": ["p_true"]}
    bare = write_pool(tmp_path / "bare.jsonl", prefix="b", num_questions=8)
    with pytest.raises(ValueError, match="to have the confidence 'mine', but got none"):
        evaluate(tmp_path, bare, **options)
    narrow = write_pool(tmp_path / "narrow.jsonl", prefix="n", num_questions=8, names=["mine"], widths=(3,))
    with pytest.raises(ValueError, match="to be at most the 3 samples that every question has, but got 4"):
        evaluate(tmp_path, narrow, **options)
    wide = write_pool(tmp_path / "wide.jsonl", prefix="w", num_questions=8, names=["mine"], widths=(7,))
    (judged,) = evaluate(tmp_path, wide, **options)["fitted_thresholds"]
    assert judged["samples"]["value"] <= 4.0
    assert judged["promise"] == FittedThreshold.load(output).promise
    assert "guarantees nothing on others" in capsys.readouterr().out.replace("\n", " ")


def test_sides_that_were_sampled_otherwise_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from selfcal_lightning.evaluation.strategies import EvaluatedTest

    pool, output = write_pool(tmp_path / "pool.jsonl"), tmp_path / "t.json"
    assert fit(pool, output, "--budget", "2") == 0
    replace(FittedThreshold.load(output), sampled_by={"sampling": {"temperature": 0.5}}).save(output)
    bare = load_recorded_pool(write_pool(tmp_path / "test.jsonl", prefix="t", num_questions=8))
    hot, cool = (replace(bare, sampled_by={"sampling": {"temperature": value}}) for value in (1.0, 0.5))
    settings = StrategySettings(num_resamples=5)

    def judge(**pools: RecordedPool) -> list[str]:
        weighed = {side: weigh_pool(pool, ["p_true"], []) for side, pool in pools.items()}
        given = {str(output): FittedThreshold.load(output)}
        rows = evaluate_given(EvaluatedTest("test", 4, weighed), given, settings, Console())
        return [row["side"] for row in rows]

    assert judge(hot=hot, cool=cool, unknown=bare) == ["cool", "unknown"]
    assert "hot: not judged" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"sampling\.temperature: 0\.5 at the fit, 1\.0 now"):
        judge(hot=hot)


def test_a_store_says_how_its_responses_were_sampled(sampled: Path, tmp_path: Path) -> None:
    output = tmp_path / "t.json"
    assert fit(str(sampled), output, "--budget", "3", "--use_all", "true") == 0
    fitted = FittedThreshold.load(output)
    assert (fitted.fields["max_samples"], fitted.sampled_by["sampling"]["temperature"]) == (NUM_SAMPLES, 1.0)
    settings = {"temperature": SAMPLING.temperature, "edt_scale": None, "max_new_tokens": SAMPLING.max_new_tokens}
    options = {"question": "Tom has 3 pens and buys 4. How many has he?", "threshold_file": str(output), **settings}
    (answer,) = run_answer("bundled", **nested(**options))
    assert 1 <= answer.verdict.samples_used <= NUM_SAMPLES
    with pytest.raises(ValueError, match=r"sampling\.max_new_tokens: 60 at the fit, 61 now"):
        run_answer("bundled", **nested(**{**options, "max_new_tokens": 61}))
    with pytest.raises(ValueError, match=r"prompt\.query: .* at the fit, 'Sure\?' now"):
        run_answer("bundled", **nested(**options, query="Sure?"))


NUM_QUESTIONS = 60


@pytest.fixture
def pool(tmp_path: Path) -> str:
    """A pool whose log-probability knows which response is right, and whose P(True) does not."""
    draw = np.random.default_rng(0)

    def response(is_right: bool) -> dict:
        sure, logprob = float(draw.uniform(0.7, 0.99)), float(-4.0 + 2.0 * is_right + draw.normal())
        confidence = {"p_true": round(sure, 4), "logprob": logprob}
        return {"text": f"The answer is {2 - is_right}.", "tokens": list(range(10)), "confidence": confidence}

    rows = {f"q{i}": [response(hit) for hit in (draw.random(6) < 0.6).tolist()] for i in range(NUM_QUESTIONS)}
    return str(write_number_pool(tmp_path / "pool.jsonl", rows, split="calibration"))


def test_fusion_then_threshold_use_different_halves(pool: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fused = tmp_path / "fits" / "fused.json"
    assert run(["fit-confidence", "--pool", pool, "--output", str(fused)]) == 0
    shown = capsys.readouterr().out
    assert "on the held-out half" in shown
    assert "logit:p_true" in shown
    assert fused.with_suffix(".png").stat().st_size > 1000
    fusion = load_scorer(fused)
    assert isinstance(fusion, Fusion)
    first, second = split_in_halves((f"q{number}" for number in range(NUM_QUESTIONS)), seed=SEED)
    assert fusion.fitted_on.shared_questions(first + second) == list(first)

    threshold = tmp_path / "threshold.json"
    arguments = ["fit-threshold", "--pool", pool, "--output", str(threshold), "--confidence", "fused"]
    arguments += ["--max_samples", "6", "--scorers", json.dumps([str(fused)])]
    assert run([*arguments, "--budget", "3"]) == 0
    assert "reaches accuracy" in capsys.readouterr().out
    fitted = FittedThreshold.load(threshold)
    assert fitted.fitted_on.shared_questions(first + second) == list(second)
    assert fitted.achieved["mean_samples"] <= 3.0
    assert fitted.fields["confidence"] == "fused"

    assert run([*arguments, "--budget", "3", "--use_all", "true"]) == 1
    assert "'fused' was not fitted on" in capsys.readouterr().err
    assert run([*arguments, "--budget", "3", "--seed", "2"]) == 1
    assert "'fused' was not fitted on" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["temperature", "platt", "isotonic"])
def test_scalers_are_fitted_and_drawn(kind: str, pool: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "scaler.json"
    assert run(["fit-confidence", "--pool", pool, "--output", str(path), "--kind", kind, "--name", "scaled"]) == 0
    scaler = load_scorer(path)
    assert isinstance(scaler, Scaler)
    assert (scaler.name, scaler.map.kind, scaler.fitted_on.num_questions) == ("scaled", kind, NUM_QUESTIONS // 2)
    assert "scaling of p_true" in capsys.readouterr().out
    assert path.with_suffix(".png").exists()


def test_a_fusion_may_read_a_scaled_part(pool: str, tmp_path: Path) -> None:
    scaler, fused = tmp_path / "scaler.json", tmp_path / "fused.json"
    assert run(["fit-confidence", "--pool", pool, "--output", str(scaler), "--kind", "platt", "--figure", "false"]) == 0
    assert not scaler.with_suffix(".png").exists()
    features = '["logit:p_true_platt", "sequence_logprob", "num_tokens"]'
    arguments = ["fit-confidence", "--pool", pool, "--output", str(fused), "--features", features, "--target", "ssc"]
    assert run([*arguments, "--scorers", str(scaler), "--use_all", "true"]) == 0
    fusion = load_scorer(fused)
    assert isinstance(fusion, Fusion)
    assert fusion.requires == ("p_true_platt", "sequence_logprob")
    assert fusion.target == "ssc"
    assert fusion.fitted_on.num_questions == NUM_QUESTIONS
    assert fusion.held_out_scores == ()
    assert not fused.with_suffix(".png").exists()


def test_mistakes_are_told(pool: str, tmp_path: Path, refused: Refused) -> None:
    for arguments, message in (
        (["fit-threshold", "--budget", "3", "--risk", "0.1"], "exactly one of `budget`, `accuracy` and `risk`"),
        (["fit-threshold", "--budget", "3", "--delta", "0.2"], "`delta` is for a `risk` alone"),
        (["fit-threshold", "--risk", "0.5", "--num_reshuffles", "5"], "`num_reshuffles` is for a `budget` or an"),
        (["fit-threshold", "--budget", "3", "--split", "test"], "but got none"),
        (["fit-confidence", "--kind", "temperature", "--source", "sequence_logprob"], "Use Platt or isotonic"),
        (["fit-confidence", "--source", "sequence_logprob"], "`source` is for a scaler"),
        (["fit-confidence", "--kind", "platt", "--target", "ssc"], "`target` is for `kind` fusion alone"),
    ):
        output = tmp_path / "out.json"
        assert message in refused([arguments[0], "--pool", pool, "--output", str(output), *arguments[1:]])
        assert not output.exists()


def test_annotations_of_a_store_are_merged_in(pool: str, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    assert run(["import-pool", "--path", pool, "--store_dir", str(folder)]) == 0
    annotate(folder, "length_score", np.linspace(-1.0, 1.0, NUM_QUESTIONS * 6))
    output = tmp_path / "fused.json"
    features = '["sequence_logprob", "length_score"]'
    assert run(["fit-confidence", "--pool", str(folder), "--output", str(output), "--features", features]) == 0
    fusion = load_scorer(output)
    assert isinstance(fusion, Fusion)
    assert fusion.features == ("sequence_logprob", "length_score")
    assert abs(fusion.weights[0]) > abs(fusion.weights[1])
