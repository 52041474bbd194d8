"""Learning from unlabelled responses: data selection and test-time training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"selection_files": ["examples", "read_selection"]}
)
