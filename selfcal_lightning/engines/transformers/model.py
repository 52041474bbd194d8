"""A Hugging Face causal model as the transformers engine sees it: slots in, logits out."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.engines.transformers.prefixes import NestedRow, nested_batch, padded, shared_stems
from selfcal_lightning.models import folders
from selfcal_lightning.models.activated import adapter_asleep, load_sleeping_adapter
from selfcal_lightning.models.causal_lm import evaluation_mode, is_slow_in_bfloat16, without_cudnn
from selfcal_lightning.models.outputs import float32_logits


def exact_head(network: PreTrainedModel) -> AbstractContextManager[Any]:
    """Let the output layer of a model in half precision compute in float32 in a block, where it is a plain one.

    In half precision a logit of 16 to 32 has steps of 1/8, and a P(True) that is read from two of them steps of .03.
    """
    head = network.get_output_embeddings()
    if is_exact(network) and head.weight.dtype in (torch.bfloat16, torch.float16):
        return head.register_forward_hook(_logits_in_float32)
    return nullcontext()


def is_exact(network: PreTrainedModel) -> bool:
    """Return whether the output layer can compute in float32: not where it is adapted or quantised."""
    return type(network.get_output_embeddings()) is torch.nn.Linear


def _logits_in_float32(head: torch.nn.Linear, inputs: tuple[Tensor, ...], _: Tensor) -> Tensor:
    (hidden,) = inputs
    return float32_logits(hidden.flatten(0, -2), head.weight, head.bias).unflatten(0, hidden.shape[:-1])


_WIDTH_STEP = 64
_GROUPED = "selfcal_grouped_sdpa"
Masks = Tensor | dict[str, Tensor]  # additive, of all layers or by their kind
MASKABLE_ATTENTION = ("sdpa", "eager", _GROUPED)


class SlotCache(Cache):
    """A key-value cache of fixed slots, written in place, with every row at its own position."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._num_slots = 0
        self._width = 0

    def plan(self, slots: Tensor, columns: Tensor, read_width: int, *, leading: bool) -> None:
        self._slots, self._columns, self._read_width, self._leading = slots, columns, read_width, leading

    def reserve(self, num_slots: int, width: int) -> None:
        if num_slots <= self._num_slots and width <= self._width:
            return
        self._num_slots = max(num_slots, self._num_slots)
        self._width = max(_rounded(width), self._width)
        for stored in (self._keys, self._values):
            for layer, old in enumerate(stored):
                new = old.new_zeros(self._num_slots, old.shape[1], self._width, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                stored[layer] = new

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], width: int) -> None:
        """Copy the first ``width`` columns of ``sources`` to ``targets``, as if all at once."""
        if not self._keys or not width or not sources:
            return
        device = self._keys[0].device
        read, write = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for stored in (*self._keys, *self._values):
            stored[write, :, :width] = stored[read, :, :width]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [rows, heads, tokens, head_dim] by the plan and return what the rows attend to."""
        if layer_idx == len(self._keys):
            for stored, states in ((self._keys, key_states), (self._values, value_states)):
                _, heads, _, head_dim = states.shape
                stored.append(states.new_zeros(self._num_slots, heads, self._width, head_dim))
        return self._exchange(self._keys[layer_idx], key_states), self._exchange(self._values[layer_idx], value_states)

    def _exchange(self, stored: Tensor, states: Tensor) -> Tensor:
        heads = torch.arange(states.shape[1], device=states.device)[:, None]
        index = (self._slots[:, None, None] * stored.shape[1] + heads) * self._width + self._columns[:, None]
        flat = stored.view(-1, states.shape[-1])
        flat.index_copy_(0, index.flatten(), states.reshape(-1, states.shape[-1]))
        rows = stored[: len(self._slots)] if self._leading else stored[self._slots, :, : self._read_width]
        return rows[:, :, : self._read_width]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows stand at different positions, which are always passed in."""
        return 0


