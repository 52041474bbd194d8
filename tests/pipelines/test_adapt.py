"""``selfcal adapt``: rounds, export and evaluation in one command, which goes on where it was stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.errors import InputError
from selfcal_lightning.evaluation.adaptation.fitting import Adaptation, fit_settings
from selfcal_lightning.evaluation.adaptation.questions import QuestionSlice
from selfcal_lightning.pipelines.adaptation.adapt import run_adapt
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.store.sample_store import SampleStore

ADAPTED = QuestionSlice("word_problems", split="test_id", limit=3)
OTHERS = QuestionSlice("word_problems", split="test_id", offset=3, limit=2)


def adapt(folder: Path, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "inductive": OTHERS, "reward": "vote_share", "target": "anchor", "num_samples": 4, "batch_size": 12, "lr": 1e-3,
        "evaluation_samples": 2, "temperatures": [], "sampling": SamplingSettings(max_new_tokens=80),
        "guard": {"agreement": 1.0, "unreadable": 1.0, "logprob_fall": 9.0},
        "fit_options": {"trainer": {"accelerator": "cpu"}, "data": {"max_length": 320}}, **changes,
    }  # fmt: skip
    return run_adapt(ADAPTED, str(folder), **settings)


def of(reward: str = "majority", **changes: Any) -> Adaptation:
    settings: dict[str, Any] = {
        "base_model": "m", "revision": None, "questions": ADAPTED, "reward": reward, "target": None, "selection": None,
        "store_dir": None, "rounds": 1, "num_samples": 4, "batch_size": 8, "lr": 1e-3, "max_new_tokens": 9, "seed": 0,
        **changes,
    }  # fmt: skip
    return Adaptation(**settings)


def test_rounds_are_drawn_from_the_policy_and_options_override(tmp_path: Path) -> None:
    options = {"model": {"kl": 0.1}, "trainer.devices": 2}
    settings = fit_settings(of(rounds=3), tmp_path, engine=EngineSettings(), guard={"agreement": 0.3}, options=options)
    generation, guard, *_ = settings["trainer"]["callbacks"]
    assert generation["init_args"]["sampling"] == {
        "temperature": 1.0, "edt_scale": None, "top_p": 1.0, "max_new_tokens": 9,
    }  # fmt: skip
    assert guard["init_args"]["agreement"] == 0.3
    assert settings["model"]["init_args"]["kl"] == 0.1
    assert (settings["trainer"]["devices"], settings["trainer"]["max_epochs"]) == (2, 3)
    assert settings["data"]["init_args"]["regenerate_every_n_epochs"] == 1
    with pytest.raises(InputError, match=r"`fit_options` without `model\.reward`"):
        fit_settings(of(), tmp_path, engine=EngineSettings(), guard={}, options={"model": {"reward": "ssc"}})
    one = fit_settings(of("entropy"), tmp_path, engine=EngineSettings(), guard={}, options={})["data"]["init_args"]
    assert (one["train"], one["regenerate_every_n_epochs"]) == ([], None)


def test_what_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for changes, message in (
        ({"rounds": 0}, "`rounds`"),
        ({"reward": "entropy", "rounds": 2}, "`rounds: 1` with `reward: entropy`"),
        ({"reward": "none", "selection": "s"}, "`store_dir` with a `selection`"),
        ({"inductive": ADAPTED}, "share no question"),
        ({"reward": "votes"}, "vote_share"),
    ):
        with pytest.raises(InputError, match=message):
            adapt(tmp_path / "adapt", **changes)
    assert not (tmp_path / "adapt").exists()


@pytest.mark.slow
def test_an_adaptation_from_end_to_end_goes_on_from_what_is_there(tmp_path: Path, capsys: Any) -> None:
    result = adapt(tmp_path)
    assert json.loads((tmp_path / "adaptation.json").read_text()) == result
    assert list(result["sets"]) == ["transductive", "inductive"]
    assert (result["reads_reference"], result["stopped"]) == (False, [])
    assert result["not_measured"] == ["out_of_domain"]
    assert "no such questions were named: out_of_domain." in (tmp_path / "adaptation.md").read_text()
    assert list(result["rounds"]) == ["0", "1", "2"]
    assert result["rounds"]["1"]["label_accuracy"] is not None
    assert result["rounds"]["2"]["logprob_fall"] is not None
    assert SampleStore(tmp_path / "samples").index(round=1).correct.tolist() != []
    for round in (0, 1):
        index = SampleStore(tmp_path / "samples").index(round=round)
        assert all(value != value for value in index.correct), "no gold answer is written beside the rounds"
    rows = result["sets"]["transductive"]["rows"]
    assert any("as many tokens as the adaptation" in name for name in rows)
    assert "| transductive (3) | adapted |" in (tmp_path / "adaptation.md").read_text()

    (tmp_path / "adaptation.json").unlink()
    capsys.readouterr()
    assert adapt(tmp_path) == result
    assert "Training was done before" in capsys.readouterr().err
    with pytest.raises(InputError, match=r"`model.init_args.lr` was 0\.001 and is 0\.1"):
        adapt(tmp_path, lr=0.1)
