import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions
from support.store_samples import write_pool
from support.strategy_pools import make_entry, with_samples

from selfcal_lightning.commands.pools import run_export_pool
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.base import MissingConfidenceError, SampleScorer, add_scores, scored_pool
from selfcal_lightning.confidence.features import ResponseTable, feature_value, score_confidence
from selfcal_lightning.confidence.fusion import (
    DEFAULT_FEATURES,
    Fusion,
    carried_confidences,
    default_confidences,
    fit_confidences,
    fit_fusion,
    load_scorer,
    weigh_pool,
)
from selfcal_lightning.confidence.registry import ESTIMATORS, RecordedConfidence, pool_dependent, recorded_confidences
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.core.files import sealed
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.records import QuestionSamples, SamplingSettings


def mixed_pool(num_questions: int = 60, *, prefix: str = "q", seed: int = 0) -> list[QuestionSamples]:
    """P(True) knows how hard a question is, the log-probability knows which response is right; neither knows both."""
    draw = np.random.default_rng(seed)
    pool = []
    for number in range(num_questions):
        ease = draw.normal(0.0, 2.0)
        right = draw.random(6) < 1.0 / (1.0 + math.exp(-ease))
        answers: list[str | None] = ["a" if hit else draw.choice(["b", "c"]) for hit in right]
        if number % 10 == 0:
            answers[5] = None
        p_true = 1.0 / (1.0 + math.exp(-ease - 1.0))
        entry = make_entry(answers, [p_true] * 6, name=f"{prefix}{number}")
        samples = tuple(
            replace(
                sample, token_ids=tuple(range(int(draw.integers(5, 15)))),
                logprob=float(-6.0 + 3.0 * bool(sample.correct) + draw.normal()),
            )
            for sample in entry.samples
        )  # fmt: skip
        pool.append(replace(entry, samples=samples))
    return pool


def reference_columns(pool: list[QuestionSamples]) -> np.ndarray:
    """Return the default features, computed apart from the project's reading."""
    rows = []
    for entry in pool:
        for s in entry.samples:
            p = min(max(s.yes_mass / (s.yes_mass + s.no_mass), 1e-6), 1 - 1e-6)
            rows.append([math.log(p / (1 - p)), s.logprob, s.logprob / len(s.token_ids)])
    return np.array(rows)


def test_fusion_to_labels_equals_scikit_learns_regression() -> None:
    pool = mixed_pool()
    columns = reference_columns(pool)
    labels = np.array([bool(s.correct) for e in pool for s in e.samples])
    standard = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    reference = LogisticRegression(C=1.0, tol=1e-12, max_iter=10_000).fit(standard, labels)
    fusion = fit_fusion(pool)
    assert fusion.features == DEFAULT_FEATURES
    assert fusion.weights == pytest.approx(reference.coef_[0], abs=1e-5)
    assert fusion.intercept == pytest.approx(reference.intercept_[0], abs=1e-5)
    expected = reference.predict_proba(standard)[:, 1]
    many = fusion.transform(ResponseTable.from_pool(pool, fusion.features).values)
    assert many == pytest.approx(expected, abs=1e-5)
    found = [fusion.score_sample(sample) for entry in pool for sample in entry.samples]
    assert found == pytest.approx(expected, abs=1e-5)


def test_a_part_whose_estimator_gives_no_probability_has_no_calibration_error() -> None:
    pools = (mixed_pool(), mixed_pool(prefix="new", seed=1))
    first, second = (with_samples(pool, lambda s: replace(s, confidences={"judge": s.p_true or 0.0})) for pool in pools)
    known = [RecordedConfidence("judge", needs_pool=False, is_probability=False)]
    fusion = fit_fusion(first, ("judge", "p_true"), held_out=second, known=known)
    for scores in (fusion.scores, fusion.held_out_scores):
        assert [row.ece is None for row in scores] == [True, False, False]


def _soft_targets(pool: list[QuestionSamples], *, weighted: bool) -> list[float | None]:
    """Return the share of each response's answer, by counting."""
    targets: list[float | None] = []
    for entry in pool:
        weight = {s.index: (s.p_true if weighted else 1.0) if s.answer is not None else 0.0 for s in entry.samples}
        total = sum(weight.values())
        for s in entry.samples:
            same = sum(weight[o.index] for o in entry.samples if o.answer == s.answer)
            targets.append(None if s.answer is None else same / total)
    return targets


