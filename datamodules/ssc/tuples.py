"""The view of the store that training and validation read: index columns in memory, tokens read when asked for."""

import copy
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, Self, get_args

import numpy as np
from torch.utils.data import Dataset

from selfcal_lightning.capability.question_table import TaughtTarget
from selfcal_lightning.confidence.base import LOGPROB, MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.features import LOGIT, NUM_TOKENS, confidence_behind, log_odds
from selfcal_lightning.confidence.fusion import Fusion
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, StoredRow
from selfcal_lightning.datamodules.ssc.collate import RowLayout, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import COUNTED, BoolArray, EpochDraw, MicroBatch, TaskPools
from selfcal_lightning.metrics.arrays import Floats, Integers
from selfcal_lightning.metrics.calibration import expected_calibration_error
from selfcal_lightning.metrics.capability import agreeing_pairs, top_share
from selfcal_lightning.metrics.consistency import leave_one_out, soft_self_consistency, vote_share
from selfcal_lightning.metrics.discrimination import auroc
from selfcal_lightning.training.settings import AuxiliarySettings

OF_THE_STORE = (P_TRUE, LOGPROB, MEAN_LOGPROB)  # columns of its rows; other confidences are annotations


@dataclass(frozen=True)
class TargetRecipe:
    """How the target of a response is made: ``(1 - share) * target + share * teacher``."""

    target: str
    teacher: Fusion | None = None
    share: float = 0.0

    @property
    def annotations(self) -> tuple[str, ...]:
        needed = () if self.teacher is None else self.teacher.requires
        return tuple(name for name in needed if name not in OF_THE_STORE)


def check_teacher(teacher: str | None, teacher_share: float, *, target: str | None) -> None:
    if not 0.0 <= teacher_share <= 1.0:
        raise InputError(f"`teacher_share` must lie in [0, 1], but got {teacher_share}.")
    if teacher is None and teacher_share > 0.0:
        raise InputError(f"`teacher_share` {teacher_share} needs a `teacher`: a file of `selfcal fit-confidence`.")
    if teacher is not None and teacher_share == 0.0:
        raise InputError(f"`teacher_share` must be above 0 with the `teacher` {teacher}, but got 0.")
    if teacher is not None and target in BEFORE_ANSWERING:
        raise InputError(f"Target {target!r} is learnt before a response and takes no `teacher`, but got {teacher}.")


def check_agreement(num_samples: int, target: str) -> None:
    """Refuse targets that would be the agreement of a single response with itself, or with none."""
    if num_samples < 2 and target in AGREEMENT:
        why = "has no other to agree with" if target in LEAVE_ONE_OUT else "always agrees with itself"
        raise InputError(
            f"`num_samples` must be at least 2 with `target={target!r}`, but got {num_samples}: one response {why}. "
            "Raise it (the paper uses 32), or train on `target='label'`."
        )


def check_auxiliary(
    auxiliary: Mapping[str, AuxiliarySettings], *, target: str, num_buckets: int | None, num_samples: int
) -> None:
    """Refuse auxiliary adapters that would not train as they would alone."""
    for name, one in auxiliary.items():
        check_teacher(one.teacher, one.teacher_share, target=one.target or target)
        if one.target is None:
            continue
        if one.target not in TARGETS:
            raise unknown_name(f"auxiliary.{name}.target", one.target, TARGETS)
        check_agreement(num_samples, one.target)
        if (one.target in BEFORE_ANSWERING) != (target in BEFORE_ANSWERING):
            raise InputError(
                "The adapter and its auxiliary adapters must all learn from responses or all from questions, but got "
                f"{target!r} and {one.target!r} of {name!r}."
            )
    if auxiliary and num_buckets not in (None, 1):
        raise InputError(
            f"`num_buckets` must be 1 with auxiliary adapters, but got {num_buckets}: rows are bucketed by the first "
            "adapter's target, not by theirs."
        )


