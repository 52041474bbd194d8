"""What the bundled model can do: responses to the test splits, drawn by the project's engine, judged by the task."""

import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.tables import triple
from transformers import PreTrainedModel

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.data.tasks.judging import judge
from selfcal_lightning.data.tasks.word_problems import Problem, WordProblems
from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.evaluation.metrics import scored_responses
from selfcal_lightning.metrics.arrays import AUROC, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import bootstrap_interval, estimate_of, resample_weights
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, Question, QuestionSamples, Request, SamplingSettings, sample_seed

SAMPLING = {
    "EDT": SamplingSettings(temperature=0.8, edt_scale=0.8, edt_theta=1.0, max_new_tokens=120),
    "T=1": SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=120),
}
Figures = dict[str, dict[str, float | None]]
"""Value and ends of the 95 % interval, by name of the figure."""


def draw_responses(
    model: PreTrainedModel,
    chat: ChatFormat,
    problems: Sequence[Problem],
    *,
    samples: int,
    sampling: SamplingSettings,
    seed: int,
    ask: bool = True,
) -> list[QuestionSamples]:
    task, query = WordProblems(), chat.query if ask else None
    questions = [
        Question(f"{index:06d}", task.name, (Message("user", problem.question),), str(problem.answer), problem.question)
        for index, problem in enumerate(problems)
    ]
    requests = [
        Request(f"{one.id}/{number}", prompt, sampling, sample_seed(seed, 0, str(int(one.id)), number), query)
        for one in sorted(questions, key=lambda one: len(one.text))
        for prompt in [chat.prompt_ids(one.messages)]
        for number in range(samples)
    ]
    engine = TransformersEngine.from_model(model, chat, max_batch=512, source="in memory")
    answered = {response.request_id: response for response in generate(engine, requests)}
    engine.close()
    responses = {one: [answered[f"{one.id}/{number}"] for number in range(samples)] for one in questions}
    return [QuestionSamples(one, judge(one, given, task), "drawn") for one, given in responses.items()]


def measure(pool: Sequence[QuestionSamples]) -> Figures:
    ranked = (AUROC, WITHIN_QUESTION_AUROC)
    of_p_true, of_logprob = (
        bootstrap_interval(**vars(scored_responses(pool, name=name)), metrics=metrics)
        for name, metrics in ((P_TRUE, (PASS_AT_1, ECE, *ranked)), ("sequence_logprob", ranked))
    )
    right, p_true = (
        np.array([np.mean([getattr(sample, column) for sample in entry.samples]) for entry in pool])
        for column in ("correct", "p_true")
    )
    majority, weighted = (np.array([majority_is_right(entry, weighted=way) for entry in pool]) for way in (False, True))
    weights = resample_weights(len(pool))
    figures = {
        "majority": majority,
        "majority_gain": majority - right,
        "weighted_vote_gain": weighted - majority,
        "always_right": right == 1.0,
        "never_right": right == 0.0,
        "mixed_questions": (right > 0.0) & (right < 1.0),
        "mean_p_true": p_true,
        "overconfidence": p_true - right,
        "unreadable": np.array([np.mean([sample.answer is None for sample in entry.samples]) for entry in pool]),
    }
    estimates = {name: estimate_of(values @ weights) for name, values in figures.items()} | {
        "pass_at_1": of_p_true[PASS_AT_1],
        "ece": of_p_true[ECE],
        "auroc_p_true": of_p_true[AUROC],
        "auroc_logprob": of_logprob[AUROC],
        "within_auroc_p_true": of_p_true[WITHIN_QUESTION_AUROC],
        "within_auroc_logprob": of_logprob[WITHIN_QUESTION_AUROC],
    }
    return {name: dict(zip(("value", "low", "high"), triple(one), strict=True)) for name, one in estimates.items()}


def majority_is_right(entry: QuestionSamples, *, weighted: bool) -> float:
    """Return 1 if the commonest readable answer, or that of most P(True), is right; the first seen wins a tie."""
    votes: Counter[str] = Counter()
    for sample in entry.samples:
        if sample.answer is not None:
            votes[sample.answer] += sample.p_true if weighted else 1
    return float(bool(votes) and votes.most_common(1)[0][0] == entry.question.reference)


def evaluate(folder: Path, *, questions: int, samples: int, seed: int) -> dict[str, Figures]:
    chat = ChatFormat(load_tokenizer(str(folder)))
    model = load_causal_lm(str(folder), dtype="float32", attn_implementation="sdpa").eval()
    columns = {}
    for split in ("test_id", "test_ood"):
        problems = WordProblems().load_problems(split, limit=questions)
        for name, sampling in SAMPLING.items():
            drawn = draw_responses(model, chat, problems, samples=samples, sampling=sampling, seed=seed)
            columns[f"{split}, {name}"] = measure(drawn)
            print(f"{split}, {name}: measured", flush=True)
    return columns


# Lowest and highest value of a figure in domain, with EDT.
TARGETS = {
    "within_auroc_p_true": (0.70, math.inf),
    "auroc_p_true": (0.80, math.inf),
    "overconfidence": (0.15, math.inf),
    "pass_at_1": (0.40, 0.55),
    "majority_gain": (0.08, math.inf),
    "unreadable": (-math.inf, 0.02),
}


def unmet_targets(columns: dict[str, Figures]) -> list[str]:
    values = {name: figure["value"] for name, figure in columns["test_id, EDT"].items()}
    return [
        f"Expected `{name}` to lie in [{low}, {high}], but got {values[name]}."
        for name, (low, high) in TARGETS.items()
        if values[name] is None or not low <= values[name] <= high
    ]