@pytest.mark.parametrize(("target", "weighted"), [("ssc", True), ("vote_share", False)])
def test_label_free_fusion_equals_weighted_rows_of_both_classes(target: Any, weighted: bool) -> None:
    draw = np.random.default_rng(3)
    pool = mixed_pool()
    # P(True) that differs within a question, so that SSC is not the vote share.
    pool = with_samples(pool, lambda s: replace(s, yes_mass=(y := float(draw.random())), no_mass=1.0 - y))
    # No label may play a part.
    blind = with_samples(pool, lambda s: replace(s, correct=None))
    targets = _soft_targets(pool, weighted=weighted)
    used = np.array([value is not None for value in targets])
    soft = np.array([value for value in targets if value is not None])
    columns = reference_columns(pool)[used]
    standard = (columns - columns.mean(axis=0)) / columns.std(axis=0)
    reference = LogisticRegression(C=1.0, tol=1e-12, max_iter=10_000).fit(
        np.vstack([standard, standard]), np.repeat([1, 0], len(soft)), sample_weight=np.append(soft, 1.0 - soft)
    )
    fusion = fit_fusion(blind, target=target)
    assert fusion.weights == pytest.approx(reference.coef_[0], abs=1e-5)
    assert fusion.intercept == pytest.approx(reference.intercept_[0], abs=1e-5)
    assert (fusion.fitted_on.num_responses, fusion.fitted_on.num_left_out) == (354, 6)  # six are unreadable
    assert all(row.auroc is None for row in fusion.scores)
    with pytest.raises(ValueError, match='target "ssc"'):
        fit_fusion(blind)


def test_fusion_ranks_within_a_question_where_p_true_cannot() -> None:
    fusion = fit_fusion(mixed_pool(200), held_out=mixed_pool(200, prefix="new", seed=1))
    p_true, sequence, mean, fused = fusion.held_out_scores
    assert [row.name for row in fusion.held_out_scores] == ["p_true", "sequence_logprob", "mean_logprob", "fused"]
    assert p_true.within_question_auroc == pytest.approx(0.5, abs=1e-12)
    assert fused.within_question_auroc > 0.9
    assert fused.auroc > max(p_true.auroc, sequence.auroc, mean.auroc)
    assert fused.ece < 0.06
    assert sequence.ece is None
    labels, question = np.array([1.0, 0.0]), np.array([0, 1])
    assert score_confidence("self_certainty", labels, labels, question).ece is None, "in [0, 1] by chance"
    assert score_confidence("p_true", labels, labels, question).ece == 0.0


def test_a_missing_feature_gives_no_confidence_and_is_counted() -> None:
    pool = mixed_pool(20)
    first = pool[0]
    holed = (replace(first.samples[0], yes_mass=None, no_mass=None), *first.samples[1:])
    fusion = fit_fusion([replace(first, samples=holed), *pool[1:]])
    assert (fusion.fitted_on.num_responses, fusion.fitted_on.num_left_out) == (119, 1)
    assert fusion.scores[-1].num_left_out == 1
    assert fusion.score_sample(holed[0]) is None
    assert "fused" not in add_scores(holed[0], [fusion]).confidences


def test_an_absent_feature_names_the_estimator_to_run() -> None:
    pool = mixed_pool(5)
    with pytest.raises(MissingConfidenceError, match="selfcal score --estimator self_certainty"):
        fit_fusion(pool, [*DEFAULT_FEATURES, "self_certainty"])
    no_tokens = with_samples(pool, lambda s: replace(s, token_ids=None, num_tokens=None))
    with pytest.raises(MissingConfidenceError, match="State `tokens`"):
        fit_fusion(no_tokens, ["sequence_logprob", "num_tokens"])


