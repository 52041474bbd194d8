"""Logs of evaluation harnesses, batch APIs and RL trainers, read as responses to questions.

Each reader yields one record per response and counts what it leaves out, by reason. ``docs/guides/pools_elsewhere.md``
lists the tools and what their logs cannot say.
"""

import ast
import json
import math
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import json_object_or_none, line_error, parse_json, read_json_lines, read_json_object
from selfcal_lightning.data.tasks import rows
from selfcal_lightning.data.tasks.rows import Columns
from selfcal_lightning.records import UNSTATED, Message, Unstated

LARGEST_MEMBER = 2**28  # bytes of one sample in a zip
ZSTANDARD = 93  # the zip method that inspect writes since 2026
INSPECT_HEADS = ("_journal/start.json", "header.json")  # the second is written when a run ends
LONGEST_LIST = 10_000
FULL_SCORES = {"C": True, "I": False, "N": False, 1.0: True, 0.0: False, -1.0: False}
FULL_SCORES |= {"True": True, "true": True, "TRUE": True, "False": False, "false": False, "FALSE": False}
NUMBER = re.compile(r"-?\d+(\.\d*)?")
FINISHES = {"stop": "stop", "eos": "stop", "endoftext": "stop", "end_turn": "stop", "length": "length"}
FINISHES |= {"max_tokens": "length", "model_length": "length", "incomplete": "length", "completed": "stop"}
TEXT_TYPES = ("text", "output_text", "input_text")
QUESTION_FIELDS = ("question", "problem", "query", "input")


@dataclass(slots=True)
class LoggedResponse:
    question_id: str
    question: str
    text: str
    prompt: Any = None  # text or chat messages; None if only the question was sent
    reference: Any = None  # perhaps a list of accepted answers
    answer: str | Unstated | None = UNSTATED  # is extracted from the text
    correct: bool | Unstated | None = UNSTATED  # is verified
    finish: str | None = None
    logprob: float | None = None
    tokens: int | None = None

    def messages(self) -> tuple[Message, ...]:
        return tuple(Message(**turn) for turn in _chat(self.question if self.prompt is None else self.prompt))


@dataclass
class Log:
    """The files of a log, how to read them, and counts of what was left out."""

    paths: Sequence[Path]
    columns: Columns = field(default_factory=Columns)
    filter: str | None = None
    requests: Path | None = None
    questions: Path | None = None
    skipped: Counter[str] = field(default_factory=Counter)

    def rows(self, *, tables: bool = False) -> Iterator[tuple[Path, int, dict[str, Any]]]:
        """Yield (file, number, row) of JSON lines, or of any files that hold ``tables``."""
        for path in self.paths:
            for number, row in enumerate(rows.read_table(path), start=1) if tables else read_json_lines(path):
                yield path, number, row

    def skip_empty(self, *, after_error: object) -> None:
        self.skipped["without an output" + (" after an error" if after_error else "")] += 1


def read_lm_eval(log: Log) -> Iterator[LoggedResponse]:
    """Read `samples_*.jsonl` of lm-evaluation-harness: a line per document and filter; one filter is kept."""
    kept: dict[Path, str] = {}
    seen = set[tuple[str, str]]()
    for path, number, row in log.rows():
        name = str(row.get("filter", "none"))
        if name != kept.setdefault(path, log.filter or name):
            log.skipped[f"of the filter {name}"] += 1
            continue
        task = re.sub(r"(^samples_)|(_\d{4}-\d\d-\d\dT.*$)", "", path.stem)
        key = (task, str(_needed(path, number, row, "doc_id")))
        if key in seen:
            log.skipped["of a document that occurred before"] += 1
            continue
        seen.add(key)
        given = _needed(path, number, row, "resps")
        texts = given[0] if isinstance(given, list) and len(given) == 1 else given
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            log.skipped["with scores of options instead of texts"] += 1
            continue
        doc: Mapping[str, Any] = row["doc"] if isinstance(row.get("doc"), dict) else {}
        prompt = _at(row, "arguments", "gen_args_0", "arg_0")
        named = _named(path, number, doc, log.columns.question)
        written = [named, *(doc.get(one) for one in QUESTION_FIELDS)]
        question = next((one for one in written if isinstance(one, str)), None) or str(prompt or "")
        verdicts = [_verdict(row.get(str(one))) for one in row.get("metrics") or ("exact_match", "acc", "acc_norm")]
        filtered, verdict = row.get("filtered_resps"), next((one for one in verdicts if one is not None), None)
        is_alone = len(texts) == 1  # of several, the filter judged the first or all together
        for text in texts:
            found = LoggedResponse("/".join(key), question, text, prompt or None, _listed(row.get("target")))
            if is_alone and verdict is not None and isinstance(filtered, list) and len(filtered) == 1:
                answer = filtered[0] if isinstance(filtered[0], str) else None
                found.answer, found.correct = (None if answer == "[invalid]" else answer), verdict
            yield found


