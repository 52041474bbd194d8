"""What the bundled model can do: its responses to the test splits, sampled here and judged by the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from selfcal_lightning.functional.calibration import expected_calibration_error
from selfcal_lightning.functional.discrimination import auroc, within_question_discrimination
from selfcal_lightning.functional.sampling import sampling_probabilities
from selfcal_lightning.prompts import ChatFormat, load_tokenizer
from selfcal_lightning.tasks.word_problems import WordProblems


@dataclass(frozen=True, slots=True)
class Drawn:
    """A sampled response, judged."""

    question: int
    answer: str | None
    correct: bool
    logprob: float
    p_true: float
    truncated: bool


def draw_next(logits: Tensor, dynamic: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a token per row at temperature 1 or by EDT .8/.8/1; return the tokens and their untempered log p."""
    settings = {"temperature": 0.8, "edt_scale": 0.8} if dynamic else {"temperature": 1.0, "edt_scale": None}
    tokens = torch.multinomial(sampling_probabilities(logits, **settings), 1, generator=generator)
    return tokens[:, 0], logits.float().log_softmax(-1).gather(1, tokens)[:, 0]


def draw_responses(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], end: int, dynamic: bool, generator: torch.Generator
) -> tuple[list[list[int]], list[float], list[bool]]:
    """Return the token ids without end-of-turn, log-probabilities and truncation of one response a prompt."""
    longest, max_new = max(map(len, prompts)), 128
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    cache, responses, logprobs = DynamicCache(), [[] for _ in prompts], [0.0] * len(prompts)
    running = set(range(len(prompts)))
    for _ in range(max_new):
        positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
        tokens, values = draw_next(output.logits[:, -1], dynamic, generator)
        for row, (token, value) in enumerate(zip(tokens.tolist(), values.tolist(), strict=True)):
            if token == end:
                running.discard(row)
            elif row in running:
                responses[row].append(token)
                logprobs[row] += value
        if not running:
            break
        ids = tokens[:, None]
        mask = torch.cat([mask, torch.ones(len(prompts), 1, dtype=torch.long)], dim=1)
    return responses, logprobs, [row in running for row in range(len(prompts))]


def read_p_true(model: LlamaForCausalLM, chat: ChatFormat, sequences: Sequence[Sequence[int]]) -> list[float]:
    """Return normalised P(True) of sequences of prompt and response ids."""
    full = [torch.tensor([*sequence, *chat.query.suffix_ids]) for sequence in sequences]
    ids = torch.nn.utils.rnn.pad_sequence(full, batch_first=True, padding_value=chat.pad_id)
    last = torch.tensor([len(sequence) - 1 for sequence in full])
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[torch.arange(len(full)), last]
    probabilities = model.lm_head(hidden).float().softmax(-1)
    yes = probabilities[:, list(chat.query.yes_ids)].sum(-1)
    return (yes / (yes + probabilities[:, list(chat.query.no_ids)].sum(-1))).tolist()


@torch.inference_mode()
def draw_split(
    model: LlamaForCausalLM, chat: ChatFormat, split: str, *, questions: int, samples: int, dynamic: bool, seed: int
) -> list[Drawn]:
    """Sample, read and judge ``samples`` responses to each of the first ``questions`` questions of ``split``."""
    task = WordProblems()
    loaded = task.load(split, limit=questions)
    prompts = [chat.prompt_ids(question.messages) for question in loaded]
    order = sorted(range(len(loaded)), key=lambda index: len(prompts[index]))
    generator = torch.Generator().manual_seed(seed)
    drawn: list[Drawn] = []
    for start in range(0, len(order), 40):
        rows = [index for index in order[start : start + 40] for _ in range(samples)]
        responses, logprobs, truncated = draw_responses(
            model, [prompts[row] for row in rows], chat.tokenizer.eos_token_id, dynamic, generator
        )
        p_true = read_p_true(model, chat, [(*prompts[r], *ids) for r, ids in zip(rows, responses, strict=True)])
        for row, ids, logprob, cut, confidence in zip(rows, responses, logprobs, truncated, p_true, strict=True):
            answer = None if cut else task.extract(chat.decode(ids))
            correct = task.verify(answer, str(loaded[row].reference))
            drawn.append(Drawn(row, answer, correct, logprob, confidence, cut))
    return drawn


def measure(drawn: Sequence[Drawn]) -> dict[str, float | None]:
    """Return the figures of the card, None where undefined; an unreadable answer counts as wrong."""
    questions = [sample.question for sample in drawn]
    correct = [sample.correct for sample in drawn]
    p_true = [sample.p_true for sample in drawn]
    logprob = [sample.logprob for sample in drawn]
    groups: dict[int, list[Drawn]] = {}
    for sample in drawn:
        groups.setdefault(sample.question, []).append(sample)
    shares = np.array([np.mean([sample.correct for sample in group]) for group in groups.values()])
    within_p_true = within_question_discrimination(p_true, correct, questions)
    figures = {
        "pass_at_1": np.mean(correct),
        "majority": np.mean([majority_is_right(group) for group in groups.values()]),
        "always_right": np.mean(shares == 1),
        "never_right": np.mean(shares == 0),
        "mean_p_true": np.mean(p_true),
        "ece": expected_calibration_error(p_true, correct),
        "auroc_p_true": auroc(p_true, correct),
        "auroc_logprob": auroc(logprob, correct),
        "within_auroc_p_true": within_p_true.mean,
        "within_auroc_logprob": within_question_discrimination(logprob, correct, questions).mean,
        "mixed_questions": within_p_true.num_questions,
        "unreadable": np.mean([sample.answer is None for sample in drawn]),
    }
    return {name: None if value is None else round(float(value), 4) for name, value in figures.items()}


def majority_is_right(group: Sequence[Drawn]) -> bool:
    """Return whether the commonest readable answer of a question, the first seen on ties, is right."""
    votes = Counter(sample.answer for sample in group if sample.answer is not None)
    return bool(votes) and any(sample.correct for sample in group if sample.answer == votes.most_common(1)[0][0])


def evaluate(folder: Path, *, questions: int, samples: int, seed: int) -> dict[str, dict[str, float | None]]:
    """Measure the stored model on both test splits under both ways of sampling."""
    chat = ChatFormat(load_tokenizer(str(folder)))
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    figures = {}
    for split in ("test_id", "test_ood"):
        for name, dynamic in (("EDT", True), ("T=1", False)):
            column = f"{split}, {name}"
            drawn = draw_split(model, chat, split, questions=questions, samples=samples, dynamic=dynamic, seed=seed)
            figures[column] = measure(drawn)
            print(f"{column}: {figures[column]}", flush=True)
    return figures
