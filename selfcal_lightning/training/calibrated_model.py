"""The model that is calibrated: loaded with its adapter, checked, scored, and exported."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from transformers import PreTrainedModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object
from selfcal_lightning.core.plan import Plan
from selfcal_lightning.models import causal_lm, folders, quantization
from selfcal_lightning.models import lora as adapters
from selfcal_lightning.models.activated import Contexts, ask, check_two_passes, read_contexts
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.outputs import ModelOutputs, run_outputs
from selfcal_lightning.models.packing import check_packed_equals_separate, runs_packed_rows
from selfcal_lightning.models.sharded_loading import check_architecture
from selfcal_lightning.training import settings
from selfcal_lightning.training.batches import ScoredRows, SSCBatch
from selfcal_lightning.training.checkpoints import check_base_model, check_trained
from selfcal_lightning.training.metrics import CalibrationMetrics
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy, join_forward, shard_like, trainer_of
from selfcal_lightning.training.modules import ExportKind, ScoringModule, trained_parameters, with_cosine
from selfcal_lightning.training.support import check_support

QUERY_TOKENS = 16  # of the turns around a query

PREFIX = "model."  # of the model's parameters in the module
AUXILIARY_PREFIX = "auxiliary_"  # of an adapter's name in PEFT, so that it is no part of the name of a layer


def adapter_name(name: str | None) -> str:
    """Return the PEFT name of an auxiliary adapter; None is the main one."""
    return adapters.FIRST if name is None else f"{AUXILIARY_PREFIX}{name}"


class CalibratedModel(ScoringModule, ABC):
    """A causal language model and its adapter, trained to state the probability that a response is right."""

    auxiliary: dict[str, settings.AuxiliarySettings]
    model: Any  # None until `configure_model`
    chat: Any  # a ChatFormat from then on

    def __init__(
        self,
        adapter: settings.AdapterSettings,
        optimization: settings.OptimizerSettings,
        memory: settings.MemorySettings | None = None,
    ) -> None:
        super().__init__(adapter.base_model, revision=adapter.revision, query=adapter.query, prompt=adapter.prompt)
        self.adapter, self.optimization, self.memory = adapter, optimization, memory or settings.MemorySettings()
        self.activated, self.attn_implementation = adapter.activated, adapter.attn_implementation
        self.model, self.chat = None, None
        self.chats: dict[str, ChatFormat] = {}  # of the auxiliary adapters
        self._packing_is_checked = False

    @property
    def lora(self) -> adapters.LoraSettings | None:
        return self.adapter.lora

    def check_support(self, trainer: Trainer | None = None) -> None:
        """Check the Trainer's settings and the model; reads no weights."""
        trainer, memory = trainer or trainer_of(self), self.memory
        if trainer is not None:  # an export needs neither the quantised base nor the optimiser
            check_support(trainer, memory, lora=self.lora is not None, auxiliary=bool(self.auxiliary))
            if memory.quantization is not None or memory.optimizer in quantization.CLASSES:
                quantization.import_bitsandbytes()
        folders.check_model_folder(self.base_model, option="base_model")
        if trainer is not None:
            self._check_dtype(trainer)
        if self.model is None:
            check_architecture(
                self.base_model, self.lora, revision=self.revision, attn_implementation=self.attn_implementation
            )

    def _check_dtype(self, trainer: Trainer) -> None:
        """Refuse weights in float16 without a gradient scaler: small gradients would become zero."""
        dtype: str = self.adapter.dtype_on(trainer.strategy.root_device)
        if dtype == "auto" and self.memory.quantization is None:
            dtype = str(folders.load_config(self.base_model, revision=self.revision).dtype).removeprefix("torch.")
        if dtype == "float16" and trainer.precision != "16-mixed":
            raise InputError(
                f"`torch_dtype` {self.adapter.torch_dtype!r} would load {self.base_model!r} in float16, which needs "
                f"`trainer.precision` 16-mixed, but got {trainer.precision!r}. Set `torch_dtype: bfloat16` or float32."
            )

    def plan_run(self, verb: str, trainer: Trainer, module: object, data: object) -> Plan:
        folders.check_model(self.base_model, revision=self.revision, option="base_model")
        self.check_support(trainer)
        trains, strategy = verb == "fit", trainer.strategy
        device = strategy.root_device
        shards = strategy.shards if isinstance(strategy, AdapterModelParallelStrategy) else 1
        rows, number = self._row_sizes(data), 1 + len(self.auxiliary)
        memory = settings.plan_memory(
            self.adapter, self.memory, trains=trains, device=device, adapters=number, shards=shards, rows=rows
        )
        # The base model reads a row once; the query of an activated adapter is a small part of it.
        passes = 1.5 if self.activated else 4.0 if self.memory.gradient_checkpointing else 3.0
        speed = causal_lm.guess_speed(self.base_model, revision=self.revision, device=device.type, passes=passes)
        lora, model = self.lora, self.base_model
        what = "all weights" if lora is None else f"LoRA of rank {lora.r} on {', '.join(lora.target_modules)}"
        others = f", with auxiliary {', '.join(self.auxiliary)}" if self.auxiliary else ""
        speeds = () if speed is None else (speed.over(trainer.world_size),)
        return Plan(model=(f"{model}, {what}{others}",), memory=(memory,), speed=speeds)

    def _row_sizes(self, data: object) -> settings.RowSizes | None:
        """Return the most tokens of a micro-batch; None if the data module sets no limit."""
        rows, most = getattr(data, "batch_size", None), getattr(data, "max_length", None)
        if not isinstance(rows, int) or not isinstance(most, int):
            return None
        query = min(most, len(self.query) // 3 + QUERY_TOKENS) if self.activated else most
        return settings.RowSizes(rows * most, rows * query)

    def configure_model(self) -> None:
        """Load the base model and attach the adapter; every Trainer verb calls this, and only the first call loads."""
        if self.model is not None:
            return
        self.check_support()
        self._read_tokenizer()
        lora, seed, memory = self.lora, self.adapter.seed, self.memory
        # The module itself still says that it is on the CPU: it is moved after this hook.
        strategy = None if trainer_of(self) is None else self.trainer.strategy
        device = self.device if strategy is None else strategy.root_device
        causal_lm.exclude_cudnn(device)
        folders.model_folder(self.base_model, revision=self.revision)  # a model of the hub is hashed where it lies
        # Hashing reads the files: one process does it for all.
        first = strategy is None or strategy.is_global_zero
        identity = folders.base_model_identity(self.base_model, revision=self.revision) if first else {}
        self.identity = identity if strategy is None else strategy.broadcast(identity)
        loading: dict[str, Any] = {"revision": self.revision, "dtype": self.adapter.dtype_on(device)}
        loading["attn_implementation"] = self.attn_implementation
        if isinstance(strategy, AdapterModelParallelStrategy):
            self.model = strategy.load_model(
                self.base_model, lora=lora, seed=seed, gradient_checkpointing=memory.gradient_checkpointing, **loading
            )
        else:
            # Straight to the GPU, as 4-bit weights go: otherwise every process of a machine would hold the whole model
            # in host memory at the same time.
            load = partial(self._load_network, device=device if device.type == "cuda" else None)
            if memory.quantization is not None:
                load = partial(quantization.load_nf4_causal_lm, device=device)
            model = load(self.base_model, **loading)
            if memory.gradient_checkpointing:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                model.enable_input_require_grads()
            self.model = model if lora is None else adapters.attach_lora(model, lora, seed=seed)
            for name in self.auxiliary:  # only with an adapter
                adapters.add_lora(self.model, lora or adapters.LoraSettings(), adapter_name(name), seed=seed)
            quantization.keep_quantized_gradients(self.model)
        # `from_pretrained` leaves eval mode, in which gradient checkpointing and dropout never run.
        self.model.train()

    def _read_tokenizer(self) -> None:
        tokenizer = load_tokenizer(self.base_model, revision=self.revision)
        self.chat = ChatFormat(tokenizer, query=self.query, prompt=self.prompt)
        room = len(self.chat.query.suffix_ids)
        for name, one in self.auxiliary.items():
            own = self.chat if one.query is None else ChatFormat(tokenizer, query=one.query, prompt=self.prompt)
            self.chats[name] = own
            if (length := len(own.query.suffix_ids)) > room:
                raise InputError(
                    f"The query of {name!r} in `auxiliary` must be at most as long as `query`, {room} tokens, but got "
                    f"{length}. Make the longest one the model's `query`."
                )

    def _load_network(self, base_model: str, **loading: Any) -> PreTrainedModel:
        return causal_lm.load_causal_lm(base_model, **loading)

    @classmethod
    def from_checkpoint(cls, path: str, *, base_model: str | None, dtype: str) -> Self:
        """Return the module of a checkpoint on its base model as stored, even if training quantised it."""
        place: dict[str, Any] = {} if base_model is None else {"base_model": base_model, "revision": None}
        # Of those, a module takes the ones that it has. Flash attention need not be installed here.
        place |= {"torch_dtype": dtype, "quantization": None, "attn_implementation": None}
        place |= {"gradient_checkpointing": False, "recompute_above": 0}
        return cls.load_from_checkpoint(path, map_location="cpu", **place)

    def _check_packing(self) -> None:
        """Compare packed rows with separate sequences, once, on all processes and with the weights in place."""
        data = self.data_module  # rows of loaders that were given without one are taken to be unpacked
        packed = data is not None and data.packing != "off" and runs_packed_rows(self.model)
        if self._packing_is_checked or not (packed or self.activated):
            return
        with self.trainer.precision_plugin.forward_context():
            if packed:
                check_packed_equals_separate(self.model)
            if self.activated:
                check_two_passes(self.model, packed=packed)
        self._packing_is_checked = True

    on_fit_start = on_validation_start = on_test_start = on_predict_start = _check_packing

    def dropout_stream(self, batch_idx: int) -> AbstractContextManager[None]:
        """Draw dropout from (seed, epoch, batch, rank), so that a resumed run equals an uninterrupted one."""
        key = f"dropout/{self.adapter.seed}/{self.current_epoch}/{batch_idx}/{self.global_rank}"
        return adapters.own_stream(self.device, int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        name, own = self.memory.optimizer, self.optimization
        optimizer = quantization.build_optimizer(name, trained, lr=own.lr, weight_decay=own.weight_decay)
        return with_cosine(optimizer, self.trainer, warmup_steps=own.warmup_steps)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._score(batch, "test")

    @abstractmethod
    def _score(self, batch: Any, stage: str) -> None:
        """Put a scored batch into the metrics of the stage."""


class ConfidenceModel(CalibratedModel):
    """A calibrated model whose confidence is P(True) after a query; its adapter can be exported and merged."""

    def __init__(
        self,
        adapter: settings.AdapterSettings,
        optimization: settings.OptimizerSettings,
        losses: settings.LossSettings,
        memory: settings.MemorySettings | None = None,
    ) -> None:
        super().__init__(adapter, optimization, memory)
        self.losses = losses
        self.val_metrics, self.test_metrics = (CalibrationMetrics(beta=losses.beta) for _ in range(2))

    def configure_model(self) -> None:
        if self.model is not None:
            return
        super().configure_model()
        if self.exported_from is not None:
            load_exported(self, self.exported_from)

    @property
    def _is_normalised(self) -> bool:
        return self.losses.p_true == "normalised"

    def confidence(self, batch: SSCBatch) -> causal_lm.Confidence:
        """Return P(True) and its masses, read at the last token of the query."""
        return self._query_outputs(batch).confidence(self.chat.query, normalised=self._is_normalised)

    def _query_outputs(self, batch: SSCBatch) -> ModelOutputs:
        """Return the model's outputs after every row's query, in two passes if the adapter is activated."""
        if not self.activated:
            return self._outputs(batch, batch.label_position[:0])
        return ask(self.model, self._contexts(batch), self.chat.query)

    def _contexts(self, batch: SSCBatch) -> Contexts:
        tail = len(self.chat.query.suffix_ids)
        return read_contexts(self.model, batch.input_ids, batch.attention_mask, tail=tail, trees=batch.trees)

    def _outputs(self, batch: SSCBatch, labels: Tensor) -> ModelOutputs:
        arguments = causal_lm.forward_arguments(
            self.model, batch.input_ids, batch.attention_mask, trees=batch.trees, position_ids=batch.position_ids
        )
        return run_outputs(self.model, arguments, queries=batch.query_position, labels=labels, query=self.chat.query)

    def predict_step(self, batch: SSCBatch, batch_idx: int, dataloader_idx: int = 0) -> ScoredRows:
        if batch.batch_size == 0:  # a process with fewer questions than the others
            join_forward(self.model, self.device, passes=2 if self.activated else 1)
            nothing = torch.empty(0, device=self.device)
            return ScoredRows(batch.row, batch.question_index, nothing, nothing, nothing)
        return ScoredRows(batch.row, batch.question_index, *self.confidence(batch))

    def _score(self, batch: SSCBatch, stage: str) -> None:
        scored = self.predict_step(batch, 0)
        if batch.batch_size:
            self._metrics(stage)[0].update(
                confidence=scored.p_true,
                correct=batch.correct,
                target=batch.target,
                question_index=batch.question_index,
                task=batch.task,
                yes_no_mass=scored.yes_mass + scored.no_mass,
            )

    @property
    def export_kind(self) -> ExportKind:
        return "model" if self.lora is None else "adapter"

    def save_export(
        self, folder: Path, *, state: Mapping[str, Tensor] | None = None, auxiliary: str | None = None
    ) -> None:
        own = None if state is None else {name.removeprefix(PREFIX): value for name, value in state.items()}
        chat = self.chat if auxiliary is None else self.chats[auxiliary]
        if self.lora is None:
            self.model.save_pretrained(folder, state_dict=own)
        else:
            query_ids, name = chat.query.suffix_ids if self.activated else None, adapter_name(auxiliary)
            adapters.save_adapter(
                self.model, folder, state=own, revision=self.revision, invocation_ids=query_ids, name=name
            )
        chat.tokenizer.save_pretrained(folder)

    def merged(self) -> PreTrainedModel:
        """Return the model with its adapter merged. The module cannot be used afterwards."""
        return self.model if self.lora is None else adapters.merge_adapter(self.model)

    def confidence_origin(self) -> dict[str, Any]:
        lora, bits = self.hparams["lora"], self.memory.quantization
        # That an adapter acts on all tokens, and that nothing is quantised, is left out of what stores hold.
        silent = {"dropout"} if self.activated else {"dropout", "activated"}
        return {
            "base_model": {name: self.identity[name] for name in folders.DIGESTS},
            "lora": None if lora is None else {name: value for name, value in lora.items() if name not in silent},
            "prompt": self.chat.describe(),
            "p_true": self.losses.p_true,
            **({} if bits is None else {"quantization": bits}),
        }

    def losses_of(self, name: str) -> settings.LossSettings:
        own, common = self.auxiliary[name], self.losses
        ranking = common.ranking if own.ranking is None else own.ranking
        return replace(common, loss=own.loss or common.loss, ranking=ranking)

    def describe(self, auxiliary: str | None = None) -> dict[str, Any]:
        chat, query, losses = self.chat, self.query, self.losses
        if auxiliary is not None:
            chat, losses = self.chats[auxiliary], self.losses_of(auxiliary)
            query = self.auxiliary[auxiliary].query or query
        own = {"query": query, "loss": losses.loss, "ranking": losses.ranking}
        return {
            "base_model": dict(self.identity),
            "prompt": chat.describe(),
            "p_true": self.losses.p_true,
            "activated": self.activated,
            "quantization": self.memory.quantization,
            "hyper_parameters": {name: value for name, value in self.hparams.items() if name != "auxiliary"} | own,
        }

    def load_export(self, folder: Path) -> None:
        folders.read_manifest(folder)  # refused here rather than after the model was loaded
        super().load_export(folder)


def load_exported(module: ConfidenceModel, folder: Path) -> None:
    """Load an exported adapter into ``module``, whose model is configured; each process loads its own shard."""
    manifest = folders.read_manifest(folder)
    if manifest is not None:
        check_base_model(manifest["base_model"], module.identity, module.base_model)
    config = read_json_object(folder / folders.ADAPTER_CONFIG, what="the configuration of an adapter")
    lora, query_ids = module.lora, folders.read_invocation_ids(str(folder))
    theirs: dict[str, Any] = {"r": config["r"], "alpha": config["lora_alpha"], "activated": query_ids is not None}
    theirs["target_modules"] = sorted(config["target_modules"])
    mine = None if lora is None else {name: getattr(lora, name) for name in theirs}
    if mine is not None:
        mine["target_modules"] = sorted(mine["target_modules"])
    if mine != theirs:
        raise InputError(f"`lora` must have the settings of the adapter in {folder}, {theirs}, but got {mine}.")
    if query_ids is not None and query_ids != module.chat.query.suffix_ids:
        raise InputError(
            f"`query` must be the one that the adapter in {folder} is active for, {list(query_ids)} in token ids, but "
            f"got {list(module.chat.query.suffix_ids)}."
        )
    written = adapters.read_adapter_state(folder)
    # Auxiliary adapters are exported separately and score nothing here.
    trainable = trained_parameters(module).items()
    trained = {name: value for name, value in trainable if f".{AUXILIARY_PREFIX}" not in name}
    # The module calls it "model", and PEFT leaves the adapter's own name out of its file.
    names = {name: name.removeprefix(PREFIX).replace(".default.", ".") for name in trained}
    strange = [f"`{name}`" for name in ("use_rslora", "alpha_pattern") if config.get(name)]
    strange += sorted(written.keys() - set(names.values()))  # such as the magnitudes of DoRA
    if strange:
        raise InputError(f"Adapter {folder} has {strange[0]}, which is not loaded here. Merge it: `selfcal export`.")
    state = {name: written[names[name]] for name in trained if names[name] in written}
    check_trained(state, trained, settings={"lora": config})
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(shard_like(state[name], parameter))
