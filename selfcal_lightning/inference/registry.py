"""All strategies by name. To add one, write a class like the others and list it here, or register it from a plug-in."""

from collections.abc import Iterable
from dataclasses import MISSING, fields, is_dataclass
from pkgutil import resolve_name
from typing import Any

from selfcal_lightning.core.errors import InputError, did_you_mean, unknown_name
from selfcal_lightning.core.plugins import Registry
from selfcal_lightning.inference.adaptive_consistency import AdaptiveConsistency
from selfcal_lightning.inference.base import Strategy
from selfcal_lightning.inference.stopping import CGES, EarlyStopping, WindowStopping
from selfcal_lightning.inference.voting import CISC, BestOfN, BordaVoting, PassAtN, SelfConsistency, StandardisedVoting

STRATEGIES: Registry[type] = Registry(
    "strategy",
    (BestOfN, SelfConsistency, EarlyStopping, AdaptiveConsistency, CGES, WindowStopping, CISC, BordaVoting,
     StandardisedVoting, PassAtN),
)  # fmt: skip
# Searches are steered by a reward model while responses are sampled, so recorded samples cannot replay them. They
# belong to a room above this one and are named as plug-ins are.
SEARCHES: dict[str, Any] = {search.name: search for search in resolve_name("selfcal_lightning.rewards.search:SEARCHES")}
# Oracles look at the reference: upper bounds for tables, no use for answering a question.
ORACLES = ("pass_at_n",)
_PARTS = ("name", "grid_parameter", "max_samples", "confidence", "solve")


def register_strategy(strategy: type) -> type:
    """Register a strategy class under its ``name``; usable as a decorator.

    Args:
        strategy: A frozen dataclass whose fields have defaults, with ``name``, ``grid_parameter``, ``max_samples``,
            ``confidence`` and ``solve``. Without a vectorised ``curve`` it is replayed sample by sample.
    """
    if not is_dataclass(strategy) or not strategy.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise InputError(f"Expected the strategy {strategy.__name__} to be a frozen dataclass.")
    known = {*dir(strategy), *(one.name for one in fields(strategy))}
    if missing := [name for name in _PARTS if name not in known]:
        raise InputError(f"Expected {strategy.__name__} to have {', '.join(_PARTS)}, but it lacks {missing}.")
    if bare := [one.name for one in fields(strategy) if one.default is MISSING and one.default_factory is MISSING]:
        raise InputError(f"Expected the fields of {strategy.__name__} to have defaults, but {bare[0]} has none.")
    return STRATEGIES.register(strategy, reserved=SEARCHES)


def make_strategy(name: str, **settings: Any) -> Strategy:
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
    if name in ORACLES:
        raise InputError(f"Expected `strategy` to be one that can answer, but got {name!r}, which knows the reference.")


def unknown_strategy(option: str, name: str, known: Iterable[str]) -> InputError:
    if name not in SEARCHES:
        return unknown_name(option, name, list(known))
    return InputError(
        f"Expected `{option}` to name strategies on recorded samples, but a reward model steers {name!r} while "
        f"responses are sampled. Run it live: `selfcal answer --strategy {name} --reward.model FOLDER`."
    )


def setting_names(name: str) -> tuple[str, ...]:
    if name not in STRATEGIES:
        raise unknown_strategy("strategy", name, [*(one for one in STRATEGIES if one not in ORACLES), *SEARCHES])
    return tuple(field.name for field in fields(STRATEGIES[name]))
