"""Sample from vLLM's own server (`vllm serve MODEL`) instead of loading a model in this process.

python examples/server.py http://127.0.0.1:8000/v1 MODEL
"""

import sys

import selfcal_lightning as sc

if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python examples/server.py ADDRESS MODEL, after `vllm serve MODEL`")
    address, model = sys.argv[1:]
    found = sc.answer(
        model,
        [{"question": "Felix has 14 marbles. Sofia gives Felix 9 more. How many marbles does Felix have now?"}],
        task="local_number",
        strategy="self_consistency",
        max_samples=4,
        sampling=sc.SamplingSettings(edt_scale=None, max_new_tokens=120),  # a server samples at a fixed temperature
        engine=sc.EngineOptions("openai", base_url=address),
    )
    print(found[0].as_text())
