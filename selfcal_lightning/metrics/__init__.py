"""Metrics of confidence: calibration, discrimination, agreement, intervals, risk; in NumPy and as torchmetrics."""

import lazy_loader

_NAMES = {
    "bootstrap": """
        Estimate MetricChange ScoredResponses bootstrap_interval calibration_error_bounds error_change
        paired_bootstrap question_bootstrap resample_counts
    """,
    "calibration": """
        ErrorBounds ReliabilityBins brier_score debiased_calibration_error expected_calibration_error reliability_bins
    """,
    "capability": """
        ErrorParts TargetGap agreeing_pairs drawn_verdicts error_parts expected_accuracy pass_at_k random_brier
        simulated_pass_at_k skill squared_error squared_errors target_gap top_share
    """,
    "consistency": "consistency_bucket leave_one_out soft_self_consistency vote_share",
    "curves": """
        Proportion RiskCoverage best_setting_within break_even cheapest_setting_reaching cost_to_reach costs_to_reach
        risk_coverage setting_within wilson_interval
    """,
    "discrimination": """
        WithinQuestion aurc auroc kendall pearson roc_curve spearman within_question_discrimination
    """,
    "group_rewards": """
        anchored_soft_share group_advantages majority majority_answer reward_accuracy share soft_share
    """,
    "risk": """
        Certificate binomial_p_value certify_threshold guided_grid hoeffding_bentkus_p_value questions_needed reject
        selective_counts
    """,
    "streaming": "BinnedCalibrationError ConfidenceAUROC ExactMetric WithinQuestionAUROC",
}

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={module: names.split() for module, names in _NAMES.items()}
)
