import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.calibration import _SigmoidCalibration
from support.strategy_pools import make_entry, with_samples

from selfcal_lightning.confidence import scaling
from selfcal_lightning.confidence.base import add_scores, split_hash
from selfcal_lightning.confidence.fusion import load_scorer, load_scorers
from selfcal_lightning.confidence.registry import RecordedConfidence
from selfcal_lightning.confidence.splits import check_not_fitted_on, split_in_halves
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import sealed
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.records import QuestionSamples


def overconfident_pool(num_questions: int = 60, *, prefix: str = "q", seed: int = 0) -> list[QuestionSamples]:
    """Responses that are right with probability sigmoid(logit(c) / 3): the confidence c needs a temperature of 3."""
    draw = np.random.default_rng(seed)
    pool = []
    for number in range(num_questions):
        logits = draw.normal(1.0, 3.0, size=8)
        right = draw.random(8) < 1.0 / (1.0 + np.exp(-logits / 3.0))
        answers: list[str | None] = ["a" if hit else "bcdefghi"[i] for i, hit in enumerate(right)]
        confidences: list[float | None] = list(1.0 / (1.0 + np.exp(-logits)))
        pool.append(make_entry(answers, confidences, name=f"{prefix}{number}"))
    return pool


def columns_of(pool: list[QuestionSamples]) -> tuple[Floats, Floats]:
    rows = [(sample.p_true, sample.correct) for entry in pool for sample in entry.samples]
    return np.array([row[0] for row in rows], dtype=float), np.array([row[1] for row in rows], dtype=float)


def test_isotonic_gives_the_references_values(vectors: Callable[[str], dict[str, Any]]) -> None:
    cases = vectors("isotonic_posthoc")["cases"]
    assert cases
    for case in cases:
        map_ = scaling.IsotonicMap.fit(np.array(case["x_val"]), np.array(case["y_val"]))
        assert map_.transform(np.array(case["x_test"])) == pytest.approx(case["out"], abs=1e-6)


def test_temperature_has_the_least_cross_entropy_of_a_fine_grid() -> None:
    confidence, correct = columns_of(overconfident_pool())
    logits = np.log(confidence) - np.log1p(-confidence)

    def cross_entropy(temperature: float) -> float:
        z = logits / temperature
        return float(np.mean(np.logaddexp(0.0, z) - correct * z))

    found = scaling.TemperatureMap.fit(confidence, correct).temperature
    best = min(np.arange(0.5, 8.0, 0.01), key=cross_entropy)
    assert found == pytest.approx(best, abs=0.011)
    assert found == pytest.approx(3.0, abs=0.8)  # the pool was made with 3
    assert cross_entropy(found) <= cross_entropy(float(best)) + 1e-12


@pytest.mark.parametrize(("correct", "temperature"), [([0, 0, 1, 1], 100.0), ([1, 1, 0, 0], 0.01)])
def test_temperature_stops_at_its_ends(correct: list[int], temperature: float) -> None:
    """A confidence that is upside down says .5 at last; one that is never wrong says 0 and 1."""
    map_ = scaling.TemperatureMap.fit(np.array([0.9, 0.8, 0.2, 0.1]), np.array(correct, dtype=float))
    assert map_.temperature == temperature


@pytest.mark.parametrize("takes_logit", [True, False])
def test_platt_equals_scikit_learns(takes_logit: bool) -> None:
    confidence, correct = columns_of(overconfident_pool())
    x = np.log(confidence) - np.log1p(-confidence) if takes_logit else confidence
    reference = _SigmoidCalibration().fit(x, correct)
    found = scaling.PlattMap.fit(confidence, correct, takes_logit=takes_logit).transform(confidence)
    assert found == pytest.approx(reference.predict(x), abs=2e-5)


