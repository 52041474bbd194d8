"""The command line: which verb runs what. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence

from selfcal_lightning import __version__

TRAINER_VERBS = {
    "fit": "calibrate a model: sample responses, pool their confidence, train",
    "validate": "score the fixed pool of the validation split",
    "test": "score the fixed pool of the test split",
    "predict": "write the model's confidence in each stored response into the store",
}
FUNCTION_VERBS = {
    "generate": ("generate", "run_generate", "sample responses with confidences into a store"),
    "export": ("export", "run_export", "merge an adapter into its base model"),
    "score": ("score", "run_score", "put further confidences on the responses of a store or a pool"),
    "fit-confidence": ("calibrate_confidence", "run_fit_confidence", "fit a fused or scaled confidence on a split"),
    "fit-threshold": ("calibrate_confidence", "run_fit_threshold", "choose a strategy's threshold on a split"),
    "evaluate": ("evaluate", "run_evaluate", "judge calibration and strategies, on models or recorded pools"),
    "answer": ("answer", "run_answer", "answer questions, sampling only as long as the confidence demands"),
    "import-pool": ("interchange", "run_import_pool", "read a JSON-lines pool of responses made elsewhere"),
    "export-pool": ("interchange", "run_export_pool", "write a store as a JSON-lines pool"),
    "import-records": ("interchange", "run_import_records", "read published training records"),
    "reread": ("reread", "run_reread", "read the answers of a store anew, after a reader was mended"),
    "drop-rounds": ("drop_rounds", "run_drop_rounds", "delete later rounds of a store, for another training"),
    "demo": ("demo", "run_demo", "calibrate the bundled model and show before and after, in minutes"),
}


def usage() -> str:
    """Return the text of ``selfcal --help``."""
    verbs = {**TRAINER_VERBS, **{verb: row[2] for verb, row in FUNCTION_VERBS.items()}}
    lines = [f"  {verb:<15}{text}" for verb, text in verbs.items()]
    return "\n".join(
        [
            "usage: selfcal VERB [options]",
            "",
            "Teach a language model to know when it is right, then spend samples only where they are needed.",
            "",
            "verbs:",
            *lines,
            "",
            "`selfcal VERB --help` lists a verb's options. Every verb takes --config FILE.yaml.",
            "SELFCAL_TRACEBACK=1 shows where an error was raised.",
            "",
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Run one verb and return the exit status: 0 done, 1 failed, 2 not understood."""
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        sys.stdout.write(usage())
        return 0 if arguments else 2
    verb, rest = arguments[0], list(arguments[1:])
    if verb in {"--version", "version"}:
        sys.stdout.write(f"selfcal_lightning {__version__}\n")
        return 0
    if verb not in TRAINER_VERBS and verb not in FUNCTION_VERBS:
        sys.stderr.write(f"selfcal: Expected a verb, but got {verb!r}.\n\n{usage()}")
        return 2
    try:
        if verb in TRAINER_VERBS:
            importlib.import_module("selfcal_lightning.lightning_cli").run_trainer([verb, *rest])
        else:
            run_function(verb, rest)
    except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("SELFCAL_TRACEBACK"):
            raise
        sys.stderr.write(f"selfcal {verb}: error: {error}\n")
        return 1
    return 0


def run_function(verb: str, arguments: list[str]) -> None:
    """Parse ``arguments`` by the signature of the verb's function in ``pipelines`` and call it."""
    from jsonargparse import auto_cli

    room, name, _ = FUNCTION_VERBS[verb]
    function = getattr(importlib.import_module(f"selfcal_lightning.pipelines.{room}"), name)
    auto_cli(function, args=fill_flags(function, arguments), as_positional=False, prog=f"selfcal {verb}")


def fill_flags(function: Callable[..., object], arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with "true" after each option that is a flag of ``function`` and stands alone.

    Example:
        >>> def answer(model: str, json: bool = False): ...
        >>> fill_flags(answer, ["--json", "--model", "m"]), fill_flags(answer, ["--json", "false"])
        (['--json', 'true', '--model', 'm'], ['--json', 'false'])
    """
    parameters = inspect.signature(function, eval_str=False).parameters.values()
    flags = {f"--{parameter.name}" for parameter in parameters if parameter.annotation in (bool, "bool")}
    filled: list[str] = []
    for place, argument in enumerate(arguments):
        filled.append(argument)
        if argument in flags and (place + 1 == len(arguments) or arguments[place + 1].startswith("--")):
            filled.append("true")
    return filled
