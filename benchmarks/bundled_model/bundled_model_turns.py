"""Rows for learning to verify: the model's own responses with their verdicts, beside solutions that it rehearses."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bundled_model_data import FULL, cut_batches, write_problem_parts
from bundled_model_labels import mark_wrong_characters
from bundled_model_measuring import SAMPLING, Drawn, draw_responses
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from selfcal_lightning.data.tasks.word_problems import Problem, sample_problem
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message

IGNORED, REHEARSED, YES, NO = range(4)
UNMARKED = -1
SAMPLES_OF_EACH_KIND = 2


@dataclass(frozen=True, slots=True)
class Turn:
    token_ids: list[int]
    kinds: list[int]
    marks: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class TurnBatch:
    """Rows padded on the right.

    Attributes:
        token_ids: [B, T] int64.
        kinds: [B, T] int64, ``IGNORED`` on padding.
        marks: [B, T, 2] float32, ``UNMARKED`` on padding.
    """

    token_ids: Tensor
    kinds: Tensor
    marks: Tensor


def draw_turns(model: PreTrainedModel, chat: ChatFormat, *, problems: int, seed: str) -> list[Turn]:
    """Draw the model's responses to fresh problems, half at temperature 1 and half by EDT, and judge them by truth."""
    rng = random.Random(f"turns/{seed}")
    asked = [sample_problem(rng, "pretrain", difficulty=FULL) for _ in range(problems)]
    turns = []
    for sampling in SAMPLING.values():
        drawn = draw_responses(
            model, chat, asked, samples=SAMPLES_OF_EACH_KIND, sampling=sampling, seed=rng.getrandbits(31), ask=False
        )
        turns += [write_turn(chat, asked[sample.question], sample) for sample in drawn if sample.answer is not None]
    return turns


def write_turn(chat: ChatFormat, problem: Problem, sample: Drawn) -> Turn:
    """Write the prompt, an own response, the query and the verdict; only the verdict is learnt, and the marks."""
    prompt = chat.prompt_ids([Message("user", problem.question)])
    verdict = (chat.response_ids("Yes"), chat.response_ids("No"))[not sample.correct]
    tail = [*chat.query.suffix_ids, *verdict]
    wrong = mark_wrong_characters(problem, sample.text)
    so_far = np.logical_or.accumulate(wrong)
    last_characters = np.cumsum([len(chat.decode([token])) for token in sample.token_ids]) - 1
    return Turn(
        [*prompt, *sample.token_ids, *tail],
        [IGNORED] * (len(prompt) + len(sample.token_ids) + len(tail) - 1) + [YES if sample.correct else NO],
        [
            *[(UNMARKED, UNMARKED)] * len(prompt),
            *[(int(wrong[character]), int(so_far[character])) for character in last_characters],
            *[(UNMARKED, UNMARKED)] * len(tail),
        ],
    )


def write_rehearsals(chat: ChatFormat, *, number: int, seed: str) -> list[Turn]:
    """Write fresh problems with pupils' solutions, so that answering is not unlearnt."""
    rng = random.Random(f"rehearsals/{seed}")
    turns = []
    for _ in range(number):
        encoded = [
            (chat.tokenizer.encode(text, add_special_tokens=False), learnt)
            for text, learnt in write_problem_parts(rng, FULL)
        ]
        token_ids = [token for tokens, _ in encoded for token in tokens]
        kinds = [REHEARSED if learnt else IGNORED for tokens, learnt in encoded for _ in tokens]
        turns.append(Turn(token_ids, kinds, [(UNMARKED, UNMARKED)] * len(token_ids)))
    return turns


def batch_turns(turns: Sequence[Turn], *, tokens: int, rng: random.Random) -> Iterator[TurnBatch]:
    """Yield every row once, in batches of similar lengths of at most ``tokens`` tokens, in random order."""
    batches = list(cut_batches(sorted(turns, key=_length), tokens, _length))
    rng.shuffle(batches)
    for batch in batches:
        yield TurnBatch(
            pad_sequence([torch.tensor(turn.token_ids) for turn in batch], batch_first=True),
            pad_sequence([torch.tensor(turn.kinds) for turn in batch], batch_first=True, padding_value=IGNORED),
            pad_sequence(
                [torch.tensor(turn.marks, dtype=torch.float32) for turn in batch],
                batch_first=True,
                padding_value=UNMARKED,
            ),
        )


def _length(turn: Turn) -> int:
    return len(turn.token_ids)
