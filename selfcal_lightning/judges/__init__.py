"""Models that judge answers where comparing texts falls short."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "asking": ["Candidate", "candidates_of", "grade_candidates"],
        "forms": ["FORMS", "Form", "Grade", "read_grade", "write_judgement"],
        "verdicts": ["KeptVerdicts", "Verdicts"],
    },
)
