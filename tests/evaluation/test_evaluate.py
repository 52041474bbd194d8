import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command_lines import nested
from support.store_samples import write_lines, write_number_pool
from support.strategy_pools import make_entry

from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.confidence.scaling import fit_scaler
from selfcal_lightning.confidence.splits import halve_pool
from selfcal_lightning.data.pools.recorded import load_pool, load_recorded_pool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation.inputs import Inputs, TestSet, split_off_calibration
from selfcal_lightning.evaluation.metrics import compare_pools, result_keys, verdict
from selfcal_lightning.evaluation.strategies import TrainingCost
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.thresholds import FittedThreshold, fit_risk_threshold
from selfcal_lightning.inference.voting import SelfConsistency
from selfcal_lightning.records import QuestionSamples

METRICS = ("ece", "auroc", "brier", "pass_at_1", "within_question_auroc")
COUNTS = (
    "num_questions", "num_responses", "unreadable", "truncated", "confidence", "without_confidence", "mean_confidence",
    "ece_debiased",
)  # fmt: skip


def _pool(yes: list[list[float | None]], answers: list[list[str | None]]) -> list[QuestionSamples]:
    """Build a pool whose reference answer is always "1"; a Yes mass of None has no confidence."""
    rows = enumerate(zip(answers, yes, strict=True))
    return [make_entry(texts, masses, gold="1", name=f"q{number}") for number, (texts, masses) in rows]


BEFORE = _pool([[0.9, 0.9], [0.9, 0.9]], [["1", "2"], ["2", None]])
AFTER = _pool([[0.75, 0.25], [0.25, 0.25]], [["1", "2"], ["2", None]])


def test_keys_are_fixed_and_values_by_hand() -> None:
    keys = result_keys("id", compare_pools(BEFORE, AFTER, num_resamples=20), [BEFORE, AFTER])
    # One of four responses is right (the unreadable one is wrong): confidence .9 against accuracy .25.
    assert keys["own.id.ece.before"] == pytest.approx(0.65)
    # After: one response in the bin of .75 (right), three in the bin of .25 (wrong): (1 * .25 + 3 * .25) / 4.
    assert keys["own.id.ece.after"] == pytest.approx(0.25)
    assert keys["own.id.auroc.before"] == pytest.approx(0.5)
    assert keys["own.id.auroc.after"] == pytest.approx(1.0)
    assert keys["own.id.pass_at_1.change"] == pytest.approx(0.0)
    assert keys["own.id.unreadable.after"] == pytest.approx(0.25)
    parts = ("before", "after", "change", "ratio")
    expected = {f"own.id.{m}.{p}{end}" for m in METRICS for p in parts for end in ("", ".low", ".high")}
    expected |= {f"own.id.{c}.{side}" for c in COUNTS for side in ("before", "after")}
    assert set(keys) == expected


RESPONSES = [("1", 0.9, 10), ("2", 0.3, 20), ("1", 0.8, 30), (None, 0.5, 40)]


@pytest.fixture
def evaluated(tmp_path: Path) -> Callable[..., dict]:
    """An evaluation of recorded pools into the folder ``out`` that draws little."""
    draws = {"num_reshuffles": 1, "num_resamples": 5}
    return lambda pools, **more: run_evaluate(pools=pools, **{"output_dir": str(tmp_path / "out"), **draws, **more})


def _write(path: Path, *, num_questions: int, prefix: str = "t", shift: int = 0, confidence: bool = True) -> str:
    """Write a pool of number questions; every third question is mostly wrong, and lengths and confidences vary."""

    def response(number: int, index: int) -> dict:
        text, p_true, tokens = RESPONSES[(index + number + shift) % 4]
        text = "3" if text == "1" and number % 3 == 0 else text
        # A little noise, so that the parts of a fusion are no copies of one another.
        spread = ((7 * number + 3 * index) % 10) / 50.0
        values = {"p_true": p_true - spread / 2, "sequence_logprob": -tokens / 8 - spread}
        return {"text": "", "answer": text, "tokens": tokens, **({"confidence": values} if confidence else {})}

    rows = {f"{prefix}{number}": [response(number, index) for index in range(4)] for number in range(num_questions)}
    return str(write_number_pool(path, rows))


