"""Self-calibration: train a model so that one forward pass gives its soft self-consistency."""

import math
import resource
import sys
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from typing import Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.models.activated import Contexts, adapter_in_use, ask
from selfcal_lightning.models.causal_lm import recompute_layers
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.models.quantization import OptimizerName, Quantization
from selfcal_lightning.training import losses, settings
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.calibrated_model import ConfidenceModel, adapter_name
from selfcal_lightning.training.modules import plain_settings, trained_parameters

SMALLEST = 1e-6  # log-odds stay within +-13.8


def calibration_part(
    batch: SSCBatch, confidence: Tensor, chosen: settings.LossSettings, *, targets: Tensor | None = None
) -> Tensor:
    """Return the batch's part of the calibration loss of its optimiser step, a scalar."""
    weight, wanted = batch.calibration_weight, batch.target if targets is None else targets
    target = torch.where(weight > 0, wanted, torch.zeros_like(wanted))  # 0 * nan would be nan
    if chosen.loss == "cross_entropy":
        values = losses.cross_entropy_calibration_loss(confidence, target)
    elif chosen.loss == "squared":
        values = losses.squared_calibration_loss(confidence, target)
    else:
        values = losses.calibration_loss(confidence, target, beta=chosen.beta)
    if chosen.ranking > 0.0:
        # Rows without weight are ordered with nobody: among them are copies that fill a short step.
        alone = -1 - torch.arange(len(target), device=target.device)
        question = torch.where(weight > 0, batch.question_index, alone)
        log_odds = torch.logit(confidence, eps=SMALLEST)
        values = values + chosen.ranking * losses.group_ranking_loss(log_odds, target, question)
    return losses.share_of_step(values, weight, batch.calibration_total)


def generation_part(batch: SSCBatch, token_losses: Tensor) -> Tensor:
    """Return the batch's part of the generation loss, from the losses of its labels [N]."""
    nll = losses.row_means(token_losses, batch.label_row, num_rows=batch.batch_size)
    return losses.share_of_step(nll, batch.generation_weight, batch.generation_total)


GIB = 2**30
COLLAPSED, LAST_STEPS = 0.01, 5  # a smaller spread of the confidence in so many last steps tells nothing apart


class StepLog:
    """Accumulates the micro-batches of an optimiser step into logged values."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._sums: Tensor | None = None
        self._seconds = 0.0
        self._started = time.perf_counter()

    def pause(self) -> None:
        self._seconds += time.perf_counter() - self._started

    def go_on(self) -> None:
        self._started = time.perf_counter()

    def add(
        self, batch: SSCBatch, calibration: Tensor, generation: Tensor, confidence: Tensor, *, eta: float | None
    ) -> None:
        """Add a micro-batch: its parts of both losses (scalars), P(True) [B], and the threshold of the targets."""
        calibrates, generates = batch.calibration_weight > 0, batch.generation_weight > 0
        real = calibrates | generates
        values = {
            "calibration": calibration.detach(),
            "generation": generation.detach(),
            "confidence": (confidence.detach() * calibrates).sum(),
            "squares": (confidence.detach().double() ** 2 * calibrates).sum(),
            "calibration_rows": calibrates.sum(),
            "above_eta": math.nan if eta is None else (real & (batch.target > eta)).sum(),
            "rows": real.sum(),
            "tokens": batch.attention_mask.sum(),
            "slots": batch.attention_mask.numel(),
            "separate": batch.separate_tokens,
        }
        self._names = tuple(values)
        # In float64, since float32 cannot count above 2**24 tokens.
        zero = torch.zeros((), dtype=torch.float64, device=batch.input_ids.device)
        sums = torch.stack([zero + value for value in values.values()])
        self._sums = sums if self._sums is None else self._sums + sums

    def finish(self, strategy: Strategy, *, omega: float, lr: float) -> dict[str, float]:
        """Return the step's values by logged name (empty without micro-batches) and restart. One small collective."""
        if self._sums is None:
            return {}
        sums = dict(zip(self._names, strategy.reduce(self._sums, reduce_op="sum").tolist(), strict=True))
        seconds = max(self._seconds + time.perf_counter() - self._started, 1e-9)
        device = self._sums.device
        self.restart()
        asked = max(sums["calibration_rows"], 1.0)
        mean = sums["confidence"] / asked
        return {
            "train/loss/Calibration": sums["calibration"],
            "train/loss/Generation": sums["generation"],
            "train/loss/Total": sums["calibration"] + omega * sums["generation"],
            "train/Confidence": mean,
            # Of one response, or a few, it says nothing.
            "train/ConfidenceSpread": math.sqrt(max(sums["squares"] / asked - mean**2, 0.0)) if asked > 3 else math.nan,
            "train/TargetAboveEta": sums["above_eta"] / max(sums["rows"], 1.0),
            "train/speed/TokensPerSecond": sums["tokens"] / seconds,
            "train/speed/ResponsesPerSecond": sums["rows"] / seconds,
            "train/speed/PaddingShare": 1.0 - sums["tokens"] / max(sums["slots"], 1.0),
            # Tokens that were not computed since responses share their prompt.
            "train/speed/SharedShare": 1.0 - sums["tokens"] / max(sums["separate"], 1.0),
            "train/memory/PeakGiB": peak_memory(device) / GIB,
            "train/LearningRate": lr,
        }