def _feature_columns(index: SampleIndex, features: Sequence[str]) -> Floats:
    """Return the features of every row, nan where one is missing, [R, F]."""
    known = index.num_tokens > 0
    columns = {
        NUM_TOKENS: np.where(index.num_tokens >= 0, index.num_tokens, np.nan).astype(np.float64),
        P_TRUE: np.where(np.isnan(index.yes_mass), index.confidences.get(P_TRUE, np.nan), index.p_true),
        LOGPROB: index.logprob,
        MEAN_LOGPROB: np.divide(index.logprob, index.num_tokens, out=np.full(len(index), np.nan), where=known),
        **{name: values for name, values in index.confidences.items() if name not in OF_THE_STORE},
    }
    missing = sorted({name for feature in features if (name := confidence_behind(feature)) not in columns})
    if missing:
        raise InputError(
            f"The `teacher` reads {', '.join(missing)} of a response, which the store lacks. Add it with `selfcal "
            "score --store_dir`, or fit another soft-label source."
        )
    values = [(feature, columns[confidence_behind(feature)]) for feature in features]
    return np.column_stack([log_odds(one, feature) if feature.startswith(LOGIT) else one for feature, one in values])


TargetName = Literal["ssc", "consistency", "leave_one_out", "leave_one_out_ssc", "p_true", "label", TaughtTarget]
TARGETS = get_args(TargetName)
BEFORE_ANSWERING = frozenset(get_args(TaughtTarget))  # learnt after an empty response, one row a question
AGREEMENT = frozenset(  # need several responses
    {"ssc", "consistency", "leave_one_out", "leave_one_out_ssc", "agreeing_pairs", "top_share"}
)
PTrueName = Literal["normalised", "raw"]
Targets = tuple[Floats, np.ndarray]  # the target of every row or nan, the reason where there is none, both [R]
LEAVE_ONE_OUT = frozenset({"leave_one_out", "leave_one_out_ssc"})
NO_OTHER, UNTAUGHT = "no other readable response", "nothing for the teacher to read"
NOT_THE_FIRST = "not the first response to its question"
READ_CHUNK = 1024


@dataclass(frozen=True)
class TupleTable:
    """Rows of one split with what training needs to know about them before it reads their tokens."""

    index: SampleIndex  # columns of the store, R rows sorted by question and sample
    target: Floats  # target in [0, 1], nan where unknown, [R]
    correct: Floats  # 1 right, 0 wrong, nan unknown, [R]
    length: Integers  # tokens of prompt + response + query, at most ``max_length``, [R]
    prompt_length: Integers  # tokens of the prompt alone, [R]
    num_cut: int = 0  # rows whose response is cut to fit ``max_length``
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)  # number of rows left out, by (task, reason)
    auxiliary: Floats | None = None  # targets of the K auxiliary adapters, nan where unknown, [R, K]

    def __len__(self) -> int:
        return len(self.target)

    def digest(self) -> str:
        content = hashlib.sha256("\n".join(self.index.question_id.tolist()).encode())
        content.update(self.index.sample_index.astype(np.int64).tobytes())
        content.update(self.target.astype(np.float64).tobytes())
        content.update(b"" if self.auxiliary is None else self.auxiliary.astype(np.float64).tobytes())
        return content.hexdigest()[:16]

    def confident(self, eta: float) -> BoolArray:
        """Return which rows may carry the generation loss [R]: readable, with a target strictly above ``eta``."""
        readable = np.array([answer is not None for answer in self.index.answer], dtype=bool)
        return readable & (np.nan_to_num(self.target) > eta)

    def select(self, mask: np.ndarray, reasons: np.ndarray) -> Self:
        dropped = Counter(zip(self.index.task[~mask], reasons[~mask], strict=True))
        columns = {name: getattr(self, name)[mask] for name in ("target", "correct", "length", "prompt_length")}
        auxiliary = None if self.auxiliary is None else self.auxiliary[mask]
        index = self.index.select(mask)
        return replace(self, index=index, **columns, dropped=self.dropped + dropped, auxiliary=auxiliary)


def question_slices(index: SampleIndex) -> Iterator[slice]:
    """Return the rows of each question; the index is sorted by question."""
    return (slice(start, stop) for start, stop in pairwise(index.edges))


