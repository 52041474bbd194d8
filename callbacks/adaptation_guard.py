"""Stop a self-training policy when it collapses, and restore the last adapter that had not."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from selfcal_lightning.adaptation.module import TestTimeTrainingModule
from selfcal_lightning.adaptation.monitors import RoundMonitors, collapse, round_monitors
from selfcal_lightning.core.errors import check_at_least
from selfcal_lightning.core.files import json_object_or_none, to_json, write_atomically
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.overview import counted_samples
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models import activated, lora
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.training.model_parallel import data_module_of
from selfcal_lightning.training.modules import needed_data
from selfcal_lightning.training.rounds import adapter_folder
from selfcal_lightning.training.settings import check_positive


class AdaptationGuard(Callback):
    """Compares every round with round 0, without labels, and stops training when the policy collapses.

    The reward does not show a collapse: the majority's share rises in good runs and in bad ones. So the guard checks,
    when a new round has been sampled, whether its responses still agree with those of round 0 and can be read, and
    after every epoch how likely the model still finds the responses of round 0. When a limit is crossed, it restores
    the adapter of the last good round (or the base model), stops training and exports that adapter.

    List it after ``SSCGeneration`` among the callbacks. Its values are logged as ``guard/...``.

    Args:
        report: JSON file for the values of all rounds; null writes none.
        agreement: Largest drop of the agreement with round 0, compared with that of round 0 with itself.
        unreadable: Largest rise of the share of unreadable responses since round 0.
        logprob_fall: Largest mean drop, in nats, of the log-probability of the tokens of round 0.
        questions: Questions whose round-0 responses are read for ``logprob_fall``.
        samples: Responses to each of these questions.
    """

    def __init__(
        self,
        report: str | None = None,
        *,
        agreement: float = 0.1,
        unreadable: float = 0.02,
        logprob_fall: float = 0.05,
        questions: int = 32,
        samples: int = 2,
    ) -> None:
        self.limits = {"agreement": agreement, "unreadable": unreadable, "logprob_fall": logprob_fall}
        check_positive(**self.limits)
        check_at_least(1, questions=questions, samples=samples)
        self.report = None if report is None else Path(report)
        self.questions, self.samples = questions, samples
        self.stopped: list[str] = []
        self._first: RoundMonitors | None = None
        self._base: list[torch.Tensor] = []

    def on_train_start(self, trainer: Trainer, pl_module: TestTimeTrainingModule) -> None:
        """Judge round 0, and the round that a resumed training continues with: it may be the one to stop at."""
        data = _data(trainer)
        self.stopped, self._first, self._base = [], self._monitors(data, 0), []
        self._keep(trainer, 0, self._first, [])
        if (round := data.round_of(trainer.current_epoch)) > 0 and trainer.global_step > 0:
            self._judge(trainer, pl_module, round=round, is_sampled=True)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TestTimeTrainingModule) -> None:
        data, epoch = _data(trainer), trainer.current_epoch
        following = data.round_of(epoch + 1)
        is_sampled = following != data.round_of(epoch) and following in SampleStore(data.store_dir).manifest.rounds
        self._judge(trainer, pl_module, round=data.round_of(epoch) + 1, is_sampled=is_sampled)

    def _judge(self, trainer: Trainer, module: TestTimeTrainingModule, *, round: int, is_sampled: bool) -> None:
        data = _data(trainer)
        chosen = data.anchor_batches(questions=self.questions, samples=self.samples)
        batches = [batch.to(module.device) for batch in chosen]
        if not self._base:
            with activated.adapter_asleep(module.model):
                self._base = [module.response_logprobs(batch) for batch in batches]
        logprobs = [module.response_logprobs(batch) for batch in batches]
        fall = float((torch.cat(self._base) - torch.cat(logprobs)).double().mean())
        unknown = RoundMonitors(None, None, None, None, None, None)
        now = replace(self._monitors(data, round) if is_sampled else unknown, logprob_fall=fall)
        first = self._first if self._first is not None else unknown
        # One process decides: near a limit, rounding may part those on different devices.
        self.stopped = trainer.strategy.broadcast(collapse(now, first, **self.limits))
        self._keep(trainer, round, now, self.stopped)
        if not self.stopped:
            return
        trainer.should_stop = True
        restore(module, data.store_dir, round - 1)
        if trainer.is_global_zero:
            whose = "the base model" if round == 1 else f"the adapter of round {round - 1}"
            say(f"AdaptationGuard: stopped before round {round}: {'; '.join(self.stopped)}. Restored: {whose}.")

    def _monitors(self, data: Any, round: int) -> RoundMonitors:
        earlier, now = _entries(data, 0), _entries(data, round)
        learnt = {question.id for question in data.questions("train")} or earlier.keys()  # a store may hold others
        shared = sorted(earlier.keys() & now.keys() & learnt)
        return round_monitors(
            [[sample.answer for sample in now[name].samples] for name in shared],
            [[sample.answer for sample in earlier[name].samples] for name in shared],
            confidences=[[sample.p_true for sample in now[name].samples] for name in shared],
            lengths=[[sample.num_tokens for sample in now[name].samples] for name in shared],
            is_first=round == 0,
        )

    def _keep(self, trainer: Trainer, round: int, monitors: RoundMonitors, problems: list[str]) -> None:
        if not trainer.is_global_zero:
            return
        named = {f"guard/{name}": value for name, value in asdict(monitors).items() if value is not None}
        for logger in trainer.loggers:
            logger.log_metrics(named, step=trainer.global_step)
        told = ", ".join(f"{name.removeprefix('guard/')} {value:z.3f}" for name, value in named.items())
        say(f"AdaptationGuard: round {round}: {told}")
        if self.report is not None:
            begins = round == 0 and trainer.global_step == 0
            known: dict[str, Any] = {} if begins else json_object_or_none(self.report) or {}
            known[str(round)] = {**asdict(monitors), "problems": problems}
            self.report.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.report, to_json({name: _finite(row) for name, row in known.items()}))


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without NaN and infinity, which JSON lacks; weights that diverge have them."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def restore(module: TestTimeTrainingModule, store_dir: str, round: int) -> None:
    """Give a module the adapter that ``round`` was sampled with; that of round 0 does nothing."""
    if round > 0:
        lora.set_adapter_state(module.model, lora.read_adapter_state(adapter_folder(store_dir, round)))
        return
    state = lora.adapter_state(module.model)
    lora.set_adapter_state(
        module.model, {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in state.items()}
    )


def _entries(data: Any, round: int) -> dict[str, QuestionSamples]:
    store = SampleStore(data.store_dir, num_samples=data.num_samples)
    index = store.index(split="train", round=round)
    return {entry.question.id: entry for entry in counted_samples(store, index, round=round)}


def _data(trainer: Trainer) -> Any:
    return needed_data(data_module_of(trainer), who=AdaptationGuard.__name__, remedy="use RolloutDataModule")
