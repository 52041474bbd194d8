"""Real GRPO steps of TRL on the bundled model with our rewards, where TRL is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfcal_lightning.adaptation.rewards import stated_confidence
from selfcal_lightning.commands.pools import run_import_pool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task

SCRIPT = Path(__file__).parents[1] / "support" / "grpo_steps.py"


@pytest.mark.slow
def test_grpo_steps_get_the_rewards_that_a_hand_would_compute(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl, which is no dependency")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), str(tmp_path), "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 0
    assert len(found["calls"]) == 4
    task = get_task("word_problems")
    for at, (texts, answers, rewards) in enumerate(found["calls"]):
        for text, answer, reward in zip(texts, answers, rewards, strict=True):
            confidence = stated_confidence(text).value
            correct = float(bool(task.verify(task.extract(text.split("Confidence:")[0]), answer)))
            assert reward == pytest.approx(correct - (1.0 if confidence is None else (confidence - correct) ** 2))
        assert found["curves"]["reward"][at] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)
    assert any(found["curves"]["confidence/std"])
    report = run_import_pool(str(tmp_path / "completions"), str(tmp_path / "store"), task="word_problems")
    assert report.responses == sum(len(texts) for texts, _, _ in found["calls"])
    said = {group.question.reference for group in SampleStore(tmp_path / "store").samples()}
    assert said == {answer for _, answers, _ in found["calls"] for answer in answers}
