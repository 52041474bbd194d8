"""Test-time scaling: strategies, their driver, thresholds, and answering questions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "adaptive_consistency": ["AdaptiveConsistency"],
        "answering": ["Answer", "ask_question", "best_response", "default_task", "read_questions", "summarise"],
        "base": ["Ask", "Solving", "Strategy", "leader", "make_verdict", "weighted_votes"],
        "choices": [
            "check_sampled_alike",
            "choose_prompt",
            "choose_strategy",
            "load_fitted_files",
            "promise_note",
            "uncalibrated_note",
        ],
        "driver": ["run_strategy"],
        "registry": ["check_can_answer", "make_strategy", "setting_names"],
        "sources": ["EngineSource", "ReplaySource"],
        "stopping": ["CGES", "EarlyStopping", "WindowStopping", "fit_evidence"],
        "thresholds": [
            "CalibrationPool",
            "FittedThreshold",
            "GridOutcome",
            "GridSums",
            "NoThresholdError",
            "as_gridded",
            "confidence_quantiles",
            "choose_threshold",
            "fit_goal_threshold",
            "fit_risk_threshold",
            "grid_of",
            "grid_outcome",
        ],
        "vectorised": ["OrderBlock", "Orders", "PoolArrays", "leaders_at", "right_codes", "votes_of"],
        "voting": ["BestOfN", "BordaVoting", "CISC", "PassAtN", "SelfConsistency", "StandardisedVoting"],
    },
)
