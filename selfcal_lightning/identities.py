"""Where responses come from: which weights made them, and how these were asked. No torch, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Which weights a response came from.

    Attributes:
        model: Folder or hub name; "imported" for responses made elsewhere.
        revision: Revision on the hub.
        weights_sha256: Hash of the weight files, None where unknown. Where it is known it decides, and a model may
            move to another folder.
        adapter_sha256: Likewise of a LoRA adapter, None without one.
        activated_adapter_sha256: Likewise of an adapter that is awake at the confidence query alone: confidences are
            its own, texts and their log-probabilities those of the model without it.
        quantization: How the weights were quantised as they were read, such as "nf4"; None where they were not.
        head_dtype: What the output layer computes in for P(True), where that differs from the model's dtype; else None.
        further: What else tells models apart, as plain JSON types.
    """

    model: str | None
    revision: str | None = None
    weights_sha256: str | None = None
    adapter_sha256: str | None = None
    activated_adapter_sha256: str | None = None
    quantization: str | None = None
    head_dtype: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> ModelIdentity:
        """Return the identity that :meth:`as_json` gave, or the part of a larger description that is one."""
        known = {name: content.get(name) for name in _names(cls)}
        return cls(**known, further={name: value for name, value in content.items() if name not in known})

    def as_json(self) -> dict[str, Any]:
        """Return the identity as plain JSON types, without what came later and is None.

        So the identities of stores that were written before there were any are still found.
        """
        known = {name: getattr(self, name) for name in _names(type(self))}
        for name in ("activated_adapter_sha256", "quantization", "head_dtype"):
            if known[name] is None:
                del known[name]
        return {**known, **self.further}


@dataclass(frozen=True, slots=True)
class PromptIdentity:
    """How questions and the confidence query were put to the model; None where that is unknown.

    Attributes:
        query: Text of the confidence query.
        suffix_ids: Token ids that follow a response to ask it.
        yes_ids: Token ids that count as Yes.
        no_ids: Likewise as No.
        template_sha256: Hash of the chat template.
        further: What else tells prompts apart, as plain JSON types: of imported responses, their source.
    """

    query: str | None = None
    suffix_ids: tuple[int, ...] | None = None
    yes_ids: tuple[int, ...] | None = None
    no_ids: tuple[int, ...] | None = None
    template_sha256: str | None = None
    further: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> PromptIdentity:
        """Return the identity that :meth:`as_json` or ``ChatFormat.describe`` gave."""
        known: dict[str, Any] = {name: content.get(name) for name in _names(cls)}
        ids = {name: tuple(known[name]) for name in ("suffix_ids", "yes_ids", "no_ids") if known[name] is not None}
        further = {name: value for name, value in content.items() if name not in known}
        return cls(**{**known, **ids, "further": further})

    def as_json(self) -> dict[str, Any]:
        """Return the identity as plain JSON types, without what is unknown."""
        known = {name: getattr(self, name) for name in _names(type(self))}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
        return {**{name: value for name, value in plain.items() if value is not None}, **self.further}

    @property
    def query_tokens(self) -> int:
        """Tokens that asking for a confidence costs a response; 0 where that is unknown."""
        return len(self.suffix_ids or ())


def _names(identity: type[ModelIdentity] | type[PromptIdentity]) -> list[str]:
    """Return the names of what an identity knows by name."""
    return [each.name for each in fields(identity) if each.name != "further"]
