"""Bounds on what the files of a model or an adapter may say, since they may come from anybody."""

import functools
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import read_json_object

# transformers takes any other name for a kernel on the hub, whose code it downloads and runs.
ATTENTION = {
    None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention",
    *(f"paged|{name}" for name in ("eager", "sdpa", "flash_attention_2", "flash_attention_3")),
}  # fmt: skip
DIMENSIONS = ("hidden_size", "n_embd", "vocab_size")
LAYERS = ("num_hidden_layers", "n_layer")
COUNTS = (
    *LAYERS, "num_attention_heads", "num_key_value_heads", "n_head", "head_dim",
    "intermediate_size", "max_position_embeddings",
)  # fmt: skip
RENDERING_SECONDS = 10
RENDERING_BYTES = 2**30
_MAY_GROW = re.compile(r"range|macro|recursive|\*|~|cycle|join")


def check_config(folder: Path, files: Sequence[Path]) -> None:
    """Refuse sizes in config.json that the weights do not have, and attention that is fetched from the hub."""
    file = folder / "config.json"
    config = read_json_object(file, what="the configuration of a model")
    dimensions, layers = _header(tuple((str(path), path.stat().st_mtime_ns) for path in files))
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for name in ("_attn_implementation", "attn_implementation", "_attn_implementation_internal"):
            if isinstance(part.get(name), str) and part[name] not in ATTENTION:
                known = ", ".join(sorted(filter(None, ATTENTION)))
                raise InputError(f"`{name}` in {file} must be one of {known}, got {part[name]!r}.")
        for name in DIMENSIONS:
            if name in part and part[name] not in dimensions:
                raise InputError(f"`{name}` in {file} is {part[name]!r}, but no tensor of its weights has that size.")
        for name in COUNTS:
            value = part.get(name)
            if name in LAYERS:
                absurd = not isinstance(value, int) or not 0 <= value <= layers
            else:
                absurd = not isinstance(value, list) and (type(value) is not int or value < 1)
            if value is not None and absurd:
                expected = f"at most {layers:,}, its number of tensors" if name in LAYERS else "above 0"
                raise InputError(f"`{name}` in {file} must be a number {expected}, got {value!r}.")


@functools.lru_cache(maxsize=64)
def _header(files: tuple[tuple[str, int], ...]) -> tuple[frozenset[int], int]:
    """Return the sizes of all dimensions of the tensors in these files, and how many tensors there are."""
    from safetensors import safe_open

    sizes, tensors = set(), 0
    for file, _ in files:
        with safe_open(file, framework="numpy") as handle:
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                sizes.update(handle.get_slice(name).get_shape())
                tensors += 1
    return frozenset(sizes), tensors


def check_adapter_config(file: Path, config: Mapping[str, Any]) -> None:
    """Refuse an adapter whose configuration asks for what loading it must not do."""
    from safetensors import safe_open

    with safe_open(file.with_name("adapter_model.safetensors"), framework="numpy") as handle:
        shapes = {name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()}  # noqa: SIM118
    ranks = {shape[0] for name, shape in shapes.items() if ".lora_A." in name or ".lora_embedding_A." in name}
    if ranks and not config.get("rank_pattern") and config["r"] not in ranks:
        raise InputError(f"`r` in {file} is {config['r']:,}, but its weights have rank {sorted(ranks)}.")
    for name in ("megatron_config", "loftq_config", "eva_config", "corda_config", "trainable_token_indices"):
        if config.get(name):
            raise InputError(f"`{name}` in {file} must be empty, got {config[name]!r}: such adapters are not read.")
    if str(config.get("init_lora_weights")).startswith(("loftq", "eva", "corda")):
        found = f"{config['init_lora_weights']!r}, which needs data or weights from before training"
        raise InputError(f"`init_lora_weights` in {file} must be true or false, but got {found}.")
    for name in ("target_modules", "exclude_modules", "layers_pattern"):
        if isinstance(config.get(name), str) and _repeats_itself(config[name]):
            raise InputError(f"`{name}` in {file} must be a list: {config[name]!r} may take for ever to match.")


def _repeats_itself(pattern: str) -> bool:
    """Return whether a regular expression repeats what already repeats, as ``(a+)+`` does, or is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from re import _constants, _parser  # type: ignore[attr-defined]  # their only parser

            tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError):
        return True
    repeats = {_constants.MAX_REPEAT, _constants.MIN_REPEAT}

    def inside(node: Any, repeated: bool) -> Iterator[bool]:
        for code, argument in node:
            endless = code in repeats and argument[1] > 1
            yield endless and repeated
            for part in argument if isinstance(argument, (tuple, list)) else ():
                for branch in part if isinstance(part, list) else (part,):
                    if isinstance(branch, _parser.SubPattern):
                        yield from inside(branch, repeated or endless)

    return any(inside(tree, repeated=False))


@functools.lru_cache(maxsize=64)
def check_template(template: str, name: str) -> None:
    """Refuse a chat template that does not come to an end with one short conversation; it is rendered elsewhere."""
    if not _MAY_GROW.search(template):
        return
    turns = [{"role": role, "content": "text"} for role in ("user", "assistant", "user")]
    limits = {"template": template, "messages": turns, "bytes": RENDERING_BYTES, "seconds": RENDERING_SECONDS}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and script; the template is data
            [sys.executable, "-I", "-c", _RENDER],
            input=json.dumps(limits),
            text=True,
            capture_output=True,
            timeout=RENDERING_SECONDS,
            check=False,
        )
        ended = done.returncode >= 0 and done.returncode != _TOO_LARGE
    except subprocess.TimeoutExpired:
        ended = False
    if not ended:
        most = f"{RENDERING_SECONDS} s and {RENDERING_BYTES >> 30} GiB. Take the template of the original model"
        raise InputError(f"The chat template of {name!r} did not render a short conversation within {most}.")


_TOO_LARGE = 3
# What else may be wrong with a template is said where it is used.
_RENDER = f"""
import json, resource, sys
limits = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (limits["bytes"], limits["bytes"]))
resource.setrlimit(resource.RLIMIT_CPU, (limits["seconds"], limits["seconds"]))
from jinja2.sandbox import ImmutableSandboxedEnvironment
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", "jinja2.ext.do"]
)
try:
    environment.from_string(limits["template"]).render(
        messages=limits["messages"], add_generation_prompt=True, bos_token="", eos_token="", tools=None
    )
except MemoryError:
    sys.exit({_TOO_LARGE})
except Exception:
    pass
"""
