"""The part of a model card that says how an activated adapter is used, with this project and without it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from selfcal_lightning.model_files.locations import resolve_model

SNIPPET = """\
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base!r}, revision={revision!r}, dtype=torch.float32)
model = PeftModel.from_pretrained(base, folder).eval()  # folder: the one that holds this file
tokenizer = AutoTokenizer.from_pretrained(folder)
query_ids = {query_ids}
yes_ids, no_ids = {yes_ids}, {no_ids}


def confidence(messages, response):
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = [i for text in (prompt, response) for i in tokenizer.encode(text, add_special_tokens=False)]
    with torch.no_grad():
        logits = model(torch.tensor([ids + query_ids])).logits[0, -1]
    p = logits.float().softmax(-1)
    yes, no = p[yes_ids].sum().item(), p[no_ids].sum().item()
    return {formula}
"""


LOCAL_BASE = "FOLDER_OF_THE_BASE_MODEL"  # where the base lies is not told: it may be a folder of another machine


def activated_usage(manifest: Mapping[str, Any]) -> list[str]:
    """Return the lines of Markdown.

    Args:
        manifest: Of the export; ``activated``, with the chat format under ``prompt``.
    """
    prompt, base = manifest["prompt"], manifest["base_model"]
    snippet = SNIPPET.format(
        base=LOCAL_BASE if base["model"] is None else resolve_model(base["model"]),
        revision=base.get("revision"),
        query_ids=prompt["suffix_ids"],
        yes_ids=prompt["yes_ids"],
        no_ids=prompt["no_ids"],
        formula="yes / (yes + no)" if manifest["p_true"] == "normalised" else "yes",
    )
    return [
        "The adapter is *activated* (aLoRA, arXiv 2504.12397): its weights act on the tokens of the query alone, "
        "`alora_invocation_tokens` in its configuration. Prompts and responses are read by the base model, which "
        "generates what it always did; so the adapter must not be merged, and may be asked over the base model's own "
        "key-value cache.",
        "",
        "- With selfcal-lightning: `selfcal answer --model BASE --adapter FOLDER ...`, likewise `generate`, `score`, "
        "`evaluate` and `predict`.",
        "- With vLLM's server, where selfcal-lightning is installed: `SELFCAL_ACTIVATED_ADAPTER=FOLDER vllm serve BASE "
        "--enable-lora --max-loras 2 --lora-modules confidence=FOLDER`; then `--engine.name openai` with "
        "`served_model: confidence`, or any client that asks `BASE` for answers and `confidence` for the query.",
        "- With PEFT alone, on whole sequences, `response` being the text without its end-of-turn token:",
        "",
        "```python",
        *snippet.splitlines(),
        "```",
        "",
    ]
