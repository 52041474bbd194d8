"""How well answers are read and judged, on the real questions and responses of ../shared/data.

Run: python benchmarks/speed/answer_reading.py [--limit N] [--show 40]
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import time
from collections import Counter
from pathlib import Path

from selfcal_lightning.data.tasks.extraction import last_boxed
from selfcal_lightning.data.tasks.math_processes import default_pool
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import load_file_rows

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def round_trip(name: str, file: str, *, wording: str) -> tuple[str, int, int]:
    """Count the gold answers that are read back from a response that states them in ``wording``."""
    task = get_task(name)
    questions = task.load("test", path=str(DATA / file))
    right = sum(
        task.verify(task.extract(wording.format(question.reference)), question.reference) for question in questions
    )
    return f"{name}: gold in {wording!r}", right, len(questions)


def gsm8k_solutions(split: str) -> tuple[str, int, int]:
    """Count the gold answers of GSM8K that are read back from their solution texts."""
    task = get_task("gsm8k")
    file = DATA / "gsm8k" / f"{split}.jsonl"
    solutions = [row["answer"] for row in load_file_rows(str(file), ["answer"])]
    questions = task.load(split, path=str(file))
    pairs = zip(questions, solutions, strict=True)
    right = sum(task.verify(task.extract(solution), question.reference) for question, solution in pairs)
    return f"gsm8k {split}: gold in its solution", right, len(questions)


def gsm8k_last_numbers(split: str) -> tuple[str, int, int]:
    """The same with the "####" line removed: how often the last number of a worked solution is the answer."""
    task = get_task("gsm8k")
    file = DATA / "gsm8k" / f"{split}.jsonl"
    solutions = [row["answer"].rpartition("####")[0] for row in load_file_rows(str(file), ["answer"])]
    pairs = zip(task.load(split, path=str(file)), solutions, strict=True)
    right = sum(task.verify(task.extract(solution), question.reference) for question, solution in pairs)
    return f"gsm8k {split}: gold by the last number", right, len(solutions)


def raw_math_verify(pair: tuple[str, str]) -> bool:
    """Judge (answer text, gold) by math-verify alone, as its documentation shows."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    answer, gold = pair
    return bool(verify(parse(f"${gold}$"), parse(answer)))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=None, help="problems of MATH-500")
    parser.add_argument("--show", type=int, default=0, help="disagreements to print")
    arguments = parser.parse_args()

    rows = [gsm8k_solutions("train"), gsm8k_solutions("test"), gsm8k_last_numbers("test")]
    for wording in ("Explanation: so 1 + 2 = 3.\nAnswer: {}", "The answer is ${}.", "**Answer:** \\boxed{{{}}}"):
        rows += [round_trip("svamp", "svamp/all.jsonl", wording=wording)]
        rows += [round_trip("object_counting", "bbh/object_counting.jsonl", wording=wording)]
    for wording in ("Explanation: A bank is one.\nAnswer: ({})", "The answer is {}.", "**Answer:** \\boxed{{{}}}"):
        rows += [round_trip("commonsense_qa", "commonsense_qa/validation.jsonl", wording=wording)]
    for label, right, total in rows:
        print(f"{label!s:<75} {right:>5} / {total:<5} {right / total:8.4%}")

    task = get_task("math500")
    file = DATA / "math500_responses" / "llama-3.2-1b-instruct.jsonl"
    problems = task.load("test", path=str(file), limit=arguments.limit)
    records = load_file_rows(str(file), ["answer", "responses"])[: len(problems)]
    start = time.time()
    answers = [[task.extract(text) for text in record["responses"]] for record in records]
    reading = time.time() - start
    start = time.time()
    correct = [
        [task.verify(answer, problem.reference) for answer in found]
        for problem, found in zip(problems, answers, strict=True)
    ]
    verifying = time.time() - start
    start = time.time()
    classes = [task.group(found) for found in answers]
    grouping = time.time() - start
    flat = [answer for found in answers for answer in found]
    total = len(flat)
    readable = sum(answer is not None for answer in flat)
    right = sum(sum(marks) for marks in correct)
    strings = sum(len({answer for answer in found if answer is not None}) for found in answers)
    groups = sum(len({answer for answer in found if answer is not None}) for found in classes)
    own = sum(
        task.verify(task.extract(rf"\boxed{{{record['answer']}}}"), p.reference)
        for p, record in zip(problems, records, strict=True)
    )
    print(f"\nMATH-500, {len(problems)} problems, {total} responses of Llama-3.2-1B-Instruct")
    print(f"gold in a box read back as correct   {own} / {len(problems)}")
    print(f"readable answer                      {readable} / {total} = {readable / total:.4%}")
    boxed = sum(last_boxed(text) is not None for record in records for text in record["responses"])
    print(f"  of these from a box                {boxed} / {total} = {boxed / total:.4%}")
    print(f"accuracy                             {right} / {total} = {right / total:.4%}")
    print(f"distinct answers -> classes          {strings} -> {groups}")
    print(f"undecided pairs                      {default_pool().num_undecided}")
    print(f"seconds: read, verify, group         {reading:.1f}, {verifying:.1f}, {grouping:.1f}")

    pairs = {
        (rf"\boxed{{{answer}}}", record["answer"]): mark
        for record, found, marks in zip(records, answers, correct, strict=True)
        for answer, mark in zip(found, marks, strict=True)
        if answer is not None
    }
    whole = [(text, record["answer"]) for record in records for text in record["responses"]]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        raw = dict(zip(pairs, pool.map(raw_math_verify, pairs, chunksize=20), strict=True))
        raw_whole = pool.map(raw_math_verify, whole, chunksize=20)
    kinds = Counter((mark, raw[pair]) for pair, mark in pairs.items())
    print(f"\nraw math-verify on whole responses: accuracy {sum(raw_whole)} / {total} = {sum(raw_whole) / total:.4%}")
    print(f"distinct (answer, gold) pairs: {len(pairs)}; (ours, raw math-verify): {dict(kinds)}")
    differing = [(pair, mark) for pair, mark in pairs.items() if mark != raw[pair]]
    for (answer, gold), mark in differing[: arguments.show]:
        print(f"  ours {mark!s:<5} raw {not mark!s:<5} answer {answer[7:-1]!r} gold {gold!r}")
    flat_marks = [mark for marks in correct for mark in marks]
    differing_whole = [
        (answer, gold, mark, text)
        for answer, mark, (text, gold), other in zip(flat, flat_marks, whole, raw_whole, strict=True)
        if mark != other
    ]
    print(f"whole responses judged differently: {len(differing_whole)}")
    for answer, gold, mark, text in differing_whole[: arguments.show]:
        print(f"  ours {mark!s:<5} raw {not mark!s:<5} read {answer!r} gold {gold!r} text ...{text[-90:]!r}")


if __name__ == "__main__":
    main()
