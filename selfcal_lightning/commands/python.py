"""The main job from Python: ``calibrate``, ``answer`` and ``evaluate`` do what the verbs do, and return records."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from selfcal_lightning.commands import presets
from selfcal_lightning.commands.answer import AnswerSettings, answer_questions
from selfcal_lightning.commands.evaluate import run_evaluate
from selfcal_lightning.commands.lightning_cli import RaisingParser, run_trainer
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import write_json_lines
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.rows import JSON_ENDINGS, PARQUET_ENDING, QuestionRow, check_question_file
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation.inputs import TestSet
from selfcal_lightning.evaluation.metrics import verdict
from selfcal_lightning.evaluation.page import REPORT
from selfcal_lightning.inference.answering import Answer, Questions, default_task, put_question, read_questions
from selfcal_lightning.inference.choices import CalibratedDefaults
from selfcal_lightning.models.chat_format import Prompt
from selfcal_lightning.records import Question, SamplingSettings

QUESTION_ENDINGS = (*JSON_ENDINGS, PARQUET_ENDING, ".txt", ".csv", ".tsv")


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result of ``calibrate``.

    Attributes:
        model: The model that was calibrated.
        adapter: Folder of the exported adapter.
        store_dir: Folder of the sampled responses.
        metrics: Validation metrics after training, by their logged names ("val/calibration/ECE" ...).
        counts: Numbers of questions to train on, to validate on, and set aside for calibration.
    """

    model: str
    adapter: Path
    store_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def store(self) -> SampleStore:
        """The sampled responses, opened for reading."""
        return SampleStore(self.store_dir)

    def __repr__(self) -> str:
        shown = {"ECE": "val/calibration/ECE", "AUROC": "val/discrimination/AUROC"}
        numbers = [f"{name} {self.metrics[key]:.3f}" for name, key in shown.items() if key in self.metrics]
        return f"Calibration({', '.join([self.model, f'adapter={self.adapter}', *numbers])})"

    def _repr_html_(self) -> str:
        return _html_rows({"model": self.model, "adapter": self.adapter, "samples": self.store_dir, **self.metrics})


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of ``evaluate``: the folder with tables, figures and ``results.json``, and that file's content."""

    output_dir: Path
    results: Mapping[str, Any]

    def __repr__(self) -> str:
        return f"Evaluation({self.output_dir}: {' '.join(verdict(self.results)) or f'{len(self.results)} results'})"

    def _repr_html_(self) -> str:
        rows = {f"{number}.": sentence for number, sentence in enumerate(verdict(self.results), start=1)}
        return _html_rows({**rows, "look at": self.output_dir / REPORT})


def _html_rows(rows: Mapping[str, object]) -> str:
    shown = {name: f"{value:.4f}" if isinstance(value, float) else str(value) for name, value in rows.items()}
    cells = (f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in shown.items())
    return f"<table>{''.join(cells)}</table>"


