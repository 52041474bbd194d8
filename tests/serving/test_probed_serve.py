import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.command_lines import Refused
from support.processes import free_port
from support.serving import QUESTION, Server
from support.strategy_pools import make_entry

from selfcal_lightning.confidence.live import open_tokens
from selfcal_lightning.confidence.response_probe import ResponseProbe
from selfcal_lightning.confidence.scaling import IsotonicMap
from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.confidence.splits import FittedOn
from selfcal_lightning.engines.opening import load_chat, open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.inference.stopping import EarlyStopping
from selfcal_lightning.inference.thresholds import fit_goal_threshold
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

VOTE = {"strategy": "self_consistency", "max_samples": 3, "seed": 7, "return": "all"}
STEPS = tuple(np.linspace(-3.0, 3.0, 7))


@pytest.fixture(scope="module")
def probe() -> ResponseProbe:
    """A probe with random weights, so that responses differ."""
    scoring = ScoringModel(ModelSettings("bundled", None, EngineOptions()))
    size = json.loads((Path(scoring.source) / "config.json").read_text())["hidden_size"]
    weights = tuple(np.random.default_rng(0).normal(size=2 * size) / size**0.5)
    chances = IsotonicMap(STEPS, tuple(np.linspace(0.0, 1.0, 7)))
    fitted_on = FittedOn("0", ("a", "b"), ("c", "d"), 16)
    return ResponseProbe(weights, 0.1, chances, "agreement", 1.0, 0.1, 0.2, scoring.probe_origin, fitted_on)


@pytest.mark.slow
def test_a_server_gives_the_confidences_of_a_probe(probe: ResponseProbe, tmp_path: Path) -> None:
    file, log = tmp_path / "probe.json", tmp_path / "log"
    probe.save(file)
    server = Server(("--task", "word_problems", "--probe", str(file)), log=log)
    reply = server.chat(QUESTION, selfcal=VOTE, max_tokens=60).selfcal
    options = EngineOptions()
    chat = load_chat(options, "bundled", query=DEFAULT_QUERY)
    engine = open_engine(options, "bundled", chat=chat)
    drawn = [
        Sample("q", i, 0, one["text"], chat.response_ids(one["text"]), "stop", None, None)
        for i, one in enumerate(reply["samples"])
    ]
    entry = QuestionSamples(Question("q", "word_problems", (Message("user", QUESTION),)), tuple(drawn), "live")
    (wanted,) = probe.score(open_tokens(engine, chat), [entry])
    engine.close()
    assert [one["confidence"] for one in reply["samples"]] == pytest.approx(wanted, abs=1e-4)
    assert len(set(wanted)) == 3

    one = server.chat(QUESTION, selfcal={"seed": 7, "max_samples": 1}, max_tokens=60).selfcal
    assert (one["source"], one["confidence"]) == ("response_probe", pytest.approx(wanted[0], abs=1e-4))
    assert one["calibration"] == {"method": "response_probe", "questions": 2, "ece": None}
    body = {"model": "bundled", "messages": [{"role": "user", "content": QUESTION}], "response": drawn[1].text}
    assert server.post("/v1/confidence", body).json["confidence"] == pytest.approx(wanted[1], abs=1e-4)
    early = server.chat(QUESTION, selfcal={"seed": 7, "threshold": 0.0}, max_tokens=60).selfcal
    assert (early["samples_used"], early["stop_reason"]) == (1, "early")

    decision = {"state": "", "questions": {"n": {"type": "noul"}}}
    assert server.post("/v1/systemone", decision).status == 501  # the states of one-token options do not differ

    replace(probe, map=IsotonicMap(STEPS, (0.25,) * 7)).save(file)
    server.send_signal(signal.SIGHUP)
    end = time.monotonic() + 30
    while server.post("/v1/confidence", body).json["confidence"] != 0.25:
        assert time.monotonic() < end
    replace(probe, origin={"model": {"weights_sha256": "another"}}).save(file)
    server.send_signal(signal.SIGHUP)  # is said, and what was there holds
    while "another model, adapter, template or query" not in log.read_text():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.post("/v1/confidence", body).json["confidence"] == 0.25
    assert server.end() == 0


def test_a_server_takes_no_probe_that_it_could_not_read(probe: ResponseProbe, here: Path, refused: Refused) -> None:
    serve = ["serve", "--model", "bundled", "--port", str(free_port()), "--probe", "probe.json"]
    assert "probe.json" in refused(serve)
    probe.save("probe.json")
    assert "hidden states" in refused([*serve, "--engine.name", "vllm"])
    assert "hidden states" in refused([*serve, "--engine.name", "openai", "--engine.base_url", "http://127.0.0.1:9/v1"])
    pool = [make_entry(["a", "a"], [0.2, 0.9], name=f"c{i}", gold="a") for i in range(4)]
    fit_goal_threshold(EarlyStopping(max_samples=2), pool, "budget", 2.0, [0.5]).save("threshold.json")
    assert "does not say which probe" in refused([*serve, "--threshold_file", "threshold.json"])
    replace(probe, origin={"model": {"weights_sha256": "another"}}).save("probe.json")
    assert "another model, adapter, template or query" in refused(serve)
