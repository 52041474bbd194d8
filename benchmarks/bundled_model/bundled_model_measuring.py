"""What the bundled model can do: responses to the test splits, drawn by the project's engine, judged by the task."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
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
        return interval_of_mean([figure(group) for group in groups.values()])

    estimates = {
        "pass_at_1": scored[PASS_AT_1],
        "majority": mean_over_questions(majority_is_right),
        "majority_gain": mean_over_questions(lambda group: majority_is_right(group) - share_right(group)),
        "weighted_vote_gain": mean_over_questions(weighted_vote_gain),
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
    return {name: _rounded(estimate) for name, estimate in estimates.items()}


def interval_of_mean(per_question: Sequence[float]) -> Estimate:
    values = np.asarray(per_question, dtype=np.float64)
    resampled = np.concatenate([counts @ values for counts in resample_counts(len(values))]) / len(values)
    return Estimate.from_resamples(float(values.mean()), resampled)


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


def weighted_vote_gain(group: Sequence[Drawn]) -> float:
    return majority_is_right(group, weighted=True) - majority_is_right(group)


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


def _rounded(estimate: Estimate) -> dict[str, float | None]:
    fields = asdict(estimate)
    return {key: None if fields[key] is None else round(fields[key], 4) for key in ("value", "low", "high")}


COLUMN = "test_id, EDT"


@dataclass(frozen=True, slots=True)
class Target:
    figure: str
    low: float = float("-inf")
    high: float = float("inf")

    def is_met(self, figures: Figures) -> bool:
        value = figures[self.figure]["value"]
        return value is not None and self.low <= value <= self.high


TARGETS = (
    Target("within_auroc_p_true", low=0.70),
    Target("auroc_p_true", low=0.80),
    Target("overconfidence", low=0.15),
    Target("pass_at_1", low=0.40, high=0.55),
    Target("majority_gain", low=0.08),
    Target("unreadable", high=0.02),
)


def unmet_targets(columns: dict[str, Figures]) -> list[str]:
    figures = columns[COLUMN]
    sentences = []
    for target in TARGETS:
        if not target.is_met(figures):
            value = figures[target.figure]["value"]
            sentences.append(f"Expected `{target.figure}` to lie in [{target.low}, {target.high}], but got {value}.")
    return sentences
