"""Learning from unlabelled responses: data selection and test-time training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "equations": [
            "Equation",
            "arithmetic_value",
            "canonical_step",
            "equation_validity",
            "find_equations",
            "step_key",
            "step_match",
            "step_numbers",
        ],
        "losses": ["entropy_bonus", "kl_estimate", "policy_gradient_loss", "sequence_ratio", "token_ratio"],
        "module": ["PolicyBatch", "TestTimeTrainingModule"],
        "monitors": ["RoundMonitors", "collapse", "own_agreement", "pool_agreement", "round_monitors"],
        "picking": [
            "Label",
            "Selected",
            "SelectedRow",
            "SelectionSettings",
            "Selective",
            "kept",
            "select_best",
            "select_rows",
        ],
        "selection_files": ["Example", "Selection", "examples", "read_selection", "write_selection"],
    },
)
