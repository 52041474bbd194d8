import re
import shlex
import sys
from pathlib import Path

import pytest
from support.command_lines import ON_CPU, given_to, instantiated
from support.house import ROOT
from support.processes import run_command, run_python
from support.store_samples import write_lines

from selfcal_lightning.cli import VERBS
from selfcal_lightning.commands.presets import as_arguments, common_case
from selfcal_lightning.data.tasks.registry import TASKS
from selfcal_lightning.models.chat_format import load_tokenizer

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = "\n".join(page.read_text() for page in PAGES)
PYTHON_BLOCKS = [  # tests/serving runs what asks a server, tests/adaptation what needs TRL
    block
    for block in dict.fromkeys(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    if "127.0.0.1:8000" not in block and "import GRPOTrainer" not in block
]

BASH = "\n".join(re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL))
COMMANDS = list(dict.fromkeys(line for line in BASH.splitlines() if line.startswith("selfcal ")))


def test_targets_files_links_and_verbs_exist() -> None:
    targets = set(re.findall(r"(?:`|^)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "setup-vllm", "report"} <= targets
    makefile = (ROOT / "Makefile").read_text()
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)} == set()
    files = set(re.findall(r"(?:configs|benchmarks|tests|scripts)/[\w./-]+\.(?:yaml|py|sh|sbatch|md|json)\b", README))
    assert len(files) >= 12
    assert {file for file in files if not (ROOT / file).is_file()} == set()
    text = PAGES[0].read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link}
    assert len(links) >= 15
    assert {link for link in links if not (ROOT / link).is_file()} == set()
    verbs = set(re.findall(r"selfcal ([a-z-]+)", BASH))
    assert verbs >= {"fit", "export", "evaluate"}
    assert verbs <= set(VERBS)


def test_tables_and_figures_are_those_of_the_results() -> None:
    run_command([sys.executable, str(ROOT / "docs" / "tables.py"), "--check"])
    report = (ROOT / "benchmarks" / "results" / "report_real.md").read_text()
    rows = [line for line in PAGES[0].read_text().splitlines() if re.match(r"\|.*\.\d{3}", line)]
    figures = {figure for row in rows for figure in re.findall(r"\.\d{3}", row)}
    assert len(figures) > 30
    assert {figure for figure in figures if f"0{figure}" not in report} == set()


@pytest.mark.parametrize("line", COMMANDS, ids=range(len(COMMANDS)))
def test_options_exist(line: str, tiny_model: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verb, *arguments = shlex.split(re.sub(r"(?<!\S)(configs|examples)/", rf"{ROOT}/\1/", line), comments=True)[1:]
    if verb == "fit" and "--questions" in arguments:
        write_user_files()
        prepared, overrides = common_case(arguments)
        arguments = [*as_arguments(prepared), *overrides]
    if VERBS[verb].module:
        assert given_to(verb, arguments)
    else:
        assert instantiated([verb, *arguments, *ON_CPU, "--model.init_args.base_model", tiny_model], monkeypatch).model


def write_user_files() -> None:
    """Write the files that the commands name as the user's own."""
    write_lines(Path("questions.jsonl"), *({"question": f"What is {n}+1?", "answer": n + 1} for n in range(12)))
    Path("problems.csv").write_text("problem,gold\n" + "".join(f"What is {n}+1?,{n + 1}\n" for n in range(12)))
    Path("prompt.yaml").write_text("system: Be brief.\n")


def test_every_task_is_listed_and_what_strategies_support() -> None:
    from selfcal_lightning.training.support import support_table

    assert {name for name in TASKS if f"`{name}`" not in (ROOT / "docs/reference/tasks.md").read_text()} == set()
    assert support_table() in README


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.splitlines()[0])
def test_python_runs(block: str, shared: Path, here: Path) -> None:
    (here / "gsm8k_test.jsonl").write_text((shared / "data" / "gsm8k" / "test.jsonl").read_text())
    write_user_files()
    (here / "mawps.jsonl").write_text('{"text": "Two and two?", "numeric_answer": 4}\n')
    run_python(block)


# ---- the examples, in a folder of their own; the one that needs a server talks to a stand-in

EXAMPLES = ROOT / "examples"
SAID = {
    "metrics_in_your_module.py": "val/AUROC",
    "your_responses.py": "ECE",
    "threshold_with_guarantee.py": "error rate",
    "your_strategy.py": "samples",
    "your_questions.py": "Written:",
}


def run(name: str, folder: Path, *arguments: str) -> str:
    return run_command([sys.executable, str(EXAMPLES / name), *arguments], cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    assert SAID[name] in run(name, tmp_path)


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "tutorial.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    said = "".join(output.get("text", "") for output in notebook.cells[-2]["outputs"])
    assert said.count("right:") == 10


@pytest.mark.slow
def test_the_example_of_a_server_runs(tmp_path: Path, tiny_model: str) -> None:
    pytest.importorskip("aiohttp")
    from support.openai_models import RealModel
    from support.openai_server import FakeServer

    server = FakeServer(RealModel(tiny_model), load_tokenizer(tiny_model))
    try:
        assert run("server.py", tmp_path, server.base_url, tiny_model).strip()
    finally:
        server.close()
