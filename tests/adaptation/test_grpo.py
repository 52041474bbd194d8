"""Real GRPO steps of TRL on the bundled model, in TRL's own environment."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support.house import ROOT

from selfcal_lightning.adaptation.rewards import stated_confidence
from selfcal_lightning.data.tasks.registry import get_task

PYTHON = ROOT / ".venv-trl" / "bin" / "python"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON.exists(), reason="needs `make setup-trl`")
def test_grpo_learns_from_our_reward(tmp_path: Path) -> None:
    command = [str(PYTHON), str(Path(__file__).with_name("grpo_steps.py")), str(tmp_path), "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 0
    assert len(found["calls"]) == 4
    task = get_task("word_problems")
    for at, (texts, answers, rewards) in enumerate(found["calls"]):
        stated = [stated_confidence(text).value for text in texts]
        for text, answer, confidence, reward in zip(texts, answers, stated, rewards, strict=True):
            correct = task.verify(task.extract(text.split("Confidence:")[0]), answer)
            assert reward == pytest.approx(correct - (1.0 if confidence is None else (confidence - correct) ** 2))
        assert found["curves"]["reward"][at] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)
    assert any(value for value in found["curves"]["confidence/std"])
