"""The model whose capability is meant: what it is, its chat format, and an engine over it, opened when it is needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

from selfcal_lightning.confidence.scoring.model import ModelSettings, ScoringModel
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.checking import check_engine
from selfcal_lightning.engines.opening import open_engine
from selfcal_lightning.errors import InputError
from selfcal_lightning.prompts.chat_format import ChatFormat
from selfcal_lightning.prompts.given import USER_PROMPT
from selfcal_lightning.records import IMPORTED, ModelIdentity, PromptIdentity
from selfcal_lightning.store.manifest import StoreFingerprint

_HASHES = ("weights_sha256", "adapter_sha256")


class PromptModel:
    """A model that is given questions, and nothing else. Nothing is loaded before it is needed.

    An activated adapter sleeps over a prompt, so it takes no part: the capability is the base model's.

    Args:
        settings: Which model, and how it is run; its name may be None where a store names it.
        fingerprint: What the responses are whose questions are read; None without any.
        own_adapter: Whether the adapter must be the one that gave the responses: not where it was trained to be asked
            about them.

    Raises:
        InputError: The model is not there, or it is another one than that which gave the responses.
    """

    def __init__(
        self, settings: ModelSettings, fingerprint: StoreFingerprint | None = None, *, own_adapter: bool = True
    ) -> None:
        self._settings = settings
        self._compared = _HASHES if own_adapter else _HASHES[:1]
        self._named = ScoringModel(settings, fingerprint)
        check_engine(settings.engine, self._named.source)
        self._engine: Engine | None = None
        if fingerprint is not None and fingerprint.model.model != IMPORTED:
            self._check_is_that_of(fingerprint.model)
            self._check_puts_questions_as(fingerprint.prompt)

    def _check_is_that_of(self, sampled: ModelIdentity) -> None:
        wanted = {name: sampled.as_json()[name] for name in self._compared}
        found = [f"{name} {self.identity[name]}" for name in wanted if self.identity[name] != wanted[name]]
        if wanted["weights_sha256"] is not None and found:
            raise InputError(
                f"Expected the model and adapter that gave the responses, {sampled.model!r} with "
                f"{', '.join(f'{name} {value}' for name, value in wanted.items())}, but got {', '.join(found)}. A "
                "capability belongs to one model: name that one, or sample responses of this one."
            )

    def _check_puts_questions_as(self, sampled: PromptIdentity) -> None:
        found = self.prompt_identity["template_sha256"]
        if sampled.template_sha256 not in (None, found):
            raise InputError(
                f"Expected the chat template that the responses were sampled with, sha256 {sampled.template_sha256}, "
                f"but got {found} in {self.source}: its prompts are others. Put the template back, or sample anew."
            )

    @cached_property
    def identity(self) -> dict[str, str | None]:
        """Hashes of the weights, and of an adapter that is awake over prompts."""
        return {name: self._named.identity[name] for name in _HASHES}

    @property
    def source(self) -> str:
        """Folder or hub name of the model."""
        return self._named.source

    @property
    def chat(self) -> ChatFormat:
        """How questions are put."""
        return self._named.chat

    @cached_property
    def prompt_identity(self) -> dict[str, Any]:
        """What questions are put with: the template, and the user's own prompt where there is one."""
        described = self.chat.describe()
        return {name: described[name] for name in ("template_sha256", USER_PROMPT) if name in described}

    def open(self) -> Engine:
        """Return the engine, opened by the first call."""
        if self._engine is None:
            options = replace(self._settings.engine, revision=self._named.revision)
            self._engine = open_engine(options, self.source, chat=self.chat)
        return self._engine

    def close(self) -> None:
        """Give the engine back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> PromptModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
