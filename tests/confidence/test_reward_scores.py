import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from support.recorded_pools import NUM_QUESTIONS, NUM_SAMPLES, confidences_of
from support.reward_models import stand_in
from support.store_samples import write_number_pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.fit_confidence import run_fit_threshold
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.registry import REWARDS
from selfcal_lightning.core import plugins
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import aggregate
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.inference.choices import check_sampled_alike
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.inference.voting import BestOfN
from selfcal_lightning.rewards.formats import REWARD_FORMATS, reward_format
from selfcal_lightning.rewards.reading import open_rewards

TOTAL = NUM_QUESTIONS * NUM_SAMPLES
STEPS = ["prm", "prm_min", "prm_prod"]


@pytest.fixture(scope="module")
def prm(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> RewardSettings:
    format = reward_format("math-shepherd")
    folder = stand_in(tiny_model, tmp_path_factory.mktemp("prm") / "m", format)
    return RewardSettings(folder, format.name, "sentence")


def test_scores_lie_beside_the_rows_and_choose_the_best_of_n(store: Path, prm: RewardSettings) -> None:
    arguments = ["score", "--store_dir", str(store), "--estimator", json.dumps(STEPS), "--reward.model", str(prm.model)]
    assert run([*arguments, "--reward.format", "math-shepherd", "--reward.steps", "sentence"]) == 0
    assert annotation_names(store) == STEPS
    rows = [row for question in open_rewards(prm).read(list(SampleStore(store).samples())) for row in question]
    assert sum(row is not None and len(row) > 1 for row in rows) > TOTAL // 2
    for name, how in zip(STEPS, ("last", "min", "prod"), strict=True):
        expected = [np.nan if row is None else aggregate(row, how) for row in rows]
        assert confidences_of(store, name) == pytest.approx(expected, abs=1e-5, nan_ok=True)
    pool = list(SampleStore(store).samples(confidences=["prm"]))
    strategy = BestOfN(max_samples=NUM_SAMPLES, confidence="prm")
    for entry in pool:
        readable = [sample for sample in entry.samples if sample.answer is not None]
        best = max(readable, key=lambda sample: confidence_of(sample, "prm") or 0.0)
        assert replay(strategy, entry).answer == best.answer


def test_equal_runs_reuse_what_is_there(store: Path, prm: RewardSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = run_score("prm", str(store), reward=prm)
    assert (first.scored, first.encoded) == (TOTAL, TOTAL)
    monkeypatch.setattr(
        "selfcal_lightning.rewards.reading.open_rewards", Mock(side_effect=AssertionError("nothing has to be loaded"))
    )
    (again,) = run_score("prm", str(store), reward=prm)
    assert (again.reused, again.scored) == (TOTAL, 0)
    with pytest.raises(ValueError, match="prm"):
        run_score("prm", str(store), reward=RewardSettings(prm.model, prm.format, "line"))
    with pytest.raises(ValueError, match="bring 'p_true' of another model"):
        run_score("prm", str(store), reward=prm, name="p_true")


def test_a_threshold_on_rewards_is_for_the_model_of_its_fit(store: Path, prm: RewardSettings, tmp_path: Path) -> None:
    run_score("prm", str(store), reward=prm)
    file = str(tmp_path / "t.json")
    run_fit_threshold(str(store), file, confidence="prm", budget=2.0, split=None, use_all=True)
    fitted, drawn = FittedThreshold.load(file), SampleStore(store).round_manifest().fingerprint
    check_sampled_alike(fitted, drawn, rewards={"prm": REWARDS.identity(prm)})
    with pytest.raises(ValueError, match=r"rewards\.prm\.steps: 'sentence' at the fit, 'line' now"):
        check_sampled_alike(fitted, drawn, rewards={"prm": REWARDS.identity(replace(prm, steps="line"))})


def test_a_model_trained_here_reads_the_recorded_tokens(store: Path, tiny_model: str, tmp_path: Path) -> None:
    format = reward_format("quantile-prm")
    reward = RewardSettings(stand_in(tiny_model, tmp_path / "m", format), format.name, "sentence")
    (report,) = run_score("prm", str(store), reward=reward)
    assert (report.scored, report.encoded) == (TOTAL, 0)


def test_a_score_without_a_probability_has_a_name_of_its_own(store: Path, tiny_model: str, tmp_path: Path) -> None:
    format = reward_format("sequence-classifier")
    outcomes = RewardSettings(stand_in(tiny_model, tmp_path / "orm", format), format.name)
    with pytest.raises(ValueError, match=r"'orm' cannot read .* responses without a probability\. Use reward\."):
        run_score("orm", str(store), reward=outcomes)
    with pytest.raises(ValueError, match="'prm' cannot read"):
        run_score("prm", str(store), reward=outcomes)
    (report,) = run_score("reward", str(store), reward=outcomes)
    assert (report.scored, report.unknown) == (TOTAL, 0)
    rows = [row for question in open_rewards(outcomes).read(list(SampleStore(store).samples())) for row in question]
    assert confidences_of(store, "reward") == pytest.approx([row[0] for row in rows if row is not None], abs=1e-5)


@pytest.fixture
def unplugged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take back what a plug-in registers, and what it leaves in this process."""
    before = dict(REWARD_FORMATS)
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    os.environ.pop(plugins.VARIABLE, None)
    REWARD_FORMATS.clear()
    REWARD_FORMATS.update(before)


PLUGIN = """
    from selfcal_lightning import RewardFormat, register_reward_format

    register_reward_format(
        RewardFormat(
            name="stars", judges="response", layout="pieces", layers=("stars",), num_outputs=3, link="softmax",
            right=(2,), bias=True, question="Q: {question} A: ",
        )
    )
"""


@pytest.mark.usefixtures("unplugged")
def test_a_format_of_a_plug_in_scores_a_pool(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    file = tmp_path / "stars.py"
    file.write_text(textwrap.dedent(PLUGIN))
    scored, texts = tmp_path / "scored.jsonl", ["So 0+1=1. The answer is 1.", "The answer is 3.", "   "]
    pool = write_number_pool(tmp_path / "pool.jsonl", {"q": [{"text": text} for text in texts]})
    arguments = ["score", "--pool", str(pool), "--output", str(scored), "--estimator", "orm"]
    arguments += ["--reward.format", "stars"]
    assert run([*arguments, "--reward.model", tiny_model]) == 1
    assert "Expected `reward.format` to be one of" in capsys.readouterr().err, "nobody has registered it"
    plugins.load_plugins([str(file)])
    folder = stand_in(tiny_model, tmp_path / "m", reward_format("stars"))
    assert run([*arguments, "--plugins", str(file), "--reward.model", folder]) == 0
    found = [one.get("confidence", {}).get("orm") for one in json.loads(scored.read_text())["responses"]]
    assert found[2] is None, "white space is no response"
    assert 0.0 < found[0] < 1.0
    assert found[0] != found[1]
    assert "orm: scored 3 of 3 responses (0 had it before); 1 got none" in capsys.readouterr().err


def test_empty_and_cut_responses_are_counted_or_scored_as_they_stand(prm: RewardSettings, tmp_path: Path) -> None:
    texts = ["34+75=109. The answer is 109.", "", "So 34+75=1"]
    pool = write_number_pool(tmp_path / "pool.jsonl", {"q": [{"text": text} for text in texts]})
    where = {"pool": str(pool), "output": str(tmp_path / "out.jsonl")}
    (report,) = run_score("prm", reward=prm, **where)
    assert (report.scored, report.unknown) == (3, 1)
    responses = json.loads((tmp_path / "out.jsonl").read_text())["responses"]
    scores = [response.get("confidence", {}).get("prm") for response in responses]
    assert [score is None for score in scores] == [False, True, False], "the cut one has a step, the empty one has none"
