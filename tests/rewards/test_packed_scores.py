from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.reward_models import stand_in
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import LlamaConfig, LlamaModel

from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models import packing as packing_support
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.packing import PackingError
from selfcal_lightning.records import QuestionSamples
from selfcal_lightning.rewards.formats import reward_format
from selfcal_lightning.rewards.layouts import RewardInput, batches, pack
from selfcal_lightning.rewards.reading import RewardReader, open_rewards

SHALLOW = True


@pytest.fixture(scope="module")
def settings(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> RewardSettings:
    """A reward model of the policy's tokens with a head at random."""
    format = reward_format("quantile-prm")
    folder = stand_in(tiny_model, tmp_path_factory.mktemp("packed") / "m", format)
    return RewardSettings(folder, format.name, "sentence")


@pytest.fixture(scope="module")
def samples(store_dir: str) -> list[QuestionSamples]:
    """Five questions with eight responses each."""
    return list(SampleStore(store_dir).samples(split="validation"))


@contextmanager
def tokens_read() -> Iterator[list[int]]:
    """Count the tokens of every forward pass, padding included."""
    passes: list[int] = []

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            passes.append(inputs[0].numel())

    hook = register_module_forward_pre_hook(count)
    try:
        yield passes
    finally:
        hook.remove()


def test_all_steps_of_questions_take_one_pass(settings: RewardSettings, samples: list, chat: ChatFormat) -> None:
    reader = open_rewards(settings)
    with tokens_read() as packed:
        scores = reader.read_scores(samples)
    lengths = [len(entry.prompt_ids) + sum(map(len, {s.token_ids for s in entry.samples})) for entry in samples]
    assert len(packed) == 1
    assert packed[0] <= sum(lengths), "common beginnings of responses stand once, too"
    apart = 0
    for entry, rows in zip(samples, scores, strict=True):
        for sample, row in zip(entry.samples, rows, strict=True):
            ends = token_step_ends(chat.tokenizer, sample.token_ids or (), "sentence")
            for end, score in zip(ends, row or [], strict=True):
                with tokens_read() as alone:
                    (own,) = reader.score_paths(entry.question, [(sample.token_ids or ())[:end]])
                apart += sum(alone) or len(entry.prompt_ids) + end
                assert score == pytest.approx(own, abs=1e-5)
    assert packed[0] < apart / 4


@pytest.mark.parametrize("name", ["math-shepherd", "qwen2.5-math-prm", "reasoneval", "rlhflow-prm", "skywork-o1-prm"])
def test_layouts_share_what_they_begin_alike_with(name: str, tiny_model: str, samples: list, tmp_path: Path) -> None:
    own = RewardSettings(stand_in(tiny_model, tmp_path / "m", reward_format(name)), name, "sentence")
    reader = open_rewards(own)
    alone = RewardReader(reader._model, reader._encoder, format=reader.format, steps="sentence", forward_tokens=1)
    with tokens_read() as packed:
        found = reader.read(samples)
    with tokens_read() as single:
        wanted = alone.read(samples)
    assert sum(packed) < 0.8 * sum(single)
    for rows, others in zip(found, wanted, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert row == pytest.approx(other, abs=1e-5)


def test_equal_responses_are_read_once(settings: RewardSettings, samples: list[QuestionSamples]) -> None:
    """Within a question, in its duplicate, and in the next call for the same responses."""
    reader, entry = open_rewards(settings), samples[0]
    twice = replace(entry, samples=[*entry.samples, *entry.samples])

    def read(pool: list[QuestionSamples]) -> tuple[Any, int]:
        with tokens_read() as seen:
            return reader.read(pool), sum(seen)

    read([samples[1]])  # with the check of a first call
    alone, once = read([entry])
    assert once > 0
    assert read([entry]) == (alone, 0)
    read([samples[1]])
    assert read([twice, entry]) == ([alone[0] * 2, alone[0]], once)


@pytest.mark.parametrize("why", ["configuration", "check"])
def test_unpacked_is_padded(why: str, settings: RewardSettings, samples: list, monkeypatch: pytest.MonkeyPatch) -> None:
    packing = open_rewards(settings)
    with tokens_read() as packed:
        wanted = packing.read_scores(samples)
    if why == "check":
        differs = Mock(side_effect=PackingError("Expected the same, but got something else."))
        monkeypatch.setattr(packing_support, "check_packed_equals_separate", differs)
    else:
        monkeypatch.setattr(packing_support, "shared_prefix_problem", lambda config: "its attention slides")
    reader = open_rewards(settings)
    with tokens_read() as padded:
        found = reader.read_scores(samples)
    assert sum(padded) > 2 * sum(packed)
    for rows, others in zip(found, wanted, strict=True):
        for row, other in zip(rows, others, strict=True):
            assert [value for score in row or [] for value in score] == pytest.approx(
                [value for score in other or [] for value in score], abs=1e-5
            )


def test_the_states_of_a_trunk_are_held_against_whole_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    trunk = LlamaModel(LlamaConfig(vocab_size=64, num_hidden_layers=2, initializer_range=0.5, **sizes)).eval()
    packing_support.prefer_segments(trunk)
    packing_support.check_packed_equals_separate(trunk)
    right = packing_support.packed_inputs
    shifted = lambda trees, ids, kind: right(trees, ids, kind) | {"position_ids": torch.arange(ids.shape[1])[None]}  # noqa: E731
    monkeypatch.setattr(packing_support, "packed_inputs", shifted)
    with pytest.raises(PackingError, match="they differ by"):
        packing_support.check_packed_equals_separate(trunk)


def test_rows_by_hand() -> None:
    one, two, other = RewardInput((1, 2, 3), (2,)), RewardInput((1, 2), (0, 1)), RewardInput((7, 8), (1,))
    row = pack([[one, two], [other]])
    assert row.ids == [1, 2, 3, 7, 8]
    assert [(tree.start, tree.prompt, tree.branches) for tree in row.trees] == [(0, 2, (1, 0)), (3, 2, (0,))]
    assert row.positions == [[2], [0, 1], [4]]
    strangers = pack([[one, other]])
    assert strangers.ids == [1, 2, 3, 7, 8]
    assert [tree.prompt for tree in strangers.trees] == [3, 2], "nothing is shared"
    assert list(batches([[one, two], [other]], limit=5)) == [[[one, two], [other]]]
    assert list(batches([[one, two], [other]], limit=4)) == [[[one, two]], [[other]]]
    assert list(batches([[one, two], [other]], limit=1)) == [[[one]], [[two]], [[other]]]
    assert list(batches([[], []], limit=1)) == []
