"""Ends of steps: hand-made texts, recorded vectors, all ways to cut a text into tokens, texts that are not over."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from selfcal_lightning.data.steps import (
    POSITIONS,
    aggregate,
    find_rule,
    prefix_after,
    step_ends,
    step_position,
    step_spans,
    token_spans,
)
from selfcal_lightning.data.tasks.extraction import last_boxed
from selfcal_lightning.metrics.capability import expected_accuracy

Vectors = Callable[[str], dict[str, Any]]
RULES = ("sentence", "line", "blank_line", "heading", "marker")
# What steps are made of, so that random texts hit the rules and their exceptions.
PARTS = ["ab", "3", "3.5", *".!? \n。)", "\n\n", "Step 1:", "## Step2", "step", "<e>", "Dr.", "2.", "**"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=14).map("".join)


def _texts(text: str, rule: str, marker: str | None = None) -> list[str]:
    return [text[start:end] for start, end in step_spans(text, rule, marker=marker)]


def _reference_regex_sentences(text: str) -> list[str]:
    """Split behind a mark that white space follows, as the reference does for want of headings."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+", text) if part.strip()]


def _marker(rule: str) -> str | None:
    return "<e>" if rule == "marker" else None


def _cut(text: str, places: list[int]) -> list[str]:
    """Cut a text into pieces; some are empty, as those of control tokens."""
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("First 34+75=109. So 109+58=167. It is 167.", ["First 34+75=109.", "So 109+58=167.", "It is 167."]),
        ("It is 3.5. Then 2.25!", ["It is 3.5.", "Then 2.25!"]),
        ("No end", ["No end"]),
        ("Cut in the middle. Of a wo", ["Cut in the middle.", "Of a wo"]),
        ("Dr. Smith has 2.5 apples. He eats 1.", ["Dr. Smith has 2.5 apples.", "He eats 1."]),
        ("1. Add 2.\n2. Stop.", ["1. Add 2.", "2. Stop."]),
        ("(a) A. Yes. Done", ["(a) A.", "Yes.", "Done"]),
        ("He said 'go.' Then (he left.) **Done.** End...", ["He said 'go.'", "Then (he left.)", "**Done.**", "End..."]),
        ("第一步。第二步！第三步？ok", ["第一步。", "第二步！", "第三步？", "ok"]),
        ("e.g. 2 vs. 3. So", ["e.g. 2 vs. 3.", "So"]),
        ("", []),
        (" \n ", []),
    ],
)  # fmt: skip
def test_sentences(text: str, wanted: list[str]) -> None:
    assert _texts(text, "sentence") == wanted


def test_other_rules() -> None:
    assert _texts("a\n\n b \nc", "line") == ["a", "b", "c"]
    assert _texts("\n\na\nb\n \nc\n\n\n\nd", "blank_line") == ["a\nb", "c", "d"]
    assert _texts("a\r\n\r\nb", "blank_line") == ["a", "b"]
    assert _texts("<e>a b<e> <e>c", "marker", "<e>") == ["a b", "c"]
    assert _texts("Intro. Step 1: a.\nStep 2. b. As in Step 1: c", "heading") == ["a.", "b. As in Step 1: c"]
    assert _texts("### **Step 1:** a\n### **Step 2:** b", "heading") == ["a", "b"]
    assert _texts("the next Step 2 is nice", "heading") == ["the next Step 2 is nice"]
    assert _texts("Step 1.5 is no heading", "heading") == ["Step 1.5 is no heading"]


def test_heading_steps_equal_the_vectors(vectors: Vectors) -> None:
    """The reference joins lines and drops chat tokens first; only its branch of headings is to be matched."""
    headed = 0
    for case in vectors("step_split_ttt")["cases"]:
        text = re.sub(r"<\|?/?\w+\|?>", "", case["text"])
        rule = find_rule(text)
        found = [" ".join(step.split()) for step in _texts(text, rule)]
        if rule == "heading":
            headed += 1
            assert found == case["GSM8K"]
        elif text.isascii():
            assert found == _reference_regex_sentences(text)
            assert found == [step for step in case["GSM8K"] if step]
    assert headed >= 3


def test_short_steps_and_decimals_survive(vectors: Vectors) -> None:
    """One reference drops steps of fewer than five characters and cuts decimals; here every word is in a step."""
    for case in vectors("step_split_cot_sasc")["cases"]:
        text = case["text"]
        spans = step_spans(text, "sentence")
        written = [at for at in range(len(text)) if not text[at].isspace()]
        assert all(any(start <= at < end for start, end in spans) for at in written)
        cuts = {end for _, end in spans}
        assert not any(text[at - 1] == "." and text[at : at + 1].isdigit() for at in cuts)


