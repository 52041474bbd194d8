"""The command line and its verbs. Nothing here imports torch before a verb needs it."""

from __future__ import annotations

import importlib
import inspect
import itertools
import os
import select
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, get_type_hints

from selfcal_lightning import __version__
from selfcal_lightning.commands.trainer_start import check_settings, is_check, is_first_process, short_help
from selfcal_lightning.core.config_files import check_files, check_nesting, config_files, read_config
from selfcal_lightning.core.errors import InputError, UserError, did_you_mean
from selfcal_lightning.core.last_resort import FAILED, explain, explain_interruption, say_last, wants_traceback
from selfcal_lightning.core.plugins import load_plugins, load_plugins_of_parent, named_plugins
from selfcal_lightning.core.signals import INTERRUPTION

NOT_STARTED = "Nothing was started. Run the same command again."
NOTHING_WRITTEN = "Nothing was written. Run the same command again."
STATES_KEPT = "Hidden states read so far are kept; the same command continues."
CONTINUES = "What is complete is in the store, and the same command continues from there."


def _command(module: str) -> ModuleType:
    return importlib.import_module(f"selfcal_lightning.commands.{module}")


class Verb(NamedTuple):
    """One verb: its help line, the module of its function, and what an interruption leaves."""

    text: str
    module: str | None  # in `commands`; None: a verb of the Trainer
    kept: str = NOTHING_WRITTEN  # unless the interrupted work gives a more precise message
    places: tuple[str, ...] = ()  # options whose names may be left out, at the beginning


GROUPS = {
    "start here": {
        "demo": Verb(
            "calibrate the bundled model and compare before and after, in minutes",
            "demo",
            "The samples so far are kept; the same command continues with them, and trains from the start.",
        ),
        "fit": Verb("calibrate your model on your questions: sample, train, export", None, NOT_STARTED),
        "answer": Verb(
            "answer questions with as few samples as the confidence allows",
            "answer",
            "The answers above stand; the same command asks all questions again.",
        ),
        "view": Verb("look at every question and response in one HTML file", "view", places=("path", "other")),
        "evaluate": Verb(
            "measure calibration, votes and strategies of models or recorded pools",
            "evaluate",
            "Samples of models so far are kept under `output_dir`; the same command continues with them.",
        ),
    },
    "serve": {
        "serve": Verb("answer OpenAI clients, with a confidence in each answer", "serve", NOT_STARTED),
        "batch": Verb(
            "answer a file in OpenAI's batch format",
            "serve",
            "The answers so far are in `output`; the same command continues.",
        ),
    },
    "train and export": {
        "validate": Verb("compute the metrics of the validation split", None, NOT_STARTED),
        "test": Verb("compute the metrics of the test split", None, NOT_STARTED),
        "predict": Verb("write the model's confidences into the store", None, NOT_STARTED),
        "export": Verb("merge an adapter into its base model", "export"),
        "tune-and-calibrate": Verb("tune and merge a generator, then calibrate it", "two_stages", CONTINUES),
        "adapt": Verb(
            "train on the model's own responses to unlabelled questions",
            "adapt",
            "Samples, checkpoints and evaluations so far are kept; the same command continues.",
        ),
        "convert-gguf": Verb("make a model folder from a GGUF file", "convert_gguf"),
    },
    "samples and pools": {
        "generate": Verb("sample responses with confidences into a store", "generate", NOT_STARTED),
        "import-pool": Verb("read responses that were made elsewhere", "pools", CONTINUES),
        "export-pool": Verb("write a store as a JSON-lines pool or for another tool", "pools"),
        "import-records": Verb("read the published training records", "pools", CONTINUES),
        "verify": Verb(
            "let a model decide which answers of a store are right",
            "verify",
            "Verdicts so far are kept in the store; the same command continues.",
        ),
        "re-extract": Verb(
            "extract the answers of a store again, after the extraction was fixed",
            "pools",
            "The store is as it was, or re-extracted as a whole. Run the same command again.",
        ),
        "drop-rounds": Verb("delete later rounds of a store", "pools", "The same command deletes the rest."),
    },
    "confidences and training data": {
        "score": Verb(
            "add confidences to the responses of a store or a pool",
            "score",
            "Scores so far are kept in a store, and the same command continues; a pool is scored from the start.",
        ),
        "fit-confidence": Verb("fit a scaled or fused confidence", "fit_confidence"),
        "fit-response-probe": Verb("fit a linear probe of responses, without labels", "fit_confidence"),
        "fit-threshold": Verb("choose a strategy's threshold", "fit_confidence"),
        "rollout": Verb("continue prefixes of responses, to get success rates of steps", "rewards", NOT_STARTED),
        "import-prefixes": Verb("read success rates that were computed elsewhere", "rewards", CONTINUES),
        "fit-step-scaler": Verb("calibrate a reward model's step scores without training", "fit_step_scaler"),
        "select": Verb("choose training data from a store, without labels", "selection"),
        "extract-steps": Verb(
            "find the key steps of selected responses",
            "selection",
            "What was extracted is kept; the same command continues.",
        ),
        "export-rl": Verb("write a selection for verl, TRL or OpenRLHF", "selection"),
    },
    "capability of a question, before it is answered": {
        "fit-probe": Verb("fit a linear probe of the prompt, without labels", "capability", STATES_KEPT),
        "score-questions": Verb("estimate capability with a probe, or by asking the model", "capability", STATES_KEPT),
        "evaluate-capability": Verb("measure how good capability estimates are", "capability"),
        "fit-capability-maps": Verb("fit maps from estimates to labels", "capability"),
        "map-scores": Verb("apply fitted maps to estimates", "capability"),
        "predict-pass-at-k": Verb("predict whether one of k samples is right", "capability"),
        "allocate": Verb("distribute a budget of samples over questions", "capability"),
        "fit-abstention-threshold": Verb("find below which capability to abstain, with bounded errors", "capability"),
    },
}
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
STDOUT_IS_GONE = 141  # 128 and the number of SIGPIPE


