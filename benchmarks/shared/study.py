"""What the reports and studies share: options, where runs lie, configurations, and what is written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from shared.tables import write_report

from selfcal_lightning.models.folders import config_path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
COLLECT = "--collect"
TASK = "word_problems"
# Questions that the bundled model answers for a report, by the name of the part and its split.
SPLITS = {"id": "test_id", "ood": "test_ood", "calibration": "calibration"}
TESTS = ("id", "ood")
# How the bundled model answers them.
SAMPLED = ("--sampling.max_new_tokens", "120", "--engine.max_batch", "512")
Sizes = Mapping[str, tuple[Any, str]]  # default and help of an option, by name


class Study(argparse.Namespace):
    """The options of a report; a subclass adds where its parts lie."""

    output: Path
    results: Path
    seeds: list[int]

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in SPLITS}

    def folder(self, seed: int) -> Path:
        return self.output / f"seed-{seed}"

    def sizes(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}

    def changed(self, usual: Sizes) -> list[str]:
        """Return the sizes that are not the usual ones, as they are typed."""
        return [f"--{name} {getattr(self, name)}" for name, (value, _) in usual.items() if getattr(self, name) != value]

    def publish(
        self, name: str, report: Mapping[str, Any], text: str, *, picture: Figure | None = None, **settings: Any
    ) -> None:
        write_report(self.results, name, report, text, picture=picture, **settings)


def study_parser(doc: str | None, output: str, sizes: Sizes) -> argparse.ArgumentParser:
    parser = sizes_parser(doc, sizes)
    parser.add_argument("--output", type=Path, default=Path(output), help="where samples, models and logs go")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser


def sizes_parser(doc: str | None, sizes: Sizes) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    return parser


def command_line(script: str, *, alone: str | None = None) -> str:
    """Return the command that makes a report: ``alone`` where nothing but collecting was asked for."""
    given = [argument for argument in sys.argv[1:] if argument != COLLECT]
    return alone if alone and not given else " ".join([f"python benchmarks/{script}", *given])


def configuration(
    source: str | Path, *, seed: int, folder: Path, adapter: Path, keep: Collection[str] | None = None
) -> dict[str, Any]:
    """Return a shipped configuration with a seed and places of its own, and the callbacks named in ``keep``."""
    path = source if isinstance(source, Path) else Path(config_path(source))
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    trainer = config["trainer"]
    config["seed_everything"] = seed
    trainer["enable_progress_bar"] = False
    trainer["logger"]["init_args"]["save_dir"] = str(folder)
    by_name = {entry["class_path"].rsplit(".", 1)[-1]: entry for entry in trainer["callbacks"]}
    by_name["AdapterExport"]["init_args"]["output_dir"] = str(adapter)
    if "SSCGeneration" in by_name:
        by_name["SSCGeneration"]["init_args"]["seed"] = seed
    trainer["callbacks"] = [entry for name, entry in by_name.items() if keep is None or name in keep]
    config["model"]["init_args"]["seed"] = config["data"]["init_args"]["seed"] = seed
    return config


def train_on(config: dict[str, Any], store: Path, *, limit: int, task: str = TASK) -> dict[str, Any]:
    """Let a configuration train on questions of a store, and return its settings of data."""
    data: dict[str, Any] = config["data"]["init_args"]
    data |= {"store_dir": str(store), "train": [{"task": task, "split": "train", "limit": limit}]}
    return data


def write_configuration(path: Path, config: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(config), sort_keys=False))
    return path
