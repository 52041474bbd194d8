"""Word problems: each family turns random numbers into a question and the equations that solve it."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice, pairwise
from operator import add, floordiv, mul, sub
from typing import Literal

from selfcal_lightning.core.errors import InputError, check_at_least, unknown_name
from selfcal_lightning.data.tasks.answer_types import NumberAnswers
from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.data.tasks.dataset import DatasetTask, LocalQuestions
from selfcal_lightning.data.tasks.rows import check_question_file
from selfcal_lightning.records import Message, Question, question_hash

Operator = Literal["+", "-", "*", "/"]

LARGEST_VALUE = 9990
LARGEST_PRODUCT = LARGEST_VALUE // 2
LARGEST_GIVEN = 999

PEOPLE = (
    ("Anna", "She"), ("Bruno", "He"), ("Clara", "She"), ("David", "He"), ("Emma", "She"), ("Felix", "He"),
    ("Hana", "She"), ("Jonas", "He"), ("Karim", "He"), ("Maria", "She"), ("Omar", "He"), ("Sofia", "She"),
)  # fmt: skip
THINGS = ("apples", "balls", "cards", "shells", "stamps", "pencils", "marbles", "cookies", "lemons", "buttons")
ORDINALS = ("first", "second", "third", "fourth", "fifth")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday")
VEHICLES = ("bus", "train", "tram", "boat")

_OPERATORS = {"+": add, "-": sub, "*": mul, "/": floordiv}


@dataclass(frozen=True, slots=True)
class Equation:
    """One step of a solution: ``left operator right``, exact over the integers."""

    left: int
    operator: Operator
    right: int

    @property
    def result(self) -> int:
        return _OPERATORS[self.operator](self.left, self.right)

    def __str__(self) -> str:
        return f"{self.left}{self.operator}{self.right}={self.result}"


@dataclass(frozen=True, slots=True)
class Problem:
    family: str
    level: int
    question: str
    equations: tuple[Equation, ...]

    @property
    def answer(self) -> int:
        return self.equations[-1].result

    @property
    def program(self) -> str:
        """The family and its computations, without wording and without the order of terms, factors and steps."""
        steps = []
        for one in self.equations:
            left, right = sorted((one.left, one.right)) if one.operator in "+*" else (one.left, one.right)
            steps.append(f"{left}{one.operator}{right}")
        return f"{self.family}:{';'.join(sorted(steps))}"


class Draft:
    """Collects the sentences and equations of a problem, and draws numbers that keep every value in range."""

    def __init__(self, rng: random.Random, level: int, steps: int) -> None:
        self.rng, self.level, self.steps = rng, level, steps
        self.sentences: list[str] = []
        self.equations: list[Equation] = []

    @property
    def steps_left(self) -> int:
        return self.steps - len(self.equations)

    def say(self, *wordings: str, **words: object) -> None:
        self.sentences.append(self.rng.choice(wordings).format(**words))

    def number(self) -> int:
        level = self.level if self.rng.random() < 0.75 else self.rng.randint(1, self.level)
        low, high = {1: (2, 20), 2: (10, 99), 3: (100, LARGEST_GIVEN)}[level]
        return self.rng.randint(low, high)

    def factor(self, number: int) -> int:
        """Draw a one-digit factor for ``number``, so that the sum of two such products stays in range."""
        return self.rng.randint(2, min(5 if self.level == 1 else 9, LARGEST_PRODUCT // number))

    def compute(self, left: int, operator: Operator, right: int) -> int:
        self.equations.append(Equation(left, operator, right))
        return self.equations[-1].result

    def operand(self, value: int, operators: Sequence[Operator]) -> tuple[Operator, int]:
        """Draw one of ``operators``, which include "+", and a number, so that the result is in range."""
        for operator in self.rng.sample(operators, len(operators)):
            if operator == "-" and value > 2:
                return "-", min(self.number(), self.rng.randint(1, value - 1))
            if operator == "*" and value * 2 <= LARGEST_VALUE:
                return "*", self.rng.randint(2, min(9, LARGEST_VALUE // value))
            divisors = [divisor for divisor in range(2, 10) if value % divisor == 0 and value > divisor]
            if operator == "/" and divisors:
                return "/", self.rng.choice(divisors)
            if operator == "+":
                break
        return "+", min(self.number(), max(1, LARGEST_VALUE - value))


def write_chain(draft: Draft) -> None:
    (name, pronoun), (other, _) = draft.rng.sample(PEOPLE, 2)
    things = draft.rng.choice(THINGS)
    words = {"name": name, "pronoun": pronoun, "other": other, "things": things}
    value = draft.number()
    draft.say("{name} has {n} {things}.", n=value, **words)
    wordings: dict[Operator, tuple[str, ...]] = {
        "+": ("{pronoun} buys {n} more.", "{pronoun} finds {n} more.", "{other} gives {name} {n} more."),
        "-": ("{pronoun} gives {n} to {other}.", "{pronoun} loses {n}.", "{pronoun} sells {n}."),
        "*": ("The pile grows to {n} times its size.", "{pronoun} trades each one for {n} new ones."),
        "/": ("{pronoun} splits them into {n} equal bags and keeps one bag.",),
    }
    while draft.steps_left > 0:
        operator, number = draft.operand(value, ("+", "+", "-", "-", "*", "/"))
        draft.say(*wordings[operator], n=number, **words)
        value = draft.compute(value, operator, number)
    draft.say("How many {things} does {name} have now?", "How many {things} are left for {name}?", **words)


def write_comparison(draft: Draft) -> None:
    """Each person has more, fewer or several times as many as the one before; sometimes all are added up."""
    add_up = draft.steps in (2, 4) and draft.rng.random() < 0.6
    relations = draft.steps // 2 if add_up else min(draft.steps, 3)
    names = [name for name, _ in draft.rng.sample(PEOPLE, relations + 1)]
    things = draft.rng.choice(THINGS)
    values = [draft.number()]
    draft.say("{name} has {n} {things}.", name=names[0], n=values[0], things=things)
    wordings: dict[Operator, str] = {
        "+": "{name} has {n} more than {other}.",
        "-": "{name} has {n} fewer than {other}.",
        "*": "{name} has {n} times as many as {other}.",
    }
    for other, name in pairwise(names):
        operator, number = draft.operand(values[-1], ("+", "-", "*"))
        draft.say(wordings[operator], name=name, other=other, n=number)
        values.append(draft.compute(values[-1], operator, number))
    if not add_up or sum(values) > LARGEST_VALUE:
        draft.say("How many {things} does {name} have?", things=things, name=names[-1])
        return
    reduce(lambda total, value: draft.compute(total, "+", value), values)
    draft.say("How many {things} do they have together?", things=things)


def write_shop(draft: Draft) -> None:
    """One or two kinds of things are bought, sometimes with a note that leaves change."""
    name, pronoun = draft.rng.choice(PEOPLE)
    kinds = draft.rng.sample(THINGS, 1 if draft.steps <= 2 else 2)
    prices = [draft.number() for _ in kinds]
    counts = [draft.factor(price) for price in prices]
    orders = zip(counts, kinds, prices, strict=True)
    listed = " and ".join(f"{count} {kind} for {price} dollars each" for count, kind, price in orders)
    draft.say("{name} buys {listed}.", name=name, listed=listed)
    costs = [draft.compute(price, "*", count) for price, count in zip(prices, counts, strict=True)]
    total = reduce(lambda total, cost: draft.compute(total, "+", cost), costs)
    if draft.steps in (2, 4) and total < LARGEST_GIVEN:
        paid = draft.rng.randint(total + 1, min(LARGEST_GIVEN, total + 20 * draft.level**2))
        draft.say("{pronoun} pays with {n} dollars.", pronoun=pronoun, n=paid)
        draft.say("How much change does {name} get?", name=name)
        draft.compute(paid, "-", total)
    else:
        draft.say("How much does {name} pay?", "What is the total price?", name=name)


def write_work(draft: Draft) -> None:
    """A machine makes things by the hour; some break, some are added, and they may be packed."""
    things = draft.rng.choice(THINGS)
    rate = draft.number()
    hours = draft.factor(rate)
    draft.say("A machine makes {n} {things} an hour. It runs {hours} hours.", n=rate, things=things, hours=hours)
    value = draft.compute(rate, "*", hours)
    wordings: dict[Operator, tuple[str, ...]] = {
        "+": ("A second machine makes {n} more.", "Then {n} more come from a store."),
        "-": ("{n} of them are broken.", "{n} of them are sold."),
        "*": ("The same happens on {n} days.",),
    }
    operators: tuple[Operator, ...] = ("+", "-", "*")
    while draft.steps_left > 0:
        divisors = [divisor for divisor in range(2, 10) if value % divisor == 0]
        if draft.steps_left == 1 and divisors and draft.rng.random() < 0.3:
            box = draft.rng.choice(divisors)
            draft.compute(value, "/", box)
            draft.say("They are packed in boxes of {n}. How many boxes are there?", n=box)
            return
        operator, number = draft.operand(value, operators)
        operators = ("+", "-")
        draft.say(*wordings[operator], n=number)
        value = draft.compute(value, operator, number)
    draft.say("How many {things} are there in the end?", "How many {things} are left?", things=things)


def write_trip(draft: Draft) -> None:
    """One or two legs at constant speed, a part on foot, and perhaps the rest of the way."""
    name, pronoun = draft.rng.choice(PEOPLE)
    speed = draft.number()
    hours = draft.factor(speed)
    draft.say("{name} travels {n} miles an hour for {hours} hours.", name=name, n=speed, hours=hours)
    value = draft.compute(speed, "*", hours)
    if draft.steps_left >= 2:
        speed = draft.number()
        hours = draft.factor(speed)
        draft.say("Then {name} travels {n} miles an hour for {hours} hours.", name=name, n=speed, hours=hours)
        value = draft.compute(value, "+", draft.compute(speed, "*", hours))
    while draft.steps_left > 0:
        if draft.steps_left == 1 and value < LARGEST_GIVEN and draft.rng.random() < 0.6:
            length = draft.rng.randint(value + 1, min(LARGEST_GIVEN, value + 20 * draft.level**2))
            draft.say("The whole way is {n} miles. How many miles are left?", n=length)
            draft.compute(length, "-", value)
            return
        operator, number = draft.operand(value, ("+",))
        draft.say("{pronoun} walks {n} miles more.", pronoun=pronoun, n=number)
        value = draft.compute(value, operator, number)
    draft.say("How many miles is that?", "How far does {name} get?", name=name)


def write_bus(draft: Draft) -> None:
    vehicle = draft.rng.choice(VEHICLES)
    value = draft.number()
    draft.say("A {vehicle} starts with {n} people.", vehicle=vehicle, n=value)
    for ordinal in ORDINALS[: draft.steps]:
        operator, number = draft.operand(value, ("+", "-"))
        verb = "get on" if operator == "+" else "get off"
        draft.say("At the {ordinal} stop {n} {verb}.", ordinal=ordinal, n=number, verb=verb)
        value = draft.compute(value, operator, number)
    draft.say("How many people are on the {vehicle} now?", vehicle=vehicle)


def write_reading(draft: Draft) -> None:
    """Pages are read day by day; the question asks how many were read, or are left."""
    name, pronoun = draft.rng.choice(PEOPLE)
    pages = draft.number()
    draft.say("{name} reads {n} pages on {day}.", name=name, n=pages, day=DAYS[0])
    total = pages
    for before, day in pairwise(DAYS):
        if draft.steps_left == 0 or (draft.steps_left == 1 and draft.rng.random() < 0.5):
            break
        if draft.steps_left >= 2 and pages <= LARGEST_GIVEN and draft.rng.random() < 0.4:
            factor = draft.rng.randint(2, 4)
            draft.say(
                "On {day} {name} reads {n} times as many as on {before}.", day=day, name=name, n=factor, before=before
            )
            pages = draft.compute(pages, "*", factor)
        else:
            pages = draft.number()
            draft.say("On {day} {name} reads {n} pages.", day=day, name=name, n=pages)
        total = draft.compute(total, "+", pages)
    if draft.steps_left > 0 and total < LARGEST_GIVEN:
        length = draft.rng.randint(total + 1, min(LARGEST_GIVEN, total + 20 * draft.level**2))
        draft.say("The book has {n} pages. How many pages are left?", n=length)
        draft.compute(length, "-", total)
    elif not draft.equations:
        pages = draft.number()
        draft.say("Then {pronoun} reads {n} more. How many pages is that?", pronoun=pronoun.lower(), n=pages)
        draft.compute(total, "+", pages)
    else:
        draft.say("How many pages does {name} read in all?", name=name)


FAMILIES: dict[str, Callable[[Draft], None]] = {
    "chain": write_chain, "comparison": write_comparison, "shop": write_shop, "work": write_work, "trip": write_trip,
    "bus": write_bus, "reading": write_reading,
}  # fmt: skip


def draw_problem(rng: random.Random, family: str, *, level: int, steps: int) -> Problem:
    draft = Draft(rng, level, steps)
    FAMILIES[family](draft)
    return Problem(family, level, " ".join(draft.sentences), tuple(draft.equations))


Split = Literal["pretrain", "train", "validation", "calibration", "test_id", "test_ood"]

OUT_OF_DOMAIN_FAMILIES = ("bus", "reading")
IN_DOMAIN_FAMILIES = tuple(family for family in FAMILIES if family not in OUT_OF_DOMAIN_FAMILIES)
CONNECTIVES = ("First", "Then", "Next", "So", "After that")

_NUM_BUCKETS = 100
_ANSWER = re.compile(r"answer is:?\s*\$?(-?[0-9][0-9,]*(?:\.[0-9]+)?)", re.IGNORECASE)
_NUMBER = re.compile(r"(?<![0-9.,])-?[0-9][0-9,]*(?:\.[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Difficulty:
    level_weights: tuple[float, float, float] = (0.25, 0.4, 0.35)
    step_weights: tuple[float, float, float, float, float] = (0.1, 0.25, 0.3, 0.2, 0.15)


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Contents of a split: hash buckets of programs, families, and the default number of questions."""

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
    """Return the bucket of a problem in [0, 100): a hash of its program, so independent of the wording."""
    return question_hash(problem.program) % _NUM_BUCKETS


