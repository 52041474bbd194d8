"""Checks that an engine serves the trained adapter, by comparing log-probabilities of recorded tokens."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.store.shards import SampleIndex, StoredRow
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.transformers.model import MASKABLE_ATTENTION, exact_head
from selfcal_lightning.metrics import arrays, calibration, consistency, discrimination
from selfcal_lightning.models import causal_lm, folders, lora
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.training.calibrated_model import ConfidenceModel
from selfcal_lightning.training.export import write_export

_LOG = logging.getLogger(__name__)


def adapter_folder(store_dir: str | Path, round: int) -> Path:
    return Path(store_dir) / "adapters" / f"round-{round:03d}"


def keep_adapter(module: ConfidenceModel, store_dir: str | Path, *, round: int, training: str) -> Path:
    """Write the module's adapter as that of ``round`` unless it exists. Call it on one process."""
    folder = adapter_folder(store_dir, round)
    if not folder.exists():
        return write_export(module, folder, store={"path": str(store_dir), "round": round, "training": training})
    # It must be of this training: the same weights or, where arithmetic is not bit-exact (GPUs), the same settings.
    difference = lora.adapter_difference(module.model, folder)
    if difference == 0.0:
        return folder
    check_same_training(folder, round, training)
    _LOG.warning(
        f"Round {round} was begun with the adapter in {folder}; the weights now differ from it by up to "
        f"{difference:.3g}. The round is completed with the adapter on disk."
    )
    return folder


def check_same_training(folder: Path, round: int, training: str) -> None:
    manifest = folders.read_manifest(folder)
    if manifest is None or manifest["store"]["training"] != training:
        raise InputError(
            f"Round {round} of the store was sampled in a training with other settings ({folder}). Restore them, use "
            "another `store_dir`, or drop the later rounds from a copy of the store: `selfcal drop-rounds --store_dir "
            "COPY --first 1`."
        )


@contextmanager
def serving(module: ConfidenceModel, folder: Path) -> Iterator[None]:
    """Run the block in evaluation mode with the adapter of ``folder`` and plain attention, then restore everything."""
    model = module.model
    own = None
    if lora.adapter_difference(model, folder) != 0.0:
        own = lora.adapter_state(model)
        lora.set_adapter_state(model, lora.read_adapter_state(folder))
    attention = model.config._attn_implementation
    if attention not in MASKABLE_ATTENTION:
        model.set_attn_implementation("sdpa")
    try:
        with causal_lm.evaluation_mode(model):
            yield
    finally:
        if attention not in MASKABLE_ATTENTION:
            model.set_attn_implementation(attention)
        if own is not None:
            lora.set_adapter_state(model, own)


FLOAT32_TOLERANCE = 1e-4
HALF_TOLERANCE = 0.02
TOKENS_PER_PROBE = 16
SMALLEST = 1e-30


class AdapterMismatchError(RunError):
    """The engine does not serve the trainer's adapter."""


class Probe(NamedTuple):
    ids: tuple[int, ...]
    places: tuple[int, ...]  # the positions to compare


