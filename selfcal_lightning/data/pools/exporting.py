"""Samples of a store as a JSON-lines pool, or as the logs of other tools as far as their formats allow."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from selfcal_lightning.core import files
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools import importing
from selfcal_lightning.data.pools.line_format import is_written_pool, pool_line
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.answer_types import split_aliases
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.records import QuestionSamples, Sample

WRITER = "selfcal_lightning"
LM_EVAL_KEYS = (
    "doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics", "doc_hash", "prompt_hash",
    "target_hash", "exact_match",
)  # fmt: skip
EVERY_EVAL_EVER_KEYS = (
    "schema_version", "evaluation_id", "model_id", "evaluation_name", "sample_id", "sample_hash", "interaction_type",
    "input", "output", "answer_attribution", "evaluation", "metadata",
)  # fmt: skip
STOP_REASONS = {"stop": "stop", "length": "max_tokens", None: "unknown"}


@dataclass(frozen=True, slots=True)
class ExportReport:
    questions: int
    responses: int
    dropped: int = 0

    def __str__(self) -> str:
        left_out = f"; {self.dropped:,} unverified responses are left out" if self.dropped else ""
        return f"{self.responses:,} responses to {self.questions:,} questions{left_out}"


def export_pool(
    store_dir: str | Path, path: str | Path, *, token_ids: bool = False, confidences: Sequence[str] = (), **chosen: Any
) -> ExportReport:
    """Write joined samples of a store as a JSON-lines pool; :func:`import_pool` reads it back.

    ``chosen`` are ``split``, ``round`` and ``task``, as of :meth:`SampleStore.samples`.
    """
    files.check_replaceable(path, is_written_pool, option="path", kind="a pool that was exported before")
    questions = responses = 0

    def lines() -> Iterator[dict[str, Any]]:
        nonlocal questions, responses
        for group in SampleStore(store_dir).samples(confidences=confidences, **chosen):
            questions, responses = questions + 1, responses + len(group.samples)
            yield pool_line(group, token_ids=token_ids)
        if not questions:
            raise _nothing(store_dir, "joined", chosen, "Check the names, or finish `selfcal generate`.")

    files.write_json_lines(Path(path), lines())
    return ExportReport(questions, responses)


def _nothing(store_dir: str | Path, kind: str, chosen: dict[str, Any], rest: str) -> InputError:
    split, round, task = chosen.get("split"), chosen.get("round", 0), chosen.get("task")
    where = f"{kind} samples of split {split!r}, round {round} and task {task!r}"
    return InputError(f"Expected {store_dir} to hold {where}, but got none. {rest}")


def export_sampled(store_dir: str | Path, folder: str | Path, **chosen: Any) -> ExportReport:
    """Write joined samples of a store as `sampled.jsonl` and `ground_truth.jsonl`; an import reads them back."""
    place = Path(folder)
    for name, keys in ((importing.SAMPLED, importing.SAMPLED_KEYS), (importing.GROUND_TRUTH, importing.TRUTH_KEYS)):
        is_own = partial(files.has_first_keys, keys)
        files.check_replaceable(place / name, is_own, option="path", kind="an earlier file of its kind")
    truths: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()

    def rows() -> Iterator[dict[str, Any]]:
        for group in SampleStore(store_dir).samples(**chosen):
            is_verified = all(s.correct is not None or is_failed(s) for s in group.samples)
            written = list(importing.sampled_rows(group)) if is_verified else []
            counts.update(responses=len(written), dropped=len(group.samples) - len(written))
            if written:
                truths.append(importing.truth_row(group.question, written))
            yield from written
        if not truths:
            rest = f"{counts['dropped']:,} are not verified. Name another split, or questions with reference answers."
            raise _nothing(store_dir, "verified", chosen, rest)

    files.write_json_lines(place / importing.SAMPLED, rows())
    files.write_json_lines(place / importing.GROUND_TRUTH, truths)
    return ExportReport(len(truths), counts["responses"], counts["dropped"])


def export_log(store_dir: str | Path, path: str | Path, format: str, **chosen: Any) -> ExportReport:
    """Write verified samples of a store as a log of inspect_ai, every_eval_ever or lm-eval; count the others."""
    place, store = Path(path), SampleStore(store_dir)
    if format == "inspect" and place.suffix != ".json":
        raise InputError(f"`path` of an inspect log must end with .json, got {place}: inspect_ai tells logs by it.")
    found = list(store.samples(**chosen))
    verified = ([s for s in group.samples if s.correct is not None and not is_failed(s)] for group in found)
    groups = [replace(group, samples=tuple(kept)) for group, kept in zip(found, verified, strict=True) if kept]
    written = sum(len(group.samples) for group in groups)
    dropped = sum(len(group.samples) for group in found) - written
    if not groups:
        raise _nothing(store_dir, "verified", chosen, f"{dropped:,} have no verdict.")
    model = str(store.round_manifest(chosen.get("round", 0)).fingerprint.model.model)
    keys = {"lm-eval": LM_EVAL_KEYS, "every_eval_ever": EVERY_EVAL_EVER_KEYS}.get(format)
    is_own = _is_own_log if keys is None else partial(files.has_first_keys, keys)
    files.check_replaceable(place, is_own, option="path", kind=f"an earlier export as {format}")
    place.parent.mkdir(parents=True, exist_ok=True)
    if format == "inspect":
        files.write_atomically(place, files.to_json(_inspect_log(groups, model)))
    else:
        files.write_json_lines(place, _lm_eval(groups) if format == "lm-eval" else _every_eval_ever(groups, model))
    return ExportReport(len(groups), written, dropped)


def _is_own_log(path: Path) -> bool:
    spec = (files.json_object_or_none(path) or {}).get("eval")
    return isinstance(spec, dict) and (spec.get("metadata") or {}).get("writer") == WRITER


def _confidences(sample: Sample) -> dict[str, float]:
    numbers = {"p_true": sample.p_true, "logprob": sample.logprob, **sample.confidences}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _inspect_log(groups: Sequence[QuestionSamples], model: str) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    names = ", ".join(dict.fromkeys(group.question.task for group in groups))
    samples = []
    for group in groups:
        prompt = [{"role": message.role, "content": message.content} for message in group.question.messages]
        for epoch, sample in enumerate(group.samples, start=1):
            message = {"role": "assistant", "content": sample.text, "source": "generate"}
            choice = {"message": message, "stop_reason": STOP_REASONS[sample.finish]}
            score = {"value": "C" if sample.correct else "I", "answer": sample.answer}
            samples.append({
                "id": group.question.id, "epoch": epoch, "input": group.question.text,
                "target": split_aliases(group.question.reference or ""), "messages": [*prompt, message],
                "output": {"model": model, "choices": [choice], "completion": sample.text},
                "scores": {WRITER: score}, "metadata": {"confidence": _confidences(sample)},
            })  # fmt: skip
    ids = [group.question.id for group in groups]
    spec = {
        "created": now, "task": names, "model": model, "config": {"epochs": max(len(g.samples) for g in groups)},
        "dataset": {"name": names, "samples": len(groups), "sample_ids": ids}, "metadata": {"writer": WRITER},
    }  # fmt: skip
    return {"version": 2, "status": "success", "eval": spec, "samples": samples}


def _every_eval_ever(groups: Sequence[QuestionSamples], model: str) -> Iterator[dict[str, Any]]:
    for group in groups:
        question, references = group.question, split_aliases(group.question.reference or "")
        asked = {"raw": question.text, "formatted": _as_text(group), "reference": references}
        for sample in group.samples:
            attribution = {
                "turn_idx": 0, "source": "output.raw", "extracted_value": sample.answer or "",
                "extraction_method": f"{WRITER} task {question.task}", "is_terminal": True,
            }  # fmt: skip
            values = (
                "0.2.1", f"{question.task}/{model}", model, question.task, question.id,
                _sha256(question.text + "".join(references)), "single_turn", asked, {"raw": [sample.text]},
                [attribution] if sample.answer is not None else [],
                {"score": float(bool(sample.correct)), "is_correct": bool(sample.correct)},
                {name: repr(value) for name, value in _confidences(sample).items()},
            )  # fmt: skip
            yield dict(zip(EVERY_EVAL_EVER_KEYS, values, strict=True))


def _lm_eval(groups: Sequence[QuestionSamples]) -> Iterator[dict[str, Any]]:
    """Yield a row per question; as with `take_first`, the metric is that of the first response."""
    for number, group in enumerate(groups):
        question, prompt = group.question, _as_text(group)
        doc, target = {"question": question.text, "answer": question.reference}, question.reference or ""
        values = (
            number, {"id": question.id, **doc}, target, {"gen_args_0": {"arg_0": prompt, "arg_1": {}}},
            [[sample.text for sample in group.samples]], [group.samples[0].answer or "[invalid]"], WRITER,
            ["exact_match"], _sha256(json.dumps(doc)), _sha256(prompt), _sha256(target),
            float(bool(group.samples[0].correct)),
        )  # fmt: skip
        yield dict(zip(LM_EVAL_KEYS, values, strict=True))


def _as_text(group: QuestionSamples) -> str:
    return json.dumps([asdict(message) for message in group.question.messages], ensure_ascii=False)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