def test_lengths_and_log_odds() -> None:
    sample = mixed_pool(1)[0].samples[0]
    assert feature_value(sample, "num_tokens") == len(sample.token_ids or ())
    elsewhere = replace(sample, token_ids=None, num_tokens=42, logprob=-21.0)
    assert feature_value(elsewhere, "num_tokens") == 42.0
    assert feature_value(elsewhere, "mean_logprob") == -0.5
    assert fit_fusion(mixed_pool(20), ["sequence_logprob", "num_tokens"]).requires == ("sequence_logprob",)
    sure = replace(sample, yes_mass=1.0, no_mass=0.0)
    assert feature_value(sure, "logit:p_true") == pytest.approx(math.log(999_999), abs=1e-9)
    with pytest.raises(ValueError, match="`logit:sequence_logprob` to lie in"):
        fit_fusion(mixed_pool(5), ["logit:sequence_logprob"])


def test_a_constant_feature_gets_no_weight() -> None:
    pool = with_samples(mixed_pool(20), lambda s: replace(s, confidences={"same": 0.1 + 0.2}))
    fusion = fit_fusion(pool, ["sequence_logprob", "same"])
    assert fusion.weights[1] == pytest.approx(0.0, abs=1e-8)
    assert fusion.stds[1] == 1.0


def test_what_depends_on_the_pool_is_refused_unless_flagged() -> None:
    shares = {"response_consistency": 1 / 6, "consistency": 1 / 6}
    pool = with_samples(mixed_pool(20), lambda s: replace(s, confidences={n: s.index * v for n, v in shares.items()}))
    for feature in ("logit:response_consistency", "consistency"):
        with pytest.raises(ValueError, match="which depend on the other responses"):
            fit_fusion(pool, ["sequence_logprob", feature])
    fusion = fit_fusion(pool, ["sequence_logprob", "response_consistency"], allow_pool_features=True)
    assert fusion.needs_pool
    assert not fit_fusion(pool).needs_pool


def test_fusion_survives_its_file(tmp_path: Path) -> None:
    fusion = fit_fusion(mixed_pool(30), target="ssc", name="both", held_out=mixed_pool(30, prefix="new", seed=1))
    path = tmp_path / "fusion.json"
    fusion.save(path)
    assert Fusion.load(path) == fusion
    assert load_scorer(path) == fusion
    content = json.loads(path.read_text())
    for change in ({"weights": [1.0]}, {"stds": [1.0, 0.0, 1.0]}, {"features": []}):
        path.write_bytes(sealed(content | change))
        for load in (load_scorer, Fusion.load):
            with pytest.raises(ValueError, match="to hold a whole fusion"):
                load(path)


CONSISTENCY = "response_consistency"


def carrying(name: str, *, prefix: str) -> RecordedPool:
    """Return a pool whose responses carry P(True) and, under ``name``, a number that tells right from wrong."""
    sure = [0.25 + 0.125 * index for index in range(4)]
    pool = [make_entry(["baab", "aaba", "abaa"][n % 3], sure, name=f"{prefix}{n}") for n in range(12)]
    entries = with_samples(pool, lambda s: replace(s, confidences={name: 0.7 if s.correct else 0.3}))
    return RecordedPool(tuple(entries), tuple((1,) * 4 for _ in entries))


def chain() -> list[SampleScorer]:
    """A scaler of response consistency, a scaler of that, and a fusion of that with P(True)."""
    pool = carrying(CONSISTENCY, prefix="c")
    first = fit_scaler(pool.entries, "platt", source=CONSISTENCY, name="calm")
    second = fit_scaler(scored_pool(pool.entries, [first]), "isotonic", source="calm", name="calmer", known=[first])
    fusion = fit_fusion(
        scored_pool(pool.entries, [first, second]), ["p_true", "logit:calmer"], name="both", allow_pool_features=True,
        known=[first, second],
    )  # fmt: skip
    return [first, second, fusion]


def test_a_scorer_needs_the_pool_where_its_source_does(tmp_path: Path) -> None:
    scorers = chain()
    assert [scorer.needs_pool for scorer in scorers] == [True, True, True]
    for scorer in scorers:
        scorer.save(tmp_path / "one.json")
        assert load_scorer(tmp_path / "one.json").needs_pool
    pool = carrying("verbalized", prefix="c").entries
    assert not fit_scaler(pool, "platt", source="verbalized").needs_pool
    assert not fit_fusion(pool, ["p_true", "verbalized"]).needs_pool


