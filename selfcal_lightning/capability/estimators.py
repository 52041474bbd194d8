"""Estimators of capability: those that read only the question, and those that read some of its responses."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np

from selfcal_lightning.capability.question_table import QuestionTable
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.confidence.verbalized import NUMBERS, PERCENTAGES, TEN_WORDS, VerbalScale, ask_for_confidences
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.store.annotations import annotation_names, question_annotation_names
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.metrics.arrays import Floats
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, QuestionSamples, normalised_p_true, question_hash, sample_seed

PROBE, P_TRUE_BEFORE = "probe", "p_true_before"
# Confidence stated in words before answering, by scale.
VERBAL_ESTIMATORS: Mapping[str, VerbalScale] = {
    "verbalized_before": NUMBERS,
    "verbalized_words_before": TEN_WORDS,
    "verbalized_percent_before": PERCENTAGES,
}
PROMPT_ESTIMATORS = (PROBE, P_TRUE_BEFORE, *VERBAL_ESTIMATORS)
VERBAL_ATTEMPTS, VERBAL_TOKENS = 3, 256
BEFORE_QUERY = "Can you answer the question correctly? (Yes/No)"
_CHUNK = 512


@dataclass(frozen=True)
class ResponseEstimator:
    estimate: Callable[[QuestionTable], Floats]  # one value a question [Q]; nan where unknown
    needs_labels: bool = False
    least_samples: int = 1  # 0 if it reads no response


RESPONSE_ESTIMATORS: Mapping[str, ResponseEstimator] = {
    "agreeing_pairs": ResponseEstimator(lambda table: table.agreeing_pairs, least_samples=2),
    "top_share": ResponseEstimator(lambda table: table.top_share),
    "mean_logprob": ResponseEstimator(lambda table: table.mean_logprob),
    "oracle": ResponseEstimator(lambda table: table.expected_accuracy, needs_labels=True),
    # A fixed uniform number in [0, 1) for each question, as a baseline.
    "random": ResponseEstimator(
        lambda table: np.array([question_hash(name) / 2**63 for name in table.question_id]), least_samples=0
    ),
}


def p_true_before(engine: Engine, chat: ChatFormat, questions: Sequence[Question]) -> list[float | None]:
    """Ask the model whether it can answer each question, and return Yes / (Yes + No).

    The query follows an empty response, like the confidence query, so that training on empty responses teaches it.
    """
    query = chat.query
    yes = len(query.yes_ids)
    found: list[float | None] = []
    with Progress(len(questions), label="Asking before answering", unit="questions") as progress:
        for start in range(0, len(questions), _CHUNK):
            chunk = questions[start : start + _CHUNK]
            prompts = [chat.prompt_ids(question.messages) + query.suffix_ids for question in chunk]
            rows = engine.next_token_probabilities(prompts, [*query.yes_ids, *query.no_ids])
            found += [None if row is None else normalised_p_true(sum(row[:yes]), sum(row[yes:])) for row in rows]
            progress.update(len(chunk))
    return found


def verbalized_before(
    engine: Engine, chat: ChatFormat, questions: Sequence[Question], scale: VerbalScale
) -> list[float | None]:
    """Ask the model to state how likely it is to answer each question correctly, after an empty response.

    Asks again at temperature 1 where a reply cannot be read; never fills in .5.
    """
    asked = [chat.prompt_ids(question.messages) + chat.query.suffix_ids for question in questions]
    seeds = {
        prompt: sample_seed(0, 0, question.id, 0)
        for question, prompt in zip(questions, asked, strict=True)
        if len(prompt) + VERBAL_TOKENS <= engine.max_context
    }
    stated: dict[tuple[int, ...], float] = {}
    prompts = list(seeds)
    with Progress(len(prompts), label="Asking before answering", unit="questions") as progress:
        for start in range(0, len(prompts), _CHUNK):
            chunk = {prompt: seeds[prompt] for prompt in prompts[start : start + _CHUNK]}
            stated |= ask_for_confidences(
                engine, chunk, parse=scale.parse, attempts=VERBAL_ATTEMPTS, max_new_tokens=VERBAL_TOKENS
            )
            progress.update(len(chunk))
    return [stated.get(prompt) for prompt in asked]


def averaged_names(pool: Path, names: Sequence[str]) -> list[str]:
    """Return those of ``names`` that are stored confidences, to be averaged over responses."""
    taken = {*RESPONSE_ESTIMATORS, *question_annotation_names(pool)}
    stored = annotation_names(pool)
    return [name for name in names if name in stored and name not in taken]


def mean_confidence(entries: Sequence[QuestionSamples], name: str, *, stop: int) -> Floats:
    """Return the mean of the known confidences over the first ``stop`` responses of each question [Q]; nan of none."""
    known = [[v for one in entry.samples[:stop] if (v := confidence_of(one, name)) is not None] for entry in entries]
    if not any(known):
        questions = f"{len(entries):,} questions"
        raise InputError(f"No response to {questions} has the confidence {name!r}: `selfcal score` adds it.")
    return np.array([fmean(values) if values else math.nan for values in known])