def sample_problem(rng: random.Random, split: Split, *, difficulty: Difficulty | None = None) -> Problem:
    """Draw a problem of ``split``; programs in the buckets of other splits are rejected."""
    plan = _split_plan(split)
    difficulty = difficulty or Difficulty()
    while True:
        (level,) = rng.choices((1, 2, 3), difficulty.level_weights)
        (num_steps,) = rng.choices((1, 2, 3, 4, 5), difficulty.step_weights)
        problem = draw_problem(rng, rng.choice(plan.families), level=level, steps=num_steps)
        if program_bucket(problem) in plan.buckets:
            return problem


def stream_problems(split: Split, *, seed: int = 0) -> Iterator[Problem]:
    """Yield the problems of ``split`` endlessly, no program twice, in an order fixed by ``seed``."""
    rng = random.Random(f"word_problems/{split}/{seed}")
    seen: set[str] = set()
    while True:
        problem = sample_problem(rng, split)
        if problem.program not in seen:
            seen.add(problem.program)
            yield problem


def write_solution(problem: Problem, rng: random.Random) -> str:
    """Write the solution of a problem: one equation per step after a random connective, then the answer."""
    steps = []
    for index, equation in enumerate(problem.equations):
        connective = CONNECTIVES[0] if index == 0 else rng.choice(CONNECTIVES[1:])
        steps.append(f"{connective} {equation}.")
    return " ".join([*steps, f"The answer is {problem.answer}."])