def read_inspect(log: Log) -> Iterator[LoggedResponse]:
    """Read `.eval` or `.json` logs of inspect_ai; the epochs of a sample are responses to one question.

    Of several logs, the ids begin with the task, or the name of the file where a log names none.
    """
    for path in log.paths:
        task, samples = _inspect_samples(path)
        origin = f"{task or path.stem}/" if len(log.paths) > 1 else ""
        for sample in sorted(samples, key=lambda sample: (str(sample.get("id")), sample.get("epoch") or 0)):
            attachments = sample.get("attachments") or {}
            choices = _at(sample, "output", "choices") or []
            if not choices:
                log.skip_empty(after_error=sample.get("error"))
                continue
            asked = _chat(sample.get("input"), attachments)
            question = _with_options(_last_question(asked), sample.get("choices"))
            turns = _chat(sample.get("messages") or [], attachments)
            prompt = turns[:-1] if turns and turns[-1]["role"] == "assistant" else turns
            answer, verdict = _inspect_score(sample.get("scores") or {})
            tokens = _at(sample, "output", "usage", "output_tokens") if len(choices) == 1 else None
            for place, choice in enumerate(choices):
                text = _text(_at(choice, "message", "content"), attachments)
                if text is None:
                    log.skipped["without text"] += 1
                    continue
                yield LoggedResponse(
                    f"{origin}{sample.get('id')}", question, text, prompt or asked, _listed(sample.get("target")),
                    answer=answer if place == 0 and verdict is not None else UNSTATED,
                    correct=verdict if place == 0 and verdict is not None else UNSTATED,
                    finish=_finish(choice.get("stop_reason")),
                    logprob=_summed(_at(choice, "logprobs", "content")), tokens=_count(tokens),
                )  # fmt: skip


def _inspect_score(scores: Mapping[str, Any]) -> tuple[str | Unstated | None, bool | None]:
    """Return the answer and verdict of the first score that is right or wrong; "P" (partial) is neither."""
    for score in scores.values():
        verdict = _verdict(score.get("value")) if isinstance(score, dict) else None
        if verdict is not None:
            answer = score.get("answer")
            return (answer if isinstance(answer, str) and answer.strip() else UNSTATED), verdict
    return UNSTATED, None


