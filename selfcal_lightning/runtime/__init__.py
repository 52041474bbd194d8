"""What every room may need: files, progress, signals, plans, late imports."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "config_files": ["check_nesting", "given_settings", "read_config"],
        "files": [
            "as_json_line",
            "open_atomically",
            "remove_abandoned",
            "to_json",
            "write_atomically",
            "write_json_lines",
        ],
        "imports": ["check_installed", "is_installed", "keep_bitsandbytes_quiet", "require"],
        "interruptions": ["keeping"],
        "json_files": ["UnreadableJSONError", "json_object_or_none", "parse_json", "read_json_object"],
        "last_resort": ["explain", "explain_interruption", "say_last", "wants_traceback"],
        "overwriting": ["check_apart", "check_replaceable", "is_empty_folder"],
        "path_names": ["check_path_name", "file_name"],
        "plan": [
            "Memory",
            "Participant",
            "Place",
            "Plan",
            "QuestionCount",
            "Sampling",
            "Training",
            "check_places",
            "free_bytes",
            "merge_plans",
            "show_bytes",
        ],
        "progress": ["Progress", "Stage", "counted", "say"],
        "rendezvous": ["Rendezvous"],
        "step_process": ["run_step"],
        "stop_signals": ["Interrupt", "PreemptedError", "StopSignals", "never"],
    },
)
