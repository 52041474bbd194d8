"""Which models can run packed rows: told from a configuration, and held against whole sequences by a loaded model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selfcal_lightning.errors import InputError
from selfcal_lightning.functional.prefix_trees import PrefixTree
from selfcal_lightning.models.segment_attention import (
    FLEX,
    SEGMENTS,
    WAY_OUT,
    PackingError,
    TreeMasks,
    packed_inputs,
    register_segment_attention,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROBED_LAYERS = 2
_PROBED: dict[str, str | None] = {}  # what a look at an architecture found, by its class and configuration


def shared_prefix_problem(config: PreTrainedConfig) -> str | None:
    """Say why models of this configuration cannot run packed rows; None where nothing speaks against it.

    It needs no weights and no memory to speak of; under a second for most architectures.

    Args:
        config: A model's configuration.

    Example:
        >>> from transformers import LlamaConfig, MistralConfig
        >>> shared_prefix_problem(LlamaConfig()) is None, shared_prefix_problem(MistralConfig(sliding_window=4096))
        (True, 'its attention has a sliding window of 4096 tokens')
    """
    from transformers import AutoModelForCausalLM

    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text, "sliding_window", None)
    if kinds:
        return f"it has layers other than full attention: {sorted(kinds)}"
    if window is not None and getattr(text, "use_sliding_window", True):
        return f"its attention has a sliding window of {window} tokens"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "its attention caps the scores"
    if type(config) not in AutoModelForCausalLM._model_mapping:
        return "it is no causal language model of transformers"
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not let its attention be exchanged"
    # Some architectures take seconds to build, and a run asks several times.
    key = f"{model_class.__name__} {config.to_json_string(use_diff=False)}"
    if key not in _PROBED:
        _PROBED[key] = _packed_forward_problem(config, model_class.__name__)
    return _PROBED[key]


def _packed_forward_problem(config: PreTrainedConfig, name: str) -> str | None:
    """Say why a packed row does not get through two layers of the architecture; None where it does, or cannot be told.

    The model is built without memory, on the device ``meta``, which has shapes and no values. What depends on values,
    such as the routing of a mixture of experts, raises there: it is left to ``check_packed_equals_separate``.
    """
    register_segment_attention()
    model = two_layers_on_meta(config, SEGMENTS)
    if model is None:
        return None
    tree = PrefixTree(0, 3, (2, 4))
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        arguments = packed_inputs([tree], torch.zeros(1, tree.stop + 1, dtype=torch.int64), SEGMENTS)
        masks: TreeMasks = arguments["prefix_trees"]
        try:
            model.eval()(**arguments, use_cache=False)
        except PackingError as error:
            return f"{name} fails on a packed row ({str(error).removesuffix(WAY_OUT)})"
        except Exception as error:
            if masks.num_calls or "meta" in str(error).lower():
                return None
            return f"{name} fails on a packed row ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
    if masks.num_calls < PROBED_LAYERS:
        return f"{name} has layers that do not attend by the trees of a packed row"
    return None


def two_layers_on_meta(config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel | None:
    """Return a model of two layers of this architecture without memory; None where none can be made.

    Args:
        config: A model's configuration.
        attn_implementation: Name that transformers knows, or has been told.
    """
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)
    text = config.get_text_config()
    # Constructors of some families draw numbers all the same; those of training must not depend on it.
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        try:
            config.quantization_config = None
            text.num_hidden_layers = PROBED_LAYERS
            if getattr(text, "layer_types", None):
                text.layer_types = text.layer_types[:PROBED_LAYERS]
            return AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16, attn_implementation=attn_implementation, trust_remote_code=False
            )
        except Exception:  # settings of single layers may not fit two of them, and constructors may look at values
            return None


def check_shared_prefix(config: PreTrainedConfig, name: str) -> None:
    """Raise InputError, naming the model and the reason, where packed rows cannot be run."""
    problem = shared_prefix_problem(config)
    if problem is not None:
        raise InputError(
            f"Expected a model whose responses can share a prompt in training, but got {name!r}: {problem}. "
            "Set `packing: auto` to fall back to batches of like length, or `packing: off`."
        )


def prefer_segments(model: PreTrainedModel) -> None:
    """Give ``model`` attention by segments where it can run packed rows; else leave its own."""
    if shared_prefix_problem(model.config) is None:
        register_segment_attention()
        model.set_attn_implementation(SEGMENTS)


def runs_packed_rows(model: PreTrainedModel) -> bool:
    """Return whether the attention that ``model`` has now knows packed rows."""
    return model.config.get_text_config()._attn_implementation in (SEGMENTS, FLEX)


@torch.no_grad()
def check_packed_equals_separate(model: PreTrainedModel, *, tolerance: float | None = None) -> None:
    """Hold a packed row of three branches against three sequences, so that no model trains on wrong logits in silence.

    Args:
        model: Causal language model, an adapted one too, in the attention that it will be trained with; of the trunk of
            one its last hidden states are held.
        tolerance: Largest mean difference of the logits, in units of their standard deviation; None is that of
            ``logit_tolerance``.

    Raises:
        PackingError: They differ by more, or the packed row does not get through.
    """
    config = model.config.get_text_config()
    device = next(model.parameters()).device
    # The first branch is long: where positions ran on behind it instead of restarting, the others would be far off.
    tree = PrefixTree(0, 6, (64, 3, 5))
    ids = spread_ids(tree.stop, config.get_text_config().vocab_size, device=device)
    mode = model.training
    model.eval()
    try:
        packed = _packed_logits(model, tree, ids)
        tolerance = logit_tolerance(model, packed, ids) if tolerance is None else tolerance
        for start, length in zip(tree.branch_starts(), tree.branches, strict=True):
            own = slice(start, start + length)
            alone = model(input_ids=torch.cat((ids[: tree.prompt], ids[own]))[None], use_cache=False)[0][0]
            error = (alone[tree.prompt :] - packed[own]).float().abs().mean() / alone.float().std()
            if not error <= tolerance:
                raise PackingError(
                    f"Expected {type(model).__name__} to give a response the same logits in a packed row as in a "
                    f"sequence of its own, but they differ by {error:.3g} standard deviations in the mean{WAY_OUT}"
                )
    finally:
        model.train(mode)


def packs_rightly(model: PreTrainedModel) -> bool:
    """Return whether a packed row gives the model's own logits, with the attention that it has now."""
    try:
        check_packed_equals_separate(model)
    except PackingError:
        return False
    return True


