"""The clients that people use ask the server by their own means, from a virtual environment of their own."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from support.clients import needs_clients, run_client, run_inspect, run_lm_eval, write_tasks
from support.serving import QUESTION, Server

import selfcal_lightning as sc

pytestmark = [pytest.mark.slow, needs_clients]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Greedy, since inspect-ai's log says temperature 0 where its request says nothing.
    options = ("--task", "word_problems", "--sampling.temperature", "0", "--sampling.edt_scale", "null")
    made = Server(options, log=tmp_path_factory.mktemp("clients") / "log", key="a-key")
    yield made
    assert made.end() == 0


OPENAI = f"""
import json
from openai import BadRequestError, NotFoundError, OpenAI
client = OpenAI(max_retries=0)
ask = dict(model="bundled", messages=[{{"role": "user", "content": {QUESTION!r}}}], temperature=0)
whole = client.chat.completions.create(**ask)
stream = list(client.chat.completions.create(**ask, stream=True, stream_options={{"include_usage": True}}))
text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
assert text == whole.choices[0].message.content
assert stream[-1].usage == whole.usage
assert stream[-2].selfcal == whole.selfcal
vote = client.chat.completions.create(**ask | {{"temperature": 1}}, extra_body={{"selfcal": {{"max_samples": 3}}}})
raw = client.chat.completions.with_raw_response.create(**ask)
for error, change in ((BadRequestError, {{"n": 2}}), (NotFoundError, {{"model": "other"}})):
    try:
        client.chat.completions.create(**ask | change)
        raise SystemExit(f"no {{error}}")
    except error as refused:
        assert refused.body["message"]
print(json.dumps([text, whole.selfcal, vote.selfcal["samples_used"], raw.headers["x-selfcal-confidence"],
                  [m.id for m in client.models.list()]]))
"""

LITELLM = f"""
import json, litellm
ask = dict(model="openai/bundled@early_stopping:0.9", messages=[{{"role": "user", "content": {QUESTION!r}}}])
whole = litellm.completion(**ask, extra_body={{"selfcal": {{"seed": 1, "max_samples": 3}}}})
stream = litellm.completion(**ask, extra_body={{"selfcal": {{"seed": 1, "max_samples": 3}}}}, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
assert text == whole.choices[0].message.content
print(json.dumps([text, whole.usage.completion_tokens]))
"""


def test_the_openai_client(server: Server, tmp_path: Path) -> None:
    text, selfcal, samples, header, models = json.loads(run_client(server, tmp_path, "python", "-c", OPENAI))
    assert text.endswith("The answer is 286.")
    assert float(header) == pytest.approx(selfcal["confidence"], abs=1e-6)
    assert (1 <= samples <= 3, models) == (True, ["bundled"])


def test_litellm(server: Server, tmp_path: Path) -> None:
    text, tokens = json.loads(run_client(server, tmp_path, "python", "-c", LITELLM).splitlines()[-1])
    assert "answer is" in text
    again = server.chat(QUESTION, model="bundled@early_stopping:0.9", selfcal={"seed": 1, "max_samples": 3})
    assert tokens == again.json["usage"]["completion_tokens"] > 0


def accuracy_of_the_library(asked: list[dict[str, str]]) -> float:
    """Return the share of greedy answers that are right, without a server."""
    sampling = sc.SamplingSettings(temperature=0.0, edt_scale=None, max_new_tokens=120)
    return fmean(bool(found.correct) for found in sc.answer("bundled", asked, max_samples=1, sampling=sampling))


def test_inspect_ai(server: Server, tmp_path: Path) -> None:
    asked = write_tasks(tmp_path, questions=12)
    run_inspect(server, tmp_path, "--temperature", "0", "--log-format", "json")
    (log,) = (tmp_path / "logs").glob("*.json")
    (score,) = json.loads(log.read_text())["results"]["scores"]
    assert score["metrics"]["accuracy"]["value"] == pytest.approx(accuracy_of_the_library(asked))


def test_lm_eval(server: Server, tmp_path: Path) -> None:
    greedy = {"until": ["\n\n"], "max_gen_toks": 120, "temperature": 0, "do_sample": False}
    asked = write_tasks(tmp_path, questions=12, generation_kwargs=greedy)
    run_lm_eval(server, tmp_path)
    (found,) = (tmp_path / "out").rglob("results_*.json")
    accuracy = json.loads(found.read_text())["results"]["words"]["exact_match,number"]
    assert accuracy == pytest.approx(accuracy_of_the_library(asked))
