"""The view of the store that training and validation read: index columns in memory, tokens read when asked for."""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from torch.utils.data import Dataset

from selfcal_lightning.capability.question_table import TaughtTarget
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.mixture import BoolArray, FloatArray, IntArray
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.datamodules.ssc.teachers import TargetRecipe, mix_in_teacher
from selfcal_lightning.functional.capability import agreeing_pairs, top_share
from selfcal_lightning.functional.consistency import leave_one_out, soft_self_consistency, vote_share
from selfcal_lightning.store.index import SampleIndex
from selfcal_lightning.store.sample_store import SampleStore

TargetName = Literal["ssc", "consistency", "leave_one_out", "leave_one_out_ssc", "p_true", "label", TaughtTarget]
BEFORE_ANSWERING = frozenset(get_args(TaughtTarget))  # learnt after an empty response, one row a question
AGREEMENT = frozenset(  # need several responses
    {"ssc", "consistency", "leave_one_out", "leave_one_out_ssc", "agreeing_pairs", "top_share"}
)
PTrueName = Literal["normalised", "raw"]
LEAVE_ONE_OUT = frozenset({"leave_one_out", "leave_one_out_ssc"})
NO_OTHER, UNTAUGHT = "no other readable response", "nothing for the teacher to read"
NOT_THE_FIRST = "not the first response to its question"
READ_CHUNK = 1024


@dataclass(frozen=True)
class TupleTable:
    """Rows of one split with what training needs to know about them before it reads their tokens.

    Attributes:
        index: Columns of the store, R rows sorted by question and sample.
        target: Target in [0, 1], nan where unknown, [R].
        correct: 1 right, 0 wrong, nan unknown, [R].
        length: Tokens of prompt + response + query, at most ``max_length``, [R].
        prompt_length: Tokens of the prompt alone, [R].
        num_cut: Rows whose response is cut to fit ``max_length``.
        dropped: Number of rows left out, by (task, reason).
        beside: Targets of the K adapters that are trained beside the first one, nan where unknown, [R, K]; None without
            any.
    """

    index: SampleIndex
    target: FloatArray
    correct: FloatArray
    length: IntArray
    prompt_length: IntArray
    num_cut: int = 0
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    beside: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.target)

    def digest(self) -> str:
        """Return what identifies the rows and their targets, 16 hexadecimal digits."""
        content = hashlib.sha256("\n".join(self.index.question_id.tolist()).encode())
        content.update(self.index.sample_index.astype(np.int64).tobytes())
        content.update(self.target.astype(np.float64).tobytes())
        content.update(b"" if self.beside is None else self.beside.astype(np.float64).tobytes())
        return content.hexdigest()[:16]

    def confident(self, eta: float) -> BoolArray:
        """Return which rows may carry the generation loss: readable, with a target strictly above ``eta``, [R]."""
        readable = np.array([answer is not None for answer in self.index.answer], dtype=bool)
        return readable & (np.nan_to_num(self.target) > eta)

    def select(self, mask: np.ndarray, reasons: np.ndarray) -> TupleTable:
        """Keep the rows of ``mask`` and count the others under their ``reasons``."""
        dropped = Counter(zip(self.index.task[~mask], reasons[~mask], strict=True))
        return TupleTable(
            self.index.select(mask),
            self.target[mask],
            self.correct[mask],
            self.length[mask],
            self.prompt_length[mask],
            self.num_cut,
            self.dropped + dropped,
            None if self.beside is None else self.beside[mask],
        )


def question_slices(index: SampleIndex) -> Iterator[slice]:
    """Yield the rows of each question; the index is sorted by question."""
    if len(index):
        edges = np.flatnonzero(np.diff(index.question_index)) + 1
        for start, stop in zip([0, *edges], [*edges, len(index)], strict=True):
            yield slice(int(start), int(stop))