def spread_ids(number: int, vocabulary: int, *, device: torch.device) -> Tensor:
    """Return ids to hold two ways to compute logits against each other by, [number], spread over the vocabulary.

    The first ids of a vocabulary are control tokens, on which a trained model in half precision says nothing twice.
    """
    return torch.arange(1, number + 1, device=device) * 7919 % vocabulary


def logit_tolerance(model: PreTrainedModel, logits: Tensor, ids: Tensor) -> float:
    """Return by how much two ways to compute ``logits`` may differ in the mean, in units of their standard deviation.

    0.001 where all is computed in float32, whose rounding gives about 1e-6. Else 0.1, or twice what the model's own
    rounding gives where that is more. In bfloat16 it gives about 0.01 for few layers, and 0.02 to 0.07 for the 30 of a
    trained model of 135M parameters, where positions that are wrong by one give 0.1 to 0.5.

    Args:
        model: The model.
        logits: Some that it gave, whose dtype tells.
        ids: A sequence to measure its rounding on, [T].
    """
    # FSDP may compute in bfloat16 what it holds in float32; the logits tell.
    exact = {logits.dtype, *(parameter.dtype for parameter in model.parameters())} == {torch.float32}
    exact &= not torch.is_autocast_enabled(logits.device.type)
    if exact and torch.get_float32_matmul_precision() == "highest":
        return 1e-3
    return max(0.1, 2.0 * _rounding(model, ids))


def _rounding(model: PreTrainedModel, ids: Tensor) -> float:
    """Return how far the logits of a sequence move where tokens follow it, which a causal model cannot see."""
    alone = model(input_ids=ids[None], use_cache=False)[0][0].float()
    followed = model(input_ids=torch.cat((ids, ids[:7]))[None], use_cache=False)[0][0, : len(ids)].float()
    return ((followed - alone).abs().mean() / alone.std()).item()


def _packed_logits(model: PreTrainedModel, tree: PrefixTree, ids: Tensor) -> Tensor:
    """Return the logits of a row that holds ``tree``, [T, V]."""
    implementation = model.config.get_text_config()._attn_implementation
    try:
        return model(**packed_inputs([tree], ids[None], implementation), use_cache=False)[0][0]
    except (PackingError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PackingError(
            f"Expected {type(model).__name__} to run a row in which responses share a prompt, but got "
            f"{type(error).__name__}: {error}{WAY_OUT}"
        ) from error
