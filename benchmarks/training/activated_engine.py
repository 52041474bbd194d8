"""What P(True) costs in vLLM with an activated adapter, against the base model's own query and a merged model.

    python benchmarks/training/activated_engine.py [--size 3M|30M] [--questions 32] [--samples 16] [--output FOLDER]

CPU seconds of the engine's process, the ways taking turns. "Merged, of the base's texts" scores texts that it has not
sampled. The activated P(True) must equal that of transformers first.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from _training_rows import SIZES
from shared.study import RESULTS
from shared.tables import machine, table, write_report
from shared.timing import cpu_seconds

from selfcal_lightning.engines.base import generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, SamplingSettings

BASE, ACTIVATED, AWAKE = "base", "activated", "adapter awake throughout"
MERGED, FOREIGN = "merged", "merged, of the base's texts"
TARGET = "Target: the activated query takes at most 1.5 times the base's own."
PROMPT, RESPONSE = 120, 120
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Rows = list[tuple[int, ...]]


def write_models(size: str, chat: ChatFormat, folder: Path) -> dict[str, str]:
    """Write the base, an activated adapter, the same always awake, and the base with it merged in."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES[size], max_position_embeddings=512, tie_word_embeddings=True),
        dtype=torch.float32,
        trust_remote_code=False,
    )
    base.save_pretrained(folder / "base")
    settings = {"r": 16, "lora_alpha": 32, "target_modules": LINEAR, "task_type": "CAUSAL_LM"}
    adapted = get_peft_model(base, LoraConfig(**settings))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    adapted.save_pretrained(folder / "awake")
    adapted.peft_config["default"].alora_invocation_tokens = list(chat.query.suffix_ids)
    adapted.save_pretrained(folder / "activated")
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    for name in ("base", "merged"):
        chat.tokenizer.save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("base", "activated", "awake", "merged")}


class Bench:
    def __init__(self, options: argparse.Namespace, folders: dict[str, str], chat: ChatFormat) -> None:
        self.options, self.folders, self.chat = options, folders, chat
        self.token_ids = [*chat.query.yes_ids, *chat.query.no_ids]
        self.version = ""

    def open(self, way: str) -> VLLMEngine:
        model = self.folders["merged" if way == MERGED else "base"]
        adapter = {ACTIVATED: self.folders["activated"], AWAKE: self.folders["awake"]}.get(way)
        cache = self.options.cache << 20
        context = PROMPT + RESPONSE + 40
        engine = VLLMEngine(model, adapter=adapter, max_context=context, kv_cache_memory_bytes=cache, chat=self.chat)
        self.ask(engine, self.sample(engine, 10**6, questions=2, samples=8))
        self.version = engine.describe()["engine_version"]
        return engine

    def sample(self, engine: VLLMEngine, number: int, *, questions: int, samples: int) -> Rows:
        rng = np.random.default_rng([number, 1])
        sampling = SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=RESPONSE)
        vocabulary = SIZES[self.options.size]["vocab_size"]
        prompts = [tuple(rng.integers(16, vocabulary, PROMPT).tolist()) for _ in range(questions)]
        requests = [
            Request(f"{i}/{j}", prompt, sampling, seed=1000 * i + j)
            for i, prompt in enumerate(prompts)
            for j in range(samples)
        ]
        answered = zip(requests, generate(engine, requests), strict=True)
        return [(*asked.prompt_ids, *given.token_ids, *self.chat.query.suffix_ids) for asked, given in answered]

    def ask(self, engine: VLLMEngine, rows: Rows) -> dict[str, float]:
        seconds, before = cpu_seconds(engine.pid), engine.statistics()
        engine.next_token_probabilities(rows, self.token_ids)
        after = engine.statistics()
        tokens, cached = (after[name] - before[name] for name in ("score_tokens", "score_cached_tokens"))
        return {
            "query": cpu_seconds(engine.pid) - seconds,
            "cached": cached / tokens,
            "steps": after["steps"] - before["steps"],
        }

    def run_pass(self, number: int) -> dict[str, dict[str, float]]:
        cells: dict[str, dict[str, float]] = {}
        texts: Rows = []
        for way in (BASE, ACTIVATED, AWAKE, MERGED):
            engine = self.open(way)
            if way == MERGED:
                cells[FOREIGN] = self.ask(engine, texts)
            start, size = cpu_seconds(engine.pid), self.options
            rows = self.sample(engine, number, questions=size.questions, samples=size.samples)
            sampling = cpu_seconds(engine.pid) - start
            cells[way] = {"sampling": sampling, **self.ask(engine, rows)}
            texts = rows if way == BASE else texts
            engine.close()
        return cells

    def check(self) -> float:
        """Return the largest difference of the activated adapter's log-probabilities from those of transformers."""
        engine = self.open(ACTIVATED)
        rows = self.sample(engine, 10**6, questions=4, samples=4)
        found = engine.next_token_probabilities(rows, range(64))
        engine.close()
        base, adapter = self.folders["base"], self.folders["activated"]
        other = TransformersEngine(base, adapter=adapter, dtype="float32", chat=self.chat)
        wanted = other.next_token_probabilities(rows, range(64))
        bare = other.next_token_probabilities(rows, range(64), with_adapter=False)
        error, moved = (np.abs(np.log(table) - np.log(wanted)).max().item() for table in (found, bare))
        if not error < min(1e-3, moved / 10):
            raise SystemExit(f"P(True) differs from that of transformers by {error}, the adapter moves it by {moved}.")
        return error


