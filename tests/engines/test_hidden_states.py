"""Hidden states of prompts equal those that the model itself returns, whatever the padding, the level and the batch."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.settings import EngineSettings, LevelSettings, check_gives_hidden_states
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.prompt_states import decoder_layers

PROMPTS = [[5, 9, 11], [7], [5, 9, 11, 40, 41, 42, 43, 44], [12, 13, 14, 15]]
EACH = LevelSettings(average=False)


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_model)
    yield engine
    engine.close()


def plain_states(network: torch.nn.Module, prompt: list[int]) -> NDArray[np.float32]:
    """Return what transformers gives for one prompt without padding, [levels, tokens, D]."""
    with torch.no_grad():
        states = network(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    return torch.cat(states).numpy()


def test_they_are_the_model_s_own_states(engine: TransformersEngine, tiny_model: str) -> None:
    network = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    states = engine.prompt_states(PROMPTS, EACH)
    assert states.last_token.shape == states.token_mean.shape == (4, network.config.num_hidden_layers + 1, 128)
    for row, prompt in enumerate(PROMPTS):
        expected = plain_states(network, prompt)
        np.testing.assert_allclose(states.last_token[row], expected[:, -1], atol=2e-4, rtol=1e-4)
        np.testing.assert_allclose(states.token_mean[row], expected.mean(1), atol=2e-4, rtol=1e-4)


def test_levels_are_chosen_and_averaged(engine: TransformersEngine) -> None:
    each = engine.prompt_states(PROMPTS, EACH).last_token
    some = engine.prompt_states(PROMPTS, LevelSettings((0, 3, -1), average=False)).last_token
    np.testing.assert_array_equal(some, each[:, [0, 3, each.shape[1] - 1]])
    mean = engine.prompt_states(PROMPTS, LevelSettings((0, 3, -1))).last_token
    np.testing.assert_allclose(mean[:, 0], some.mean(1), rtol=1e-5)


def test_the_last_level_is_read_behind_or_before_the_final_norm(engine: TransformersEngine, tiny_model: str) -> None:
    norm = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).get_decoder().norm
    behind = engine.prompt_states(PROMPTS, LevelSettings((-1,))).last_token
    before = engine.prompt_states(PROMPTS, LevelSettings((-1,), final_norm=False)).last_token
    assert np.abs(before).mean() > 2 * np.abs(behind).mean()
    with torch.no_grad():
        np.testing.assert_allclose(norm(torch.from_numpy(before)).numpy(), behind, atol=1e-4, rtol=1e-4)
    inner = [engine.prompt_states(PROMPTS, LevelSettings((2,), final_norm=norm)).last_token for norm in (True, False)]
    np.testing.assert_array_equal(*inner)


def test_levels_and_prompts_that_there_are_not_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(InputError, match="Expected prompts of 1 to"):
        engine.prompt_states([[]], EACH)
    for levels in ((9,), (-10,), (1, 1), (), (0, -9)):
        with pytest.raises(InputError, match="`levels` to be distinct and from 0, the embedding, to 8"):
            engine.prompt_states(PROMPTS, LevelSettings(levels))


def test_models_of_another_build(tiny_model: str) -> None:
    """GPT-2 names its parts otherwise, and adds positions before its first layer."""
    network = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=3, n_head=2)).eval()
    chat = TransformersEngine(tiny_model).chat
    states = TransformersEngine.from_model(network, chat).prompt_states(PROMPTS, EACH)
    for row, prompt in enumerate(PROMPTS):
        np.testing.assert_allclose(states.last_token[row], plain_states(network, prompt)[:, -1], atol=1e-5, rtol=1e-4)
    network.get_decoder().twin = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])
    with pytest.raises(InputError, match="one list of its 3 layers, but got 2 in GPT2Model"):
        decoder_layers(network.get_decoder())


@pytest.mark.parametrize(("name", "why"), [("vllm", "runs on GPUs only"), ("openai", "no hidden states")])
def test_other_engines_are_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(InputError, match=f"to be transformers where hidden states are read, but got '{name}'.*{why}"):
        check_gives_hidden_states(EngineSettings(name))  # type: ignore[arg-type]
    check_gives_hidden_states(EngineSettings())
