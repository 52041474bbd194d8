"""What scoring all steps of responses costs: one text a step, one row a response, or packed by question.

The three ways take turns in one process on one thread, and must give equal scores.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared.study import RESULTS
from shared.tables import table, write_report
from shared.timing import timed

from selfcal_lightning.cli import run
from selfcal_lightning.data.steps import token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.chat_format import load_tokenizer
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.model import load_reward_model
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.rewards.reading import RewardReader, read_reward_file

SPLIT, STEPS = "test_id", "sentence"
APART, ROWS, PACKED = "one text a step", "one row a response", "packed by question"
TOLERANCE = 1e-5
Scores = list[float]


@dataclass(frozen=True)
class Cost:
    way: str
    passes: int
    tokens: int
    processor_seconds: float


class Ways:
    def __init__(self, folder: Path, pool: Sequence[QuestionSamples]) -> None:
        stated = read_reward_file(folder)
        if stated is None:
            raise SystemExit(f"Expected {folder} to say of which format it is, but it does not.")
        self._format, self._tokenizer, self._pool = reward_format(stated.format), load_tokenizer(str(folder)), pool
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
        found: Scores = []
        for entry in self._pool:
            for sample in entry.samples:
                ids = sample.token_ids or ()
                for end in token_step_ends(self._tokenizer, ids, STEPS):
                    (score,) = self._reader().score_paths(entry.question, [ids[:end]])
                    found.append(score.mean)
        return found


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


def measure(ways: Ways, *, turns: int) -> tuple[list[Cost], int]:
    counted: dict[str, tuple[int, int]] = {}
    scores: dict[str, Scores] = {}
    for way, score in ways.by_name.items():
        with tokens_read() as passes:
            scores[way] = score()
        counted[way] = len(passes), sum(passes)
        apart = max(abs(a - b) for a, b in zip(scores[way], scores[APART], strict=True))
        if apart > TOLERANCE:
            raise SystemExit(f"Expected {way} to score as {APART} does, but got {apart:.2g} between them.")
    seconds: dict[str, list[float]] = {way: [] for way in counted}
    for _ in range(turns):
        for way, score in ways.by_name.items():
            seconds[way].append(timed(score)[1])
    return [Cost(way, *counted[way], min(seconds[way])) for way in counted], len(scores[APART])


def report(costs: Sequence[Cost], *, num_steps: int, size: str, command: str) -> str:
    first = costs[0]
    lines = [
        f"Command: `{command}`. {size}, {num_steps:,} steps; the bundled trunk in float32 on one thread, CPU seconds "
        "of the best of several turns in one process, beside other work.",
        "",
    ]
    rows = []
    for cost in costs:
        fewer, sooner = first.tokens / cost.tokens, first.processor_seconds / cost.processor_seconds
        cells = [f"{cost.passes:,}", f"{cost.tokens:,}", f"{fewer:.1f} x", f"{cost.processor_seconds:.2f}"]
        rows.append([cost.way, *cells, f"{sooner:.1f} x"])
    heads = ["scores of all steps", "passes", "tokens", "less by", "CPU seconds", "less by"]
    return "\n".join([*lines, *table(heads, rows)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="reward-scoring-") as folder:
        ways = prepare(Path(folder), num_questions=options.questions, num_samples=options.samples)
        costs, num_steps = measure(ways, turns=options.turns)
    given = " ".join(["python benchmarks/speed/reward_scoring.py", *(sys.argv[1:] if arguments is None else arguments)])
    size = f"{options.questions} questions x {options.samples} responses"
    text = report(costs, num_steps=num_steps, size=size, command=given)
    content = {"command": given, "size": size, "steps": num_steps, "costs": [asdict(cost) for cost in costs]}
    write_report(options.output, "reward_scoring", content, text, indent=1)


if __name__ == "__main__":
    main()
