"""What clients get: completions of the OpenAI protocol, whole or streamed, each with its object ``selfcal``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from selfcal_lightning.confidence.agreement import OF_ANSWER, Cocoa, TwoSampleHybrid, hybrid
from selfcal_lightning.confidence.base import P_TRUE, STATED, VOTE_SHARE, confidence_of
from selfcal_lightning.confidence.fusion import FittedScorer, Fusion
from selfcal_lightning.confidence.live import LiveScorer
from selfcal_lightning.data.tasks.judging import is_failed, total_tokens
from selfcal_lightning.inference.answering import best_response
from selfcal_lightning.inference.chat_source import VERBALIZED
from selfcal_lightning.records import Sample
from selfcal_lightning.serving.desk import Job, Outcome

PIECE = 48  # characters in a chunk of an answer that is known already
OF_STRATEGY = ("early", "budget")  # what was cut short is another procedure than the one a guarantee was fitted for
ABSTAINED = "The answer is withheld: its confidence is too low."


@dataclass(frozen=True)
class Calibration:
    """Where confidences come from: the adapter's or the model's manifest, a probe of hidden states, fitted scorers."""

    scorers: tuple[FittedScorer, ...] = ()
    manifest: dict[str, Any] | None = None
    probe: LiveScorer | None = None

    @property
    def of_samples(self) -> tuple[FittedScorer | LiveScorer, ...]:
        """Scorers of single responses, which strategies may read."""
        of_one = (scorer for scorer in self.scorers if OF_ANSWER.isdisjoint(scorer.requires) and not scorer.needs_pool)
        return (*(() if self.probe is None else (self.probe,)), *of_one)

    def of_answer(self, values: Mapping[str, float]) -> tuple[float, str] | None:
        """Return the confidence fitted on feedback about such values of answers, and its name; None without one."""
        for scorer in reversed(self.scorers):
            if not OF_ANSWER.isdisjoint(scorer.requires):
                bare = Sample("", 0, 0, "", None, None, None, None, confidences=values)
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
        if self.probe is not None and source == self.probe.name and (seen := self.probe.fitted_on) is not None:
            return {"method": source, "questions": seen.num_questions, "ece": None}
        if source != P_TRUE or self.manifest is None:
            return None
        metrics = self.manifest.get("metrics") or {}
        questions, ece = metrics.get("val/count/Questions"), metrics.get("val/calibration/ECE")
        return {"method": "self_calibration", "questions": questions, "ece": ece}


@dataclass(frozen=True)
class Reply:
    """An answer, ready to be written; ``best`` is the sample that it is."""

    job: Job
    best: Sample | None
    message: dict[str, Any]
    finish_reason: str
    usage: dict[str, Any] | None
    selfcal: dict[str, Any]

    @property
    def headers(self) -> dict[str, str]:
        confidence = self.selfcal["confidence"]
        return {
            "x-selfcal-confidence": "" if confidence is None else f"{confidence:.6f}",
            "x-selfcal-samples": str(self.selfcal["samples_used"]),
            "x-selfcal-stop-reason": self.selfcal["stop_reason"],
            "x-selfcal-request-id": self.job.id,
        }

    def completion(self) -> dict[str, Any]:
        choice = {"index": 0, "message": self.message, "finish_reason": self.finish_reason, "logprobs": None}
        head = chunk_head(self.job)
        return {**head, "object": "chat.completion", "choices": [choice], "usage": self.usage, "selfcal": self.selfcal}

    def chunks(self, *, begun: bool, include_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the chunks of what was not passed on yet; ``begun`` says whether the role was."""
        head, message = chunk_head(self.job), self.message
        if not begun:
            yield head | {"choices": [delta(role="assistant", content="")]}
        if message["refusal"] is not None:
            yield head | {"choices": [delta(refusal=message["refusal"])]}
        elif "tool_calls" in message:
            calls = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            yield head | {"choices": [delta(tool_calls=calls)]}
        else:
            rest = message["content"][self.job.sent :]
            for start in range(0, len(rest), PIECE):
                yield head | {"choices": [delta(content=rest[start : start + PIECE])]}
        yield head | {"choices": [delta() | {"finish_reason": self.finish_reason}], "selfcal": self.selfcal}
        if include_usage:
            yield head | {"choices": [], "usage": self.usage}


def chunk_head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "object": "chat.completion.chunk", "created": job.created, "model": job.body.model}


def delta(**content: Any) -> dict[str, Any]:
    return {"index": 0, "delta": content, "finish_reason": None, "logprobs": None}


