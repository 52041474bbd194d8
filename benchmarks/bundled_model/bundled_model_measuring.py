"""What the bundled model can do: responses to the test splits, drawn by the project's engine, judged by the task."""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from shared.tables import triple
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import Problem, WordProblems
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.metrics.arrays import AUROC, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import Estimate, bootstrap_interval, resample_counts
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Message, Request, Response, SamplingSettings, normalised_p_true, sample_seed

MAX_NEW_TOKENS = 120
MAX_BATCH = 512
SAMPLING = {
    "EDT": SamplingSettings(temperature=0.8, edt_scale=0.8, edt_theta=1.0, max_new_tokens=MAX_NEW_TOKENS),
    "T=1": SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=MAX_NEW_TOKENS),
}
TEST_SPLITS = ("test_id", "test_ood")

Figures = dict[str, dict[str, float | None]]
"""Value and ends of the 95 % interval, by name of the figure."""


@dataclass(frozen=True, slots=True)
class Drawn:
    question: int
    text: str
    token_ids: tuple[int, ...]
    answer: str | None
    correct: bool
    logprob: float
    p_true: float | None


def draw_responses(
    model: PreTrainedModel,
    chat: ChatFormat,
    problems: Sequence[Problem],
    *,
    samples: int,
    sampling: SamplingSettings,
    seed: int,
    ask: bool = True,
) -> list[Drawn]:
    task = WordProblems()
    engine = TransformersEngine.from_model(model, chat, max_batch=MAX_BATCH, source="in memory")
    order = sorted(range(len(problems)), key=lambda index: len(problems[index].question))
    requests, owners = [], {}
    for index in order:
        prompt = chat.prompt_ids([Message("user", problems[index].question)])
        for sample in range(samples):
            request_id = f"{index}/{sample}"
            owners[request_id] = index
            own_seed = sample_seed(seed, 0, str(index), sample)
            requests.append(Request(request_id, prompt, sampling, own_seed, chat.query if ask else None))
    engine.submit(requests)
    answered: dict[str, Response] = {}
    while responses := engine.poll():
        answered.update((response.request_id, response) for response in responses)
    engine.close()
    drawn = []
    for request_id in sorted(answered, key=lambda name: tuple(map(int, name.split("/")))):
        response, index = answered[request_id], owners[request_id]
        answer = task.extract(response.text) if response.finish == "stop" else None
        correct = task.verify(answer, str(problems[index].answer))
        p_true = normalised_p_true(response.yes_mass, response.no_mass)
        drawn.append(Drawn(index, response.text, response.token_ids, answer, correct, response.logprob, p_true))
    return drawn


def measure(drawn: Sequence[Drawn]) -> Figures:
    questions = [sample.question for sample in drawn]
    correct = [sample.correct for sample in drawn]
    p_true = [sample.p_true for sample in drawn]
    ranked = (AUROC, WITHIN_QUESTION_AUROC)
    scored = bootstrap_interval(p_true, correct, questions, metrics=(PASS_AT_1, ECE, *ranked))
    likelihood = bootstrap_interval([sample.logprob for sample in drawn], correct, questions, metrics=ranked)
    groups: dict[int, list[Drawn]] = defaultdict(list)
    for sample in drawn:
        groups[sample.question].append(sample)

    def mean_over_questions(figure: Callable[[Sequence[Drawn]], float]) -> Estimate:
        values = np.array([figure(group) for group in groups.values()], dtype=np.float64)
        resampled = np.concatenate([counts @ values for counts in resample_counts(len(values))]) / len(values)
        return Estimate.from_resamples(float(values.mean()), resampled)

    estimates = {
        "pass_at_1": scored[PASS_AT_1],
        "majority": mean_over_questions(majority_is_right),
        "majority_gain": mean_over_questions(lambda group: majority_is_right(group) - share_right(group)),
        "weighted_vote_gain": mean_over_questions(
            lambda group: majority_is_right(group, weighted=True) - majority_is_right(group)
        ),
        "always_right": mean_over_questions(lambda group: share_right(group) == 1.0),
        "never_right": mean_over_questions(lambda group: share_right(group) == 0.0),
        "mixed_questions": mean_over_questions(lambda group: 0.0 < share_right(group) < 1.0),
        "mean_p_true": mean_over_questions(mean_p_true),
        "overconfidence": mean_over_questions(lambda group: mean_p_true(group) - share_right(group)),
        "ece": scored[ECE],
        "auroc_p_true": scored[AUROC],
        "auroc_logprob": likelihood[AUROC],
        "within_auroc_p_true": scored[WITHIN_QUESTION_AUROC],
        "within_auroc_logprob": likelihood[WITHIN_QUESTION_AUROC],
        "unreadable": mean_over_questions(lambda group: float(np.mean([sample.answer is None for sample in group]))),
    }
    ends = ("value", "low", "high")
    return {name: dict(zip(ends, triple(estimate), strict=True)) for name, estimate in estimates.items()}


def share_right(group: Sequence[Drawn]) -> float:
    return float(np.mean([sample.correct for sample in group]))


def mean_p_true(group: Sequence[Drawn]) -> float:
    return float(np.mean([sample.p_true for sample in group]))


def majority_is_right(group: Sequence[Drawn], *, weighted: bool = False) -> float:
    """Return 1 if the commonest readable answer, or that of most P(True), is right; the first seen wins a tie."""
    votes: Counter[str] = Counter()
    for sample in group:
        if sample.answer is not None:
            votes[sample.answer] += sample.p_true if weighted else 1
    return float(bool(votes) and any(sample.correct for sample in group if sample.answer == votes.most_common(1)[0][0]))


def evaluate(folder: Path, *, questions: int, samples: int, seed: int) -> dict[str, Figures]:
    chat = ChatFormat(load_tokenizer(str(folder)))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    columns = {}
    for split in TEST_SPLITS:
        problems = WordProblems().load_problems(split, limit=questions)
        for name, sampling in SAMPLING.items():
            drawn = draw_responses(model, chat, problems, samples=samples, sampling=sampling, seed=seed)
            columns[f"{split}, {name}"] = measure(drawn)
            values = {figure: estimate["value"] for figure, estimate in columns[f"{split}, {name}"].items()}
            print(f"{split}, {name}: {values}", flush=True)
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
