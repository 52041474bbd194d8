"""Fit a threshold that bounds the error rate of the answers given, with 90 % confidence; below it, abstain.

python examples/threshold_with_guarantee.py [FOLDER]
"""

import json
import sys
from pathlib import Path

from your_responses import your_responses

import selfcal_lightning as sc

if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/threshold")
    folder.mkdir(parents=True, exist_ok=True)
    pool = folder / "calibration.jsonl"
    lines = [{**line, "split": "calibration"} for line in your_responses(questions=600)]
    pool.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fitted = sc.fit_threshold(
        str(pool), str(folder / "threshold.json"), strategy="best_of_n", risk=0.1, delta=0.1, split="calibration"
    )
    print(fitted.promise)
    print(f"It answers {fitted.achieved['coverage']:.0%} of the calibration questions and abstains from the rest.")
