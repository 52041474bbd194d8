"""What the reports share: `Study` (jobs, tables, criteria, figure), options and configurations."""

import argparse
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure
from shared.tables import write_report

from selfcal_lightning.evaluation.figures import save_figure
from selfcal_lightning.models.folders import config_path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
TASK = "word_problems"
# Questions that the bundled model answers for a report, by the name of the part and its split.
SPLITS = {"id": "test_id", "ood": "test_ood", "calibration": "calibration"}
TITLES = {"id": "in domain", "ood": "out of domain"}
TESTS = tuple(TITLES)
# How the bundled model answers them.
SAMPLED = ("--sampling.max_new_tokens", "120", "--engine.max_batch", "512")
Sizes = Mapping[str, tuple[Any, str]]  # default and help of an option, by name


class Options(argparse.Namespace):
    """What a report was asked for, and where its parts lie."""

    output: Path
    results: Path
    seeds: list[int]
    command: str
    started: float

    @property
    def parts(self) -> dict[str, int]:
        return self.sizes(*SPLITS)

    @property
    def minutes(self) -> float:
        return round((time.monotonic() - self.started) / 60, 1)

    def folder(self, seed: int) -> Path:
        return self.output / f"seed-{seed}"

    def sizes(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Study:
    """One report: jobs, tables, criteria and figure. Its results have the name of its script.

    ``jobs`` runs what is not done yet, unless the option ``collect`` is given; a study without jobs keeps nothing, has
    no seeds and measures at once. ``complete`` checks the options and fills in what follows from them. ``alone`` is the
    make target that takes all defaults, ``quick`` what only shows whether it runs, ``met`` what sets the exit status.
    """

    script: str
    sizes: Sizes
    jobs: Callable[[Any], None] | None
    tables: Callable[[Any], dict[str, Any]]
    markdown: Callable[[Any], str]
    figure: Callable[[Any], Figure] | None = None
    _: KW_ONLY
    arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None
    quick: Mapping[str, Any] | None = None
    complete: Callable[[argparse.ArgumentParser, Any], None] = lambda parser, options: None
    options: type[Options] = Options
    collect: str = "--collect"
    alone: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    image: str | None = None
    met: Callable[[Any, dict[str, Any]], bool] = lambda options, report: (
        not any(row["met"] is False for row in report.get("criteria", ()))
    )

    @property
    def name(self) -> str:
        return Path(self.script).stem

    def main(self) -> int:
        options = self.parse()
        made_with = options.sizes(*(name for name in self.sizes if name not in ("seeds", "workers", "threads")))
        file = options.output / "sizes.yaml" if self.jobs and made_with else None
        if file and (file.exists() or not options.only_collect):  # sizes stand above figures of these alone
            write_configuration(file, made_with)
        if self.jobs and not options.only_collect:
            self.jobs(options)
        report = self.tables(options) | {"command": options.command}
        self.publish(options, report)
        return 0 if self.met(options, report) else 1

    def parse(self) -> Any:
        doc = sys.modules[self.markdown.__module__].__doc__
        parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, (default, text) in self.sizes.items():
            parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
        parser.add_argument("--results", type=Path, default=RESULTS, help="where the figures go")
        if self.jobs:
            runs = Path("runs") / (self.name.replace("_", "-") if self.name.startswith("report") else self.name)
            parser.add_argument("--output", "--folder", type=Path, default=runs, help="samples, models and logs")
            parser.add_argument(self.collect, dest="only_collect", action="store_true", help="run no job")
            if "seeds" not in self.sizes:
                parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        self.arguments(parser)
        if self.quick:
            parser.add_argument("--quick", action="store_true", help=f"tiny sizes: whether it runs: {self.quick}")
            if "--quick" in sys.argv[1:]:
                parser.set_defaults(**self.quick)
        options = parser.parse_args(namespace=self.options(started=time.monotonic()))
        options.command = self.command()
        self.complete(parser, options)
        return options

    def command(self) -> str:
        """Return the command that makes the report: what was typed, without places."""
        places = rf"--(output|folder|results|converted)[ =]\S+|{self.collect}(?!\S)"
        given = re.sub(places, "", " ".join(sys.argv[1:])).split()
        return self.alone if self.alone and not given else " ".join([f"python benchmarks/{self.script}", *given])

    def publish(self, options: Options, report: Mapping[str, Any]) -> None:
        picture = self.figure(report) if self.figure else None
        text = self.markdown(report)
        write_report(options.results, self.name, report, text, picture=picture, **self.layout)
        print(f"Written to {options.results}: {self.name}.md and .json.")
        if self.image and picture is not None and options.results == RESULTS:
            save_figure(picture, IMAGES / self.image, dpi=self.layout.get("dpi", 120))


def configuration(
    source: str | Path, *, seed: int, folder: Path, adapter: Path, keep: Collection[str] | None = None
) -> dict[str, Any]:
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
    data: dict[str, Any] = config["data"]["init_args"]
    data |= {"store_dir": str(store), "train": [{"task": task, "split": "train", "limit": limit}]}
    return data


def write_configuration(path: Path, config: Mapping[str, Any]) -> Path:
    """Write what a job is made with, or stop where what lies there was made with something else."""
    text = yaml.safe_dump(dict(config), sort_keys=False)
    if path.exists() and path.read_text() != text:
        raise SystemExit(f"{path} says that {path.parent} was made with other settings. Name a new --output.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