def test_evaluate_pools_writes_tables_figures_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    pools = {
        "base": _write(tmp_path / "base.jsonl", num_questions=12),
        "calibrated": _write(tmp_path / "after.jsonl", num_questions=12, shift=1),
    }
    own = {side: _write(tmp_path / f"c_{side}.jsonl", num_questions=20, prefix="c") for side in pools}
    results = run_evaluate(
        output_dir=str(tmp_path / "out"), pools=pools, calibration_pools=own, num_reshuffles=2, num_resamples=30,
        strategies=["adaptive_consistency", "early_stopping"], training_cost=TrainingCost(generated_tokens=100.0),
        tables="full",
    )  # fmt: skip
    folder = tmp_path / "out"
    assert results == json.loads((folder / "results.json").read_text())
    assert results["settings"]["pools"] == pools
    assert results["settings"]["num_reshuffles"] == 2
    # One of four responses is unreadable; of the others two are right, but none where the number is divisible by 3.
    assert results["own.test.unreadable.before"] == pytest.approx(0.25)
    assert results["own.test.pass_at_1.after"] == pytest.approx(2 / 4 * 8 / 12)
    strategies = results["strategies"]["test"]
    assert {row["contender"]["confidence"] for row in strategies["budgets"]} == {
        None, "p_true", "sequence_logprob_platt", "fused",
    }  # fmt: skip
    assert strategies["break_even"]
    for name in [*results["files"], *results["fitted_files"], "results.csv", "reliability.png"]:
        assert (folder / name).stat().st_size > 0, name
    assert "fitted/base/fused.json" in results["fitted_files"]
    lines = (folder / "curves.csv").read_text().splitlines()
    assert lines[0].startswith("test,side,strategy,confidence,parameter,setting,accuracy,")
    assert sum(line.startswith("test,base,self_consistency,,max_samples,") for line in lines) == 4
    printed = capsys.readouterr().out
    assert "25.0% of the responses unreadable, counted as wrong" in printed
    assert "break-even of 100 tokens" in printed
    assert "12 questions are too few to tell much." in printed.replace("\n", " ")
    # Nothing of an earlier evaluation is left that could be taken for a result of this one.
    given = str(folder / "fitted" / "base" / "fused.json")
    published = run_evaluate(output_dir=str(folder), pools={"base": pools["base"]}, protocol="paper")
    assert published["paper"]["test"]["base"]["confidence"] == "p_true"
    assert len((folder / "paper" / "test" / "base" / "aggregation_results.csv").read_text().splitlines()) == 9
    assert {file.name for file in folder.iterdir()} == {
        "evaluation.json", "results.json", "report.html", "fitted", "paper",
    }  # fmt: skip
    run_evaluate(
        output_dir=str(folder), pools={"base": pools["base"]}, scorers=[given], num_reshuffles=1, num_resamples=5,
        strategies=["early_stopping"],
    )  # fmt: skip
    assert not list(folder.rglob("metric.csv"))
    assert "begin with" in (printed := capsys.readouterr().out.replace("\n", " "))
    assert "results.md" not in printed.rpartition("begin with")[2]


