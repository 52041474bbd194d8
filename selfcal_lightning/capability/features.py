"""Hidden states of prompts, and the model that they are read from."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from selfcal_lightning.confidence.scoring_model import ModelSettings, ScoringModel
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import Progress
from selfcal_lightning.data.store.features import FeatureFolder, feature_folder, tokens_digest
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import check_engine, open_engine, weights_dtype
from selfcal_lightning.engines.settings import LevelSettings, PromptStates
from selfcal_lightning.models.chat_format import USER_PROMPT, ChatFormat
from selfcal_lightning.records import IMPORTED, Question

if TYPE_CHECKING:
    from selfcal_lightning.engines.transformers.engine import TransformersEngine

_HASHES = ("weights_sha256", "adapter_sha256")


class PromptModel(AbstractContextManager):
    """A model that reads prompts, opened when it is needed.

    An activated adapter is inactive on a prompt: the capability is the base model's.
    """

    def __init__(
        self, settings: ModelSettings, fingerprint: StoreFingerprint | None = None, *, own_adapter: bool = True
    ) -> None:
        self._named = ScoringModel(settings, fingerprint)
        check_engine(settings.engine, self._named.source)
        self._engine: Engine | None = None
        if fingerprint is not None and fingerprint.model.model != IMPORTED:
            self._check_sampled(fingerprint, _HASHES if own_adapter else _HASHES[:1])

    def _check_sampled(self, by: StoreFingerprint, compared: Sequence[str]) -> None:
        wanted = {name: by.model.as_json()[name] for name in compared}
        found = [f"{name} {self.identity[name]}" for name in wanted if self.identity[name] != wanted[name]]
        if wanted["weights_sha256"] is not None and found:
            sampled = f"{by.model.model!r} with {', '.join(f'{name} {value}' for name, value in wanted.items())}"
            raise InputError(
                f"Expected the model and adapter that gave the responses, {sampled}, but got {', '.join(found)}. Name "
                "that one, or sample responses of this one."
            )
        template, own = by.prompt.template_sha256, self.prompt_identity["template_sha256"]
        if template not in (None, own):
            differing = f"another chat template, {template}, than that of {self._named.source}, {own}"
            raise InputError(f"The responses were sampled with {differing}. Restore it, or sample again.")

    @cached_property
    def identity(self) -> dict[str, str | None]:
        """Hashes of the weights, and of an adapter that is active on prompts."""
        return {name: self._named.identity[name] for name in _HASHES}

    @property
    def dtype(self) -> str:
        return weights_dtype(self._named.settings.engine)

    @property
    def chat(self) -> ChatFormat:
        return self._named.chat

    @cached_property
    def prompt_identity(self) -> dict[str, Any]:
        """Digests of the chat template and of the user's own prompt, if any."""
        described = self.chat.describe()
        return {name: described[name] for name in ("template_sha256", USER_PROMPT) if name in described}

    def open(self) -> Engine:
        if self._engine is None:
            options = replace(self._named.settings.engine, revision=self._named.revision)
            self._engine = open_engine(options, self._named.source, chat=self.chat)
        return self._engine

    def __exit__(self, *_: object) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


CHUNK_QUESTIONS = 512


def feature_origin(model: PromptModel, settings: LevelSettings) -> dict[str, Any]:
    """Return what a probe of features depends on, JSON-able: weights, adapter, template and levels."""
    levels = {**asdict(settings), "levels": None if settings.levels is None else list(settings.levels)}
    return {"model": model.identity, "prompt": model.prompt_identity, "states": levels}


def open_features(
    model: PromptModel, settings: LevelSettings, *, store: Path | None, given: str | None, beside: Path | None = None
) -> FeatureFolder:
    """Return the folder that keeps hidden states, those of each dtype apart."""
    kept = feature_origin(model, settings) | {"dtype": model.dtype}
    folder = feature_folder(kept, store=store, given=given, beside=beside)
    folder.open(kept)
    return folder


def read_features(
    model: PromptModel, questions: Sequence[Question], folder: FeatureFolder, settings: LevelSettings
) -> PromptStates:
    """Return the hidden states of questions in their order; missing ones are read into ``folder``, chunk by chunk."""
    prompts = [model.chat.prompt_ids(question.messages) for question in questions]
    keys = [(question.id, tokens_digest(ids)) for question, ids in zip(questions, prompts, strict=True)]
    known = folder.keys()
    # Prompts of similar length together, since shorter ones are padded.
    rows = sorted((row for row, key in enumerate(keys) if key not in known), key=lambda row: len(prompts[row]))
    if rows:
        reader = cast("TransformersEngine", model.open())
        with Progress(len(rows), label=f"Reading hidden states into {folder.path}", unit="prompts") as progress:
            for start in range(0, len(rows), CHUNK_QUESTIONS):
                chunk = rows[start : start + CHUNK_QUESTIONS]
                states = reader.prompt_states([prompts[row] for row in chunk], settings)
                folder.write([keys[row] for row in chunk], vars(states))
                progress.update(len(chunk))
    return PromptStates(**folder.read(keys))
