"""The verbs of the command line."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "answer": ["run_answer"],
        "demo": ["run_demo"],
        "drop_rounds": ["run_drop_rounds"],
        "evaluate": ["run_evaluate"],
        "export": ["run_export"],
        "export_pool": ["run_export_pool"],
        "fit_confidence": ["run_fit_confidence"],
        "fit_threshold": ["run_fit_threshold"],
        "generate": ["run_generate"],
        "import_pool": ["run_import_pool"],
        "import_records": ["run_import_records"],
        "reread": ["run_reread"],
        "score": ["run_score"],
    },
)
