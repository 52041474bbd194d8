import json
import random
import time
from pathlib import Path

import pytest
from support.processes import run_forked, start_forked
from support.store_samples import write_lines

from selfcal_lightning.commands.serve import run_batch
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.serving.batch import answer_id, open_output
from selfcal_lightning.serving.settings import Limits, ServiceSettings

OTHER = '{"id": "batch_req_1", "custom_id": "b", "response": {"status_code": 200}}'
CHANGED = OTHER.replace('"b"', '"a"')


def write_requests(path: Path, number: int) -> None:
    lines = []
    for i, question in enumerate(get_task("word_problems").load("train", limit=number)):
        body = {"model": "bundled", "messages": [{"role": "user", "content": question.text}], "max_tokens": 80}
        body["selfcal"] = {"strategy": "self_consistency", "max_samples": 3}
        lines.append({"custom_id": f"q{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    lines[1]["body"]["n"] = 2
    lines[2]["url"] = "/v1/embeddings"
    write_lines(path, *lines)


def read_answers(path: Path) -> dict[str, dict]:
    # Texts do not depend on what else is in the batch; the last bits of a confidence do.
    lines = [json.loads(line, parse_float=lambda x: round(float(x), 4)) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    for line in lines:
        line["response"]["body"].pop("created", None)
    return {line["custom_id"]: line for line in lines}


def command(source: Path, target: Path) -> list[str]:
    own = ["-m", "selfcal_lightning", "batch", "--model", "bundled", "--task", "word_problems"]
    return [*own, "--input", str(source), "--output", str(target), "--engine.max_batch", "6"]


@pytest.mark.slow
def test_a_batch_that_was_killed_gives_what_an_unbroken_one_gives(tmp_path: Path) -> None:
    source, whole, broken = tmp_path / "in.jsonl", tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    write_requests(source, 24)
    said = tmp_path / "said.log"
    assert run_forked(command(source, whole), said) == 0
    expected = read_answers(whole)
    assert [expected[name]["response"]["status_code"] for name in ("q0", "q1", "q2")] == [200, 400, 400]
    assert "`n`" in expected["q1"]["response"]["body"]["error"]["message"]
    rng, kills = random.Random(3), 0
    while kills < 2:
        process = start_forked(command(source, broken), said)
        lines = len(broken.read_bytes().splitlines()) if broken.exists() else 0
        while process.is_alive() and (not broken.exists() or len(broken.read_bytes().splitlines()) <= lines):
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.4))
        if not process.is_alive():
            break
        process.kill()
        process.join()
        kills += 1
        with open(broken, "ab") as file:
            file.write(b'{"id": "batch_req_3')  # half a line, as a kill in the middle of a write leaves
    assert kills > 0
    assert run_forked(command(source, broken), said) == 0
    assert read_answers(broken) == expected
    assert run_forked(command(source, broken), tmp_path / "again.log") == 0
    assert "24 were there already" in (tmp_path / "again.log").read_text()
    assert read_answers(broken) == expected


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('{"custom_id": "a"}\n{"custom_id": "a"}\n', "in.jsonl:2.*custom_id.*'a' again"),
        ('{"method": "POST"}\n', "in.jsonl:1.*custom_id"),
        ("", "in.jsonl.*empty"),
    ],
)
def test_a_file_that_cannot_be_a_batch_is_refused_at_once(tmp_path: Path, lines: str, said: str) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(lines)
    with pytest.raises(InputError, match=said):
        run_batch("bundled", str(source), str(target))


@pytest.mark.parametrize(
    "other", [{"strategy": "best_of_n"}, {"engine": EngineOptions(adapter="a")}, {"limits": Limits(max_samples=2)}]
)
def test_answers_that_other_settings_gave_are_not_gone_on_with(tmp_path: Path, other: dict) -> None:
    source, target, request = tmp_path / "in.jsonl", tmp_path / "out.jsonl", {"custom_id": "a"}
    write_lines(source, request)
    answered = {"custom_id": "a", "response": {"status_code": 200}}
    write_lines(target, {"id": answer_id(request, ServiceSettings("bundled", **other).identity), **answered})
    with pytest.raises(InputError, match=r"'a', are to requests that have changed since, or.* with other settings"):
        run_batch("bundled", str(source), str(target))
    assert ServiceSettings("bundled", limits=Limits(deadline_s=9.0)).identity == ServiceSettings("bundled").identity


def test_what_the_engine_failed_at_is_asked_again(tmp_path: Path) -> None:
    target, statuses = tmp_path / "out.jsonl", {"a": 200, "b": 502, "c": 400, "d": 400}
    requests = {name: {"custom_id": name, "body": {}} for name in statuses}
    lines = [
        json.dumps({"id": answer_id(requests[name], 1), "custom_id": name, "response": {"status_code": status}})
        for name, status in statuses.items()
    ]
    target.write_text("\n".join(lines) + '\n{"id": "ba')
    requests["d"]["body"] = {"mended": True}
    file, done = open_output(target, requests, settings=1)
    with file:
        file.write(b"more\n")
    assert done == {"a", "c"}
    assert target.read_text().splitlines() == [lines[0], lines[2], "more"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{OTHER}\n", "'b'"),
        (f"{CHANGED}\n", "1 of its answers, such as 'a', are to requests that have changed"),
        ("no answer\n", "out.jsonl:1"),
        ('{"a": 1}', "lines"),
    ],
)
def test_a_file_with_something_else_is_not_written_to(tmp_path: Path, line: str, said: str) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text(line)
    with pytest.raises(InputError, match=said):
        open_output(target, {"a": {}}, settings=0)
    assert target.read_text() == line