@pytest.mark.parametrize("name", ["calm", "calmer", "both"])
def test_fitted_forms_are_refused_as_the_plain_one_is(name: str) -> None:
    test, scorers = carrying(CONSISTENCY, prefix="t"), chain()
    with pytest.raises(ValueError, match=f"{name}, which depend on the other responses"):
        weigh_pool(test, [name], scorers)
    # Read by nobody, they do no harm.
    assert weigh_pool(test, ["p_true"], scorers).confidences == ("p_true",)
    source = EngineSource(
        FakeEngine(), FakeChat(), sampling=SamplingSettings(max_new_tokens=40), scorers=scorers, tasks=FakeTask
    )
    with pytest.raises(ValueError, match="which depend on the other responses"):
        source.prepare(fake_questions(2), confidence=name)


def test_the_source_is_asked_at_use_too() -> None:
    """Whoever fits a scaler of a scaler without naming the first one does not get around it."""
    first = chain()[0]
    second = fit_scaler(scored_pool(carrying(CONSISTENCY, prefix="c").entries, [first]), "platt", source="calm")
    assert not second.needs_pool
    with pytest.raises(ValueError, match="calm_platt, which depend on the other responses"):
        weigh_pool(carrying(CONSISTENCY, prefix="t"), ["calm_platt"], [first, second])


def test_finished_targets_of_imported_responses_are_no_confidences() -> None:
    pool = carrying("consistency", prefix="t")
    assert carried_confidences(pool) == ["p_true", "sequence_logprob", "mean_logprob"]
    with pytest.raises(ValueError, match="consistency, which depend on the other responses"):
        weigh_pool(pool, ["consistency"], [])
    names = ["p_true", "consistency", "ssc", "self_certainty", "mine", *ESTIMATORS]
    within = {"sasc_std", "sasc_certainty", "sasc_double"}
    needing = {CONSISTENCY, "semantic_share", "semantic_entropy", "cocoa", "two_sample_hybrid", *within}
    assert set(pool_dependent(names)) == {"consistency", "ssc", *needing}


def test_an_annotation_under_another_name_is_known_by_its_estimator(tmp_path: Path) -> None:
    import_pool(write_pool(tmp_path / "pool.jsonl", questions=3), tmp_path / "store")
    run_score(CONSISTENCY, str(tmp_path / "store"), name="agreement")
    pool = load_recorded_pool(tmp_path / "store", confidences=["agreement"])
    assert recorded_confidences(pool.estimators) == [
        RecordedConfidence("agreement", needs_pool=True, is_probability=True)
    ]
    assert "agreement" not in carried_confidences(pool)
    with pytest.raises(ValueError, match="agreement, which depend on the other responses"):
        weigh_pool(pool.subset({"q0", "q1"}), ["agreement"], [])


def test_an_estimator_says_whether_its_values_are_probabilities() -> None:
    pools = [
        (carrying("coe_c", prefix="t"), "coe_c_platt"),
        (replace(carrying("shape", prefix="t"), estimators={"shape": "coe_c"}), "shape_platt"),
        (carrying("mine", prefix="t"), "mine"),
    ]
    assert all(name in default_confidences(pool, can_fit=True) for pool, name in pools)
    (scaler,) = fit_confidences(pools[1][0], ["shape_platt"])
    assert not scaler.map.takes_logit


def test_a_file_keeps_the_name_by_which_it_is_known(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool.jsonl", questions=3)
    with pytest.raises(ValueError, match="'agreement' to keep its estimator's name"):
        run_score(CONSISTENCY, pool=pool, output=str(tmp_path / "out.jsonl"), name="agreement")
    import_pool(pool, tmp_path / "store")
    run_score(CONSISTENCY, str(tmp_path / "store"), name="agreement")
    with pytest.raises(ValueError, match="to keep its estimator's name"):
        run_export_pool(str(tmp_path / "store"), str(tmp_path / "out.jsonl"), confidences=["agreement"])
    assert not (tmp_path / "out.jsonl").exists()
