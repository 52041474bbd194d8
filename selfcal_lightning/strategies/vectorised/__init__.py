"""Strategies on whole pools at once."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "arrays": ["CurveOutcome", "CurveStrategy", "PoolArrays"],
        "orders": ["OrderBlock", "Orders", "right_codes"],
        "votes": [
            "Floats",
            "Integers",
            "VoteStep",
            "Votes",
            "as_budgets",
            "as_thresholds",
            "first_crossing",
            "leaders_at",
            "outcome_at",
            "outcome_of_budgets",
            "power_of_two",
            "vote_leader",
            "votes_of",
            "walk_votes",
        ],
    },
)