def test_fitted_files_are_used_again_and_refused_on_their_questions(evaluated: Callable, tmp_path: Path) -> None:
    own = _write(tmp_path / "c.jsonl", num_questions=20, prefix="c")
    test = _write(tmp_path / "t.jsonl", num_questions=8)
    options = {"num_reshuffles": 2, "num_resamples": 20, "strategies": ["early_stopping"]}
    first = evaluated({"m": test}, calibration_pools={"m": own}, **options)
    fitted = tmp_path / "out" / "fitted" / "m"
    threshold = fitted / "thresholds" / "early_stopping_fused_budget_2.json"
    assert f"fitted/m/thresholds/{threshold.name}" in first["fitted_files"]
    given = {"scorers": [str(fitted / "fused.json")], "fitted_thresholds": [str(threshold)], "confidences": ["fused"]}
    second = evaluated({"m": test}, output_dir=str(tmp_path / "two"), **given, **options)
    (judged,) = second["fitted_thresholds"]
    chosen = [
        row for row in first["strategies"]["test"]["budgets"]
        if row["budget"] == 2 and row["contender"] == {
            "side": "m", "strategy": "early_stopping", "confidence": "fused", "is_oracle": False,
        }
    ]  # fmt: skip
    # The same threshold on the same questions and orders says the same.
    assert judged["accuracy"] == pytest.approx(chosen[0]["accuracy"])
    with pytest.raises(ValueError, match="was not fitted on, but got"):
        evaluated({"m": own}, output_dir=str(tmp_path / "three"), **given, **options)


def test_a_risk_threshold_is_held_against_its_promise(evaluated: Callable, tmp_path: Path) -> None:
    own = _write(tmp_path / "c.jsonl", num_questions=40, prefix="c")
    test = _write(tmp_path / "t.jsonl", num_questions=9)
    strategy = SelfConsistency(max_samples=4)
    fitted = fit_risk_threshold(strategy, load_pool(own), risk=0.9, delta=0.2)
    fitted.save(tmp_path / "risk.json")
    options = {"strategies": ["self_consistency"], "fitted_thresholds": [str(tmp_path / "risk.json")]}
    (judged,) = evaluated({"m": test}, **options)["fitted_thresholds"]
    verdicts = [replay(strategy, entry) for entry in load_pool(test)]
    answered = [verdict for verdict in verdicts if fitted.answers(verdict)]
    assert judged["answered"]["value"] == pytest.approx(len(answered) / 9)
    assert judged["wrong_among_them"]["value"] == pytest.approx(sum(not v.correct for v in answered) / len(answered))
    assert (judged["promised_risk"], judged["samples"]) == (0.9, 4.0)
    with pytest.raises(ValueError, match="to be at most the 3 samples that every question has, but got 4"):
        evaluated({"m": test}, max_samples=3, **options)