def choose(
    job: Job, outcome: Outcome, used: list[Sample], values: list[float | None], read: str | None
) -> tuple[Sample | None, str | None, float | None, str | None, str]:
    """Return the response that is given, its answer, how sure the server is, by which confidence, and what chose it.

    ``values`` are the confidences ``read`` of the samples ``used``. Where no two responses agree there is no vote, and
    the most confident response is given.
    """
    verdict, own = outcome.verdict, job.strategy.confidence
    answer, stated, chosen_by = verdict.answer, verdict.confidence, "strategy"
    source: str | None = own or VOTE_SHARE
    read_ones = [(one, value) for one, value in zip(used, values, strict=True) if one.answer is not None]
    known = [(value, -i, one) for i, (one, value) in enumerate(read_ones) if value is not None]
    nothing_agreed = len({one.answer for one, _ in read_ones}) == len(read_ones) > 1
    best: Sample | None
    if nothing_agreed and known and own is None:
        stated, _, best = max(known)
        answer, source, chosen_by = best.answer, read, "confidence"
    else:
        best = best_response(verdict, outcome.samples, read) or next(iter(used), None)
        if len(used) == 1 or stated is None:  # one vote always agrees with itself
            stated, source = None if best is None or answer is None else values[used.index(best)], read
    if read == VERBALIZED and own is None and best is not None:
        both = hybrid([one.answer for one in used], values, num_samples=len(used))[used.index(best)]
        if both is not None:
            stated, source = both, TwoSampleHybrid.name
    return best, answer, stated, source, chosen_by


def make_reply(
    job: Job, outcome: Outcome, *, calibration: Calibration, confidence: str | None, threshold: float | None
) -> Reply:
    """Return the answer; ``confidence`` is what is read of each response, whether or not the strategy reads it."""
    verdict, fitted, options = outcome.verdict, job.fitted, job.body.selfcal
    used = [sample for sample in outcome.samples[: verdict.samples_used] if not is_failed(sample)]
    read = job.strategy.confidence or confidence
    values = [None if read is None else confidence_of(sample, read) for sample in used]
    best, answer, raw, source, chosen_by = choose(job, outcome, used, values, read)
    agreed = Cocoa.of_clusters(used, [one.answer for one in used])[used.index(best)] if best in used else None
    given = ((VOTE_SHARE if source == VOTE_SHARE else STATED, raw), (Cocoa.name, agreed))
    known = {name: value for name, value in given if value is not None}
    if best is not None:  # a label keeps them
        best = replace(best, confidences={**best.confidences, **known})
    scaled = calibration.of_answer(known)
    stated, source = scaled or (raw, source)
    is_low = answer is None or (threshold is not None and (stated is None or stated < threshold))
    guarantee = None
    if fitted is not None and fitted.target == "risk" and outcome.stop_reason in OF_STRATEGY:
        is_low = not fitted.answers(verdict)
        if not is_low:
            guarantee = {"error_rate": fitted.value, "chance_that_it_fails": fitted.delta, "promise": fitted.promise}
    shown = not (is_low and options.on_low == "abstain")
    text, is_cut = ("", False) if best is None else (best.text, best.finish == "length")
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if not shown:
        message |= {"content": None, "refusal": ABSTAINED}
    elif calls := job.reader.tool_calls(text):
        written = [{"name": call["name"], "arguments": json.dumps(call["arguments"])} for call in calls]
        name = f"call_{job.id[-12:]}"
        calls = [{"id": f"{name}_{i}", "type": "function", "function": each} for i, each in enumerate(written)]
        message |= {"content": None, "tool_calls": calls}
    # A share of weighted votes, or a posterior, is not what was calibrated.
    described = None if scaled is None and stated not in values else calibration.describe(source)
    drawn = [
        {"text": one.text, "answer": one.answer, "confidence": value, "tokens": one.num_tokens}
        for one, value in zip(used, values, strict=True)
    ]
    finish_reason = "tool_calls" if "tool_calls" in message else "length" if is_cut else "stop"
    return Reply(
        job,
        best,
        message,
        finish_reason,
        _usage(job, outcome),
        {
            "confidence": stated,
            "raw_confidence": raw,
            "source": source,
            "cocoa": agreed,
            "calibrated": described is not None,
            "calibration": described,
            "answer": answer if shown else None,
            "chosen_by": chosen_by,
            "candidates": _candidates(used, values) if shown else [],
            "samples_used": verdict.samples_used,
            "samples_cancelled": max(verdict.samples_generated - verdict.samples_used, 0),
            "samples_failed": outcome.failed,
            "stop_reason": outcome.stop_reason,
            "guarantee": guarantee,
            "abstained": not shown,
            **({"samples": drawn} if options.return_ == "all" and shown else {}),
        },
    )


def _usage(job: Job, outcome: Outcome) -> dict[str, int] | None:
    """Return what was read, queries included, and drawn; None where a closed server does not say.

    What such a server dropped, nobody knows.
    """
    drawn = outcome.verdict.tokens_generated
    drawn = total_tokens(outcome.samples, 0) if drawn is None else drawn - outcome.queries
    if drawn is None:
        return None
    read = job.prompt_tokens + outcome.queries
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


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
