from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest

from selfcal_lightning.inference.registry import STRATEGIES, make_strategy, setting_names
from selfcal_lightning.inference.vectorised import PoolArrays


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


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("adaptive_consistency", "criterion", "crp"),
        ("adaptive_consistency", "threshold", -0.1),
        ("adaptive_consistency", "min_samples", 0),
        ("best_of_n", "max_samples", 2.5),
        ("best_of_n", "confidence", None),
        ("borda", "power", -1.0),
        ("cges", "threshold", 1.01),
        ("cges", "confidence", None),
        ("cges", "wrong_answers", 0),
        ("cges", "evidence", 1.2),
        ("cges", "clamp", 0.0),
        ("cges", "clamp", 0.5),
        ("cisc", "temperature", 0.0),
        ("cisc", "temperature", float("nan")),
        ("cisc", "confidence", None),
        ("early_stopping", "threshold", float("nan")),
        ("early_stopping", "threshold", "0.9"),
        ("early_stopping", "confidence", None),
        ("early_stopping", "fallback", "vote"),
        ("pass_at_n", "max_samples", True),
        ("self_consistency", "confidence", ""),
        ("standardised", "confidence", None),
        ("window_stopping", "window", 0),
        ("window_stopping", "mode", "both"),
    ],
)
def test_bad_fields_are_named(name: str, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"`{field}` .* but got {value!r}"):
        make_strategy(name, **{field: value})


@pytest.mark.parametrize(
    ("criterion", "confidence", "message"),
    [("beta", "p_true", "to be None .* 'confidence_ratio'"), ("confidence_ratio", "", "to be the name")],
)
def test_a_criterion_says_whether_it_reads_a_confidence(criterion: str, confidence: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"Expected `confidence` {message}"):
        make_strategy("adaptive_consistency", criterion=criterion, confidence=confidence)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("self_consistency", "max_samples", 0),
        ("early_stopping", "threshold", -0.1),
        ("window_stopping", "window", 2.5),
        ("adaptive_consistency", "threshold", 2.0),
    ],
)
def test_bad_grids_are_named(name: str, field: str, value: float) -> None:
    strategy: Any = make_strategy(name)
    with pytest.raises(ValueError, match=f"Expected `{field}` .* but got {value}"):
        strategy.curve(PoolArrays.from_samples([]), [1, value])


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