def _inspect_samples(path: Path) -> tuple[Any, list[dict[str, Any]]]:
    """Return the name of the task of a log, if it states one, and the samples."""
    if path.suffix == ".json":
        content = read_json_object(path, what="a log of inspect_ai")
        samples = [sample for sample in content.get("samples") or [] if isinstance(sample, dict)]
        return _at(content, "eval", "task"), samples
    try:
        with zipfile.ZipFile(path) as archive:
            found = [one for one in archive.infolist() if one.filename.startswith("samples/")]
            members = {one.filename: one for one in found if one.filename.endswith(".json")}
            if not members:
                raise InputError(f"Expected {path} to hold finished samples, but got none: the run ended before one.")
            if any(one.compress_type == ZSTANDARD for one in members.values()):
                import zipfile_zstd  # noqa: F401
            largest = max(members.values(), key=lambda one: one.file_size)
            if largest.file_size > LARGEST_MEMBER:
                raise InputError(f"Expected samples below {LARGEST_MEMBER:,} bytes, but {largest.filename} is larger.")
            read = [parse_json(archive.read(one), origin=f"{path}, {name}") for name, one in members.items()]
            name = next((name for name in INSPECT_HEADS if name in archive.namelist()), None)
            head = None if name is None else parse_json(archive.read(name), origin=f"{path}, {name}")
    except ImportError as error:
        raise InputError(f"{path} is compressed by Zstandard. `pip install zipfile-zstd` makes it readable.") from error
    except (zipfile.BadZipFile, zipfile.zlib.error) as error:  # type: ignore[attr-defined]
        raise InputError(f"Expected {path} to be a log of inspect_ai (a zip file), but got: {error}.") from error
    return _at(head, "eval", "task"), [sample for sample in read if isinstance(sample, dict)]


def read_every_eval_ever(log: Log) -> Iterator[LoggedResponse]:
    """Read `*_samples.jsonl` of every_eval_ever; of several metrics of a sample, the first in the file is kept.

    Of several files, the ids begin with the name of the file.
    """
    kept: dict[tuple[Path, str], str] = {}
    for path, number, row in log.rows():
        metric = str(row.get("evaluation_result_id") or row.get("evaluation_name"))
        name = str(_needed(path, number, row, "sample_id"))
        if metric != kept.setdefault((path, name), metric):
            log.skipped[f"of the metric {metric}"] += 1
            continue
        texts, reference = _at(row, "output", "raw"), _at(row, "input", "reference")
        if texts is None and row.get("messages"):
            texts = [_text(one.get("content")) for one in row["messages"] if one.get("role") == "assistant"][-1:]
        if (texts := _texts(texts)) is None:
            log.skipped["without an output"] += 1
            continue
        question = _with_options(str(_at(row, "input", "raw") or ""), _at(row, "input", "choices"))
        values = [one.get("extracted_value") for one in row.get("answer_attribution") or [] if one.get("is_terminal")]
        verdict = _at(row, "evaluation", "is_correct")
        for text in texts:
            found = LoggedResponse(
                name if len(log.paths) == 1 else f"{path.stem}/{name}", question, text, _at(row, "input", "formatted"),
                reference,
            )  # fmt: skip
            if len(texts) == 1:
                found.tokens = _count(_at(row, "token_usage", "output_tokens"))
                if isinstance(verdict, bool):
                    found.answer, found.correct = (values[-1] if values and values[-1] else UNSTATED), verdict
            yield found


def read_helm(log: Log) -> Iterator[LoggedResponse]:
    """Read `scenario_state.json` of HELM; its verdicts are in another file, so answers are verified here."""
    for path in log.paths:
        states = read_json_object(path, what="a scenario state of HELM").get("request_states")
        if not isinstance(states, list):
            raise InputError(f"Expected `request_states` of {path} to be a list, but got {type(states).__name__}.")
        for state in states:
            result, instance = state.get("result") or {}, state.get("instance") or {}
            if state.get("reference_index") is not None:
                log.skipped["that score one option instead of answering"] += 1
                continue
            if not result.get("success", True) or not result.get("completions"):
                log.skip_empty(after_error=result.get("error"))
                continue
            golds = [one for one in instance.get("references") or [] if "correct" in (one.get("tags") or [])]
            right = [_at(one, "output", "text") for one in golds]
            if mapping := state.get("output_mapping"):  # the model answers by letter
                right = [letter for letter, text in mapping.items() if text in right]
            parts = (instance.get("id"), _at(instance, "perturbation", "name"), state.get("train_trial_index") or None)
            question = _with_options(str(_at(instance, "input", "text") or ""), list((mapping or {}).values()))
            request = state.get("request") or {}
            for one in result["completions"]:
                text = str(one.get("text", ""))
                found = LoggedResponse(
                    "/".join(str(part) for part in parts if part is not None), question, text,
                    request.get("messages") or request.get("prompt") or None, right or None,
                    finish=_finish(_at(one, "finish_reason", "reason")), tokens=len(one.get("tokens") or []) or None,
                    logprob=_summed(one.get("tokens")),
                )  # fmt: skip
                if mapping and text.strip() in mapping:  # one token, cut by its limit of one
                    found.answer, found.correct = text.strip(), text.strip() in right
                yield found