def make_probes(
    rows: Sequence[StoredRow], chat: ChatFormat, *, max_tokens: int = TOKENS_PER_PROBE, max_length: int | None = None
) -> list[Probe]:
    """Return one probe for every row with token ids: tokens spread over the response, and the Yes after the query."""
    probes = []
    for row in rows:
        response = row.sample.token_ids
        if row.prompt_ids is None or not response:
            continue
        ids = (*row.prompt_ids, *response, *chat.query.suffix_ids, chat.query.yes_ids[0])
        if max_length is not None and len(ids) > max_length:
            continue
        count = min(len(response), max_tokens - 1)
        places = [len(row.prompt_ids) + i * len(response) // count for i in range(count)]
        probes.append(Probe(ids, (*places, len(ids) - 1)))
    return probes


def check_adapter(
    engine: Engine, network: PreTrainedModel, probes: Sequence[Probe], *, earlier: AbstractContextManager | None = None
) -> float:
    """Return the mean absolute difference of log-probability between the engine and the trainer's model, in nats."""
    if not probes:
        raise InputError("The engine's adapter is checked on the earlier round's token ids, but its rows have none.")
    served, dtype = engine.describe(), str(network.get_input_embeddings().weight.dtype).removeprefix("torch.")
    exact = served["dtype"] == dtype == "float32"
    theirs, ours = _engine_logprobs(engine, probes), _network_logprobs(network, probes)
    difference, bound, null = _distance(theirs, ours), FLOAT32_TOLERANCE if exact else HALF_TOLERANCE, None
    if not exact and math.isfinite(difference) and difference > bound:
        null = _difference_without_adapter(engine, network, probes)
        bound = bound if null is None else max(bound, 2.0 * null)
    if difference <= bound and null is None:
        return difference
    problem = None
    if not difference <= bound:
        problem = f"{difference:.3g}"
    elif not _is_nearer(theirs, ours, network, probes, earlier):
        problem = f"{difference:.3g} and an engine that stands nearer to the earlier one"
    if problem is not None:
        apart = "" if null is None else f" (without the adapter they differ by {null:.3g})"
        raise AdapterMismatchError(
            f"The engine ({served['engine']}, {served['dtype']}) does not serve the trained adapter ({dtype}): "
            f"log-probabilities may differ by at most {bound:.3g} in the mean{apart}, but got {problem}. No sample was "
            "kept. Set the engine's `dtype` to the trainer's; with a quantised base, set `engine: transformers`."
        )
    _LOG.warning(
        f"The engine ({served['engine']}, {served['dtype']}) and the trainer's model ({dtype}) differ by "
        f"{difference:.3g} nats in the mean, and by {null:.3g} without the adapter: P(True) and targets of its samples "
        "are as far apart. `dtype: float32` would bring them together."
    )
    return difference


def _distance(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return math.fsum(abs(one - other) for one, other in zip(theirs, ours, strict=True)) / len(ours)


def _difference_without_adapter(engine: Engine, network: PreTrainedModel, probes: Sequence[Probe]) -> float | None:
    """Return how much the two differ without the adapter; None if it cannot be disabled."""
    from peft import PeftModel

    if not isinstance(network, PeftModel):
        return None
    try:
        theirs = _engine_logprobs(engine, probes, with_adapter=False)
    except ValueError:  # it is merged into the engine's weights
        return None
    with network.disable_adapter():
        return _distance(theirs, _network_logprobs(network, probes))


def _is_nearer(
    theirs: Sequence[float],
    ours: Sequence[float],
    network: PreTrainedModel,
    probes: Sequence[Probe],
    earlier: AbstractContextManager[Any] | None,
) -> bool:
    """Return whether the engine is nearer to the trained model than to the earlier one, or the two models agree.

    Projects on the line from the earlier (0) to the trained model (1); rounding noise is nearly orthogonal to it.
    """
    with earlier or cast(Any, network).disable_adapter():
        before = _network_logprobs(network, probes)
    if _distance(before, ours) <= HALF_TOLERANCE:
        return True
    way = [new - old for new, old in zip(ours, before, strict=True)]
    gone = math.fsum(step * (one - old) for step, one, old in zip(way, theirs, before, strict=True))
    return gone > 0.5 * math.fsum(step * step for step in way)


def _engine_logprobs(engine: Engine, probes: Sequence[Probe], *, with_adapter: bool = True) -> list[float]:
    logprobs = []
    for probe in probes:
        wanted = [probe.ids[place] for place in probe.places]
        columns = list(dict.fromkeys(wanted))
        prompts = [probe.ids[:place] for place in probe.places]
        table = engine.next_token_probabilities(prompts, columns, with_adapter=with_adapter)
        for row, token in zip(table, wanted, strict=True):
            if row is None:
                raise AdapterMismatchError("The engine refuses a recorded response, so its adapter cannot be checked.")
            logprobs.append(math.log(max(row[columns.index(token)], SMALLEST)))
    return logprobs


@torch.no_grad()
def _network_logprobs(network: PreTrainedModel, probes: Sequence[Probe]) -> list[float]:
    """Teacher-force the sequences through the trainer's model, with logits at the compared positions only."""
    device = network.device
    found: list[float] = []
    for probe in probes:
        ids = torch.tensor([probe.ids[:-1]], device=device)
        before = torch.tensor(probe.places, device=device) - 1
        mask = torch.ones_like(ids)
        with causal_lm.without_cudnn(), exact_head(network):
            (logits,) = network(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=before).logits
        wanted = torch.tensor([probe.ids[place] for place in probe.places], device=device)
        logprobs = logits.double().log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
        found += logprobs.clamp(min=math.log(SMALLEST)).tolist()
    return found


class QuestionTargets(NamedTuple):
    """The soft self-consistency of a question's readable responses."""

    task: str
    mean: float
    leader: str


def question_targets(index: SampleIndex, *, raw: bool = False, drop_none: bool = True) -> dict[str, QuestionTargets]:
    confidence = index.yes_mass if raw else index.p_true
    found: dict[str, QuestionTargets] = {}
    for start, stop in pairwise(index.edges):
        answers = index.answer[start:stop].tolist()
        known = [None if np.isnan(value) else float(value) for value in confidence[start:stop]]
        targets = consistency.soft_self_consistency(answers, known, drop_none=drop_none)
        pairs = [(x, said) for x, said in zip(targets, answers, strict=True) if x is not None and said is not None]
        if pairs:
            leader = max(pairs, key=lambda pair: pair[0])[1]
            mean = float(np.mean([target for target, _ in pairs]))
            found[str(index.question_id[start])] = QuestionTargets(str(index.task[start]), mean, leader)
    return found


def describe_round(index: SampleIndex, *, raw: bool = False, drop_none: bool = True) -> dict[str, float]:
    """Return statistics of a round's samples by keys without their stage, without undefined ones."""
    unreadable = np.array([answer is None for answer in index.answer], dtype=bool)
    confidence = index.yes_mass if raw else index.p_true
    targets = question_targets(index, raw=raw, drop_none=drop_none)
    values: dict[str, float | None] = {
        "rate/Unreadable": float(unreadable.mean()),
        "rate/Truncated": float((index.finish == "length").mean()),
        "rate/WithoutConfidence": float(np.isnan(confidence).mean()),
        "target/Mean": float(np.mean([target.mean for target in targets.values()])) if targets else None,
    }
    correct = index.labels
    if (labelled := ~np.isnan(correct)).any():
        codes = np.unique(index.question_index[labelled], return_inverse=True)[1]
        values[arrays.PASS_AT_1] = float((np.bincount(codes, correct[labelled]) / np.bincount(codes)).mean())
        scored = labelled & ~np.isnan(confidence)
        values[arrays.ECE] = calibration.expected_calibration_error(confidence[scored], correct[scored] > 0)
        values[arrays.AUROC] = discrimination.auroc(confidence[scored], correct[scored] > 0)
    return {name: value for name, value in values.items() if value is not None and not np.isnan(value)}


def describe_shift(earlier: Mapping[str, QuestionTargets], later: Mapping[str, QuestionTargets]) -> dict[str, float]:
    """Return how the targets changed over the questions with a target in both rounds; {} if there are none.

    ``shift/Mean`` and ``shift/MeanAbsolute`` are of a question's mean target, later minus earlier; ``shift/Spearman``
    is the rank correlation of these means; ``shift/LeaderKept`` the share of questions whose leading answer stayed.
    """
    pairs = [(earlier[name], later[name]) for name in sorted(earlier.keys() & later.keys())]
    if not pairs:
        return {}
    before, after = np.array([[one.mean, other.mean] for one, other in pairs]).T
    kept = [len(set(get_task(one.task).group([one.leader, other.leader]))) == 1 for one, other in pairs]
    values = {
        "shift/Mean": float((after - before).mean()),
        "shift/MeanAbsolute": float(np.abs(after - before).mean()),
        "shift/Spearman": discrimination.spearman(before, after),
        "shift/LeaderKept": float(np.mean(kept)),
    }
    return {name: value for name, value in values.items() if value is not None and not np.isnan(value)}
