from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from selfcal_lightning.cli import run
from selfcal_lightning.confidence.registry import CriteriaSettings
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data import steps
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import StepEnd, StepStops, check_marker, step_prefixes, token_step_ends
from selfcal_lightning.datamodules.rewards import RewardCollator, RewardDataModule
from selfcal_lightning.engines.sampling.rollouts import RolloutSource, check_source
from selfcal_lightning.models.chat_format import ChatFormat, token_pieces
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample
from selfcal_lightning.rewards.formats import QUANTILE_PRM, reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.module import QuantileRewardModule
from selfcal_lightning.rewards.reading import RewardFile, read_reward_file

TEXT = "First 34+75=109. So 109+1=110. The answer is 110"
MARKER = "marker:="
EQUATIONS = ["First 34+75=", "109. So 109+1=", "110. The answer is 110"]


def test_all_that_read_steps_cut_behind_the_marker(chat: ChatFormat) -> None:
    ids = chat.response_ids(TEXT)
    ends = token_step_ends(chat.tokenizer, ids, MARKER)
    cut = [chat.decode(ids[a:b]).strip() for a, b in zip([0, *ends], ends, strict=False)]
    assert cut == EQUATIONS
    assert [step for step, _ in step_prefixes(TEXT, MARKER)] == [step.rstrip("=") for step in EQUATIONS]
    pieces = token_pieces(chat.decode, ids)
    spans = steps.token_spans(pieces, steps.spans_of("".join(pieces), MARKER))
    assert next(chat.decode(ids[a:b]).strip() for a, b in spans) == "First 34+75"

    question = Question("q", "local_number", (Message("user", "How many?"),), text="How many?")
    sample = Sample("q", 0, 0, TEXT, tuple(ids), "stop", "110", True)
    prompt = chat.prompt_ids(question.messages)
    encoder = RewardEncoder(reward_format(QUANTILE_PRM), chat.tokenizer)
    scored = encoder.continued(QuestionSamples(question, (sample,), "test", prompt), sample, MARKER)
    assert scored is not None
    assert [place + 1 - len(prompt) for place in scored.positions] == ends

    stops = StepStops.of(chat.tokenizer, MARKER)
    assert [number + 1 for number, token in enumerate(ids) if token in stops.tokens] == ends[:-1]
    found = [stops.first_end(ids[:end], after=start) for start, end in zip([0, *ends], ends[:-1], strict=False)]
    assert found == [StepEnd(end, is_settled=True) for end in ends[:-1]]


@pytest.mark.parametrize("steps", ["marker:", "marker: ", "marker: <end>", "marker", "sentense"])
def test_settings_without_a_marker_are_refused(steps: str, tmp_path: Path, tiny_model: str) -> None:
    message = "to name the text after each step" if steps.startswith("marker:") else "marker:TEXT, but got"
    rollouts = {"split": "test", "limit": None, "responses": 1, "prefixes": None}
    makers: list[Any] = [
        lambda: RewardSettings(steps=steps),
        lambda: CriteriaSettings(steps=steps),
        lambda: QuantileRewardModule(tiny_model, steps=steps),
        lambda: RewardDataModule(tiny_model, str(tmp_path), steps=steps),
    ]
    for make in makers:
        with pytest.raises(InputError, match=message):
            make()
    RewardFile(QUANTILE_PRM, steps, (0.1, 0.9), "outcome").write(tmp_path)
    with pytest.raises(InputError, match=message):
        read_reward_file(tmp_path)
    replaced = replace(RolloutSource(str(tmp_path), **rollouts, steps="line"), steps=steps)
    with pytest.raises(InputError, match=message):
        check_source(replaced)


def test_the_command_line_takes_a_marker(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    command = ["rollout", "--samples_dir", str(tmp_path), "--store_dir", str(tmp_path / "out"), "--steps"]
    assert run([*command, "marker:"]) != 0
    assert "to name the text after each step" in capsys.readouterr().err
    assert run([*command, "marker:<end>"]) != 0
    assert "`samples_dir` to be a sample store" in capsys.readouterr().err
    RewardFile(QUANTILE_PRM, "marker:<end>", (0.1, 0.9), "outcome").write(tmp_path)
    assert read_reward_file(tmp_path).steps == "marker:<end>"  # type: ignore[union-attr]


def test_markers_that_no_response_has_are_refused(chat: ChatFormat) -> None:
    check_marker(chat.tokenizer, "marker:=")
    with pytest.raises(InputError, match="to be a text that responses can hold"):
        check_marker(chat.tokenizer, f"marker:{chat.tokenizer.eos_token}")
    layout: Any = {"target": "outcome", "max_length": 99, "pad_to_multiple_of": 8, "shared_prefix": False}
    with pytest.raises(InputError, match="to be a text that responses can hold"):
        RewardCollator(chat, rates={}, taught={}, steps=f"marker:{chat.tokenizer.eos_token}", **layout)
    with pytest.raises(InputError, match="to be a text that responses can hold"):
        StepStops.of(chat.tokenizer, f"marker:{chat.tokenizer.eos_token}")