def compute_targets(index: SampleIndex, *, target: str, p_true: PTrueName, drop_none: bool) -> Targets:
    masses = index.yes_mass if p_true == "raw" else index.p_true
    values = np.full(len(index), np.nan)
    reasons = np.full(len(index), "", dtype=object)
    nothing = np.full(len(index), np.nan)
    imported, finished = (index.confidences.get(name, nothing) for name in ("p_true", target))
    labels = index.labels
    for rows in question_slices(index):
        answers = index.answer[rows].tolist()
        readable = np.array([answer is not None for answer in answers])
        has_masses = not np.isnan(index.yes_mass[rows]).all()
        confidence = masses[rows] if has_masses else imported[rows]
        if target == "expected_accuracy":
            values[rows.start] = labels[rows].mean()
        elif target in BEFORE_ANSWERING:
            agreement = agreeing_pairs(answers) if target == "agreeing_pairs" else top_share(answers)
            values[rows.start] = np.nan if agreement is None else agreement
        elif target in ("label", "p_true"):
            own = labels[rows] if target == "label" else confidence
            values[rows] = np.where(readable | (not drop_none), own, np.nan)
        elif not has_masses and not np.isnan(finished[rows]).all():
            values[rows] = np.where(readable | (not drop_none), finished[rows], np.nan)
        elif target == "consistency":
            values[rows] = np.array(vote_share(answers, drop_none=drop_none), dtype=np.float64)  # None becomes nan
        elif target == "leave_one_out":
            values[rows] = np.array(leave_one_out(answers, drop_none=drop_none), dtype=np.float64)
        else:
            known = [None if np.isnan(value) else float(value) for value in confidence]
            pool = soft_self_consistency if target == "ssc" else leave_one_out
            values[rows] = np.array(pool(answers, known, drop_none=drop_none), dtype=np.float64)
        made_of = labels[rows] if target in ("label", "expected_accuracy") else confidence
        reasons[rows] = _reasons(target, readable, made_of)
    reasons[~np.isnan(values)] = ""
    return values, reasons


def _reasons(target: str, readable: np.ndarray, made_of: Floats) -> np.ndarray:
    """Return why each response to a question would have no target, [n]."""
    if target in BEFORE_ANSWERING:
        first = "no label" if target == "expected_accuracy" else NO_OTHER
        return np.where(np.arange(len(readable)) > 0, NOT_THE_FIRST, first)
    if target == "leave_one_out":
        return np.where(readable, NO_OTHER, "unreadable")
    counted = (readable & ~np.isnan(made_of)).sum()
    left = NO_OTHER if target in LEAVE_ONE_OUT and counted < 2 else "zero confidence mass"
    absent = "no label" if target == "label" else "no confidence"
    return np.where(~readable, "unreadable", np.where(np.isnan(made_of), absent, left))


def build_table(
    store: SampleStore,
    index: SampleIndex,
    collator: RowLayout,
    recipes: Sequence[TargetRecipe],
    *,
    p_true: PTrueName,
    drop_none: bool,
) -> tuple[TupleTable, np.ndarray]:
    made = []
    for recipe in recipes:
        values, reasons = compute_targets(index, target=recipe.target, p_true=p_true, drop_none=drop_none)
        mixed = values
        if recipe.teacher is not None:
            taught = recipe.teacher.transform(_feature_columns(index, recipe.teacher.features))
            # With a share of 1, too, only rows with a target count: an unreadable response gets no soft label.
            mixed = (1.0 - recipe.share) * np.nan_to_num(values) + recipe.share * taught
            mixed[np.isnan(values)] = np.nan
        made.append((mixed, np.where(np.isnan(mixed) & ~np.isnan(values), UNTAUGHT, reasons)))
    return make_table(store, index, collator, made)


def make_table(
    store: SampleStore,
    index: SampleIndex,
    collator: RowLayout,
    made: Sequence[Targets],
    lengths: tuple[Integers, Integers] | None = None,
) -> tuple[TupleTable, np.ndarray]:
    """Return the table of all rows that fit, and for each the reason why it has no target ("" where it has one)."""
    prompt, response = known_lengths(store, index, collator) if lengths is None else lengths
    response = np.zeros_like(response) if collator.empty else response
    room = collator.room_for_response(prompt)
    values, reasons = made[0]
    for _, further in made[1:]:
        reasons = np.where(reasons == "", further, reasons)
    others = np.column_stack([column for column, _ in made[1:]]) if made[1:] else None
    fits = room >= 1
    length = collator.max_length - np.maximum(room - response, 0)
    num_cut = int((fits & (response > room)).sum())
    table = TupleTable(index, values, index.labels, length, prompt, num_cut=num_cut, auxiliary=others)
    too_long = np.full(len(index), "prompt too long", dtype=object)
    return table.select(fits, too_long), reasons[fits]