def markdown(report: dict[str, Any]) -> str:
    base = report["ways"][BASE]["query"]
    lines = [
        "# P(True) of an activated adapter in vLLM",
        "",
        f"    python benchmarks/training/activated_engine.py --size {report['size']} --passes {report['passes']}",
        "",
        f"CPU seconds of the engine's process, one thread, float32, {report['size']} Llama, LoRA r 16 on all linear "
        f"layers, {report['responses']} responses of {RESPONSE} tokens to prompts of {PROMPT}: medians of "
        f"{report['passes']} passes, the ways taking turns. vLLM {report['vllm']}, {report['machine']['cores']} cores.",
        "",
    ]
    rows = [
        [name, f"{way['sampling']:.1f}" if "sampling" in way else "-", f"{way['query']:.2f}",
         f"{way['query'] / base:.2f}", f"{way['cached']:.0%}", f"{way['steps']:.0f}"]
        for name, way in report["ways"].items()
    ]  # fmt: skip
    heads = ("way", "sampling", "P(True) of all", "of the base's own", "tokens from the cache", "steps")
    lines += [
        *table(heads, rows, left=len(heads)),
        "",
        TARGET,
        f"Largest difference of the activated log-probabilities from transformers: {report['error']:.1e}.",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=sorted(SIZES), default="30M")
    parser.add_argument("--questions", type=int, default=32)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--cache", type=int, default=3072, help="MiB of the key-value cache: all responses should fit")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    chat = ChatFormat(load_tokenizer("bundled"))
    bench = Bench(options, write_models(options.size, chat, Path("runs/activated_engine") / options.size), chat)
    error, passes = bench.check(), []
    for number in range(options.passes):
        passes.append(bench.run_pass(number))
        print(json.dumps(passes[-1]), flush=True)
    ways = {
        way: {name: statistics.median(one[way][name] for one in passes) for name in passes[0][way]} for way in passes[0]
    }
    report = {
        "machine": machine(),
        "vllm": bench.version,
        "size": options.size,
        "responses": options.questions * options.samples,
        "passes": options.passes,
        "error": error,
        "ways": ways,
    }
    write_report(options.output, "activated_engine", report, markdown(report), indent=1)


if __name__ == "__main__":
    main()
