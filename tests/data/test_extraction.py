import time
from collections.abc import Callable

import pytest
from support.house import Vectors

from selfcal_lightning.data.tasks import extraction
from selfcal_lightning.data.tasks.answer_types import ShortTextAnswers
from selfcal_lightning.data.tasks.expressions import is_text, is_within_limits, normalise_expression, read_expression
from selfcal_lightning.data.tasks.registry import get_task

# The reference system takes the first letter of a word for an option, stops at a thousands comma, and cuts "12.0.00".
REFERENCE_FAULTS = {"Answer: Based on", "Answer: Because", "Answer: Doris", "Answer: 1,000", "12.0.00"}
read_short_text = ShortTextAnswers().extract


READINGS: dict[Callable[[str], str | None], list[tuple[str, str | None]]] = {
    extraction.read_number: [
        ("It is 3. No: 4.", "4"), ("Answer: 3\nWait.\nAnswer: 4", "4"),
        (r"\boxed{3} and then Answer: 4", "3"), (r"\boxed{3} or \boxed{18 \text{ dollars}}", "18"),
        (r"\boxed{\$1{,}234.50}", "1234.5"), (r"Answer: $\frac{3}{4}$ of 12", "0.75"),
        (r"Answer: $-\dfrac{1}{3}$", "-1/3"), ("Answer: 2 1/2 cups", "2.5"),
        ("Answer: 72 clips (48 + 24)", "72"), ("**Answer:** 48 + 24 = **72**", "72"),
        ("Answer: eight.", "8"), ("Answer:\n\n5", "5"),
        ("#### -3.50", "-3.5"), ("#### $18 #### $19", "19"),
        ("48-24", "24"), ("She owes -$5", "-5"),
        ("x=\u22127", "-7"), ("Answer: 0", "0"),
        ("Answer: -0.0", "0"), ("it is 12.5%", "12.5"),
        ("1,000,000.50", "1000000.5"), ("a list 1,2,3", "3"),
        ("9/0", "9"), ("no number", None),
        ("", None), ("version R2D2", None),
        ("9" * 5000, None), ("<think>maybe 3", None),
        ("<think>maybe 3</think>Answer: 4", "4"), ("<think>" + "so 3. " * 10_000, None),
        (r"\boxed{1.5 \times 10^8}", "150000000"), (r"$-2\,\cdot\,10^{-3}$ m", "-0.002"),
        ("It is 3 × 10^2 m/s", "300"), (r"\boxed{1/2 \times 10^3}", "0.5"),
        ("Answer: $10^{6}$", "1000000"), ("3/10^2 of 10^3", "1000"),
        ("1\u202f234\u00a0567 km", "1234567"), ("It is -10^3", "-1000"),
        (r"\boxed{12\,000}", "12000"), (r"\boxed{3\,4}", "3"),
        (r"(1,\,234)", "234"), ("Answer: 3e8 m", "300000000"),
        ("3e4.5", "3"), ("1e1000", None),
        ("1,2,345,678", "2345678"), ("5,111,1234,567", "567"),
    ],
    extraction.canonical_number: [
        ("5.0", "5"), ("7.50", "7.5"), ("1,234", "1234"), (".5", "0.5"), ("007", "7"), ("6/8", "0.75"), ("1/3", "1/3"),
        ("1e-05", "0.00001"), ("1E+3", "1000"),
    ],
    extraction.read_letter: [
        ("Answer: (B)", "B"), ("Answer: b)", "B"),
        ("**Answer:** D. because", "D"), ("Answer: **C**", "C"),
        ("Answer:\nE", "E"), ("Answer: A\nOn reflection:\nAnswer: B", "B"),
        ("Answer: option B", "B"), ("Answer: The correct option is C.", "C"),
        ("Answer: The dog (B)", "B"), ("Answer: C, because A is wrong", "C"),
        ("The answer is C", "C"), ("The answer is A because it fits", "A"),
        ("The answer is a dog", None), ("Answer: A dog", None),
        ("I think a dog is best", None), ("Answer: Based on", None),
        ("Answer: Because", None), ("Answer: 12", None),
        ("Answer: <Insert", None), ("Answer: B-flat", None),
        (r"\boxed{\textbf{(C)}}", "C"), (r"\boxed{b}", "B"),
        ("choice A", "A"), ("(B)", "B"),
        ("B. library", "B"), ("A. bank\nB. library", None),
        ("none of these", None), ("", None),
    ],
    read_short_text: [
        (r"\boxed{\text{The Paris}}", "paris"), ("It is so.\nAnswer: Sinclair Lewis.", "sinclair lewis"),
        ("line 1\nLast line!", "last line"), ("  ", None), ("Answer: 1.5 million.", "1.5 million"),
    ],
    extraction.last_boxed: [
        (r"\boxed{1}", "1"), (r"\boxed{", None),
        ("\\boxed{\n1}", "\n1"), (r"\boxed{x", None),
        (r"\boxed 5$", "5"), (r"\fbox{6}", "6"),
        (r"\boxed{\frac{1}{\boxed{2}}}", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
    ],
    extraction.normalise_short_text: [
        *((same, same) for same in ("1.5", "15", "-5", "5", ".5")), ("No. 5", "no 5"), ("U.S.A.", "usa"),
        ("1999-2000", "19992000"), ("$1,200.50", "1200.50"),
    ],
    extraction.final_part: [("<think>a</think><think>b", None)],
}  # fmt: skip


@pytest.mark.parametrize(("read", "text", "found"), [(read, *row) for read, rows in READINGS.items() for row in rows])
def test_readings(read: Callable[[str], str | None], text: str, found: str | None) -> None:
    assert read(text) == found


def test_digits_stand_for_letters_only_when_asked() -> None:
    read = [extraction.read_letter(f"Answer: {text}", digits=True) for text in ("3", "3.5 m", "12")]
    assert read == ["C", None, None]
    assert extraction.read_letter("Answer: 3") is extraction.read_letter("Answer: 3", "AB", digits=True) is None


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (r"12\text{ cm}", "12"), (r"864 \mbox{ inches}^2", "864"),
        ("18 dollars", "18"), (r"90^\circ", "90"),
        (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"), (r"\$32,\!348", "32348"),
        (r"\text{(C)}", "C"), (r"x \in [-2,7]", "[-2,7]"),
        ("y = 2x + 3", "2x+3"), (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
        (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"4210_{5}", "4210_5"), ("1/2", r"\frac{1}{2}"),
        (r"\cos x", r"\cos x"), ("50\\%", "50"),
        ("3.", "3"), (r"x=1,y=2", "x=1,y=2"),
    ],
)  # fmt: skip
def test_normal_forms(text: str, form: str) -> None:
    assert normalise_expression(text) == form
    assert normalise_expression(form) == form


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}", "9^9^9^9", "9**9**9**9", "10^{99999}", "5!!!", "99999!", "((9^{999})^{999})^{999}",
        "(" * 40 + "1" + ")" * 40, "x+" * 400 + "1", "9" * 99,
    ],
)  # fmt: skip
def test_bombs_exceed_the_limits(text: str) -> None:
    assert not is_within_limits(normalise_expression(text))


