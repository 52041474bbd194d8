"""Fitted files of the version before, as they were written then: read where they say enough, refused where not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.confidence.fusion import Fusion, load_scorer, load_scorers
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.records import Sample

FITTED_ON = {
    "split_hash": "b6385b874c5fc218bd2185c0a04b13db7738519d89bfd550c746884eeea35194", "num_questions": 4,
    "num_responses": 12, "num_left_out": 0,
    "question_hashes": ["1a0e051f33e18a33", "2c713c8c9a7eece7", "5f74c5f890744831", "63aef460dbe1d729"],
}  # fmt: skip
ROW = {
    "name": "p_true", "auroc": 0.8333333333333334, "within_question_auroc": 0.875, "ece": 0.20442002442002438,
    "num_mixed_questions": 4, "num_responses": 12, "num_left_out": 0,
}  # fmt: skip
HEAD = {"format": "selfcal_lightning.fitted", "version": 1, "fitted_on": FITTED_ON}
TEMPERATURE = {
    **HEAD, "kind": "temperature", "name": "p_true_temperature", "source": "p_true",
    "parameters": {"temperature": 0.817649379709102}, "scores": {"before": ROW, "after": ROW}, "held_out_scores": None,
}  # fmt: skip
PLATT = {
    **TEMPERATURE, "kind": "platt", "name": "response_consistency_platt", "source": "response_consistency",
    "parameters": {"slope": 0.891810264493538, "intercept": -0.49763086957346625, "takes_logit": True},
}  # fmt: skip
FUSION = {
    **HEAD, "kind": "fusion", "name": "fused", "features": ["logit:p_true", "sequence_logprob", "mean_logprob"],
    "weights": [0.5227976588741189, 0.3257477178215303, 0.543062948095949], "intercept": 0.038934430021973346,
    "means": [0.3412247845573333, -2.6875, -0.8454861111111112],
    "stds": [1.3972715106672662, 1.2326926827072513, 0.19556503735299047], "target": "label", "l2": 1.0,
    "needs_pool": False, "scores": [ROW], "held_out_scores": [],
}  # fmt: skip
THRESHOLD = {
    **HEAD, "kind": "threshold", "name": "early_stopping budget 2", "strategy": "early_stopping", "parameter":
    "threshold", "threshold": 0.9, "target": "budget", "value": 2.0, "delta": None, "message": "",
    "fields": {"confidence": "p_true", "max_samples": 4, "threshold": 0.9}, "scorers": {}, "achieved": {},
}  # fmt: skip


def write(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def response(yes: float, logprob: float, tokens: int) -> Sample:
    return Sample(
        "q", 0, 0, "t", tuple(range(tokens)), "stop", "1", True, logprob, yes, 1 - yes, {"response_consistency": yes}
    )


@pytest.mark.parametrize(
    ("content", "expected", "needs_pool"),
    [
        (TEMPERATURE, [0.9362698189282631, 0.621493256322974, 0.26187215225719945], False),
        (PLATT, [0.8118195222563956, 0.4660441154709394, 0.22213636221205982], True),
        (FUSION, [0.894606158884342, 0.5365013193147752, 0.23475308600833408], False),
    ],
    ids=["temperature", "platt", "fusion"],
)
def test_a_confidence_of_the_version_before_gives_what_it_gave(
    content: dict[str, Any],
    expected: list[float],
    needs_pool: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scorer = load_scorer(write(tmp_path / "fitted.json", content))
    found = [
        scorer.score_sample(one) for one in (response(0.9, -1.0, 2), response(0.6, -2.5, 3), response(0.3, -4.0, 4))
    ]
    assert found == pytest.approx(expected, abs=1e-12)
    # Whether it looks ahead, the file does not say; a scaled one once was taken for a property of one response.
    assert scorer.needs_pool is needs_pool
    assert scorer.fitted_on.question_hashes == tuple(FITTED_ON["question_hashes"])
    assert "is of version 1: the questions that it was fitted on are known by their ids" in capsys.readouterr().err
    scorer.save(tmp_path / "anew.json")
    assert load_scorer(tmp_path / "anew.json") == scorer
    assert "version 1" not in capsys.readouterr().err


def test_what_reads_another_file_is_judged_by_it(tmp_path: Path) -> None:
    """Of names alone, the first version took a fusion of a scaled consistency for one that can work live."""
    platt = write(tmp_path / "platt.json", PLATT)
    fused = {**FUSION, "features": ["response_consistency_platt", "sequence_logprob", "mean_logprob"]}
    fusion = load_scorers([platt, write(tmp_path / "fusion.json", fused)])[1]
    assert isinstance(fusion, Fusion)
    assert fusion.needs_pool
    with pytest.raises(InputError, match=r"but got response_consistency_platt: .* Fit it again by `selfcal fit-conf"):
        load_scorer(tmp_path / "fusion.json")


def test_a_confidence_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "scaler.json", {**TEMPERATURE, "source": "agreement"})
    with pytest.raises(InputError, match=r"but got agreement: that version does not say whether they depend"):
        load_scorer(path)


def test_a_damaged_file_of_the_version_before_is_refused(tmp_path: Path) -> None:
    for name in ("source", "fitted_on", "parameters"):
        content = {key: value for key, value in TEMPERATURE.items() if key != name}
        with pytest.raises(InputError, match="to hold a whole temperature, but got no field"):
            load_scorer(write(tmp_path / "scaler.json", content))


def test_a_threshold_of_the_version_before_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"version 2, but got 1\. Fit it again by `selfcal fit-threshold`: .* promises"
    ):
        FittedThreshold.load(write(tmp_path / "threshold.json", THRESHOLD))
