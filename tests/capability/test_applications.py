import json
from pathlib import Path

import numpy as np
import pytest
from support.capability_pools import capability_store

from selfcal_lightning.capability import fitted_maps
from selfcal_lightning.capability.allocation import beta_allocation, greedy_allocation, interpolated_allocation
from selfcal_lightning.capability.fitted_maps import (
    calibration_questions,
    fit_capability_maps,
    fit_concentration,
    load_maps,
)
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.capability.scoring import QuestionScore, read_scores, write_scores
from selfcal_lightning.cli import run
from selfcal_lightning.commands.capability import (
    run_allocate,
    run_fit_abstention_threshold,
    run_fit_capability_maps,
    run_fit_probe,
    run_map_scores,
    run_predict_pass_at_k,
    run_score_questions,
)
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import sealed
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.engines.sampling.plan import load_plan


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A probe, a store whose calibration questions it scored, maps of these, and scores of questions nobody sampled."""
    folder = tmp_path_factory.mktemp("applications")
    store, probe = str(capability_store(folder / "store")), str(folder / "probe")
    run_fit_probe(store, probe)
    run_score_questions(probe=probe, store_dir=store, split="calibration")
    run_score_questions(
        probe=probe, task="word_problems", split="test_id", offset=100, limit=5, model="bundled",
        output=str(folder / "scores.jsonl"),
    )  # fmt: skip
    run_fit_capability_maps(store, str(folder / "maps.json"))
    return folder


def known(folder: Path, capabilities: list[float | None]) -> str:
    write_scores(folder / "known.jsonl", [QuestionScore(f"q{i}", "t", "?", p) for i, p in enumerate(capabilities)])
    return str(folder / "known.jsonl")


def test_questions_of_a_task_are_scored_under_the_ids_that_sampling_gives_them(written: Path) -> None:
    scores = read_scores(written / "scores.jsonl")
    assert [one.id for one in scores] == [f"word_problems/test_id/{number:06d}" for number in range(100, 105)]
    assert all(one.capability is not None for one in scores)


def test_pass_at_k_by_each_way(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "predicted.jsonl"
    found = run_predict_pass_at_k(
        str(written / "scores.jsonl"), str(output), ks=[4, 1, 16], calibration_pool=str(written / "store")
    )
    p = np.array([one.capability for one in read_scores(written / "scores.jsonl")])
    assert found.k == (1, 4, 16)
    np.testing.assert_allclose(found.ways["power"][1], 1 - (1 - p) ** 4)
    assert np.isnan(found.ways["maps"][2]).all(), "eight responses say nothing of sixteen"
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[0]["pass_at_k"]["power"]["1"] == pytest.approx(p[0])
    assert lines[0]["pass_at_k"]["maps"]["16"] is None
    assert "maps" in capsys.readouterr().out
    alone = run_predict_pass_at_k(str(written / "scores.jsonl"), str(output), ks=[4], zero_below=[0.0, 1.0])
    assert list(alone.ways) == ["power", "power from 0", "power from 1"]
    np.testing.assert_allclose(alone.ways["power from 0"], alone.ways["power"])
    np.testing.assert_allclose(alone.ways["power from 1"], 0.0)
    assert "left out" not in capsys.readouterr().out
    run_predict_pass_at_k(known(tmp_path, [0.5, None, None]), str(output))
    assert "2 questions without a capability are left out" in capsys.readouterr().out


def test_plans_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    p = [0.9, 0.5, 0.1, 0.02]
    options = {"scores": known(tmp_path, [*p]), "output": str(tmp_path / "plan.json")}
    plan = run_allocate(**options, budget=2, gain="geometric")
    assert list(plan.samples.values()) == greedy_allocation(p, 8, maximum=100).tolist()
    assert load_plan(options["output"]).samples == plan.samples
    plan = run_allocate(**options, budget=2, concentration=2.0, minimum=1, maximum=4)
    expected = beta_allocation(2 * np.array(p), 2 * (1 - np.array(p)), 8, minimum=1, maximum=4)
    assert list(plan.samples.values()) == expected.tolist()
    plan = run_allocate(**options, budget=2, concentration=2.0, skip_below=0.1)
    assert plan.samples["q3"] == 0
    assert sum(plan.samples.values()) == 8, "what is not spent on it goes to the others"
    plan = run_allocate(**options, budget=2, gain="geometric", uniform_share=0.25)
    expected = interpolated_allocation([2] * 4, greedy_allocation(p, 8, maximum=100), 0.25)
    assert list(plan.samples.values()) == expected.tolist()
    plan = run_allocate(**options, budget=2.25, gain="geometric", uniform_share=1.0)
    assert list(plan.samples.values()) == [3, 2, 2, 2]
    assert "not given" not in capsys.readouterr().out
    plan = run_allocate(**options, budget=4, gain="geometric", maximum=3, skip_below=0.1)
    assert list(plan.samples.values()) == [3, 3, 3, 0]
    assert "7 of the budget's 16 samples are not given: `maximum` is 3" in capsys.readouterr().out


def test_the_concentration_is_fitted_where_none_is_given(written: Path, tmp_path: Path) -> None:
    options = {"scores": str(written / "scores.jsonl"), "output": str(tmp_path / "plan.json")}
    plan = run_allocate(**options, calibration_pool=str(written / "store"))
    questions = calibration_questions(str(written / "store"), split="calibration", name="probe")
    fitted = fit_concentration(questions.predicted, questions.table.num_correct, questions.table.num_samples)
    assert plan.details["concentration"] == pytest.approx(fitted)
    assert sum(plan.samples.values()) == 20
    with pytest.raises(InputError, match="or a `calibration_pool` to fit it on"):
        run_allocate(**options)


def test_a_threshold_that_bounds_wrong_responses(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    store, output = str(written / "store"), tmp_path / "abstention.json"
    values = run_score_questions(probe=str(written / "probe"), store_dir=store, split="calibration")
    found = run_fit_abstention_threshold(store, str(output), risk=0.9, delta=0.2)
    record = json.loads(output.read_text())
    assert (record["threshold"], record["num_questions"]) == (found.threshold, 24)
    asked = [value is not None and value >= found.threshold for value in values]
    assert found.num_answered == sum(asked)
    run_fit_abstention_threshold(store, str(output), risk=0.99)
    assert "a predicted capability of 0 or above" in capsys.readouterr().out
    for options, other in (
        ({"risk": 0.01}, "take an `estimator` that ranks questions better"),
        ({"risk": 0.9, "grid": [1.0]}, "name lower ones by `grid`"),
    ):
        with pytest.raises(RunError, match=f"Nothing is written; allow a larger `risk`, or {other}"):
            run_fit_abstention_threshold(store, str(tmp_path / "none.json"), **options)
    assert not (tmp_path / "none.json").exists()


def test_what_cannot_be(written: Path, tmp_path: Path) -> None:
    store, scores = str(written / "store"), str(written / "scores.jsonl")
    output = str(tmp_path / "out.jsonl")
    for options, words in (
        ({"gain": "geometric", "concentration": 1.0}, "with the gain 'beta' only"),
        ({"budget": 1.0, "minimum": 2, "gain": "geometric"}, "`budget` 1 gives 5 samples in all, fewer than the"),
        ({"calibration_pool": store, "calibration_split": "test"}, "has a value of 'probe'"),
        ({"calibration_pool": store, "calibration_split": "train"}, "'probe' was fitted on"),
    ):
        with pytest.raises(InputError, match=words):
            run_allocate(scores, output, **options)
    with pytest.raises(InputError, match="but got none for 1, such as 'q1'"):
        run_allocate(known(tmp_path, [0.5, None]), output, gain="geometric")
    (tmp_path / "wrong.jsonl").write_text('{"id": "q", "capability": 1.5}\n')
    with pytest.raises(InputError, match=r"wrong.jsonl:1: .* a number in \[0, 1\] or null"):
        read_scores(tmp_path / "wrong.jsonl")
    with pytest.raises(InputError, match=r"`ks` to lie between 1 and 8, the fewest responses .* but got \["):
        run_fit_capability_maps(store, output, ks=[1, 16])


def test_scores_and_calibration_have_one_origin(written: Path, tmp_path: Path) -> None:
    store = str(capability_store(tmp_path / "store"))
    questions = load_capability_pool(store, split="calibration", task=None).questions
    values = {(question.id, question_digest(question)): 0.5 for question in questions}
    QuestionAnnotation(store, "probe").write(values, origin={"estimator": "another"})
    with pytest.raises(InputError, match="of another probe, model or query"):
        run_predict_pass_at_k(str(written / "scores.jsonl"), str(tmp_path / "o.jsonl"), calibration_pool=store)
    rows = [QuestionScore(question.id, "t", "?", 0.5) for question in questions[:3]]
    write_scores(tmp_path / "same.jsonl", rows)
    with pytest.raises(InputError, match="3 calibration questions, such as"):
        run_predict_pass_at_k(str(tmp_path / "same.jsonl"), str(tmp_path / "o.jsonl"), calibration_pool=store)


def test_a_plan_is_sampled(written: Path, tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    asked = ["--task", "word_problems", "--split", "test_id", "--offset", "100", "--limit", "5"]
    command = ["allocate", "--scores", str(written / "scores.jsonl"), "--output", plan, "--concentration", "1.0"]
    assert run([*command, "--budget", "1.4"]) == 0
    store = str(tmp_path / "planned")
    drawn = ["--sampling.max_new_tokens", "16", "--store_dir", store, "--model", "bundled", "--plan", plan]
    assert run(["generate", *asked, *drawn]) == 0
    entries = load_capability_pool(store, split=None, task=None).pool.entries
    assert {entry.question.id: len(entry.samples) for entry in entries} == {
        name: count for name, count in load_plan(plan).samples.items() if count
    }


def test_a_file_gives_what_was_fitted(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    kept = load_maps(written / "maps.json")
    assert (kept.estimator, kept.fitted_on.num_questions) == ("probe", 24)
    assert kept.maps.per_k.k == tuple(range(1, 9))
    again = run_fit_capability_maps(str(written / "store"), str(tmp_path / "again.json"), ks=[2])
    assert again.maps.per_k.k == (2,)
    assert again.maps.inflated == kept.maps.inflated
    assert "Fitted on 24 questions: an isotonic map" in capsys.readouterr().out


def test_maps_are_those_of_the_functions() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.05, 0.95, size=30)
    correct, samples = rng.binomial(8, p), np.full(30, 8)
    maps, other = fit_capability_maps(p, correct, samples, ks=[1, 4]), np.array([0.1, 0.6, 0.3])
    rising = IsotonicMap.fit(p, correct / 8)
    np.testing.assert_allclose(maps.apply("isotonic", other), rising.transform(other))
    np.testing.assert_allclose(maps.apply("quantile", other), fitted_maps.quantile_mapping(other, correct / 8))
    ways = maps.pass_at_k(other, (1, 2))
    concentration = fitted_maps.fit_concentration(p, correct, samples)
    np.testing.assert_allclose(ways["beta"][1], fitted_maps.beta_pass_at_k(other, 2, concentration=concentration))
    inflated = fitted_maps.fit_inflated_beta(p, correct, samples)
    np.testing.assert_allclose(ways["inflated_beta"][1], inflated.pass_at_k(other, 2))
    assert np.isnan(ways["maps"][1]).all()
    assert not np.isnan(ways["maps"][0]).any()
    beyond = fit_capability_maps(p, correct, samples, ks=[16]).pass_at_k(other, (16,))
    assert np.isnan(beyond["maps"]).all(), "eight responses have no map for sixteen"
    with pytest.raises(InputError, match="`predicted` to be known"):
        fit_capability_maps([np.nan, *p[1:]], correct, samples)


def test_scores_are_mapped_by_name(written: Path, tmp_path: Path) -> None:
    scores, maps = str(written / "scores.jsonl"), load_maps(written / "maps.json").maps
    plain = np.array([one.capability for one in read_scores(scores)])
    for name in ("isotonic", "quantile"):
        output = str(tmp_path / f"{name}.jsonl")
        mapped = run_map_scores(scores, str(written / "maps.json"), output, map=name)
        np.testing.assert_allclose([one.capability for one in read_scores(output)], maps.apply(name, plain))
        with pytest.raises(InputError, match=r"are mapped, or of another probe, .* Give those of"):
            run_map_scores(output, str(written / "maps.json"), str(tmp_path / "twice.jsonl"))
    assert len({one.scored_by for one in mapped}) == 1
    write_scores(tmp_path / "own.jsonl", [QuestionScore("word_problems/calibration/000000", "t", "?", 0.5)])
    with pytest.raises(InputError, match="'maps of probe' was not fitted on, but got 1 of 1"):
        run_map_scores(str(tmp_path / "own.jsonl"), str(written / "maps.json"), str(tmp_path / "out.jsonl"))


def test_what_a_line_of_scores_does_not_say_stays_unknown(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    path.write_text('{"id": "q", "capability": 0.5}\n')
    write_scores(path, read_scores(path))
    line = json.loads(path.read_text())
    assert (line["task"], line["question"]) == (None, None)


def test_the_verbs_read_the_file_instead_of_a_pool(written: Path, tmp_path: Path) -> None:
    scores, maps, store = str(written / "scores.jsonl"), str(written / "maps.json"), str(written / "store")
    by_file = run_predict_pass_at_k(scores, str(tmp_path / "a.jsonl"), ks=[1, 4, 16], maps=maps)
    by_pool = run_predict_pass_at_k(scores, str(tmp_path / "b.jsonl"), ks=[1, 4, 16], calibration_pool=store)
    for way, values in by_pool.ways.items():
        np.testing.assert_allclose(by_file.ways[way], values)
    plans = [
        run_allocate(scores, str(tmp_path / f"{name}.json"), budget=2.0, **{name: place})
        for name, place in {"maps": maps, "calibration_pool": store}.items()
    ]
    assert plans[0].samples == plans[1].samples
    for verb, options, message in (
        (run_predict_pass_at_k, {"calibration_pool": store}, "`maps` or `calibration_pool`, but got both"),
        (run_allocate, {"concentration": 1.0}, "one of concentration, maps, calibration_pool"),
        (run_allocate, {"gain": "geometric"}, "`maps` with the gain 'beta' only"),
    ):
        with pytest.raises(InputError, match=message):
            verb(scores, str(tmp_path / "c.json"), maps=maps, **options)


def test_other_files_are_refused(written: Path, tmp_path: Path) -> None:
    record = json.loads((written / "maps.json").read_text())
    for changed, words in (({"version": 9}, "of version 9"), ({"knots": None}, "to hold whole maps")):
        (tmp_path / "maps.json").write_bytes(sealed({**record, **changed}))
        with pytest.raises(InputError, match=words):
            load_maps(tmp_path / "maps.json")


def test_maps_on_the_command_line(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    maps, out = str(tmp_path / "maps.json"), str(tmp_path / "mapped.jsonl")
    assert run(["fit-capability-maps", "--pool", str(written / "store"), "--output", maps, "--ks", "[1,4]"]) == 0
    assert run(["map-scores", "--scores", str(written / "scores.jsonl"), "--maps", maps, "--output", out]) == 0
    assert "isotonic: mean capability" in capsys.readouterr().out
