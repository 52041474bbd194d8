"""Tables and figures."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "calibration_figures": [
            "confidence_distribution",
            "reliability_comparison",
            "reliability_diagram",
            "reliability_grid",
            "roc_figure",
        ],
        "calibration_tables": [
            "comparison_csv",
            "comparison_markdown",
            "comparison_rows",
            "comparison_table",
            "format_estimate",
        ],
        "figure_files": ["is_own_figure", "save_figure"],
        "strategy_figures": ["accuracy_figure", "risk_coverage_figure"],
        "strategy_rows": [
            "BreakEvenRow",
            "BudgetRow",
            "ChosenSetting",
            "ConsensusRow",
            "Contender",
            "CurveRow",
            "SavingRow",
        ],
        "strategy_tables": [
            "break_even_table",
            "budget_table",
            "consensus_table",
            "curves_csv",
            "headline",
            "saving_table",
            "short_table",
            "strategies_markdown",
        ],
        "vote_reports": ["VoteRow", "votes_figure", "votes_markdown", "votes_table"],
    },
)
