"""The command line: which verb runs what. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import get_type_hints

from selfcal_lightning import __version__
from selfcal_lightning.commands.trainer_start import (
    is_check,
    is_first_process,
    look_first,
    short_help,
    wants_short_help,
)
from selfcal_lightning.core.config_files import check_files, check_nesting, config_files, read_config
from selfcal_lightning.core.errors import did_you_mean
from selfcal_lightning.core.last_resort import FAILED, explain, explain_interruption, say_last, wants_traceback
from selfcal_lightning.core.plugins import load_plugins, load_plugins_of_parent, named_plugins
from selfcal_lightning.core.signals import INTERRUPTION

TRAINER_VERBS = {
    "fit": "calibrate a model: sample responses, pool their confidence, train",
    "validate": "score the fixed pool of the validation split",
    "test": "score the fixed pool of the test split",
    "predict": "write the model's confidence in each stored response into the store",
}
FUNCTION_VERBS = {
    "generate": ("generate", "run_generate", "sample responses with confidences into a store"),
    "rollout": (
        "rewards",
        "run_rollout",
        "continue prefixes of stored responses, for success rates of their steps",
    ),
    "fit-step-scaler": (
        "fit_step_scaler",
        "run_fit_step_scaler",
        "calibrate the step scores of a reward model that is not trained",
    ),
    "export": ("export", "run_export", "merge an adapter into its base model"),
    "tune-and-calibrate": (
        "two_stages",
        "run_tune_and_calibrate",
        "tune a generator, merge it, and calibrate the tuned model",
    ),
    "score": ("score", "run_score", "put further confidences on the responses of a store or a pool"),
    "judge": ("judge", "run_judge", "let a model decide which answers of a store are right"),
    "fit-confidence": ("fit_confidence", "run_fit_confidence", "fit a fused or scaled confidence on a split"),
    "fit-threshold": ("fit_confidence", "run_fit_threshold", "choose a strategy's threshold on a split"),
    "select": ("selection", "run_select", "choose training data from the responses of a store"),
    "extract-steps": (
        "selection",
        "run_extract_steps",
        "find the key steps of the responses of a selection",
    ),
    "adapt": ("adapt", "run_adapt", "learn from one's own responses to unlabelled questions, and judge it"),
    "export-rl": ("selection", "run_export_rl", "write a selection for verl, TRL or OpenRLHF"),
    "fit-probe": (
        "capability",
        "run_fit_probe",
        "fit a probe that tells from a question whether the model can answer",
    ),
    "score-questions": (
        "capability",
        "run_score_questions",
        "estimate from a question whether the model can answer",
    ),
    "evaluate": ("evaluate", "run_evaluate", "judge calibration and strategies, on models or recorded pools"),
    "evaluate-capability": (
        "capability",
        "run_evaluate_capability",
        "judge estimates of the chance of a right answer",
    ),
    "fit-capability-maps": (
        "capability",
        "run_fit_capability_maps",
        "fit maps of such estimates on labelled questions",
    ),
    "map-scores": ("capability", "run_map_scores", "map such estimates by fitted maps"),
    "predict-pass-at-k": (
        "capability",
        "run_predict_pass_at_k",
        "predict how likely one of k samples is right",
    ),
    "allocate": ("capability", "run_allocate", "share a budget of samples among questions, as a plan"),
    "fit-asking-threshold": (
        "capability",
        "run_fit_asking_threshold",
        "find which questions are worth asking, with a bound",
    ),
    "answer": ("answer", "run_answer", "answer questions, sampling only as long as the confidence demands"),
    "import-pool": ("pools", "run_import_pool", "read a JSON-lines pool of responses made elsewhere"),
    "export-pool": ("pools", "run_export_pool", "write a store as a JSON-lines pool"),
    "import-records": ("pools", "run_import_records", "read published training records"),
    "import-prefixes": (
        "rewards",
        "run_import_prefixes",
        "read success rates of prefixes rolled out elsewhere",
    ),
    "convert-gguf": ("convert_gguf", "run_convert_gguf", "make a model folder of the quantised weights in a GGUF file"),
    "reread": ("pools", "run_reread", "read the answers of a store anew, after a reader was mended"),
    "drop-rounds": ("pools", "run_drop_rounds", "delete later rounds of a store, for another training"),
    "demo": ("demo", "run_demo", "calibrate the bundled model and show before and after, in minutes"),
}
_NOT_BEGUN = "Nothing was begun; the same command begins anew."
_GOES_ON = "What is complete is in the store, and the same command goes on from there."
_NOTHING = "Nothing was written; the same command begins anew."
# What a verb leaves behind when it is stopped, unless the work that was under way knows better.
KEPT = {
    "fit": _NOT_BEGUN,
    "validate": _NOT_BEGUN,
    "test": _NOT_BEGUN,
    "predict": _NOT_BEGUN,
    "generate": _NOT_BEGUN,
    "rollout": _NOT_BEGUN,
    "fit-step-scaler": _NOTHING,
    "export": _NOTHING,
    "tune-and-calibrate": _GOES_ON,
    "score": "What was scored so far is kept beside a store; the same command goes on (a pool is scored anew).",
    "judge": "Verdicts so far are kept in the store; the same command goes on.",
    "fit-confidence": _NOTHING,
    "fit-threshold": _NOTHING,
    "select": _NOTHING,
    "adapt": "Samples, checkpoints and evaluations so far are kept; the same command goes on.",
    "export-rl": _NOTHING,
    "extract-steps": "What was extracted is kept; the same command goes on.",
    "fit-probe": "Hidden states read so far are kept; the same command goes on, and fits anew.",
    "score-questions": "Hidden states read so far are kept; the same command goes on.",
    "evaluate": "Samples of models so far are under `output_dir`, and are not drawn again; the rest begins anew.",
    "evaluate-capability": _NOTHING,
    "fit-capability-maps": _NOTHING,
    "map-scores": _NOTHING,
    "predict-pass-at-k": _NOTHING,
    "allocate": _NOTHING,
    "fit-asking-threshold": _NOTHING,
    "answer": "The answers above stand; the same command asks all questions again.",
    "import-pool": _GOES_ON,
    "export-pool": _NOTHING,
    "import-records": _GOES_ON,
    "import-prefixes": _GOES_ON,
    "convert-gguf": _NOTHING,
    "drop-rounds": "The same command deletes the rest.",
    "demo": "The samples so far are kept; the same command goes on, and trains anew.",
    "reread": "The store is as it was, or all of it is read anew; the same command begins anew.",
}
STDOUT_IS_GONE = 141  # 128 and the number of SIGPIPE


def usage() -> str:
    """Return the text of ``selfcal --help``."""
    verbs = {**TRAINER_VERBS, **{verb: row[2] for verb, row in FUNCTION_VERBS.items()}}
    lines = [f"  {verb:<22}{text}" for verb, text in verbs.items()]
    return "\n".join(
        [
            "usage: selfcal VERB [options]",
            "",
            "Teach a language model to know when it is right, then spend samples only where they are needed.",
            "",
            "verbs:",
            *lines,
            "",
            "`selfcal VERB --help` lists a verb's options. Every verb takes --config FILE.yaml, and --plugins MODULE",
            "(or FILE.py), which registers tasks, estimators and strategies of your own.",
            "SELFCAL_TRACEBACK=1 shows where an error was raised.",
            "",
        ]
    )


def run(arguments: Sequence[str]) -> int:
    """Run one verb and return the exit status: 0 done, 1 failed, 2 not understood, 130 or 143 stopped by a signal."""
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        sys.stdout.write(usage())
        return 0 if arguments else 2
    verb, rest = arguments[0], list(arguments[1:])
    if verb in {"--version", "version"}:
        sys.stdout.write(f"selfcal_lightning {__version__}\n")
        return 0
    known = [*TRAINER_VERBS, *FUNCTION_VERBS]
    if verb not in known:
        hint = did_you_mean(verb, known)
        sys.stderr.write(f"selfcal: Expected a verb, but got {verb!r}.{hint} `selfcal --help` lists the verbs.\n")
        return 2
    return run_to_the_end(lambda: _run_verb(verb, rest), command=["selfcal", verb, *rest], kept=KEPT[verb])


def _run_verb(verb: str, arguments: list[str]) -> None:
    check_nesting(arguments)
    check_files(arguments)
    for path in config_files(arguments):
        read_config(path)
    load_plugins_of_parent()  # a verb may be started by another one, as those of the demonstration are
    load_plugins(named_plugins(arguments))
    if verb in TRAINER_VERBS:
        if wants_short_help(arguments):
            sys.stdout.write(short_help(verb))
            return
        _run_trainer_verb(verb, arguments)
    else:
        run_function(verb, arguments)


def _run_trainer_verb(verb: str, arguments: list[str]) -> None:
    from selfcal_lightning.commands.presets import as_arguments, common_case, what_next

    stated = common_case(arguments) if verb == "fit" else None
    if stated is not None:
        prepared, overrides = stated
        arguments = [*as_arguments(prepared), *overrides]
        if is_first_process():
            sys.stderr.write(f"selfcal fit: {prepared.description}.\n")
    look_first(verb, arguments)
    importlib.import_module("selfcal_lightning.commands.lightning_cli").run_trainer([verb, *arguments])
    if stated is not None and not is_check(arguments) and is_first_process():
        sys.stdout.write(what_next(prepared.case))


def run_to_the_end(work: Callable[[], None], *, command: Sequence[str], kept: str) -> int:
    """Run ``work`` and return its exit status; whatever it raises is explained."""
    try:
        work()
        sys.stdout.flush()
    except BaseException as error:
        if INTERRUPTION.received is None and isinstance(error, SystemExit):
            raise
        if INTERRUPTION.received is not None or isinstance(error, KeyboardInterrupt):
            return _end_interrupted(error, command=command, kept=kept)
        if _stdout_is_gone(error):
            return STDOUT_IS_GONE
        if wants_traceback() or not isinstance(error, Exception):
            raise
        say_last(explain(error, who=" ".join(command[:2]), command=command))
        return FAILED
    return 0


def _end_interrupted(error: BaseException, *, command: Sequence[str], kept: str) -> int:
    INTERRUPTION.ignore()
    if wants_traceback():
        raise error
    say_last(explain_interruption(error, who=" ".join(command[:2]), kept=kept))
    return INTERRUPTION.status


def _stdout_is_gone(error: BaseException) -> bool:
    """Return whether the reader of standard output has gone, as ``| head`` does; then nothing more is written to it."""
    if not isinstance(error, BrokenPipeError) or sys.stdout is not sys.__stdout__ or sys.stdout is None:
        return False
    output = select.poll()
    number = sys.stdout.fileno()
    output.register(number, 0)  # a pipe or terminal that hung up says so unasked
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return True


def run_function(verb: str, arguments: list[str]) -> None:
    """Parse ``arguments`` by the signature of the verb's function in ``commands`` and call it."""
    from jsonargparse import auto_cli

    from selfcal_lightning.commands.parsing import VerbParser

    room, name, _ = FUNCTION_VERBS[verb]
    function = with_plain_types(getattr(importlib.import_module(f"selfcal_lightning.commands.{room}"), name))
    auto_cli(
        function,
        args=fill_flags(function, arguments),
        as_positional=False,
        prog=f"selfcal {verb}",
        usage=usage_of(verb, function),
        parser_class=VerbParser,
    )