def compute_targets(
    index: SampleIndex, *, target: TargetName, p_true: PTrueName, drop_none: bool
) -> tuple[FloatArray, np.ndarray]:
    """Return (target of every row or nan, the reason where there is none), both [R].

    Targets are never stored; they are computed here from answers and Yes/No masses:

    - ``"ssc"``: soft self-consistency of the question's responses;
    - ``"consistency"``: their vote share;
    - ``"leave_one_out"``: the share of the *other* readable responses that give the same answer;
    - ``"leave_one_out_ssc"``: likewise, the others weighted by their confidences: "ssc" without one's own vote;
    - ``"p_true"``: the response's own confidence, not pooled (an ablation);
    - ``"label"``: whether the response is right (needs references);
    - ``"agreeing_pairs"``, ``"top_share"``, ``"expected_accuracy"`` (needs references): of the question, learnt before
      there is a response, by the first row of the question alone.

    A response without a confidence counts as unreadable for "ssc", "leave_one_out_ssc" and "p_true". Questions imported
    without masses use the confidence named "p_true" in their place, or the finished value that has the target's name.
    """
    masses = index.yes_mass if p_true == "raw" else index.p_true
    values = np.full(len(index), np.nan)
    reasons = np.full(len(index), "", dtype=object)
    nothing = np.full(len(index), np.nan)
    imported = index.confidences.get("p_true", nothing)
    finished = index.confidences.get(target, nothing)
    for rows in question_slices(index):
        answers = index.answer[rows].tolist()
        readable = np.array([answer is not None for answer in answers])
        has_masses = not np.isnan(index.yes_mass[rows]).all()
        confidence = masses[rows] if has_masses else imported[rows]
        if target in BEFORE_ANSWERING:
            values[rows.start] = _of_question(target, answers, _labels(index, rows))
        elif target == "label":
            values[rows] = np.where(readable | (not drop_none), _labels(index, rows), np.nan)
        elif target != "p_true" and not has_masses and not np.isnan(finished[rows]).all():
            values[rows] = np.where(readable | (not drop_none), finished[rows], np.nan)
        elif target == "consistency":
            values[rows] = _floats(vote_share(answers, drop_none=drop_none))
        elif target == "leave_one_out":
            values[rows] = _floats(leave_one_out(answers, drop_none=drop_none))
        elif target == "p_true":
            values[rows] = np.where(readable | (not drop_none), confidence, np.nan)
        else:
            known = [None if np.isnan(value) else float(value) for value in confidence]
            pool = soft_self_consistency if target == "ssc" else leave_one_out
            values[rows] = _floats(pool(answers, known, drop_none=drop_none))
        made_of = _labels(index, rows) if target in ("label", "expected_accuracy") else confidence
        reasons[rows] = _reasons(target, readable, made_of)
    reasons[~np.isnan(values)] = ""
    return values, reasons


def _of_question(target: TargetName, answers: Sequence[str | None], labels: FloatArray) -> float:
    """Return what the responses say about their question; nan where they do not."""
    if target == "expected_accuracy":
        return float(labels.mean())
    value = agreeing_pairs(answers) if target == "agreeing_pairs" else top_share(answers)
    return np.nan if value is None else value


def _reasons(target: TargetName, readable: np.ndarray, made_of: FloatArray) -> np.ndarray:
    """Return why each response to a question has no target, if it has none, [n].

    Args:
        target: Name of the target.
        readable: Which responses have an answer, [n].
        made_of: The labels or confidences that the target is made of, nan where there is none, [n].
    """
    if target in BEFORE_ANSWERING:
        first = "no label" if target == "expected_accuracy" else NO_OTHER
        return np.where(np.arange(len(readable)) > 0, NOT_THE_FIRST, first)
    if target == "leave_one_out":  # the one that is made of neither
        return np.where(readable, NO_OTHER, "unreadable")
    counted = (readable & ~np.isnan(made_of)).sum()
    left = NO_OTHER if target in LEAVE_ONE_OUT and counted < 2 else "zero confidence mass"
    absent = "no label" if target == "label" else "no confidence"
    return np.where(~readable, "unreadable", np.where(np.isnan(made_of), absent, left))


def build_table(
    store: SampleStore,
    index: SampleIndex,
    collator: SSCCollator,
    *,
    recipe: TargetRecipe,
    p_true: PTrueName,
    drop_none: bool,
    beside: Sequence[TargetRecipe] = (),
) -> tuple[TupleTable, np.ndarray]:
    """Return the table of all rows that fit, and for each the reason why it has no target ("" where it has one).

    Args:
        store: The store.
        index: Columns of the rows, with the annotations that a teacher reads.
        collator: What will encode the rows.
        recipe: How targets are made.
        p_true: Confidence that they are made of.
        drop_none: Whether unreadable responses have none.
        beside: Recipes of the adapters that are trained beside the first one; a row that lacks one of these targets
            has none.
    """
    made = [_follow(one, index, p_true=p_true, drop_none=drop_none) for one in (recipe, *beside)]
    return make_table(store, index, collator, made)


