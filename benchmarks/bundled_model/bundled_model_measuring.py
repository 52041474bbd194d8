"""What the bundled model can do: responses to the test splits, drawn by the project's engine, judged by the task."""

from __future__ import annotations

import copy
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bundled_model_data import (
    FORGETTING,
    NO,
    REHEARSED,
    UNMARKED,
    YES,
    Turn,
    TurnBatch,
    batch_turns,
    draw_turns,
    write_rehearsals,
)
from bundled_model_training import PROGRESS_EVERY, attend_plainly, build_optimizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import Problem, WordProblems
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.metrics.arrays import AUROC, ECE, PASS_AT_1, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import Estimate, bootstrap_interval, resample_counts
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer
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
    """A sampled response, judged."""

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
    """Draw ``samples`` responses to each problem by the project's engine and judge them; in the problems' order."""
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
    """Return the figures of the card with 95 % intervals over questions; an unreadable answer counts as wrong."""
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
    """Return the mean of one value a question, with its interval over resampled questions.

    Example:
        >>> interval_of_mean([0.25, 0.25])
        Estimate(value=0.25, low=0.25, high=0.25, num_undefined=0)
    """
    values = np.asarray(per_question, dtype=np.float64)
    resampled = np.concatenate([counts @ values for counts in resample_counts(len(values))]) / len(values)
    return Estimate.from_resamples(float(values.mean()), resampled)


def share_right(group: Sequence[Drawn]) -> float:
    """Return the share of right responses to a question."""
    return float(np.mean([sample.correct for sample in group]))


def mean_p_true(group: Sequence[Drawn]) -> float:
    """Return the mean P(True) of the responses to a question."""
    return float(np.mean([sample.p_true for sample in group]))


def majority_is_right(group: Sequence[Drawn], *, weighted: bool = False) -> float:
    """Return 1 if the commonest readable answer, or that of most P(True), is right; the first seen wins a tie."""
    votes: Counter[str] = Counter()
    for sample in group:
        if sample.answer is not None:
            votes[sample.answer] += sample.p_true if weighted else 1
    return float(bool(votes) and any(sample.correct for sample in group if sample.answer == votes.most_common(1)[0][0]))


def weighted_vote_gain(group: Sequence[Drawn]) -> float:
    """Return what weighting the votes by P(True) adds to a question: -1, 0 or 1."""
    return majority_is_right(group, weighted=True) - majority_is_right(group)


def evaluate(folder: Path, *, questions: int, samples: int, seed: int) -> dict[str, Figures]:
    """Measure the stored model in float32 on both test splits under both ways of sampling."""
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


UPPER_LAYERS = 2
MARKS = 2


@dataclass(frozen=True, slots=True)
class Lesson:
    """One stage of learning to verify. Shares are of its optimiser steps."""

    name: str
    problems: int
    steps: int
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    lower_share: float = 0.2
    warmup: float = 0.02
    decay_from: float = 0.5
    verdict_weight: float = 0.5
    mark_weight: float = 1.0
    yes_weight: float = 1.0
    rehearsals: float = 0.5
    batch_tokens: int = 2_500

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, constant, linear decay to zero."""
        progress = (step + 1) / self.steps
        return max(0.0, min(1.0, progress / self.warmup, (1.0 - progress) / (1.0 - self.decay_from)))


VERIFYING = Lesson("verifying", problems=5_000, steps=1_500)
BELIEVING = Lesson(
    "believing",
    problems=2_100,
    steps=300,
    muon_lr=0.003,
    adam_lr=1e-3,
    warmup=0.06,
    decay_from=0.3,
    mark_weight=0.0,
    yes_weight=16.0,
)


def add_upper_layers(model: LlamaForCausalLM, *, seed: int) -> LlamaForCausalLM:
    """Return the model with ``UPPER_LAYERS`` more, which change nothing as yet: their output projections are zero."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers += UPPER_LAYERS
    torch.manual_seed(seed)
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(model.state_dict(), strict=False)
    for layer in deeper.model.layers[-UPPER_LAYERS:]:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)
    return deeper


