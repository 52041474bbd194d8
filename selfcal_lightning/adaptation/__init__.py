"""Learning from unlabelled responses: data selection and test-time training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "equations": ["Equation", "arithmetic_value", "equation_validity", "find_equations"],
        "losses": ["entropy_bonus", "kl_estimate", "policy_gradient_loss", "sequence_ratio", "token_ratio"],
        "module": ["PolicyBatch", "TestTimeTrainingModule"],
        "monitors": ["RoundMonitors", "collapse", "own_agreement", "pool_agreement", "round_monitors"],
        "picking": ["Label", "Selected", "SelectedRow", "SelectionSettings", "select_best", "select_rows"],
        "selection_files": ["Example", "Selection", "examples", "read_selection", "write_selection"],
    },
)
