"""The picture of the guide: what /metrics tells of a server that gets feedback.

    python benchmarks/serving/metrics_picture.py --output docs/images/serve_metrics.png

240 questions to the bundled model, each labelled by its reference; what is drawn was read from /metrics on the way.
"""

import argparse
import json
import re
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory

import matplotlib as mpl
import matplotlib.pyplot as plt
from load import BUNDLED, STRATEGY, call, serving

from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.records import Question

BLUE, ORANGE = "#3465a4", "#c4570e"


def ask(question: Question) -> None:
    turn = {"role": "user", "content": question.messages[-1].content}
    found = json.loads(call("/v1/chat/completions", {"model": "bundled", "messages": [turn], "selfcal": STRATEGY}))
    right = found["selfcal"]["answer"] == question.reference
    call("/v1/feedback", {"request_id": found["id"], "correct": right})


def buckets(metrics: dict[str, float], name: str, most: int) -> tuple[list[str], list[float]]:
    """Return the edges of a histogram's first buckets and what is in each."""
    pattern = re.compile(rf'selfcal_{name}_bucket{{le="([0-9.]+)"}}')
    found = {match[1]: value for key, value in metrics.items() if (match := pattern.fullmatch(key))}
    counts = [value - before for value, before in zip(found.values(), [0.0, *found.values()], strict=False)]
    return [edge.removesuffix(".0") for edge in found][:most], counts[:most]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    questions, history = get_task("word_problems").load("test_id", limit=240), []
    with TemporaryDirectory() as folder, serving(*BUNDLED, "--feedback_dir", folder), ThreadPool(24) as clients:
        for start in range(0, len(questions), 24):
            clients.map(ask, questions[start : start + 24])
            lines = [line.rpartition(" ") for line in call("/metrics").splitlines() if not line.startswith("#")]
            history.append({name: float(value) for name, _, value in lines})
    mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(1, 3, figsize=(9.5, 2.8), layout="constrained")
    shown = ("confidence", "stated confidence", 10), ("samples_per_answer", "samples", 4)
    for axis, (name, title, most) in zip(axes, shown, strict=False):
        edges, counts = buckets(history[-1], name, most)
        axis.bar(range(len(edges)), counts, color=BLUE)
        axis.set_xticks(range(len(edges)), edges)
        axis.set(xlabel=f"{title} of an answer, up to", ylabel="answers")
    labels = [row["selfcal_feedback_labels"] for row in history]
    for name, text, colour, up in (("ece", "ECE", BLUE, -9), ("brier", "Brier score", ORANGE, 5)):
        values = [row[f"selfcal_feedback_{name}"] for row in history]
        axes[2].plot(labels, values, color=colour)
        axes[2].annotate(text, (labels[-1], values[-1]), xytext=(4, up), textcoords="offset points", color=colour)
    axes[2].set(xlabel="labels that came in", ylim=(0, None), xlim=(0, labels[-1] * 1.35))
    figure.savefig(given.output, dpi=130)


if __name__ == "__main__":
    main()