def test_pool_without_confidences_runs_what_counts(
    evaluated: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    path = _write(tmp_path / "bare.jsonl", num_questions=5, confidence=False)
    results = evaluated({"m": path})
    strategies = {row["contender"]["strategy"] for row in results["strategies"]["test"]["budgets"]}
    assert "adaptive_consistency" in strategies
    assert "early_stopping" not in strategies
    # Per question two of four are right, or none (numbers 0 and 3 of five).
    assert results["own.test.pass_at_1.m"] == pytest.approx(2 / 4 * 3 / 5)
    assert "not run for want of a confidence: early_stopping" in capsys.readouterr().out.replace("\n", " ")
    unlabelled = tmp_path / "unlabelled.jsonl"
    unlabelled.write_text(Path(path).read_text().replace('"reference": "1"', '"reference": null'))
    with pytest.raises(ValueError, match="a reference answer, but 't0' has none"):
        evaluated({"m": str(unlabelled)}, strategies=[])


@pytest.mark.parametrize("sides", [["m"], ["before", "after"]])
def test_without_resamples_there_are_all_values_and_no_intervals(sides: list[str], tmp_path: Path) -> None:
    path = _write(tmp_path / "pool.jsonl", num_questions=6)
    options = {"pools": dict.fromkeys(sides, path), "strategies": []}
    # The interval of one resample leaves the value out.
    found, _, full = (run_evaluate(output_dir=str(tmp_path / f"{n}"), num_resamples=n, **options) for n in (0, 1, 5))
    ends = sides if len(sides) == 1 else [*sides, "change"]
    for key in (f"own.test.{metric}.{end}" for metric in METRICS for end in ends):
        assert (found[key], found[f"{key}.low"]) == (full[key], None)
    (sentence,) = verdict(found)
    assert ("without resampling no change is clear" in sentence) == (len(sides) == 2)


@pytest.mark.parametrize("sides", [["m"], ["base", "calibrated"]])
def test_a_pool_is_summarised_by_the_confidence_that_it_has(
    sides: list[str], evaluated: Callable, tmp_path: Path
) -> None:
    """Responses made elsewhere bring a probability of another name, and not all of them do."""
    pools = {}
    for shift, side in enumerate(sides):
        path = Path(_write(tmp_path / f"{side}.jsonl", num_questions=6, shift=shift))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for index, response in enumerate(line["responses"]):
                confidence = response.pop("confidence")
                response["confidence"] = {"judge": confidence["p_true"]} if index else {}
        pools[side] = str(write_lines(path, *lines))
    results = evaluated(pools)
    for side, part in zip(sides, ["before", "after"] if len(sides) == 2 else sides, strict=True):
        (row,) = [r for r in results["strategies"]["test"]["confidences"][side] if r["name"] == "judge"]
        assert results[f"own.test.confidence.{part}"] == "judge"
        assert results[f"own.test.without_confidence.{part}"] == row["num_left_out"] == 6
        values = [s.confidences["judge"] for e in load_pool(pools[side]) for s in e.samples if "judge" in s.confidences]
        assert results[f"own.test.mean_confidence.{part}"] == pytest.approx(sum(values) / len(values))
        assert results[f"own.test.ece.{part}"] == pytest.approx(row["ece"])
        assert results[f"own.test.auroc.{part}"] == pytest.approx(row["auroc"])
        right = [s.correct for e in load_pool(pools[side]) for s in e.samples]
        assert results[f"own.test.pass_at_1.{part}"] == pytest.approx(sum(right) / len(right)), "of all responses"
    assert ("6 of 24 responses have no confidence" in verdict(results)[0]) == (len(sides) == 1)


def test_each_of_three_systems_has_its_sentence(
    evaluated: Callable, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    evaluated({side: _write(tmp_path / f"{side}.jsonl", num_questions=6) for side in ("a", "b", "c")}, strategies=[])
    told = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("test, ")]
    assert told == ["test, a", "test, b", "test, c"]


def test_options_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({}, "`before` alone .* one `model`, or recorded `pools`"),
        ({"after": "bundled"}, "after='bundled'"),
        ({"model": "bundled"}, "`tests`"),
        ({"pools": {"m": "x"}, "before": "bundled"}, "`before`"),
        ({"pools": {"m": "x"}, "engine": EngineSettings(dtype="float32")}, "no `engine` beside pools"),
        ({"pools": {"m": "x"}, "protocol": "paper", "strategies": ["cisc"]}, "no `strategies` .* published protocol"),
        ({"model": "m", "protocol": "paper", "calibration": TestSet("c", "gsm8k")}, "no `calibration` .* published"),
        ({"pools": {"m": "x"}, "strategies": [], "fitted_thresholds": ["t.json"]}, "no `fitted_thresholds` .*empty"),
        ({"pools": {"m": "x"}, "fusion_target": "ssc"}, "calibration questions with `fusion_target` 'ssc'"),
    ):
        monkeypatch.setattr("selfcal_lightning.commands.evaluate.load_scorers", list)
        monkeypatch.setattr(FittedThreshold, "load", str)
        with pytest.raises(ValueError, match=message):
            run_evaluate(output_dir=str(tmp_path), **options)


def test_pools_that_cannot_be_compared_or_fill_a_budget_are_refused(evaluated: Callable, tmp_path: Path) -> None:
    one, other = (_write(tmp_path / f"{prefix}.jsonl", num_questions=4, prefix=prefix) for prefix in "ab")
    for name, values in {"budgets": [2, 5], "targets": [8]}.items():
        with pytest.raises(ValueError, match=f"`{name}` to be at most 4, .* got {values[-1]}"):
            evaluated({"m": one}, **{name: values})
    for strategies in ([], ["early_stopping"]):
        with pytest.raises(ValueError, match="got 8 that only one of 'base' and 'calibrated' has, such as 'a0'"):
            evaluated({"base": one, "calibrated": other}, strategies=strategies)


