import hashlib
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest
from support.store_samples import write_lines

from selfcal_lightning.data.tasks.word_problems import (
    FAMILIES,
    IN_DOMAIN_FAMILIES,
    LARGEST_VALUE,
    OUT_OF_DOMAIN_FAMILIES,
    SPLITS,
    Difficulty,
    Equation,
    Problem,
    WordProblems,
    draw_problem,
    program_bucket,
    sample_problem,
    write_solution,
)
from selfcal_lightning.records import Message, duplicate_ids

PER_SPLIT = 500


@pytest.fixture(scope="module")
def problems() -> dict[str, list[Problem]]:
    return {split: WordProblems().load_problems(split, limit=PER_SPLIT) for split in SPLITS}


def _reference_fraction_value(equation: str) -> tuple[Fraction, Fraction]:
    """Both sides of a written equation, by exact fractions and a regular expression of the test's own."""
    left, operator, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", equation).groups()
    a, b = Fraction(left), Fraction(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[operator], Fraction(result)


def test_no_program_and_no_text_stands_in_two_splits(problems: dict[str, list[Problem]]) -> None:
    programs = [problem.program for split in problems.values() for problem in split]
    texts = [problem.question for split in problems.values() for problem in split]
    assert len(programs) == len(SPLITS) * PER_SPLIT
    assert len(set(programs)) == len(programs)
    assert len(set(texts)) == len(texts)


def test_splits_stay_disjoint_whatever_the_seed_and_the_difficulty(problems: dict[str, list[Problem]]) -> None:
    held_out = {problem.program for split in ("test_id", "test_ood") for problem in problems[split]}
    easy = Difficulty(level_weights=(1.0, 0.0, 0.0), step_weights=(0.5, 0.5, 0.0, 0.0, 0.0))
    rng = random.Random(5)
    for split in ("pretrain", "train", "validation", "calibration"):
        for _ in range(1_000):
            problem = sample_problem(rng, split, difficulty=easy)
            assert program_bucket(problem) in SPLITS[split].buckets
            assert problem.program not in held_out


def test_programs_ignore_orders_and_are_equal_for_equal_texts() -> None:
    one = Problem("shop", 1, "a", (Equation(3, "*", 4), Equation(5, "*", 2), Equation(12, "+", 10)))
    other = Problem("shop", 1, "b", (Equation(5, "*", 2), Equation(4, "*", 3), Equation(10, "+", 12)))
    assert one.program == other.program == "shop:10+12;2*5;3*4"
    assert Problem("shop", 1, "", (Equation(9, "-", 4),)).program == "shop:9-4"
    rng = random.Random(1)
    programs: dict[str, str] = {}
    repeated = 0
    for _ in range(20_000):
        problem = draw_problem(rng, rng.choice(list(FAMILIES)), level=1, steps=1)
        repeated += problem.question in programs
        assert programs.setdefault(problem.question, problem.program) == problem.program
    assert repeated > 0


def test_out_of_domain_families_are_absent_from_the_calibration_splits(problems: dict[str, list[Problem]]) -> None:
    families = {split: {problem.family for problem in drawn} for split, drawn in problems.items()}
    assert families["test_ood"] == set(OUT_OF_DOMAIN_FAMILIES)
    for split in ("train", "validation", "calibration", "test_id"):
        assert families[split] == set(IN_DOMAIN_FAMILIES)
    assert families["pretrain"] == set(FAMILIES)


def test_solutions_recompute_to_the_answer_and_use_every_given_number(problems: dict[str, list[Problem]]) -> None:
    task, rng = WordProblems(), random.Random(0)
    for problem in (problem for split in problems.values() for problem in split):
        assert 1 <= len(problem.equations) <= 5
        for equation in problem.equations:
            value, result = _reference_fraction_value(str(equation))
            assert value == result
            assert 0 < result < LARGEST_VALUE + 10
        solution = write_solution(problem, rng)
        assert solution.count("=") == len(problem.equations)
        assert task.verify(task.extract(solution), str(problem.answer))
        givens = [int(number) for number in re.findall(r"\d+", problem.question)]
        used = {value for equation in problem.equations for value in (equation.left, equation.right)}
        assert max(givens) <= 999
        assert set(givens) <= used


def test_load_is_deterministic_and_a_prefix_of_a_longer_load() -> None:
    task = WordProblems()
    long = task.load("test_id", limit=60)
    assert long == WordProblems(seed=0).load("test_id", limit=60)
    assert task.load("test_id", limit=20) == long[:20]
    assert task.load("test_id", limit=0) == []
    with pytest.raises(ValueError, match=r"`chain_of_thought` to be True.*`local_number`"):
        task.load("test_id", chain_of_thought=False)
    assert long[0].messages == (Message("user", long[0].text),)
    assert long[0].reference == str(task.load_problems("test_id", limit=1)[0].answer)
    assert len(task.load("validation")) == SPLITS["validation"].size == 500
    assert [question.id for question in long[:2]] == ["word_problems/test_id/000000", "word_problems/test_id/000001"]
    assert duplicate_ids(long) == []
    zero, one = WordProblems().load("train", limit=50), WordProblems(seed=1).load("train", limit=50)
    assert one[0].id == "word_problems@1/train/000000"
    assert not {question.text for question in zero} & {question.text for question in one}


@pytest.mark.parametrize(("split", "digest"), [("test_id", "fe6cd633e4f062a0"), ("test_ood", "20ddf9d4b51290ac")])
def test_the_streams_are_those_of_the_published_figures(split: str, digest: str) -> None:
    """A changed template or draw would silently change every figure on the card of the bundled model."""
    questions = WordProblems().load(split, limit=200)
    text = "\n".join(f"{question.text} {question.reference}" for question in questions)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First 4*3=12. Then 12+5=17. The answer is 17.", "17"),
        ("The answer is 3. No, the answer is 40. So 40-39=1.", "40"),
        ("the ANSWER is: 1,250", "1250"), ("The answer is $0042.", "42"),
        ("The answer is 17.00.", "17"), ("The answer is 2.50 dollars", "2.5"),
        ("The answer is -0.", "0"), ("The answer is -12", "-12"),
        ("First 12-5=7", "7"), ("It is 12-5", "5"),
        ("I do not know.", None), ("", None),
        ("9" * 5_000, "9" * 5_000),
    ],
)  # fmt: skip
def test_extract(text: str, answer: str | None) -> None:
    assert WordProblems().extract(text) == answer


def test_a_local_file_is_asked_in_the_same_way(tmp_path: Path) -> None:
    made = WordProblems().load("test_id", limit=3)
    rows = [{"question": question.text, "answer": float(str(question.reference))} for question in made]
    own = write_lines(tmp_path / "own.jsonl", *rows)
    named = write_lines(tmp_path / "named.jsonl", {**rows[0], "id": "a"})
    assert WordProblems().load("test_id", path=str(own)) == made
    assert WordProblems().load("mine", path=str(own), limit=1)[0].id == "word_problems/mine/000000"
    assert WordProblems().load("mine", path=str(named))[0].id == "word_problems/mine/a"