def usage_of(verb: str, function: Callable[..., object]) -> str:
    """Return how a verb is typed: the options that must be given, and that there are others.

    Example:
        >>> def ask(model: str, seed: int = 0): ...
        >>> usage_of("answer", ask)
        'selfcal answer --model MODEL [options]'
    """
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is inspect.Parameter.empty]
    return " ".join([f"selfcal {verb}", *(f"--{name} {name.upper()}" for name in required), "[options]"])


def with_plain_types(function: Callable[..., object]) -> Callable[..., object]:
    """Return ``function`` with its annotations resolved, as a function of this module.

    To resolve them, jsonargparse would import what stands under ``if TYPE_CHECKING:`` in the function's own module too,
    which may be torch and all that is above it.
    """

    @functools.wraps(function)
    def plain(*args: object, plugins: object = None, **kwargs: object) -> object:
        del plugins  # an option of every verb, which is heeded before the others are parsed
        return function(*args, **kwargs)

    plain.__signature__ = inspect.signature(function, eval_str=True)  # type: ignore[attr-defined]
    plain.__annotations__ = get_type_hints(function)
    plain.__module__ = __name__
    return plain


def fill_flags(function: Callable[..., object], arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with "true" after each option that is a flag of ``function`` and stands alone."""
    parameters = inspect.signature(function, eval_str=False).parameters.values()
    flags = {f"--{parameter.name}" for parameter in parameters if parameter.annotation in (bool, "bool")}
    filled: list[str] = []
    for place, argument in enumerate(arguments):
        filled.append(argument)
        if argument in flags and (place + 1 == len(arguments) or arguments[place + 1].startswith("--")):
            filled.append("true")
    return filled