def usage() -> str:
    lines = ["usage: selfcal VERB [options]", ""]
    lines += ["Teach a language model to know when it is right, and spend samples only where they are needed.", ""]
    for group, verbs in GROUPS.items():
        lines += [f"{group}:", *(f"  {name:<26}{verb.text}" for name, verb in verbs.items()), ""]
    return "\n".join(lines) + (
        "\n`selfcal VERB --help` lists a verb's options. Every verb takes --config FILE.yaml, and --plugins MODULE\n"
        "(or FILE.py), which registers tasks, estimators and strategies of your own.\n"
        "SELFCAL_TRACEBACK=1 shows where an error was raised.\n"
    )


def run(arguments: Sequence[str], *, owns_process: bool = False) -> int:
    """Run one verb and return the exit status: 0 done, 1 failed, 2 not understood, 130 or 143 stopped by a signal.

    ``owns_process`` lets settings of libraries be changed for the whole process.
    """
    if not arguments or arguments[0] in {"-h", "--help", "help"}:
        sys.stdout.write(usage())
        return 0 if arguments else 2
    verb, rest = arguments[0], list(arguments[1:])
    if verb in {"--version", "version"}:
        sys.stdout.write(f"selfcal_lightning {__version__}\n")
        return 0
    if verb not in VERBS:
        hint = " Did you mean 'fit'?" if verb in {"calibrate", "train"} else did_you_mean(verb, VERBS)
        sys.stderr.write(f"selfcal: There is no verb {verb!r}.{hint} See `selfcal --help`.\n")
        return 2
    return run_to_the_end(
        lambda: _run_verb(verb, rest, owns_process), command=["selfcal", verb, *rest], kept=VERBS[verb].kept
    )


def with_names(verb: str, arguments: list[str]) -> list[str]:
    """Add the names of the options that stand first without one."""
    plain = list(itertools.takewhile(lambda word: not word.startswith("-"), arguments[: len(VERBS[verb].places)]))
    pairs = zip(VERBS[verb].places, plain, strict=False)
    return [word for name, value in pairs for word in (f"--{name}", value)] + arguments[len(plain) :]


