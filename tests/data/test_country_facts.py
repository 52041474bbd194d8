import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.command_lines import instantiated

from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.registry import TASKS
from selfcal_lightning.models.chat_format import Prompt
from selfcal_lightning.records import Message

ROOT = Path(__file__).resolve().parents[2]
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
