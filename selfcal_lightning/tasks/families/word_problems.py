"""Arithmetic word problems made by code, in splits that are disjoint by construction."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Literal

from selfcal_lightning.errors import InputError, unknown_name
from selfcal_lightning.records import Message, Question, question_hash
from selfcal_lightning.tasks.answers.types import NumberAnswers
from selfcal_lightning.tasks.base import AnswerType
from selfcal_lightning.tasks.dataset import DatasetTask
from selfcal_lightning.tasks.families.local import LocalQuestions
from selfcal_lightning.tasks.families.word_problem_templates import FAMILIES, Problem, draw_problem
from selfcal_lightning.tasks.question_rows import check_question_file

Split = Literal["pretrain", "train", "validation", "calibration", "test_id", "test_ood"]

OUT_OF_DOMAIN_FAMILIES = ("bus", "reading")
IN_DOMAIN_FAMILIES = tuple(family for family in FAMILIES if family not in OUT_OF_DOMAIN_FAMILIES)
CONNECTIVES = ("First", "Then", "Next", "So", "After that")

_NUM_BUCKETS = 100
_ANSWER = re.compile(r"answer is:?\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![0-9.,])-?[0-9][0-9,]*(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Difficulty:
    """How hard the problems of a stream are.

    Attributes:
        level_weights: Weights of the number sizes 1 (to 20), 2 (two digits) and 3 (three digits).
        step_weights: Weights of 1 to 5 steps.
    """

    level_weights: tuple[float, float, float] = (0.25, 0.4, 0.35)
    step_weights: tuple[float, float, float, float, float] = (0.1, 0.25, 0.3, 0.2, 0.15)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """What a split holds: hash buckets of programs, families, and the number of questions given by default."""

    buckets: range
    families: tuple[str, ...]
    size: int


SPLITS: dict[Split, SplitPlan] = {
    "pretrain": SplitPlan(range(0, 60), tuple(FAMILIES), 10_000),
    "train": SplitPlan(range(60, 80), IN_DOMAIN_FAMILIES, 2_000),
    "validation": SplitPlan(range(80, 85), IN_DOMAIN_FAMILIES, 500),
    "calibration": SplitPlan(range(85, 90), IN_DOMAIN_FAMILIES, 500),
    "test_id": SplitPlan(range(90, 95), IN_DOMAIN_FAMILIES, 1_000),
    "test_ood": SplitPlan(range(95, 100), OUT_OF_DOMAIN_FAMILIES, 1_000),
}


def program_bucket(problem: Problem) -> int:
    """Return the bucket in [0, 100) of a problem: a hash of its program, hence the same for every wording of it."""
    return question_hash(problem.program) % _NUM_BUCKETS


def sample_problem(rng: random.Random, split: Split, *, difficulty: Difficulty | None = None) -> Problem:
    """Draw a problem of ``split``: draws whose program lies in another split's buckets are rejected."""
    plan = _split_plan(split)
    difficulty = difficulty or Difficulty()
    levels = tuple(accumulate(difficulty.level_weights))
    steps = tuple(accumulate(difficulty.step_weights))
    while True:
        (level,) = rng.choices((1, 2, 3), cum_weights=levels)
        (num_steps,) = rng.choices((1, 2, 3, 4, 5), cum_weights=steps)
        problem = draw_problem(rng, rng.choice(plan.families), level=level, steps=num_steps)
        if program_bucket(problem) in plan.buckets:
            return problem


def stream_problems(split: Split, *, seed: int = 0, difficulty: Difficulty | None = None) -> Iterator[Problem]:
    """Yield the problems of ``split`` without end and without repeating a program, in an order fixed by ``seed``."""
    rng = random.Random(f"word_problems/{split}/{seed}")
    seen: set[str] = set()
    while True:
        problem = sample_problem(rng, split, difficulty=difficulty)
        if problem.program not in seen:
            seen.add(problem.program)
            yield problem


def write_solution(problem: Problem, rng: random.Random) -> str:
    """Write the worked solution of a problem: one equation a step after a random connective, then the answer.

    Example:
        >>> from selfcal_lightning.tasks.families.word_problem_templates import Equation
        >>> problem = Problem("trip", 1, "", (Equation(4, "*", 3), Equation(12, "+", 5)))
        >>> solution = write_solution(problem, random.Random(0))
        >>> solution.startswith("First 4*3=12.") and solution.endswith("12+5=17. The answer is 17.")
        True
    """
    steps = []
    for index, equation in enumerate(problem.equations):
        connective = CONNECTIVES[0] if index == 0 else rng.choice(CONNECTIVES[1:])
        steps.append(f"{connective} {equation}.")
    return " ".join([*steps, f"The answer is {problem.answer}."])


