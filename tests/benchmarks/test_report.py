from pathlib import Path

import numpy as np
import pytest
from support.house import Script

from selfcal_lightning.metrics.bootstrap import ScoredResponses
from selfcal_lightning.records import Question, QuestionSamples, Sample

NUM_QUESTIONS, NUM_SAMPLES = 30, 4


def scored(seed: int, *, noise: float, shift: float = 0.0) -> ScoredResponses:
    """Return responses whose confidence is their chance of being right, but for noise and a shift."""
    rng = np.random.default_rng(seed)
    chance = rng.uniform(0.1, 0.9, (NUM_QUESTIONS, 1)) * np.ones(NUM_SAMPLES)
    correct = rng.uniform(size=chance.shape) < chance
    confidence = np.clip(chance + noise * rng.normal(size=chance.shape) + shift, 0.0, 1.0)
    questions = np.repeat(np.arange(NUM_QUESTIONS), NUM_SAMPLES)
    return ScoredResponses(confidence.ravel(), correct.ravel(), questions)


def test_a_confidence_does_not_differ_from_itself(script: Script) -> None:
    estimates = script("shared.estimates")
    rows = [estimates.Measured.of(scored(seed, noise=0.1)) for seed in range(3)]
    for metric in ("discrimination/AUROC", "calibration/Brier"):
        found = estimates.difference(rows, rows, metric)
        assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)
    found = estimates.difference(rows, rows, "calibration/ECE")
    assert found.value == 0.0
    assert found.low <= 0.0 <= found.high
    estimates = script("shared.estimates")
    column = np.linspace(0.0, 1.0, 21)
    assert estimates.mean_over_seeds(column[None]).tolist() == column.tolist()
    row = estimates.Measured.of(scored(0, noise=0.1))
    alone = estimates.errors_over_seeds([row.errors])
    assert alone.value == pytest.approx(row.errors.value)
    assert alone.least == pytest.approx(row.errors.least)
    assert alone.most == pytest.approx(row.errors.most)


def test_the_samples_for_an_accuracy_are_read_between_the_points(script: Script) -> None:
    needed = script("shared.estimates").samples_needed
    curve = np.array([[0.4, 0.4, 0.4], [0.5, 0.3, 0.3], [0.6, 0.5, 0.3]])
    assert needed(curve, np.array([0.55, 0.45, 0.45]))[:2] == pytest.approx([2.5, 2.5])
    assert np.isnan(needed(curve, np.array([0.55, 0.45, 0.45]))[2])
    assert needed(curve, np.array([0.1, 0.4, 0.4])).tolist() == [1.0, 1.0, 1.0]


def test_a_criterion_is_met_by_what_it_names(script: Script) -> None:
    estimates, demands = script("shared.estimates"), script("report")

    def measured(*, noise: float, shift: float = 0.0) -> list[object]:
        return [estimates.Measured.of(scored(seed, noise=noise, shift=shift)) for seed in range(3)]

    good, poor = measured(noise=0.0), measured(noise=0.6, shift=0.4)
    flat = np.full((8, 101), 0.5)

    def verdicts(activated: list[object], joint: list[object], gain: float, unequal: int) -> list[bool]:
        rows = {"activated": activated, "joint": joint, "activated_likelihood": activated, "likelihood": joint}
        curves = {"id": {"plain": flat, "activated": flat + gain}}
        return [row.met for row in demands.criteria({"id": rows, "ood": rows}, curves, unequal, 10)]

    assert verdicts(good, poor, 0.02, 0)[2:] == [True] * 5
    assert verdicts(poor, good, -0.02, 1) == [False] * 7


def test_a_sceptic_s_confidences_are_fitted_without_the_test_questions(script: Script) -> None:
    made = script("_report_confidences")
    rng = np.random.default_rng(0)

    def entry(number: int) -> QuestionSamples:
        right = rng.uniform(size=8) < rng.uniform()
        capability = float(rng.uniform())
        samples = tuple(
            Sample(
                str(number), index, 0, "", None, "stop", "1" if is_right else str(rng.integers(2, 5)), bool(is_right),
                logprob=-float(rng.uniform(0.1, 4.0)), yes_mass=0.7, no_mass=0.3,
                confidences={made.AWAKE: float(rng.uniform()), made.PROBE: capability}, num_tokens=4,
            )
            for index, is_right in enumerate(right)
        )  # fmt: skip
        question = Question(str(number), "word_problems", (), "1")
        return made.with_agreement(QuestionSamples(question, samples, "calibration", (1,)))

    entries = [entry(number) for number in range(40)]
    for generator in ("nothing", "joint"):
        names = {scorer.name for scorer in made.fit_on(entries[:20], generator)}
        wanted = {row.confidence for row in made.CONTENDERS if row.generator == generator and (row.fuses or row.scales)}
        assert names == wanted
    shares = [sample.confidences["vote_share"] for sample in entries[0].samples]
    answers = [sample.answer for sample in entries[0].samples]
    assert shares == [answers.count(answer) / 8 for answer in answers]


def test_both_adapters_of_a_seed_train_on_the_same_samples(script: Script, tmp_path: Path) -> None:
    jobs = script("_report_confidences")
    plan = jobs.Plan(output=tmp_path, training=40, id=8, ood=8, calibration=8, num_samples=8, asleep=4, threads=1)
    activated, joint = (jobs.configuration_of(plan, 3, name) for name in ("activated", "joint"))
    assert activated["data"]["init_args"]["store_dir"] == joint["data"]["init_args"]["store_dir"]
    assert activated["seed_everything"] == joint["seed_everything"] == 3
    assert joint["model"]["init_args"]["lora"]["activated"] is False
    assert plan.responses(3, "activated") == plan.responses(3, "nothing") != plan.responses(3, "joint")