def test_calibration_questions_are_known_by_their_content(evaluated: Callable, tmp_path: Path) -> None:
    test = Path(_write(tmp_path / "t.jsonl", num_questions=8))
    lines = [json.loads(line) for line in test.read_text().splitlines()]
    renamed = write_lines(tmp_path / "c.jsonl", *({**line, "id": f"other-{line['id']}"} for line in lines[:5]))
    message = "calibration questions of 'm' and test set 'test' .* 5 in both, for example 'other-t0' and 't0'"
    with pytest.raises(ValueError, match=message):
        evaluated({"m": str(test)}, calibration_pools={"m": str(renamed)}, strategies=["early_stopping"])
    # What was fitted elsewhere on these questions is refused likewise.
    scaler = fit_scaler(load_pool(renamed), "platt", name="calm")
    scaler.save(tmp_path / "calm.json")
    with pytest.raises(ValueError, match="'calm' was not fitted on, but got 5 of 8 that it was, such as 't0'"):
        evaluated({"m": str(test)}, scorers=[str(tmp_path / "calm.json")], strategies=["early_stopping"])


def test_one_question_under_two_ids_is_set_aside_as_one(tmp_path: Path) -> None:
    path = Path(_write(tmp_path / "pool.jsonl", num_questions=12))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, *({**line, "id": f"{line['id']}{twin}"} for line in lines for twin in "ab"))
    inputs = split_off_calibration(Inputs({"test": {"m": load_recorded_pool(path)}}, {}), 0.5)
    test, aside = (
        {e.question.id[:-1] for e in pools["m"].entries} for pools in (inputs.tests["test"], inputs.calibration)
    )
    assert len(test) == len(aside) == 6
    assert not test & aside
    first, second = ({e.question.id[:-1] for e in half} for half in halve_pool(load_pool(path)))
    assert not first & second


def test_a_file_is_not_sampled_as_test_and_calibration(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "q.jsonl", *({"question": f"{i} + {i}?", "answer": 2 * i} for i in range(9)))
    options = {"task": "local_number", "path": str(file)}
    with pytest.raises(ValueError, match="`calibration` and test set 'id' to share no question, but got 9 in both"):
        run_evaluate(
            output_dir=str(tmp_path / "out"), model="bundled", tests=[TestSet("id", split="test", **options)],
            calibration=TestSet("cal", split="calibration", **options),
        )  # fmt: skip
    assert not (tmp_path / "out" / "samples").exists()


def test_share_set_aside_for_calibration(evaluated: Callable, tmp_path: Path) -> None:
    path = _write(tmp_path / "pool.jsonl", num_questions=20)
    options = {"strategies": ["adaptive_consistency"], "confidences": ["fused"]}
    results = evaluated({"m": path}, calibration_share=0.4, **options)
    assert results["strategies"]["test"]["num_questions"] == 12
    fitted = json.loads((tmp_path / "out" / "fitted" / "m" / "fused.json").read_text())
    assert fitted["fitted_on"]["num_questions"] == 4


def test_a_smaller_evaluation_in_the_same_folder_reads_what_it_asks_for(tmp_path: Path) -> None:
    for limit, number in ((3, 3), (2, 2)):
        tests = [TestSet("id", "word_problems", "test_id", limit=limit)]
        options = nested(num_samples=number, max_new_tokens=8, num_resamples=0, strategies=[])
        results = run_evaluate(model="bundled", output_dir=str(tmp_path), tests=tests, **options)
        counts = results["own.id.num_questions.model"], results["own.id.num_responses.model"]
        assert counts == (limit, limit * number)


def _keys(metric: str, before: float, after: float, low: float, high: float) -> dict[str, float]:
    own = f"own.t.{metric}"
    ends = {f"{own}.before": before, f"{own}.after": after, f"{own}.change": after - before}
    return ends | {f"{own}.change.low": low, f"{own}.change.high": high}


UNCLEAR = [f"no clear change of {what}" for what in ("calibration", "ranking", "weighted")]


