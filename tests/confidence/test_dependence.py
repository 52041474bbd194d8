from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.fakes import FakeChat, FakeEngine, FakeTask, fake_questions
from support.number_pools import write_number_pool
from support.strategy_pools import make_entry

from selfcal_lightning.commands.pools import run_export_pool
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.base import SampleScorer, scored_pool
from selfcal_lightning.confidence.fusion import (
    carried_confidences,
    default_confidences,
    fit_confidences,
    fit_fusion,
    load_scorer,
    weigh_pool,
)
from selfcal_lightning.confidence.registry import ESTIMATORS, RecordedConfidence, pool_dependent, recorded_confidences
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.data.pools.importing import import_pool
from selfcal_lightning.data.pools.recorded import RecordedPool, load_recorded_pool
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.records import QuestionSamples, SamplingSettings

CONSISTENCY = "response_consistency"


def carrying(name: str, *, prefix: str) -> RecordedPool:
    """Return a pool whose responses carry P(True) and, under ``name``, a number that tells right from wrong."""
    entries = []
    for number in range(12):
        right = [bool((number + index) % 3) for index in range(4)]
        entry = make_entry(["a" if hit else "b" for hit in right], [0.25 + 0.125 * i for i in range(4)])
        samples = tuple(
            replace(sample, question_id=f"{prefix}{number}", confidences={name: 0.7 if hit else 0.3})
            for sample, hit in zip(entry.samples, right, strict=True)
        )
        entries.append(replace(entry, question=replace(entry.question, id=f"{prefix}{number}"), samples=samples))
    return RecordedPool(tuple(entries), tuple((1,) * 4 for _ in entries))


def write_pool(path: Path) -> Path:
    """Write a JSON-lines pool of three number questions with three responses each."""
    responses = [{"text": "The answer is 1.", "confidence": {"p_true": 0.5}}] * 3
    return write_number_pool(path, {f"q{number}": responses for number in range(3)}, split="test")


def scored(pool: RecordedPool, scorers: Sequence[SampleScorer]) -> tuple[QuestionSamples, ...]:
    return scored_pool(pool.entries, scorers)


def chain() -> list[SampleScorer]:
    """A scaler of response consistency, a scaler of that, and a fusion of that with P(True)."""
    pool = carrying(CONSISTENCY, prefix="c")
    first = fit_scaler(pool.entries, "platt", source=CONSISTENCY, name="calm")
    second = fit_scaler(scored(pool, [first]), "isotonic", source="calm", name="calmer", known=[first])
    fusion = fit_fusion(
        scored(pool, [first, second]), ["p_true", "logit:calmer"], name="both", allow_pool_features=True,
        known=[first, second],
    )  # fmt: skip
    return [first, second, fusion]


def test_a_scorer_needs_the_pool_where_its_source_does(tmp_path: Path) -> None:
    scorers = chain()
    assert [scorer.needs_pool for scorer in scorers] == [True, True, True]
    for scorer in scorers:
        scorer.save(tmp_path / "one.json")  # type: ignore[attr-defined]
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
    second = fit_scaler(scored(carrying(CONSISTENCY, prefix="c"), [first]), "platt", source="calm")
    assert not second.needs_pool
    with pytest.raises(ValueError, match="calm_platt, which depend on the other responses"):
        weigh_pool(carrying(CONSISTENCY, prefix="t"), ["calm_platt"], [first, second])


def test_finished_targets_of_imported_responses_are_no_confidences() -> None:
    pool = carrying("consistency", prefix="t")
    assert carried_confidences(pool) == ["p_true", "sequence_logprob", "mean_logprob"]
    with pytest.raises(ValueError, match="consistency, which depend on the other responses"):
        weigh_pool(pool, ["consistency"], [])
    names = ["p_true", "consistency", "ssc", "self_certainty", "mine", *ESTIMATORS]
    needing = {name for name, estimator in ESTIMATORS.items() if estimator.needs_pool}
    assert needing
    assert set(pool_dependent(names)) == {"consistency", "ssc", *needing}


def test_an_annotation_under_another_name_is_known_by_its_estimator(tmp_path: Path) -> None:
    import_pool(write_pool(tmp_path / "pool.jsonl"), tmp_path / "store")
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
    pool = write_pool(tmp_path / "pool.jsonl")
    with pytest.raises(ValueError, match="'agreement' to keep its estimator's name"):
        run_score(CONSISTENCY, pool=str(pool), output=str(tmp_path / "out.jsonl"), name="agreement")
    import_pool(pool, tmp_path / "store")
    run_score(CONSISTENCY, str(tmp_path / "store"), name="agreement")
    with pytest.raises(ValueError, match="to keep its estimator's name"):
        run_export_pool(str(tmp_path / "store"), str(tmp_path / "out.jsonl"), confidences=["agreement"])
    assert not (tmp_path / "out.jsonl").exists()
