"""Ask a server instead of loading a model here: vLLM's own, started by `vllm serve MODEL`.

python examples/server.py http://127.0.0.1:8000/v1 MODEL
"""

from __future__ import annotations

import sys

import selfcal_lightning as sc

if __name__ == "__main__":
    address, model = sys.argv[1:]
    sc.answer(
        model,
        question="Tom has 3 boxes of 4 pens. How many pens has he?",
        engine="openai",
        base_url=address,
        task="local_number",
        strategy="self_consistency",
        max_samples=4,
        edt_scale=None,  # a server draws at a fixed temperature
        max_new_tokens=120,
    )
