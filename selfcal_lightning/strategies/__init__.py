"""Test-time strategies: when to stop sampling, and which answer to give."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "base": ["Ask", "Solving", "Strategy", "leader", "make_verdict", "weighted_votes"],
        "driver": ["run_strategy"],
        "registry": ["check_can_answer", "make_strategy", "setting_names"],
        "rules.adaptive_consistency": ["AdaptiveConsistency"],
        "rules.best_of_n": ["BestOfN"],
        "rules.borda": ["BordaVoting"],
        "rules.cges": ["CGES", "fit_evidence"],
        "rules.cisc": ["CISC"],
        "rules.early_stopping": ["EarlyStopping"],
        "rules.pass_at_n": ["PassAtN"],
        "rules.self_consistency": ["SelfConsistency"],
        "rules.standardised": ["StandardisedVoting"],
        "rules.window_stopping": ["WindowStopping"],
        "replay_source": ["ReplaySource"],
        "sources": ["EngineSource"],
        "thresholds.calibration_pool": ["CalibrationPool"],
        "thresholds.fitted": ["FittedThreshold"],
        "thresholds.fitting": [
            "NoThresholdError",
            "fit_accuracy_threshold",
            "fit_budget_threshold",
            "fit_risk_threshold",
            "threshold_for_budget",
        ],
        "thresholds.grids": [
            "GridOutcome",
            "GridSums",
            "as_gridded",
            "confidence_quantiles",
            "grid_of",
            "grid_outcome",
        ],
        "vectorised.arrays": ["CurveStrategy", "PoolArrays"],
        "vectorised.orders": ["OrderBlock", "Orders", "right_codes"],
        "vectorised.votes": ["leaders_at", "votes_of"],
    },
)
