"""``selfcal fit-probe``: a linear probe that reads the model's capability from a question, in closed form."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from selfcal_lightning.capability.inputs import feature_folder, load_capability_pool, states_of
from selfcal_lightning.capability.probe import CapabilityProbe, check_probe_target
from selfcal_lightning.capability.probe_fitting import checked_targets, fit_probe
from selfcal_lightning.capability.prompt_model import PromptModel
from selfcal_lightning.capability.question_table import question_table
from selfcal_lightning.confidence.scoring.model import ModelSettings
from selfcal_lightning.engines.hidden_states import LevelSettings, check_gives_hidden_states
from selfcal_lightning.engines.settings import EngineSettings


def run_fit_probe(
    pool: str,
    output: str,
    *,
    split: str | None = "train",
    task: str | None = None,
    target: Literal["agreeing_pairs", "top_share", "label"] = "agreeing_pairs",
    target_draws: int | None = None,
    features: Literal["both", "token_mean", "last_token"] = "both",
    levels: list[int] | None = None,
    average: bool = True,
    final_norm: bool = True,
    features_dir: str | None = None,
    model: str | None = None,
    revision: str | None = None,
    adapter: str | None = None,
    engine: EngineSettings = EngineSettings(),
    seed: int = 0,
) -> CapabilityProbe:
    """Fit a linear probe of hidden states to the capability that recorded responses show, without labels by default.

    The penalty is chosen by leaving each question out in turn. Two or three responses to each of many questions teach
    more than many responses to few. Hidden states are kept beside the responses and are not read twice.

    Args:
        pool: Folder of a store, or a JSON-lines pool.
        output: Folder of the probe, new or of an earlier one.
        split: Split of the pool; null takes all questions.
        task: Task to read; of a file, the task of all its questions.
        target: What the probe predicts: "agreeing_pairs", the share of pairs of responses that agree, and "top_share"
            need no labels; "label" is the share of right responses. Where the model gives one wrong answer again and
            again, pairs are too high.
        target_draws: Binomial noise on the targets, as if a question had so few responses: 1 is the verdict on a single
            one, drawn at random. Null takes what all responses show.
        features: Vectors of a prompt: its last token, the mean over its tokens, or both side by side.
        levels: Layers whose output is read, 0 being the embedding and -1 the last; null takes all.
        average: Whether the mean over the layers is taken instead of all of them side by side.
        final_norm: Whether the last layer is read behind the model's final normalisation.
        features_dir: Where hidden states are kept; null is a folder in the store, or in `output` for a file.
        model: Folder or hub name of the model, or "bundled"; null takes the one that sampled the store.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter that the responses were sampled with.
        engine: What reads hidden states: transformers, on the dtype and the batch that are given.
        seed: Of the noise on the targets.

    Returns:
        The probe.

    Raises:
        InputError: The responses are not the model's, do not give the target, or give the same for all questions.
    """
    check_gives_hidden_states(engine)
    check_probe_target(output)
    settings = LevelSettings(None if levels is None else tuple(levels), average, final_norm)
    read = load_capability_pool(pool, split=split, task=task)
    wanted = checked_targets(question_table(read.pool.entries), target, draws=target_draws, seed=seed)
    named = ModelSettings(model, None, engine.of(revision=revision, adapter=adapter))
    with PromptModel(named, read.fingerprint) as prompt_model:
        store = read.path if read.path.is_dir() else None
        folder = feature_folder(
            prompt_model, settings, store=store, given=features_dir, beside=Path(output) / "features"
        )
        states, origin = states_of(prompt_model, read.questions, settings, folder)
    probe = fit_probe(
        states, read.pool.entries, target=target, pooling=features, origin=origin, sampling=read.sampling,
        draws=target_draws, seed=seed,
    )  # fmt: skip
    probe.save(output)
    sys.stdout.write(f"{describe_probe(probe, spread=float(wanted.var()))}\nWritten: {output}\n")
    return probe


def describe_probe(probe: CapabilityProbe, *, spread: float) -> str:
    """Return in words what was fitted and how well it predicts questions that it was not fitted on.

    Args:
        probe: The probe.
        spread: Variance of its targets, the squared error of a constant.
    """
    return (
        f"Fitted on {probe.fitted_on.num_questions:,} questions with {probe.fitted_on.num_responses:,} responses: "
        f"{probe.head.num_features:,} features ({probe.pooling}), target {probe.target}, penalty {probe.penalty:.3g}. "
        f"Left out in turn, a question's {probe.target} is predicted with a squared error of {probe.error:.4f}; a "
        f"constant has {spread:.4f}."
    )