class WordProblems:
    """Templated arithmetic word problems of one to five steps, with given numbers of one to three digits."""

    name = "word_problems"
    answer_type: AnswerType = "number"

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def load(
        self, split: str, *, path: str | None = None, chain_of_thought: bool = True, limit: int | None = None
    ) -> list[Question]:
        if not chain_of_thought:
            raise InputError(
                "Expected `chain_of_thought` to be True for word problems, which the bundled model answers in written "
                "steps only, but got False. For other models ask a file's questions with the task `local_number`."
            )
        if path is not None:
            questions = DatasetTask(LocalQuestions(self.name, NumberAnswers())).load(split, path=path, limit=limit)
            return [replace(question, messages=(Message("user", question.text),)) for question in questions]
        prefix = self.name if self.seed == 0 else f"{self.name}@{self.seed}"
        problems = enumerate(self.load_problems(split, limit=limit))
        asked = ((f"{prefix}/{split}/{index:06d}", one.question, str(one.answer)) for index, one in problems)
        return [Question(name, self.name, (Message("user", text),), answer, text) for name, text, answer in asked]

    def load_problems(self, split: str, *, limit: int | None = None) -> list[Problem]:
        plan = _split_plan(split)
        check_at_least(0, limit=limit)
        stream = stream_problems(split, seed=self.seed)  # type: ignore[arg-type]
        return list(islice(stream, plan.size if limit is None else limit))

    def check_source(self, split: str, *, path: str | None = None) -> None:
        if path is None:
            _split_plan(split)
        else:
            check_question_file(path, option="path")

    def is_remote(self, *, path: str | None = None) -> bool:
        return False

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the number after the last "answer is", else the last number of a finished text."""
        matches = _ANSWER.findall(text)
        if not matches and finished:
            matches = _NUMBER.findall(text)
        return _canonical_number(matches[-1]) if matches else None

    def verify(self, answer: str | None, reference: str) -> bool:
        return answer is not None and answer == reference

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        return list(answers)


def _split_plan(split: str) -> SplitPlan:
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    return SPLITS[split]


def _canonical_number(number: str) -> str:
    """Return a number without separators, leading zeros and a zero fraction; "-0" becomes "0"."""
    whole, _, fraction = number.replace(",", "").partition(".")
    sign, digits = "-" if whole.startswith("-") else "", whole.lstrip("-").lstrip("0") or "0"
    if fraction := fraction.rstrip("0"):
        return f"{sign}{digits}.{fraction}"
    return "0" if digits == "0" else sign + digits
