"""The embedded engine: sampling with Hugging Face transformers in a loop over slots."""

import logging
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.engines.base import check_prompts, check_query, check_request, ends_with_query, response_room
from selfcal_lightning.engines.settings import LevelSettings, PromptStates
from selfcal_lightning.engines.transformers.model import CachedModel, SlotCache, load_network
from selfcal_lightning.engines.transformers.prefixes import chunks_of, nested_rows
from selfcal_lightning.engines.transformers.prompt_states import read_prompt_states
from selfcal_lightning.engines.transformers.slots import SlotRows, check_sleep, encode_contexts, read_queries
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.models.folders import read_invocation_ids, resolve_model, tensors_sha256, weights_sha256
from selfcal_lightning.records import Dtype, Finish, Request, Response

_LOG = logging.getLogger(__name__)
_DEFAULT_BATCH = 64
_HARVEST_SHARE = 8  # rows are answered, and new ones admitted, when one in eight of the batch has finished
_COMPACT_SHARE = 0.75  # rows are moved together when fewer than this share of the slots in use are live


class TransformersEngine:
    """Samples with a Hugging Face causal model, many requests at a time.

    Every request holds a slot: a row of the key-value cache and of a few tensors. A step feeds one token to all slots;
    requests that have finished are answered, their confidence query is read from their own cache, and waiting requests
    get their slots. A prompt is encoded once for all requests that share it. Rows have their own positions in the
    cache, so that long and short ones share a batch.

    Every request draws from its own stream of uniform numbers, made from its seed alone, and inverts the distribution
    function in float64. In float32 on a CPU its text therefore does not depend on what else is in the batch; in half
    precision or on a GPU, rounding depends on the shape of the batch, and a few texts with it.

    A small model on a CPU runs best with one thread (``torch.set_num_threads(1)``, or OMP_NUM_THREADS=1) and 128 slots;
    more threads than free cores make it many times slower.

    Args:
        model: Folder or hub name of a model with full or sliding-window attention, or "bundled".
        revision: Revision on the hub.
        adapter: Folder or hub name of a PEFT adapter. It is merged into the weights in float32, and kept apart in half
            precision, where merging would round it. With an activated one the engine samples with the base model alone,
            and reads the confidence query with the adapter over the same cache.
        dtype: "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: "auto" is the GPU where there is one.
        max_batch: Number of slots; None is 64. When a GPU runs out of memory it is halved, down to 1, and the work
            starts again.
        max_context: Longest prompt + response + query in tokens; None takes the model's own limit.
        chat: Chat format; None derives it from the model's tokenizer, with the default query.
    """

    def __init__(
        self,
        model: str,
        *,
        revision: str | None = None,
        adapter: str | None = None,
        dtype: Dtype = "auto",
        device: str = "auto",
        max_batch: int | None = None,
        max_context: int | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        model = resolve_model(model)
        chat = chat or ChatFormat(load_tokenizer(model, revision=revision))
        network = load_network(model, revision=revision, adapter=adapter, dtype=dtype, device=device)
        self._source: str | None = model
        self._revision = revision
        self._quantization: str | None = None
        self._adapter_sha256 = None if adapter is None else weights_sha256(adapter)
        self._query_ids = None if adapter is None else read_invocation_ids(adapter)
        self._start(network, chat, max_batch, max_context, borrowed=False)

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        chat: ChatFormat,
        *,
        max_batch: int | None = None,
        max_context: int | None = None,
        source: str | None = None,
        revision: str | None = None,
        adapter_sha256: str | None = None,
        quantization: str | None = None,
        query_ids: tuple[int, ...] | None = None,
    ) -> Self:
        """Serve a model that is in memory already, such as the one in training, on its device and in its dtype.

        It is in evaluation mode while the engine works. Its weights may change while nothing is in flight.

        Args:
            model: The model or its PEFT wrapper.
            chat: Chat format of its tokenizer.
            max_batch: Number of slots; None is 64.
            max_context: Longest prompt + response + query in tokens.
            source: Where its base weights come from, for ``describe``; None hashes the parameters in memory.
            revision: Revision of ``source``.
            adapter_sha256: Hash of its adapter, if it has one.
            quantization: How the weights of ``source`` were quantised, such as "nf4".
            query_ids: Tokens of the query that activates the adapter of ``model``; None if it is always active.
        """
        engine = cls.__new__(cls)
        engine._source, engine._revision, engine._quantization = source, revision, quantization
        engine._adapter_sha256, engine._query_ids = adapter_sha256, query_ids
        engine._start(model, chat, max_batch, max_context, borrowed=True)
        return engine

    def _start(
        self, network: PreTrainedModel, chat: ChatFormat, max_batch: int | None, max_context: int | None, borrowed: bool
    ) -> None:
        self.batch_size = _DEFAULT_BATCH if max_batch is None else max_batch
        check_at_least(1, max_batch=max_batch)
        self._model: CachedModel | None = CachedModel(network)
        limit = self._model.max_positions
        if max_context is None and limit is None:
            raise InputError("Expected `max_context` to be given, as the model's configuration states no limit.")
        if max_context is not None and not 1 < max_context <= (limit or max_context):
            range_ = "to be at least 2" if limit is None else f"to lie in [2, {limit}]"
            raise InputError(f"Expected `max_context` {range_}, but got {max_context}.")
        self.max_context: int = max_context or cast(int, limit)
        self.chat, self._borrowed = chat, borrowed
        eos = network.generation_config.eos_token_id
        self._ends = chat.end_of_turn_ids.union(eos if isinstance(eos, list) else [] if eos is None else [eos])
        self._end_ids = torch.tensor(sorted(self._ends), device=self._model.device)
        self._waiting: dict[str, Request] = {}
        self._rows = SlotRows(self.batch_size, self._end_ids)
        if self._query_ids is not None:
            check_query(chat.query.suffix_ids, self._query_ids)
            with torch.no_grad(), self._model.evaluation():
                check_sleep(self._model, self._query_ids)

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Queue ``requests`` and return their ids; where one is refused, none is queued."""
        self._require_model()
        taken = {*self._waiting, *(self._rows.held(slot).id for slot in self._rows.live())}
        for request in requests:
            if request.id in taken:
                raise InputError(f"Expected request ids to be unique in flight, but got {request.id!r} again.")
            taken.add(request.id)
            check_request(request, max_context=self.max_context, end_ids=self._ends, query_ids=self._query_ids)
        self._waiting.update((request.id, request) for request in requests)
        return [request.id for request in requests]

    def cancel(self, ids: Iterable[str]) -> dict[str, int]:
        """Drop requests and return the tokens drawn for those that hold a slot, by id."""
        dropped = set(ids)
        for i in dropped & self._waiting.keys():
            del self._waiting[i]
        slots = [slot for slot in self._rows.live() if self._rows.held(slot).id in dropped]
        drawn = self._rows.drawn(slots)
        thrown_away = {self._rows.held(slot).id: count for slot, count in zip(slots, drawn, strict=True)}
        self._rows.release(slots)
        return thrown_away

    def drawn_so_far(self, ids: Iterable[str]) -> dict[str, tuple[int, ...]]:
        wanted, rows = set(ids), self._rows
        slots = [slot for slot in rows.live() if rows.held(slot).id in wanted]
        ends = [len(rows.held(slot).prefix_ids) + n for slot, n in zip(slots, rows.drawn(slots), strict=True)]
        found = zip(slots, ends, strict=True)
        return {rows.held(s).id: tuple(rows.tokens[s, len(rows.held(s).prefix_ids) : e].tolist()) for s, e in found}

    def poll(self, patience: float | None = None) -> list[Response]:
        """Work until one in eight of the requests in the batch has finished, and return their responses."""
        until = math.inf if patience is None else time.monotonic() + patience
        model = self._require_model()
        while True:
            try:
                with torch.no_grad(), model.evaluation():
                    return self._work(model, until)
            except torch.cuda.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
            self._restart_with_half()

    def next_token_probabilities(
        self, prompts: Sequence[Sequence[int]], token_ids: Sequence[int], *, with_adapter: bool = True
    ) -> list[list[float] | None]:
        """Return p(token | prompt), ``[len(prompts)][len(token_ids)]``; see ``Engine``."""
        model = self._require_model()
        check_prompts(prompts, self.max_context)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        asked = {i for i in order if with_adapter and ends_with_query(prompts[i], self._query_ids)}
        wanted = torch.tensor(token_ids, dtype=torch.long, device=model.device)
        table: dict[int, list[float]] = {}
        bare = nullcontext() if with_adapter else self._without_adapter(model)
        with torch.no_grad(), model.evaluation(), bare:
            nested = self._nested_logits(model, [i for i in order if i not in asked], prompts)
            table.update((i, logits.double().softmax(-1)[wanted].tolist()) for i, logits in nested)
            for awake in (False, True):
                members = [i for i in order if (i in asked) == awake and i not in table]
                for chunk in chunks_of(members, lambda i: len(prompts[i]), self.batch_size):
                    logits = model.next_token_logits([prompts[i] for i in chunk], self._query_ids if awake else None)
                    p = logits.double().softmax(-1)[:, wanted].tolist()
                    table.update(zip(chunk, p, strict=True))
        return [table[i] for i in range(len(prompts))]

    def _nested_logits(
        self, model: CachedModel, members: Sequence[int], prompts: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield the logits after prompts that put the confidence query to contexts of which one begins another."""
        query = tuple(self.chat.query.suffix_ids)
        ending = [i for i in members if ends_with_query(prompts[i], query)]
        contexts = [tuple(prompts[i][: -len(query)]) for i in ending]
        rows = [row for row in nested_rows(contexts) if len(row.ends) > 1]
        for chunk in chunks_of(rows, lambda row: row.width(len(query)), self.batch_size):
            logits = model.nested_logits(chunk, contexts, query)
            yield from zip((ending[i] for row in chunk for i in row.members), logits, strict=True)

    def prompt_states(self, prompts: Sequence[Sequence[int]], settings: LevelSettings) -> PromptStates:
        """Return hidden states of prompts, float32; an activated adapter sleeps over them."""
        model = self._require_model()
        check_prompts(prompts, self.max_context)
        with torch.no_grad(), model.evaluation():
            return read_prompt_states(model, prompts, settings, max_batch=self.batch_size)

    def describe(self) -> dict[str, Any]:
        """Return what identifies the model. Weights are hashed once per folder, always for a model in training."""
        model = self._require_model()
        if self._source is None:
            weights = tensors_sha256(model.network.state_dict().items())
        else:
            weights = weights_sha256(self._source, revision=self._revision)
        adapter = self._adapter_sha256
        activated = self._query_ids is not None
        return {
            "engine": "transformers",
            "model": self._source,
            "revision": self._revision,
            "dtype": str(model.dtype).removeprefix("torch."),
            "weights_sha256": weights,
            # Texts and their log-probabilities are the base model's where the adapter is activated.
            "adapter_sha256": None if activated else adapter,
            "activated_adapter_sha256": adapter if activated else None,
            "quantization": self._quantization,
            "head_dtype": None if model.head_dtype == model.dtype else str(model.head_dtype).removeprefix("torch."),
        }

    def close(self) -> None:
        self._model = None
        self._waiting.clear()
        self._rows = SlotRows(self.batch_size, self._end_ids)

    def _without_adapter(self, model: CachedModel) -> AbstractContextManager[Any]:
        from peft import PeftModel

        if self._query_ids is not None:  # asleep as it is
            return nullcontext()
        if isinstance(model.network, PeftModel):
            return model.network.disable_adapter()
        if self._adapter_sha256 is None:
            return nullcontext()
        raise InputError("Expected a separate adapter, but got one that is merged into the float32 weights.")

    @property
    def network(self) -> PreTrainedModel:
        """The model, for what reads it between requests."""
        return self._require_model().network

    def _require_model(self) -> CachedModel:
        if self._model is None:
            raise RunError("Expected the engine to be open, but it has been closed. Build a new one.")
        return self._model

    def _work(self, model: CachedModel, until: float) -> list[Response]:
        if self._borrowed and not self._rows.live():
            self._rows.prompts = [None] * self.batch_size
        self._admit(model)
        if not (live := self._compacted(model)):
            return []
        slots_in_use = live[-1] + 1
        idle = slots_in_use - len(live)
        wanted = -(-len(live) // _HARVEST_SHARE)
        slots = torch.arange(slots_in_use, device=model.device)
        width = int(self._rows.position[:slots_in_use].max()) + 1
        while int(self._rows.done[:slots_in_use].sum()) - idle < wanted:
            if time.monotonic() > until:
                return []
            pending, position = self._rows.pending[:slots_in_use], self._rows.position[:slots_in_use]
            self._rows.advance(model.extend(slots, position, pending[:, None], width, leading=True)[:, -1])
            width += 1
        return self._harvest(model)

    def _admit(self, model: CachedModel) -> None:
        """Give free slots to waiting requests and encode their prompts, each distinct one once."""
        rows = self._rows
        requests = list(self._waiting.values())[: self.batch_size - len(rows.live())]
        if not requests:
            return
        slots = rows.choose(requests)
        for slot, request in zip(slots, requests, strict=True):
            if rows.prompts[slot] != request.prompt_ids:  # it is overwritten from here on, also where that breaks off
                rows.prompts[slot] = None
        encode_contexts(model, rows, dict(zip(slots, requests, strict=True)), most=self.batch_size)
        limits = [response_room(request, self.max_context) + len(request.prefix_ids) for request in requests]
        rows.admit(slots, requests, limits)
        for request in requests:
            del self._waiting[request.id]

    def _compacted(self, model: CachedModel) -> list[int]:
        """Move the last rows together and return their slots, while no response waits: it may run out of memory."""
        rows, live = self._rows, self._rows.live()
        if not live or self._waiting or len(live) >= _COMPACT_SHARE * (live[-1] + 1):
            return live
        model.cache.copy_slots(live, range(len(live)), int(rows.position[live].max()))
        rows.gather(live)
        return rows.live()

    def _harvest(self, model: CachedModel) -> list[Response]:
        rows = self._rows
        finished = [slot for slot, done in enumerate(rows.done.tolist()) if done and rows.requests[slot] is not None]
        where = torch.tensor(finished, device=model.device)
        counts, stopped, stepped = (each[where].tolist() for each in (rows.count, rows.stopped, rows.stepped))
        tokens, logprobs = rows.tokens[where].tolist(), rows.logprob[where].tolist()
        asked = [slot for slot in finished if rows.held(slot).query is not None]
        masses = read_queries(model, rows, asked, awake=self._query_ids is not None)
        responses = []
        for i, slot in enumerate(finished):
            request, (yes, no) = rows.held(slot), masses.get(slot, (None, None))
            token_ids = tuple(tokens[i][len(request.prefix_ids) : counts[i]])
            finish: Finish = "stop" if stopped[i] else "step" if stepped[i] else "length"
            responses.append(Response(request.id, self.chat.decode(token_ids), token_ids, finish, logprobs[i], yes, no))
        rows.release(finished)
        return responses

    def _restart_with_half(self) -> None:
        """Put what is in flight back into the queue, give the cache back and continue with half the slots."""
        flying = [self._rows.held(slot) for slot in self._rows.live()]
        self.batch_size //= 2
        _LOG.warning("Out of GPU memory with %d slots; going on with %d.", 2 * self.batch_size, self.batch_size)
        self._waiting = {request.id: request for request in [*flying, *self._waiting.values()]}
        self._rows = SlotRows(self.batch_size, self._end_ids)
        self._require_model().cache = SlotCache()
        torch.cuda.empty_cache()
