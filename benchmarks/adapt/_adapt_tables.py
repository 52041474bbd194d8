"""The report on test-time training as Markdown, and what its figures are held to."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from shared.tables import table

from selfcal_lightning.adaptation import runs as fitting
from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.adaptation.runs import QuestionSlice
from selfcal_lightning.commands.two_stages import write_settings
from selfcal_lightning.core.errors import RunError
from selfcal_lightning.core.files import json_object_or_none
from selfcal_lightning.core.processes import run_step
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.adaptation import RolloutDataModule
from selfcal_lightning.datamodules.ssc.sampler import Packing as Way
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget
from selfcal_lightning.models.folders import read_manifest
from selfcal_lightning.models.lora import LoraSettings, read_adapter_state
from selfcal_lightning.training.rounds import adapter_folder

# The reward, and what P(True) learns meanwhile.
METHODS: dict[str, tuple[GroupReward, PoolTarget | None]] = {
    "TTRL": ("majority", None),
    "calibrated, anchor": ("majority", "anchor"),
    "calibrated, round": ("majority", "round"),
    "equations": ("equations", None),
}
PLAIN, ANCHOR, ROUND, EQUATIONS = METHODS
ADAPTER: dict[str, Any] = {
    "r": 16, "alpha": 32, "dropout": 0.0, "activated": False,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


def targets(
    tables: Mapping[str, Any],
    rounds_gain: Mapping[str, float | None] | None,
    packing: Packing | None,
    guarded: Guarded | None,
) -> list[dict[str, str]]:
    trans, ind = tables["transductive"], tables["inductive"]
    ece = ind["changes"]["anchor less TTRL"]["ece"]
    both = {name: found["changes"]["anchor less start"] for name, found in (("trans", trans), ("ind", ind))}
    after = {name: found["levels"][ANCHOR]["ece"] for name, found in (("trans", trans), ("ind", ind))}
    rows: list[tuple[str, str, bool | None]] = [
        ("anchor less TTRL, inductive ECE: upper bound < -.03", _cell(ece), ece["high"] < -0.03),
        (
            "anchor, ECE after <= .12 and upper bound of its change < +.03, transductive and inductive",
            "; ".join(f"{after[name]:.3f}, {_cell(row['ece'])}" for name, row in both.items()),
            all(row["ece"]["high"] < 0.03 and after[name] <= 0.12 for name, row in both.items()),
        ),
        (
            "anchor, inductive pass@1: lower bound of its change > -.02",
            _cell(both["ind"]["pass@1"]),
            both["ind"]["pass@1"]["low"] > -0.02,
        ),
        (
            "anchor, pass@k: lower bounds of its change > -.10, transductive and inductive",
            "; ".join(_cell(row["pass@k"]) for row in both.values()),
            all(row["pass@k"]["low"] > -0.10 for row in both.values()),
        ),
        (
            "equations: pass@1, lower bounds > 0 transductive and > -.02 inductive",
            *_equations_target(*(found["changes"].get("equations less start") for found in (trans, ind))),
        ),
        (
            "TTRL: pass@1 at temperature 1 rises from the first round to the last, lower bound > 0",
            *_rounds_target(rounds_gain),
        ),
        (
            "a group packed against rows of their own: >= 1.4 x the responses a CPU second, forward and backward",
            *_packing_target(packing),
        ),
        (
            f"the guard stops a run at a rate of {WRECKING_RATE:g} within {MOST_ROUNDS} rounds, and restores",
            *_guard_target(guarded),
        ),
        ("selection, key steps and exports", "the report on selection", None),
    ]
    words = {True: "met", False: "missed", None: "not measured here"}
    return [{"target": name, "found": found, "verdict": words[met]} for name, found, met in rows]


def _equations_target(trans: Mapping[str, Any] | None, ind: Mapping[str, Any] | None) -> tuple[str, bool | None]:
    if trans is None or ind is None:
        return "-", None
    first, second = trans["pass@1"], ind["pass@1"]
    return f"{_cell(first)}; {_cell(second)}", first["low"] > 0.0 and second["low"] > -0.02


def _rounds_target(gain: Mapping[str, float | None] | None) -> tuple[str, bool | None]:
    if gain is None or gain["low"] is None:
        return "one round has no change", None
    return _cell(gain), gain["low"] > 0.0


def _guard_target(guarded: Guarded | None) -> tuple[str, bool | None]:
    if guarded is None:
        return "-", None
    if guarded.rounds is None:
        return "it was not stopped", False
    left = "the last good adapter was left" if guarded.is_restored else "another adapter was left"
    return f"before round {guarded.rounds}: {'; '.join(guarded.problems)}; {left}", guarded.is_restored


def _packing_target(packing: Packing | None) -> tuple[str, bool | None]:
    if packing is None:
        return "-", None
    tokens = f"{packing.packed_tokens:.0f} and {packing.apart_tokens:.0f} tokens a response (equal gradients: a test)"
    return f"{packing.speed_up:.2f} x; {tokens}", packing.speed_up >= 1.4


def markdown(content: Mapping[str, Any]) -> str:
    sizes = content["sizes"]
    over = "questions and seeds" if sizes["seeds_done"] > 1 else "questions"
    updates = -(-sizes["questions"] * sizes["samples"] // sizes["batch_size"]) * sizes["rounds"]
    lines = [
        f"Command: `{content['command']}`.",
        "",
        f"Sizes: {sizes['seeds_done']} seed(s); start calibrated on {sizes['start_questions']} questions x "
        f"{sizes['samples']}; adapted on {sizes['questions']} x {sizes['samples']}, {sizes['rounds']} rounds, "
        f"{updates} updates of {sizes['batch_size']} responses, LoRA of rank 16, peak learning rate {sizes['lr']:g}; "
        f"{sizes['questions']} other and {sizes['out_of_domain']} out-of-domain questions x {sizes['samples']} at the "
        f"usual sampling (EDT .8). Intervals: 95 %, paired, over {over}; those that exclude 0 in bold.",
        "",
    ]
    columns = ("pass@1", "greedy", "majority", "pass@k", "distinct", "tokens", "ece", "brier", "auroc")
    rows = [
        [name, label, *(f"{row[column]:.3f}" for column in columns)]
        for name, found in content["sets"].items()
        for label, row in found["levels"].items()
    ]
    lines += [*_table(["questions", "model", *columns], rows), "", *_untrained(content["start"]), ""]
    columns = ("pass@1", "greedy", "majority", "pass@k", "ece", "brier", "auroc")
    rows = [
        [name, label, *(_cell(row[column]) for column in columns)]
        for name, found in content["sets"].items()
        for label, row in found["changes"].items()
    ]
    lines += [*_table(["questions", "change", *columns], rows), "", *_verdicts(content["sets"])]
    if content["not_measured"]:
        lines += ["", f"Not measured at this size: {', '.join(content['not_measured'])}."]
    rows = [[row["target"], row["found"], row["verdict"]] for row in content["targets"]]
    lines += ["", "| target | found | |", *_table(["", "", ""], rows)[1:], ""]
    heads = ("run", "round", "pass@1 at T = 1", "label accuracy", "reward accuracy", "agreement", "votes", "lost log p")
    keys = ("pass@1", "label_accuracy", "reward_accuracy", "agreement", "vote_share", "logprob_fall")
    rows = [
        [run, number, *("-" if row.get(key) is None else f"{row[key]:.3f}" for key in keys)]
        for run, result in content["runs"].items()
        for number, row in result["rounds"].items()
    ]
    return "\n".join([*lines, *_table(heads, rows), ""])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return table(heads, rows, left=len(heads))


def _cell(found: Mapping[str, float | None]) -> str:
    value, low, high = found["change"], found["low"], found["high"]
    if value is None or low is None or high is None:
        return "-"
    text = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _untrained(start: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    columns = ("pass@1", "majority", "pass@k", "distinct")
    cells = [
        [name, way.replace("base", "start", 1), *("-" if one not in row else f"{row[one]:.3f}" for one in columns),
         f"{row['samples']:.0f}"]
        for name, rows in start.items()
        for way, row in rows.items()
    ]  # fmt: skip
    return _table(["questions", "without training", *columns, "samples"], cells)


def _verdicts(sets: Mapping[str, Any]) -> list[str]:
    methods = next(iter(sets.values()))["verdicts"]
    rows = [[one, *(found["verdicts"][one] for found in sets.values())] for one in methods]
    return _table(["what pass@1 comes to", *sets], rows)


# Of an adapter; weights all of which were tuned collapsed at 1e-3.
WRECKING_RATE, MOST_ROUNDS = 3e-2, 3


@dataclass(frozen=True)
class Guarded:
    rounds: int | None
    problems: tuple[str, ...]
    is_restored: bool


def run_guarded(folder: Path, start: Path, samples: Path, *, questions: QuestionSlice, sizes: dict[str, Any]) -> None:
    if read_manifest(folder / fitting.ADAPTER) is not None:
        return
    if not (folder / fitting.SAMPLES).exists():
        shutil.copytree(samples, folder / fitting.SAMPLES)
    reward, target = METHODS[PLAIN]
    one = fitting.Adaptation(
        str(start), None, questions, reward, target, None, None, rounds=MOST_ROUNDS, lr=WRECKING_RATE, **sizes
    )
    options = {"model": {"lora": ADAPTER}, "data": {"max_length": 320}, "trainer": {"accelerator": "cpu"}}
    settings = fitting.fit_settings(one, folder, engine=EngineSettings(max_batch=512), guard={}, options=options)
    write_settings(folder / "config.yaml", settings)
    if status := run_step(["fit", "--config", str(folder / "config.yaml"), "--ckpt_path", "last"]):
        raise RunError(f"Expected the run under the guard to end by itself, but it ended with status {status}.")


def read_guarded(folder: Path) -> Guarded | None:
    if read_manifest(folder / fitting.ADAPTER) is None:
        return None
    seen = json.loads((folder / fitting.GUARD_FILE).read_text())
    stops = sorted(int(number) for number, row in seen.items() if row["problems"])
    if not stops:
        return Guarded(None, (), is_restored=False)
    left, round = read_adapter_state(folder / fitting.ADAPTER), stops[0] - 1
    if round == 0:
        is_restored = not any(value.any() for name, value in left.items() if "lora_B" in name)
    else:
        good = read_adapter_state(adapter_folder(str(folder / fitting.SAMPLES), round))
        is_restored = all(value.equal(good[name]) for name, value in left.items())
    return Guarded(stops[0], tuple(seen[str(stops[0])]["problems"]), is_restored)


FILE, GROUPS, REPEATS = "packing.json", 5, 3


@dataclass(frozen=True)
class Packing:
    packed_tokens: float
    apart_tokens: float
    packed_seconds: float
    apart_seconds: float

    @property
    def speed_up(self) -> float:
        return self.apart_seconds / self.packed_seconds


class Clock(Callback):
    """Counts positions, rows and CPU seconds of forward and backward passes.

    Rows that fill up a micro-batch and teach nothing are counted as they are computed: they are no part of the cost of
    a response.
    """

    def __init__(self) -> None:
        self.positions = self.responses = 0
        self.seconds = self._started = 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.positions += batch.input_ids.numel()
        self.responses += len(batch.target)
        self._started = time.process_time()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.process_time() - self._started


def measure_packing(folder: Path, model: Path, store: Path, samples: int) -> None:
    if (folder / FILE).exists():
        return
    clocks: dict[Way, list[Clock]] = {"shared_prefix": [], "off": []}
    for _ in range(REPEATS):
        for way, found in clocks.items():
            found.append(_pass(str(model), str(store), samples, way))
    tokens = {way: found[0].positions / found[0].responses for way, found in clocks.items()}
    seconds = {way: min(clock.seconds / clock.responses for clock in found) for way, found in clocks.items()}
    figures = Packing(tokens["shared_prefix"], tokens["off"], seconds["shared_prefix"], seconds["off"])
    (folder / FILE).write_text(json.dumps(asdict(figures)))


def read_packing(folder: Path) -> Packing | None:
    path = folder / FILE
    found = json_object_or_none(path) if path.is_file() else None
    return None if found is None else Packing(**found)


def _pass(model: str, store: str, samples: int, packing: Way) -> Clock:
    clock, reward = Clock(), METHODS[PLAIN][0]
    lora = LoraSettings(**{**ADAPTER, "target_modules": tuple(ADAPTER["target_modules"])})
    module = TestTimeTrainingModule(model, lora=lora, reward=reward)
    data = RolloutDataModule(
        model, store, num_samples=samples, reward=reward, batch_size=GROUPS * samples, max_length=320, packing=packing
    )
    # One optimiser step: the model that is updated sampled the round, and nothing is computed but what is learnt from.
    micro_steps = math.ceil(len(SampleStore(store).index(split="train", round=0)) / (GROUPS * samples))
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=micro_steps, callbacks=[clock],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        limit_val_batches=0, num_sanity_val_steps=0, use_distributed_sampler=False, reload_dataloaders_every_n_epochs=1,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return clock
