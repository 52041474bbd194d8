"""The common case of training: a model and a file of questions, with the settings of a preset.

``selfcal fit --model M --questions Q`` and ``selfcal_lightning.calibrate`` both take their configuration from here. A
preset is a training YAML; the model, the questions and the output folders are put into it.
"""

import argparse
import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml

from selfcal_lightning.core.config_files import read_config
from selfcal_lightning.core.errors import InputError, unknown_name
from selfcal_lightning.core.files import check_replaceable, has_first_keys, write_json_lines
from selfcal_lightning.data.tasks.base import Part, take_part
from selfcal_lightning.data.tasks.dataset import DatasetTask, has_question_rows
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import Columns, is_hub_name, read_question_file
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.inference.answering import default_task, put_question
from selfcal_lightning.models.chat_format import Prompt, put_prompt
from selfcal_lightning.models.folders import BUNDLED_NAME, config_path, is_bundled, resolve_model
from selfcal_lightning.records import Question, SamplingSettings

PRESETS = ("activated", "small", "joint")
YAML_ENDINGS = (".yaml", ".yml")
LOCAL_TASKS = {
    "number": "local_number",
    "option letter": "local_choice",
    "expression": "local_expression",
    "short text": "local_text",
}
QUESTIONS_FILE = "questions.jsonl"
ENGINES = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class CommonCase:
    model: str
    questions: str
    task: str | None = None
    preset: str | None = None
    output_dir: str | None = None
    engine: Mapping[str, Any] | None = None  # fields of EngineSettings
    sampling: Mapping[str, Any] | None = None  # fields of SamplingSettings
    prompt: Prompt | None = None
    columns: Columns | None = None

    @property
    def default_task(self) -> str:
        return self.task or default_task(self.model)

    @property
    def preset_name(self) -> str:
        return self.preset or ("small" if is_bundled(self.model) else "activated")

    @property
    def folder(self) -> Path:
        return Path(self.output_dir or f"runs/{Path(self.model).name}")


@dataclass(frozen=True, slots=True)
class PreparedCase:
    case: CommonCase
    configuration: Mapping[str, Any]
    counts: Mapping[str, int]

    @property
    def description(self) -> str:
        case, parts = self.case, self.counts
        return (
            f"preset {case.preset_name}. {case.questions}: {sum(parts.values()):,} questions, {parts['train']:,} to "
            f"train on, {parts['validation']:,} to validate on, {parts['calibration']:,} set aside for calibration "
            f"(`part: calibration`). All that is written goes to {case.folder}"
        )


def prepare(case: CommonCase) -> PreparedCase:
    """Read the questions and return the configuration. Only questions of the hub or of named columns are written."""
    resolve_model(case.model)
    configuration = read_preset(case.preset_name)
    if case.columns is not None or is_hub_name(case.questions):  # write them as a file of our format
        place = case.folder / QUESTIONS_FILE
        check_questions_target(place, inputs=[case.questions])
        found = ({"id": row.id, "question": row.text, "answer": row.answer, "task": row.task}
                 for row in read_question_file(case.questions, columns=case.columns))  # fmt: skip
        write_json_lines(place, found)
        case = replace(case, questions=str(place), columns=None)
    questions = by_task(case)
    counts = count_parts(questions, origin=case.questions)
    _place_outputs(configuration, case.folder)
    model, data = (configuration[section].setdefault("init_args", {}) for section in ("model", "data"))
    model["base_model"] = case.model
    if case.prompt is not None:
        for asked in questions.values():
            put_prompt(asked, case.prompt)
        model["prompt"] = case.prompt.as_json()
    for part in ("train", "validation"):
        data[part] = [{"task": task, "split": "train", "path": case.questions, "part": part} for task in questions]
    data["test"] = []
    lora = model.get("lora")
    is_joint = isinstance(lora, dict) and lora.get("activated") is False
    if is_joint and data.get("total_tuples") is None and "num_samples" in data:
        data["total_tuples"] = counts["train"] * data["num_samples"]  # joint training has no such default
    name = (case.engine or {}).get("name", ENGINES[0])
    if name not in ENGINES:
        raise unknown_name("engine.name", str(name), ENGINES)
    generation = _callback(configuration, "SSCGeneration")
    for record, settings in {"engine": case.engine, "sampling": case.sampling}.items():
        if not settings:
            continue
        if generation is None:
            raise InputError(f"The preset has no SSCGeneration, which takes `{record}`. Take one that samples.")
        generation.setdefault("init_args", {}).setdefault(record, {}).update(settings)
    return PreparedCase(case, configuration, counts)


