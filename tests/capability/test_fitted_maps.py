"""Maps of capabilities: fitted once, kept in a file, applied by name, and refused where they do not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.capability_pools import capability_store, give_states

from selfcal_lightning.capability import fitted_maps
from selfcal_lightning.capability.fitted_maps import fit_capability_maps, load_maps
from selfcal_lightning.capability.scoring import QuestionScore, read_scores, write_scores
from selfcal_lightning.cli import run
from selfcal_lightning.commands.capability import (
    run_allocate,
    run_fit_capability_maps,
    run_fit_probe,
    run_map_scores,
    run_predict_pass_at_k,
    run_score_questions,
)
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import sealed


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose calibration questions have values, maps of these, and scores of other questions."""
    folder = tmp_path_factory.mktemp("maps")
    store, probe = str(capability_store(folder / "store")), str(folder / "probe")
    give_states(folder / "store")
    run_fit_probe(store, probe)
    run_score_questions(probe=probe, store_dir=store, split="calibration")
    run_score_questions(probe=probe, store_dir=store, split="test", name="asked", output=str(folder / "scores.jsonl"))
    run_fit_capability_maps(store, str(folder / "maps.json"))
    return folder


def test_a_file_gives_what_was_fitted(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = load_maps(written / "maps.json")
    assert (kept.estimator, kept.fitted_on.num_questions) == ("probe", 24)
    assert kept.maps.per_k.k == tuple(range(1, 9))
    again = run_fit_capability_maps(str(written / "store"), str(tmp_path / "again.json"), ks=[2, 99])
    assert again.maps.per_k.k == (2,), "eight responses say nothing of 99"
    assert again.maps.inflated == kept.maps.inflated
    assert "Fitted on 24 questions: an isotonic map" in capsys.readouterr().out


def test_maps_are_those_of_the_functions() -> None:
    rng = np.random.default_rng(0)
    p = rng.uniform(0.05, 0.95, size=30)
    correct, samples = rng.binomial(8, p), np.full(30, 8)
    maps, other = fit_capability_maps(p, correct, samples, ks=[1, 4]), np.array([0.1, 0.6, 0.3])
    x, y = fitted_maps.isotonic_knots(p, correct / 8)
    np.testing.assert_allclose(maps.apply("isotonic", other), np.interp(other, x, y))
    np.testing.assert_allclose(maps.apply("quantile", other), fitted_maps.quantile_mapping(other, correct / 8))
    ways = maps.pass_at_k(other, (1, 2))
    concentration = fitted_maps.fit_concentration(p, correct, samples)
    np.testing.assert_allclose(ways["beta"][1], fitted_maps.beta_pass_at_k(other, 2, concentration=concentration))
    inflated = fitted_maps.fit_inflated_beta(p, correct, samples)
    np.testing.assert_allclose(ways["inflated_beta"][1], inflated.pass_at_k(other, 2))
    assert np.isnan(ways["maps"][1]).all()
    assert not np.isnan(ways["maps"][0]).any()
    with pytest.raises(InputError, match="`map` to be one of isotonic, quantile"):
        maps.apply("isotone", other)  # type: ignore[arg-type]


def test_scores_are_mapped_by_name(written: Path, tmp_path: Path) -> None:
    scores, maps = str(written / "scores.jsonl"), load_maps(written / "maps.json").maps
    plain = np.array([one.capability for one in read_scores(scores)])
    for name in ("isotonic", "quantile"):
        output = str(tmp_path / f"{name}.jsonl")
        mapped = run_map_scores(scores, str(written / "maps.json"), output, map=name)  # type: ignore[arg-type]
        np.testing.assert_allclose([one.capability for one in read_scores(output)], maps.apply(name, plain))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="another probe, model or query than the values 'probe'"):
            run_map_scores(output, str(written / "maps.json"), str(tmp_path / "twice.jsonl"))
    assert len({one.scored_by for one in mapped}) == 1


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


def test_maps_do_not_judge_their_own_questions(written: Path, tmp_path: Path) -> None:
    write_scores(tmp_path / "own.jsonl", [QuestionScore("word_problems/calibration/000000", "t", "?", 0.5)])
    with pytest.raises(InputError, match="'maps of probe' was not fitted on, but got 1 of 1"):
        run_map_scores(str(tmp_path / "own.jsonl"), str(written / "maps.json"), str(tmp_path / "out.jsonl"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": 9}, "of version 9"),
        ({"inflated": {}}, "to hold whole maps, but got TypeError"),
        ({"knots": None}, "to hold whole maps, but got TypeError"),
    ],
)
def test_other_files_are_refused(written: Path, tmp_path: Path, changed: dict[str, Any], words: str) -> None:
    record = json.loads((written / "maps.json").read_text())
    (tmp_path / "maps.json").write_bytes(sealed({**record, **changed}))
    with pytest.raises(InputError, match=words):
        load_maps(tmp_path / "maps.json")


def test_the_command_line(written: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    maps, out = str(tmp_path / "maps.json"), str(tmp_path / "mapped.jsonl")
    assert run(["fit-capability-maps", "--pool", str(written / "store"), "--output", maps, "--ks", "[1,4]"]) == 0
    assert run(["map-scores", "--scores", str(written / "scores.jsonl"), "--maps", maps, "--output", out]) == 0
    assert "isotonic: mean capability" in capsys.readouterr().out
    assert run(["map-scores", "--scores", out, "--maps", str(tmp_path / "no.json"), "--output", f"{out}.2"]) == 1
    assert "`maps`: there is no file" in capsys.readouterr().err