def read_openai_evals(log: Log) -> Iterator[LoggedResponse]:
    """Read the log of OpenAI evals: verdict k belongs to sampling k, and further calls are a grader's."""
    for path in log.paths:
        calls: dict[str, list[dict[str, Any]]] = {}
        matches: dict[str, list[dict[str, Any]]] = {}
        for number, row in read_json_lines(path):
            kind, data = row.get("type"), row.get("data")
            if kind not in ("sampling", "match") or not isinstance(data, dict):
                if kind not in (None, "final_report"):
                    log.skipped[f"events of the type {kind}"] += 1
                continue
            events = calls if kind == "sampling" else matches
            events.setdefault(str(_needed(path, number, row, "sample_id")), []).append(data)
        for name, found in calls.items():
            judged = matches.get(name, [])
            kept = found if len(judged) == len(found) else found[:1]
            log.skipped["further calls, such as a grader's"] += len(found) - len(kept)
            for place, data in enumerate(kept):
                if (texts := _texts(data.get("sampled"))) is None:
                    log.skipped["without an output"] += 1
                    continue
                verdict = judged[place] if place < len(judged) else {}
                asked = _chat(data.get("prompt"))
                question = _last_question(asked)
                for text in texts:
                    one = LoggedResponse(name, question, text, asked, verdict.get("expected"))
                    if len(texts) == 1 and isinstance(verdict.get("correct"), bool):
                        picked = verdict.get("picked")
                        one.answer, one.correct = (picked if isinstance(picked, str) else UNSTATED), verdict["correct"]
                    yield one


def read_openai_batch(log: Log) -> Iterator[LoggedResponse]:
    """Read the output of OpenAI's batch API or vLLM's `run_batch`, in any order, joined with its requests.

    `name#k` is the k-th response to the question `name`, and so are the choices of `n` above 1.
    """
    asked: dict[str, Any] = {}
    times = Counter[str]()
    if log.requests is not None:
        for number, row in read_json_lines(log.requests):
            body = row.get("body") or {}
            sent = next((body[name] for name in ("messages", "prompt", "input") if body.get(name)), None)
            name = str(_needed(log.requests, number, row, "custom_id"))
            if isinstance(many := body.get("prompt"), list) and (len(many) > 1 or not _texts(many)):
                found = f"a list of {len(many)} in {name!r}: write one request for each text"
                raise line_error(log.requests, number, "`prompt` to be one text", found)
            if asked.setdefault(name, sent) != sent:
                raise line_error(log.requests, number, "`custom_id` to name one prompt", f"{name!r} for two")
            times[name] += 1
    known: dict[str, rows.QuestionRow] = {}
    if log.questions is not None:
        for each in rows.read_question_file(log.questions, columns=log.columns):
            if known.setdefault(each.id or f"line-{each.number}", each) is not each:
                raise line_error(log.questions, each.number, "`id` to be unique", f"{each.id!r} again")
    if not asked and not known:
        raise InputError("A batch's output lacks its questions: name their file by `--requests` or `--questions`.")
    answered = Counter[str]()
    for path, number, row in log.rows():
        name = str(_needed(path, number, row, "custom_id"))
        body = _at(row, "response", "body") or {}
        texts = list(_batch_texts(body))
        if row.get("error") or not texts:
            log.skip_empty(after_error=row.get("error"))
            continue
        stem = name if name in known else re.sub(r"#\d+$", "", name)
        own = next((known[one] for one in (name, stem) if one in known), None)
        sent = next((asked[one] for one in (name, stem) if one in asked), None)
        if own is None and sent is None:
            log.skipped["of a request that is not in the file"] += 1
            continue
        answered[name] += 1
        if answered[name] > max(times[name], 1):
            log.skipped["of a request that was answered before"] += 1
            continue
        chat = _chat(sent)
        question = _last_question(chat)
        usage, drawn = body.get("usage") or {}, len(body.get("choices") or texts)
        log.skipped["without text"] += drawn - len(texts)  # such as refusals
        tokens = _count(usage.get("completion_tokens", usage.get("output_tokens"))) if drawn == 1 else None
        for text, finish, logprob, counted in texts:
            yield LoggedResponse(
                stem, question if own is None else own.text, text, chat or None, None if own is None else own.answer,
                finish=finish, logprob=logprob, tokens=counted if tokens is None else tokens,
            )  # fmt: skip


