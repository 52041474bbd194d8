"""The task ``country_facts`` as a plug-in: capitals, continents, languages and currencies, in free text.

selfcal generate --plugins examples/smollm/country_facts.py --task country_facts --model MODEL --store_dir samples

A small model says "The capital of Poland is Warsaw, which lies ..." and follows no answer format. So the prompt is only
the question, and the answer is the first known name after the verb. Unknown names stay as they are written: if
different wrong answers were read as the same one, they would count as agreement, and the model would learn that.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.data.tasks.dataset import DatasetTask, Item, bare_question
from selfcal_lightning.data.tasks.registry import register_task
from selfcal_lightning.data.tasks.rows import FileSource, Row

DATA = Path(__file__).resolve().parent / "data"
SPLITS = ("train", "validation", "test")
MOST_WORDS = 5
# Names that the data set lacks, and the name that it uses instead.
SYNONYMS = {
    "turkey": "türkiye", "usa": "united states", "uk": "united kingdom", "america": "united states",
    "east timor": "timor-leste", "cape verde": "cabo verde",
}  # fmt: skip
# Read only if there is no other name: "the African nation of Ghana".
ADJECTIVES = {"african": "africa", "asian": "asia", "european": "europe", "south american": "south america"}
_VERB = re.compile(r"\b(?:is|are|uses|use|called)\b")
# "The euro is the currency of ...": the name stands before the verb.
_BEFORE = re.compile(
    r"^(?P<name>(?:(?!\b(?:is|are)\b)[^,])+?)\s+is\s+(?:the|an?)\s+(?:\w+\s+)?(?:currency|language)\s+"
    r"(?:of|in|used|spoken)\b"
)
_END = re.compile(r"[.!?;:\n](?:\s|$)")
_WORD = re.compile(r"[\w'’-]+|[,()\"“”]")
# Words that are no part of a name.
_NO_NAME = {
    "a", "an", "the", "of", "in", "on", "at", "to", "and", "or", "but", "which", "that", "who", "where", "it",
    "its", "is", "are", "was", "used", "uses", "called", "known", "as", "by", "for", "with", "from", "located",
    "situated", "spoken", "part", "parts", "region", "area", "city", "country", "continent", "state", "nation",
    "territory", "island", "capital", "official", "language", "currency", "member", "sovereign", "primarily",
    "mainly", "also", "both", "one", "specifically",
}  # fmt: skip
# Parts of a continent, unless a country's name contains the word.
_PARTS = {
    "north", "south", "east", "west", "northern", "southern", "eastern", "western", "central", "middle",
    "southeast", "southwest", "northeast", "northwest", "southeastern", "southwestern", "northeastern",
    "northwestern",
}  # fmt: skip


def fold(text: str) -> str:
    """Return a name in lower case without accents, articles and punctuation, words separated by single spaces.

    Example:
        >>> fold("The São Tomé and Príncipe")
        'sao tome and principe'
    """
    plain = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    words = re.findall(r"[\w]+", re.sub(r"['’ʾʿ.]", "", plain.lower().replace("-", " ")))
    return " ".join(words[1:] if words[:1] == ["the"] else words)


class CountryAnswers:
    """Names of places, languages and currencies, anywhere in the response.

    Args:
        folder: Folder of the data; their answers are the known names.

    Example:
        >>> answers = CountryAnswers(DATA)
        >>> answers.extract("Dhaka is the capital of Bangladesh, a"), answers.extract("It is in Western Africa.")
        ('bangladesh', 'africa')
        >>> answers.extract("In Indonesia, the currency is the Indonesian dollar (URD)", finished=False)
        'indonesian dollar'
    """

    answer_type: AnswerType = "short text"
    hint = "a name, for example Warsaw"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def names(self) -> dict[str, str]:
        """Every known name -> the name it counts as; a region counts as its continent."""
        names: dict[str, str] = {}
        for row in self._rows():
            aliases = [fold(name) for name in _listed(row["answer"])]
            for alias in aliases:
                names.setdefault(alias, alias)
            if row["id"].endswith("-continent"):
                continent = "north america" if "north america" in aliases else aliases[0]
                names.update(dict.fromkeys(aliases, continent))
        names = {name: known for name, known in names.items() if name not in _NO_NAME}
        return names | {fold(name): fold(other) for name, other in SYNONYMS.items()}

    def canonical(self, gold: Any) -> str | None:
        """Return the accepted names as a JSON list, or the name if there is only one."""
        aliases = list(dict.fromkeys(self.names.get(fold(name), fold(name)) for name in _listed(gold)))
        return json.dumps(aliases, ensure_ascii=False) if len(aliases) > 1 else aliases[0] or None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the first known name after the verb, or else the first words there, also if the response was cut."""
        sentence = _END.split(text.strip(), maxsplit=1)[0]
        before, verb = _BEFORE.search(sentence), _VERB.search(sentence)
        if before is not None:
            sentence = before["name"]
        elif verb is not None:
            sentence = sentence[verb.end() :]
        runs = list(_runs(sentence))
        for names in (self.names, ADJECTIVES):
            for run in runs:
                if name := _name_in(run, names):
                    return name
        first = next((run for run in runs if run and not _is_bare(run)), [])
        return fold(" ".join([word for word in first if word.lower() not in _NO_NAME][:MOST_WORDS])) or None

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is one of the accepted names."""
        accepted = json.loads(reference) if reference.startswith("[") else [reference]
        return answer is not None and answer in accepted

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are: synonyms already have the same name."""
        return list(answers)

    def _rows(self) -> Iterator[dict[str, Any]]:
        for split in SPLITS:
            for line in (self.folder / f"{split}.jsonl").read_text().splitlines():
                yield json.loads(line)


class CountryFacts:
    """Facts about the members of the United Nations; see ``data/README.md`` for source and licence."""

    name = "country_facts"
    answers = CountryAnswers(DATA)
    source = FileSource({split: str(DATA / f"{split}.jsonl") for split in SPLITS})
    columns = ("question", "answer")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its accepted names."""
        return Item(row["question"], row["answer"])


def _listed(answer: str | Sequence[str]) -> list[str]:
    return [answer] if isinstance(answer, str) else list(answer)


def _runs(text: str) -> Iterator[list[str]]:
    """Yield the runs of words between punctuation marks."""
    run: list[str] = []
    for word in _WORD.findall(text):
        if word in ',()"“”':
            yield run
            run = []
        else:
            run.append(word)
    yield run


def _name_in(words: Sequence[str], names: Mapping[str, str]) -> str | None:
    """Return the leftmost, longest known name that is not part of a longer one: "Indonesian dollar" is no language."""
    for start in range(len(words)):
        if start and not _may_precede(words[start - 1]):
            continue
        for end in range(len(words), start, -1):
            if end < len(words) and words[end].lower() not in _NO_NAME:
                continue
            name = fold(" ".join(words[start:end]))
            if (known := names.get(name) or names.get(name.removesuffix("s"))) is not None:
                return known
    return None


def _may_precede(word: str) -> bool:
    """Return whether a name may begin after ``word``."""
    return word.lower() in _NO_NAME | _PARTS or word[:1].islower()


def _is_bare(run: Sequence[str]) -> bool:
    return all(word.lower() in _NO_NAME for word in run)


register_task(DatasetTask(CountryFacts(), prompt=bare_question))