BAR = {
    "cal": "train/loss/Calibration",
    "gen": "train/loss/Generation",
    "conf": "train/Confidence",
    ">eta": "train/TargetAboveEta",
    "tok/s": "train/speed/TokensPerSecond",
    "pad": "train/speed/PaddingShare",
    "GiB": "train/memory/PeakGiB",
}


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


DEFAULT_LORA = LoraSettings()


class SelfCalibrationModule(ConfidenceModel):
    """A causal language model trained to state its soft self-consistency.

    Over one optimiser step, for responses y to x with target c:
    ``L = sum(w_cal * l(P(Yes | x, y, query), c)) / sum(w_cal) + omega * sum(w_gen * mean_t NLL) / sum(w_gen)``
    with l the SmoothL1 of width beta, w the weights and their sums over the step that every batch carries.

    An *activated* adapter (the default) acts only on the tokens of the query: the base model reads x and y without
    autograd, and the query runs forward and backward over their keys and values. There is no generation loss, and the
    model's responses stay bit-identical. Without ``lora.activated``, training is *joint*, as in the paper: one pass
    over x, y and query carries both losses, and tunes the generator too.

    Args:
        base_model: Folder or hub name of the model to calibrate; "bundled" is the small one in the package.
        revision: Branch, tag or commit of a hub model.
        lora: The adapter; null trains all weights, jointly.
        omega: Weight of the generation loss in joint training, 0.1 by default. An activated adapter has no generation
            loss.
        beta: SmoothL1 is quadratic below this difference, and linear above.
        loss: Loss between confidence and target: "smooth_l1" as in the paper, "squared" for the ablation, or
            "cross_entropy", whose gradient does not vanish where a confidence is near 0 or 1 and wrong.
        ranking: Weight of a ranking term in the calibration loss: how well the log-odds of P(True) order the responses
            to one question by their targets, within a micro-batch (see `group_size` of the data module).
        generation_loss: False drops the generation loss of joint training (an ablation): omega 0.
        p_true: "normalised" = Yes / (Yes + No); "raw" = Yes, as in the paper.
        quantization: "nf4" holds the frozen linear layers in four bits, double quantised (QLoRA; needs `lora` and the
            extra `qlora`). Round 0 is sampled from the stored model, later rounds from the one in four bits; an export
            merges into the stored model.
        optimizer: "adamw", or one of bitsandbytes (the extra `qlora`): "adamw_8bit" with 8-bit moments, "paged_adamw"
            with moments that may leave the GPU, "paged_adamw_8bit" with both.
        lr: Peak learning rate of AdamW; it follows a cosine to zero over optimiser steps.
        weight_decay: AdamW weight decay.
        warmup_steps: Optimiser steps of linear warm-up, fewer than training has.
        torch_dtype: Type of the frozen weights; "auto" is float32 on a CPU and the stored type on a GPU. Trained
            weights are float32, unless you ask for "bfloat16" without an adapter, or the Trainer runs in "bf16-true".
        gradient_checkpointing: Recomputes activations in the backward pass of joint training: less memory for one more
            forward pass (with a frozen base half as much time again).
        recompute_above: Recomputes activations only for micro-batches of more tokens than this. Kept ones take about 6
            MB a token for a model of 8B parameters, 2.5 MB for one of 1.5B.
        attn_implementation: Null takes "segments", which runs packed rows (``packing`` in the data module) on any
            device, if the model can, else the model's default. "flex_attention" runs packed rows by block masks on
            GPUs. With any other, such as "flash_attention_2", set `packing: off`.
        query: The confidence query: the question about the response whose Yes is the confidence.
        prompt: How questions are put to the model when sampling and training; the export keeps it, so that `selfcal
            answer` asks in the same way. Null is the task's prompt.
        auxiliary: More activated adapters by name, each with its own target, loss or query. They share the forward pass
            over the responses, end as if trained alone, and are exported next to the first adapter. Validation, test
            and predict score the first one.
        seed: Seeds adapter initialisation, and dropout (from seed, epoch, batch and rank).

    Reference:
        Huang et al., Efficient Test-Time Scaling via Self-Calibration (arXiv 2503.00031), section 3.
    """

    def __init__(
        self,
        base_model: str,
        *,
        revision: str | None = None,
        lora: LoraSettings | None = DEFAULT_LORA,
        omega: float | None = None,
        beta: float = 0.25,
        loss: settings.LossName = "smooth_l1",
        ranking: float = 0.0,
        generation_loss: bool | None = None,
        p_true: Literal["normalised", "raw"] = "normalised",
        quantization: Quantization | None = None,
        optimizer: OptimizerName = "adamw",
        lr: float = 5e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gradient_checkpointing: bool = False,
        recompute_above: int = 0,
        attn_implementation: str | None = None,
        query: str = DEFAULT_QUERY,
        prompt: Prompt | None = None,
        auxiliary: dict[str, settings.AuxiliarySettings] | None = None,
        seed: int = 0,
    ) -> None:
        adapter = settings.AdapterSettings(
            base_model, revision, lora, torch_dtype, attn_implementation, query, prompt, seed
        )
        memory = settings.MemorySettings(quantization, optimizer, gradient_checkpointing, recompute_above)
        if adapter.activated:
            given = dict(omega=omega, generation_loss=generation_loss, gradient_checkpointing=gradient_checkpointing)
            if name := next((name for name, value in given.items() if value), None):
                raise InputError(
                    f"`{name}` {given[name]} does nothing with an activated adapter, which leaves the generator alone. "
                    "Leave it out, or set `lora.activated: false` for joint training."
                )
            omega, generation_loss = 0.0, False
        own = settings.LossSettings(
            omega=settings.DEFAULT_OMEGA if omega is None else omega,
            generation_loss=generation_loss is not False,
            beta=beta, loss=loss, ranking=ranking, p_true=p_true,
        )  # fmt: skip
        if quantization is not None and lora is None:
            raise InputError(f"`quantization` {quantization!r} needs `lora`: four-bit weights cannot be trained.")
        super().__init__(adapter, settings.OptimizerSettings(lr, weight_decay, warmup_steps), own, memory)
        self.auxiliary = settings.read_auxiliary(auxiliary, activated=self.activated)
        self.omega = self.losses.omega if self.losses.generation_loss else 0.0
        self.save_hyperparameters(
            plain_settings(self.adapter, self.optimization, self.losses, self.memory)
            | {"auxiliary": {name: asdict(one) for name, one in self.auxiliary.items()}}
        )
        self._step_log = StepLog()
        self._spreads: deque[float] = deque(maxlen=LAST_STEPS)

    def on_validation_start(self) -> None:
        self._step_log.pause()  # tokens per second are those of training
        super().on_validation_start()

    def training_step(self, batch: SSCBatch, batch_idx: int) -> Tensor:
        """Return this micro-batch's share of the loss; undoes the averaging over processes and micro-batches."""
        if self.memory.gradient_checkpointing:
            recompute_layers(self.model, batch.input_ids.numel() > self.memory.recompute_above)
        # Every adapter has the stream that it would have alone; reading the contexts draws nothing.
        stream = partial(self.dropout_stream, batch_idx)
        contexts = self._contexts(batch) if self.auxiliary else None
        with stream():
            calibration, generation, confidence = self._losses(batch, contexts)
        eta = None if self.data_module is None else self.data_module.eta
        self._step_log.add(batch, calibration, generation, confidence, eta=eta)
        loss = calibration + self.omega * generation
        if contexts is not None:
            for place, name in enumerate(self.auxiliary):
                query = self.chats[name].query
                targets = batch.target if batch.auxiliary_target is None else batch.auxiliary_target[:, place]
                with stream(), adapter_in_use(self.model, adapter_name(name)):
                    p_true = ask(self.model, contexts, query).p_true(query, normalised=self._is_normalised)
                    loss = loss + calibration_part(batch, p_true, self.losses_of(name), targets=targets)
        return loss * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def _losses(self, batch: SSCBatch, contexts: Contexts | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of the calibration and generation loss (scalars) and P(True) [B].

        Joint training gets both from one forward pass; ``contexts`` come from an activated adapter's first pass.
        """
        asks = self.omega > 0  # which rows are asked for tokens is decided where the batch is made: here it would wait
        if contexts is not None:
            outputs = ask(self.model, contexts, self.chat.query)
        else:
            outputs = self._outputs(batch, batch.label_position) if asks else self._query_outputs(batch)
        confidence = outputs.p_true(self.chat.query, normalised=self._is_normalised)
        calibration = calibration_part(batch, confidence, self.losses)
        if not asks:
            return calibration, torch.zeros_like(calibration), confidence
        return calibration, generation_part(batch, outputs.token_losses(batch.label_id)), confidence

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of each adapter separately, as if it were trained alone."""
        if not self.auxiliary or not gradient_clip_val or gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        for name in map(adapter_name, (None, *self.auxiliary)):
            own = [parameter for key, parameter in trained_parameters(self).items() if f".{name}." in key]
            torch.nn.utils.clip_grad_norm_(own, gradient_clip_val)

    def on_train_epoch_start(self) -> None:
        self._step_log.restart()

    def on_validation_end(self) -> None:
        self._step_log.go_on()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        lr = optimizer.param_groups[0]["lr"]
        logged = self._step_log.finish(self.trainer.strategy, omega=self.omega, lr=lr)
        if logged:
            self.log_dict(logged)
            self.log_dict({short: logged[name] for short, name in BAR.items()}, prog_bar=True, logger=False)
            self._spreads.append(logged["train/ConfidenceSpread"])

    def on_train_end(self) -> None:
        """Warn of a confidence that is the same for all responses, which no label is needed to see."""
        if len(self._spreads) == LAST_STEPS and max(self._spreads) < COLLAPSED and self.trainer.is_global_zero:
            say(
                f"Note: the confidence differs by less than {COLLAPSED} between the responses of the last {LAST_STEPS} "
                "steps: training has collapsed. Lower `model.lr`, or try `model.loss` cross_entropy or another seed."
            )
