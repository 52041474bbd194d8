"""Strategies on recorded samples: settings chosen on calibration questions, curves, statistics."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "curves": ["Job", "StrategyCurve", "check_pool", "evaluate_jobs"],
        "evaluation": ["StrategyReport", "report_on", "run_strategies"],
        "plans": ["make_jobs"],
        "reshuffles": ["Reshuffles"],
        "settings": ["StrategySettings", "settings_json"],
        "side": ["SideStrategies"],
        "statistics": ["Resampled", "difference"],
        "thresholds": ["evaluate_given", "save_thresholds"],
    },
)