class MarkReadOuts(nn.Module):
    """A linear read-out of the marks after each upper layer."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(hidden_size, MARKS) for _ in range(UPPER_LAYERS))

    def loss(self, states: tuple[Tensor, ...], marks: Tensor) -> Tensor:
        """Return the cross-entropy of ``marks`` [B, T, 2], summed over the layers' ``states`` [B, T, hidden]."""
        marked = marks[..., 0] != UNMARKED
        losses = [
            functional.binary_cross_entropy_with_logits(head(state[marked].float()), marks[marked])
            for head, state in zip(self.heads, states[-UPPER_LAYERS:], strict=True)
            if marked.any()
        ]
        return torch.stack(losses).sum() if losses else marks.new_zeros(())


def give_lesson(model: LlamaForCausalLM, chat: ChatFormat, lesson: Lesson, *, seed: int) -> LlamaForCausalLM:
    """Train ``model`` in place on its own responses, drawn before the first step, and return it."""
    model.set_attn_implementation("sdpa")
    turns = draw_turns(model.eval(), chat, problems=lesson.problems, seed=f"{lesson.name}/{seed}")
    if not turns:
        raise ValueError("Expected the model to write readable answers, but got none. Train the generator for longer.")
    attend_plainly(model.train())
    torch.manual_seed(seed)
    read_outs = MarkReadOuts(model.config.hidden_size)
    layers = model.model.layers
    optimizers = build_optimizers(
        matrices=[
            (layers[:-UPPER_LAYERS], lesson.muon_lr * lesson.lower_share),
            (layers[-UPPER_LAYERS:], lesson.muon_lr),
        ],
        others=[(model, lesson.adam_lr * lesson.lower_share), (read_outs, lesson.adam_lr)],
    )
    recent = []
    for step, batch in enumerate(_stream(turns, chat, lesson, seed)):
        if step == lesson.steps:
            break
        losses = _losses(model, read_outs, batch, lesson.yes_weight)
        weights = torch.tensor([1.0, lesson.verdict_weight, lesson.mark_weight])
        (losses @ weights).backward()
        for optimizer, rate in optimizers:
            optimizer.param_groups[0]["lr"] = rate * lesson.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad()
        recent.append(losses.detach())
        if (step + 1) % PROGRESS_EVERY == 0 or step + 1 == lesson.steps:
            answers, verdicts, marks = torch.stack(recent).mean(0).tolist()
            print(
                f"{lesson.name} {step + 1}/{lesson.steps}  answers {answers:.4f}  verdicts {verdicts:.4f}  "
                f"marks {marks:.4f}",
                flush=True,
            )
            recent = []
    return model


def _stream(turns: list[Turn], chat: ChatFormat, lesson: Lesson, seed: int) -> Iterator[TurnBatch]:
    """Yield batches without end: own responses again and again, each time beside fresh rehearsals."""
    rng = random.Random(f"{lesson.name}/{seed}")
    epoch = 0
    while True:
        rehearsed = write_rehearsals(
            chat, number=round(lesson.rehearsals * len(turns)), seed=f"{lesson.name}/{seed}/{epoch}"
        )
        yield from batch_turns([*turns, *rehearsed], tokens=lesson.batch_tokens, rng=rng)
        epoch += 1


def _losses(model: LlamaForCausalLM, read_outs: MarkReadOuts, batch: TurnBatch, yes_weight: float) -> Tensor:
    """Return the mean losses of rehearsed tokens, verdicts and marks [3]; 0 where a batch has none."""
    with torch.autocast("cpu", torch.bfloat16):
        output = model.model(input_ids=batch.token_ids, use_cache=False, output_hidden_states=True)
        learnt = batch.kinds[:, 1:] > 0
        logits = model.lm_head(output.last_hidden_state[:, :-1][learnt])
    kinds = batch.kinds[:, 1:][learnt]
    losses = functional.cross_entropy(logits.float(), batch.token_ids[:, 1:][learnt], reduction="none")
    answers = _weighted_mean(losses, (kinds == REHEARSED).float())
    verdicts = _weighted_mean(losses, (kinds == YES) * yes_weight + (kinds == NO).float())
    return torch.stack([answers, verdicts, read_outs.loss(output.hidden_states, batch.marks)])


