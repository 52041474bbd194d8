"""What clients say was right: a pool that `fit-confidence` reads, and what the server is worth by it."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from selfcal_lightning.core.files import append_line, open_lines, read_json_lines
from selfcal_lightning.metrics.calibration import brier_score, expected_calibration_error
from selfcal_lightning.records import Sample
from selfcal_lightning.serving.bodies import Refused
from selfcal_lightning.serving.desk import Desk

LABELS, TOLD = "labels.jsonl", "told"
REMEMBERED = 10_000  # answers that feedback may still come for


class Feedback:
    """Appends labels to ``folder / labels.jsonl``, a line at a time, and remembers which answers they are for."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / LABELS
        self.answers: dict[str, dict[str, Any]] = {}
        self.labelled: dict[str, tuple[float | None, bool]] = {}
        if self.path is not None:
            self.file, _ = open_lines(self.path, begin=b'{"id": "', way_out="Name another `feedback_dir`.")
            for _, line in read_json_lines(self.path):
                (response,) = line["responses"]
                self.labelled[line["id"]] = response["confidence"].get(TOLD), response["correct"]

    def remember(self, name: str, question: str, sample: Sample, *, told: float | None) -> None:
        """Keep an answer, with what is known of it, for the label that may come; ``told`` is what the client got."""
        given = {"yes_mass": sample.yes_mass, "no_mass": sample.no_mass, "logprob": sample.logprob, TOLD: told}
        confidence = {**sample.confidences, **{key: value for key, value in given.items() if value is not None}}
        response = {"text": sample.text, "answer": sample.answer, "confidence": confidence, "tokens": sample.num_tokens}
        self.answers[name] = {"id": name, "task": "local_text", "split": "calibration", "question": question}
        self.answers[name] |= {"reference": None, "responses": [response]}
        if len(self.answers) > REMEMBERED:
            del self.answers[next(iter(self.answers))]

    def label(self, name: str, *, correct: bool) -> None:
        """Take a label in; an answer has one."""
        if name in self.labelled:
            raise Refused(409, f"Request {name!r} has its label already.", param="request_id")
        if (line := self.answers.get(name)) is None:
            raise Refused(404, f"Request {name!r} is none of the last {REMEMBERED:,} answers.", param="request_id")
        (response,) = line["responses"]
        response["correct"] = correct
        if self.path is not None:
            append_line(self.file, line)
        del self.answers[name]
        self.labelled[name] = response["confidence"].get(TOLD), correct


class Metrics:
    """What Prometheus reads."""

    def __init__(self, feedback: Feedback, desk: Desk) -> None:
        self.registry = CollectorRegistry()
        own: dict[str, Any] = {"registry": self.registry, "namespace": "selfcal"}
        self.requests = Counter("requests", "Requests by route and status.", ["route", "status"], **own)
        self.stops = Counter("answers", "Answers by what ended the sampling.", ["stop_reason"], **own)
        self.samples = Histogram("samples_per_answer", "Samples.", buckets=(1, 2, 3, 4, 6, 8, 12, 16, 32), **own)
        self.confidence = Histogram("confidence", "Stated.", buckets=[i / 10 for i in range(1, 11)], **own)
        self.seconds = Histogram("answer_seconds", "Time to an answer.", **own)
        self.failed = Counter("failed_samples", "Samples that the engine could not give.", **own)
        self.disconnects = Counter("disconnects", "Clients that went before their answer.", **own)
        Gauge("queue", "Questions in work or waiting.", **own).set_function(lambda: len(desk.jobs))
        text = "Tokens drawn and thrown away since the start."
        Gauge("cancelled_tokens", text, **own).set_function(lambda: desk.cancelled_tokens)
        Gauge("feedback_labels", "Labels.", **own).set_function(lambda: len(feedback.labelled))
        for name, text, measure in (
            ("accuracy", "Share of right.", lambda _, right: fmean(right)),
            ("ece", "ECE.", expected_calibration_error),
            ("brier", "Brier score.", brier_score),
        ):
            Gauge(f"feedback_{name}", text, **own).set_function(partial(from_labels, feedback, measure))

    def count(self, told: Mapping[str, Any], *, seconds: float) -> None:
        """Count an answer by its object ``selfcal``."""
        self.seconds.observe(seconds)
        self.stops.labels(told["stop_reason"]).inc()
        self.samples.observe(told["samples_used"])
        self.failed.inc(told["samples_failed"])
        if told["confidence"] is not None:
            self.confidence.observe(told["confidence"])


def from_labels(feedback: Feedback, measure: Callable[[list[float], list[float]], float | None]) -> float:
    """Return what confidences are worth by the labels; nan where there are none."""
    rows = [(min(max(told, 0.0), 1.0), float(right)) for told, right in feedback.labelled.values() if told is not None]
    value = measure([told for told, _ in rows], [right for _, right in rows]) if rows else None
    return math.nan if value is None else value
