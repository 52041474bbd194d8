"""The model that is calibrated: loaded with its adapter, checked, and asked for P(True)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor

from selfcal_lightning.model_files.attention_backends import exclude_cudnn
from selfcal_lightning.model_files.folders import check_model_folder
from selfcal_lightning.model_files.identity import base_model_identity
from selfcal_lightning.model_files.locations import model_folder
from selfcal_lightning.model_files.names import check_model
from selfcal_lightning.models.activated import Contexts, ask, check_two_passes, read_contexts
from selfcal_lightning.models.causal_lm import Confidence, load_causal_lm
from selfcal_lightning.models.lora import LoraSettings, add_lora, attach_lora
from selfcal_lightning.models.meta_models import check_architecture
from selfcal_lightning.models.model_outputs import ModelOutputs, read_outputs
from selfcal_lightning.models.packing_support import check_packed_equals_separate, runs_packed_rows
from selfcal_lightning.models.quantization import (
    OptimizerName,
    Quantization,
    check_installed,
    keep_quantized_gradients,
    load_nf4_causal_lm,
)
from selfcal_lightning.modules.batch import SSCBatch
from selfcal_lightning.modules.beside import BesideSettings, adapter_name, read_queries
from selfcal_lightning.modules.checkpoint_hooks import TrainedCheckpoint, trained_parameters
from selfcal_lightning.modules.plan import name_model, plan_memory
from selfcal_lightning.prompts.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.prompts.given import Prompt
from selfcal_lightning.runtime.plan import Plan
from selfcal_lightning.training.lightning_internals import trainer_of
from selfcal_lightning.training.model_parallel import AdapterModelParallelStrategy
from selfcal_lightning.training.sampled_data import RowData, row_data
from selfcal_lightning.training.support import check_support

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from transformers import PreTrainedModel


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
        """Refuse a checkpoint of another base model or adapter, and to go on with training under other settings.

        Raises:
            InputError: In all cases, naming what was expected and what was found.
        """
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

    def _row_data(self) -> RowData | None:
        """Return the data module; None where loaders were given without one, whose rows are taken to be unpacked."""
        return row_data(self.trainer.datamodule, who=type(self).__name__)

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
