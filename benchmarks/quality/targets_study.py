"""What an activated adapter should learn: targets, a teacher, a ranking loss and a learned token.

All variants train side by side on the same rows and score the same responses of the base model. The default is chosen
on calibration questions.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from lightning.pytorch import Trainer
from rounds_study import estimate, plain
from safetensors.torch import load_file
from shared import study as shared
from shared.estimates import RESAMPLES, mean_bounds, metric_columns
from shared.jobs import run
from shared.study import SAMPLED, Options, Study, train_on, write_configuration
from shared.tables import show, table
from torch import Tensor, nn

from selfcal_lightning.confidence.fusion import Fusion, fit_fusion
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.metrics.arrays import AUROC, BRIER, ECE, WITHIN_QUESTION_AUROC
from selfcal_lightning.metrics.bootstrap import Estimate, calibration_error_bounds
from selfcal_lightning.models.activated import Contexts, adapter_in_use, ask
from selfcal_lightning.models.lora import FIRST, LoraSettings
from selfcal_lightning.models.outputs import log_normaliser
from selfcal_lightning.records import Sample
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.calibrated_model import adapter_name
from selfcal_lightning.training.self_calibration import SelfCalibrationModule, calibration_part
from selfcal_lightning.training.settings import AuxiliarySettings

SPLITS = {"calibration": "calibration", "in-domain test": "test_id", "out-of-domain test": "test_ood"}
METRICS = {"Brier": BRIER, "ECE": ECE, "AUROC": AUROC, "within-question AUROC": WITHIN_QUESTION_AUROC}
LEARNED_TOKEN = "learned token"  # noqa: S105 - a read-out
TEACHER = "TEACHER"  # the file of the seed's fusion
# The first one is the module's own adapter, the others are auxiliary.
VARIANTS: dict[str, dict[str, Any]] = {
    "leave-one-out": {},
    "SSC": {"target": "ssc"},
    "vote share": {"target": "consistency"},
    "leave-one-out SSC": {"target": "leave_one_out_ssc"},
    "raw P(True)": {"target": "p_true"},
    "teacher alone": {"teacher": TEACHER, "teacher_share": 1.0},
    "leave-one-out + teacher": {"teacher": TEACHER, "teacher_share": 0.5},
    "leave-one-out + ranking .1": {"ranking": 0.1},
    "leave-one-out + ranking .5": {"ranking": 0.5},
    "leave-one-out + teacher + ranking .1": {"teacher": TEACHER, "teacher_share": 0.5, "ranking": 0.1},
    "true labels": {"target": "label"},
}
FIRST_VARIANT = next(iter(VARIANTS))
ROWS_AT_ONCE = 128
LEARNING_RATE = 2.0e-3  # the demo's is a fourth of it and has four times the steps
Scores = Mapping[str, np.ndarray]
BASE, TAUGHT_BY = "nothing (the base's P(True))", "the teacher itself"
WITH_LABELS = ("true labels",)
# What every variant is held against: the one of the presets, and what the paper trains joint models on.
AGAINST = {"minus_first": FIRST_VARIANT, "minus_ssc": "SSC"}
CRITERION = "Brier"
SIZES = {
    "questions": (160, "training questions"),
    "responses": (10, "responses a training question"),
    "calibration": (150, "calibration questions"),
    "num_samples": (8, "responses per judged question"),
}
QUICK = {"seeds": [0], "questions": 16, "responses": 4, "calibration": 12, "test": [12, 12], "num_samples": 4}


class LearnedTokenModule(SelfCalibrationModule):
    """An activated adapter whose confidence is read at a learned token; it starts as the mean of those of Yes."""

    def configure_model(self) -> None:
        is_new = self.model is None
        super().configure_model()
        if is_new:
            weight = self.model.get_output_embeddings().weight
            self.token = nn.Parameter(weight[list(self.chat.query.yes_ids)].detach().float().mean(0))

    def chance(self, batch: SSCBatch, contexts: Contexts | None = None) -> Tensor:
        """Return the chance of the token after every row's query, [B]."""
        outputs = ask(self.model, self._contexts(batch) if contexts is None else contexts, self.chat.query)
        others = log_normaliser(outputs.queries, outputs.weight, outputs.bias)
        return torch.sigmoid(outputs.queries.float() @ self.token - others)

    def _losses(self, batch: SSCBatch, contexts: Contexts | None = None) -> tuple[Tensor, Tensor, Tensor]:
        confidence = self.chance(batch, contexts)
        calibration = calibration_part(batch, confidence, self.losses)
        return calibration, torch.zeros_like(calibration), confidence


