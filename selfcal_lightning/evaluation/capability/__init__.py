"""Estimates of capability held against what the model's responses show."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "asking": ["AskingRow", "compare_asking"],
        "budgets": ["BudgetRow", "compare_budgets"],
        "comparison": ["CapabilityComparison", "EstimatorRow", "compare_estimators"],
        "costs": ["cost_figure"],
        "decomposition": ["DecompositionRow", "DefinitionGap", "decompose_errors", "definition_gap"],
        "estimates": ["TestQuestions", "test_questions"],
        "figures": ["budget_figure", "capability_reliability", "mixing_figure", "pass_at_k_figure"],
        "mixing": ["MixingRow", "compare_mixing"],
        "pass_at_k": ["PassAtKCurve", "pass_at_k_curves"],
        "tables": ["comparison_markdown", "comparison_table"],
    },
)
