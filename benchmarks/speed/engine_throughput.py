"""Generation throughput of vLLM, transformers and the reference's loop (no cache, one response), P(True) included."""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from shared.study import Study
from shared.tables import table
from shared.timing import requests_of, timed

from selfcal_lightning.data.tasks.word_problems import WordProblems
from selfcal_lightning.engines.base import Engine, generate
from selfcal_lightning.engines.opening import open_engine
from selfcal_lightning.engines.settings import EngineOptions
from selfcal_lightning.engines.transformers.slots import dynamic_temperature
from selfcal_lightning.models.causal_lm import load_causal_lm
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.records import Request, SamplingSettings

TOP = 20  # log-probabilities that it reads the confidence from


@torch.no_grad()
def reference_passes(
    model: str, chat: ChatFormat, requests: Sequence[Request], repeats: int
) -> list[tuple[float, int]]:
    """Return (seconds, sampled tokens) of some passes, in float32, with EDT and the confidence query.

    There is no cache, and no two responses share a forward pass. The sampled token is turned into text by itself and
    compared with the text of end-of-turn. Its entropy is computed as it should be; the cost is the same.
    """
    network = load_causal_lm(model, dtype="float32", attn_implementation="sdpa").eval()
    end = {chat.tokenizer.decode([token]) for token in chat.end_of_turn_ids}
    passes = []
    for _ in range(repeats):
        start, tokens = time.perf_counter(), 0
        for request in requests:
            torch.manual_seed(request.seed % 2**63)
            ids = list(request.prompt_ids)
            for _ in range(request.sampling.max_new_tokens):
                logits = network(torch.tensor([ids]), use_cache=False).logits[0, -1]
                settings = request.sampling
                temperature = dynamic_temperature(
                    logits, base=settings.temperature, scale=settings.edt_scale, theta=settings.edt_theta
                )
                if temperature < 1e-3:
                    token = int(logits.argmax())
                else:
                    token = int(torch.multinomial((logits / temperature).softmax(-1), 1))
                tokens += 1
                if chat.tokenizer.decode([token]) in end:
                    break
                ids.append(token)
            asked = torch.tensor([[*ids, *request.query.suffix_ids]])
            network(asked, use_cache=False).logits[0, -1].log_softmax(-1).topk(TOP)
        passes.append((time.perf_counter() - start, tokens))
    return passes


EDT = "EDT 0.8/0.8/1.0"
REFERENCE = "reference's loop"


def measure(engine: Engine, requests: list[Request]) -> tuple[float, int]:
    seconds, _, responses = timed(lambda: generate(engine, requests))
    return seconds, sum(len(response.token_ids) + (response.finish == "stop") for response in responses)