def known_lengths(store: SampleStore, index: SampleIndex, collator: RowLayout) -> tuple[Integers, Integers]:
    prompt, response = index.num_prompt_tokens.copy(), index.num_tokens.copy()
    unknown = np.flatnonzero((prompt < 0) | (response < 0))
    encoded: dict[str, int] = {}
    for row, stored in zip(unknown, read_in_chunks(store, index, unknown), strict=True):
        name = stored.question.id
        if prompt[row] < 0 and name not in encoded:
            encoded[name] = len(collator.chat.prompt_ids(stored.question.messages))
        prompt[row] = encoded.get(name, prompt[row])
        ids = stored.sample.token_ids
        response[row] = len(collator.chat.response_ids(stored.sample.text) if ids is None else ids)
    return prompt, response


def read_in_chunks(store: SampleStore, index: SampleIndex, rows: np.ndarray) -> Iterator[StoredRow]:
    for start in range(0, len(rows), READ_CHUNK):
        yield from store.read_rows(index.locate(rows[start : start + READ_CHUNK]))


class TupleDataset(Dataset[TupleRows]):
    """Map-style view: given a micro-batch of row numbers, reads just these rows from the shards."""

    def __init__(self, store: SampleStore, table: TupleTable) -> None:
        self.store = copy.copy(store)  # without open files, which worker processes must not share
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitems__(self, micro: MicroBatch) -> TupleRows:
        table, rows = self.table, micro.rows
        return TupleRows(
            micro=micro,
            stored=self.store.read_rows(table.index.locate(rows)),
            target=table.target[rows],
            correct=table.correct[rows],
            question_index=table.index.question_index[rows],
            auxiliary_target=None if table.auxiliary is None else table.auxiliary[rows],
        )


def describe_draw(table: TupleTable, pools: Mapping[str, TaskPools], draw: EpochDraw) -> str:
    header = f"{'task':<20} {'pool':<12} {'rows':>8} {'drawn':>8} {'repeated':>8} {'missing':>8}"
    lines = [f"{len(draw.rows):,} tuples in an epoch, from {len(table):,} rows with a target:", header]
    for task, counts in draw.counts.items():
        pools_of = {"generation": counts[:, :1]} if draw.generation_weight.any() else {}
        for name, numbers in {**pools_of, "calibration": counts[:, 1:]}.items():
            lines.append(f"{task:<20} {name:<12} " + " ".join(f"{number:>8,}" for number in numbers.sum(axis=1)))
        for title, numbers in zip(COUNTED, counts[:, 1:], strict=True):
            if title in ("rows", "drawn") or numbers.any():
                lines.append(f"{'':<4}{title + ' by bucket':<20} " + " ".join(f"{number:,}" for number in numbers))
    if not any(len(pool.generation) for pool in pools.values()):
        lines.append("no target exceeds eta: the epoch has no generation samples")
    lines.extend(f"{task:<20} dropped: {count:,} {reason}" for (task, reason), count in sorted(table.dropped.items()))
    if table.num_cut:
        lines.append(f"{table.num_cut:,} responses are cut to fit `max_length`")
    return "\n".join(lines)


def describe_targets(table: TupleTable) -> str:
    """Return how high the targets are and, where labels exist, how good: a model learns no more than they know."""
    text = f"targets: mean {table.target.mean():.3f}"
    known = ~np.isnan(table.correct)
    if not known.any():
        return f"{text}; no labels to compare them with"
    target, correct = table.target[known], table.correct[known].astype(bool)
    ranking = auroc(target, correct)
    shown = "not defined, all being right or all wrong" if ranking is None else f"{ranking:.3f}"
    return (
        f"{text}; compared with {int(known.sum()):,} labels: {correct.mean():.3f} right, "
        f"ECE {expected_calibration_error(target, correct):.3f}, AUROC {shown}"
    )