@pytest.mark.parametrize(
    ("pieces", "rule", "ends"),
    [
        (["ab", ".", " cd", "."], "sentence", [2, 4]),
        (["ab", ".\n\n", "cd", ".\n\n"], "sentence", [2, 4]),
        (["ab", ".\n\n", "cd", ".\n\n"], "blank_line", [2, 4]),
        (["a", "\n", "\n", "\n", "b", "\n"], "blank_line", [3, 5]),
        (["3", ".", "5", "."], "sentence", [4]),
        (["ab. cd", ". ef"], "sentence", [1, 2]),
        (["ab. cd. ef."], "sentence", [1]),
        (["ab", ".", "  ", "\n"], "sentence", [2]),
        (["## ", "Step1:", " a", " b", " ##", " Step2:", " c"], "heading", [4, 7]),
        (["Hi", "\n", "Step", " 1", ":", " a", "\n", "Step", " 2", ":", " b"], "heading", [6, 11]),
        (["a", "<", "e", ">", "b"], "marker", [4, 5]),
        (["", "ab", "", ".", "", " cd"], "sentence", [4, 6]),
        ([], "sentence", []),
        (["\n", " "], "line", []),
    ],
)
def test_ends_in_tokens(pieces: list[str], rule: str, ends: list[int]) -> None:
    assert step_ends(pieces, rule, marker=_marker(rule)) == ends


def test_steps_of_the_bundled_model_end_at_its_full_stops(tiny_model: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    text = "First 34+75=109. So 109-18=91. The answer is 91."
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = tokenizer.batch_decode([[token] for token in ids])
    assert "".join(pieces) == text
    stop = tokenizer(".", add_special_tokens=False)["input_ids"][0]
    assert step_ends(pieces, "sentence") == [at + 1 for at, token in enumerate(ids) if token == stop]


def test_ends_that_may_still_move_are_kept_back() -> None:
    assert step_ends(["3", "."], "sentence", is_over=False) == []
    assert step_ends(["3", ".", "5"], "sentence", is_over=False) == []
    assert step_ends(["x=3", ".", " So"], "sentence", is_over=False) == [2]
    assert step_ends(["x=3", ".\n"], "sentence", is_over=False) == [2]
    assert step_ends(["a", "\n\n"], "blank_line", is_over=False) == [2]
    assert step_ends(["a", "\n", "Step 1", "."], "heading", is_over=False) == []
    assert step_ends(["Step 1: a", "\n", "Step 2", ":", " b"], "heading", is_over=False) == [1]


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.lists(st.integers(0, 100), max_size=12), st.sampled_from(RULES))
def test_ends_do_not_depend_on_the_tokens(text: str, places: list[int], rule: str) -> None:
    """The ends in characters, each moved to the end of the token that it lies in, are the ends in tokens."""
    characters = step_ends(list(text), rule, marker=_marker(rule))
    pieces = _cut(text, places)
    ends = step_ends(pieces, rule, marker=_marker(rule))
    reach = list(itertools.accumulate(map(len, pieces)))
    assert ends == sorted({next(i for i, end in enumerate(reach) if end >= c) + 1 for c in characters})
    assert "".join(pieces) == text
    # What stands behind the last end is white space or a heading; nothing else belongs to no step.
    if rule != "heading":
        rest = "".join(pieces[ends[-1] if ends else 0 :])
        assert not rest.replace("<e>", "" if rule == "marker" else "<e>").strip()


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.lists(st.integers(0, 100), max_size=12), st.sampled_from(RULES))
def test_what_is_settled_stays(text: str, places: list[int], rule: str) -> None:
    pieces = _cut(text, places)
    whole = step_ends(pieces, rule, marker=_marker(rule))
    seen: list[int] = []
    for size in range(len(pieces) + 1):
        settled = step_ends(pieces[:size], rule, marker=_marker(rule), is_over=False)
        assert settled[: len(seen)] == seen
        assert whole[: len(settled)] == settled
        seen = settled


@settings(deadline=None)
@given(TEXTS, st.sampled_from(RULES))
def test_spans_are_stripped_apart_and_rising(text: str, rule: str) -> None:
    spans = step_spans(text, rule, marker=_marker(rule))
    assert all(text[start:end] == text[start:end].strip() != "" for start, end in spans)
    assert all(first.end <= second.start for first, second in itertools.pairwise(spans))


