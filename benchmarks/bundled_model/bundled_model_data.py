"""What the bundled model learns from: its tokenizer, its examples, and the batches along the curriculum."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from bundled_model_slips import write_pupil_solution
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from selfcal_lightning.data.tasks.word_problems import (
    CONNECTIVES,
    Difficulty,
    Draft,
    Equation,
    sample_problem,
    write_solution,
)
from selfcal_lightning.models.chat_format import DEFAULT_QUERY

CONTROL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 704
CONTEXT = 512
FORGETTING = 0.3  # chance that a pupil forgets a carry
FULL = Difficulty(level_weights=(0.25, 0.4, 0.35), step_weights=(0.1, 0.25, 0.3, 0.2, 0.15))
SHORT = Difficulty(level_weights=(0.4, 0.35, 0.25), step_weights=(0.5, 0.5, 0.0, 0.0, 0.0))

Row = TypeVar("Row")
Part = tuple[str, bool]
"""A piece of text and whether its tokens are learnt."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast the generator is trained. Shares are of all optimiser steps."""

    steps: int
    batch_tokens: int = 2_500
    muon_lr: float = 0.01
    adam_lr: float = 3e-3
    warmup: float = 0.02
    decay_from: float = 0.55
    drills_until: float = 0.1
    short_until: float = 0.45

    def lr_factor(self, step: int) -> float:
        progress = (step + 1) / self.steps
        return max(0.0, min(1.0, progress / self.warmup, (1.0 - progress) / (1.0 - self.decay_from)))


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every digit, sign and control token stands alone."""
    rng = random.Random(f"tokenizer/{seed}")
    texts = [DEFAULT_QUERY, "Yes", "No"] * 2_000
    for _ in range(10_000):
        problem = sample_problem(rng, "pretrain", difficulty=FULL)
        texts += [problem.question, write_solution(problem, rng)]
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r"\p{N}| ?\p{L}+|[^\s\p{L}\p{N}]|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "bos_token", "eos_token"), CONTROL_TOKENS[:3], strict=True)),
        padding_side="left",
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


def write_problem_parts(rng: random.Random, difficulty: Difficulty) -> list[Part]:
    problem = sample_problem(rng, "pretrain", difficulty=difficulty)
    solution = write_pupil_solution(problem, rng, FORGETTING)
    return [(f"<|bos|><|user|>{problem.question}<|end|><|assistant|>", False), (f"{solution}<|end|>", True)]


def write_drill_parts(rng: random.Random) -> list[Part]:
    parts: list[Part] = [("<|bos|><|user|>How much is that?<|end|><|assistant|>", False)]
    for index in range(8):
        draft = Draft(rng, rng.choices((1, 2, 3), weights=(0.2, 0.4, 0.4))[0], steps=0)
        value = draft.number()
        if rng.random() < 0.3:
            value = min(9_000, value * rng.randint(2, 9))
        operator, number = draft.operand(value, ("+", "-", "*", "*", "/"))
        if operator == "+" and rng.random() < 0.5:
            value, number = number, value
        equation = Equation(value, operator, number)
        connective = CONNECTIVES[0] if index == 0 else f" {rng.choice(CONNECTIVES[1:])}"
        parts.append((f"{connective} {equation.left}{equation.operator}{equation.right}=", False))
        parts += [(str(equation.result), True), (".", False)]
    return parts


def stream_batches(
    tokenizer: PreTrainedTokenizerFast, schedule: Schedule, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``(token ids [B, T], learnt [B, T])`` batches of similar lengths, one a step, along the curriculum."""
    rng = random.Random(f"train/{seed}")
    step = 0
    while True:
        progress = step / schedule.steps
        short = progress < schedule.short_until
        drill_share = 1.0 if progress < schedule.drills_until else 0.3 if short else 0.1
        difficulty = SHORT if short else FULL
        examples = []
        for _ in range(2_048):
            parts = write_drill_parts(rng) if rng.random() < drill_share else write_problem_parts(rng, difficulty)
            encoded = tokenizer([text for text, _ in parts], add_special_tokens=False)["input_ids"]
            ids = [token for piece in encoded for token in piece]
            learnt = [flag for piece, (_, flag) in zip(encoded, parts, strict=True) for _ in piece]
            examples.append((ids[:CONTEXT], learnt[:CONTEXT]))
        examples.sort(key=_length)
        batches = list(cut_batches(examples, schedule.batch_tokens, _length))
        rng.shuffle(batches)
        for batch in batches:
            ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(i) for i, _ in batch], batch_first=True)
            learnt = torch.nn.utils.rnn.pad_sequence([torch.tensor(m) for _, m in batch], batch_first=True)
            yield ids, learnt
            step += 1


def cut_batches(examples: Sequence[Row], tokens: int, length: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Cut examples sorted by ``length`` into batches of at most ``tokens`` padded tokens."""
    batch: list[Row] = []
    for example in examples:
        if batch and (len(batch) + 1) * length(example) > tokens:
            yield batch
            batch = []
        batch.append(example)
    yield batch


def _length(example: tuple[list[int], list[bool]]) -> int:
    return len(example[0])
