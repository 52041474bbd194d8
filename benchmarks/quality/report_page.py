"""Time the report page at 10,000 questions x 16 responses: writing it, its size, first paint, a filter; see ``--help``.

Needs playwright and a Chromium; the texts are made up of words, so that they compress as prose does.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.evaluation.page import write_page
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample


def made_up(questions: int, samples: int, words: int, seed: int = 0) -> RecordedPool:
    draw = random.Random(seed)
    vocabulary = ["".join(draw.choices("etaoinshrdlucmfw", k=draw.randint(2, 9))) for _ in range(5_000)]

    def text() -> str:
        return " ".join(draw.choices(vocabulary, k=words))

    def group(number: int) -> QuestionSamples:
        name, truth = f"q{number:05}", str(draw.randint(0, 99))
        asked = Question(name, "local_number", (Message("user", text()),), truth, text())
        rows = []
        for index in range(samples):
            p = draw.random()
            answer = truth if draw.random() < p else str(draw.randint(0, 99))
            rows.append(
                Sample(name, index, 0, text(), None, "stop", answer, answer == truth, None, p, 1 - p, {}, words)
            )
        return QuestionSamples(asked, tuple(rows), "test")

    return RecordedPool(tuple(group(number) for number in range(questions)))


def time_in_browser(file: Path, chromium: str) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page: Any = browser.new_page()
        started = time.perf_counter()
        page.goto(file.as_uri())
        page.wait_for_selector("#list li")
        found = {"first paint, s": time.perf_counter() - started}
        script = """() => { const start = performance.now(); const box = document.getElementById('verdict');
            box.value = '0'; box.dispatchEvent(new Event('change')); return performance.now() - start; }"""
        found["filter, ms"] = page.evaluate(script)
        started = time.perf_counter()
        page.locator("#list li").first.click()
        page.wait_for_selector("#detail details")
        found["open a question, s"] = time.perf_counter() - started
        browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--words", type=int, default=20, help="of a response")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    given = parser.parse_args()
    pool = made_up(given.questions, given.samples, given.words)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        started = time.perf_counter()
        write_page(file, {"test": {"samples": pool}}, {}, title="Made up")
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = {
            "write, s": seconds,
            "size, MB": file.stat().st_size / 1e6,
            "memory to write, MiB": (after - before) / 1024,
        }
        for name, value in {**found, **time_in_browser(file, given.chromium)}.items():
            print(f"{name:24}{value:10.2f}")


if __name__ == "__main__":
    main()
