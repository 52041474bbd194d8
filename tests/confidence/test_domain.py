import json
from pathlib import Path

import numpy as np
import pytest

from selfcal_lightning.confidence.domain import FILE, Domain, calibrated_in_domain, prompt_states
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.prompt_states import network_states
from selfcal_lightning.inference.answering import read_questions

RANDOM = np.random.default_rng(0)


@pytest.fixture
def states() -> np.ndarray:
    return RANDOM.normal(size=(200, 6)) @ RANDOM.normal(size=(6, 12)) + 3.0


def test_the_distance_is_mahalanobis_in_all_directions(states: np.ndarray) -> None:
    """Held to a direct solve with the whole covariance, K being as large as the space."""
    domain, new = Domain.fit(states), RANDOM.normal(size=(5, 12))
    spread = np.cov(states.T)
    spread += np.eye(12) * 0.01 * np.trace(spread) / 12
    off = new - states.mean(axis=0)
    expected = np.sqrt(np.einsum("nd,nd->n", off, np.linalg.solve(spread, off.T).T))
    assert np.allclose(domain.distance(new), expected, rtol=1e-6)


def test_few_held_out_questions_are_beyond_the_threshold_and_others_are(states: np.ndarray) -> None:
    domain = Domain.fit(states[:150])
    assert np.mean(domain.holds(states[150:])) >= 0.94
    assert not any(domain.holds(states[150:] + 20.0 * RANDOM.normal(size=12)))


def test_the_file_gives_the_same_and_damage_is_refused(states: np.ndarray, tmp_path: Path) -> None:
    domain = Domain.fit(states)
    domain.save(tmp_path)
    read = Domain.of(tmp_path)
    assert read is not None
    assert np.allclose(read.distance(states), domain.distance(states), rtol=1e-4)
    assert Domain.of(tmp_path / "elsewhere") is None
    content = json.loads((tmp_path / FILE).read_text())
    (tmp_path / FILE).write_text(json.dumps({**content, "threshold": 1e9}))
    with pytest.raises(InputError, match=FILE):
        Domain.of(tmp_path)


def test_a_model_in_training_and_its_engine_see_the_same(shallow_model: str, tmp_path: Path) -> None:
    engine = TransformersEngine(shallow_model)
    asked = read_questions([{"question": f"What is {10 ** (n % 9)}+{n}?"} for n in range(40)], task="word_problems")
    prompts = [engine.chat.prompt_ids(question.messages) for question in asked]
    states = network_states(engine._require_model().network, prompts)
    assert np.allclose(states, prompt_states(engine, asked), atol=1e-5)
    Domain.fit(states).save(tmp_path)
    assert calibrated_in_domain(engine, asked, tmp_path) == {question.id: True for question in asked}
    other = read_questions([{"question": "Who wrote Hamlet, and when was it first performed?"}], task="word_problems")
    assert calibrated_in_domain(engine, other, tmp_path) == {"line-1": False}
    assert calibrated_in_domain(object(), asked, tmp_path) == {}, "nobody knows"
    Domain.fit(states[:, :8]).save(tmp_path)
    with pytest.raises(InputError, match=f"{FILE} .* 128 .* but got 8"):
        calibrated_in_domain(engine, asked, tmp_path)
