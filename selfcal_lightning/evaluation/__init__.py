"""Evaluations: their inputs, calibration before and after, strategies, tables and figures."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "calibration.comparison": ["compare_calibration"],
        "calibration.metrics": ["scored_responses", "summarise"],
        "calibration.votes": ["compare_votes"],
        "calibration_split": ["Calibrated", "calibrate_side"],
        "folder": ["check_evaluation_folder", "open_evaluation_folder"],
        "inputs": [
            "Inputs",
            "PoolSource",
            "TestSet",
            "check_inputs",
            "read_pools",
            "sample_models",
            "split_off_calibration",
        ],
        "outputs": ["report_json", "score_cells", "show_briefly", "show_strategies", "write_strategies"],
        "paper.outputs": ["check_one_confidence", "run_paper"],
        "plan": ["ModelInputs", "check_sampled", "check_share", "plan_models", "plan_pools"],
        "reports.calibration_figures": ["confidence_distribution", "reliability_diagram", "roc_figure"],
        "reports.figure_files": ["is_own_figure", "save_figure"],
        "sides": ["SamplingOptions", "model_sides"],
        "strategies.curves": ["Job", "StrategyCurve", "evaluate_jobs"],
        "strategies.evaluation": ["StrategyReport", "report_on", "run_strategies"],
        "strategies.plans": ["make_jobs"],
        "strategies.reshuffles": ["Reshuffles"],
        "strategies.settings": ["StrategySettings", "settings_json"],
        "strategies.side": ["SideStrategies"],
        "strategies.statistics": ["Resampled", "difference"],
        "strategies.thresholds": ["evaluate_given", "save_thresholds"],
        "test_set": ["prepare_test"],
        "training_cost": ["TrainingCost"],
    },
)
