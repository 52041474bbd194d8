import hashlib
import importlib
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.command_lines import instantiated
from support.house import ROOT
from support.store_samples import write_lines

from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.registry import TASKS
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
from selfcal_lightning.models.chat_format import Prompt
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


# ---- the tasks of the example: countries, arithmetic and Wikidata

EXAMPLE = ROOT / "examples" / "smollm"
NUM_QUESTIONS = {"train": 415, "validation": 50, "test": 499}


@pytest.fixture(scope="module")
def example() -> Iterator[Callable[[str], Task]]:
    """Tasks of the example by name, while these tests run."""
    names = []

    def task(name: str) -> Task:
        importlib.import_module(name)
        names.append(name)
        return TASKS[name]

    sys.path.insert(0, str(EXAMPLE))
    yield task
    for name in set(names):
        del TASKS[name], sys.modules[name]
    sys.path.remove(str(EXAMPLE))


@pytest.fixture(scope="module")
def facts(example: Callable[[str], Task]) -> Task:
    return example("country_facts")


def test_splits_and_prompt_share_no_country_and_questions_stand_alone(facts: Task) -> None:
    countries: dict[str, set[str]] = {}
    for split, number in NUM_QUESTIONS.items():
        questions = facts.load(split)
        assert len(questions) == number
        assert questions[0].messages == (Message("user", questions[0].text),)
        countries[split] = {question.id.split("/")[-1].split("-")[0] for question in questions}
    assert not countries["train"] & countries["test"]
    assert not countries["validation"] & (countries["train"] | countries["test"])
    prompt = Prompt.from_json(yaml.safe_load((EXAMPLE / "prompts" / "gemma3.yaml").read_text()))
    assert prompt.format == "plain"
    asked = {question.text for split in NUM_QUESTIONS for question in facts.load(split)}
    assert not asked & {example.question for example in prompt.examples}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The capital of Poland is Warsaw.", "warsaw"), ("Dhaka is the capital of Bangladesh, a", "bangladesh"),
        ("Ghana is a sovereign state located in West Africa, bordered by the", "west africa"),
        ("Lesotho is a continent located in the southern part of Africa", "africa"),
        ("It is in the South-Eastern Asia region", "south east asia"), ("It is in Western Africa.", "west africa"),
        ("Tunis is the capital of the African nation of Tunisia.", "tunisia"),
        ("Angola is a Portuguese-speaking nation, and its language is that.", "portuguese"),
        ("In Indonesia, the currency is the Indonesian dollar (URD). It", "indonesian dollar"),
        ("The New Zealand dollar is the official currency of New Zealand, and it", "new zealand dollar"),
        ("The currency used in Tanzania is the Tanzanian Shillings, also", "tanzanian shilling"),
        ("The currency used in Cyprus is the euro.", "euro"), ("The euro is the currency of Cyprus.", "euro"),
        ("The official language of Iraq is Arabic, which is the primary language of", "arabic"),
        ("The capital of Angola is Luena, capital of the Republic of Angola.", "luena"),
        ("Luanda is the capital of the Democratic Republic of the Congo.", "democratic republic of the congo"),
        ("The capital of Maldives is Malé.", "male"), ("Ankara is the capital of Turkey.", "turkey"), ("", None),
    ],
)  # fmt: skip
def test_answers_are_found_in_sentences(facts: Task, text: str, answer: str | None) -> None:
    assert facts.extract(text) == answer
    assert facts.extract(text, finished=False) == answer


def test_names_are_accepted_and_different_wrong_answers_never_agree(facts: Task) -> None:
    by_id = {question.id.split("/")[-1]: question for question in facts.load("test")}
    assert facts.verify("asia", by_id["ISR-continent"].reference)
    assert facts.verify("west asia", by_id["ISR-continent"].reference)
    assert facts.verify("spanish", by_id["PAN-language"].reference)
    turkey = next(question for question in facts.load("train") if question.id.endswith("TUR-of"))
    assert {"turkiye", "turkey"} <= set(json.loads(turkey.reference))
    assert not facts.verify("africa", by_id["ISR-continent"].reference)
    assert not facts.verify(None, by_id["PAN-language"].reference)
    # A reader that maps what it does not know to one name makes targets too high; accuracy does not show it.
    texts = ["The capital of Guyana is Kualamala.", "The capital of Guyana is Portlhacha.", "In Guyana, it is Bahl."]
    answers = [facts.extract(text) for text in texts]
    assert len(set(answers)) == 3
    assert None not in answers


def test_without_a_list_of_names_as_much_is_read_as_with_one(facts: Task, shared: Path) -> None:
    lines = (shared / "data" / "countries" / "smollm2_responses.jsonl").read_text().splitlines()
    questions = {q.id.split("/")[-1]: q for split in NUM_QUESTIONS for q in facts.load(split)}
    rows = [json.loads(line) for line in lines]
    golds = [str(questions[row["question_id"].split("/")[-1]].reference) for row in rows]
    verdicts = [facts.verify(facts.extract(row["text"]), gold) for row, gold in zip(rows, golds, strict=True)]
    lost = sum(row["correct"] and not verdict for row, verdict in zip(rows, verdicts, strict=True))
    assert lost <= 0.03 * len(rows)  # such as "the Horn of Africa", in which only a list of names finds a continent
    assert np.mean(verdicts) > np.mean([row["correct"] for row in rows])


def test_arithmetic_and_wikidata_are_read_and_share_no_question(example: Callable[[str], Task]) -> None:
    arithmetic, wikidata = example("arithmetic"), example("wikidata")
    splits = (*NUM_QUESTIONS, "confirmation")
    sums, names = ([task.load(split) for split in splits] for task in (arithmetic, wikidata))
    assert [len(part) for part in (*sums, *names)] == [240, 60, 240, 180, 160, 40, 160, 160]
    asked = [question.text for part in sums for question in part]  # whose first word tells the kind
    assert len({(text.split()[0], *sorted(re.findall(r"\d+|-", text))) for text in asked}) == 720
    read = {"7 - 9 = -2": "-2", "The GCD of 36 and 1,030 is 2.": "2", "It is 1,030.50, so": "1030.5", "None.": None}
    assert {text: arithmetic.extract(text) for text in read} == read
    found = [question for part in names for question in part]
    assert all(wikidata.verify(one.reference, one.reference) or one.reference.startswith("[") for one in found)
    assert len({one.text for one in found}) == len(found)
    assert wikidata.extract("The native language of Li Wenliang is Chinese.") == "chinese"


def test_the_settings_can_be_run(facts: Task, monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    file = EXAMPLE / "fit.yaml"
    assert [path.name for path in EXAMPLE.glob("*.yaml")] == [file.name]
    cli = instantiated(["fit", "--config", str(file), "--model.init_args.base_model", tiny_model], monkeypatch)
    assert cli.datamodule.target == "leave_one_out"
    assert cli.model.hparams["lora"]["activated"]