def _batch_texts(body: Mapping[str, Any]) -> Iterator[tuple[str, str | None, float | None, int | None]]:
    """Yield (text, finish, log-probability, tokens) of chat completions, completions, or the responses API."""
    for choice in body.get("choices") or []:
        text = choice.get("text") if "text" in choice else _text(_at(choice, "message", "content"))
        tokens, logprobs = _at(choice, "logprobs", "content"), _at(choice, "logprobs", "token_logprobs")
        total = _summed(tokens) if tokens else _summed([{"logprob": one} for one in logprobs or []])
        if isinstance(text, str):
            yield text, _finish(choice.get("finish_reason")), total, len(tokens or logprobs or []) or None
    said = [one.get("content") for one in body.get("output") or [] if one.get("type") == "message"]
    if said and (text := _text([part for parts in said for part in parts or []])) is not None:
        yield text, _finish(body.get("status")), None, None


def read_verl(log: Log) -> Iterator[LoggedResponse]:
    """Read rollouts of verl, `{step}.jsonl`; the rows of a step with the same input answer one question."""
    for path, number, row in log.rows():
        prompt, text = _needed(path, number, row, "input"), _needed(path, number, row, "output")
        verdict = _verdict(row["acc"] if "acc" in row else row.get("score"))
        name = f"step-{row.get('step', path.stem)}/{_digest(prompt)}"
        correct = UNSTATED if verdict is None else verdict
        yield LoggedResponse(name, str(prompt), str(text), str(prompt), _listed(row.get("gts")), correct=correct)


def read_trl(log: Log) -> Iterator[LoggedResponse]:
    """Read `completions_*.parquet` of TRL; the rows of a step with the same prompt answer one question."""
    for path, number, row in log.rows(tables=True):
        prompt, completion = (_needed(path, number, row, name) for name in ("prompt", "completion"))
        turns = [{"content": completion}] if isinstance(completion, str) else completion
        text = "".join(_text(turn.get("content")) or "" for turn in turns)
        asked = _chat(prompt)
        name = f"step-{row.get('step', path.stem.removeprefix('completions_'))}/{_digest(asked)}"
        verdict = _stated(path, number, _named(path, number, row, log.columns.correct))
        reference = _named(path, number, row, log.columns.answer, default="answer")
        yield LoggedResponse(name, _last_question(asked), text, asked, reference, correct=verdict)


