"""Tiny local stand-ins of public reward models: the bundled trunk, the public names of tensors, words of their own."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer

from selfcal_lightning.rewards.formats import RewardFormat

HIDDEN = 128


def head_of(format: RewardFormat) -> dict[str, Tensor]:
    """Return a random head with the tensors of a format; nothing for the output layer, which the trunk ties."""
    if format.is_output_layer:
        return {}
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for number, layer in enumerate(format.layers):
        rows = format.num_outputs if number == len(format.layers) - 1 else HIDDEN
        tensors[f"{layer}.weight"] = torch.randn((rows, HIDDEN), generator=generator) / HIDDEN**0.5
        if format.bias:
            tensors[f"{layer}.bias"] = torch.randn(rows, generator=generator)
    return tensors


def stand_in(
    model: str, folder: Path, format: RewardFormat, *, head: Any = None, words: Sequence[str] | None = None
) -> str:
    """Write a reward model of ``format`` with the trunk of ``model`` to ``folder`` and return its path.

    Without a head one is made at random. ``words`` are added to the vocabulary; None adds those that the format names.
    """
    shutil.copytree(model, folder)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    wanted = [text for text in (format.separator, *format.output_tokens) if text] if words is None else words
    tokenizer.add_tokens([text for text in wanted if len(tokenizer.encode(text, add_special_tokens=False)) != 1])
    tokenizer.save_pretrained(folder)
    more = len(tokenizer) - len(weights["model.embed_tokens.weight"])
    if more > 0:
        new = torch.randn((more, HIDDEN), generator=torch.Generator().manual_seed(1))
        weights["model.embed_tokens.weight"] = torch.cat([weights["model.embed_tokens.weight"], new])
    config = json.loads((folder / "config.json").read_text())
    config |= {"vocab_size": len(weights["model.embed_tokens.weight"]), "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    weights |= head_of(format) if head is None else head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
