import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from support.house import ROOT
from support.store_samples import select, sums_store

from selfcal_lightning.adaptation import reward_file, rl_export
from selfcal_lightning.adaptation.reward_file import reward_source
from selfcal_lightning.adaptation.rl_export import training_rows
from selfcal_lightning.adaptation.selection_files import Selection, examples, read_selection
from selfcal_lightning.cli import run
from selfcal_lightning.commands.selection import run_export_rl, run_extract_steps
from selfcal_lightning.core import plugins
from selfcal_lightning.core.files import write_atomically
from selfcal_lightning.data.tasks.registry import get_task

GOLDEN = ROOT / "tests" / "data" / "rl_columns.json"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Selection:
    folder = tmp_path_factory.mktemp("export")
    selection = select(sums_store(folder / "store").path, folder / "chosen", threshold=0.5)
    run_extract_steps(str(selection.path))
    return selection


def load(path: Path) -> SimpleNamespace:
    """Run a file by its path, as a trainer does."""
    return SimpleNamespace(**runpy.run_path(str(path)))


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The reward file of one task of each type of answers, and of the bundled one."""
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    names = ("local_number", "math500", "commonsense_qa", "winogrande", "local_text", "word_problems")
    file.write_text(reward_source(get_task(name) for name in names))
    return load(file)


@pytest.mark.parametrize(
    ("format", "file"),
    [("verl", "train.parquet"), ("verl", "sft.parquet"), ("trl", "train.parquet"), ("openrlhf", "train.jsonl")],
)
def test_columns_are_those_that_the_trainers_read(made: Selection, tmp_path: Path, format: Any, file: str) -> None:
    export = run_export_rl(str(made.path), str(tmp_path / "out"), format)
    path = export.path / file
    if file.endswith("jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        columns = {name: type(value).__name__ for name, value in rows[0].items()}
        columns["label fields"] = sorted(json.loads(rows[0]["label"]))
    else:
        table = pq.read_table(path)
        rows = table.to_pylist()
        columns = {field.name: str(field.type) for field in table.schema}
    assert columns == json.loads(GOLDEN.read_text())[f"{format}/{file}"]
    assert len(rows) == len(made.kept)


def test_a_row_of_verl_says_what_is_known(made: Selection, tmp_path: Path) -> None:
    export = run_export_rl(str(made.path), str(tmp_path / "out"), "verl")
    row = pq.read_table(export.path / "train.parquet").to_pylist()[1]
    assert row["data_source"] == "selfcal/local_number"
    assert row["ability"] == "math"
    assert row["prompt"][1] == {"role": "user", "content": "What is 3+7?"}, "never a rendered text"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "10"}
    info = row["extra_info"]
    named = ("index", "question_id", "label_kind", "label_share")
    assert [info[name] for name in named] == [1, "q003", "majority", 0.75]
    assert (info["num_samples"], info["num_unreadable"]) == (4, 1)
    assert info["response"] == "3+7=10. So the answer is 10."
    assert info["key_steps"] == [["3+7=10"]]
    assert info["scores"] == {"mean_logprob": pytest.approx(-0.08)}
    assert info["selection_sha256"] == made.sha256
    supervised = pq.read_table(export.path / "sft.parquet").to_pylist()[1]["messages"]
    assert supervised[-1] == {"role": "assistant", "content": "3+7=10. So the answer is 10."}


def test_the_manifest_says_whose_labels_these_are(made: Selection, tmp_path: Path) -> None:
    manifest = run_export_rl(str(made.path), str(tmp_path / "a"), "trl").manifest
    assert manifest == json.loads((tmp_path / "a" / "export.json").read_text())
    assert (manifest["label_kind"], manifest["reads_reference"]) == ("majority", False)
    assert manifest["counts"] == {"rows": len(made.kept), "without_label": 0, "without_key_steps": 0}
    assert set(manifest["files"]) == {"train.parquet", "reward.py"}
    assert load(tmp_path / "a" / "reward.py").judge("selfcal/local_number", "Answer: 7", "7.0") == 1.0
    bare = run_export_rl(str(made.path), str(tmp_path / "b"), "verl", label="none").manifest
    assert bare["counts"]["without_label"] == len(made.kept)
    rewards = pq.read_table(tmp_path / "b" / "train.parquet")["reward_model"].to_pylist()
    assert {row["ground_truth"] for row in rewards} == {""}, "verl reads the field of every row"
    picked = run_export_rl(str(made.path), str(tmp_path / "c"), "trl", label="picked", reward_file=False)
    answers = pq.read_table(picked.path / "train.parquet")["answer"].to_pylist()
    assert answers == [row.answer for row in made.kept]
    assert not (picked.path / "reward.py").exists()


def test_the_reference_system_s_rows(made: Selection, tmp_path: Path) -> None:
    run_export_rl(str(made.path), str(tmp_path / "out"), "verl")  # an earlier export, of which nothing stays
    run_export_rl(str(made.path), str(tmp_path / "out"), "reference")
    rows = json.loads((tmp_path / "out" / "selected.json").read_text())
    assert list(rows[1]) == ["question", "answer", "gpt_response"]
    assert json.loads(rows[1]["gpt_response"]) == {"key_steps": [["3+7=10"]]}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["export.json", "selected.json"]


# Responses and labels of every type, right and wrong, readable and not.
CASES = {
    "local_number": (["Answer: $1,234.50", r"\boxed{1/2}", "so 7", "none", "#### 24", "Answer: twelve", "15.00"],
                     ["1234.5", "0.5", "7", "24", "12", "4", "5"]),
    "math500": ([r"\boxed{\dfrac12}", r"\boxed{x+1}", r"\boxed{50\%}", r"\boxed{(1,2)}", "Answer: 12 cm", "?",
                 r"\boxed{\sqrt{8}}"], [r"\frac{1}{2}", "1+x", "50", "(1,2)", "12", r"2\sqrt{2}"]),
    "commonsense_qa": (["Answer: (B)", r"\boxed{\text{c}}", "Answer: Based on", "I take A."], ["A", "B", "C"]),
    "winogrande": (["Answer: 2", "Answer: (A)"], ["A", "B"]),
    "local_text": (["Answer: The **Beatles**.", "Answer: Fab four", " "], ['["beatles", "fab four"]', "paris"]),
    "word_problems": (["First 4*3=12. The answer is 1,204.0.", "I am not sure.", "So 5"], ["1204", "5", "12"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_reward_file_agrees_with_the_task(reward: SimpleNamespace, name: str) -> None:
    task, (responses, labels) = get_task(name), CASES[name]
    seen = set()
    for response in responses:
        for label in labels:
            expected = task.verify(task.extract(response), label)
            found = reward.judge(f"selfcal/{name}", response, label)
            assert found == float(expected), (response, label)
            seen.add(expected)
    assert seen == {True, False}


def test_recorded_responses_get_the_reward_that_they_were_judged_by(shared: Path, reward: SimpleNamespace) -> None:
    judged = 0
    task = get_task("word_problems")
    for line in (shared / "data" / "trial_responses.jsonl").read_text().splitlines():
        entry = json.loads(line)
        for response in entry["responses"]:
            expected = task.verify(task.extract(response["text"]), str(entry["gold"]))
            assert reward.judge("selfcal/word_problems", response["text"], str(entry["gold"])) == float(expected)
            judged += 1
    assert judged == 7200


def test_each_trainer_calls_it_in_its_own_way(reward: SimpleNamespace) -> None:
    torch = pytest.importorskip("torch")
    source, right, wrong = "selfcal/local_number", "The answer is 7.", "The answer is 8."
    scored = reward.compute_score(source, right, "7", {"index": 0}, reward_router=None)
    assert scored == {"score": 1.0, "has_label": 1.0}
    assert reward.compute_score(source, wrong, "7")["score"] == 0.0
    assert reward.compute_score(source, wrong, "")["has_label"] == 0.0
    chats = [[{"role": "assistant", "content": right}], [{"role": "assistant", "content": wrong}], right]
    columns = {"answer": ["7", "7", None], "data_source": [source] * 3, "key_steps": [[]] * 3, "trainer_state": None}
    assert reward.correct_reward([None] * 3, chats, **columns) == [1.0, 0.0, None]
    label = json.dumps({"data_source": source, "answer": "7"})
    found = reward.reward_func(["P? " + right, "P? " + wrong], ["P? "] * 2, [label] * 2, extra=1)
    assert torch.equal(found["rewards"], torch.tensor([1.0, 0.0]))
    said, label = "P? The answer is Paris.", json.dumps({"data_source": "selfcal/local_text", "answer": "Paris"})
    ends = ("<|im_end|>", "<|im_end|>\n<|endoftext|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<end_of_turn>\n")
    queries = [said + end for end in ends]
    assert reward.reward_func(queries, ["P? "] * 6, [label] * 6)["rewards"].tolist() == [1.0] * 6
    assert set(found) == {"rewards", "scores", "extra_logs"}
    with pytest.raises(ValueError, match=r"data_source.*'gsm8k'"):
        reward.judge("gsm8k", "Answer: 7", "7")


def test_the_file_loads_the_plugins_of_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plugin.py").write_text("import sys\nsys.path.append('seen by my_plugin')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(plugins.VARIABLE, "[]")
    monkeypatch.setattr(plugins, "_loaded", {})
    plugins.load_plugins(["my_plugin.py"])
    (tmp_path / "reward.py").write_text(reward_source([get_task("local_number")]))
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.delitem(sys.modules, "my_plugin")
    sys.path.remove("seen by my_plugin")
    monkeypatch.chdir("/")
    points: list[bool] = []
    monkeypatch.setattr(reward_file, "load_installed_plugins", lambda: points.append(True))
    assert load(tmp_path / "reward.py").judge("selfcal/local_number", "Answer: 7", "7") == 1.0
    assert "seen by my_plugin" in sys.path
    assert points == [True]
    monkeypatch.delitem(sys.modules, "my_plugin")


def test_a_cut_export_is_made_again(made: Selection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        if path.name == "sft.parquet":
            raise OSError("no space")
        write_atomically(path, data)

    (tmp_path / ".export.json.1-abcd.tmp").write_text("{")
    run_export_rl(str(made.path), str(tmp_path), "openrlhf")
    monkeypatch.setattr(rl_export.files, "write_atomically", full)
    with pytest.raises(OSError, match="no space"):
        run_export_rl(str(made.path), str(tmp_path), "verl")
    monkeypatch.undo()
    assert set(run_export_rl(str(made.path), str(tmp_path), "trl").manifest["files"]) == {"train.parquet", "reward.py"}
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"export.json", "train.parquet", "reward.py", ".export.json.1-abcd.tmp"}


def test_what_cannot_be_exported_is_refused(made: Selection, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for output, label, message in (
        (tmp_path / "out", "reference", "run `selfcal select --label reference --references true`"),
        (made.path / "out", None, "to lie apart from the selection"),
        (tmp_path, None, "is left as it is"),
    ):
        with pytest.raises(ValueError, match=message):
            run_export_rl(str(made.path), str(output), "trl", label=label)
    one = next(examples(made))
    with pytest.raises(ValueError, match="but got a rendered prompt"):
        training_rows([replace(one, question=replace(one.question, messages=()))], None)


def test_a_selection_with_gold_labels_says_so(made: Selection, tmp_path: Path, capsys: Any) -> None:
    store = Path(made.manifest["store"]["path"])
    gold = select(store, tmp_path / "gold", threshold=0.5, references=True, label="reference")
    arguments = ["export-rl", "--selection", str(gold.path), "--output", str(tmp_path / "out"), "--format", "trl"]
    assert run([*arguments, "--label", "reference"]) == 0
    assert "labels: reference, gold answers were read" in capsys.readouterr().out
    assert read_selection(gold.path).reads_reference