def adapter_names() -> dict[str, str]:
    return {variant: FIRST if variant == FIRST_VARIANT else f"v{number}" for number, variant in enumerate(VARIANTS)}


def fit_teacher(options: Options, seed: int) -> Fusion:
    path = options.folder(seed) / "teacher.json"
    if not path.exists():
        store = SampleStore(options.folder(seed) / "samples", num_samples=options.responses)
        pool = list(islice(store.samples(split="train"), options.questions))
        fit_fusion(pool, target="vote_share").save(path)
    return Fusion.load(path)


def configuration(options: Options, seed: int) -> dict[str, Any]:
    folder = options.folder(seed)
    config = shared.configuration(
        "demo.yaml", seed=seed, folder=folder, adapter=folder / "adapter", keep={"AdapterExport"}
    )
    config["trainer"] |= {"logger": False, "enable_checkpointing": False, "default_root_dir": str(folder)}
    teacher, names = str(folder / "teacher.json"), adapter_names()
    auxiliary = {
        names[variant]: {key: teacher if value == TEACHER else value for key, value in settings.items()}
        for variant, settings in VARIANTS.items()
        if variant != FIRST_VARIANT
    }
    config["model"]["init_args"] |= {"base_model": options.model, "lr": LEARNING_RATE, "auxiliary": auxiliary}
    data = train_on(config, folder / "samples", limit=options.questions)
    data |= {"num_samples": options.responses, "target": "leave_one_out", "validation": []}
    return config


def score_variants(options: Options, seed: int) -> Scores:
    settings = configuration(options, seed)["model"]["init_args"]
    auxiliary = {name: AuxiliarySettings(**one) for name, one in settings.pop("auxiliary").items()}
    module = SelfCalibrationModule(**{**settings, "lora": LoraSettings(**settings["lora"])}, auxiliary=auxiliary)
    module.configure_model()
    folder, names = options.folder(seed), adapter_names()
    for name in names.values():
        load_adapter(module, name, folder / ("adapter" if name == FIRST else f"adapter-{name}"))
    module.eval()

    def confidences(batch: SSCBatch) -> dict[str, Tensor]:
        contexts, found = module._contexts(batch), {}
        for variant, name in names.items():
            with adapter_in_use(module.model, peft_name(name)):
                asked = ask(module.model, contexts, module.chat.query)
                found[variant] = asked.p_true(module.chat.query, normalised=True)
        return found

    return score_rows(options, seed, module, confidences)


def peft_name(name: str) -> str:
    return adapter_name(None if name == FIRST else name)


@torch.no_grad()
def load_adapter(module: SelfCalibrationModule, name: str, folder: Path) -> None:
    written = load_file(folder / "adapter_model.safetensors")
    own = peft_name(name)
    for key, parameter in module.named_parameters():
        if f".{own}." in key:
            parameter.copy_(written.pop(key.removeprefix("model.").replace(f".{own}.", ".")))
    if written:
        raise SystemExit(f"Expected the adapter in {folder} to be that of the study, but got more: {sorted(written)}")


def train_learned_token(options: Options, seed: int) -> Scores:
    """Train the learned token on leave-one-out agreement, on the rows and steps of the others, and score with it."""
    config = configuration(options, seed)
    settings, trainer = config["model"]["init_args"], config["trainer"]
    del settings["auxiliary"]
    torch.manual_seed(seed)
    module = LearnedTokenModule(**{**settings, "lora": LoraSettings(**settings["lora"])})
    sources = [QuestionSource("word_problems", split="train", limit=options.questions)]
    data = config["data"]["init_args"] | {"train": sources}
    Trainer(**{**trainer, "callbacks": []}).fit(module, datamodule=SSCDataModule(options.model, **data))
    module.eval()
    return score_rows(options, seed, module, lambda batch: {LEARNED_TOKEN: module.chance(batch)})