def grouped_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does, without repeating keys and values for the query heads that share them.

    The heads of a group stand as further queries of their key head, so that the cache is read in place: four times
    faster than with the copies on a CPU.
    """
    rows, heads, tokens, head_dim = query.shape
    group = heads // key.shape[1]
    if group == 1 or kwargs.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    stacked = query.reshape(rows, key.shape[1], group * tokens, head_dim)
    mask = attention_mask if tokens == 1 else attention_mask.repeat(1, 1, group, 1)
    output = torch.nn.functional.scaled_dot_product_attention(stacked, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, tokens, value.shape[-1]).transpose(1, 2), None


class CachedModel:
    """A causal model with a slot cache."""

    def __init__(self, network: PreTrainedModel) -> None:
        config = network.config.get_text_config()
        if config._attn_implementation not in MASKABLE_ATTENTION:
            found = f"{config._attn_implementation!r}. Load it with attn_implementation='sdpa'"
            raise InputError(f"Expected the model's attention to be one of {MASKABLE_ATTENTION}, but got {found}.")
        self.network = network
        embedding = cast(Tensor, network.get_input_embeddings().weight)
        self.device, self.dtype = embedding.device, embedding.dtype
        self.head_dtype = torch.float32 if is_exact(network) else self.dtype
        self.max_positions: int | None = getattr(config, "max_position_embeddings", None)
        self._window, self._mixes_windows = _sliding_window(config)
        self.cache = SlotCache()

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Keep the model in evaluation mode, its attention grouped and off cuDNN; give all back as it was."""
        implementation = self.network.config._attn_implementation
        if implementation == "sdpa":
            AttentionInterface.register(_GROUPED, grouped_sdpa)
            self.network.set_attn_implementation(_GROUPED)
        try:
            in_one_piece = self.network.get_output_embeddings().register_forward_pre_hook(
                lambda _, inputs: (inputs[0].contiguous(), *inputs[1:])
            )
            with evaluation_mode(self.network), without_cudnn(), in_one_piece:
                yield
        finally:
            if implementation == "sdpa":
                self.network.set_attn_implementation(implementation)

    def extend(
        self,
        slots: Tensor,
        starts: Tensor,
        ids: Tensor,
        width: int | None = None,
        *,
        cache: SlotCache | None = None,
        leading: bool = False,
        keep: Tensor | None = None,
        in_float32: bool = False,
        awake: bool = False,
    ) -> Tensor:
        """Append ``ids`` [rows, tokens] to ``slots`` [rows] at ``starts`` [rows]; return logits [rows, kept, V].

        Rows attend to ``width`` columns; None is as many as the tokens reach (on a GPU this waits for it). ``leading``
        slots are 0, 1, 2, ..., which are read in place. ``keep`` are the positions in ``ids`` whose logits are
        returned, None the last. ``awake`` lets an activated adapter read the tokens.
        """
        cache = self.cache if cache is None else cache
        width = _rounded(int(starts.max()) + ids.shape[1] if width is None else width)
        cache.reserve(len(slots) if leading else int(slots.max()) + 1, width)
        columns = starts[:, None] + torch.arange(ids.shape[1], device=self.device)
        cache.plan(slots, columns, width, leading=leading)
        masks = self._causal_masks(columns[:, None, :, None], torch.arange(width, device=self.device))
        exact = exact_head(self.network) if in_float32 else nullcontext()
        with exact, adapter_asleep(self.network, asleep=False) if awake else nullcontext():
            return self._run(ids, columns, masks, cache, keep)

    def query_logits(
        self, contexts: Sequence[Sequence[int]], query_ids: Sequence[int], *, awake: bool = True
    ) -> Tensor:
        """Return the logits after the query behind each context, [contexts, vocabulary], without touching the slots.

        The base model reads the contexts, and what several begin with once; an activated adapter reads the query where
        it is ``awake``. The output layer computes in float32.
        """
        rows = torch.arange(len(contexts), device=self.device)
        lengths = torch.tensor([len(ids) for ids in contexts], device=self.device)
        query = torch.tensor(query_ids, device=self.device).repeat(len(contexts), 1)
        cache, width = SlotCache(), max(map(len, contexts)) + len(query_ids)
        cache.reserve(len(contexts), width)
        stems = shared_stems(contexts)
        self._read(cache, [(stem.members[0], 0, contexts[stem.members[0]][: stem.length]) for stem in stems])
        copies = [(stem.members[0], member) for stem in stems for member in stem.members[1:]]
        cache.copy_slots([source for source, _ in copies], [target for _, target in copies], width)
        rests = sorted((i, stem.length) for stem in stems for i in stem.members if stem.length < len(contexts[i]))
        self._read(cache, [(i, start, contexts[i][start:]) for i, start in rests])
        logits = self.extend(rows, lengths, query, width, cache=cache, leading=True, in_float32=True, awake=awake)
        return logits[:, -1]

    def _read(self, cache: SlotCache, segments: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        """Read tokens into slots: (slot, position of the first, tokens)."""
        if segments:
            slots, starts, rows = zip(*segments, strict=True)
            where, begin = torch.tensor(slots, device=self.device), torch.tensor(starts, device=self.device)
            self.extend(where, begin, padded(rows, self.device), cache=cache)

    def next_token_logits(self, sequences: Sequence[Sequence[int]], query_ids: Sequence[int] | None = None) -> Tensor:
        """Return the logits after each sequence, [sequences, vocabulary], from an output layer in float32.

        The slots are not touched. With ``query_ids``, which all sequences end with, see ``query_logits``.
        """
        if query_ids is not None:
            return self.query_logits([ids[: -len(query_ids)] for ids in sequences], query_ids)
        width = max(map(len, sequences))
        padding = torch.tensor([width - len(ids) for ids in sequences], device=self.device)
        ids = torch.tensor([[0] * (width - len(ids)) + list(ids) for ids in sequences], device=self.device)
        positions = torch.arange(width, device=self.device) - padding[:, None]
        with exact_head(self.network):
            masks = self._causal_masks(positions[:, None, :, None], positions[:, None, None, :])
            return self._run(ids, positions, masks, None, None)[:, -1]

    def nested_logits(
        self, rows: Sequence[NestedRow], contexts: Sequence[Sequence[int]], tail: Sequence[int]
    ) -> Tensor:
        """Return the logits after each context of each row and ``tail``, [all members, vocabulary], in float32."""
        ids, positions, visible, last = (each.to(self.device) for each in nested_batch(rows, contexts, tail))
        masks = self._masks(visible, positions[:, None, :, None], positions[:, None, None, :])
        with exact_head(self.network):
            logits = self._run(ids, positions, masks, None, last)
        return torch.cat([logits[number, : len(row.ends)] for number, row in enumerate(rows)])

    def _run(
        self, ids: Tensor, positions: Tensor, masks: Masks, cache: SlotCache | None, keep: Tensor | None
    ) -> Tensor:
        return self.network(
            input_ids=ids,
            attention_mask=masks,
            position_ids=positions.clamp(0, None if self.max_positions is None else self.max_positions - 1),
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=1 if keep is None else keep,
        ).logits

    def _causal_masks(self, queries: Tensor, keys: Tensor) -> Masks:
        """Return the additive mask [rows, 1, tokens, keys]; padding, at negative positions, sees itself alone."""
        return self._masks((keys <= queries) & ((keys >= 0) | (keys == queries)), queries, keys)

    def _masks(self, full: Tensor, queries: Tensor, keys: Tensor) -> Masks:
        """Return the additive mask of what may be attended to at all, within the window that the model has."""
        if self._window is None:
            return self._additive(full)
        sliding = self._additive(full & (keys > queries - self._window))
        if self._mixes_windows:
            return {"full_attention": self._additive(full), "sliding_attention": sliding}
        return sliding

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, -torch.inf)