@pytest.mark.parametrize(
    ("ece", "auroc", "votes", "expected"),
    [
        ((-0.2, -0.1), (0.01, 0.3), (0.01, 0.1), ["better calibration", "better ranking", "better weighted"]),
        ((0.1, 0.2), (-0.3, -0.1), (-0.2, -0.1), ["worse calibration", "worse ranking", "worse weighted votes of 4"]),
        ((-0.1, 0.1), (-0.1, 0.1), (0.0, 0.1), UNCLEAR),
    ],
)
def test_a_change_is_named_where_its_interval_has_no_zero(
    ece: tuple, auroc: tuple, votes: tuple, expected: list
) -> None:
    results = _keys("ece", 0.3, 0.2, *ece) | _keys("auroc", 0.6, 0.85, *auroc) | {"own.t.num_questions.before": 200}
    results |= _keys("weighted_votes_4", 0.5, 0.55, *votes) | _keys("weighted_votes_2", 0.5, 0.5, 0, 0)
    results |= {"own.t.weighted_votes_4.change": 0.05, "own.t.weighted_votes_2.change": 0.0}
    (sentence,) = verdict(results)
    assert all(words in sentence for words in [*expected, "(ECE .300 -> .200)", "(AUROC .600 -> .850)"])
    assert "too few" not in sentence
    assert "within a question" not in sentence
    (sentence,) = verdict(results | _keys("within_question_auroc", 0.87, 0.83, -0.07, -0.01))
    assert "worse ranking within a question (AUROC .870 -> .830)" in sentence


def test_few_questions_and_unknown_numbers_are_said() -> None:
    numbers = {"own.t.ece.{}": 0.1, "own.t.ece.{}.low": 0.0, "own.t.auroc.{}": None, "own.t.num_questions.{}": 8}
    for side in ("llama", "qwen2.5", "before"):  # a test set of one of two pools alone has no after
        (sentence,) = verdict({key.format(side): value for key, value in numbers.items()})
        few = "8 questions are too few to tell much."
        assert sentence == f"t, {side}: ECE .100, AUROC unknown, pass@1 unknown; {few}"


@pytest.mark.slow
def test_evaluate_runs_on_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tests = [TestSet("id", "word_problems", "test_id", limit=6), TestSet("ood", "word_problems", "test_ood", limit=4)]
    arguments = {"num_samples": 3, "max_new_tokens": 120, "num_resamples": 50, "num_reshuffles": 3, "tables": "short"}
    calibration = TestSet("calibration", "word_problems", "calibration", limit=8)
    results = run_evaluate("bundled", "bundled", str(tmp_path), tests, calibration=calibration, **nested(**arguments))
    assert results == json.loads((tmp_path / "results.json").read_text())
    for test in ("id", "ood"):
        same = {
            (row["contender"]["strategy"], row["contender"]["confidence"], row["budget"], row["accuracy"]["value"])
            for row in results["strategies"][test]["budgets"]
        }
        # Both sides are the same model with the same samples, so that they do the same.
        assert len(same) == len(results["strategies"][test]["budgets"]) / 2
    assert results["own.id.num_responses.before"] == 18
    # The same model with the same seeds on both sides: nothing changes.
    assert results["own.id.ece.change"] == pytest.approx(0.0)
    assert (tmp_path / "reliability.png").stat().st_size > 10_000
    # One sample costs its tokens, and those of the confidence query only where P(True) is read.
    cost = {
        row["contender"]["confidence"]: row["tokens"]["value"]
        for row in results["strategies"]["id"]["budgets"]
        if (row["contender"]["strategy"], row["contender"]["side"], row["budget"]) == ("self_consistency", "before", 1)
    }
    suffix = SampleStore(tmp_path / "samples" / "before").round_manifest().fingerprint.prompt.suffix_ids
    assert cost["p_true"] - cost[None] == pytest.approx(len(suffix))
    assert cost["sequence_logprob_platt"] == pytest.approx(cost[None])
    printed = capsys.readouterr().out
    assert "The same responses, scored by both" in printed
    assert "6 questions of id, 4 questions of ood; 3 samples each." in printed
    assert "id, before" in printed
    assert (tmp_path / "report.html").is_file()
