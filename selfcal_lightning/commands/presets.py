"""The common case of training: a model and a file of questions, with the settings of a preset behind them.

``selfcal fit --model M --questions Q`` and ``selfcal_lightning.calibrate`` both take their configuration from here. A
preset is a training YAML; the model, the questions and the places of what is written are put into it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from selfcal_lightning.core.config_files import read_config
from selfcal_lightning.core.errors import InputError, did_you_mean, unknown_name
from selfcal_lightning.core.files import check_replaceable, has_first_keys, write_json_lines
from selfcal_lightning.data.tasks.base import Part, take_part
from selfcal_lightning.data.tasks.dataset import DatasetTask, has_question_rows
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import Columns, QuestionRow, is_hub_name, read_question_file
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.inference.answering import default_task, put_question
from selfcal_lightning.models.chat_format import Prompt, put_prompt
from selfcal_lightning.models.folders import BUNDLED_NAME, config_path, is_bundled, resolve_model
from selfcal_lightning.records import Question

PRESETS = ("activated", "small", "joint")
YAML_ENDINGS = (".yaml", ".yml")
LOCAL_TASKS = {
    "number": "local_number",
    "option letter": "local_choice",
    "expression": "local_expression",
    "short text": "local_text",
}
ENGINES = ("transformers", "vllm")


@dataclass(frozen=True, slots=True)
class CommonCase:
    """What the common case is told."""

    model: str
    questions: str
    task: str | None = None
    preset: str | None = None
    output_dir: str | None = None
    engine: str | EngineSettings | None = None
    max_new_tokens: int | None = None
    prompt: Prompt | None = None
    columns: Columns | None = None

    @property
    def default_task(self) -> str:
        """The task of questions that name none."""
        return self.task or default_task(self.model)

    @property
    def preset_name(self) -> str:
        """The preset that is taken."""
        return self.preset or ("small" if is_bundled(self.model) else "activated")

    @property
    def folder(self) -> Path:
        """Where everything goes."""
        return Path(self.output_dir or f"runs/{Path(self.model).name}")


@dataclass(frozen=True, slots=True)
class PreparedCase:
    """The common case, ready to run."""

    case: CommonCase
    configuration: Mapping[str, Any]
    counts: Mapping[Part, int]

    @property
    def description(self) -> str:
        """What is going to happen, in a sentence or two."""
        parts = self.counts
        return (
            f"preset {self.case.preset_name}. {self.case.questions}: {sum(parts.values()):,} questions, "
            f"{parts['train']:,} to train on, {parts['validation']:,} to validate on, {parts['calibration']:,} set "
            f"aside for calibration (`part: calibration`). All that is written goes to {self.case.folder}"
        )


def prepare(case: CommonCase) -> PreparedCase:
    """Read the questions and return the configuration. Only questions of the hub or of named columns are written."""
    resolve_model(case.model)
    preset = read_preset(case.preset_name)
    case = _with_local_questions(case)
    questions = by_task(case)
    counts = count_parts(questions, origin=case.questions)
    configuration = _with_places(preset, case.folder)
    _set(configuration, "model", base_model=case.model)
    if case.prompt is not None:
        for found in questions.values():
            put_prompt(found, case.prompt)
        _set(configuration, "model", prompt=case.prompt.as_json())
    _set(configuration, "data", train=_sources(case, questions, "train"))
    _set(configuration, "data", validation=_sources(case, questions, "validation"), test=[])
    _set_total(configuration, counts["train"])
    generation = _callback(configuration, "SSCGeneration")
    engine = {"name": case.engine}
    if isinstance(case.engine, EngineSettings):
        engine = {name: value for name, value in asdict(case.engine).items() if value or name == "name"}
    elif case.engine is not None and case.engine not in ENGINES:
        raise unknown_name("engine.name", case.engine, ENGINES)
    named = {"sampling.max_new_tokens": case.max_new_tokens} | {f"engine.{name}": engine[name] for name in engine}
    given = {name: value for name, value in named.items() if value is not None}
    if given and generation is None:
        raise InputError(f"Expected a preset that samples, for `{next(iter(given))}`, but it has no SSCGeneration.")
    if generation is not None:
        settings = generation.setdefault("init_args", {})
        for option, value in given.items():
            record, _, name = option.partition(".")
            settings.setdefault(record, {})[name] = value
    return PreparedCase(case, configuration, counts)


def count_parts(questions: Mapping[str, Sequence[Question]], *, origin: str) -> dict[Part, int]:
    """Return how many questions, given by task, each part has. Raises InputError where they are too few for that."""
    counts: dict[Part, int] = dict.fromkeys(get_args(Part), 0)
    for task, found in questions.items():
        for part in counts:
            try:
                counts[part] += len(take_part(found, part))
            except InputError as error:
                raise InputError(f"{origin}, task {task}: {error}") from error
    return counts


def _with_local_questions(case: CommonCase) -> CommonCase:
    """Return the case with questions of the hub, or of named columns, as a file of our format in its folder."""
    if case.columns is None and not is_hub_name(case.questions):
        return case
    place = case.folder / "questions.jsonl"
    is_own = partial(has_first_keys, {"question"}, exactly=False)
    check_replaceable(place, is_own, option="output_dir", kind="earlier questions", inputs=[case.questions])
    found = ({"id": row.id, "question": row.text, "answer": row.answer, "task": row.task}
             for row in read_question_file(case.questions, columns=case.columns))  # fmt: skip
    write_json_lines(place, ({name: value for name, value in row.items() if value is not None} for row in found))
    return replace(case, questions=str(place), columns=None)


def read_preset(name: str) -> dict[str, Any]:
    """Return the settings of a preset by its name, or of a training YAML by its path."""
    if name.endswith(YAML_ENDINGS):
        settings = read_config(Path(name))
        missing = [section for section in ("model", "data", "trainer") if not isinstance(settings.get(section), dict)]
        if missing:
            raise InputError(f"Expected {name} to be the YAML of a training, but it has no `{missing[0]}`.")
        return settings
    if name not in PRESETS:
        known = ", ".join(PRESETS)
        raise InputError(
            f"Expected `preset` to be one of {known}, or a training YAML (a path that ends in .yaml), but got "
            f"{name!r}.{did_you_mean(name, PRESETS)}"
        )
    return read_config(Path(config_path(f"presets/{name}.yaml")))


def by_task(case: CommonCase) -> dict[str, list[Question]]:
    """Return the questions of the file by task, each read and checked."""
    rows = read_question_file(case.questions)
    found: dict[str, list[Question]] = {}
    for row in rows:
        question = _question(row, case.default_task)
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
    """Return the task that reads the same answers from a file in the one format: mostly the task itself.

    Example:
        >>> own_task("gsm8k"), own_task("local_text"), own_task("word_problems")
        ('local_number', 'local_text', 'word_problems')
    """
    task = get_task(name)
    has_own_columns = isinstance(task, DatasetTask) and not has_question_rows(task.dataset)
    return LOCAL_TASKS[task.answer_type] if has_own_columns else name


def _question(row: QuestionRow, task: str) -> Question:
    return put_question(row, task=task, question_id=row.id or f"line-{row.number}")


def _sources(case: CommonCase, questions: Mapping[str, Sequence[Question]], part: Part) -> list[dict[str, str]]:
    return [{"task": task, "split": "train", "path": case.questions, "part": part} for task in questions]


def _with_places(preset: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a copy of a preset that writes into ``folder`` alone."""
    configuration: dict[str, Any] = json.loads(json.dumps(preset))
    _set(configuration, "data", store_dir=str(folder / "samples"))
    configuration["trainer"]["default_root_dir"] = str(folder)
    logger = configuration["trainer"].get("logger")
    if isinstance(logger, dict) and "save_dir" in logger.get("init_args", {}):
        logger["init_args"]["save_dir"] = str(folder)
    for name, option, place in (
        ("AdapterExport", "output_dir", "adapter"),
        ("ModelCheckpoint", "dirpath", "checkpoints"),
    ):
        if (callback := _callback(configuration, name)) is not None:
            callback.setdefault("init_args", {})[option] = str(folder / place)
    return configuration


