"""``selfcal verify``: a model decides which answers are right, where comparing texts falls short."""

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from selfcal_lightning.confidence import judging
from selfcal_lightning.core.errors import InputError, check_at_least
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.tasks.base import verifier_form
from selfcal_lightning.data.tasks.registry import TASKS, get_task
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.sampler import store_fingerprint
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, ChatFormat
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import QuestionSamples, Sample, SamplingSettings


@dataclass(frozen=True, slots=True)
class VerificationReport:
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
            f"{self.answers:,} different answers, {self.asked:,} of them verified now: {self.right:,} right, "
            f"{self.wrong:,} wrong, {self.not_attempted:,} not attempted, {self.unreadable:,} without a readable "
            f"verdict (the task's own stands). {self.verdicts_changed:,} of {self.responses:,} responses have another "
            "verdict now"
        )


def run_verify(
    store_dir: str,
    model: str,
    split: str | None = None,
    task: str | None = None,
    name: str = "verifier",
    revision: str | None = None,
    engine: EngineSettings = EngineSettings(),
    max_new_tokens: int = 512,
    overwrite: bool = False,
) -> VerificationReport:
    """Let a model verify the answers of a store: facts as right, wrong or not attempted, mathematics as equivalent.

    It is asked once about each different answer to a question, by greedy decoding. The store keeps its verdicts under
    ``verdicts/NAME``, so nothing is asked twice. Where its reply cannot be read, the task's own verdict stands;
    `selfcal re-extract` restores all of the task's verdicts.

    Args:
        store_dir: Folder of the store. Nothing else may write to it meanwhile.
        model: Folder or hub name of the model that verifies; with a server, of its tokenizer.
        split: Verifies this split only; null takes all.
        task: Verifies this task only; null takes all that a model can verify, such as triviaqa, simpleqa and math500.
        name: Name under which the store keeps the verdicts.
        revision: Revision of the model on the hub: a branch, tag or commit.
        engine: Which engine runs the model, such as `--engine.name openai --engine.base_url http://host:8000/v1`.
        max_new_tokens: Maximum length of a reply in tokens; a model that reasons needs many.
        overwrite: Replaces verdicts of another model under the same name.
    """
    check_at_least(1, max_new_tokens=max_new_tokens)
    judging.KeptVerdicts(store_dir, name)  # refuses a bad name before the work
    tasks = sorted(one for one in set(SampleStore(store_dir).index(split=split).task.tolist()) if task in (None, one))
    if not any(verifier_form(get_task(one)) for one in tasks):
        known = ", ".join(sorted(one for one in TASKS if verifier_form(TASKS[one])))
        raise InputError(
            f"Expected {store_dir} to hold questions of split {split!r} and of a task that a model can verify "
            f"({known}), but got {', '.join(tasks) or 'none'}: comparing answers decides there."
        )
    options, resolved = engine.of(revision=revision), resolve_model(model)
    check_engine(options, resolved)
    chat = load_chat(options, resolved, query=DEFAULT_QUERY)
    with closing(open_engine(options, resolved, chat=chat)) as opened:
        report = verify_store(
            SampleStore(store_dir), opened, chat, name=name, split=split, task=task, max_new_tokens=max_new_tokens,
            overwrite=overwrite,
        )  # fmt: skip
    say(f"Verified {store_dir}: {report}. Verdicts in {store_dir}/verdicts/{name}")
    return report


def verify_store(
    store: SampleStore,
    engine: Engine,
    chat: ChatFormat,
    *,
    name: str = "verifier",
    split: str | None = None,
    task: str | None = None,
    max_new_tokens: int = 512,
    overwrite: bool = False,
) -> VerificationReport:
    found = judging.candidates_of(store.samples(split=split, task=task))
    origin = {
        "judge": store_fingerprint(engine, chat, SamplingSettings(0.0), 0).model.as_json(),
        "template_sha256": chat.describe()["template_sha256"],
        "max_new_tokens": max_new_tokens,
        "forms": {name: form.digest for name, form in judging.FORMS.items()},
    }
    kept = judging.KeptVerdicts(store.path, name)
    kept.check_origin(origin, overwrite=overwrite)
    grades = kept.known(origin)
    asked = {key: candidate for key, candidate in found.items() if key not in grades}

    def keep(new: Mapping[judging.Key, judging.Grade | None]) -> None:
        grades.update(new)
        kept.write(grades, origin=origin, overwrite=overwrite)

    judging.grade_candidates(engine, chat, asked, max_new_tokens=max_new_tokens, keep=keep)
    readers: dict[str, str] = {}

    def verified(group: QuestionSamples, sample: Sample) -> Sample:
        form = verifier_form(get_task(group.question.task))
        key = None if form is None else judging.key_of(group, sample, form)
        if key is None or key not in found or grades[key] is None:
            return sample
        readers[group.question.task] = f"the model that gave verdicts/{name}"
        return replace(sample, correct=grades[key] == "right")

    def read(group: QuestionSamples) -> QuestionSamples:
        return replace(group, samples=tuple(verified(group, sample) for sample in group.samples))

    done = store.reread(read, readers=readers)
    counts = Counter(grades[key] for key in found)
    return VerificationReport(
        len(found), len(asked), counts["right"], counts["wrong"], counts["not_attempted"], counts[None],
        done.responses, done.verdicts_changed,
    )  # fmt: skip
