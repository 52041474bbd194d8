import json
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import Refused
from support.number_pools import write_number_pool
from support.store_samples import annotate

from selfcal_lightning.cli import run
from selfcal_lightning.confidence.fusion import Fusion, load_scorer
from selfcal_lightning.confidence.scaling import Scaler
from selfcal_lightning.confidence.splits import split_in_halves
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.inference.vectorised import SEED

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


def halves() -> tuple[tuple[str, ...], tuple[str, ...]]:
    return split_in_halves((f"q{number}" for number in range(NUM_QUESTIONS)), seed=SEED)


def test_fusion_then_threshold_use_different_halves(pool: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fused = tmp_path / "fits" / "fused.json"
    assert run(["fit-confidence", "--pool", pool, "--output", str(fused)]) == 0
    shown = capsys.readouterr().out
    assert "on the held-out half" in shown
    assert "logit:p_true" in shown
    assert fused.with_suffix(".png").stat().st_size > 1000
    fusion = load_scorer(fused)
    assert isinstance(fusion, Fusion)
    first, second = halves()
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


def test_risk_is_certified_with_the_first_half_as_guide(pool: str, tmp_path: Path) -> None:
    path = tmp_path / "risk.json"
    arguments = ["fit-threshold", "--pool", pool, "--output", str(path), "--strategy", "self_consistency"]
    assert run([*arguments, "--max_samples", "6", "--risk", "0.4", "--delta", "0.2"]) == 0
    fitted = FittedThreshold.load(path)
    assert (fitted.target, fitted.value, fitted.delta) == ("risk", 0.4, 0.2)
    assert fitted.threshold is not None
    assert fitted.achieved["p_value"] <= 0.2
    assert fitted.fitted_on.num_questions == NUM_QUESTIONS // 2


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fit-threshold", "--budget", "3", "--risk", "0.1"], "exactly one of `budget`, `accuracy` and `risk`"),
        (["fit-threshold"], "exactly one of `budget`, `accuracy` and `risk`"),
        (["fit-threshold", "--budget", "3", "--confidence", "verbalized"], "--estimator verbalized"),
        (["fit-threshold", "--risk", "0"], "`risk` to lie in (0, 1)"),
        (["fit-threshold", "--budget", "3", "--delta", "0.2"], "`delta` is for a `risk` alone"),
        (["fit-threshold", "--accuracy", "0.1", "--procedure", "bonferroni"], "`procedure` is for a `risk` alone"),
        (["fit-threshold", "--budget", "3", "--strategy", "early_stoping"], "Did you mean 'early_stopping'"),
        (["fit-threshold", "--budget", "3", "--split", "test"], "but got none"),
        (["fit-confidence", "--features", "[self_certainty]"], "--estimator self_certainty"),
        (["fit-confidence", "--kind", "temperature", "--source", "sequence_logprob"], "Use Platt or isotonic"),
        (["fit-confidence", "--source", "sequence_logprob"], "`source` is for a scaler"),
        (["fit-confidence", "--kind", "platt", "--target", "ssc"], "`target` is for `kind` fusion alone"),
        (["fit-confidence", "--kind", "platt", "--features", "[p_true]"], "`features` is for `kind` fusion alone"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str, pool: str, tmp_path: Path, refused: Refused) -> None:
    output = tmp_path / "out.json"
    assert message in refused([arguments[0], "--pool", pool, "--output", str(output), *arguments[1:]])
    assert not output.exists()


def test_annotations_of_a_store_are_merged_in(pool: str, tmp_path: Path) -> None:
    """A confidence that was computed later lies beside the rows; a fusion that names it gets it."""
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