def read_dataset(log: Log) -> Iterator[LoggedResponse]:
    """Read a data set with a list of responses in each row, by the names of its columns."""
    columns = log.columns
    question_column, responses_column = columns.question or "question", columns.responses or "responses"
    asked: dict[str, Any] = {}
    for path, number, row in log.rows(tables=True):
        question, texts = (_needed(path, number, row, name) for name in (question_column, responses_column))
        verdicts = _named(path, number, row, columns.correct)
        if isinstance(texts, str):  # one response a row, as in a CSV file
            texts, verdicts = [texts], verdicts if isinstance(verdicts, list) else [verdicts]
        verdicts = [None] * len(texts) if verdicts is None else verdicts
        if len(verdicts) != len(texts):
            expected = f"`{columns.correct}` of the length of `{responses_column}`, {len(texts)}"
            raise line_error(path, number, expected, str(len(verdicts)))
        name = str(_needed(path, number, row, columns.id)) if columns.id else f"{path.stem}/{number:06d}"
        if asked.setdefault(name, question) != question:
            raise line_error(path, number, f"`{columns.id}` to name one question", f"{name!r} for two")
        reference = _named(path, number, row, columns.answer, default="answer")
        log.skipped["without responses"] += not texts
        for text, verdict in zip(texts, verdicts, strict=True):
            if isinstance(text, str):
                correct = _stated(path, number, verdict)
                yield LoggedResponse(name, str(question), text, None, reference, correct=correct)
            else:
                log.skipped["without text"] += 1


def _needed(path: Path, number: int, row: Mapping[str, Any], name: str) -> Any:
    if row.get(name) is None:
        found = "null" if name in row else f"only {', '.join(map(str, row))}"
        raise line_error(path, number, f"the field `{name}`", found)
    return row[name]


def _named(path: Path, number: int, row: Mapping[str, Any], name: str | None, *, default: str = "") -> Any:
    """Return the value of a column, which has to be there if the user named it."""
    if name is not None and name not in row:
        raise line_error(path, number, f"the column `{name}`", f"only {', '.join(map(str, row))}")
    return row.get(name or default)


def _at(found: Any, *names: str) -> Any:
    for name in names:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _verdict(value: Any) -> bool | None:
    """Return whether a score means right or wrong, or None; some tools write numbers and booleans as text."""
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)
    return FULL_SCORES.get(value) if isinstance(value, str | int | float) else None


def _stated(path: Path, number: int, value: Any) -> bool | Unstated:
    if value is None or value == "":  # an empty cell of a CSV file
        return UNSTATED
    if (verdict := _verdict(value)) is None:
        raise line_error(path, number, "a verdict to be true, false, 1 or 0", repr(value))
    return verdict


def _listed(value: Any) -> Any:
    """Return the list of texts that a text spells as Python or JSON does, else the value, such as [0,1]."""
    if isinstance(value, str) and value.startswith("[") and value.endswith("]") and len(value) < LONGEST_LIST:
        try:
            found = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return value
        is_list = isinstance(found, list) and found and all(isinstance(one, str) for one in found)
        return found if is_list else value
    return value


def _text(content: Any, attachments: Mapping[str, str] | None = None) -> str | None:
    """Return the text of a message (text or parts), without reasoning and with its attachments."""
    if isinstance(content, str):
        if attachments and "attachment://" in content:
            content = re.sub(r"attachment://(\w+)", lambda found: attachments.get(found[1], found[0]), content)
        return content
    if not isinstance(content, Sequence):
        return None
    shown = [part for part in content if isinstance(part, Mapping) and part.get("type") in TEXT_TYPES]
    parts = [_text(part.get("text"), attachments) for part in shown]
    return "".join(part for part in parts if part is not None) if parts else None