def _rounded(width: int) -> int:
    return -(-width // _WIDTH_STEP) * _WIDTH_STEP


def load_network(model: str, *, revision: str | None, adapter: str | None, dtype: str, device: str) -> PreTrainedModel:
    """Load a causal model for inference, its adapter merged in float32, else separate; an activated one sleeps."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if dtype == "auto":
        dtype = "float32" if device.startswith("cpu") else "bfloat16"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise InputError(f"Expected `dtype` to be auto, float32, bfloat16 or float16, but got {dtype!r}.")
    if dtype == "bfloat16" and is_slow_in_bfloat16(torch.device(device).type):
        say(
            "Note: this CPU has no instructions for bfloat16: with `engine.dtype` float32, it is several times as fast."
        )
    folders.check_model_folder(model)
    if adapter is not None:
        adapter = folders.local_adapter(adapter)
        folders.check_adapter(adapter)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            model,
            revision=revision,
            dtype=getattr(torch, dtype),
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, SafetensorError) as error:
        failed = f"Expected `model` to name a causal language model, but {model!r} failed: {error}"
        raise InputError(folders.refusal_of_code(model, error) or failed) from error
    network, loading = loaded
    folders.check_all_loaded(model, loading)
    if adapter is not None and folders.read_invocation_ids(adapter) is not None:
        network = cast(PreTrainedModel, load_sleeping_adapter(network.to(device).eval(), adapter))
        return network.eval()
    if adapter is not None:
        from peft import PeftModel

        network = PeftModel.from_pretrained(cast(PreTrainedModel, network), adapter)
        network = network.merge_and_unload() if dtype == "float32" else network
    return network.to(device).eval()


def _sliding_window(config: PreTrainedConfig) -> tuple[int | None, bool]:
    """Return the sliding window in tokens, None without one, and whether layers with and without it are mixed."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is None:
        return window, False
    if strange := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise InputError(f"Expected layers of full or sliding attention, but got {strange}. Use the vLLM engine.")
    mixes = "sliding_attention" in layer_types
    return (window if mixes else None), mixes
