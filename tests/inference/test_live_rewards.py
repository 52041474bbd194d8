"""A reward model as the confidence of a strategy that runs live: what `selfcal score` says, as responses come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.reward_models import stand_in

from selfcal_lightning.cli import run
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Sample
from selfcal_lightning.rewards.answering import check_live_rewards, open_live_rewards
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.reading import RewardFile, open_rewards

TEXTS = ("First 34+75=109. So 109+1=110. The answer is 110.", "First 3+4=7. The answer is 7.", "")


@pytest.fixture(scope="module")
def reward(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model of the policy's tokens with a head at random."""
    folder = stand_in(tiny_model, tmp_path_factory.mktemp("reward") / "m", reward_format("quantile-prm"))
    RewardFile("quantile-prm", "sentence", (0.1, 0.9), "outcome").write(Path(folder))
    return folder


def test_a_live_response_has_the_score_of_a_recorded_one(reward: str, chat: ChatFormat) -> None:
    (question,) = get_task("word_problems").load("calibration", limit=1)
    samples = tuple(
        Sample(question.id, index, 0, text, tuple(chat.response_ids(text)), "stop", "1", True)
        for index, text in enumerate(TEXTS)
    )
    settings = RewardSettings(reward)
    lowest, last = open_live_rewards(["prm_min", "prm"], settings, [question], chat=chat, dtype="float32")
    recorded = [QuestionSamples(question, samples, "test", chat.prompt_ids(question.messages))]
    ((*steps, nothing),) = open_rewards(settings, dtype="float32").read(recorded)
    assert (nothing, last.score_sample(samples[2])) == (None, None), "it has no steps"
    for sample, scores in zip(samples, steps, strict=False):
        assert scores is not None
        assert last.score_sample(sample) == pytest.approx(scores[-1], abs=1e-6)
        assert lowest.score_sample(sample) == pytest.approx(min(scores), abs=1e-6)


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.jsonl"
    asked = get_task("word_problems").load("calibration", limit=3)
    path.write_text("".join(json.dumps({"question": one.text, "answer": one.reference}) + "\n" for one in asked))
    return str(path)


@pytest.mark.parametrize(("strategy", "options"), [
    ("early_stopping", {"threshold": 0.0}), ("best_of_n", {}), ("cisc", {"confidence": "prm_lower"}),
])  # fmt: skip
def test_strategies_read_a_reward_model_live(
    strategy: str, options: dict[str, Any], reward: str, questions: str, tiny_model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    fields = {"confidence": "prm", "max_samples": 2, **options}
    command = ["answer", "--model", tiny_model, "--task", "word_problems", "--questions", questions]
    command += ["--strategy", strategy, *(part for key, value in fields.items() for part in (f"--{key}", str(value)))]
    command += ["--reward.model", reward, "--sampling.max_new_tokens", "60", "--json", "true"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert "LOAD REPORT" not in printed.out
    answers = [json.loads(line) for line in printed.out.splitlines()]
    assert len(answers) == 3
    assert all(0.0 <= answer["confidence"] <= 1.0 for answer in answers if answer["confidence"] is not None)
    if strategy == "early_stopping":
        assert all(answer["samples_used"] == 1 for answer in answers if answer["answer"] is not None)


def test_what_reads_no_reward_model_or_has_none_is_refused(reward: str) -> None:
    reads = make_strategy("best_of_n", confidence="prm")
    assert check_live_rewards(reads, [], RewardSettings(reward)) == ["prm"]
    assert check_live_rewards(make_strategy("self_consistency"), [], RewardSettings()) == []
    with pytest.raises(InputError, match=r"reads prm: .* `reward\.model`"):
        check_live_rewards(reads, [], RewardSettings())
    with pytest.raises(InputError, match=r"`reward` needs .* or a `confidence`"):
        check_live_rewards(make_strategy("self_consistency"), [], RewardSettings(reward))
    with pytest.raises(InputError, match=r"'orm' cannot read .* judges steps by a probability"):
        check_live_rewards(make_strategy("best_of_n", confidence="orm"), [], RewardSettings(reward))