def calibrate(
    model: str,
    questions: Questions,
    *,
    task: str | None = None,
    preset: str | None = None,
    output_dir: str | Path | None = None,
    engine: str | EngineSettings | None = None,
    max_new_tokens: int | None = None,
    prompt: Prompt | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Calibration:
    """Teach a model to know when it is right: sample, train an adapter, export it. No answers are needed.

    It is ``selfcal fit --model M --questions Q``, and resumes an earlier call with the same settings.

    Args:
        model: Folder or hub name of the model, or "bundled".
        questions: A file, texts, mappings with ``question`` (and ``answer``, ``id``, ``task``, ``choices``), or
            ``Question`` records. 80 % are trained on, 10 % validate, 10 % are set aside for calibration.
        task: How prompts are written and answers are read, where a question names no task; None is word_problems for
            the bundled model and local_number for others.
        preset: "activated", "small", "joint", or a training YAML; None is "small" for the bundled model, else
            "activated".
        output_dir: Folder for everything that is written; None is ``runs/`` and the model's name.
        engine: The engine that samples, by name ("transformers", "vllm") or with settings; None is the preset's.
        max_new_tokens: Maximum length of a response; None is the preset's.
        prompt: How questions are put to the model; None is their tasks' own way.
        settings: Further settings, by their names on the command line, such as ``{"data.num_samples": 16}``.

    Example:
        >>> import selfcal_lightning as sc
        >>> sc.calibrate("bundled", [{"question": "What is 1+1?", "answer": 2}])
        Traceback (most recent call last):
        selfcal_lightning.core.errors.InputError: ...
    """
    folder = None if output_dir is None else str(output_dir)
    if isinstance(engine, EngineSettings):
        engine_fields = {name: value for name, value in asdict(engine).items() if value or name == "name"}
    else:
        engine_fields = {} if engine is None else {"name": engine}
    sampling = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    case = presets.CommonCase(model, "", task, preset, folder, engine_fields, sampling, prompt)
    questions = _spelt_out(questions)
    if not isinstance(questions, str | Path):
        asked = read_questions(questions, task=case.default_task)
        names = dict.fromkeys(question.task for question in asked)
        presets.count_parts({name: [one for one in asked if one.task == name] for name in names}, origin="`questions`")
    file = _as_file(questions, case.folder / presets.QUESTIONS_FILE, task=case.default_task)
    prepared = presets.prepare(replace(case, questions=str(file)))
    overrides = []
    for name, value in (settings or {}).items():
        overrides += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    done = run_trainer(["fit", *presets.as_arguments(prepared), *overrides], parser_class=RaisingParser)
    logged = done.trainer.callback_metrics
    metrics = {name: value.item() for name, value in logged.items() if name.startswith("val/")}
    store_dir = Path(done.datamodule.store_dir)
    return Calibration(model, case.folder / "adapter", store_dir, metrics, dict(prepared.counts))


def answer(
    model: str,
    questions: Questions,
    *,
    task: str | None = None,
    adapter: str | Path | None = None,
    strategy: str | None = None,
    threshold: float | None = None,
    max_samples: int | None = None,
    threshold_file: str | None = None,
    scorers: Sequence[str] = (),
    strategy_args: Mapping[str, Any] | None = None,
    sampling: SamplingSettings | None = None,
    max_new_tokens: int | None = None,
    engine: str | EngineSettings = "transformers",
    chain_of_thought: bool = True,
    prompt: Prompt | None = None,
    seed: int = 0,
) -> list[Answer]:
    """Answer questions, each with as few samples as its confidence allows.

    Args:
        model: Folder or hub name of the model, or "bundled".
        questions: A file, one text, a list of texts, of mappings with ``question`` (and ``answer``, ``id``, ``task``,
            ``choices``), or of ``Question`` records.
        task: How prompts are written and answers are read, where a question names no task; None is that of the
            calibration, else word_problems for the bundled model and local_number for others.
        adapter: Folder of the adapter that ``calibrate`` wrote.
        strategy: Name of the strategy; None is that of the threshold file, or early stopping at the threshold that
            ``calibrate`` chose, else at .7.
        threshold: The strategy stops at this confidence, in [0, 1]; None is the strategy's default.
        max_samples: Draws at most this many responses to a question; None is the strategy's default.
        threshold_file: File of a threshold that ``fit_threshold`` wrote.
        scorers: Files of confidences that ``fit_confidence`` wrote.
        strategy_args: Further fields of the strategy.
        sampling: How responses are drawn; None is as in the calibration.
        max_new_tokens: Maximum length of a response in tokens; None is that of ``sampling``.
        engine: The engine, by name ("transformers", "vllm", "openai") or with settings.
        chain_of_thought: Asks for reasoning before the answer.
        prompt: How questions are put to the model; None is as in the calibration, else their tasks' own way.
        seed: Seeds sampling.

    Returns:
        One record a question, in their order: ``answer``, ``confidence``, ``samples_used``, ``verdict`` and more.

    Example:
        >>> import selfcal_lightning as sc
        >>> short = sc.SamplingSettings(max_new_tokens=40)
        >>> asked = [{"question": "Tom has 3 pens and gets 4 more. How many pens has he?", "answer": 7}]
        >>> found = sc.answer("bundled", asked, max_samples=2, sampling=short)
        >>> len(found), found[0].samples_used <= 2
        (1, True)
    """
    given = None if adapter is None else str(adapter)
    defaults = CalibratedDefaults.of(model, given)
    task = task or defaults.task or default_task(model)
    asked = read_questions(_spelt_out(questions), task=task, chain_of_thought=chain_of_thought)
    if max_new_tokens is not None:
        sampling = replace(sampling or defaults.sampling or SamplingSettings(), max_new_tokens=max_new_tokens)
    if isinstance(engine, str):
        engine = EngineSettings(engine)  # type: ignore[arg-type]
    settings = AnswerSettings(
        strategy, threshold, max_samples, strategy_args=dict(strategy_args or {}), scorers=list(scorers),
        threshold_file=threshold_file, sampling=sampling, seed=seed, prompt=prompt, engine=engine.of(adapter=given),
    )  # fmt: skip
    return answer_questions(model, asked, settings, on_answer=lambda _: None)


def evaluate(
    subject: str | Mapping[str, str],
    questions: Questions | None = None,
    *,
    task: str | None = None,
    adapter: str | Path | None = None,
    after: str | None = None,
    output_dir: str | Path = "runs/evaluation",
    **options: Any,
) -> Evaluation:
    """Evaluate calibration and test-time strategies on a recorded pool, or on a model with questions.

    Args:
        subject: Without ``questions``, a recorded pool (a JSON-lines file or the folder of a store), or several by the
            name of their system. With ``questions``, the folder or hub name of a model, or "bundled".
        questions: Test questions, as ``answer`` takes them; None reads recorded responses.
        task: Task of the questions, or of the pool's lines, that name none.
        adapter: Folder of an adapter on the model, to compare the model with itself before.
        after: Another model to compare it with.
        output_dir: Folder for tables, figures and ``results.json``.
        options: Further options of ``selfcal evaluate``, such as ``strategies``, ``num_samples`` or ``seed``.

    Example:
        >>> import selfcal_lightning as sc
        >>> sc.evaluate("no_such_pool.jsonl", task="local_number")
        Traceback (most recent call last):
        FileNotFoundError: Expected a JSON-lines pool or the folder of a store at no_such_pool.jsonl...
    """
    folder = Path(output_dir)
    if questions is None:
        if adapter is not None or after is not None:
            raise InputError("Expected `questions` with `adapter` or `after`, which are for models, but got none.")
        pools = {"pool": subject} if isinstance(subject, str) else dict(subject)
        return Evaluation(folder, run_evaluate(output_dir=str(folder), pools=pools, task=task, **options))
    if not isinstance(subject, str):
        raise InputError(f"Expected one model with `questions`, but got {subject!r}. Name the other one by `after`.")
    file = _as_file(_spelt_out(questions), folder / presets.QUESTIONS_FILE, task=task or default_task(subject))
    tasks = presets.by_task(presets.CommonCase(subject, str(file), task))
    options |= {"adapter": None if adapter is None else str(adapter), "after": after}
    options["model" if adapter is None and after is None else "before"] = subject
    options["tests"] = [TestSet("test" if len(tasks) == 1 else name, name, path=str(file)) for name in tasks]
    return Evaluation(folder, run_evaluate(output_dir=str(folder), **options))


def _spelt_out(questions: Questions | Sequence[str]) -> Questions:
    """Return texts as mappings; a text with spaces that does not look like the name of a file is a question."""
    if isinstance(questions, str) and " " in questions and Path(questions).suffix not in QUESTION_ENDINGS:
        questions = questions if os.path.exists(questions) else [questions]
    if isinstance(questions, str | Path):
        return questions
    return [{"question": one} if isinstance(one, str) else one for one in questions]  # type: ignore[return-value]


def _as_file(questions: Questions, place: Path, *, task: str) -> Path:
    """Return the file of the questions; a list is written to ``place``, since runs read files."""
    if isinstance(questions, str | Path):
        return check_question_file(questions)
    asked = read_questions(questions, task=task)
    presets.check_questions_target(place)
    write_json_lines(place, (_as_row(one, number) for number, one in enumerate(asked, start=1)))
    return place


def _as_row(question: Question, number: int) -> dict[str, Any]:
    task, origin = presets.own_task(question.task), f"questions[{number}]"
    row = QuestionRow(question.text, question.reference, question.id, task, origin, number)
    if put_question(row, task=task, question_id=question.id).messages != question.messages:
        raise InputError(
            f"{origin}: Expected the prompt of task {task!r}, but got messages of its own. Give the question as a "
            'mapping, `{"question": ..., "answer": ...}`.'
        )
    return {"id": question.id, "question": question.text, "answer": question.reference, "task": task}
