import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from selfcal_lightning.adaptation import rewards as sut
from selfcal_lightning.commands.pools import run_import_pool
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.registry import get_task

SOURCE = "selfcal/word_problems"
TEXTS = [
    "The answer is 7. Confidence: 0.8",
    "The answer is 8.\n<confidence>30%</confidence>",
    "The answer is 7.",
    "The answer is 7. Confidence: 1.7",
]
COLUMNS = {"answer": ["7"] * 4, "data_source": [SOURCE] * 4, "trainer_state": None}


@pytest.mark.parametrize(
    ("text", "value", "number"),
    [
        ("Confidence: 0.8", 0.8, 0.8),
        ("**Confidence:** 80 %", 0.8, 0.8),
        ("Confidence: **80%**", 0.8, 0.8),
        (r"Confidence: `80\%`", 0.8, 0.8),
        ("my confidence is .5.", 0.5, 0.5),
        ("Confidence: 0.2, no: Confidence = 1", 1.0, 1.0),
        ("<confidence> 9e-1 </confidence>", 0.9, 0.9),
        ("Confidence: 80", None, 80.0),
        ("Confidence: -0.1", None, -0.1),
        ("Confidence: high", None, None),
        ("", None, None),
    ],
)
def test_stated_confidences(text: str, value: float | None, number: float | None) -> None:
    found = sut.stated_confidence(text)
    assert (found.value, found.number) == (value, number)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        (sut.correctness_reward, [1.0, 0.0, 1.0, 1.0]),
        (sut.rlcr_reward, [1 - 0.04, -0.09, 0.0, 0.0]),
        (sut.log_reward, [1 + math.log(0.8) / math.log(100), math.log(0.7) / math.log(100), 0.0, 0.0]),
        (sut.group_confidence_reward, [-(0.05**2), -(0.45**2), -1.0, -1.0]),  # three of four are right
        (sut.soft_consistency_reward, [0.8 / 1.1, 0.3 / 1.1, 0.8 / 1.1, 0.8 / 1.1]),
    ],
)
def test_rewards_by_hand(reward: object, expected: list[float]) -> None:
    logged: dict[str, float] = {}
    chats = [[{"role": "assistant", "content": text}] for text in TEXTS]
    for completions in (TEXTS, chats):
        found = reward(["q"] * 4, completions, completion_ids=[[1]] * 4, **COLUMNS, log_metric=logged.__setitem__)
        assert found == pytest.approx(expected)
    wanted = {"mean": 0.55, "std": 0.25, "outside": 0.25, "missing": 0.25}
    assert logged == pytest.approx({f"confidence/{name}": value for name, value in wanted.items()})


def test_groups_are_prompts_and_unknown_stays_none() -> None:
    columns = {**COLUMNS, "answer": ["7", "8", None, "7"]}
    assert sut.rlcr_reward("abcd", TEXTS, **columns)[2] is None
    assert sut.group_confidence_reward(["a", "b", "c", "a"], TEXTS, **columns) == pytest.approx(
        [-0.04, -0.49, None, -1.0]
    )
    assert sut.soft_consistency_reward(["a", "a", "b", "b"], TEXTS, data_source=[SOURCE] * 4) == pytest.approx(
        [0.8 / 1.1, 0.3 / 1.1, None, None]
    )
    assert sut.confidence_metrics(["7"])["confidence/std"] is None


def test_verl() -> None:
    found = sut.compute_score(SOURCE, TEXTS[0], "7", {"index": 0})
    assert (found["score"], found["correct"], found["confidence"]) == (pytest.approx(0.96), 1.0, 0.8)
    outside = sut.compute_score(SOURCE, TEXTS[3], "7")
    assert (outside["score"], outside["confidence_outside"]) == (0.0, 1.0)
    assert math.isnan(outside["confidence"])
    assert sut.compute_score(SOURCE, TEXTS[0], "")["has_label"] == 0.0


def test_the_log_score_is_proper() -> None:
    grid = [at / 100 for at in range(1, 100)]
    for truth in (0.1, 0.37, 0.9):
        assert max(grid, key=lambda q, p=truth: sut.log_score(q, p)) == truth
        assert max(grid, key=lambda q, p=truth: p * sut.brier_score(q, 1) + (1 - p) * sut.brier_score(q, 0)) == truth


def test_the_mask_covers_the_statement_and_advantages_follow_it() -> None:
    import torch
    from transformers import AutoTokenizer

    from selfcal_lightning.models.folders import BUNDLED_MODEL

    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    texts = ["So 7. Confidence: 0.85 done", "So 7."]
    rows = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    masks = sut.confidence_token_mask(rows, tokenizer)
    covered = [
        tokenizer.decode([i for i, on in zip(*pair, strict=True) if on]) for pair in zip(rows, masks, strict=True)
    ]
    assert [text.strip() for text in covered] == ["Confidence: 0.85", ""]
    mask = torch.tensor([[False, True, False], [False] * 3])
    found = sut.token_advantages(torch.tensor([1.0, -1.0]), torch.tensor([0.5, 0.25]), mask)
    assert found.tolist() == [[1.0, 0.5, 1.0], [-1.0] * 3]


@pytest.mark.slow
def test_grpo_steps_get_the_rewards_that_a_hand_would_compute(tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="needs trl, which is no dependency")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).parents[1] / "support" / "grpo_steps.py"
    command = [sys.executable, str(script), str(tmp_path), "4"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 0
    assert len(found["calls"]) == 4
    task = get_task("word_problems")
    for at, (texts, answers, rewards) in enumerate(found["calls"]):
        for text, answer, reward in zip(texts, answers, rewards, strict=True):
            confidence = sut.stated_confidence(text).value
            correct = float(bool(task.verify(task.extract(text.split("Confidence:")[0]), answer)))
            assert reward == pytest.approx(correct - (1.0 if confidence is None else (confidence - correct) ** 2))
        assert found["curves"]["reward"][at] == pytest.approx(sum(rewards) / len(rewards), abs=1e-4)
    assert any(found["curves"]["confidence/std"])
    report = run_import_pool(str(tmp_path / "completions"), str(tmp_path / "store"), task="word_problems")
    assert report.responses == sum(len(texts) for texts, _, _ in found["calls"])
    said = {group.question.reference for group in SampleStore(tmp_path / "store").samples()}
    assert said == {answer for _, answers, _ in found["calls"] for answer in answers}
