"""OpenAI's batch format: a file of requests in, a file of answers out, each line once, also after a kill."""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.core.files import append_line, line_error, open_lines, read_json_lines, write_atomically
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.records import sample_seed
from selfcal_lightning.serving.app import Service
from selfcal_lightning.serving.bodies import ChatBody, Refused, read_body, refusal_of

URL = "/v1/chat/completions"
PASSING = (500, 502, 503)  # refusals that say nothing about the request


def read_requests(path: Path) -> dict[str, dict[str, Any]]:
    """Return the requests of a file by their ids, which must be unique."""
    requests: dict[str, dict[str, Any]] = {}
    for number, line in read_json_lines(path):
        name = line.get("custom_id")
        if not isinstance(name, str) or not name:
            raise line_error(path, number, "`custom_id` to be text", repr(name))
        if name in requests:
            raise line_error(path, number, "`custom_id` to be unique", f"{name!r} again")
        requests[name] = line
    if not requests:
        raise InputError(f"Expected {path} to hold requests, but it is empty.")
    return requests


def answer_id(request: Any, settings: int) -> str:
    """Return the id of the answer to a line of the input: other requests and other ``settings`` have another."""
    return f"batch_req_{sample_seed(settings, 0, json.dumps(request, sort_keys=True), 0):x}"


def open_output(path: Path, requests: Mapping[str, Any], *, settings: int) -> tuple[BinaryIO, set[str]]:
    """Open a file for more answers, with the ids it has; what is to be asked again is taken out."""
    begin, way_out = b'{"id": "batch_req_', "Wait for it, or name another `output`."
    file, lines = open_lines(path, begin=begin, way_out=way_out)
    seen, done, kept, changed = set(), set(), [], []
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)
            name, status = answer["custom_id"], answer["response"]["status_code"]
            seen.add(name)
            is_other = name in requests and answer["id"] != answer_id(requests[name], settings)
        except (ValueError, KeyError, TypeError) as error:
            raise line_error(path, number, "an answer of this batch", "something else") from error
        if status not in PASSING and (status == 200 or not is_other):  # else the engine or the request was at fault
            done.add(name)
            kept.append(line)
        changed += [name] if is_other and status == 200 else []
    if strange := sorted(seen - requests.keys()):
        raise InputError(f"Expected {path} to hold answers of this batch, but got {strange[0]!r}. Name another file.")
    if changed:
        raise InputError(
            f"Expected {path} to answer the requests of `input`, but {len(changed):,} of its answers, such as "
            f"{changed[0]!r}, are to requests that have changed since, or were drawn with other settings. Name "
            "another file."
        )
    if len(kept) < len(lines):
        write_atomically(path, b"".join(line + b"\n" for line in kept))
        file.close()
        file, _ = open_lines(path, begin=begin, way_out=way_out)
    return file, done


async def run_requests(
    service: Service, requests: Mapping[str, Mapping[str, Any]], file: BinaryIO, done: Collection[str], settings: int
) -> str:
    """Answer the requests that a file does not have, append what comes, and say how many."""
    room, statuses = asyncio.Semaphore(2 * service.desk.source.target), Counter[int]()
    waiting = {name: line for name, line in requests.items() if name not in done}
    bar = Progress(len(waiting), label="Answering", unit="requests", enabled=len(waiting) > 1)

    async def answer(name: str, line: Mapping[str, Any]) -> None:
        async with room:
            own_id = answer_id(line, settings)
            try:
                if line.get("url") != URL or line.get("method") != "POST" or not isinstance(line.get("body"), dict):
                    raise Refused(400, f"Expected `method` POST, `url` {URL} and a `body`.")
                body = read_body(ChatBody, line["body"])
                if body.stream:
                    raise Refused(400, "A batch does not stream.", param="stream")
                job = await service.desk.begin(service.make_job(body, name=own_id, key=name))
                await job.ended()
                status, content = 200, service.reply(job)
            except Exception as error:  # it is this request's alone
                if service.desk.died is not None:
                    return  # no answer: the same command asks again
                refusal = refusal_of(error)
                if refusal.status == 500:  # a batch has no log but what it prints
                    refusal = Refused(500, f"{type(error).__name__}, whose traceback was printed.")
                status, content = refusal.status, refusal.as_json()
            response = {"status_code": status, "request_id": own_id, "body": content}
            append_line(file, {"id": own_id, "custom_id": name, "response": response, "error": None})
            statuses[status] += 1
            bar.update(1)

    with file, bar:
        await asyncio.gather(*(answer(name, line) for name, line in waiting.items()))
        os.fsync(file.fileno())
    await service.desk.close(0.1)
    if (died := service.desk.died) is not None:
        raise RunError(f"The engine has stopped: {died}. What was answered is kept; the same command continues.")
    found = f" ({len(done):,} were there already)" if done else ""
    failed = sum(statuses[status] for status in PASSING)
    again = f", {failed:,} of them by faults of the engine: the same command asks again" if failed else ""
    return f"{statuses[200]:,} answered and {statuses.total() - statuses[200]:,} refused{again}{found}"
