"""The task ``country_facts`` as a plug-in: capitals, continents, languages and currencies, asked without a layout.

selfcal generate --plugins examples/smollm/country_facts.py --task country_facts --model MODEL --store_dir samples

A small model says "The capital of Poland is Warsaw, which lies ..." and follows no answer format. So the prompt is only
the question, and the answer is the first name after the verb, recognised by its form: capital letters, and the small
words inside names. There is no list of names. With one, an unlisted wrong answer would be read as some later, listed
word, and different wrong answers that are read as the same one would count as agreement, which the model would learn.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from selfcal_lightning.data.tasks.base import AnswerType
from selfcal_lightning.data.tasks.dataset import DatasetTask, Item, bare_question
from selfcal_lightning.data.tasks.registry import register_task
from selfcal_lightning.data.tasks.rows import FileSource, Row

DATA = Path(__file__).resolve().parent / "data"
SPLITS = ("train", "validation", "test")
MOST_WORDS, FEW_WORDS = 5, 2
# Other names of these countries, accepted as well.
ALSO_CALLED = {
    "turkiye": "turkey", "united states": "usa", "united kingdom": "uk", "timor leste": "east timor",
    "cabo verde": "cape verde",
}  # fmt: skip
_VERB = re.compile(r"\b(?:is|are|uses|use|called)\b")
# "The euro is the currency of ...": the name stands before the verb.
_BEFORE = re.compile(
    r"^(?P<name>(?:(?!\b(?:is|are)\b)[^,])+?)\s+is\s+(?:the|an?)\s+(?:\w+\s+)?(?:currency|language)\s+"
    r"(?:of|in|used|spoken)\b"
)
_END = re.compile(r"[.!?;:\n](?:\s|$)")
_WORD = re.compile(r"[\w'’-]+|[,()\"“”]")
_DIRECTION = re.compile(r"\b(north|south|east|west)ern\b")
# Words inside a name, words that are no part of one, and nouns after which the name is still to come.
_INSIDE = {"of", "and", "the", "da", "de", "do", "e"}
_NO_NAME = {
    "a", "an", "the", "of", "in", "on", "at", "to", "and", "or", "but", "which", "that", "who", "where", "it", "its",
    "is", "are", "was", "used", "uses", "called", "known", "as", "by", "for", "with", "from", "located", "situated",
    "spoken", "area", "island", "official", "language", "currency", "member", "sovereign",
    "primarily", "mainly", "also", "both", "one", "specifically", "issued", "derived",
}  # fmt: skip
_KINDS = {"nation", "country", "continent", "city", "state", "capital", "territory", "part", "parts", "region"}


def fold(text: str) -> str:
    """Return a name in lower case without accents, articles, punctuation and a plural s.

    Example:
        >>> fold("The São Tomé and Príncipe"), fold("South-Eastern Asia"), fold("Euros")
        ('sao tome and principe', 'south east asia', 'euro')
    """
    plain = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    words = " ".join(re.findall(r"\w+", re.sub(r"['’ʾʿ.]", "", plain.lower().replace("-", " "))))
    words = re.sub(r"\b(north|south)(east|west)", r"\1 \2", words.removeprefix("the "))
    return re.sub(r"(?<=[^s\W]{3})s$", "", _DIRECTION.sub(r"\1", words))


class CountryAnswers:
    """Names of places, languages and currencies in free sentences.

    Example:
        >>> answers = CountryAnswers()
        >>> answers.extract("The capital of Poland is Warsaw, which lies"), answers.extract("It is in Western Africa.")
        ('warsaw', 'west africa')
        >>> answers.extract("In Indonesia, the currency is the Indonesian dollar (URD)", finished=False)
        'indonesian dollar'
    """

    answer_type: AnswerType = "short text"
    hint = "a name, for example Warsaw"

    def canonical(self, gold: Any) -> str | None:
        """Return the accepted names as a JSON list, or the only one."""
        names = [fold(name) for name in ([gold] if isinstance(gold, str) else gold)]
        names += [ALSO_CALLED[name] for name in names if name in ALSO_CALLED]
        return json.dumps(list(dict.fromkeys(names)), ensure_ascii=False) if len(names) > 1 else names[0] or None

    def extract(self, text: str, *, finished: bool = True) -> str | None:
        """Return the first name after the verb, else the first words there, also of a response that was cut off."""
        sentence = _END.split(text.strip(), maxsplit=1)[0]
        before, verb = _BEFORE.search(sentence), _VERB.search(sentence)
        if before is not None:
            sentence = before["name"]
        elif verb is not None:
            sentence = sentence[verb.end() :]
        passing, first = "", ""
        for run in _runs(sentence):
            for name, is_passing in _names(run):
                if not is_passing:
                    return fold(name)
                passing = passing or name
            words = [word for word in run if _may_name(word) and word.lower() not in _KINDS]
            if 0 < len(words) <= FEW_WORDS and not passing:  # "South Africa uses the rand, which ..."
                return fold(" ".join(words))
            first = first or " ".join(words[:MOST_WORDS])
        return fold(passing or first) or None

    def verify(self, answer: str | None, reference: str) -> bool:
        """Return whether the answer is one of the accepted names."""
        accepted = json.loads(reference) if reference.startswith("[") else [reference]
        return answer is not None and answer in accepted

    def group(self, answers: Sequence[str | None]) -> list[str | None]:
        """Return the answers as they are."""
        return list(answers)


class CountryFacts:
    """Facts about the members of the United Nations; see ``data/README.md`` for source and licence."""

    name = "country_facts"
    answers = CountryAnswers()
    source = FileSource({split: str(DATA / f"{split}.jsonl") for split in SPLITS})
    columns = ("question", "answer")
    id_column = "id"

    def read_row(self, row: Row, question_id: str) -> Item:
        """Return the question and its accepted names."""
        return Item(row["question"], row["answer"])


def _runs(text: str) -> list[list[str]]:
    """Return the words between signs, in their order."""
    parts = groupby(_WORD.findall(text), key=lambda word: word in ',()"“”')
    return [list(words) for are_signs, words in parts if not are_signs]


def _names(run: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield the names in a run of words, and for each whether it only describes a noun, as in "the African nation"."""
    start = 0
    while start < len(run):
        end = start
        if _is_capital(run[start]) and _may_name(run[start]):
            end = start + 1
            while end < len(run):
                inside = next((n for n in range(end, len(run)) if run[n].lower() not in _INSIDE), len(run))
                if inside == len(run) or not _is_capital(run[inside]):
                    break
                end = inside + 1
            while end < len(run) and _may_name(run[end]) and run[end].lower() not in _KINDS:  # Egyptian pound
                end += 1
            speaking = run[end - 1].endswith("-speaking")
            name = " ".join(run[start:end]).removesuffix("-speaking")
            yield name, not speaking and end < len(run) and run[end].lower() in _KINDS
        start = max(end, start + 1)


def _is_capital(word: str) -> bool:
    return word[:1].isupper()


def _may_name(word: str) -> bool:
    return word.lower() not in _NO_NAME


register_task(DatasetTask(CountryFacts(), prompt=bare_question))
