"""The trainings of the study of targets: one a seed for all targets and losses, and one for the learned token."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from safetensors.torch import load_file
from shared import study
from shared.study import Options, train_on
from torch import Tensor, nn

from selfcal_lightning.confidence.fusion import Fusion, fit_fusion
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.questions import QuestionSource
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.datamodule import SSCDataModule
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.models.activated import Contexts, adapter_in_use, ask
from selfcal_lightning.models.lora import FIRST, LoraSettings
from selfcal_lightning.models.outputs import HiddenOutputs, log_normaliser
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.calibrated_model import adapter_name
from selfcal_lightning.training.self_calibration import SelfCalibrationModule, calibration_part
from selfcal_lightning.training.settings import AuxiliarySettings


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
        if not isinstance(outputs, HiddenOutputs):
            raise TypeError(f"Expected a model that ends with its output layer, but got {type(outputs).__name__}.")
        others = log_normaliser(outputs.queries, outputs.weight, outputs.bias)
        return torch.sigmoid(outputs.queries.float() @ self.token - others)

    def _losses(self, batch: SSCBatch, contexts: Contexts | None = None) -> tuple[Tensor, Tensor, Tensor]:
        confidence = self.chance(batch, contexts)
        calibration = calibration_part(batch, confidence, self.losses)
        return calibration, torch.zeros_like(calibration), confidence


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


def adapter_names() -> dict[str, str]:
    return {variant: FIRST if variant == FIRST_VARIANT else f"v{number}" for number, variant in enumerate(VARIANTS)}


def fit_teacher(options: Options, seed: int) -> Fusion:
    path = options.folder(seed) / "teacher.json"
    if not path.exists():
        data = SSCDataModule(options.model, "unused", train=training_sources(options))
        chosen = {question.id for question in data.questions("train")}
        store = SampleStore(options.folder(seed) / "samples", num_samples=options.responses)
        pool = [entry for entry in store.samples(split="train") if entry.question.id in chosen]
        fit_fusion(pool, target="vote_share").save(path)
    return Fusion.load(path)


def training_sources(options: Options) -> list[QuestionSource]:
    return [QuestionSource("word_problems", split="train", limit=options.questions)]


def configuration(options: Options, seed: int) -> dict[str, Any]:
    folder = options.folder(seed)
    config = study.configuration(
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
    data = config["data"]["init_args"] | {"train": training_sources(options)}
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
