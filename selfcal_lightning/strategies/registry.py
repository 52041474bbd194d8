"""All strategies by name. A new one is a class like its neighbours and one line here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from selfcal_lightning.errors import InputError, did_you_mean, unknown_name
from selfcal_lightning.strategies.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.strategies.base import Strategy
from selfcal_lightning.strategies.best_of_n import BestOfN
from selfcal_lightning.strategies.borda import BordaVoting
from selfcal_lightning.strategies.cges import CGES
from selfcal_lightning.strategies.cisc import CISC
from selfcal_lightning.strategies.early_stopping import EarlyStopping
from selfcal_lightning.strategies.pass_at_n import PassAtN
from selfcal_lightning.strategies.self_consistency import SelfConsistency
from selfcal_lightning.strategies.window_stopping import WindowStopping

# Every class is a frozen dataclass that is a `Strategy` and has `grid_parameter`; one without `curve` is replayed.
STRATEGIES: dict[str, type] = {
    "best_of_n": BestOfN,
    "self_consistency": SelfConsistency,
    "early_stopping": EarlyStopping,
    "adaptive_consistency": AdaptiveConsistency,
    "cges": CGES,
    "window_stopping": WindowStopping,
    "cisc": CISC,
    "borda": BordaVoting,
    "pass_at_n": PassAtN,
}
# They look at the reference: upper bounds for tables, no use for answering a question.
ORACLES = ("pass_at_n",)


def make_strategy(name: str, **settings: Any) -> Strategy:
    """Return the strategy ``name`` with these fields; fields left out keep their defaults.

    Raises:
        InputError: If there is no such strategy or field, or a value is not allowed.

    Example:
        >>> make_strategy("early_stopping", threshold=0.8, max_samples=8)
        EarlyStopping(threshold=0.8, max_samples=8, confidence='p_true', fallback='weighted_vote')
    """
    known = setting_names(name)
    for setting in settings:
        if setting not in known:
            raise InputError(
                f"Expected the settings of {name} to be among {', '.join(known)}, but got {setting!r}."
                f"{did_you_mean(setting, known)}"
            )
    strategy: Strategy = STRATEGIES[name](**settings)
    return strategy


def check_can_answer(name: str) -> None:
    """Raise ValueError where the strategy ``name`` looks at the reference, so that nobody can run it on a question.

    Example:
        >>> check_can_answer("pass_at_n")
        Traceback (most recent call last):
        selfcal_lightning.errors.InputError: Expected `strategy` to be one that can answer, but got ...
    """
    if name in ORACLES:
        raise InputError(f"Expected `strategy` to be one that can answer, but got {name!r}, which knows the reference.")


def setting_names(name: str) -> tuple[str, ...]:
    """Return the names of the fields of the strategy ``name``.

    Raises:
        InputError: If there is no such strategy.

    Example:
        >>> setting_names("window_stopping")
        ('window', 'max_samples', 'mode')
    """
    if name not in STRATEGIES:
        known = tuple(STRATEGIES)
        raise unknown_name("strategy", name, known)
    return tuple(field.name for field in fields(STRATEGIES[name]))


def describe_strategy(strategy: Strategy) -> dict[str, Any]:
    """Return the strategy's name here and its fields as plain values for JSON; ``make_strategy(**it)`` undoes it.

    Raises:
        InputError: If its class stands under no name here.

    Example:
        >>> describe_strategy(SelfConsistency(max_samples=4))
        {'name': 'self_consistency', 'max_samples': 4, 'confidence': None}
    """
    for name, cls in STRATEGIES.items():
        if type(strategy) is cls:
            return {"name": name, **{field: getattr(strategy, field) for field in setting_names(name)}}
    raise InputError(f"Expected `strategy` to be one of {', '.join(STRATEGIES)}, but got {type(strategy).__name__}.")
