"""The examples for W&B and MLflow, run with the real packages where they are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfcal_lightning.models.folders import config_path

EXAMPLES = Path(__file__).parents[2] / "examples" / "loggers"
SMALL = """
data:
  init_args:
    num_samples: 2
    train: [{task: word_problems, split: train, limit: 8}]
    validation: [{task: word_problems, split: validation, limit: 8}]
"""
# A figure and, where it lies in a file of its own, a metric.
WRITTEN = {
    "wandb": ["runs/demo/wandb/offline-run-*/files/media/images/calibration_curve/val/word_problems/reliability*.png"],
    "mlflow": [
        "runs/demo/mlruns/*/*/artifacts/calibration_curve/val/word_problems/reliability-*.png",
        "runs/demo/mlruns/*/*/metrics/val/calibration/ECE",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_metrics_and_figures_arrive(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason=f"needs {name}, which is no dependency")
    (tmp_path / "small.yaml").write_text(SMALL)
    configs = [config_path("demo.yaml"), str(EXAMPLES / f"{name}.yaml"), "small.yaml"]
    given = [word for file in configs for word in ("--config", file)]
    environment = os.environ | {"MLFLOW_ALLOW_FILE_STORE": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "selfcal_lightning", "fit", *given]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [pattern for pattern in WRITTEN[name] if not list(tmp_path.glob(pattern))] == []
