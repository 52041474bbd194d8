"""The model that is calibrated: loaded with its adapter, checked, and asked for P(True)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.models.activated import Contexts, ask, check_two_passes, read_contexts
from selfcal_lightning.models.attention_backends import exclude_cudnn
from selfcal_lightning.models.causal_lm import Confidence, load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat, Prompt, load_tokenizer
from selfcal_lightning.models.folders import (
    CONFIG_FILE,
    DIGESTS,
    base_model_identity,
    check_model_folder,
    model_folder,
    read_invocation_ids,
    read_manifest,
)
from selfcal_lightning.models.lora import (
    FIRST,
    LoraSettings,
    add_lora,
    attach_lora,
    merge_adapter,
    read_adapter_state,
    save_adapter,
)
from selfcal_lightning.models.names import check_model
from selfcal_lightning.models.outputs import ModelOutputs, read_outputs
from selfcal_lightning.models.packing import check_packed_equals_separate, runs_packed_rows
from selfcal_lightning.models.quantization import (
    OptimizerName,
    Quantization,
    check_installed,
    keep_quantized_gradients,
    load_nf4_causal_lm,
)
from selfcal_lightning.models.sharded_loading import check_architecture
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.checkpoints import check_base_model, check_hyper_parameters, check_trained
from selfcal_lightning.training.contracts import ExportKind, class_path
from selfcal_lightning.training.memory_plan import name_model, plan_memory
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy, shard_like, trainer_of
from selfcal_lightning.training.resume import ResumeState
from selfcal_lightning.training.support import check_support

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from transformers import PreTrainedModel

IDENTITY_KEY, CLASS_KEY = "base_model_identity", "module_class"


class TrainedCheckpoint:
    """Keeps what is trained, which base model it was trained on, and the random states; refuses what does not fit."""

    def __init__(self) -> None:
        self._resume = ResumeState()

    def save(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Keep the trained parameters only, and note the base model and the class. A collective."""
        checked = module
        trained = trained_parameters(module)
        checkpoint["state_dict"] = {name: value for name, value in checkpoint["state_dict"].items() if name in trained}
        checkpoint[IDENTITY_KEY] = dict(checked.identity)
        checkpoint[CLASS_KEY] = class_path(type(module))
        self._resume.save(checkpoint, trainer_of(module))

    def load(self, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another base model or of other parameters, and to go on under other settings.

        The class is not compared: its name may have changed, and what it trains tells more.
        """
        checked, trainer = module, trainer_of(module)
        check_base_model(checkpoint.get(IDENTITY_KEY), checked.identity, checked.base_model, kind=type(module).__name__)
        settings = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY, {})
        check_trained(checkpoint["state_dict"], trained_parameters(module), settings=settings)
        resuming = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        check_hyper_parameters(settings, checked.hparams, resuming=resuming)
        self._resume.load(checkpoint, trainer)

    def start(self, module: LightningModule) -> None:
        """Begin training where the checkpoint left off."""
        self._resume.start(module.trainer)


def trained_parameters(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


BESIDE_PREFIX = "beside_"  # of an adapter's name in PEFT, so that it is no part of the name of a layer
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
TAKEN = frozenset({FIRST, "best"})  # the second is the end of the name of AdapterExport's best folder


@dataclass(frozen=True)
class BesideSettings:
    """What an adapter beside the first one has of its own; what is None is as in the first one.

    Attributes:
        target: What it learns, one of the data module's targets.
        teacher: File of a fused confidence that the target is mixed with. That of the first one is not taken over.
        teacher_share: Share of the teacher in the target.
        query: The question that wakes it, at most as long as that of the first one, in tokens.
        loss: "smooth_l1" or "squared".
        ranking: Weight of the order of the responses to one question.
    """

    target: str | None = None
    teacher: str | None = None
    teacher_share: float = 0.0
    query: str | None = None
    loss: Literal["smooth_l1", "squared"] | None = None
    ranking: float | None = None


def read_beside(
    beside: Mapping[str, BesideSettings | Mapping[str, Any]] | None, *, activated: bool
) -> dict[str, BesideSettings]:
    """Return the settings of the adapters beside the first one, by name; those of a checkpoint are plain."""
    settings = {
        name: BesideSettings(**one) if isinstance(one, Mapping) else one for name, one in (beside or {}).items()
    }
    if settings and not activated:
        raise InputError(
            f"Expected `beside` with an activated adapter alone, but got {', '.join(settings)} with joint training, in "
            "which every adapter reads the responses in its own way. Set `lora.activated: true`, or leave it out."
        )
    for name in settings:
        if not NAME.fullmatch(name) or name in TAKEN:
            raise InputError(
                f"Expected the names in `beside` to be letters, digits and underscores, none of {sorted(TAKEN)}, but "
                f"got {name!r}."
            )
    return settings


def adapter_name(name: str | None) -> str:
    """Return what an adapter beside the first one is called in PEFT; None is the first one.

    Example:
        >>> adapter_name("votes"), adapter_name(None)
        ('beside_votes', 'default')
    """
    return FIRST if name is None else f"{BESIDE_PREFIX}{name}"


def plain_beside(beside: Mapping[str, BesideSettings]) -> dict[str, dict[str, Any]]:
    """Return the settings as plain types."""
    return {name: asdict(one) for name, one in beside.items()}


def read_queries(beside: Mapping[str, BesideSettings], chat: ChatFormat) -> dict[str, ChatFormat]:
    """Return the chat format of each adapter, with its own query."""
    chats = {
        name: chat if one.query is None else ChatFormat(chat.tokenizer, query=one.query) for name, one in beside.items()
    }
    room = len(chat.query.suffix_ids)
    for name, own in chats.items():
        if len(own.query.suffix_ids) > room:
            raise InputError(
                f"Expected the query of {name!r} in `beside` to be at most as long as `query`, {room} tokens, but got "
                f"{len(own.query.suffix_ids)}. Make the longest one the model's `query`."
            )
    return chats


class CalibratedModel(LightningModule):
    """A causal language model and its adapter, which say how probable it is that a response is right.

    A module that trains it states the settings; ``SelfCalibrationModule`` documents them.

    Attributes:
        model: The network; None until it is loaded.
        chat: Its chat format and query; None until it is loaded.
        chats: Those of the adapters beside the first one.
        identity: What identifies the base model; empty until it is loaded.
    """

    base_model: str
    revision: str | None
    lora: LoraSettings | None
    activated: bool
    beside: dict[str, BesideSettings]
    p_true: Literal["normalised", "raw"]
    quantization: Quantization | None
    optimizer_name: OptimizerName
    torch_dtype: Literal["auto", "float32", "bfloat16"]
    gradient_checkpointing: bool
    attn_implementation: str | None
    query: str
    prompt: Prompt | None
    seed: int

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.chat: ChatFormat | None = None
        self.chats: dict[str, ChatFormat] = {}
        self.identity: dict[str, Any] = {}
        self.strict_loading = False  # the base weights are not in a checkpoint; `on_load_checkpoint` checks the rest
        self._packing_is_checked = False
        self._checkpoint = TrainedCheckpoint()

    # ---- checkpoints: only what is trained, and which model it was trained on

    def on_train_start(self) -> None:
        """Go on exactly where a checkpoint left off."""
        self._checkpoint.start(self)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trained parameters only, and note the base model."""
        self._checkpoint.save(self, checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another base model or adapter, and to go on with training under other settings."""
        self._checkpoint.load(self, checkpoint)

    # ---- the model

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Raise InputError where the Trainer runs in a way that does not work, or the model is not one to train.

        To be asked before long work too: nothing but configurations and the headers of files is read.
        """
        trainer = trainer or trainer_of(self)
        check_support(
            trainer,
            lora=self.lora is not None,
            gradient_checkpointing=self.gradient_checkpointing,
            quantization=self.quantization,
            optimizer=self.optimizer_name,
            beside=bool(self.beside),
        )
        if trainer is not None:  # an export needs neither the quantised base nor the optimiser
            check_installed(quantization=self.quantization, optimizer=self.optimizer_name)
        check_model_folder(self.base_model, option="base_model")
        if self.model is None:
            found = {"revision": self.revision, "attn_implementation": self.attn_implementation}
            check_architecture(self.base_model, self.lora, **found)

    def plan_run(self, verb: str, trainer: Trainer, module: LightningModule, data: object) -> Plan:
        """Check the names of model, attention and adapted layers, and return what the model takes in memory."""
        check_model(self.base_model, revision=self.revision, option="base_model")
        self.check_support(trainer)
        memory = plan_memory(
            self.base_model, self.revision, self.lora, dtype=self.torch_dtype, optimizer=self.optimizer_name,
            nf4=self.quantization is not None, trains=verb == "fit", device=trainer.strategy.root_device,
            adapters=1 + len(self.beside),
        )  # fmt: skip
        return Plan(model=(name_model(self.base_model, self.lora, tuple(self.beside)),), memory=(memory,))

    def configure_model(self) -> None:
        """Load the base model and put the adapter on it. Called again by every verb of the Trainer; loads once."""
        if self.model is not None:
            return
        self.check_support()
        self._read_tokenizer()
        dtype = self.torch_dtype
        # The module itself still says that it is on the CPU: it is moved after this hook.
        strategy = None if trainer_of(self) is None else self.trainer.strategy
        device = self.device if strategy is None else strategy.root_device
        if dtype == "auto" and (self.lora is None or device.type == "cpu"):
            dtype = "float32"
        exclude_cudnn(device)  # here, where the module meets its device, and not where it is made or imported
        model_folder(self.base_model, revision=self.revision)  # a model of the hub is hashed where it lies
        # Hashing reads the files: one process does it for all.
        first = strategy is None or strategy.is_global_zero
        identity = base_model_identity(self.base_model, revision=self.revision) if first else {}
        self.identity = identity if strategy is None else strategy.broadcast(identity)
        loading = {"revision": self.revision, "dtype": dtype, "attn_implementation": self.attn_implementation}
        if isinstance(strategy, AdapterModelParallelStrategy):
            self.model = strategy.load_model(
                self.base_model,
                lora=self.lora,
                seed=self.seed,
                gradient_checkpointing=self.gradient_checkpointing,
                **loading,
            )
        else:
            # Straight to the GPU, as 4-bit weights go: otherwise every process of a machine would hold the whole model
            # in host memory at the same time.
            load = partial(self._load_network, device=device if device.type == "cuda" else None)
            if self.quantization is not None:
                load = partial(load_nf4_causal_lm, device=device)
            model = load(self.base_model, **loading)
            if self.gradient_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.enable_input_require_grads()
            self.model = model if self.lora is None else attach_lora(model, self.lora, seed=self.seed)
            for name in self.beside:
                add_lora(self.model, self.lora, adapter_name(name), seed=self.seed)
            keep_quantized_gradients(self.model)
        # `from_pretrained` leaves eval mode, in which gradient checkpointing and dropout never run.
        self.model.train()

    def _read_tokenizer(self) -> None:
        """Read the chat format and the query, and those of the adapters beside the first one."""
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        self.chat = ChatFormat(tokenizer, query=self.query, prompt=self.prompt)
        self.chats = read_queries(self.beside, self.chat)

    def _load_network(self, base_model: str, **loading: Any) -> PreTrainedModel:
        """Return the network itself, without an adapter."""
        return load_causal_lm(base_model, **loading)

    def on_validation_start(self) -> None:
        """Refuse a model that packed rows would score wrongly."""
        self._check_packing()

    def on_test_start(self) -> None:
        """Refuse a model that packed rows would score wrongly."""
        self._check_packing()

    def on_predict_start(self) -> None:
        """Refuse a model that packed rows would score wrongly."""
        self._check_packing()

    def _check_packing(self) -> None:
        """Hold how rows are run against whole sequences, once; where the weights are and all processes come along."""
        data = self._row_data()
        packed = data is not None and data.packing != "off" and runs_packed_rows(self.model)
        if self._packing_is_checked or not (packed or self.activated):
            return
        with self.trainer.precision_plugin.forward_context():
            if packed:
                check_packed_equals_separate(self.model)
            if self.activated:
                check_two_passes(self.model, packed=packed)
        self._packing_is_checked = True

    def _row_data(self) -> Any:
        """Return the data module; None where loaders were given without one, whose rows are taken to be unpacked."""
        return self.trainer.datamodule

    def confidence(self, batch: SSCBatch) -> Confidence:
        """Return P(True) and its masses, read at the last token of the query."""
        outputs = self._query_outputs(batch)
        return outputs.confidence(self.chat.query, normalised=self.p_true == "normalised")

    def _query_outputs(self, batch: SSCBatch) -> ModelOutputs:
        """Return what the model says after every row's query, in two passes where the adapter is activated."""
        if not self.activated:
            return self._outputs(batch, batch.label_position[:0])
        return ask(self.model, self._contexts(batch), self.chat.query)

    def _contexts(self, batch: SSCBatch) -> Contexts:
        tail = len(self.chat.query.suffix_ids)
        return read_contexts(self.model, batch.input_ids, batch.attention_mask, tail=tail, trees=batch.trees)

    def _outputs(self, batch: SSCBatch, labels: Tensor) -> ModelOutputs:
        return read_outputs(
            self.model,
            batch.input_ids,
            batch.attention_mask,
            queries=batch.query_position,
            labels=labels,
            query=self.chat.query,
            trees=batch.trees,
            position_ids=batch.position_ids,
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load, and do not report the frozen base weights as missing: they come from ``base_model``."""
        keys = super().load_state_dict(state_dict, strict=strict, assign=assign)
        trained = trained_parameters(self)
        return type(keys)([name for name in keys.missing_keys if name in trained], keys.unexpected_keys)


PREFIX = "model."  # of the model's parameters in the module


@dataclass(frozen=True)
class ExportedAdapter:
    """An adapter as it was exported."""

    folder: Path
    base_model: Mapping[str, Any] | None

    @classmethod
    def of(cls, folder: Path) -> ExportedAdapter:
        """Return the adapter in ``folder``."""
        manifest = read_manifest(folder)
        return cls(folder, None if manifest is None else manifest["base_model"])

    def load_into(self, module: CalibratedModel) -> None:
        """Overwrite the adapter of ``module``, whose model is configured; every process keeps its own part."""
        if self.base_model is not None:
            check_base_model(self.base_model, module.identity, module.base_model)
        self._check_settings(module)
        written = read_adapter_state(self.folder)
        # Adapters beside the first one are exported for themselves, and score nothing here.
        trained = {
            name: value
            for name, value in module.named_parameters()
            if value.requires_grad and f".{BESIDE_PREFIX}" not in name
        }
        # The module calls it "model", and PEFT leaves the adapter's own name out of its file.
        names = {name: name.removeprefix(PREFIX).replace(".default.", ".") for name in trained}
        state = {name: written[names[name]] for name in trained if names[name] in written}
        check_trained(state, trained, settings={"lora": self._configuration()})
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(shard_like(state[name], parameter))

    def _configuration(self) -> dict[str, Any]:
        return read_json_object(self.folder / CONFIG_FILE, what="the configuration of an adapter")

    def _check_settings(self, module: CalibratedModel) -> None:
        config = self._configuration()
        lora, query_ids = module.lora, read_invocation_ids(str(self.folder))
        theirs = {
            "r": config["r"],
            "alpha": config["lora_alpha"],
            "target_modules": sorted(config["target_modules"]),
            "activated": query_ids is not None,
        }
        mine = None if lora is None else {name: getattr(lora, name) for name in theirs}
        if mine is not None:
            mine["target_modules"] = sorted(mine["target_modules"])
        if mine != theirs:
            raise InputError(
                f"Expected `lora` settings of the adapter in {self.folder}, {theirs}, but got {mine}. Set them in the "
                "model's settings."
            )
        if query_ids is not None and query_ids != module.chat.query.suffix_ids:
            raise InputError(
                f"Expected `query` to be the one that the adapter in {self.folder} wakes for, {list(query_ids)} in "
                f"token ids, but got {list(module.chat.query.suffix_ids)}."
            )


def write_weights(module: CalibratedModel, folder: Path, *, state: Mapping[str, torch.Tensor] | None) -> None:
    """Write the adapter, or the whole model where all weights were trained."""
    own = None if state is None else {name.removeprefix(PREFIX): value for name, value in state.items()}
    if module.lora is None:
        module.model.save_pretrained(folder, state_dict=own)
    else:
        query_ids = module.chat.query.suffix_ids if module.activated else None
        save_adapter(module.model, folder, state=own, revision=module.revision, invocation_ids=query_ids)
    module.chat.tokenizer.save_pretrained(folder)


def write_beside(module: CalibratedModel, name: str, folder: Path) -> None:
    """Write an adapter that was trained beside the first one, and the tokenizer, as if it had been trained alone."""
    query_ids = module.chats[name].query.suffix_ids
    save_adapter(module.model, folder, revision=module.revision, invocation_ids=query_ids, name=adapter_name(name))
    module.chat.tokenizer.save_pretrained(folder)


def origin_of(identity: Mapping[str, Any], *, quantization: str | None) -> dict[str, Any]:
    """Return what the confidences of a module depend on beside its trained weights."""
    lora = identity["hyper_parameters"]["lora"]
    return {
        "base_model": {name: identity["base_model"][name] for name in DIGESTS},
        "lora": None if lora is None else _what_acts(lora),
        "prompt": identity["prompt"],
        "p_true": identity["p_true"],
        # Left out where there is none, so that what was written before there were any is still found.
        **({} if quantization is None else {"quantization": quantization}),
    }


def _what_acts(lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an adapter that its confidence depends on.

    That it acts on all tokens is left out, so that what was written before there was a choice is still found.
    """
    silent = {"dropout"} if lora["activated"] else {"dropout", "activated"}
    return {name: value for name, value in lora.items() if name not in silent}


class ExportedModel(CalibratedModel):
    """A calibrated model that is exported, and that may start from an export."""

    def __init__(self) -> None:
        super().__init__()
        self.exported: ExportedAdapter | None = None

    def configure_model(self) -> None:
        """Load the base model, put the adapter on it and overwrite it with the exported one; once."""
        if self.model is not None:
            return
        super().configure_model()
        if self.exported is not None:
            self.exported.load_into(self)

    @property
    def export_kind(self) -> ExportKind:
        """What is exported: the adapter, or all weights where all were trained."""
        return "model" if self.lora is None else "adapter"

    @property
    def exported_from(self) -> Path | None:
        """Folder of the export that the adapter starts from."""
        return None if self.exported is None else self.exported.folder

    def save_export(self, folder: Path, *, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """Write a PEFT adapter, or the whole model where all weights were trained, and the tokenizer."""
        write_weights(self, folder, state=state)

    def save_beside(self, name: str, folder: Path) -> None:
        """Write an adapter that was trained beside the first one, and the tokenizer."""
        write_beside(self, name, folder)

    def load_export(self, folder: Path) -> None:
        """Start from the adapter in ``folder``, as soon as the model is loaded."""
        self.exported = ExportedAdapter.of(folder)

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint over its base model as it is stored, also where that was quantised."""
        place = {} if base_model is None else {"base_model": base_model, "revision": None}
        return cls.load_from_checkpoint(
            path, map_location="cpu", torch_dtype=dtype, gradient_checkpointing=False, quantization=None, **place
        )

    def merged(self) -> PreTrainedModel:
        """Return the model with its adapter merged into it; it is of no further use here."""
        return self.model if self.lora is None else merge_adapter(self.model)

    def confidence_origin(self) -> dict[str, Any]:
        """Return what confidences depend on beside the trained weights."""
        identity = self.describe()
        return origin_of(identity, quantization=self.quantization)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the calibrated model, JSON-able: the manifest of an export."""
        return self._described(None)

    def describe_beside(self, name: str) -> dict[str, Any]:
        """Return the same of an adapter beside the first one, as if it had been trained alone."""
        return self._described(name)

    def _described(self, beside: str | None) -> dict[str, Any]:
        own = {"query": self.query, "loss": self.loss, "ranking": self.ranking}
        if beside is not None:
            settings = plain_beside(self.beside)[beside]
            own |= {name: settings[name] for name in own if settings[name] is not None}
        return {
            "base_model": dict(self.identity),
            "prompt": (self.chat if beside is None else self.chats[beside]).describe(),
            "p_true": self.p_true,
            "activated": self.activated,
            "quantization": self.quantization,
            "hyper_parameters": {name: value for name, value in self.hparams.items() if name != "beside"} | own,
        }
