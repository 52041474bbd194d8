"""Load a causal language model, compute logits only at the positions needed, and read P(True) from them."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.backends import cuda

from selfcal_lightning.core.errors import InputError, UserError
from selfcal_lightning.core.plan import Speed
from selfcal_lightning.models import folders
from selfcal_lightning.models.packing import PrefixTree, packed_inputs, prefer_segments, register_segment_attention
from selfcal_lightning.records import ConfidenceQuery, Dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin


class WeightFiles:
    """Named tensors in one or several safetensors files; shapes and dtypes are read from the headers."""

    def __init__(self, files: dict[str, Path]) -> None:
        self.bytes_read = 0
        self.rows_read: dict[str, tuple[int, int]] = {}
        self._files = files
        self._open: dict[Path, Any] = {}

    @classmethod
    def of_model(cls, base_model: str, *, revision: str | None = None) -> WeightFiles:
        """Find the files of a local folder or of a hub model, which is downloaded if needed."""
        folder = folders.model_folder(base_model, revision=revision)
        folders.check_model_folder(str(folder), option="base_model")
        index, whole = folder / folders.INDEX, folder / folders.WHOLE
        if whole.is_file():
            with safe_open(whole, framework="pt") as handle:
                return cls(dict.fromkeys(handle.keys(), whole))
        if index.is_file():
            return cls(folders.indexed_files(folder))
        raise InputError(
            f"Expected `base_model` to be a folder with {folders.WHOLE} or {folders.INDEX}, but got {base_model!r}."
        )

    @classmethod
    def on_this_disk(cls, model: str, *, revision: str | None = None) -> WeightFiles | None:
        """Return the files of a model in a folder or the hub's cache; None if it is in neither."""
        try:
            folder = folders.model_folder(model, revision=revision, download=False)
            there = any((folder / name).is_file() for name in (folders.WHOLE, folders.INDEX))
            return cls.of_model(str(folder)) if there else None
        except (OSError, UserError):
            return None

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._files)

    @property
    def num_weights(self) -> int:
        return sum(math.prod(self.shape(name)) for name in self._files)

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(self.shape(name)) * self.dtype(name).itemsize for name in self._files)

    def bytes_in(self, dtype: torch.dtype) -> int:
        """Return the bytes of all tensors with floats of 16 bits and more held in ``dtype``, others as stored."""
        wide = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
        held = {name: dtype if (stored := self.dtype(name)) in wide else stored for name in self._files}
        return sum(math.prod(self.shape(name)) * kind.itemsize for name, kind in held.items())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._slice(name).get_dtype()]

    def first_float_dtype(self) -> torch.dtype:
        """Return the dtype of the first stored float tensor: "auto" where the config names none."""
        return next(dtype for dtype in map(self.dtype, self._files) if dtype.is_floating_point)

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) of a tensor, [stop - start, ...], in the stored dtype, on the CPU."""
        shape, dtype = self.shape(name), self.dtype(name)
        if start >= stop:
            return torch.empty((0, *shape[1:]), dtype=dtype)
        rows = self._slice(name)[start:stop]
        self.bytes_read += rows.numel() * rows.element_size()
        self.rows_read[name] = (start, stop)
        return rows

    def read(self, name: str) -> Tensor:
        shape = self.shape(name)
        return self.read_rows(name, 0, shape[0]) if shape else self._handle(name).get_tensor(name)

    def _slice(self, name: str) -> Any:
        return self._handle(name).get_slice(name)

    def _handle(self, name: str) -> Any:
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


# Of the rate of a large matrix product. Measured on two CPU cores: sampling .07 (1.7M parameters) and .14 (135M),
# training .11 on two threads and .37 on one (1.7M). On a GPU neither was measured.
SHARE_SAMPLING, SHARE_TRAINING = 0.12, 0.3
TIMED_SECONDS = 0.2


def guess_speed(
    model: str, *, revision: str | None = None, device: str | None = None, passes: float = 3.0
) -> Speed | None:
    """Return the seconds that a token takes, a trained one ``passes`` forward passes; None if not on this disk."""
    files = WeightFiles.on_this_disk(model, revision=revision)
    if files is None:
        return None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    seconds = 2 * files.num_weights / multiply_rate(device)
    return Speed(seconds / SHARE_SAMPLING, passes * seconds / SHARE_TRAINING, "CPU" if device == "cpu" else "GPU")


@functools.cache
def multiply_rate(device_type: str) -> float:
    """Return the floating-point operations a second of the best of some large matrix products."""
    size, dtype = (1024, torch.float32) if device_type == "cpu" else (4096, torch.bfloat16)
    matrix = torch.ones(size, size, dtype=dtype, device=device_type)
    best, until = float("inf"), time.perf_counter() + TIMED_SECONDS
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(matrix, matrix)[0, 0].item()  # waits for the device
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def is_slow_in_bfloat16(device_type: str) -> bool:
    """Return whether the device is a CPU without instructions for bfloat16: float32 is some 8 times as fast there."""
    is_known = device_type == "cpu" and torch.backends.mkldnn.is_available()
    return is_known and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


OUTPUT_LAYER = "lm_head.weight"
SMALL_OUTPUTS = 16


class Confidence(NamedTuple):
    """P(True) of every row [B], in [0, 1], and the masses of Yes and No under the full softmax, [B] each."""

    p_true: Tensor
    yes_mass: Tensor
    no_mass: Tensor


def load_causal_lm(
    base_model: str,
    *,
    revision: str | None = None,
    dtype: Dtype = "auto",
    attn_implementation: str | None = None,
    device: torch.device | None = None,
    quantization_config: QuantizationConfigMixin | None = None,
    is_trunk: bool = False,
) -> PreTrainedModel:
    """Load ``base_model`` from a local folder or the hub, without running its code."""
    from transformers import AutoModelForCausalLM

    folders.check_model_folder(base_model, option="base_model")
    register_segment_attention()
    # The files of a reward model have no output layer; one that is tied to the embedding takes no memory.
    tied = {}
    if is_trunk:
        names = WeightFiles.of_model(base_model, revision=revision).names
        tied = {} if any(name.endswith(OUTPUT_LAYER) for name in names) else {"tie_word_embeddings": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folders.resolve_model(base_model),
            revision=revision,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            attn_implementation=attn_implementation,
            device_map=None if device is None else {"": str(device)},
            quantization_config=quantization_config,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **tied,
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise folders.no_model(base_model, revision, error) from error
    model, loading = loaded
    folders.check_all_loaded(base_model, loading, option="base_model")
    if is_trunk:
        model.set_output_embeddings(_small_output_layer(model))
        model.config.tie_word_embeddings = folders.load_config(base_model, revision=revision).tie_word_embeddings
    if attn_implementation is None:
        prefer_segments(model)
    return model


def _small_output_layer(model: PreTrainedModel) -> nn.Linear:
    """Return a small frozen output layer, so that packed rows can still be compared with whole sequences."""
    embedding = cast(Tensor, model.get_input_embeddings().weight)
    layer = nn.Linear(embedding.shape[1], SMALL_OUTPUTS, bias=False, device="meta", dtype=embedding.dtype)
    layer = layer.to_empty(device=embedding.device).requires_grad_(False)
    layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)))
    return layer


def recompute_layers(model: nn.Module, enabled: bool) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = enabled


def selected_logits(
    model: nn.Module,
    head: nn.Module | None,
    arguments: Mapping[str, Any],
    positions: Tensor,
    *,
    watch: Callable[[nn.Module, Tensor], None] = lambda head, hidden: None,
) -> Tensor:
    """Return the logits of a forward pass at some of the flattened positions only, one row each.

    ``watch`` sees the output layer, its weights gathered, and its input at the positions.
    """
    if head is None:
        return model(**arguments).logits.flatten(0, 1)[positions]
    shape = arguments["input_ids"].shape

    def select(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *rest = inputs
        if hidden.shape[:2] != shape:
            return inputs
        rows = hidden.flatten(0, 1)[positions]
        watch(module, rows)
        return (rows, *rest)

    with head.register_forward_pre_hook(select):
        logits = model(**arguments).logits
    return logits.flatten(0, 1)[positions] if logits.dim() == 3 else logits


def forward_arguments(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    *,
    trees: Sequence[PrefixTree] = (),
    position_ids: Tensor | None = None,
) -> dict[str, Any]:
    """Return the arguments of a forward pass over separate sequences or a packed row."""
    if not trees:
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    implementation = model.config.get_text_config()._attn_implementation
    return {**packed_inputs(trees, input_ids, implementation, position_ids=position_ids), "use_cache": False}


def confidence_from_logits(logits: Tensor, query: ConfidenceQuery, *, normalised: bool = True) -> Confidence:
    """Read P(True), Yes / (Yes + No) when ``normalised``, else Yes, from the logits that follow the query."""
    yes, no = yes_and_no(logits.float().log_softmax(-1)[:, query_ids(query, logits.device)], query)
    return Confidence(sigmoid_of_difference(yes, no) if normalised else yes.exp(), yes.exp(), no.exp())


def sigmoid_of_difference(yes: Tensor, no: Tensor) -> Tensor:
    """Return Yes / (Yes + No) of logarithms of masses, float64: in float32 all above log-odds of 17 would be 1."""
    return torch.sigmoid((yes - no).double())


def yes_and_no(columns: Tensor, query: ConfidenceQuery) -> tuple[Tensor, Tensor]:
    """Return the logarithms of the masses of Yes and of No from the columns of ``query_ids``, [B] each."""
    num_yes = len(query.yes_ids)
    return columns[:, :num_yes].logsumexp(-1), columns[:, num_yes:].logsumexp(-1)


@functools.lru_cache(maxsize=8)
def query_ids(query: ConfidenceQuery, device: torch.device) -> Tensor:
    """Return the ids of Yes and then No, copied to ``device`` once in a process, int64."""
    with torch.inference_mode(False):  # training may follow the first pass, which validation makes
        return torch.tensor([*query.yes_ids, *query.no_ids], device=device)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into evaluation mode in the block, and restore the mode of each submodule."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True


# PyTorch prefers cuDNN's attention on Hopper and Blackwell. It builds a plan for every new combination of shapes *and
# strides*, which takes tens of milliseconds of host time in every thread. Ours rarely repeat: packed rows differ in
# width, and responses grow by a token a step. Flash attention needs no plan. CPUs are not affected.


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Exclude cuDNN from PyTorch's attention in the block. For passes without gradients."""
    allowed = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(allowed)


def exclude_cudnn(device: torch.device) -> None:
    """Exclude cuDNN for the rest of this process on a GPU: training recomputes layers in another thread."""
    if device.type == "cuda":
        cuda.enable_cudnn_sdp(False)