class WordProblems:
    """Templated arithmetic word problems of one to five steps, with given numbers of one to three digits.

    The split of a problem is a function of the hash of its program (the family and its computations, without wording
    and order), so that no problem stands in two splits, whatever the seed. Within a split no program repeats.
    ``train``, ``validation``, ``calibration`` and ``test_id`` hold the families of ``IN_DOMAIN_FAMILIES``; ``test_ood``
    holds those of ``OUT_OF_DOMAIN_FAMILIES``, which calibration never sees. ``pretrain`` is for making the bundled
    model alone and has all families (a tiny model could not answer the others at all): out-of-domain is meant with
    respect to calibration.

    ``load(split, limit=n)`` gives the first ``n`` questions of an unbounded stream; without ``limit`` the sizes in
    ``SPLITS``: 10000, 2000, 500, 500, 1000 and 1000 in the order above. With ``path`` the questions are those of a
    file with the columns ``question`` and ``answer`` (and ``id``, where it has one), asked in the same way; that they
    are in no other split is then up to whoever wrote it.

    Args:
        seed: Seed of the streams; another seed gives other questions of the same splits, under other ids.

    Example:
        >>> question = WordProblems().load("test_id", limit=1)[0]
        >>> question.id
        'word_problems/test_id/000000'
        >>> WordProblems().extract("First 4*3=12. The answer is 12.")
        '12'
    """

    name = "word_problems"
    answer_type: AnswerType = "number"

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        """Return the first ``limit`` questions of ``split``, each with the bare text as its one user turn.

        Raises:
            InputError: If ``split`` is unknown, ``limit`` is negative, ``chain_of_thought`` is False (the bundled model
                only ever answers in steps), or the file ``path`` is broken or empty.
            FileNotFoundError: If ``path`` does not exist.
        """
        if not chain_of_thought:
            raise InputError(
                "Expected `chain_of_thought` to be True for word problems, which the bundled model answers in written "
                "steps only, but got False. For other models ask the questions of a file by the task `local_number`."
            )
        if path is not None:
            questions = DatasetTask(LocalQuestions(self.name, NumberAnswers())).load(split, path=path, limit=limit)
            return [replace(question, messages=(Message("user", question.text),)) for question in questions]
        prefix = self.name if self.seed == 0 else f"{self.name}@{self.seed}"
        return [
            Question(
                id=f"{prefix}/{split}/{index:06d}",
                task=self.name,
                messages=(Message("user", problem.question),),
                reference=str(problem.answer),
                text=problem.question,
            )
            for index, problem in enumerate(self.load_problems(split, limit=limit))
        ]

    def load_problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        """Return the problems behind ``load``, in the same order, with their solutions.

        Raises:
            InputError: If ``split`` is unknown or ``limit`` is negative.
        """
        plan = _split_plan(split)
        if limit is not None and limit < 0:
            raise InputError(f"Expected `limit` to be None or at least 0, but got {limit}.")
        stream = stream_problems(split, seed=self.seed)  # type: ignore[arg-type]
        return list(islice(stream, plan.size if limit is None else limit))

    def check_source(self, split: str, *, path: str | None = None) -> None:
        """Refuse a split or a file that is not there; nothing is made or read."""
        if path is None:
            _split_plan(split)
        else:
            check_question_file(path, option="path")

    def is_remote(self, *, path: str | None = None) -> bool:
        """Return False: problems are made here, or read from a file."""
        return False

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the number after the last "answer is", else the last number of a finished text, else None.

        Example:
            >>> task = WordProblems()
            >>> task.extract("The answer is 1,204.0. No, the answer is 0017."), task.extract("I am not sure.")
            ('17', None)
            >>> task.extract("First 4*3=12. Then", finished=False) is None
            True
        """
        matches = _ANSWER.findall(text)
        if not matches and finished:
            matches = _NUMBER.findall(text)
        return _canonical_number(matches[-1]) if matches else None

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the canonical ``answer`` is the ``reference``; None is never correct."""
        return answer is not None and answer == reference

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are: canonical numbers are equal only when their text is."""
        return list(answers)


def _split_plan(split: str) -> SplitPlan:
    for name, plan in SPLITS.items():
        if name == split:
            return plan
    raise unknown_name("split", split, SPLITS)


def _canonical_number(number: str) -> str:
    """Return a number without separators, leading zeros and an empty fraction; "-0" is "0"."""
    whole, _, fraction = number.replace(",", "").partition(".")
    sign = "-" if whole.startswith("-") else ""
    whole = whole.lstrip("-").lstrip("0") or "0"
    fraction = fraction.rstrip("0")
    if fraction:
        return f"{sign}{whole}.{fraction}"
    return "0" if whole == "0" else sign + whole