def opened(name: str, options: argparse.Namespace, model: str, chat: ChatFormat) -> Engine:
    args: dict[str, Any] = {"max_context": options.max_context}
    if name == "vllm":
        args |= {"kv_cache_memory_bytes": options.kv_cache_mib << 20, "num_threads": options.threads}
    most = options.max_batch if name == "transformers" else None
    return open_engine(EngineOptions(name, "float32", most, engine_args=args), model, chat=chat)


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    model = "bundled" if options.model == SIZES["model"][0] else options.model
    chat = ChatFormat(load_tokenizer(model))
    settings = {
        EDT: SamplingSettings(max_new_tokens=options.max_new_tokens),
        "plain T=0.8": SamplingSettings(edt_scale=None, max_new_tokens=options.max_new_tokens),
        "EDT, top_p=0.95": SamplingSettings(top_p=0.95, max_new_tokens=options.max_new_tokens),
    }
    questions = WordProblems().load("test_id", limit=options.questions)
    requests = {
        name: requests_of(questions, chat, sampling, samples=options.samples, asks=True)
        for name, sampling in settings.items()
    }
    engines = {name: opened(name, options, model, chat) for name in options.engines}
    for engine in engines.values():
        generate(engine, requests["plain T=0.8"][: options.samples])
    passes: dict[tuple[str, str], list[tuple[float, int]]] = {(e, s): [] for s in settings for e in engines}
    for _ in range(options.repeats):
        for engine_name, setting in passes:
            passes[engine_name, setting].append(measure(engines[engine_name], requests[setting]))
    counts = {name: engine.statistics() for name, engine in engines.items() if name == "vllm"}
    hit_rates = {name: of["query_cached_tokens"] / of["query_tokens"] for name, of in counts.items()}
    for engine in engines.values():
        engine.close()
    if options.reference_responses:
        # Spread over the questions: without a cache the loop's rate depends on the length of the prompt.
        step = max(len(requests[EDT]) // options.reference_responses, 1)
        requests[REFERENCE] = requests[EDT][::step][: options.reference_responses]
        passes[REFERENCE, EDT] = reference_passes(model, chat, requests[REFERENCE], options.repeats)
    rows = [
        {
            "engine": engine_name,
            "sampling": setting,
            "responses": len(requests[REFERENCE if engine_name == REFERENCE else setting]),
            "tokens": runs[0][1],
            "seconds": statistics.median(seconds for seconds, _ in runs),
            "tokens_per_second": statistics.median(tokens / seconds for seconds, tokens in runs),
            "all_seconds": [seconds for seconds, _ in runs],
            "query_hit_rate": hit_rates.get(engine_name),
        }
        for (engine_name, setting), runs in passes.items()
    ]
    return {"torch": torch.__version__, "options": options.sizes(*SIZES, "engines"), "rows": rows}


def as_markdown(report: Mapping[str, Any]) -> str:
    options, rows = report["options"], report["rows"]
    rates = {(row["engine"], row["sampling"]): row["tokens_per_second"] for row in rows}
    base = "transformers" if ("transformers", EDT) in rates else rows[0]["engine"]
    cells = []
    for row in rows:
        ratio = row["tokens_per_second"] / rates[base, row["sampling"]]
        numbers = [f"{row['seconds']:.2f}", f"{row['tokens_per_second']:.0f}", f"{ratio:.3g}"]
        cells.append([*(str(row[name]) for name in ("engine", "sampling", "responses", "tokens")), *numbers])
    heads = ("engine", "sampling", "responses", "tokens", "s (median)", "tokens/s", f"of {base}")
    head = (
        f"Generation with P(True) on {options['model']}: {options['questions']} questions x {options['samples']} "
        f"responses of at most {options['max_new_tokens']} tokens, float32, {options['threads']} thread(s), median of "
        f"{options['repeats']}; by `{report['command']}`."
    )
    lines = [head, "", *table(heads, cells, left=len(heads))]
    for engine in dict.fromkeys(row["engine"] for row in rows if row["engine"] != REFERENCE):
        lines.append(f"\nEDT of plain, {engine}: {rates[engine, EDT] / rates[engine, 'plain T=0.8']:.2f}")
        if (REFERENCE, EDT) in rates:
            lines.append(f"\nEDT of the {REFERENCE}, {engine}: {rates[engine, EDT] / rates[REFERENCE, EDT]:.1f}")
    for row in rows:
        if row["engine"] == "vllm" and row["sampling"] == EDT:
            lines.append(f"\nprefix-cache hit rate of the P(True) pass, vllm: {row['query_hit_rate']:.2f}")
    return "\n".join(lines) + "\n"


SIZES = {
    "model": ("the bundled model", "folder or name"),
    "reference_responses": (16, "of the reference's loop; 0 leaves it out"),
    "questions": (32, "questions"),
    "samples": (16, "responses to each"),
    "max_new_tokens": (96, "tokens of a response at most"),
    "max_context": (384, "tokens of a prompt with its response at most"),
    "max_batch": (256, "slots of the transformers engine"),
    "kv_cache_mib": (512, "cache of the vLLM engine"),
    "threads": (1, "threads of an engine"),
    "repeats": (3, "passes; the median counts"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", nargs="+", default=["vllm", "transformers"], choices=["vllm", "transformers"])


if __name__ == "__main__":
    study = Study(
        "speed/engine_throughput.py", SIZES, None, run, as_markdown, arguments=arguments, layout={"indent": 1}
    )
    raise SystemExit(study.main())
