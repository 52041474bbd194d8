"""What scoring all steps of responses costs: one text a step, one row a response, or packed by question.

The three ways take turns in one process on one thread, and must give equal scores.
"""

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.study import Study
from shared.tables import table
from shared.timing import timed

from selfcal_lightning.cli import run
from selfcal_lightning.data.steps import token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.chat_format import load_tokenizer
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import QUANTILE_PRM, reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.model import load_reward_model
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.rewards.reading import RewardReader

SPLIT, STEPS = "test_id", "sentence"
APART, ROWS, PACKED = "one text a step", "one row a response", "packed by question"
TOLERANCE = 1e-5
Scores = list[float]


class Ways:
    def __init__(self, folder: Path, pool: Sequence[QuestionSamples]) -> None:
        self._format, self._tokenizer, self._pool = reward_format(QUANTILE_PRM), load_tokenizer(str(folder)), pool
        self._encoder = RewardEncoder(self._format, self._tokenizer)
        self._model = load_reward_model(folder, self._format, self._encoder.output_ids, dtype="float32")
        self.by_name: dict[str, Callable[[], Scores]] = {
            APART: self._apart, ROWS: lambda: self._read(forward_tokens=1), PACKED: lambda: self._read()
        }  # fmt: skip

    def _reader(self, **settings: int) -> RewardReader:
        return RewardReader(self._model, self._encoder, format=self._format, steps=STEPS, **settings)

    def _read(self, **settings: int) -> Scores:
        scores = self._reader(**settings).read(self._pool)
        return [score for question in scores for row in question for score in row or []]

    def _apart(self) -> Scores:
        return [
            self._reader().score_paths(entry.question, [sample.token_ids[:end]])[0].mean
            for entry in self._pool
            for sample in entry.samples
            for end in token_step_ends(self._tokenizer, sample.token_ids, STEPS)
        ]


@contextmanager
def tokens_read() -> Iterator[list[int]]:
    passes: list[int] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding):
            passes.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(note)
    try:
        yield passes
    finally:
        hook.remove()


def prepare(folder: Path, *, num_questions: int, num_samples: int) -> Ways:
    store = folder / "store"
    size = ["--limit", str(num_questions), "--num_samples", str(num_samples)]
    if run(["generate", "--model", "bundled", "--task", "word_problems", "--split", SPLIT, "--store_dir", str(store),
            *size]):  # fmt: skip
        raise SystemExit("Expected `selfcal generate` to succeed, but it failed.")
    module = QuantileRewardModule(resolve_model("bundled"), steps=STEPS)
    module.configure_model()
    nn.init.normal_(module.head.weight, generator=torch.Generator().manual_seed(0))
    (folder / "model").mkdir()
    module.save_export(folder / "model")
    return Ways(folder / "model", list(SampleStore(store).samples(split=SPLIT)))


def measure(ways: Ways, *, turns: int) -> tuple[list[dict[str, Any]], int]:
    costs, scores = [], {}
    for way, score in ways.by_name.items():
        with tokens_read() as passes:
            scores[way] = score()
        costs.append({"way": way, "passes": len(passes), "tokens": sum(passes), "processor_seconds": math.inf})
        apart = max(abs(a - b) for a, b in zip(scores[way], scores[APART], strict=True))
        if apart > TOLERANCE:
            raise SystemExit(f"Expected {way} to score as {APART} does, but got {apart:.2g} between them.")
    for _ in range(turns):
        for cost in costs:
            cost["processor_seconds"] = min(cost["processor_seconds"], timed(ways.by_name[cost["way"]])[1])
    return costs, len(scores[APART])


def as_markdown(report: Mapping[str, Any]) -> str:
    costs, rows = report["costs"], []
    for cost in costs:
        fewer, sooner = (costs[0][name] / cost[name] for name in ("tokens", "processor_seconds"))
        cells = [f"{cost['passes']:,}", f"{cost['tokens']:,}", f"{fewer:.1f} x", f"{cost['processor_seconds']:.2f}"]
        rows.append([cost["way"], *cells, f"{sooner:.1f} x"])
    heads = ["scores of all steps", "passes", "tokens", "less by", "CPU seconds", "less by"]
    head = (
        f"Command: `{report['command']}`. {report['size']}, {report['steps']:,} steps; the bundled trunk in float32 on "
        "one thread, CPU seconds of the best of several turns in one process, beside other work."
    )
    return "\n".join([head, "", *table(heads, rows)]) + "\n"


def assemble(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="reward-scoring-") as folder:
        ways = prepare(Path(folder), num_questions=options.questions, num_samples=options.samples)
        costs, num_steps = measure(ways, turns=options.turns)
    return {"size": f"{options.questions} questions x {options.samples} responses", "steps": num_steps, "costs": costs}


SIZES = {"questions": (50, "questions"), "samples": (8, "responses to each"), "turns": (3, "turns; the best counts")}

if __name__ == "__main__":
    study = Study("speed/reward_scoring.py", SIZES, None, assemble, as_markdown, layout={"indent": 1})
    raise SystemExit(study.main())