def _callback(configuration: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    callbacks = configuration["trainer"].get("callbacks") or []
    return next((one for one in callbacks if one["class_path"].rpartition(".")[2] == name), None)


def _set(configuration: dict[str, Any], section: str, **settings: object) -> None:
    configuration[section].setdefault("init_args", {}).update(settings)


def _set_total(configuration: dict[str, Any], num_train: int) -> None:
    """State the tuples of an epoch of joint training, which has no such default: as many as there are responses."""
    data, lora = configuration["data"]["init_args"], configuration["model"]["init_args"].get("lora")
    is_joint = isinstance(lora, dict) and lora.get("activated") is False
    if is_joint and data.get("total_tuples") is None and "num_samples" in data:
        data["total_tuples"] = num_train * data["num_samples"]


# ---- the command line

# Options that have another name in YAML, where they stand in a record of theirs.
IN_RECORDS = {"engine": "engine.name", "max_new_tokens": "sampling.max_new_tokens"}
OF_COLUMNS = ("columns.question", "columns.answer", "columns.choices", "columns.id")
OPTIONS = (
    *(IN_RECORDS.get(field.name, field.name) for field in fields(CommonCase) if field.name != "columns"),
    *OF_COLUMNS,
)
OF_THE_CASE = tuple(name for name in OPTIONS if name != "model")


def split_arguments(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of the common case, and the other arguments in their order."""
    given: dict[str, str] = {}
    rest: list[str] = []
    place = 0
    while place < len(arguments):
        option, has_value, value = arguments[place].partition("=")
        name = option.removeprefix("--")
        place += 1
        if not option.startswith("--") or name not in OPTIONS:
            rest.append(arguments[place - 1])
            continue
        if not has_value:
            if place == len(arguments) or arguments[place].startswith("--"):
                raise InputError(f"Expected a value after `{option}`, but got none.")
            value, place = arguments[place], place + 1
        if name in given:
            raise InputError(f"Expected `{option}` once, but got {given[name]!r} and {value!r}.")
        given[name] = value
    return given, rest


def common_case(arguments: Sequence[str]) -> tuple[PreparedCase, list[str]] | None:
    """Return the case that a command line states and what else stands in it, or None where it states none."""
    names = {argument.partition("=")[0].removeprefix("--") for argument in arguments if argument.startswith("--")}
    if not names & {*OF_THE_CASE}:
        _check_model_class(arguments)
        return None
    given, rest = split_arguments(arguments)
    for name, example in (("model", "Qwen/Qwen2.5-7B-Instruct"), ("questions", "questions.jsonl")):
        if name not in given:
            others = ", ".join(f"`--{other}`" for other in given)
            raise InputError(f"Expected `--{name}` (such as {example}) beside {others}, but got none.")
    longest = given.pop("sampling.max_new_tokens", None)
    if longest is not None and not longest.isdecimal():
        raise InputError(f"Expected `sampling.max_new_tokens` to be a whole number, but got {longest!r}.")
    read: dict[str, Any] = {"max_new_tokens": None if longest is None else int(longest)}
    read["engine"] = given.pop("engine.name", None)
    if named := {name.partition(".")[2]: given.pop(name) for name in OF_COLUMNS if name in given}:
        read["columns"] = Columns(**named)
    if "prompt" in given:
        read["prompt"] = Prompt.from_json(read_config(Path(given["prompt"])))
    return prepare(CommonCase(**given | read)), rest


def _check_model_class(arguments: Sequence[str]) -> None:
    """Refuse the name of a model where Lightning takes a class, and say what goes with it."""
    for place, argument in enumerate(arguments):
        option, has_value, value = argument.partition("=")
        if option != "--model":
            continue
        value = value if has_value else "".join(arguments[place + 1 : place + 2])
        if not value.strip() or value == BUNDLED_NAME or "/" in value or Path(value).is_dir():
            raise InputError(
                f"Expected `--questions FILE` beside `--model`, but got `--model {value!r}` alone. With `--config "
                "FILE.yaml` it is `--model.base_model` that names the model, and `--model` the module's class."
            )


def as_arguments(prepared: PreparedCase) -> list[str]:
    """Return the configuration as arguments of the Trainer's verb, which later ones override."""
    return ["--config", json.dumps(prepared.configuration)]


def what_next(case: CommonCase) -> str:
    """Return the commands that use what was trained."""
    adapter = case.folder / "adapter"
    return (
        f"Written to {case.folder}: adapter, samples, logs. To use it:\n"
        f"  selfcal answer --model {case.model} --adapter {adapter} --question TEXT\n"
        f"  selfcal evaluate --before {case.model} --adapter {adapter} --output_dir {case.folder / 'evaluation'} "
        f"--tests '[{{name: test, task: {case.default_task}, path: YOUR_TEST_FILE}}]'\n"
    )
