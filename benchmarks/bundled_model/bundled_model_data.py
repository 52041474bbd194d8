"""What the bundled model learns from: its tokenizer, its examples, and the batches along the curriculum."""

import random
import re
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from operator import eq
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast

from selfcal_lightning.data.tasks import word_problems
from selfcal_lightning.models.chat_format import DEFAULT_QUERY


def compute_forgetfully(equation: word_problems.Equation, rng: random.Random, chance: float) -> int:
    """Return the result of an equation as a pupil gets it, column by column; each carry is forgotten with a chance.

    Divisions and products of long numbers are always right.
    """
    small, large = sorted((equation.left, equation.right))
    pairs = list(zip_longest(map(int, reversed(str(large))), map(int, reversed(str(small))), fillvalue=0))
    if equation.operator == "+":
        columns = [one + other for one, other in pairs]
    elif equation.operator == "-" and equation.left > equation.right:
        columns = [one - other for one, other in pairs]  # what is borrowed is a carry of -1
    elif equation.operator == "*" and small < 10:
        columns = [one * small for one, _ in pairs]
    else:
        return equation.result
    result, carry, place = 0, 0, 1
    for column in columns:
        carry, digit = divmod(column + carry, 10)
        result += place * digit
        if carry and rng.random() < chance:
            carry = 0
        place *= 10
    return result + place * carry


def write_pupil_solution(problem: word_problems.Problem, rng: random.Random, chance: float) -> str:
    """Write a solution whose carries are forgotten with probability ``chance``, later steps using what was written.

    Where a slip would lead to a step that makes no sense (nothing left, or more taken away than there is), the right
    solution is written.
    """
    written: dict[int, int] = {}
    parts: list[str] = []
    result = 0
    for index, equation in enumerate(problem.equations):
        left = written.get(equation.left, equation.left)
        right = equation.right if equation.operator == "/" else written.get(equation.right, equation.right)
        step = word_problems.Equation(left, equation.operator, right)
        result = compute_forgetfully(step, rng, chance) if step.result > 0 else 0
        if result <= 0:
            return word_problems.write_solution(problem, rng)
        if result != equation.result:
            written[equation.result] = result
        connective = word_problems.CONNECTIVES[0] if index == 0 else rng.choice(word_problems.CONNECTIVES[1:])
        parts.append(f"{connective} {left}{equation.operator}{right}={result}.")
    return " ".join([*parts, f"The answer is {result}."])


_EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
_ANSWER = "The answer is "


def mark_wrong_characters(problem: word_problems.Problem, response: str) -> NDArray[np.bool_]:
    """Return which characters of ``response`` stand in a step at or after its first wrong character [len(response)].

    A step is judged by itself: its numbers may come from a wrong step before. Sums and products may be written either
    way round. A response with too few or too many steps has a wrong answer sentence.
    """
    matches = list(_EQUATION.finditer(response))
    steps: list[tuple[int, str, str]] = []  # where it begins, what is due there, and what was written
    written: dict[int, int] = {}
    for equation, match in zip(problem.equations, matches, strict=False):
        operator: word_problems.Operator = equation.operator
        left = written.get(equation.left, equation.left)
        right = equation.right if operator == "/" else written.get(equation.right, equation.right)  # divisors are given
        if operator in "+*" and (int(match[3]), match[2], int(match[1])) == (left, operator, right):
            left, right = right, left
        due = f"{word_problems.Equation(left, operator, right)}."
        steps.append((match.start(), due, response[match.start() : match.end() + 1]))
        if int(match[4]) != equation.result:
            written[equation.result] = int(match[4])
    if (start := response.rfind(_ANSWER)) >= 0:
        complete = bool(matches) and len(matches) == len(problem.equations)
        steps.append((start, f"{_ANSWER}{int(matches[-1][4])}." if complete else "", response[start:]))
    wrong = np.zeros(len(response), dtype=bool)
    for start, due, got in steps:
        num_right = [*map(eq, due, got), False].index(False)
        wrong[start + num_right : start + len(got)] = True
    return wrong


