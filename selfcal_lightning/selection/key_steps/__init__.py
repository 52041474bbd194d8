"""Key steps of selected responses: by rules, or by a model that is asked for them."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "asking": ["EngineExtractor"],
        "base": ["Extracted", "KeyStep", "StepExtractor"],
        "files": ["KeySteps", "read_key_steps"],
        "rules": ["RuleExtractor"],
    },
)
