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
from selfcal_lightning.serving.desk import Job

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
        method, questions, ece = source, None, None
        if (scorer := next((one for one in self.scorers if one.name == source), None)) is not None:
            if isinstance(scorer, Fusion):
                method, score = "fusion", next(reversed([*scorer.scores, *scorer.held_out_scores]), None)
            else:
                method, score = scorer.map.kind, scorer.held_out_after or scorer.after
            questions, ece = scorer.fitted_on.num_questions, None if score is None else score.ece
        elif self.probe is not None and source == self.probe.name and self.probe.fitted_on is not None:
            questions = self.probe.fitted_on.num_questions
        elif source == P_TRUE and self.manifest is not None:
            metrics = self.manifest.get("metrics") or {}
            method, questions = "self_calibration", metrics.get("val/count/Questions")
            ece = metrics.get("val/calibration/ECE")
        else:
            return None
        return {"method": method, "questions": questions, "ece": ece}


def headers_of(reply: Mapping[str, Any]) -> dict[str, str]:
    told = reply["selfcal"]
    return {
        "x-selfcal-confidence": "" if told["confidence"] is None else f"{told['confidence']:.6f}",
        "x-selfcal-samples": str(told["samples_used"]),
        "x-selfcal-stop-reason": told["stop_reason"],
        "x-selfcal-request-id": reply["id"],
    }


def head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.body.model}


def chunk(job: Job, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return head(job, "chat.completion.chunk") | {"choices": [choice]}


def chunks(job: Job, reply: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the chunks of what was not passed on yet."""
    (choice,) = reply["choices"]
    message = choice["message"]
    if message["refusal"] is not None:
        yield chunk(job, refusal=message["refusal"])
    elif "tool_calls" in message:
        yield chunk(job, tool_calls=[{"index": i, **call} for i, call in enumerate(message["tool_calls"])])
    else:
        for start in range(job.sent, len(message["content"]), PIECE):
            yield chunk(job, content=message["content"][start : start + PIECE])
    yield chunk(job, choice["finish_reason"]) | {"selfcal": reply["selfcal"]}
    if job.body.stream_options is not None and job.body.stream_options.include_usage:
        yield chunk(job) | {"choices": [], "usage": reply["usage"]}


def choose(
    job: Job, used: list[Sample], values: list[float | None], read: str | None
) -> tuple[Sample | None, str | None, float | None, str | None, str]:
    """Return the response that is given, its answer, how sure the server is, by which confidence, and what chose it."""
    verdict, own = job.verdict, job.strategy.confidence
    answer, stated, chosen_by = verdict.answer, verdict.confidence, "strategy"
    source: str | None = own or VOTE_SHARE
    answers = [one.answer for one in used if one.answer is not None]
    pairs = enumerate(zip(used, values, strict=True))
    known = [(value, -i) for i, (one, value) in pairs if one.answer is not None and value is not None]
    best = best_response(verdict, job.samples, read) or next(iter(used), None)
    if own is None and known and len(set(answers)) == len(answers) > 1:
        # No two responses agree: there is no vote, and the most confident one is given.
        stated, at = max(known)
        best = used[-at]
        answer, source, chosen_by = best.answer, read, "confidence"
    elif len(used) == 1 or stated is None:  # one vote always agrees with itself
        stated, source = None if best is None or answer is None else values[used.index(best)], read
    if read == VERBALIZED and own is None and best is not None:
        both = hybrid([one.answer for one in used], values, num_samples=len(used))[used.index(best)]
        if both is not None:
            stated, source = both, TwoSampleHybrid.name
    return best, answer, stated, source, chosen_by


def make_reply(job: Job, *, calibration: Calibration, confidence: str | None) -> tuple[dict[str, Any], Sample | None]:
    """Return the completion and the sample that it gives; ``confidence`` is what each response has in any case."""
    verdict, fitted, options = job.verdict, job.fitted, job.body.selfcal
    used = [sample for sample in job.samples[: verdict.samples_used] if not is_failed(sample)]
    read = job.strategy.confidence or confidence
    values = [None if read is None else confidence_of(sample, read) for sample in used]
    best, answer, raw, source, chosen_by = choose(job, used, values, read)
    agreed = Cocoa.of_clusters(used, [one.answer for one in used])[used.index(best)] if best in used else None
    given = ((VOTE_SHARE if source == VOTE_SHARE else STATED, raw), (Cocoa.name, agreed))
    known = {name: value for name, value in given if value is not None}
    if best is not None:  # a label keeps them
        best = replace(best, confidences={**best.confidences, **known})
    scaled = calibration.of_answer(known)
    stated, source = scaled or (raw, source)
    threshold = getattr(job.strategy, "threshold", None) if options.threshold is None else options.threshold
    if threshold is not None and getattr(job.strategy, "criterion", None) == "entropy":
        threshold = 1.0 - threshold  # the confidence is one minus the entropy, which has to fall to it
    is_low = answer is None or (threshold is not None and (stated is None or stated < threshold))
    guarantee = None
    if fitted is not None and fitted.target == "risk" and job.stop_reason in OF_STRATEGY:
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
    told: dict[str, Any] = {"confidence": stated, "raw_confidence": raw, "source": source, "cocoa": agreed}
    told |= {"calibrated": described is not None, "calibration": described}
    told |= {"answer": answer if shown else None, "chosen_by": chosen_by}
    told |= {"candidates": _candidates(used, values) if shown else [], "samples_used": verdict.samples_used}
    told |= {"samples_cancelled": max(verdict.samples_generated - verdict.samples_used, 0)}
    told |= {"samples_failed": sum(map(is_failed, job.samples)), "stop_reason": job.stop_reason}
    told |= {"guarantee": guarantee, "abstained": not shown}
    if options.return_ == "all" and shown:
        told["samples"] = [
            {"text": one.text, "answer": one.answer, "confidence": value, "tokens": one.num_tokens}
            for one, value in zip(used, values, strict=True)
        ]
    finish_reason = "tool_calls" if "tool_calls" in message else "length" if is_cut else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    return {**head(job, "chat.completion"), "choices": [choice], "usage": _usage(job), "selfcal": told}, best


def _usage(job: Job) -> dict[str, int] | None:
    """Return what was read, queries included, and drawn; None where a closed server does not say."""
    drawn = job.verdict.tokens_generated
    drawn = total_tokens(job.samples, 0) if drawn is None else drawn - job.queries
    if drawn is None:
        return None
    read = job.prompt_tokens + job.queries
    return {"prompt_tokens": read, "completion_tokens": drawn, "total_tokens": read + drawn}


def _candidates(used: Sequence[Sample], values: Sequence[float | None]) -> list[dict[str, Any]]:
    """Return the answers, most votes first."""
    rows = []
    for answer in dict.fromkeys(sample.answer for sample in used if sample.answer is not None):
        stated = [value for sample, value in zip(used, values, strict=True) if sample.answer == answer]
        known = [value for value in stated if value is not None]
        weight, most = sum(known) if known else None, max(known, default=None)
        rows.append({"answer": answer, "votes": len(stated), "weight": weight, "confidence": most})
    return sorted(rows, key=lambda row: -row["votes"])
