import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.store_samples import make_store, write_number_pool

from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.view import run_view, view_training
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.pools.recorded import RecordedPool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.evaluation.page import write_page
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample, SamplingSettings

CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"


def samples(question: str, *rows: tuple[str, bool, float], text: str = HOSTILE) -> QuestionSamples:
    asked, task = f"{question} {HOSTILE}", "local_text" if question == "long" else "local_number"
    samples = tuple(
        Sample(question, index, 0, text, None, "stop", answer, right, yes_mass=p, no_mass=1 - p, num_tokens=5)
        for index, (answer, right, p) in enumerate(rows)
    )
    return QuestionSamples(Question(question, task, (Message("user", asked),), "4", asked), samples, "test")


def systems() -> dict[str, dict[str, RecordedPool]]:
    before = [
        samples("sure and wrong", ("5", False, 0.95), ("5", False, 0.9), ("4", True, 0.2)),
        samples("mended", ("5", False, 0.8), ("5", False, 0.7), ("4", True, 0.6)),
        samples("long", ("4", True, 0.9), ("4", True, 0.8), ("4", True, 0.7), text="x" * 1_000_000),
    ]
    after = [
        samples("sure and wrong", ("5", False, 0.9), ("5", False, 0.9), ("4", True, 0.3)),
        samples("mended", ("5", False, 0.2), ("5", False, 0.2), ("4", True, 0.9)),
        samples("long", ("4", True, 0.9), ("4", True, 0.8), ("4", True, 0.7), text="x" * 1_000_000),
    ]
    return {"id": {"before": RecordedPool(tuple(before)), "after": RecordedPool(tuple(after))}}


def packed(page: str, name: str) -> Any:
    (found,) = re.findall(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    return json.loads(gzip.decompress(base64.b64decode(found)))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("page") / "report.html"
    write_page(
        file, systems(), {"own.id.ece.before": 0.25}, title=HOSTILE, sentences=[HOSTILE],
        colours=lambda groups: [[([8, len(HOSTILE) - 8], [-0.01, -3.0])] * 3 for _ in groups],
    )  # fmt: skip
    return file


def test_texts_are_never_markup_and_two_scripts_may_run(page: Path) -> None:
    text = page.read_text()
    assert "taken" not in text.replace(HOSTILE.translate({60: "&lt;", 62: "&gt;", 34: "&quot;", 39: "&#x27;"}), "")
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, flags=re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    assert len(scripts) == 2
    assert f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}" in text
    assert packed(text, "c0")[0]["s"][0][0] == HOSTILE
    assert packed(text, "index")["numbers"][0]["ece"][0] == 0.25


def test_redaction_leaves_no_text_and_other_files_are_not_replaced(tmp_path: Path) -> None:
    write_page(tmp_path / "report.html", systems(), {}, title="t", redact=True)
    text = (tmp_path / "report.html").read_text()
    index = packed(text, "index")
    assert 'id="c0"' not in text
    assert "taken" not in json.dumps(index)
    assert index["questions"][0]["a"] == ["answer 1", "answer 2"]
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(InputError, match=r"config\.json exists and is not a report"):
        write_page(file, systems(), {}, title="t")
    assert file.read_text() == "{}"


def write_pool(path: Path, ids: range, responses: Callable[[int], list[tuple[str, float]]]) -> Path:
    """Write a pool; ``responses`` returns the texts and confidences of a question."""
    rows = {f"q{i}": [{"text": text, "confidence": {"p_true": sure}} for text, sure in responses(i)] for i in ids}
    return write_number_pool(path, rows, reference="4")


def in_turn(first: int) -> list[tuple[str, float]]:
    return [("45"[n % 3 == 0], n % 10 / 10) for n in range(first, first + 4)]


def test_view_shows_the_numbers_of_an_evaluation(tmp_path: Path) -> None:
    pool = write_pool(tmp_path / "pool.jsonl", range(12), in_turn)
    options = {"output_dir": str(tmp_path / "out"), "strategies": [], "num_resamples": 1000}
    results = run_evaluate(pools={"samples": str(pool)}, **options)
    numbers = packed(Path(run_view(str(pool), output=str(tmp_path / "view.html"))).read_text(), "index")["numbers"]
    shown = packed(Path(run_view(str(tmp_path / "out"))).read_text(), "index")["numbers"]
    assert numbers == shown
    assert numbers[0]["ece"][0] == results["own.test.ece.samples"]
    assert numbers[0]["questions"] == 12
    with pytest.raises(InputError, match="`limit` cannot apply"):
        run_view(str(tmp_path / "out"), limit=3)
    pair = {"base": str(pool), "llama3.1": str(pool)}
    results = run_evaluate(pools=pair, **options)
    numbers = packed((tmp_path / "out" / "report.html").read_text(), "index")["numbers"]
    sides = [("base", results["own.test.ece.before"]), ("llama3.1", results["own.test.ece.after"])]
    assert [(row["system"], row["ece"][0]) for row in numbers] == sides