CONTROL_TOKENS = ("<|pad|>", "<|bos|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
VOCAB_SIZE = 704
CONTEXT = 512
FORGETTING = 0.3  # chance that a pupil forgets a carry
FULL = word_problems.Difficulty(level_weights=(0.25, 0.4, 0.35), step_weights=(0.1, 0.25, 0.3, 0.2, 0.15))
SHORT = word_problems.Difficulty(level_weights=(0.4, 0.35, 0.25), step_weights=(0.5, 0.5, 0.0, 0.0, 0.0))

BATCH_TOKENS = 2_500  # with padding
DRILLS_UNTIL, SHORT_UNTIL = 0.1, 0.45  # shares of all steps
Part = tuple[str, bool]
"""A piece of text and whether its tokens are learnt."""


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE in which every digit, sign and control token stands alone."""
    rng = random.Random(f"tokenizer/{seed}")
    texts = [DEFAULT_QUERY, "Yes", "No"] * 2_000
    for _ in range(10_000):
        problem = word_problems.sample_problem(rng, "pretrain", difficulty=FULL)
        texts += [problem.question, word_problems.write_solution(problem, rng)]
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


def write_problem_parts(rng: random.Random, difficulty: word_problems.Difficulty) -> list[Part]:
    problem = word_problems.sample_problem(rng, "pretrain", difficulty=difficulty)
    solution = write_pupil_solution(problem, rng, FORGETTING)
    return [(f"<|bos|><|user|>{problem.question}<|end|><|assistant|>", False), (f"{solution}<|end|>", True)]


def write_drill_parts(rng: random.Random) -> list[Part]:
    parts: list[Part] = [("<|bos|><|user|>How much is that?<|end|><|assistant|>", False)]
    for index in range(8):
        draft = word_problems.Draft(rng, rng.choices((1, 2, 3), weights=(0.2, 0.4, 0.4))[0], steps=0)
        value = draft.number()
        if rng.random() < 0.3:
            value = min(9_000, value * rng.randint(2, 9))
        operator, number = draft.operand(value, ("+", "-", "*", "*", "/"))
        if operator == "+" and rng.random() < 0.5:
            value, number = number, value
        equation = word_problems.Equation(value, operator, number)
        connective = word_problems.CONNECTIVES[0] if index == 0 else f" {rng.choice(word_problems.CONNECTIVES[1:])}"
        parts.append((f"{connective} {equation.left}{equation.operator}{equation.right}=", False))
        parts += [(str(equation.result), True), (".", False)]
    return parts


def encode_parts(tokenizer: PreTrainedTokenizerFast, parts: Sequence[Part]) -> tuple[list[int], list[bool]]:
    encoded = tokenizer([text for text, _ in parts], add_special_tokens=False)["input_ids"]
    learnt = [flag for piece, (_, flag) in zip(encoded, parts, strict=True) for _ in piece]
    return [token for piece in encoded for token in piece], learnt


def stream_batches(tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield ``(token ids [B, T], learnt [B, T])``, one batch for each of the steps, along the curriculum."""
    rng = random.Random(f"train/{seed}")
    step = 0
    while True:
        progress = step / steps
        short = progress < SHORT_UNTIL
        drill_share = 1.0 if progress < DRILLS_UNTIL else 0.3 if short else 0.1
        difficulty = SHORT if short else FULL
        examples = []
        for _ in range(2_048):
            parts = write_drill_parts(rng) if rng.random() < drill_share else write_problem_parts(rng, difficulty)
            examples.append([column[:CONTEXT] for column in encode_parts(tokenizer, parts)])
        for batch in padded_batches(examples, rng, padding=(0, False)):
            yield batch
            step += 1


def padded_batches(
    examples: Sequence[Sequence[Sequence[Any]]], rng: random.Random, *, padding: Sequence[float]
) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of examples of similar lengths, in random order, their columns padded on the right [B, T]."""
    batches: list[list[Any]] = [[]]
    for example in sorted(examples, key=lambda example: len(example[0])):
        if batches[-1] and (len(batches[-1]) + 1) * len(example[0]) > BATCH_TOKENS:
            batches.append([])
        batches[-1].append(example)
    rng.shuffle(batches)
    for batch in batches:
        columns = ([torch.tensor(row) for row in column] for column in zip(*batch, strict=True))
        yield tuple(pad_sequence(rows, True, value) for rows, value in zip(columns, padding, strict=True))
