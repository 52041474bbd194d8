"""The rooms of the house from the lowest floor to the highest; ``python tests/support/house.py`` writes what follows.

A module imports from its own room and from rooms that stand before it. The list of packages in ``pyproject.toml`` and
the table in ``docs/development/architecture.md`` are made of this and of the folders.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "selfcal_lightning"
# Folders that are installed under the package's name but lie beside it.
ADAPTERS = ("datamodules", "callbacks", "configs")
FLOORS: tuple[tuple[str, str], ...] = (
    ("faces errors", "what a package shows; errors of the user's"),
    (
        "runtime plugins identities records",
        "files, progress, signals, plans, late imports; plug-ins; frozen record types",
    ),
    ("model_files locations functional prompts", "files of models; pure maths; chats and the confidence query"),
    ("tasks store models metrics", "questions, reading and judging; samples on disk; networks; torchmetrics"),
    ("pools engines rewards", "recorded responses and their formats; who samples; reward models"),
    (
        "confidence judges capability training modules",
        "of a response, and of a question: estimators, what is fitted, scoring; models that judge; checkpoints, FSDP2; "
        "LightningModules",
    ),
    ("exports generation", "adapters and merged models on disk; filling the store"),
    (
        "strategies selection",
        "test-time strategies, their driver and their thresholds; training data chosen from responses, and its formats",
    ),
    ("evaluation serving", "comparisons, tables and figures; answering"),
    ("pipelines", "the verbs of the command line"),
    ("datamodules callbacks", "Lightning adapters, which meet at the store"),
    (
        "presets command_line cli front __main__",
        "settings behind a model and questions; the only place that parses arguments; the verbs from Python",
    ),
)
ORDER = [room for rooms, _ in FLOORS for room in rooms.split()]


def packages() -> list[str]:
    """Return every package of the project, as it is installed."""
    folders = [ROOT / PACKAGE, *(ROOT / name for name in ADAPTERS)]
    found = [init.parent.relative_to(ROOT) for folder in folders for init in folder.rglob("__init__.py")]
    return sorted(".".join(path.parts if path.parts[0] == PACKAGE else (PACKAGE, *path.parts)) for path in found)


def package_list() -> str:
    """Return the list for ``pyproject.toml``."""
    return "packages = [\n" + "".join(f'  "{name}",\n' for name in packages()) + "]\n"


def layers_table() -> str:
    """Return the table of floors for the documentation."""
    rows = [f"| {' '.join(f'`{room}`' for room in rooms.split())} | {what} |" for rooms, what in FLOORS]
    return "\n".join(["| rooms | what lives there |", "|---|---|", *rows]) + "\n"


def main() -> None:
    """Write both where they belong."""
    project = ROOT / "pyproject.toml"
    project.write_text(re.sub(r"packages = \[\n.*?\]\n", package_list(), project.read_text(), count=1, flags=re.S))
    page = ROOT / "docs" / "development" / "architecture.md"
    table = re.compile(r"\| rooms \| what lives there \|\n(\|.*\n)+")
    page.write_text(table.sub(layers_table(), page.read_text(), count=1))


if __name__ == "__main__":
    main()