def _run_verb(verb: str, arguments: list[str], owns_process: bool) -> None:
    arguments = with_names(verb, arguments)
    check_nesting(arguments)
    check_files(arguments)
    for path in config_files(arguments):
        read_config(path)
    load_plugins_of_parent()  # a verb may be started by another one, as those of the demonstration are
    load_plugins(named_plugins(arguments))
    if VERBS[verb].module is None:
        _run_trainer_verb(verb, arguments, owns_process)
    else:
        function, given = parse_function(verb, arguments)
        function(**given)


def _run_trainer_verb(verb: str, arguments: list[str], owns_process: bool) -> None:
    from selfcal_lightning.commands.presets import as_arguments, common_case, what_next

    if (text := short_help(verb, arguments)) is not None:
        sys.stdout.write(text)
        return
    stated = common_case(arguments) if verb == "fit" else None
    if stated is not None:
        arguments = [*as_arguments(stated[0]), *stated[1]]
        if is_first_process():
            sys.stderr.write(f"selfcal fit: {stated[0].description}.\n")
    check_settings(verb, arguments)
    if owns_process:
        _command("parsing").import_named_packages_only()
    _command("lightning_cli").run_trainer([verb, *arguments])
    if stated is not None and not is_check(arguments) and is_first_process():
        sys.stdout.write(what_next(stated[0].case))
        _command("view").view_training(stated[0].case.folder)


def run_to_the_end(work: Callable[[], None], *, command: Sequence[str], kept: str) -> int:
    try:
        work()
        sys.stdout.flush()
    except BaseException as error:
        if INTERRUPTION.received is None and isinstance(error, SystemExit):
            raise
        if INTERRUPTION.received is not None or isinstance(error, KeyboardInterrupt):
            INTERRUPTION.ignore()
            if wants_traceback():
                raise
            say_last(explain_interruption(error, who=" ".join(command[:2]), kept=kept))
            return INTERRUPTION.status
        if _stdout_is_gone(error):
            return STDOUT_IS_GONE
        if wants_traceback() or not isinstance(error, Exception):
            raise
        say_last(explain(error, who=" ".join(command[:2]), command=command))
        return FAILED
    return 0


def _stdout_is_gone(error: BaseException) -> bool:
    """Return whether standard output was closed, as by ``| head``, and redirect it to nowhere if so."""
    if not isinstance(error, BrokenPipeError) or sys.stdout is not sys.__stdout__ or sys.stdout is None:
        return False
    output = select.poll()
    number = sys.stdout.fileno()
    output.register(number, 0)  # a pipe or terminal that hung up says so unasked
    if not output.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    return True


def function_of(verb: str) -> Callable[..., Any]:
    return getattr(_command(str(VERBS[verb].module)), f"run_{verb.replace('-', '_')}")


def parse_function(verb: str, arguments: list[str]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a verb's function and its parsed arguments; invalid arguments exit with status 2."""
    from jsonargparse import ActionConfigFile

    from selfcal_lightning.commands.parsing import VerbParser, own_sentence

    function = function_of(verb)
    # Or jsonargparse would resolve them itself, and import what stands under `if TYPE_CHECKING:`.
    function.__annotations__ = get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    parser = VerbParser(
        prog=f"selfcal {verb}",
        usage=" ".join([f"selfcal {verb}", *(f"--{name} {name.upper()}" for name in required), "[options]"]),
        description=str(inspect.getdoc(function)).partition("\n\n")[0],
    )
    parser.add_argument("--config", action=ActionConfigFile, help="Path to a configuration file.")
    parser.add_function_arguments(function, as_group=False, sub_configs=True)
    parsed = parser.parse_args(arguments)
    try:
        given = vars(parser.instantiate(parsed))
    except ValueError as error:  # raised by a record that may be null; the parser wraps our sentence in its own
        if isinstance(error, UserError) or (own := own_sentence(str(error))) is None:
            raise
        raise InputError(own) from error
    return function, {name: value for name, value in given.items() if name not in ("config", "plugins")}