@torch.no_grad()
def score_rows(
    options: Options, seed: int, module: SelfCalibrationModule, confidences: Callable[[SSCBatch], Mapping[str, Tensor]]
) -> Scores:
    collator = SSCCollator(module.chat, max_length=320, shared_prefix=True)
    parts: dict[str, list[Tensor]] = {}
    for rows in judged_batches(options, seed):
        for name, values in confidences(collator(rows)).items():
            parts.setdefault(name, []).append(values)
    return {name: torch.cat(values).double().numpy() for name, values in parts.items()}


def judged_batches(options: Options, seed: int) -> Iterator[TupleRows]:
    store = SampleStore(options.folder(seed) / "judged")
    for split, limit in options.splits.items():
        index = store.index(split=split)
        index = index.select(np.flatnonzero(index.question_index < limit))
        for start in range(0, len(index), ROWS_AT_ONCE):
            places = np.arange(start, min(start + ROWS_AT_ONCE, len(index)))
            nothing = np.zeros(len(places))
            yield TupleRows(
                micro=MicroBatch(places, np.ones(len(places), dtype=bool), nothing, nothing, 0.0, 0.0),
                stored=store.read_rows(index.locate(places)),
                target=nothing,
                correct=nothing,
                question_index=index.question_index[places],
            )


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="bundled", help="folder or name of the model")
    parser.add_argument("--test", type=int, nargs=2, default=[200, 100], help="test questions in and out of domain")


def complete(parser: argparse.ArgumentParser, options: Options) -> None:
    options.splits = dict(zip(SPLITS.values(), [options.calibration, *options.test], strict=True))


def run_jobs(options: Options) -> None:
    write_configuration(options.output / "splits.yaml", options.splits)
    for job in (sample, train):
        for seed in options.seeds:
            job(options, seed)


def sample(options: Options, seed: int) -> None:
    folder = options.folder(seed)
    jobs = [("samples", "train", options.questions, options.responses, seed)]
    jobs += [("judged", split, limit, options.num_samples, 1000 + seed) for split, limit in options.splits.items()]
    for name, split, limit, responses, number in jobs:
        run(
            folder / "log.txt", "generate", "--model", options.model, "--store_dir", str(folder / name),
            "--task", "[word_problems]", "--split", split, "--limit", str(limit), "--seed", str(number),
            "--num_samples", str(responses), *SAMPLED, "--engine.dtype", "float32",
        )  # fmt: skip


def train(options: Options, seed: int) -> None:
    folder = options.folder(seed)
    fit_teacher(options, seed)
    write_configuration(folder / "config.yaml", configuration(options, seed))
    if not (folder / "scores.npz").exists():
        if not (folder / f"adapter-v{len(VARIANTS) - 1}").exists():
            run(folder / "log.txt", "fit", "--config", str(folder / "config.yaml"))
        keep(folder / "scores.npz", score_variants(options, seed))
    if not (folder / "learned_token.npz").exists():
        keep(folder / "learned_token.npz", train_learned_token(options, seed))


def keep(path: Path, scores: Scores) -> None:
    fresh = path.with_suffix(".tmp.npz")
    np.savez(fresh, **dict(scores))
    fresh.rename(path)


def columns_of(options: Options, seed: int) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by split and variant, the base and the teacher among them, each metric and its resamples."""
    scores: dict[str, np.ndarray] = {}
    for name in ("scores.npz", "learned_token.npz"):
        with np.load(options.folder(seed) / name) as kept:
            scores |= kept
    teacher, start = fit_teacher(options, seed), 0
    wanted = [metric for metric in METRICS.values() if metric != ECE]
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for split in options.splits:
        samples = judged(options, seed, split)
        part = {name: values[start : start + len(samples)] for name, values in scores.items()}
        part[BASE] = np.array([one.p_true for one in samples], dtype=float)
        part[TAUGHT_BY] = np.array([teacher.score_sample(one) for one in samples], dtype=float)
        labels = np.array([bool(one.correct) for one in samples]), np.array([one.question_id for one in samples])
        found[split], start = {}, start + len(samples)
        for variant in (BASE, TAUGHT_BY, *VARIANTS, LEARNED_TOKEN):
            columns = part[variant].clip(0.0, 1.0), *labels
            errors = calibration_error_bounds(*columns, num_resamples=RESAMPLES)
            found[split][variant] = {**metric_columns(columns, wanted, num_resamples=RESAMPLES), ECE: errors}
    return found


def judged(options: Options, seed: int, split: str) -> list[Sample]:
    entries = islice(SampleStore(options.folder(seed) / "judged").samples(split=split), options.splits[split])
    return [sample for entry in entries for sample in entry.samples]


def assemble(options: Options) -> dict[str, Any]:
    seeds = [columns_of(options, seed) for seed in options.seeds]
    tables = {title: table_of([columns[split] for columns in seeds]) for title, split in SPLITS.items()}
    return {
        "sizes": options.sizes("questions", "responses", "calibration", "test", "num_samples", "seeds"),
        "learning_rate": LEARNING_RATE,
        "criterion": CRITERION,
        "first": FIRST_VARIANT,
        "tables": tables,
        "chosen": choose(tables["calibration"]),
        "minutes": options.minutes,
    }


def table_of(parts: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return each variant's values over the seeds, and what they differ by from those that it is held against."""
    rows = {}
    for variant in parts[0]:
        mine = [part[variant] for part in parts]
        rows[variant] = {"values": estimates(mine)}
        rows[variant] |= {name: estimates(mine, [part[other] for part in parts]) for name, other in AGAINST.items()}
    return rows