def make_table(
    store: SampleStore,
    index: SampleIndex,
    collator: SSCCollator,
    made: Sequence[tuple[FloatArray, np.ndarray]],
    lengths: tuple[IntArray, IntArray] | None = None,
) -> tuple[TupleTable, np.ndarray]:
    """Return the table of all rows that fit, and for each the reason why it has no target ("" where it has one).

    Args:
        store: The store.
        index: Columns of the rows.
        collator: What will encode the rows.
        made: Targets of the rows, nan where there is none, and the reasons why, [R] each: first those that are taught,
            then those of the adapters beside.
        lengths: Tokens of every row's prompt and response, [R] each; None counts them.
    """
    prompt, response = known_lengths(store, index, collator) if lengths is None else lengths
    response = np.zeros_like(response) if collator.empty else response
    room = collator.room_for_response(prompt)
    values, reasons = made[0]
    for _, further in made[1:]:
        reasons = np.where(reasons == "", further, reasons)
    others = np.column_stack([column for column, _ in made[1:]]) if made[1:] else None
    correct = np.full(len(index), np.nan)
    for rows in question_slices(index):
        correct[rows] = _labels(index, rows)
    fits = room >= 1
    length = collator.max_length - np.maximum(room - response, 0)
    num_cut = int((fits & (response > room)).sum())
    table = TupleTable(index, values, correct, length, prompt, num_cut=num_cut, beside=others)
    too_long = np.full(len(index), "prompt too long", dtype=object)
    return table.select(fits, too_long), reasons[fits]


def _follow(
    recipe: TargetRecipe, index: SampleIndex, *, p_true: PTrueName, drop_none: bool
) -> tuple[FloatArray, np.ndarray]:
    """Return the target of every row by a recipe, nan where it has none, and the reason why, [R] each."""
    values, reasons = compute_targets(index, target=recipe.target, p_true=p_true, drop_none=drop_none)
    mixed = mix_in_teacher(values, index, recipe)
    return mixed, np.where(np.isnan(mixed) & ~np.isnan(values), UNTAUGHT, reasons)


def known_lengths(store: SampleStore, index: SampleIndex, collator: SSCCollator) -> tuple[IntArray, IntArray]:
    """Return the tokens of every row's prompt and response, [R] each.

    Rows made elsewhere carry no token ids: their texts are encoded here, since it must be known whether they fit the
    longest sequence and the token budget, and what they state may be counted by another tokenizer. It takes half a
    millisecond a response of 360 tokens.
    """
    prompt, response = index.num_prompt_tokens.copy(), index.num_tokens.copy()
    unknown = np.flatnonzero((prompt < 0) | (response < 0))
    encoded: dict[str, int] = {}
    for start in range(0, len(unknown), READ_CHUNK):
        rows = unknown[start : start + READ_CHUNK]
        for row, stored in zip(rows, store.read_rows(index.locate(rows)), strict=True):
            name = stored.question.id
            if prompt[row] < 0 and name not in encoded:
                encoded[name] = len(collator.chat.prompt_ids(stored.question.messages))
            prompt[row] = encoded.get(name, prompt[row])
            ids = stored.sample.token_ids
            response[row] = len(collator.chat.response_ids(stored.sample.text) if ids is None else ids)
    return prompt, response


class TupleDataset(Dataset[TupleRows]):
    """Map-style view: given a micro-batch of row numbers, reads just these rows from the shards."""

    def __init__(self, store: SampleStore, table: TupleTable) -> None:
        self.store = copy.copy(store)  # without open files, which worker processes must not share
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, row: int) -> TupleRows:
        """Return one row, unweighted."""
        nothing = np.zeros(1)
        return self.__getitems__(MicroBatch(np.array([row]), np.array([True]), nothing, nothing, 0.0, 0.0))

    def __getitems__(self, micro: MicroBatch) -> TupleRows:
        """Return the rows of ``micro``; the data loader calls this with what the batch sampler yields."""
        table, rows = self.table, micro.rows
        return TupleRows(
            micro=micro,
            stored=self.store.read_rows(table.index.locate(rows)),
            target=table.target[rows],
            correct=table.correct[rows],
            question_index=table.index.question_index[rows],
            beside_target=None if table.beside is None else table.beside[rows],
        )


def _labels(index: SampleIndex, rows: slice) -> FloatArray:
    """Return ``correct`` of a question's rows; an unreadable response to a labelled question is wrong."""
    correct = index.correct[rows]
    unreadable = np.array([answer is None for answer in index.answer[rows]])
    labelled = not np.isnan(correct).all()
    return np.where(np.isnan(correct) & unreadable & labelled, 0.0, correct)


def _floats(values: list[float | None]) -> FloatArray:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
