"""Tasks that come with the package, one family a file."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "arithmetic": ["ObjectCounting"],
        "choice": ["AquaRat", "CommonsenseQA", "MathQA", "OpenBookQA", "SciQ", "WinoGrande"],
        "competition": ["Math500"],
        "local": ["LocalQuestions"],
        "reading": ["LogiQA", "ReClor"],
        "word_problem_templates": ["Draft", "Equation", "Problem"],
        "word_problems": ["Difficulty", "WordProblems", "sample_problem", "write_solution"],
    },
)