def estimates(
    mine: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]] = ()
) -> dict[str, dict[str, float | None]]:
    """Return the metrics of a variant over its seeds, or what they differ by from those of others."""
    found = {}
    for short, metric in METRICS.items():
        columns, theirs = ([one[metric] for one in side] for side in (mine, others))
        if metric == ECE:
            errors = mean_bounds(columns).minus(mean_bounds(theirs)) if theirs else mean_bounds(columns)
            found[short] = plain(Estimate.from_bounds(errors, least=-1.0 if theirs else 0.0, most=1.0))
        else:
            found[short] = estimate(np.stack(columns) - (np.stack(theirs) if theirs else 0.0))
    return found


def choose(table: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the variant without labels that is best by the criterion, and what it is clearly better than.

    The read-out of a learned token takes part in the table alone: no engine reads it.
    """
    free = [name for name in VARIANTS if name not in WITH_LABELS]
    best = min(free, key=lambda name: table[name]["values"][CRITERION]["value"])
    changes = {name: table[best][name][CRITERION] for name in AGAINST}
    clearly = {name: best != other and changes[name]["high"] < 0.0 for name, other in AGAINST.items()}
    return {"variant": best, **changes, "clearly": clearly}


def as_markdown(study: Mapping[str, Any]) -> str:
    sizes, chosen = study["sizes"], study["chosen"]
    verdicts = [
        f"{show(chosen[name])} from {other}, {'clearly' if chosen['clearly'][name] else 'not clearly'} better"
        for name, other in AGAINST.items()
    ]
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). Seeds "
        f"{sizes['seeds']}; {sizes['questions']} training questions x {sizes['responses']} responses, one epoch, 32 to "
        f"a step, learning rate {study['learning_rate']}; {sizes['calibration']} calibration questions, "
        f"{sizes['test'][0]} test questions in and {sizes['test'][1]} out of domain x {sizes['num_samples']} responses "
        "of the base model, the same in all rows of a table. Means over the seeds; 95 % intervals over questions and "
        "seeds, of the ECE over questions. The "
        "teacher is a fusion of P(True) and log-probabilities, fitted without labels to the vote share of the training "
        "responses; where it is mixed in, it makes half of the target.",
        "",
        f"Chosen on the calibration questions by {CRITERION} among what needs no labels: **{chosen['variant']}**, "
        f"{'; '.join(verdicts)}.",
    ]
    heads = ["trained on", *METRICS]
    differences = [f"{CRITERION} minus {other}" for other in AGAINST.values()]
    for title, entries in study["tables"].items():
        rows = [
            [variant, *map(show, entry["values"].values()), *(show(entry[name][CRITERION]) for name in AGAINST)]
            for variant, entry in entries.items()
        ]
        lines += ["", f"### {title.capitalize()} questions", "", *table([*heads, *differences], rows)]
    rows = [
        [variant, *map(show, entry["minus_first"].values())]
        for variant, entry in study["tables"]["in-domain test"].items()
        if variant != study["first"]
    ]
    lines += ["", f"### What the others differ by from {study['first']}, in domain", "", *table(heads, rows)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    study = Study(
        "quality/targets_study.py", SIZES, run_jobs, assemble, as_markdown, arguments=arguments, quick=QUICK,
        complete=complete, layout={"indent": 1},
    )  # fmt: skip
    raise SystemExit(study.main())
