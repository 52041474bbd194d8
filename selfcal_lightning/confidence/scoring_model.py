"""The model that scores recorded responses, given by the user or by the store, and loaded on demand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.base import RESPONSE_PROBE, Estimator
from selfcal_lightning.confidence.registry import ESTIMATORS, REWARDS
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import check_marker
from selfcal_lightning.data.store.manifest import StoreFingerprint
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import expected_head_dtype, open_engine, serve_model
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.models import folders
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat, load_tokenizer, stated_prompt
from selfcal_lightning.records import IMPORTED, ModelIdentity, PromptIdentity

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from selfcal_lightning.confidence.response_probe import ResponseProbe
    from selfcal_lightning.confidence.token_reader import TokenReader

ACTIVATED = "activated_adapter_sha256"


@dataclass(frozen=True)
class ModelSettings:
    model: str | None  # folder or hub name; None uses the one that sampled the store, with its revision
    query: str | None  # the confidence query; None uses the store's
    engine: EngineOptions
    reward: RewardSettings = field(default_factory=RewardSettings)


class ScoringModel:
    """Provides estimators with an engine, a local model for token statistics, or a reward model, loaded on demand."""

    def __init__(self, settings: ModelSettings, fingerprint: StoreFingerprint | None = None) -> None:
        self.settings = settings
        self._sampled = ModelIdentity(None) if fingerprint is None else fingerprint.model
        self._prompt = PromptIdentity() if fingerprint is None else fingerprint.prompt
        self._engine: Engine | None = None
        self._tokens: TokenReader | None = None
        self._rewards: Any = None

    @cached_property
    def source(self) -> str:
        if self.settings.model is not None:
            return folders.resolve_model(self.settings.model)
        sampled = self._sampled
        if sampled.model in (None, IMPORTED):
            raise InputError("Expected `model` to name the model that scores: the responses were made elsewhere.")
        if sampled.adapter_sha256 is not None and self.settings.engine.adapter is None:
            raise InputError(f"Name `model` and `adapter`: the store was sampled with an adapter on {sampled.model!r}.")
        source = folders.resolve_model(sampled.model)
        try:
            folders.check_name(source, revision=sampled.revision)
        except InputError as error:
            way_out = "Name as `model` the folder or hub name where it is now; its weights are compared."
            raise InputError(f"There is no {sampled.model!r}, which sampled the store. {way_out}") from error
        return source

    @property
    def revision(self) -> str | None:
        """Revision on the hub; the store's if its model is used."""
        return self._sampled.revision if self.settings.model is None else self.settings.engine.revision

    @cached_property
    def identity(self) -> dict[str, str | None]:
        folders.model_folder(self.source, revision=self.revision)  # a model of the hub is hashed where it lies
        weights = folders.weights_sha256(self.source, revision=self.revision)
        found = {"weights_sha256": weights, **folders.adapter_identity(self.settings.engine.adapter)}
        named = self.settings.model is not None or found["adapter_sha256"] is not None
        if not named and not self._sampled_the_store(found):
            raise InputError(
                f"The weights of {self.source!r} are not those that sampled the store. Name `model` to score with them."
            )
        return found

    def made_the_stored(self, name: str) -> bool:
        """Return whether the estimator ``name`` would reproduce the values stored with the samples."""
        if ESTIMATORS[name].reads == "rewards" or not self._sampled_the_store(self.identity):
            return False
        # Only P(True) depends on the query, on an activated adapter, and on the output layer's dtype.
        if ESTIMATORS[name].reads != "engine":
            return True
        asked = PromptIdentity.from_json(self.chat.describe()), self.identity.get(ACTIVATED), self._head_dtype
        return asked == (self._prompt, self._sampled.activated_adapter_sha256, self._sampled.head_dtype)

    def _sampled_the_store(self, identity: dict[str, str | None]) -> bool:
        sampled = self._sampled.as_json()
        return all(sampled[name] == value for name, value in identity.items() if name != ACTIVATED)

    @cached_property
    def chat(self) -> ChatFormat:
        """Chat format with the confidence query: as given, else the store's, else the default."""
        prompt = stated_prompt(self._prompt.further)
        query = self.settings.query or self._prompt.query or DEFAULT_QUERY
        return ChatFormat(load_tokenizer(self.source, revision=self.revision), query=query, prompt=prompt)

    def origin(self, name: str, estimator_settings: dict[str, Any]) -> dict[str, Any]:
        """Return everything the values of the estimator ``name`` depend on, as JSON types."""
        origin = {"estimator": name, "settings": estimator_settings}
        reads = ESTIMATORS[name].reads
        if reads == "pool":
            return origin
        if reads == "rewards":
            return {**origin, "reward_model": REWARDS.identity(self.settings.reward)}
        if reads == "engine":
            read_by = {"head_dtype": self._head_dtype} if self._head_dtype else {}
            return {**origin, "model": self.identity | read_by, "prompt": self.chat.describe()}
        if name != RESPONSE_PROBE:
            return {**origin, **self.states_origin}
        digest = self.response_probe(estimator_settings["probe"]).digest
        return {**origin, "settings": {"probe": digest}, **self.probe_origin}

    @property
    def states_origin(self) -> dict[str, Any]:
        """What statistics and states of a response's own tokens depend on: not the query that may follow it."""
        model = {part: value for part, value in self.identity.items() if part != ACTIVATED}
        return {"model": model, "prompt": {"template_sha256": self.chat.describe()["template_sha256"]}}

    @property
    def probe_origin(self) -> dict[str, Any]:
        """What the states of a response probe depend on: one of them stands at the end of the query."""
        return self.states_origin | {"query": self.chat.query_text}

    def response_probe(self, path: str | None) -> ResponseProbe:
        from selfcal_lightning.confidence.fitted_files import check_states_origin
        from selfcal_lightning.confidence.response_probe import load_response_probe

        probe = load_response_probe(path)
        check_states_origin(probe.origin, self.probe_origin)
        return probe

    @property
    def _head_dtype(self) -> str | None:
        return expected_head_dtype(self.settings.engine)

    def build(self, name: str, settings: dict[str, Any]) -> Estimator:
        kind = ESTIMATORS[name]
        if kind.reads == "pool":
            return kind(**settings)
        if "steps" in settings:
            check_marker(self.chat.tokenizer, settings["steps"])
        if kind.reads == "engine":
            return kind(self._open_engine(), self.chat, **settings)
        if kind.reads == "rewards":
            self._rewards = self._rewards or REWARDS.open(self.settings.reward, self.settings.engine.dtype)
            return kind(self._rewards, **settings)
        if name == RESPONSE_PROBE:
            settings = {"probe": self.response_probe(settings["probe"])}
        return kind(self.tokens(), **settings)

    def close(self) -> None:
        for opened in (self._engine, self._rewards):
            if opened is not None:
                opened.close()
        self._engine = self._rewards = None

    def _open_engine(self) -> Engine:
        if self._engine is not None:
            return self._engine
        options = replace(self.settings.engine, revision=self.revision)
        if options.name == "transformers":  # one model in memory for this and for statistics of tokens
            opened: Engine = serve_model(
                options,
                self._network,
                chat=self.chat,
                source=self.source,
                adapter_sha256=self.identity.get(ACTIVATED) or self.identity["adapter_sha256"],
                query_ids=None if options.adapter is None else folders.read_invocation_ids(options.adapter),
            )
        else:
            opened = open_engine(options, self.source, chat=self.chat)
        self._engine = opened
        return opened

    def tokens(self) -> TokenReader:
        if self._tokens is None:
            from selfcal_lightning.confidence.token_reader import TokenReader

            if self._engine is not None and self.settings.engine.name != "transformers":  # it has a copy of its own
                self._engine.close()
                self._engine = None
            self._tokens = TokenReader(self._network, self.chat)
        return self._tokens

    @cached_property
    def _network(self) -> PreTrainedModel:
        from selfcal_lightning.engines.transformers.model import load_network

        options = self.settings.engine
        return load_network(
            self.source, revision=self.revision, adapter=options.adapter, dtype=options.dtype, device="auto"
        )
