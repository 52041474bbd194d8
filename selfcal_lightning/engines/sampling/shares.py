"""What a store has already, found out without loading the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.manifest import StoreFingerprint, round_file
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import question_digest
from selfcal_lightning.models.folders import adapter_identity, model_folder, weights_sha256
from selfcal_lightning.records import (
    ModelIdentity,
    PromptIdentity,
    Question,
    SamplingSettings,
    duplicate_ids,
    question_hash,
)

if TYPE_CHECKING:
    from selfcal_lightning.models.chat_format import ChatFormat


def check_questions(questions: Sequence[Question]) -> None:
    """Raise ValueError when there are no questions or an id occurs twice."""
    if not questions:
        raise InputError("Expected `questions` to hold at least one question, but got none.")
    if repeated := duplicate_ids(questions):
        raise InputError(
            f"Expected question ids to be unique, but got {len(repeated)} more than once, the first of them "
            f"{repeated[0]!r}. Give every question an id of its own, or name every task once."
        )


def select_share(questions: Sequence[Question], shard: tuple[int, int]) -> list[Question]:
    """Return the questions of share i of n, ``shard = (i, n)``."""
    number, total = shard
    if not 0 <= number < total:
        raise InputError(f"Expected `shard` to be (i, n) with 0 <= i < n, but got {shard}.")
    return [question for question in questions if question_hash(question.id) % total == number]


def missing_questions(questions: Sequence[Question], store: SampleStore, *, split: str, round: int) -> list[Question]:
    """Return the questions that no part of the store has committed, or with fewer samples than are wanted of them.

    Those are as many as the store was opened for, or as it says that questions of the split have.
    """
    stored = store.stored_questions(round=round, include_parts=True)
    for question in questions:
        found = stored.get(question.id)
        if found is not None and found.split != split:
            raise InputError(
                f"Expected question {question.id!r} to be in split {split!r}, but got {found.split!r} in the store "
                f"{store.path}. A question belongs to one split: remove it from one, or use another `store_dir`."
            )
        if found is not None and found.digest != question_digest(question):
            raise InputError(
                f"Expected question {question.id!r} to be as it was when the store {store.path} was sampled, but got "
                "another task, wording or reference. Use another `store_dir`, or go back to the earlier questions."
            )
    wanted = store.num_samples or store.round_manifest(round).samples_of(split) or 0
    return [question for question in questions if question.id not in stored or stored[question.id].samples < wanted]


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
    extend: bool = False,
) -> SampleStore | None:
    """Return the store in ``store_dir`` if it has ``round``, checked against what is asked for; else None."""
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
        store_dir, fingerprint, num_samples=num_samples, engine={}, round=round, splits=splits, extend=extend
    )


def is_complete(
    store: SampleStore | None,
    splits: Mapping[str, Sequence[Question]],
    *,
    shard: tuple[int, int] = (0, 1),
    round: int = 0,
) -> bool:
    """Return whether ``store`` holds ``round`` of share ``shard = (i, n)`` of the questions of every split."""
    if store is None:
        return False
    shares = {split: select_share(questions, shard) for split, questions in splits.items()}
    return not any(missing_questions(share, store, split=split, round=round) for split, share in shares.items())