@pytest.mark.parametrize("confidence", [{"p_true": 0.5}, {}])
def test_a_failed_request_is_a_wrong_response_and_no_missing_reference(tmp_path: Path, confidence: dict) -> None:
    responses = [{"text": text, "confidence": confidence} for text in "545"]
    failed = {"text": "", "answer": None, "correct": None}
    pool = write_number_pool(tmp_path / "pool.jsonl", {"a": [*responses, failed], "b": responses}, reference="4")
    options = {"output_dir": str(tmp_path / "out"), "strategies": [], "num_resamples": 5}
    found = run_evaluate(pools={"samples": str(pool)}, **options)
    assert found["own.test.pass_at_1.samples"] == pytest.approx((1 / 4 + 1 / 3) / 2)
    page = run_view(str(pool), output=str(tmp_path / "view.html"))
    assert packed(Path(page).read_text(), "index")["numbers"]


def test_the_report_of_a_training_says_whose_confidences_it_has(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    short = SamplingSettings(max_new_tokens=12)
    run_generate(
        "bundled", str(tmp_path / "samples"), "word_problems", "test_id", limit=2, num_samples=2, sampling=short
    )
    view_training(tmp_path)
    assert packed((tmp_path / "report.html").read_text(), "index")["systems"] == ["before training"]
    assert capsys.readouterr().err.splitlines()[-1] == f"Look at {tmp_path / 'report.html'}"
    (tmp_path / "samples" / "manifest.json").write_text("{")
    view_training(tmp_path)
    assert "No report was written: " in capsys.readouterr().err


def test_two_pools_are_compared_on_the_questions_of_both(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    one, two = (write_pool(tmp_path / f"{ids.start}.jsonl", ids, in_turn) for ids in (range(6), range(2, 6)))
    page = run_view(str(one), str(two), output=str(tmp_path / "both.html"))
    index = packed(Path(page).read_text(), "index")
    assert [row["questions"] for row in index["numbers"]] == [4, 4]
    assert len(index["questions"]) == 4
    assert "2 questions are in one of the two only" in capsys.readouterr().err
    stated = {f"q{i}": [{"text": "4", "answer": "4", "correct": True}] for i in range(2)}
    same_ids = [
        write_number_pool(tmp_path / f"same-{n}.jsonl", stated, question=f"Number {n}?", reference=reference)
        for n, reference in enumerate(("5", None, None))
    ]
    for pair in ((one, same_ids[0]), same_ids[1:]):
        with pytest.raises(InputError, match="no question of 'test' in common"):
            run_view(*map(str, pair), output=page)


def evaluation(folder: Path, answers: str, ids: range, **fields: str) -> Path:
    folder.mkdir()
    samples = [{"text": text, "confidence": {"p_true": 0.9 - n / 5}} for n, text in enumerate(answers)]
    pool = write_number_pool(folder / "pool.jsonl", {f"q{i}": samples for i in ids}, **{"reference": "4", **fields})
    run_evaluate(pools={folder.name: str(pool)}, output_dir=str(folder / "out"), strategies=[], num_resamples=50)
    return folder / "out"


def test_two_evaluations(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = evaluation(tmp_path / "a", "554", range(6)), evaluation(tmp_path / "b", "464", range(2, 8))
    page = Path(run_view(str(one), str(two), output=str(tmp_path / "both.html"))).read_text()
    said = "4 questions are in both evaluations; 4 are in one only and not listed; the numbers are those of each whole"
    assert said in " ".join(capsys.readouterr().err.split())
    index = packed(page, "index")
    assert index["systems"] == [str(one), str(two)]
    first, second = (packed((out / "report.html").read_text(), "index")["numbers"][0] for out in (one, two))
    assert [row["auroc"] for row in index["numbers"]] == [first["auroc"], second["auroc"]]
    row = index["questions"][0]
    shown = [[row["a"][answer] for answer in run["a"]] for run in row["s"]]
    assert (row["id"], shown) == ("q2", [["5", "5", "4"], ["4", "6", "4"]])
    assert packed(page, "c0")[0]["s"] == [["5", "5", "4"], ["4", "6", "4"]]
    other = evaluation(tmp_path / "c", "4", range(20, 22))
    same_ids = evaluation(tmp_path / "d", "4", range(6), question="Another one?", reference="5")
    for arguments, options, message in (
        ((one, other), {"output": str(tmp_path / "both.html")}, "no question in common"),
        ((one, same_ids), {"output": str(tmp_path / "both.html")}, "no question in common"),
        ((one, tmp_path / "a" / "pool.jsonl"), {}, "two of the same kind"),
        ((one, two), {"limit": 3}, "`limit` cannot apply"),
    ):
        with pytest.raises(InputError, match=message):
            run_view(*map(str, arguments), **options)
    monkeypatch.chdir(one)
    with pytest.raises(InputError, match=r"report\.html is the report of an evaluation .* another `output`"):
        run_view(".", str(two))
    with pytest.raises(InputError, match=r"two evaluations to compare, but got .* twice"):
        run_view(str(one), ".", output=str(tmp_path / "both.html"))
    run_view(str(tmp_path / "b" / "pool.jsonl"), output=str(two / "report.html"), redact=True)
    with pytest.raises(InputError, match="the texts that `model` bundled would colour"):
        run_view(str(tmp_path / "b" / "pool.jsonl"), redact=True, model="bundled")
    with pytest.raises(InputError, match=r"report\.html is without texts"):
        run_view(str(one), str(two), output=str(tmp_path / "both.html"))


def test_a_store_without_a_response_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path)
    with pytest.raises(InputError, match="to hold responses, but got none: finish `selfcal generate`"):
        run_view(str(tmp_path), output=str(tmp_path / "view.html"))


def test_tokens_are_coloured_by_their_log_probability(tmp_path: Path) -> None:
    short = SamplingSettings(max_new_tokens=12)
    run_generate("bundled", str(tmp_path / "store"), "word_problems", "test_id", limit=2, num_samples=2, sampling=short)
    page = Path(run_view(str(tmp_path / "store"), model="bundled", output=str(tmp_path / "view.html"))).read_text()
    assert packed(page, "index")["coloured"] is True
    groups = {group.question.id: group for group in SampleStore(tmp_path / "store").samples()}
    for row, texts in zip(packed(page, "index")["questions"], packed(page, "c0"), strict=True):
        shown = zip(groups[row["id"]].samples, texts["s"][0], texts["l"][0], strict=True)
        for sample, text, (lengths, values) in shown:
            assert (sum(lengths), len(lengths)) == (len(text), len(values))
            assert sum(values) == pytest.approx(sample.logprob, abs=0.01 * len(values) + 1e-3)
    with pytest.raises(InputError, match="`model` with `adapter`"):
        run_view(str(tmp_path / "store"), adapter="somewhere")


@pytest.fixture
def browser(page: Path) -> Iterator[tuple[Any, list[str]]]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    if not CHROMIUM.is_file():
        pytest.skip(f"needs a browser at {CHROMIUM}")
    with sync_api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        tab, problems = chromium.new_page(), []
        tab.set_default_timeout(15_000)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: None if request.url == page.as_uri() else problems.append(request.url))
        tab.goto(page.as_uri())
        tab.wait_for_selector("#list li")
        yield tab, problems
        chromium.close()


@pytest.mark.slow
def test_a_browser_shows_filters_and_replays(browser: tuple[Any, list[str]]) -> None:
    tab, problems = browser
    assert tab.inner_text('[data-key="own.id.ece.before"]').startswith("0.250")
    first = tab.locator("#list li").first
    assert first.inner_text().startswith("sure and wrong")  # confidently wrong first
    tab.select_option("#verdict", "flipped")
    assert tab.inner_text("#count") == "1 of 3 questions"
    tab.locator("#list li").first.click()
    tab.wait_for_selector("#why")
    assert "before answers 5 ✗, after answers 4 ✓" in tab.inner_text("#why")
    rules = tab.locator(".rule")
    assert rules.nth(0).inner_text() == "Stops after sample 1 with 5 ✗"  # .8 is above .7
    assert rules.nth(1).inner_text() == "Stops after sample 3 with 4 ✓"
    tab.locator("#detail details summary").first.click()
    assert tab.inner_text("#detail details .p0") == HOSTILE[:8]
    assert tab.locator("#detail details .p3").first.get_attribute("title") == "log-probability -3.00, probability 0.05"
    tab.fill("#threshold", "0.95")
    assert rules.nth(1).inner_text() == "Does not stop within 3; the vote is 4 ✓"
    tab.locator("#slider").fill("2")
    assert rules.nth(1).inner_text() == "Does not stop within 2; the vote is 5 ✗"
    tab.select_option("#verdict", "")
    tab.fill("#low", "0.85")
    assert tab.inner_text("#count") == "2 of 3 questions"
    tab.fill("#low", "0")
    tab.locator('.bin[data-bin="2"][data-system="0"]').click()
    assert "1 of 3 questions, with a response in [0.2, 0.3]" in tab.inner_text("#count")
    tab.locator('.bin[data-bin="2"][data-system="0"]').click()
    tab.select_option("#task", "local_number")
    assert tab.inner_text("#count") == "2 of 3 questions"
    tab.select_option("#task", "")
    tab.fill("#search", "LONG")
    tab.locator("#list li").first.click()
    tab.locator("#detail details summary").first.click()
    assert "[900,000 more characters]" in tab.locator("#detail details .text").first.inner_text()
    assert tab.title() == HOSTILE
    assert problems == []