def _chat(prompt: Any, attachments: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Return a prompt as chat messages: a list, JSON in a text (as lm-eval writes it), or one user turn."""
    if isinstance(prompt, str):
        prompt = _text(prompt, attachments)
        if prompt.startswith('[{"role"'):
            try:
                return _chat(parse_json(prompt, origin="the prompt"))
            except ValueError:
                pass
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, Sequence) and len(prompt) == 1 and isinstance(prompt[0], str):
        return _chat(prompt[0])
    turns = [turn for turn in prompt or [] if isinstance(turn, Mapping)]
    return [{"role": str(turn.get("role")), "content": _text(turn.get("content"), attachments) or ""} for turn in turns]


def _texts(found: Any) -> list[str] | None:
    """Return one text or a list of texts as a list; None for anything else and for no text."""
    texts = [found] if isinstance(found, str) else found
    is_filled = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
    return texts if is_filled else None


def _with_options(question: str, options: Sequence[Any] | None) -> str:
    return rows.write_options(question, [str(one) for one in options]) if options else question


def _last_question(turns: Sequence[Mapping[str, str]]) -> str:
    return next((turn["content"] for turn in reversed(turns) if turn["role"] == "user"), "")


def _finish(reason: Any) -> str | None:
    return FINISHES.get(str(reason))


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def _summed(tokens: Any) -> float | None:
    values = [_at(token, "logprob") for token in tokens or []]
    known = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    return sum(known) if known and len(known) == len(values) else None


def _digest(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class LogFormat:
    """A format: its reader, its files in a folder, and the fields of a first row that identify it."""

    read: Callable[[Log], Iterator[LoggedResponse]]
    files: str
    fields: frozenset[str] = frozenset()


FORMATS = {
    "lm-eval": LogFormat(read_lm_eval, "samples_*.jsonl", frozenset({"doc_id", "resps"})),
    "inspect": LogFormat(read_inspect, "*.eval", frozenset({"eval", "samples"})),
    "every_eval_ever": LogFormat(read_every_eval_ever, "*_samples.jsonl", frozenset({"sample_id", "evaluation"})),
    "helm": LogFormat(read_helm, "scenario_state.json", frozenset({"request_states"})),
    "openai-batch": LogFormat(read_openai_batch, "*.jsonl", frozenset({"custom_id", "response"})),
    "openai-evals": LogFormat(read_openai_evals, "*.jsonl", frozenset({"spec"})),
    "verl": LogFormat(read_verl, "[0-9]*.jsonl", frozenset({"input", "output", "score"})),
    "trl": LogFormat(read_trl, "completions_*.parquet", frozenset({"prompt", "completion"})),
    "dataset": LogFormat(read_dataset, "*.parquet"),
}


def find_format(path: Path, name: str = "auto", *, columns: Columns | None = None) -> tuple[str, list[Path]] | None:
    """Return the format of a log and its files; None if ``name`` is "auto" and no format fits."""
    if name != "auto" and name not in FORMATS:
        raise unknown_name("format", name, ("auto", "pool", "sampled", *FORMATS))
    if columns is not None and columns.responses and name == "auto":
        name = "dataset"
    for known, found in FORMATS.items():
        if name not in ("auto", known):
            continue
        files = sorted(path.glob(found.files), key=_numbers_as_numbers) if path.is_dir() else [path]
        if name == known:
            if not files:
                raise InputError(f"Expected {path} to hold files {found.files}, as {known} writes them, but got none.")
            return known, files
        if files and found.fields and found.fields <= _first_fields(files[0]):
            return known, files
    return None


def _numbers_as_numbers(path: Path) -> list[object]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", path.name)]


def _first_fields(path: Path) -> set[str]:
    if path.suffix == ".eval":
        return {"eval", "samples"}
    if path.suffix == ".parquet":
        return set(next(iter(rows.read_table(path)), {}))
    if path.suffix == ".json":
        return set(json_object_or_none(path) or {})
    if path.suffix not in (".jsonl", ".ndjson"):
        return set()
    return {str(name) for _, row in islice(read_json_lines(path), 1) for name in row}


def guess_task(references: Iterable[Any]) -> str:
    known = [reference for reference in references if reference not in (None, "", [])]
    if not known:
        raise InputError("The log holds no reference answers to tell the task by. Name it by `--task`.")
    texts = [str(one[0] if isinstance(one, list | tuple) else one).strip() for one in known]
    if all(len(text) == 1 and text.upper() in rows.CHOICE_LETTERS for text in texts):
        return "local_choice"
    number = re.compile(r"-?[$]?[\d,]*\.?\d+(e[+-]?\d+)?%?", re.IGNORECASE)
    if all(number.fullmatch(text.rpartition("####")[2].strip()) for text in texts):
        return "local_number"
    return "local_expression" if any("\\" in text or "$" in text for text in texts) else "local_text"