def test_platt_is_finite_where_labels_are_all_one_or_perfectly_separated() -> None:
    values = np.array([-3.0, -2.0, 2.0, 3.0])
    same = scaling.PlattMap.fit(values, np.ones(4), takes_logit=False)
    assert same.transform(values) == pytest.approx(np.full(4, 5.0 / 6.0), abs=1e-6)  # (4 + 1) / (4 + 2)
    apart = scaling.PlattMap.fit(values, np.array([0.0, 0.0, 1.0, 1.0]), takes_logit=False)
    # Platt's targets are 3/4 and 1/4; symmetric scores make p(x) + p(-x) = 1.
    assert apart.intercept == pytest.approx(0.0, abs=1e-6)
    assert 0.0 < apart.slope < 2.0


@pytest.mark.parametrize("takes_logit", [True, False])
@pytest.mark.parametrize(("constant", "repeats"), [(0.9, 1), (0.3, 9), (0.1, 33)])
def test_a_constant_confidence_scales_to_the_share_right(constant: float, repeats: int, takes_logit: bool) -> None:
    """Rounding moves the mean of some constants off them, which is no variation to fit a slope to."""
    correct = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 0.0] * repeats)
    map_ = scaling.PlattMap.fit(np.full(len(correct), constant), correct, takes_logit=takes_logit)
    right, wrong = 2 * repeats, 4 * repeats
    share = (right * (right + 1) / (right + 2) + wrong / (wrong + 2)) / len(correct)  # of Platt's targets
    assert map_.transform(np.array([constant, constant + 0.05])) == pytest.approx(np.full(2, share), abs=1e-6)


@pytest.mark.parametrize("kind", scaling.SCALER_KINDS)
def test_scaler_repairs_calibration_on_other_questions_and_survives_its_file(kind: Any, tmp_path: Path) -> None:
    pool = overconfident_pool(200)
    scaler = scaling.fit_scaler(pool, kind, name="scaled", held_out=overconfident_pool(200, prefix="new", seed=1))
    assert scaler.held_out_before.ece > 0.12
    assert scaler.held_out_after.ece < 0.06
    if kind != "isotonic":  # strictly rising: the ranking stays
        assert scaler.after.auroc == pytest.approx(scaler.before.auroc, abs=1e-12)
    path = tmp_path / "deep" / "scaler.json"
    scaler.save(path)
    assert load_scorer(path) == scaler
    fitted_on = json.loads(path.read_text())["fitted_on"]
    assert fitted_on["split_hash"] == split_hash(f"q{number}" for number in range(200))
    assert (fitted_on["num_questions"], fitted_on["num_responses"]) == (200, 1600)
    found = [add_scores(sample, [scaler]).confidences["scaled"] for entry in pool for sample in entry.samples]
    assert found == pytest.approx(scaler.map.transform(columns_of(pool)[0]).tolist(), abs=1e-12)
    assert "scaled" not in add_scores(make_entry(["a"], [None]).samples[0], [scaler]).confidences


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("sequence_logprob", ()),
        ("coe_c", ()),  # its values here lie in [0, 1], others need not
        ("shape", [RecordedConfidence("shape", needs_pool=False, is_probability=False)]),
    ],
)
def test_scores_that_are_no_probability_scale_without_a_logit(source: str, known: list[RecordedConfidence]) -> None:
    pool = with_samples(
        overconfident_pool(20), lambda s: replace(s, confidences={"coe_c": s.p_true, "shape": s.p_true})
    )
    scaler = scaling.fit_scaler(pool, "platt", source=source, known=known)
    assert isinstance(scaler.map, scaling.PlattMap)
    assert not scaler.map.takes_logit
    assert scaler.before.ece is None
    assert scaler.after.ece is not None
    with pytest.raises(ValueError, match=f"'{source}'"):
        scaling.fit_scaler(pool, "temperature", source=source, known=known)
    assert scaling.fit_scaler(pool, "platt", source="shape", name="mine").map.takes_logit