def count_parts(questions: Mapping[str, Sequence[Question]], *, origin: str) -> dict[str, int]:
    """Return how many questions, given by task, each part has; refuse too few."""
    counts: dict[str, int] = dict.fromkeys(get_args(Part), 0)
    for task, found in questions.items():
        for part in get_args(Part):
            try:
                counts[part] += len(take_part(found, part))
            except InputError as error:
                raise InputError(f"{origin}, task {task}: {error}") from error
    return counts


def check_questions_target(place: Path, *, inputs: Sequence[str] = ()) -> None:
    """Raise InputError where writing questions to ``place`` would replace a file that is not ours."""
    is_own = partial(has_first_keys, {"id", "question", "answer", "task"})
    check_replaceable(place, is_own, option="output_dir", kind="earlier questions", inputs=inputs)


def read_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset by its name, or of a training YAML by its path."""
    if name.endswith(YAML_ENDINGS):
        settings = read_config(Path(name))
        missing = [section for section in ("model", "data", "trainer") if not isinstance(settings.get(section), dict)]
        if missing:
            raise InputError(f"Expected {name} to be the YAML of a training, but it has no `{missing[0]}`.")
        return settings
    if name not in PRESETS:
        raise unknown_name("preset", name, (*PRESETS, "a training YAML"))
    return read_config(Path(config_path(f"presets/{name}.yaml")))


def by_task(case: CommonCase) -> dict[str, list[Question]]:
    rows = read_question_file(case.questions)
    found: dict[str, list[Question]] = {}
    for row in rows:
        question = put_question(row, task=case.default_task, question_id=row.id or f"line-{row.number}")
        if own_task(question.task) != question.task:
            raise InputError(
                f"{row.where}Expected a task of questions in this format, but got {question.task!r}, whose files have "
                f"columns of their own. Take {own_task(question.task)!r}, which reads the same answers, or name the "
                "file as a source in a configuration."
            )
        found.setdefault(question.task, []).append(question)
    unnamed = next((row for row in rows if row.task is None), None)
    if unnamed is not None and len(found) > 1:
        raise InputError(
            f"{unnamed.where}Expected `task` in every question or in none, since others name theirs, but got none. "
            f"Write `task` there too."
        )
    return found


def own_task(name: str) -> str:
    """Return the task that reads the same answers from a file in our format: mostly the task itself.

    Example:
        >>> own_task("gsm8k"), own_task("local_text"), own_task("word_problems")
        ('local_number', 'local_text', 'word_problems')
    """
    task = get_task(name)
    has_own_columns = isinstance(task, DatasetTask) and not has_question_rows(task.dataset)
    return LOCAL_TASKS[task.answer_type] if has_own_columns else name


def _place_outputs(configuration: dict[str, Any], folder: Path) -> None:
    trainer = configuration["trainer"]
    trainer["default_root_dir"] = str(folder)
    configuration["data"].setdefault("init_args", {})["store_dir"] = str(folder / "samples")
    logger = trainer.get("logger")
    if isinstance(logger, dict) and "save_dir" in logger.get("init_args", {}):
        logger["init_args"]["save_dir"] = str(folder)
    if (export := _callback(configuration, "AdapterExport")) is not None:
        export.setdefault("init_args", {})["output_dir"] = str(folder / "adapter")
    if (checkpoints := _callback(configuration, "ModelCheckpoint")) is not None:
        checkpoints.setdefault("init_args", {})["dirpath"] = str(folder / "checkpoints")


def _callback(configuration: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    callbacks = configuration["trainer"].get("callbacks") or []
    return next((one for one in callbacks if one["class_path"].rpartition(".")[2] == name), None)


# ---- the command line

# Records of which every field is an option, such as `--engine.dtype`.
RECORDS = {"engine": EngineSettings, "sampling": SamplingSettings, "prompt": Prompt, "columns": Columns}
OPTIONS = (
    *("model", "questions", "task", "preset", "output_dir", "prompt"),
    *(f"{record}.{field.name}" for record, settings in RECORDS.items() for field in fields(settings)),
)
OPTIONS = tuple(name for name in OPTIONS if name not in ("columns.responses", "columns.correct"))  # of other verbs


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in OPTIONS:
        parser.add_argument(f"--{name}", dest=name, action="append")
    try:
        known, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}.") from error
    given = {name: values for name, values in vars(known).items() if values}
    for name, values in given.items():
        if len(values) > 1:
            raise InputError(f"Expected `--{name}` once, but got {' and '.join(map(repr, values))}.")
    return {name: values[0] for name, values in given.items()}, rest


def common_case(arguments: Sequence[str]) -> tuple[PreparedCase, list[str]] | None:
    """Return the case that a command line states and its remaining arguments, or None if it states none."""
    names = {argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")}
    if not names & {*OPTIONS} - {"model"}:
        _check_model_class(arguments)
        return None
    given, rest = split_arguments(arguments)
    for name, example in (("model", "Qwen/Qwen2.5-7B-Instruct"), ("questions", "questions.jsonl")):
        if name not in given:
            others = ", ".join(f"`--{other}`" for other in given)
            raise InputError(f"Expected `--{name}` (such as {example}) with {others}, but got none.")
    read: dict[str, Any] = {}
    for name in [one for one in given if "." in one]:
        record, _, field = name.partition(".")
        read.setdefault(record, {})[field] = _value(name, given.pop(name))
    if "prompt" in given:
        read["prompt"] = {**read_config(Path(given["prompt"])), **read.get("prompt", {})}
    if "prompt" in read:
        read["prompt"] = Prompt.from_json(read["prompt"])
    if "columns" in read:
        read["columns"] = Columns(**read["columns"])
    return prepare(CommonCase(**given | read)), rest


def _value(name: str, text: str) -> Any:
    """Return the value of an option as YAML reads it; sampling takes numbers."""
    if name.startswith("columns.") or name == "prompt.system":
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"Expected `{name}` to be a value in YAML, but got {text!r}.") from error
    if isinstance(value, str):
        with suppress(ValueError):  # YAML 1.1 takes 1e-1 for a text
            value = float(value)
    if name.startswith("sampling.") and (isinstance(value, bool) or not isinstance(value, int | float | None)):
        raise InputError(f"Expected `{name}` to be a number, but got {text!r}.")
    return value


def _check_model_class(arguments: Sequence[str]) -> None:
    """Refuse the name of a model where Lightning takes a class."""
    for place, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        if option != "--model":
            continue
        value = value if has_value else "".join(arguments[place + 1 : place + 2])
        if not value.strip() or value == BUNDLED_NAME or "/" in value or Path(value).is_dir():
            raise InputError(
                f"Expected `--questions FILE` with `--model`, but got `--model {value!r}` alone. With `--config "
                "FILE.yaml` it is `--model.base_model` that names the model, and `--model` the module's class."
            )


def as_arguments(prepared: PreparedCase) -> list[str]:
    """Return the configuration as arguments of `selfcal fit`; later ones override it."""
    return ["--config", json.dumps(prepared.configuration)]


def what_next(case: CommonCase) -> str:
    model, adapter, evaluation = (
        shlex.quote(str(one)) for one in (case.model, case.folder / "adapter", case.folder / "evaluation")
    )
    return (
        f"Written to {case.folder}: adapter, samples, logs. To use it:\n"
        f"  selfcal answer --model {model} --adapter {adapter} --question TEXT\n"
        f"  selfcal evaluate --before {model} --adapter {adapter} --output_dir {evaluation} "
        f"--tests '[{{name: test, task: {case.default_task}, path: YOUR_TEST_FILE}}]'\n"
    )