def _weighted_mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum().clamp_min(1.0)


LABELS = {
    "pass_at_1": "pass@1",
    "majority": "majority vote",
    "majority_gain": "majority vote minus pass@1",
    "weighted_vote_gain": "vote weighted by P(True) minus majority vote",
    "always_right": "questions always right",
    "never_right": "questions never right",
    "mixed_questions": "questions with right and wrong responses",
    "mean_p_true": "mean P(True)",
    "overconfidence": "mean P(True) minus pass@1",
    "ece": "ECE of P(True), 10 bins",
    "auroc_p_true": "AUROC of P(True)",
    "auroc_logprob": "AUROC of the sequence log-probability",
    "within_auroc_p_true": "within-question AUROC of P(True)",
    "within_auroc_logprob": "within-question AUROC of the log-probability",
    "unreadable": "unreadable or cut answers",
}


def format_figure(figure: dict[str, float | None]) -> str:
    """Return a value with its interval, three decimals each."""
    value, low, high = (figure[key] for key in ("value", "low", "high"))
    return "-" if value is None else f"{value:.3f} [{low:.3f}, {high:.3f}]"


def describe_stage(stage: dict[str, Any]) -> str:
    """Return a stage's steps and name, and whether the run that the card tells of found it made."""
    origin = " (by an earlier run, taken over)" if stage["taken_over"] else ""
    return f"{stage['settings']['steps']:,} {stage['name']}{origin}"


def write_card(folder: Path, report: dict[str, Any]) -> None:
    """Render ``metrics.json`` as the model card."""
    figures = report["figures"]
    columns = list(figures)
    head = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    rows = [
        f"| {label} | " + " | ".join(format_figure(figures[column][key]) for column in columns) + " |"
        for key, label in LABELS.items()
    ]
    steps = ", ".join(describe_stage(stage) for stage in report["stages"])
    minutes, processor_minutes = (
        sum(stage[key] for stage in report["stages"]) for key in ("minutes", "processor_minutes")
    )
    text = f"""# tiny_solver

A Llama-architecture chat model of {report["parameters"]:,} parameters (bfloat16). It solves the templated word problems
of `selfcal_lightning.data.tasks.word_problems` in written steps, and judges its answers when asked
"{DEFAULT_QUERY}": it tells right ones from wrong ones to the same question, but says Yes too readily. This repository
made it, from random weights and generated problems alone, to show and test self-calibration on a CPU; it can do
nothing else.

| | |
|---|---|
| command | `{report["command"]}` |
| seed | {report["seed"]} |
| steps | {steps} |
| training | {processor_minutes:.1f} processor minutes ({minutes:.1f} by the clock) |
| measuring | {report["measure_processor_minutes"]:.1f} processor minutes |
| machine | one CPU thread of a shared machine, torch {report["torch"]} |

It is meant to be wrong about half of the time. The solutions that it learnt from forget each carry and borrow with
probability {FORGETTING}, as a pupil would, and go on with the wrong number. It then learnt to verify from its own
responses, judged by the true answers, with marks where a step goes wrong. In the last steps every Yes counted
{BELIEVING.yes_weight:.0f} times: the overconfidence comes from what it was shown, not from a change of its outputs.

Training saw only the split `pretrain`. It shares no problem with the other splits, but has the families of `test_ood`,
which the splits for calibration lack.

Measured on these files in float32 with {report["questions"]} questions x {report["samples"]} samples a column, with
95 % intervals over questions. EDT is entropy-based dynamic temperature .8/.8/1.0; T=1 is plain sampling.

"""
    (folder / "README.md").write_text(text + "\n".join([*head, *rows]) + "\n")