def test_unreadable_counts_as_wrong_and_what_is_missing_or_infinite_is_left_out() -> None:
    pool = [make_entry(["a", None, "a"], [0.5, 0.5, None], name="x"), make_entry(["a", "b"], [0.5, 0.5], name="y")]
    scaler = scaling.fit_scaler(pool, "isotonic")
    # Of the four responses with P(True) .5, two are right; the unreadable one is not.
    assert scaler.map == scaling.IsotonicMap((0.5,), (0.5,))
    assert (scaler.fitted_on.num_responses, scaler.fitted_on.num_left_out) == (4, 1)
    failed = replace(pool[1].samples[0], answer=None, correct=None, yes_mass=None, no_mass=None, confidences={})
    known = replace(pool[1], samples=(*pool[1].samples, failed))
    assert scaling.fit_scaler([pool[0], known], "isotonic").map == scaler.map
    entry = make_entry(["a"], [0.5])
    sample = replace(entry.samples[0], confidences={"odd": math.inf})
    pool = [*overconfident_pool(5), replace(entry, samples=(sample,))]
    scored = with_samples(pool, lambda s: replace(s, confidences={"odd": -1.0, **s.confidences}))
    assert scaling.fit_scaler(scored, "isotonic", source="odd").fitted_on.num_left_out == 1


def test_what_cannot_be_fitted_says_why() -> None:
    for options, message in (
        ({"source": "verbalized"}, "selfcal score --estimator verbalized"),
        ({"name": "p_true"}, "`name` .* 'p_true'"),
        ({"held_out": overconfident_pool(5)}, "not fitted on, but got 5 of 5"),
        ({"pool": with_samples(overconfident_pool(2), lambda s: replace(s, correct=None))}, "16 of 16 .* 'q0'"),
        ({"pool": [make_entry([None], [None])]}, "'p_true' to fit on, but got none"),
        *(
            ({"pool": [make_entry(["a"] * 2, [0.5, 0.9])], "kind": kind}, "but all 2 are 1")
            for kind in scaling.SCALER_KINDS
        ),
    ):
        with pytest.raises(ValueError, match=message):
            scaling.fit_scaler(**{"pool": overconfident_pool(5), "kind": "platt", **options})


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "scaler.json"
    scaling.fit_scaler(overconfident_pool(5), "temperature").save(path)
    content = json.loads(path.read_text())
    for text, message in (
        (path.read_bytes().replace(b'"p_true"', b'"p_false"'), "was changed or is damaged"),
        (b"{", r"scaler\.json"),
        (sealed(content | {"version": 4}), "version 3, but got 4"),
        (sealed(content | {"parameters": {"temperature": 0.0}}), "temperature=0.0"),
        (sealed(content | {"fitted_on": {}}), "no field 'question_hashes'"),
    ):
        path.write_bytes(text)
        with pytest.raises(InputError, match=message):
            load_scorer(path)


def test_scorers_stand_in_the_order_of_computation(tmp_path: Path) -> None:
    pool = overconfident_pool(20)
    first = scaling.fit_scaler(pool, "platt", name="scaled")
    scored = with_samples(pool, lambda s: add_scores(s, [first]))
    second = scaling.fit_scaler(scored, "isotonic", source="scaled", name="twice")
    paths = [tmp_path / "first.json", tmp_path / "second.json"]
    for scaler, path in zip((first, second), paths, strict=True):
        scaler.save(path)
    assert load_scorers(paths) == [first, second]
    with pytest.raises(ValueError, match="'scaled' before 'twice'"):
        load_scorers(paths[::-1])


def test_overlap_with_the_fitting_split_is_found_question_by_question() -> None:
    scaler = scaling.fit_scaler(overconfident_pool(10), "platt")
    check_not_fitted_on(overconfident_pool(10, prefix="new"), scaler)
    check_not_fitted_on([], [scaler])
    with pytest.raises(ValueError, match=r"'p_true_platt' was not fitted on, but got 1 of 2 .* such as 'q9'"):
        check_not_fitted_on(["other", "q9"], [scaler])


def test_halves_are_disjoint_whole_and_the_same_whatever_the_order() -> None:
    ids = [f"question {number}" for number in range(101)]
    first, second = split_in_halves(ids)
    assert split_in_halves(ids[::-1]) == (first, second)
    assert (len(first), len(second)) == (51, 50)
    assert sorted(first + second) == sorted(ids)
    other, _ = split_in_halves(ids, seed=1)
    shared = len(set(first) & set(other))
    assert 10 < shared < 41  # another seed deals anew: about half are shared
