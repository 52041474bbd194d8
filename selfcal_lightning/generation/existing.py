"""What a store has already, found out without loading the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfcal_lightning.generation.shares import missing_questions, select_share
from selfcal_lightning.identities import ModelIdentity, PromptIdentity
from selfcal_lightning.model_files.fingerprints import weights_sha256
from selfcal_lightning.model_files.locations import model_folder
from selfcal_lightning.models.adapter_files import adapter_identity
from selfcal_lightning.records import Question, SamplingSettings
from selfcal_lightning.store.manifest import round_file
from selfcal_lightning.store.sample_store import SampleStore, StoreFingerprint

if TYPE_CHECKING:
    from selfcal_lightning.prompts.chat_format import ChatFormat


def open_existing(
    store_dir: str | Path,
    *,
    model: str,
    revision: str | None,
    chat: ChatFormat,
    sampling: SamplingSettings,
    seed: int,
    num_samples: int | None,
    adapter: str | None = None,
    quantization: str | None = None,
    plan: str | None = None,
    round: int = 0,
    splits: Collection[str] = (),
    top_up: bool = False,
) -> SampleStore | None:
    """Return the store in ``store_dir`` if it has ``round``, held against what is asked for; None where it has not.

    This is what an engine over the model would be held against, known without starting one: a run that has nothing
    left to do, or whose settings are others than the store's, ends in seconds. Only what the output layer computes in
    for P(True) is the engine's own affair: it is held against the store where samples are added.

    Args:
        store_dir: Folder of the store.
        model: Folder or hub name of the model, "bundled" already resolved.
        revision: Revision on the hub.
        chat: Renders prompts and the confidence query.
        sampling: How to draw.
        seed: Seed of the run.
        num_samples: Responses to each question; None where a plan tells.
        adapter: Folder of a LoRA adapter.
        quantization: How the engine's weights are quantised, such as "nf4".
        plan: Digest of a plan by which questions have different numbers of responses; None without one.
        round: Generation round.
        splits: The splits that are meant, which may have more samples than others.
        top_up: Whether these are to have ``num_samples`` from now on, where they have fewer.

    Raises:
        ValueError: The store has samples of another model, prompt, sampling or seed, or fewer a question.
    """
    if not round_file(Path(store_dir), round).exists():
        return None
    head_dtype = SampleStore(store_dir).round_manifest(round).fingerprint.model.head_dtype
    model_folder(model, revision=revision)  # the weights are hashed where they lie
    identity = ModelIdentity(
        model,
        revision,
        weights_sha256=weights_sha256(model, revision=revision),
        **adapter_identity(adapter),
        quantization=quantization,
        head_dtype=head_dtype,
    )
    fingerprint = StoreFingerprint(identity, PromptIdentity.from_json(chat.describe()), sampling, seed, plan)
    return SampleStore.create_or_open(
        store_dir, fingerprint, num_samples=num_samples, engine={}, round=round, splits=splits, top_up=top_up
    )


def is_complete(
    store: SampleStore | None,
    splits: Mapping[str, Sequence[Question]],
    *,
    shard: tuple[int, int] = (0, 1),
    round: int = 0,
) -> bool:
    """Return whether ``store`` holds ``round`` of share ``shard = (i, n)`` of the questions of every split.

    Raises:
        ValueError: A question lies there with another wording or reference, or in another split.
    """
    if store is None:
        return False
    shares = {split: select_share(questions, shard) for split, questions in splits.items()}
    return not any(missing_questions(share, store, split=split, round=round) for split, share in shares.items())