def test_ordinary_expressions_and_words() -> None:
    texts = (r"e^{-x^2}", "2^{100}", "x^5-x^4+x^3-x^2+x-1", r"\frac{3+\sqrt{5}}{2}", r"\frac{10!}{3!7!}", "x^{y^z}")
    assert all(map(is_within_limits, texts))
    texts = ("Evelyn", "even", "2x+ab", r"\arcsin x", r"\begin{pmatrix}1\end{pmatrix}")
    assert list(map(is_text, texts)) == [True, True, False, False, False]


@pytest.mark.parametrize(
    "filler",
    [
        *"\n {}(*9-$", r"\boxed{", r"\boxed{}", r"\frac{", "answer: ", "answer 1 ", "A.", "1,", "1 ", "111,", r"111\,",
        "1*10^",
    ],
)  # fmt: skip
def test_hostile_texts_are_read_in_linear_time(filler: str) -> None:
    text = "5" + filler * (40_000 // len(filler)) + "1111"
    start = time.process_time()
    for read in (extraction.read_number, extraction.read_letter, read_expression, read_short_text):
        read(text)
        read(rf"\boxed{{{text}}}")
    assert time.process_time() - start < 5.0


def test_reference_vectors_selfcal(vectors: Vectors) -> None:
    cases = vectors("answer_extraction_selfcal")["cases"]
    assert len(cases) >= 30
    for case in cases:
        answer = get_task(case["dataset"]).extract(case["response"])
        if case["response"] in REFERENCE_FAULTS:
            assert answer != case["extracted"]
        elif case["extracted"] is not None:
            expected = str(case["extracted"])
            assert answer == (extraction.canonical_number(expected) or expected), case


def test_reference_vectors_qwen_extract(vectors: Vectors) -> None:
    for case in vectors("qwen_math_extract")["cases"]:
        expected = extraction.last_boxed(case["extracted"]) or case["extracted"]
        assert (read_expression(case["text"]) or "") == expected, case
