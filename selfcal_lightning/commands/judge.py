"""``selfcal judge``: a model decides which answers are right, where comparing texts falls short."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from selfcal_lightning.confidence.judging import (
    Grade,
    KeptVerdicts,
    Key,
    candidates_of,
    form_digest,
    grade_candidates,
    key_of,
)
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.records import Reread
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import Task, judge_form
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.sampler import store_fingerprint
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import QuestionSamples, Sample, SamplingSettings


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """What a judge did."""

    answers: int
    asked: int
    right: int
    wrong: int
    not_attempted: int
    unreadable: int
    responses: int
    verdicts_changed: int

    def __str__(self) -> str:
        return (
            f"{self.answers:,} different answers, {self.asked:,} of them judged now: {self.right:,} right, "
            f"{self.wrong:,} wrong, {self.not_attempted:,} not attempted, {self.unreadable:,} without a readable "
            f"verdict (the task's own stands). {self.verdicts_changed:,} of {self.responses:,} responses have another "
            "verdict now"
        )


def run_judge(
    store_dir: str,
    judge_model: str,
    split: str | None = None,
    task: str | None = None,
    name: str = "judge",
    revision: str | None = None,
    engine: EngineSettings = EngineSettings(),
    max_new_tokens: int = 512,
    overwrite: bool = False,
) -> JudgeReport:
    """Let a model judge the answers of a store: facts as right, wrong or not attempted, mathematics as equivalent.

    It is asked greedily, once about each different answer to a question, and its verdicts are kept in the store under
    ``verdicts/NAME`` with what it is: nothing is asked twice, of further samples only what is new. Then the responses
    get its verdicts. Where a reply cannot be read the task's own verdict stands; `selfcal reread` puts all of these
    back.

    Args:
        store_dir: Folder of the store; nothing else may write it meanwhile.
        judge_model: Folder or hub name of the model that judges, or its tokenizer's where a server runs it.
        split: Split to judge; null takes all.
        task: Task to judge; null takes all that name a judge: triviaqa, simpleqa, math, math500 and others.
        name: Name of the verdicts in the store.
        revision: Revision of the model on the hub.
        engine: What runs it, such as `--engine.name openai --engine.base_url http://host:8000/v1`.
        max_new_tokens: Longest reply; a model that reasons needs many.
        overwrite: Whether verdicts of another judge under the same name may be replaced.

    Returns:
        What was judged.
    """
    if max_new_tokens < 1:
        raise InputError(f"Expected `max_new_tokens` to be at least 1, but got {max_new_tokens}.")
    KeptVerdicts(store_dir, name)  # whose name may be refused
    _check_has_judge(SampleStore(store_dir), split, task)
    options, model = engine.of(revision=revision), resolve_model(judge_model)
    check_engine(options, model)
    chat = load_chat(options, model, query=DEFAULT_QUERY)
    opened = open_engine(options, model, chat=chat)
    try:
        report = judge_store(
            SampleStore(store_dir), opened, chat, name=name, split=split, task=task, max_new_tokens=max_new_tokens,
            overwrite=overwrite,
        )  # fmt: skip
    finally:
        opened.close()
    say(f"Judged {store_dir}: {report}. Verdicts in {store_dir}/verdicts/{name}")
    return report


def judge_store(
    store: SampleStore,
    engine: Engine,
    chat: ChatFormat,
    *,
    name: str = "judge",
    split: str | None = None,
    task: str | None = None,
    max_new_tokens: int = 512,
    overwrite: bool = False,
    tasks: Callable[[str], Task] = get_task,
) -> JudgeReport:
    """Judge the answers of a store with a model that runs already; see :func:`run_judge`."""
    found = candidates_of(store.samples(split=split, task=task), tasks)
    origin = {
        "judge": store_fingerprint(engine, chat, SamplingSettings(0.0), 0).model.as_json(),
        "template_sha256": chat.describe()["template_sha256"],
        "max_new_tokens": max_new_tokens,
        "forms": form_digest(["facts", "mathematics"]),
    }
    kept = KeptVerdicts(store.path, name)
    kept.check_origin(origin, overwrite=overwrite)
    grades = kept.known(origin)
    asked = {key: candidate for key, candidate in found.items() if key not in grades}

    def keep(new: Mapping[Key, Grade | None]) -> None:
        grades.update(new)
        kept.write(grades, origin=origin)

    grade_candidates(engine, chat, asked, max_new_tokens=max_new_tokens, keep=keep)
    done = _apply(store, {key: grades[key] for key in found}, name=name, tasks=tasks)
    counts = Counter(grades[key] for key in found)
    return JudgeReport(
        len(found), len(asked), counts["right"], counts["wrong"], counts["not_attempted"], counts[None],
        done.responses, done.verdicts_changed,
    )  # fmt: skip


def _apply(
    store: SampleStore, grades: Mapping[Key, Grade | None], *, name: str, tasks: Callable[[str], Task]
) -> Reread:
    """Give every response the verdict on its answer; those on which there is none keep theirs."""
    readers: dict[str, str] = {}

    def judged(group: QuestionSamples, sample: Sample) -> Sample:
        form = judge_form(tasks(group.question.task))
        key = None if form is None else key_of(group, sample, form)
        grade = None if key is None else grades.get(key)
        if grade is None:
            return sample
        readers[group.question.task] = f"the model that gave verdicts/{name}"
        return replace(sample, correct=grade == "right")

    def read(group: QuestionSamples) -> QuestionSamples:
        return replace(group, samples=tuple(judged(group, sample) for sample in group.samples))

    return store.reread(read, readers=readers)


def _check_has_judge(store: SampleStore, split: str | None, task: str | None) -> None:
    """Raise InputError unless the store has questions of a task that names a judge; no model is loaded for it."""
    index = store.index(split=split)
    names = {one for one in set(index.task.tolist()) if task in (None, one)}
    if not any(judge_form(get_task(one)) for one in names):
        known = ", ".join(sorted(one for one in TASKS if judge_form(TASKS[one])))
        raise InputError(
            f"Expected {store.path} to hold questions of split {split!r} and of a task that names a judge ({known}), "
            f"but got {', '.join(sorted(names)) or 'none'}: comparing answers decides there."
        )
