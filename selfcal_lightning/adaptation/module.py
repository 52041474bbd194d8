"""Test-time training: learning from own responses to unlabelled questions while staying calibrated."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from selfcal_lightning.adaptation import losses as policy_losses
from selfcal_lightning.core.errors import InputError, check_literals
from selfcal_lightning.core.progress import say
from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget
from selfcal_lightning.models.activated import adapter_asleep
from selfcal_lightning.models.causal_lm import evaluation_mode
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.lora import LoraSettings, adapter_state, set_adapter_state
from selfcal_lightning.training import settings
from selfcal_lightning.training.batches import SSCBatch
from selfcal_lightning.training.calibrated_model import ConfidenceModel
from selfcal_lightning.training.losses import row_means, share_of_step
from selfcal_lightning.training.model_parallel import trainer_of
from selfcal_lightning.training.modules import check_stated, needed_data, plain_settings
from selfcal_lightning.training.self_calibration import calibration_part, generation_part
from selfcal_lightning.training.support import Support, Way, check_features


class PolicyBatch(SSCBatch):
    """An ``SSCBatch`` whose rows carry an advantage. Immutable."""

    advantage: Tensor  # reward of each row over those of its group; 0 where it has none, float32 [B]


Ratio = Literal["token", "sequence"]


@dataclass(frozen=True)
class PolicySettings:
    """Reward and loss of a policy; ``TestTimeTrainingModule`` documents the fields."""

    reward: GroupReward = "majority"
    target: PoolTarget | None = None
    calibration: float = 1.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        check_literals(self)
        settings.check_not_negative(calibration=self.calibration, kl=self.kl, entropy=self.entropy)
        if not 0.0 <= self.clip_low <= 1.0 or self.clip_high < 0.0:
            got = (self.clip_low, self.clip_high)
            raise InputError(f"Expected `clip_low` to lie in [0, 1] and `clip_high` to be at least 0, but got {got}.")


class PolicyParts(NamedTuple):
    """Parts of a step, scalars."""

    gradient: Tensor
    divergence: Tensor
    entropy: Tensor
    clipped: Tensor


def policy_parts(
    batch: PolicyBatch,
    logprob: Tensor,
    *,
    behaviour: Tensor | None,
    reference: Tensor | None,
    logits: Tensor | None,
    policy: PolicySettings = PolicySettings(),
) -> PolicyParts:
    """Return a micro-batch's policy gradient, KL to round 0, entropy, and share of clipped tokens.

    Each is the mean over the tokens of a response, weighted over the responses of the step by ``generation_weight``:
    with numbers of tokens as weights, every token of the step weighs the same.
    """
    row, rows, clip = batch.label_row, batch.batch_size, (policy.clip_low, policy.clip_high)
    ratios = None
    if behaviour is not None and policy.ratio == "token":
        ratios = policy_losses.token_ratio(logprob.detach(), behaviour)
    elif behaviour is not None:
        ours, theirs = (values.new_zeros(rows).index_add(0, row, values) for values in (logprob.detach(), behaviour))
        ratios = policy_losses.sequence_ratio(ours, theirs, torch.bincount(row, minlength=rows))[row]
    gradient = policy_losses.policy_gradient_loss(
        logprob, batch.advantage, row, ratio=ratios, clip=clip, normalise="responses"
    )
    divergence = entropy = clipped = torch.zeros_like(gradient)
    if reference is not None:
        divergence = row_means(policy_losses.kl_estimate(logprob, reference), row, num_rows=rows)
    if logits is not None:
        entropy = policy_losses.entropy_bonus(logits, row, num_rows=rows)
    if ratios is not None:  # 1 where clipping removes the gradient of a token
        above, below = ratios > 1.0 + policy.clip_high, ratios < 1.0 - policy.clip_low
        is_clipped = torch.where(batch.advantage[row] > 0, above, below & (batch.advantage[row] < 0))
        clipped = row_means(is_clipped.to(ratios.dtype), row, num_rows=rows)
    weight, total = batch.generation_weight, batch.generation_total
    return PolicyParts(*(share_of_step(part, weight, total) for part in (gradient, divergence, entropy, clipped)))


POLICY_LORA = LoraSettings(dropout=0.0, activated=False)
FEATURE = "test-time training"
SUPPORT: dict[str, dict[Way, Support]] = {FEATURE: {"one process": "yes", "DDP": "yes", "FSDP2": "no"}}
REASONS: dict[tuple[str, Way], str] = {
    (FEATURE, "FSDP2"): "the adapter of the round is exchanged for that in training, in one piece. Use `ddp`"
}


class TestTimeTrainingModule(ConfidenceModel):
    """A causal language model that learns from its own responses: by a policy gradient or from a selection.

    Over one optimiser step, for responses with advantages A, generation weights w and calibration weights v:
    ``L = sum(w * mean_t(-min(r A, clip(r) A) + kl * k3_t - entropy * H_t)) / sum(w)
    + calibration * sum(v * SmoothL1(P(Yes | x, y, query), c)) / sum(v)``, from one packed forward pass, with r the
    chance of a token under the model over that under the sampling model, k3 the estimate of KL to the model of round 0,
    and H the entropy. Without a reward the first term is the mean negative log-likelihood of a selection (SFT).

    Round 0 is sampled by the base model (adapter disabled), later rounds by the adapter that is stored with their
    samples. Log-probabilities are recomputed in training precision: an engine's differ by more than a small step does.

    Args:
        base_model: Folder or hub name of the model to adapt; "bundled" is the small one in the package.
        revision: Branch, tag or commit of a hub model.
        lora: The adapter, with ``activated: false``: it changes what is generated.
        reward: Reward, passed on to the data module: "majority" (TTRL), "vote_share" (EMPO), "ssc", "self_certainty"
            (INTUITOR), "entropy" (RENT), "equations" (checked arithmetic), "fused" (confidences fitted to the votes of
            round 0), or "reference", the only one that reads gold answers. "none" learns from the ``selection`` of the
            data module.
        target: Target of P(True), passed on to the data module: "round", the soft self-consistency of the same round;
            "anchor", that of the same answer in round 0 (0 if it is not there); "mix", their mean; null trains no
            confidence. Votes of a round rise as the policy becomes sharper; those of round 0 do not.
        calibration: Weight of the calibration loss, where there is a target.
        kl: Weight of KL to the model of round 0.
        entropy: Weight of the entropy bonus.
        ratio: "token" clips the ratio of every token, "sequence" that of the response (GSPO; clip at about 3e-4).
        clip_low: Clips ratios that are further below 1 than this.
        clip_high: Clips ratios that are further above 1 than this.
        beta: SmoothL1 is quadratic below this difference, and linear above.
        p_true: "normalised" = Yes / (Yes + No); "raw" = Yes.
        lr: Peak learning rate of AdamW; it follows a cosine to zero over optimiser steps.
        weight_decay: AdamW weight decay.
        warmup_steps: Optimiser steps of linear warm-up; Adam's first step has the full size of ``lr`` in every weight.
        torch_dtype: Type of the frozen weights; "auto" is float32 on a CPU and the stored type on a GPU.
        attn_implementation: None takes "segments" where the model can run packed rows by it.
        query: The question about the response whose Yes is the confidence.
        prompt: How questions are put to the model; None is their tasks' own way.
        seed: Seeds adapter initialisation and dropout.

    Reference:
        Shao et al., DeepSeekMath (arXiv 2402.03300), equation 3; Zuo et al., TTRL (arXiv 2504.16084); for the
        calibration loss Huang et al., Self-Calibration (arXiv 2503.00031), section 4.2.
    """

    __test__: ClassVar[bool] = False  # no test class for pytest

    def __init__(
        self,
        base_model: str,
        *,
        revision: str | None = None,
        lora: LoraSettings = POLICY_LORA,
        reward: GroupReward = "majority",
        target: PoolTarget | None = None,
        calibration: float = 1.0,
        kl: float = 0.0,
        entropy: float = 0.0,
        ratio: Ratio = "token",
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        beta: float = 0.25,
        p_true: Literal["normalised", "raw"] = "normalised",
        lr: float = 1e-5,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        torch_dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        attn_implementation: str | None = None,
        query: str = DEFAULT_QUERY,
        prompt: Prompt | None = None,
        seed: int = 0,
    ) -> None:
        adapter = settings.AdapterSettings(
            base_model, revision, lora, torch_dtype, attn_implementation, query, prompt, seed
        )
        if adapter.lora is None or adapter.activated:
            got = "None" if adapter.lora is None else "an activated one"
            raise InputError(f"Expected `lora` to change the generator, but got {got}. Set `lora.activated: false`.")
        losses = settings.LossSettings(beta=beta, p_true=p_true)
        super().__init__(adapter, settings.OptimizerSettings(lr, weight_decay, warmup_steps), losses)
        self.policy = PolicySettings(reward, target, calibration, kl, entropy, ratio, clip_low, clip_high)
        plain = plain_settings(self.adapter, self.optimization, self.policy)
        self.save_hyperparameters(plain | {"beta": beta, "p_true": p_true})
        self._round_state: dict[str, Tensor] | None = None
        self._is_sampled_from = False
        self._epoch_taken_up: int | None = None
        self._sums: Tensor | None = None  # of the micro-batches of an optimiser step, for its log

    def check_support(self, trainer: Trainer | None = None) -> None:
        super().check_support(trainer)
        if (trainer := trainer or trainer_of(self)) is not None:
            check_features(trainer, [FEATURE], rows=SUPPORT, reasons=REASONS)

    def on_fit_start(self) -> None:
        """Refuse data with another reward or target, and models that compute packed rows wrongly."""
        data = self._data()
        check_stated({"reward": (self.policy.reward, data.reward), "target": (self.policy.target, data.target)})
        self._check_packing()

    def _data(self) -> Any:
        return needed_data(self.data_module, who=type(self).__name__, remedy="use RolloutDataModule")

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.current_epoch > 0:
            self._end_without_rewards(self.current_epoch)

    def on_train_epoch_end(self) -> None:
        """End the training if the next round, which was just sampled, teaches nothing."""
        self._end_without_rewards(self.current_epoch + 1)

    def _end_without_rewards(self, epoch: int) -> None:
        if self.trainer.should_stop or self.policy.reward == "none":
            return
        if self.trainer.strategy.broadcast(self._data().teaches(epoch)):
            return
        self.trainer.should_stop = True
        if self.trainer.is_global_zero:
            say(
                f"{type(self).__name__}: stopped before epoch {epoch}: the responses to nearly every question of its "
                f"round have one reward {self.policy.reward!r}, and nothing is left to learn. The adapter stays."
            )

    def _take_up_round(self) -> None:
        """Load the adapter that sampled the epoch's round (none for round 0), at its first batch even when resumed."""
        if self._epoch_taken_up == self.current_epoch:
            return
        data = self._data()
        self._round_state = data.round_adapter(self.current_epoch)
        # With one step a round and no dropout the model is still the one that sampled: every ratio is 1.
        steps = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        self._is_sampled_from = (
            steps == 1 and self.hparams["lora"]["dropout"] == 0.0 and data.is_fresh(self.current_epoch)
        )
        self._epoch_taken_up = self.current_epoch

    def training_step(self, batch: PolicyBatch, batch_idx: int) -> Tensor:
        """Return this micro-batch's share of the loss; undoes the averaging over processes and micro-batches."""
        policy = self.policy
        if policy.reward != "none":
            self._take_up_round()
        behaviour, reference = self._earlier(batch)
        with self.dropout_stream(batch_idx):
            outputs = self._outputs(batch, batch.label_position)
        p_true = outputs.p_true(self.chat.query, normalised=self._is_normalised)
        calibration = calibration_part(batch, p_true, self.losses)
        losses = outputs.token_losses(batch.label_id)
        likelihood, parts = torch.zeros_like(calibration), PolicyParts(*[torch.zeros_like(calibration)] * 4)
        if policy.reward == "none":
            likelihood = generation_part(batch, losses)
        else:
            logits = outputs.token_logits() if policy.entropy > 0.0 else None
            parts = policy_parts(batch, -losses, behaviour=behaviour, reference=reference, logits=logits, policy=policy)
        total = (
            parts.gradient + policy.kl * parts.divergence - policy.entropy * parts.entropy + likelihood
            + policy.calibration * calibration
        )  # fmt: skip
        calibrates = batch.calibration_weight > 0
        target = torch.where(calibrates, batch.target, torch.zeros_like(batch.target))
        logged = (
            total, parts.gradient, parts.divergence, parts.entropy, likelihood, calibration, parts.clipped,
            (p_true * calibrates).sum(), target.sum(), calibrates.sum(), (batch.generation_weight > 0).sum(),
        )  # fmt: skip
        sums = torch.stack([value.detach().double() for value in logged])
        self._sums = sums if self._sums is None else self._sums + sums
        return total * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def _earlier(self, batch: PolicyBatch) -> tuple[Tensor | None, Tensor | None]:
        """Return log p of the labels under the sampling model and under that of round 0 [N]; None where not needed."""
        if self.policy.reward == "none":
            return None, None
        wants_behaviour, wants_reference = not self._is_sampled_from, self.policy.kl > 0.0
        reference = None
        if wants_reference or (wants_behaviour and self._round_state is None):
            with adapter_asleep(self.model):
                reference = self.response_logprobs(batch)
        if not wants_behaviour:
            return None, reference
        if self._round_state is None:  # round 0 was sampled by the base model
            return reference, reference if wants_reference else None
        own = adapter_state(self.model)
        set_adapter_state(self.model, self._round_state)
        try:
            return self.response_logprobs(batch), reference
        finally:
            set_adapter_state(self.model, own)

    @torch.no_grad()
    def response_logprobs(self, batch: PolicyBatch) -> Tensor:
        """Return log p of the labels of a batch under the current model, without dropout and gradient [N]."""
        with evaluation_mode(self.model):
            return -self._outputs(batch, batch.label_position).token_losses(batch.label_id)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Log the values of the step; one small collective."""
        if self._sums is None:
            return
        sums = self.trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        *losses, clipped, p_true, target, asked, learnt = sums
        self._sums = None
        names = ("Total", "PolicyGradient", "KL", "Entropy", "Likelihood", "Calibration")
        self.log_dict({f"train/loss/{name}": value for name, value in zip(names, losses, strict=True)})
        self.log("loss", losses[0], prog_bar=True, logger=False)
        logged = {
            "Clipped": clipped,
            "Confidence": p_true / max(asked, 1.0),
            "Target": target / max(asked, 1.0),
            "ResponsesLearnt": learnt,
            "LearningRate": optimizer.param_groups[0]["lr"],
        }
        self.log_dict({f"train/{name}": value for name, value in logged.items()})
