"""What clients get: completions of the OpenAI protocol, whole or streamed, each with its object ``selfcal``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.confidence.agreement import TwoSampleHybrid, hybrid
from selfcal_lightning.confidence.base import P_TRUE, confidence_of
from selfcal_lightning.confidence.fusion import FittedScorer, Fusion
from selfcal_lightning.data.tasks.judging import is_failed
from selfcal_lightning.inference.answering import best_response
from selfcal_lightning.inference.chat_source import VERBALIZED
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.records import Sample
from selfcal_lightning.serving.bodies import Options
from selfcal_lightning.serving.desk import Job, Outcome

STATED = "stated"  # what an answer's confidence is called in the pool of labels
PIECE = 48  # characters in a chunk of an answer that is known already
ABSTAINED = "The answer is withheld: its confidence is too low."


@dataclass(frozen=True)
class Calibration:
    """Where confidences come from: what the adapter's or the model's manifest says, and fitted scorers."""

    scorers: tuple[FittedScorer, ...] = ()
    manifest: dict[str, Any] | None = None

    @property
    def of_samples(self) -> tuple[FittedScorer, ...]:
        """Scorers of single responses, which strategies may read."""
        return tuple(scorer for scorer in self.scorers if STATED not in scorer.requires and not scorer.needs_pool)

    def of_answer(self, stated: float) -> tuple[float, str] | None:
        """Return the scaled form of a stated confidence, fitted on feedback, and its name; None without one."""
        for scorer in reversed(self.scorers):
            if scorer.requires == (STATED,):
                bare = Sample("", 0, 0, "", None, None, None, None, confidences={STATED: stated})
                if (value := scorer.score_sample(bare)) is not None:
                    return value, scorer.name
        return None

    def describe(self, source: str | None) -> dict[str, Any] | None:
        """Return how the confidence ``source`` was calibrated; None where nobody did."""
        for scorer in self.scorers:
            if scorer.name == source:
                if isinstance(scorer, Fusion):
                    method, score = "fusion", next(reversed([*scorer.scores, *scorer.held_out_scores]), None)
                else:
                    method, score = scorer.map.kind, scorer.held_out_after or scorer.after
                ece = None if score is None else score.ece
                return {"method": method, "questions": scorer.fitted_on.num_questions, "ece": ece}
        if source != P_TRUE or self.manifest is None:
            return None
        metrics = self.manifest.get("metrics") or {}
        questions, ece = metrics.get("val/count/Questions"), metrics.get("val/calibration/ECE")
        return {"method": "self_calibration", "questions": questions, "ece": ece}


@dataclass(frozen=True)
class Reply:
    """An answer, ready to be written."""

    job: Job
    model: str
    text: str
    calls: tuple[dict[str, Any], ...]
    finish_reason: str
    usage: dict[str, Any]
    selfcal: dict[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        """The headers of a whole answer."""
        confidence = self.selfcal["confidence"]
        return {
            "x-selfcal-confidence": "" if confidence is None else f"{confidence:.6f}",
            "x-selfcal-samples": str(self.selfcal["samples_used"]),
            "x-selfcal-stop-reason": self.selfcal["stop_reason"],
            "x-selfcal-request-id": self.job.id,
        }

    @property
    def _calls(self) -> list[dict[str, Any]]:
        written = [json.dumps(call["arguments"], ensure_ascii=False) for call in self.calls]
        return [
            {"id": f"call_{self.job.id[-12:]}_{i}", "type": "function", "function": {"name": c["name"], "arguments": w}}
            for i, (c, w) in enumerate(zip(self.calls, written, strict=True))
        ]

    def completion(self) -> dict[str, Any]:
        """Return the whole answer."""
        content = None if self.calls or self.selfcal["abstained"] else self.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.selfcal["abstained"]:
            message["refusal"] = ABSTAINED
        if self.calls:
            message["tool_calls"] = self._calls
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
        head = chunk_head(self.job.id, self.model) | {"object": "chat.completion"}
        return {**head, "choices": [choice], "usage": self.usage, "selfcal": self.selfcal}

    def chunks(self, *, begun: bool, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks of what was not passed on yet; ``begun`` says whether the role was."""
        head = chunk_head(self.job.id, self.model)
        if not begun:
            yield head | {"choices": [delta(role="assistant", content="")]}
        if self.selfcal["abstained"]:
            yield head | {"choices": [delta(refusal=ABSTAINED)]}
        elif self.calls:
            yield head | {"choices": [delta(tool_calls=[{"index": i, **c} for i, c in enumerate(self._calls)])]}
        else:
            rest = self.text[self.job.sent :]
            for start in range(0, len(rest), PIECE):
                yield head | {"choices": [delta(content=rest[start : start + PIECE])]}
        yield head | {"choices": [delta() | {"finish_reason": self.finish_reason}], "selfcal": self.selfcal}
        if include_usage:
            yield head | {"choices": [], "usage": self.usage}


