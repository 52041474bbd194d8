"""What other systems take for right, and for P(True), on recorded answers: ours agrees where they are not at fault."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest

from selfcal_lightning.data.tasks.answer_types import ShortTextAnswers, expressions_equal, numbers_equal
from selfcal_lightning.data.tasks.expressions import read_expression
from selfcal_lightning.data.tasks.extraction import (
    canonical_number,
    last_boxed,
    read_letter,
    read_number,
    read_short_text,
)
from selfcal_lightning.models.chat_format import NO_TEXTS, YES_TEXTS
from selfcal_lightning.records import normalised_p_true

Vectors = Callable[[str], dict[str, Any]]
same_text = ShortTextAnswers().verify


def test_numbers_and_names_equal_the_vectors(vectors: Vectors) -> None:
    """Two golds differ on purpose: the unit of "5 apples" is dropped, and "1e3" is not read as a number."""
    compared = 0
    for case in vectors("string_match_verifier")["cases"]:
        if case["gold"] in ("5 apples", "1e3"):
            continue
        answer = str(case["pred"])
        assert (numbers_equal(answer, case["gold"]) or same_text(answer, case["gold"])) == case["ok"]
        compared += 1
    assert compared >= 5


def test_a_part_of_a_name_is_not_the_name(vectors: Vectors) -> None:
    """The reference takes "", "a" and "1" for "Paris" and "1912", since each is inside the other."""
    refused = 0
    for case in vectors("triviaqa_string_match")["cases"]:
        gold = case["gold"]
        found = same_text(case["extracted"], json.dumps([gold, *case["aliases"]]))
        assert found == (case["extracted"].replace(".", "").lower() == gold.lower())
        refused += case["ok"] and not found
    assert refused >= 3


def test_the_end_of_a_number_is_not_the_number(vectors: Vectors) -> None:
    for case in vectors("gsm8k_tail_substring_bug")["cases"]:
        answer = read_number(case["text"])
        assert numbers_equal(answer, case["extracted"])
        assert numbers_equal(answer, case["gold"]) is case["strict"]


def test_equal_answers_are_equal_for_us_where_any_of_three_says_so(vectors: Vectors) -> None:
    for case in vectors("answer_equal_ttt")["cases"]:
        votes = [case[name] for name in ("GSM8K", "MATH500", "SASC")]
        if any(votes):
            assert expressions_equal(case["pred"], case["gold"])
        if case["pred"] is None:
            assert not numbers_equal(case["pred"], case["gold"])


def test_what_one_of_four_reads_as_a_number_is_read(vectors: Vectors) -> None:
    for case in vectors("answer_extraction_ttt")["cases"]:
        if case["GSM8K"] and "frac" not in case["text"]:
            assert numbers_equal(read_number(case["text"]), case["GSM8K"])


def test_whatever_a_reference_reads_is_read(vectors: Vectors) -> None:
    """It cuts 3/4 to 3 and loses a brace; a full stop inside a line ends its short answers, and ours continue."""
    readers = {"gsm8k": read_number, "aime25": read_number, "mmlu": read_letter, "math500": read_expression}
    for case in vectors("answer_extraction_appier")["cases"]:
        found = readers.get(case["dataset"], read_short_text)(case["response"])
        if case["extracted"] is None or "3/4" in case["response"]:
            continue
        assert found is not None
        if readers.get(case["dataset"]) is read_number:
            assert numbers_equal(found, str(case["extracted"]))
        elif case["dataset"] in readers:
            assert found == case["extracted"]
        else:
            assert found.startswith(case["extracted"].removeprefix("\\text{").lower())


def test_numbers_that_a_reference_cuts_are_whole(vectors: Vectors) -> None:
    """It reads 1,234 and one half as 1."""
    for case in vectors("sasc_normalize_number")["cases"]:
        if case["text"] is None or case["text"] in ("1,234", r"\frac{1}{2}"):
            assert not numbers_equal(case["text"], case["out"])
        else:
            assert float(case["out"]) == pytest.approx(float(Fraction(canonical_number(case["text"]))))


def test_boxes_equal_the_vectors(vectors: Vectors) -> None:
    """A box whose content begins on the next line is read here, and overlooked by the reference."""
    for case in vectors("contains_boxed")["cases"]:
        assert (last_boxed(case["t"]) is not None) == (case["out"] or "\n" in case["t"])


def test_p_true_merges_the_forms_of_a_word(vectors: Vectors) -> None:
    """The reference knows "Yes" and "No" alone, says 0.5 where it sees neither, and keeps the last of equal tokens."""
    for case in vectors("p_true_appier")["cases"]:
        yes, no = (sum(p for token, p in case["top"] if token in texts) for texts in (YES_TEXTS, NO_TEXTS))
        found = normalised_p_true(yes, no)
        if case["parse_success"] and len({token for token, _ in case["top"]}) == len(case["top"]):
            assert found == pytest.approx(case["probs"]["Yes"], abs=1e-6)
        elif yes + no > 0.0:
            assert found == pytest.approx(yes / (yes + no))
        else:
            assert found is None


def test_step_judgements_count_exact_options_alone(vectors: Vectors) -> None:
    """Of two references one drops P(B), the other takes every token with an "a" in it for A."""
    for case in vectors("self_eval_step_probability")["cases"]:
        masses = [
            sum(p for token, p in zip(case["tokens"], row, strict=True) if token == option)
            for row in case["prob_rows"][:1]
            for option in ("A", "B")
        ]
        found = normalised_p_true(*masses)
        assert found == pytest.approx(masses[0] / (masses[0] + masses[1]))
        assert found != pytest.approx(case["GSM8K"], abs=0.01)
