"""All strategies by name. To add one, write a class like the others and list it here, or register it from a plug-in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any

from selfcal_lightning.core.errors import InputError, did_you_mean, unknown_name
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, WindowStopping
from selfcal_lightning.inference.voting import CISC, BestOfN, BordaVoting, PassAtN, SelfConsistency, StandardisedVoting

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
    "standardised": StandardisedVoting,
    "pass_at_n": PassAtN,
}
# A reward model steers them while responses are sampled, so that nothing recorded can be replayed by them.
# They are the neighbours' above this room, named as plug-ins are.
SEARCHES: dict[str, Any] = {search.name: search for search in resolve_name("selfcal_lightning.rewards.search:SEARCHES")}
# They look at the reference: upper bounds for tables, no use for answering a question.
ORACLES = ("pass_at_n",)
_PARTS = ("name", "grid_parameter", "max_samples", "confidence", "solve")


def register_strategy(strategy: type) -> type:
    """Register a strategy class under its ``name``; usable as a decorator.

    Args:
        strategy: A frozen dataclass whose fields have defaults, with ``name``, ``grid_parameter``, ``max_samples``,
            ``confidence`` and ``solve``. Without a vectorised ``curve`` it is replayed sample by sample.

    Raises:
        InputError: The name is taken, or the class lacks something.
    """
    known = {*dir(strategy), *(one.name for one in fields(strategy))} if is_dataclass(strategy) else set(dir(strategy))
    missing = [name for name in _PARTS if name not in known]
    if missing:
        raise InputError(
            f"Expected the strategy {strategy.__name__} to have {', '.join(_PARTS)}, but {', '.join(missing)} is "
            "missing."
        )
    if not is_dataclass(strategy) or not strategy.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InputError(f"Expected the strategy {strategy.__name__} to be a frozen dataclass, but it is not.")
    if bare := [one.name for one in fields(strategy) if one.default is MISSING and one.default_factory is MISSING]:
        raise InputError(f"Expected the fields of {strategy.__name__} to have defaults, but {bare[0]} has none.")
    name = str(strategy.name)  # type: ignore[attr-defined]
    if name in STRATEGIES or name in SEARCHES:
        raise InputError(f"Expected the strategy's `name` to be new, but {name!r} is registered already.")
    STRATEGIES[name] = strategy
    return strategy


def make_strategy(name: str, **settings: Any) -> Strategy:
    """Return the strategy ``name`` with these fields."""
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
    """Raise ValueError if the strategy ``name`` is an oracle that reads the reference.

    Example:
        >>> check_can_answer("pass_at_n")
        Traceback (most recent call last):
        selfcal_lightning.core.errors.InputError: Expected `strategy` to be one that can answer, but got ...
    """
    if name in ORACLES:
        raise InputError(f"Expected `strategy` to be one that can answer, but got {name!r}, which knows the reference.")


def unknown_strategy(option: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for a name that is not a strategy for recorded samples.

    Example:
        >>> print(unknown_strategy("strategies", "beam_search", ["cges"]))
        Expected `strategies` to name strategies on recorded samples, but got 'beam_search', which a reward model ...
    """
    if name not in SEARCHES:
        return unknown_name(option, name, list(known))
    return InputError(
        f"Expected `{option}` to name strategies on recorded samples, but got {name!r}, which a reward model steers "
        f"while responses are sampled. Run it live: `selfcal answer --questions FILE --strategy {name} --reward.model "
        "FOLDER` tells what is right, and what it cost."
    )


def setting_names(name: str) -> tuple[str, ...]:
    """Return the names of the fields of the strategy ``name``."""
    if name not in STRATEGIES:
        raise unknown_strategy("strategy", name, STRATEGIES)
    return tuple(field.name for field in fields(STRATEGIES[name]))