def chunk_head(name: str, model: str) -> dict[str, Any]:
    """Return what all chunks of an answer begin with."""
    return {"id": name, "object": "chat.completion.chunk", "created": int(time.time()), "model": model}


def delta(**content: Any) -> dict[str, Any]:
    """Return a choice of a chunk."""
    return {"index": 0, "delta": content, "finish_reason": None, "logprobs": None}


def make_reply(
    job: Job,
    outcome: Outcome,
    options: Options,
    *,
    model: str,
    calibration: Calibration,
    confidence: str | None,
    fitted: FittedThreshold | None,
    threshold: float | None,
) -> Reply:
    """Return the answer that a verdict gives.

    Where no two responses agree there is no vote, and the most confident response is given. ``confidence`` is what the
    server reads of each response, whether or not the strategy does.
    """
    verdict = outcome.verdict
    used = [sample for sample in outcome.samples[: verdict.samples_used] if not is_failed(sample)]
    read = job.strategy.confidence or confidence
    nothing_agreed = len(used) > 1 and len({s.answer for s in used if s.answer is not None}) == len(used)
    values = [None if read is None else confidence_of(sample, read) for sample in used]
    sure = max((value for value in values if value is not None), default=None)
    by_confidence = nothing_agreed and sure is not None and job.strategy.confidence is None
    best: Sample | None
    stated: float | None
    if by_confidence:
        best = used[values.index(sure)]
        answer, stated, source = best.answer, sure, read
    else:
        best = best_response(verdict, outcome.samples, read) or next(iter(used), None)
        answer, stated = verdict.answer, verdict.confidence
        source = job.strategy.confidence or "vote_share"
        if len(used) == 1 or stated is None:  # one vote always agrees with itself
            stated, source = values[used.index(best)] if best is not None and answer is not None else None, read
    if read == VERBALIZED and job.strategy.confidence is None and best is not None:
        found = hybrid([sample.answer for sample in used], values, num_samples=len(used))[used.index(best)]
        stated, source = (found, TwoSampleHybrid.name) if found is not None else (stated, source)
    raw = stated
    if stated is not None and (scaled := calibration.of_answer(stated)) is not None:
        stated, source = scaled
    guarantee = None
    if fitted is not None and fitted.target == "risk" and outcome.stop_reason in OF_STRATEGY:
        guarantee = {"error_rate": fitted.value, "chance_that_it_fails": fitted.delta, "promise": fitted.promise}
    is_low = answer is None or (threshold is not None and (stated is None or stated < threshold))
    if guarantee is not None and fitted is not None:
        is_low = not fitted.answers(verdict)
    abstained = is_low and options.on_low == "abstain"
    text = "" if best is None else job.reader.cut(best.text)
    calls = [] if best is None or abstained else job.reader.tool_calls(text)
    cut = best is not None and best.finish == "length" and len(text) == len(best.text)
    prompt_tokens = job.prompt_tokens
    drawn = verdict.tokens_generated or 0
    described = calibration.describe(source)
    return Reply(
        job,
        model,
        "" if abstained else text,
        tuple(calls),
        "tool_calls" if calls else "length" if cut else "stop",
        {"prompt_tokens": prompt_tokens, "completion_tokens": drawn, "total_tokens": prompt_tokens + drawn},
        {
            "confidence": stated,
            "raw_confidence": raw,
            "source": source,
            "calibrated": described is not None,
            "calibration": described,
            "answer": None if abstained else answer,
            "chosen_by": "confidence" if by_confidence else "strategy",
            "candidates": [] if abstained else _candidates(used, values),
            "samples_used": verdict.samples_used,
            "samples_cancelled": max(verdict.samples_generated - verdict.samples_used, 0),
            "samples_failed": outcome.failed,
            "stop_reason": outcome.stop_reason,
            "guarantee": None if is_low else guarantee,
            "abstained": abstained,
            **({"samples": _all(job, used, values)} if options.return_ == "all" and not abstained else {}),
        },
    )


OF_STRATEGY = ("early", "budget")  # what was cut short is another procedure than the one a guarantee was fitted for


def _candidates(used: Sequence[Sample], values: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the answers, most votes first."""
    found: dict[str, list[float | None]] = {}
    for sample, value in zip(used, values, strict=True):
        if sample.answer is not None:
            found.setdefault(sample.answer, []).append(value)
    rows = []
    for answer, stated in found.items():
        known = [value for value in stated if value is not None]
        weight, most = (sum(known), max(known)) if known else (None, None)
        rows.append({"answer": answer, "votes": len(stated), "weight": weight, "confidence": most})
    return sorted(rows, key=lambda row: -row["votes"])


def _all(job: Job, used: Sequence[Sample], values: Sequence[float | None]) -> list[dict[str, Any]]:
    return [
        {"text": job.reader.cut(s.text), "answer": s.answer, "confidence": value, "tokens": s.num_tokens}
        for s, value in zip(used, values, strict=True)
    ]
