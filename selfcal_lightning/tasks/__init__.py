"""Tasks: questions, how they are asked, how responses are read and judged."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "answers.extraction": ["final_part", "last_boxed"],
        "answers.math_processes": ["Undecided", "allow_undecided", "default_pool", "say_undecided"],
        "base": ["Task"],
        "dataset": ["DatasetTask", "write_messages"],
        "families.word_problem_templates": ["Draft", "Equation", "Problem"],
        "families.word_problems": ["Difficulty", "WordProblems", "sample_problem", "write_solution"],
        "judging": ["Judge", "is_failed", "judge", "judge_anew"],
        "registry": ["check_slice", "get_task", "load_some"],
        "rows": ["load_file_rows"],
        "sources": ["QuestionPlace", "check_source", "count_source", "load_source"],
        "token_costs": ["sample_tokens", "total_tokens"],
        "versions": ["reader_version"],
    },
)