@pytest.mark.parametrize("part", ["vs. ", ".", " ", "*", "#", "Step 1: ", "2. ", "a. "])
@pytest.mark.parametrize("rule", RULES)
def test_a_model_that_repeats_itself_is_read_too(part: str, rule: str) -> None:
    """Long runs, on which a pattern that tries everything would not come back."""
    pieces = [part] * 20_000 + ["x"]
    assert step_ends(pieces, rule, marker=_marker(rule))[-1] == len(pieces)


def test_token_spans_equal_overlaps(vectors: Vectors) -> None:
    """Steps without their headings, on the tokens of the recorded response; the reference counts from token 0."""
    case = vectors("ttt_step_confidence")["cases"][0]
    words = case["response_text"].split(" ")
    pieces = [words[0], *(f" {word}" for word in words[1:])]
    found = token_spans(pieces, step_spans("".join(pieces), "heading"))
    for wanted in vectors("ttt_step_confidence_alignment")["cases"]:
        assert [list(span) for span in found] == wanted["correct_spans"]
    assert [case["response_text"][a:b] for a, b in step_spans("".join(pieces), "heading")] == case["parsed_steps"]


@settings(deadline=None)
@given(TEXTS.filter(bool), st.lists(st.integers(0, 100), max_size=12), st.integers(0, 99), st.integers(1, 99))
def test_token_spans_hold_just_the_tokens_that_overlap(text: str, places: list[int], start: int, size: int) -> None:
    pieces, start = _cut(text, places), start % len(text)
    end = min(start + size, len(text))
    first, last = token_spans(pieces, [(start, end)])[0]
    offsets = list(itertools.pairwise([0, *itertools.accumulate(map(len, pieces))]))
    touching = [i for i, (a, b) in enumerate(offsets) if a < end and b > start]
    assert (first, last) == (touching[0], touching[-1] + 1)


def test_rollout_prefixes_equal_the_vectors(vectors: Vectors) -> None:
    """No steps are the empty prefix (the reference sends a blank line); an answer in it leaves nothing to roll."""
    for case in vectors("rollout_prefixes")["cases"]:
        pieces = re.findall(r"\n\n|[^\n]+", case["generation"])
        size = prefix_after(step_ends(pieces, "blank_line"), case["k"])
        prefix = None if size is None else "".join(pieces[:size])
        if prefix is not None and last_boxed(prefix) is not None:
            prefix = None
        assert prefix == ("" if case["k"] == 0 else case["prefix_sent_to_model"])


def test_success_rates_equal_the_vectors(vectors: Vectors) -> None:
    """The rate of a prefix is the share of right rollouts; the whole response is its own only rollout."""
    for case in vectors("mc_accuracy")["cases"]:
        for entry in case["out"]:
            record = case["rollout_files"][str(entry["k_prefix_segment"])][entry["response_id"]]
            pieces = re.findall(r"\n\n|[^\n]+", record["first_pass_generation"])
            ends = step_ends(pieces, "blank_line")
            rollouts = record["second_pass_generations"]
            if prefix_after(ends, entry["k_prefix_segment"]) is None:
                rollouts = [record["first_pass_generation"]]
            if not rollouts:  # the reference writes 0.0; nothing was observed
                assert entry["accuracy"] == 0.0
                continue
            gold = last_boxed(record["gold_answer"])
            right = sum(re.search(rf"\b{gold}(\.0)?\b(?!.*\d)", text) is not None for text in rollouts)
            assert expected_accuracy(len(rollouts), right) == pytest.approx(entry["accuracy"])


def test_aggregation_equals_the_vectors(vectors: Vectors) -> None:
    for case in vectors("prm_score_aggregation")["cases"]:
        for how in ("min", "prod", "last"):
            assert aggregate(case["scores"], how) == pytest.approx(case[how], abs=1e-9)
        assert aggregate(case["scores"], "mean") == pytest.approx(sum(case["scores"]) / len(case["scores"]))
    assert aggregate([], "min") is None
    assert math.isclose(aggregate([0.1] * 3, "prod"), 0.001)


def test_positions() -> None:
    assert [step_position(k, 1) for k in (0, 1)] == [0, 4]
    assert [POSITIONS[step_position(k, 2)] for k in range(3)] == ["question", "before_answer", "end"]
    assert [POSITIONS[step_position(k, 3)] for k in range(4)] == ["question", "first", "before_answer", "end"]
    assert step_position(0, 0) == 0
