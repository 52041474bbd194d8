"""Strategies by name: every one is a frozen dataclass under one contract, and mistakes are answered with help."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from support.strategy_pools import random_pool

from selfcal_lightning.inference.registry import ORACLES, STRATEGIES, describe_strategy, make_strategy, setting_names
from selfcal_lightning.inference.sources import replay
from selfcal_lightning.inference.vectorised import PoolArrays
from selfcal_lightning.inference.voting import SelfConsistency


def test_all_strategies_of_the_issue_are_there() -> None:
    names = "best_of_n self_consistency early_stopping adaptive_consistency cges window_stopping cisc borda pass_at_n"
    assert set(STRATEGIES) == {*names.split(), "standardised"}
    assert set(ORACLES) == {"pass_at_n"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_contract(name: str) -> None:
    strategy: Any = make_strategy(name, max_samples=5)
    assert is_dataclass(strategy)
    assert strategy.name == name
    assert strategy.max_samples == 5
    assert strategy.confidence is None or isinstance(strategy.confidence, str)
    assert strategy.grid_parameter in {field.name for field in fields(strategy)}
    with pytest.raises(FrozenInstanceError):
        strategy.max_samples = 6
    with pytest.raises(ValueError, match="`max_samples` to be a positive integer, but got 0"):
        make_strategy(name, max_samples=0)
    pool = random_pool(0)
    arrays = PoolArrays.from_samples(pool, confidence=strategy.confidence)
    setting = getattr(strategy, strategy.grid_parameter)
    outcome = strategy.curve(arrays, [setting, setting])
    assert outcome.answer.shape == outcome.used.shape == outcome.stopped_early.shape == (2, len(pool))
    assert (outcome.answer.dtype, outcome.stopped_early.dtype) == (np.int32, np.bool_)
    assert np.issubdtype(outcome.used.dtype, np.int64)
    assert outcome.used[0].tolist() == [replay(strategy, entry).samples_used for entry in pool]
    assert outcome.used.max() <= 5


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_description_goes_through_json_and_back(name: str) -> None:
    strategy: Any = replace(make_strategy(name), max_samples=7)  # type: ignore[type-var]
    described = json.loads(json.dumps(describe_strategy(strategy)))
    assert described["name"] == name
    assert described["max_samples"] == 7
    assert make_strategy(**described) == strategy


def test_mistakes_are_answered_with_help() -> None:
    with pytest.raises(
        ValueError, match=r"`strategy` to be one of best_of_n, .*'self_consistancy'\. Did you mean 'self_con"
    ):
        make_strategy("self_consistancy")
    with pytest.raises(ValueError, match=r"one of best_of_n, .* but got 'zzz'\.$"):
        setting_names("zzz")
    with pytest.raises(
        ValueError,
        match=r"settings of early_stopping to be among threshold, max_.*'treshold'\. Did you mean 'threshold'\?",
    ):
        make_strategy("early_stopping", treshold=0.5)
    # A strategy that reads no confidence takes none, rather than ignore it.
    with pytest.raises(ValueError, match=r"settings of pass_at_n to be among max_samples, but got 'confidence'\.$"):
        make_strategy("pass_at_n", confidence="p_true")
    with pytest.raises(ValueError, match=r"Expected `threshold` .* but got 1.2"):
        make_strategy("early_stopping", threshold=1.2)

    class Other(SelfConsistency):
        """Stands under no name."""

    with pytest.raises(ValueError, match=r"Expected `strategy` to be one of .* but got Other\."):
        describe_strategy(Other())


def test_the_registry_loads_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'sympy'}"
    script = f"import sys, selfcal_lightning.inference.registry; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
