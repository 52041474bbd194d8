"""Fill the sample store before it is read: the base model answers the questions of the splits that a verb needs."""

from __future__ import annotations

import gc
import uuid
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from selfcal_lightning.callbacks.preemption import interrupt_of
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.locations import resolve_model
from selfcal_lightning.modules.self_calibration import SelfCalibrationModule
from selfcal_lightning.pipelines.progress import say
from selfcal_lightning.pipelines.rendezvous import Rendezvous
from selfcal_lightning.pipelines.reuse import is_complete, open_existing
from selfcal_lightning.pipelines.sampling import generate_samples, store_fingerprint
from selfcal_lightning.prompts import ChatFormat, load_tokenizer
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.store import SampleStore

Splits = dict[str, list[Question]]


class SSCGeneration(Callback):
    """Samples round 0, the base model's responses with their P(True), where the store lacks it.

    It runs in ``setup``, before the module loads its weights, so that the engine has the GPU to itself. Questions,
    store folder and number of samples are read from the data module, model, revision and query from the module. Every
    process samples its own share of the questions; then they wait for each other. What the store holds is reused, also
    after a kill.

    Args:
        engine: "transformers", or "vllm" (an extra).
        temperature: Fixed temperature, or the base of entropy-based dynamic temperature (EDT).
        edt_scale: N0 of EDT; None draws at the fixed temperature.
        edt_theta: Exponent theta of EDT.
        top_p: Mass of the nucleus.
        max_new_tokens: Longest response in tokens.
        seed: Of sampling; every sample has its own, derived from it.
        dtype: Of the weights; "auto" is the engine's choice.
        max_batch: Sequences that the engine runs at once; None is the engine's choice.
        gpu_memory_utilization: Share of the GPU's memory for vLLM; None is its default.
        questions_per_shard: Questions in one file of the store; what a kill can cost.
        shard_by_shard: Sample file after file. With the transformers engine on a CPU a killed run then ends with the
            samples of an unbroken one to the last bit of their confidences; otherwise texts are equal and confidences
            differ by about 1e-6. It costs speed at the end of every file.
        stall_timeout: Seconds without a sign of life from another process after which waiting for it ends.
    """

    def __init__(
        self,
        *,
        engine: Literal["transformers", "vllm"] = "transformers",
        temperature: float = 0.8,
        edt_scale: float | None = 0.8,
        edt_theta: float = 1.0,
        top_p: float = 1.0,
        max_new_tokens: int = 1024,
        seed: int = 0,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        max_batch: int | None = None,
        gpu_memory_utilization: float | None = None,
        questions_per_shard: int = 64,
        shard_by_shard: bool = False,
        stall_timeout: float = 600.0,
    ) -> None:
        if engine not in {"transformers", "vllm"}:
            raise ValueError(f'Expected `engine` to be "transformers" or "vllm", but got {engine!r}.')
        if engine == "transformers" and gpu_memory_utilization is not None:
            raise ValueError("Expected `gpu_memory_utilization` to be None with the engine transformers; it is vLLM's.")
        self.sampling = SamplingSettings(temperature, edt_scale, edt_theta, top_p, max_new_tokens)
        self.engine, self.seed, self.dtype, self.max_batch = engine, seed, dtype, max_batch
        self.gpu_memory_utilization = gpu_memory_utilization
        self.questions_per_shard, self.shard_by_shard = questions_per_shard, shard_by_shard
        self.stall_timeout = stall_timeout
        self._rendezvous: Rendezvous | None = None

    def setup(self, trainer: Trainer, pl_module: SelfCalibrationModule, stage: str) -> None:
        """Sample what is missing of the splits that ``stage`` reads."""
        pl_module.check_support()  # before the long work; the model itself is built after it
        data = _data_module(trainer)
        splits = {name: questions for name in _splits(stage, data) if (questions := data.questions(name))}
        if not splits:
            _say(
                trainer, f"SSCGeneration: no question sources are configured; the samples in {data.store_dir} are used."
            )
            return
        token = trainer.strategy.broadcast(uuid.uuid4().hex)  # the last collective before the long work
        self._rendezvous = Rendezvous(
            Path(data.store_dir) / "meetings" / token,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            stall_timeout=self.stall_timeout,
            interrupt=interrupt_of(trainer, stage),
        )
        with self._rendezvous.working():
            self._fill(trainer, pl_module, splits)
        self._rendezvous.meet()
        self._join(trainer, SampleStore(data.store_dir), splits)

    def teardown(self, trainer: Trainer, pl_module: SelfCalibrationModule, stage: str) -> None:
        """Remove the files that the processes waited by."""
        if self._rendezvous is not None and trainer.is_global_zero:
            self._rendezvous.clear()
        self._rendezvous = None

    def _fill(self, trainer: Trainer, module: SelfCalibrationModule, splits: Splits) -> None:
        """Sample this process's share of every split. The engine is started only where something is missing."""
        data, shard = _data_module(trainer), (trainer.global_rank, trainer.world_size)
        model = resolve_model(module.base_model)
        chat = ChatFormat(load_tokenizer(model, revision=module.revision), query=module.query)
        existing = open_existing(
            data.store_dir,
            model=model,
            revision=module.revision,
            chat=chat,
            sampling=self.sampling,
            seed=self.seed,
            num_samples=data.num_samples,
        )
        if is_complete(existing, splits, shard=shard):
            total = sum(map(len, splits.values()))
            _say(trainer, f"SSCGeneration: samples of all {total:,} questions are reused from {data.store_dir}.")
            return
        engine = self._start(trainer, model, module.revision, chat)
        try:
            store = SampleStore.create_or_open(
                data.store_dir,
                store_fingerprint(engine, chat, self.sampling, self.seed),
                num_samples=data.num_samples,
                engine=engine.describe(),
            )
            for split, questions in splits.items():
                _say(trainer, f"SSCGeneration: {split}, {data.num_samples} samples a question, into {data.store_dir}")
                report = generate_samples(
                    questions,
                    split=split,
                    engine=engine,
                    chat=chat,
                    store=store,
                    num_samples=data.num_samples,
                    sampling=self.sampling,
                    seed=self.seed,
                    part=f"rank-{shard[0]}-of-{shard[1]}",
                    shard=shard,
                    questions_per_shard=self.questions_per_shard,
                    progress=trainer.is_global_zero,
                    interrupt=self._rendezvous.check,
                    shard_by_shard=self.shard_by_shard,
                )
                say(f"SSCGeneration: {split}, process {shard[0]} of {shard[1]}: {report}")
        finally:
            engine.close()
            del engine
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _start(self, trainer: Trainer, model: str, revision: str | None, chat: ChatFormat) -> Engine:
        """Start the engine on this process's device."""
        device = trainer.strategy.root_device
        settings: dict[str, Any] = {}
        if self.engine == "vllm":
            from selfcal_lightning.engines.vllm import VLLMEngine

            if self.max_batch is not None:
                settings["max_num_seqs"] = self.max_batch
            return VLLMEngine(
                model,
                revision=revision,
                dtype=None if self.dtype == "auto" else self.dtype,
                chat=chat,
                devices=[device.index] if device.type == "cuda" else None,
                gpu_memory_utilization=self.gpu_memory_utilization,
                **settings,
            )
        from selfcal_lightning.engines.transformers import TransformersEngine

        if self.max_batch is not None:
            settings["max_batch"] = self.max_batch
        return TransformersEngine(model, revision=revision, dtype=self.dtype, device=str(device), chat=chat, **settings)

    def _join(self, trainer: Trainer, store: SampleStore, splits: Splits) -> None:
        """Show readers what all processes have written. Every process may do that; the first one does it first."""
        manifest = store.join()
        wanted = {question.id for questions in splits.values() for question in questions}
        missing = wanted - store.question_ids()
        if missing:
            raise RuntimeError(
                f"Expected {store.path} to hold all {len(wanted)} questions, but {len(missing)} are missing, for "
                f"example {min(missing)!r}. All processes must see one file system, and sample the same questions."
            )
        _say(
            trainer,
            f"SSCGeneration: {store.path} holds {manifest['questions']:,} questions, {manifest['rows']:,} rows.",
        )


def _data_module(trainer: Trainer) -> LightningDataModule:
    if trainer.datamodule is None:
        raise ValueError("Expected a data module with questions for SSCGeneration, but got none: use SSCDataModule.")
    return trainer.datamodule


def _splits(stage: str, data: LightningDataModule) -> tuple[str, ...]:
    """Return the splits that a verb of the Trainer reads."""
    if stage == "predict":
        return (data.predict_split,)
    return {"fit": ("train", "validation"), "validate": ("validation",), "test": ("test",)}[stage]


def _say(trainer: Trainer, text: str) -> None:
    if trainer.is_global_zero:
        say(text)
