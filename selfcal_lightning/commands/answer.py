"""``selfcal answer``: questions in, answers out, each with as few samples as its confidence allows."""

import json as json_format
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from selfcal_lightning.confidence import live
from selfcal_lightning.confidence.domain import calibrated_in_domain
from selfcal_lightning.confidence.fusion import load_scorers
from selfcal_lightning.confidence.registry import REWARDS
from selfcal_lightning.confidence.splits import check_not_fitted_on
from selfcal_lightning.core.errors import InputError, RunError, check_at_least
from selfcal_lightning.core.files import check_replaceable, has_first_keys, write_json_lines
from selfcal_lightning.core.progress import Progress, say
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import StepStops
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.data.tasks.rows import Columns
from selfcal_lightning.engines.base import MAX_FAILURES
from selfcal_lightning.engines.opening import check_can_draw, check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.sampler import store_fingerprint
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings
from selfcal_lightning.inference import answering, choices
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import SEARCHES
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt, put_prompt
from selfcal_lightning.models.folders import resolve_model
from selfcal_lightning.records import Question, Sample, SamplingSettings, Verdict
from selfcal_lightning.rewards.answering import check_live_rewards, check_search, open_live_rewards, open_search


@dataclass(frozen=True)
class AnswerSettings:
    """How questions are answered.

    Attributes:
        strategy: Decides when to stop sampling and which answer to give. Null takes that of the threshold file, else
            early_stopping at the threshold that `fit` chose, else at .7.
        threshold: The strategy stops at this confidence, in [0, 1]; null is the strategy's default.
        max_samples: Draws at most this many responses to a question; null is the strategy's default.
        confidence: The confidence that the strategy reads: p_true, sequence_logprob, mean_logprob, one that a scorer
            adds, or one of a reward model, such as prm. Null is the last scorer's, else the strategy's default.
        strategy_args: Further fields of the strategy, such as `--strategy_args.criterion beta`.
        scorers: Files of `selfcal fit-confidence`; each may read what earlier ones add: `--scorers '[a.json, b.json]'`.
            A strategy without a confidence, such as self_consistency, reads none.
        threshold_file: File of a fitted threshold (`selfcal fit-threshold`). It sets the strategy and must be used as
            it was fitted: same number of samples, confidence, scorers and sampling. If it was fitted to a risk, it
            guarantees the error rate by withholding answers.
        probe: File of `selfcal fit-response-probe`, for the confidence response_probe. It reads the states of each
            response that is drawn, with the transformers engine. If given, it is the default confidence.
        lookahead: Starts up to this many responses early when the engine has room: answers come sooner and cost more.
        sampling: How responses are drawn, such as `--sampling.max_new_tokens 512` (all: `--sampling.help`). Null takes
            the settings of the calibration; if you set one, the others have their defaults.
        seed: Seeds the run; every sample has its own seed, derived from this one and the question's id.
        prompt: A prompt of your own: `--prompt.system TEXT`, `--prompt.base none`, or `--prompt FILE.yaml` with
            `system` and `examples` (each with `question` and `response`). Null takes that of the calibration, else the
            task's.
        query: The confidence query. Use that of the calibration.
        max_failures: Stops the run after this many failed requests in a row, such as those to a server that is down.
        reward: The reward model of beam_search, diverse_tree_search, particle_filtering and adaptive_best_of_n, which
            `selfcal fit` trained on this model; or of the `confidence` prm, prm_lower, prm_min, prm_prod, orm or
            reward, any that `selfcal score` reads.
        engine: Which engine runs the model, and how.
    """

    strategy: str | None = None
    threshold: float | None = None
    max_samples: int | None = None
    confidence: str | None = None
    strategy_args: dict[str, Any] | None = None
    scorers: list[str] | str = field(default_factory=list)
    threshold_file: str | None = None
    probe: str | None = None
    lookahead: int = 0
    sampling: SamplingSettings | None = None
    seed: int = 0
    prompt: Prompt | None = None
    query: str = DEFAULT_QUERY
    max_failures: int = MAX_FAILURES
    reward: RewardSettings = field(default_factory=RewardSettings)
    engine: EngineOptions = field(default_factory=EngineOptions)

    def __post_init__(self) -> None:
        check_at_least(0, lookahead=self.lookahead)  # before a model is loaded, as the next one
        check_at_least(1, max_failures=self.max_failures)


def run_answer(
    model: str,
    question: str | None = None,
    questions: str | None = None,
    columns: Columns | None = None,
    task: str | None = None,
    json: bool = False,
    output: str | None = None,
    chain_of_thought: bool = True,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
    **settings: Any,
) -> list[answering.Answer]:
    """Answer questions, each with as few samples as its confidence allows.

    A model that was calibrated (`selfcal fit`, `selfcal export`) knows when it is right: by default, sampling stops at
    the first response whose P(True) reaches the threshold that `fit` chose (else .7), and after 16 responses the vote
    weighted by P(True) decides. `selfcal fit-threshold` finds a threshold for your goal. Answers go to standard output,
    in the order of the questions; everything else goes to standard error.

    Args:
        model: Folder or hub name of the model, or "bundled" for the tiny model that comes with the package.
        question: One question to answer; or give ``questions``.
        questions: File of questions: JSON lines {"question", "answer"?, "choices"?, "id"?, "task"?}, Parquet or CSV by
            its ending, else one question a line; or a data set on the hub, such as hf:openai/gsm8k:main:test.
        columns: Names the columns of ``questions`` that have other names.
        task: How prompts are written and answers are read, such as local_number, local_choice, local_expression or
            local_text. Null takes the task of the calibration, else word_problems for the bundled model and
            local_number for others.
        json: Prints one JSON object for each question and nothing else.
        output: Also writes these objects to this file, which appears when all questions are answered.
        chain_of_thought: Asks for reasoning before the answer.
        engine: Which engine runs the model, and how.
        revision: Revision of the model on the hub: a branch, tag or commit.
        adapter: Folder of a LoRA adapter, such as `fit` writes.
        settings: Fields of ``AnswerSettings``.
    """
    task = task or choices.CalibratedDefaults.of(model, adapter).task or answering.default_task(model)
    asked = _questions(question, questions, columns, task=task, chain_of_thought=chain_of_thought)
    chosen = AnswerSettings(engine=engine.of(revision=revision, adapter=adapter), **settings)
    if output is not None:
        is_own = partial(has_first_keys, ["question", "withheld", "samples_used"], exactly=False)
        check_replaceable(output, is_own, option="output", kind="earlier answers", inputs=filter(None, [questions]))
    answers = answer_questions(model, asked, chosen, on_answer=partial(_print, as_json=json))
    if output is not None:
        write_json_lines(Path(output), (answer.as_json() for answer in answers))
    return answers


def answer_questions(
    model: str, asked: Sequence[Question], settings: AnswerSettings, *, on_answer: Callable[[answering.Answer], None]
) -> list[answering.Answer]:
    options = settings.engine
    taught = choices.CalibratedDefaults.of(model, options.adapter)
    prompt = taught.prompt_for(settings.prompt)
    asked = put_prompt(asked, prompt)
    sampling = taught.sampling_for(settings.sampling)
    check_can_draw(options, sampling)
    known = load_scorers(settings.scorers)
    fitted = None if settings.threshold_file is None else FittedThreshold.load(settings.threshold_file)
    probe = None if settings.probe is None else live.load_live_probe(settings.probe, model, settings.query, options)
    if probe is not None and fitted is not None:
        raise InputError(live.PROBE_AND_THRESHOLD)
    # Answers are verified where there is a reference; nothing may have been fitted on such a question.
    check_not_fitted_on([q for q in asked if q.reference is not None], [*known, *([fitted] if fitted else [])])
    fields = ("threshold", "max_samples", "confidence")
    given = {name: value for name in fields if (value := getattr(settings, name)) is not None}
    given |= settings.strategy_args or {}
    if probe is not None and settings.strategy in SEARCHES:
        raise InputError(f"Expected no `probe` with {settings.strategy}, which reads `reward.model`. Leave one out.")
    if probe is not None and not known:
        given.setdefault("confidence", probe.name)
    if settings.strategy is None and fitted is None and not known and not given.keys() & {"threshold", "confidence"}:
        given |= taught.strategy_fields()
    stops: StepStops | None = None
    read: list[str] = []
    if check_search(settings.strategy, given, settings.reward):
        tokenizer = load_chat(options, model, query=settings.query, prompt=prompt).tokenizer
        chosen, stops = open_search(
            str(settings.strategy), given, settings.reward, tokenizer=tokenizer, dtype=options.dtype
        )
        say(f"{settings.strategy} {given or ''} by {settings.reward.model}; {_read_by(asked)}")
    else:
        chosen = choices.choose_strategy(settings.strategy, given, scorers=known, fitted=fitted)
        read = check_live_rewards(chosen, known, settings.reward)
        if probe is not None:
            live.check_live_probe(probe, asked, {chosen.confidence, *(n for one in known for n in one.requires)})
        say(f"{chosen}; {_read_by(asked)}")
    for note in choices.notes_on(model, options.adapter, chosen, fitted):
        say(note)
    check_engine(options, model)
    chat = load_chat(options, model, query=settings.query, prompt=prompt)
    with ExitStack() as ends:
        added = open_live_rewards(read, settings.reward, asked, chat=chat, dtype=options.dtype, ends=ends)
        opened = open_engine(options, model, chat=chat)
        ends.callback(opened.close)
        if fitted is not None:
            rewards = {name: REWARDS.identity(settings.reward) for name in read}
            drawn = store_fingerprint(opened, chat, sampling, settings.seed)
            choices.check_sampled_alike(fitted, drawn, rewards=rewards)
        if probe is not None:
            tokens = live.open_tokens(opened, chat)
            added.append(live.open_live_probe(probe, lambda: tokens, live.find_asked(asked, chat)))
        source = EngineSource(
            opened, chat, sampling=sampling, seed=settings.seed, scorers=[*added, *known], stops=stops,
            on_failed=say, max_failures=settings.max_failures,
        )  # fmt: skip
        in_domain = calibrated_in_domain(opened, asked, options.adapter or resolve_model(model))
        answers: list[answering.Answer] = []
        early: dict[str, answering.Answer] = {}
        questions = {question.id: question for question in asked}
        left = list(reversed(questions))  # answers are passed on in this order, each when those before it have come

        def take(verdict: Verdict, samples: Sequence[Sample]) -> None:
            bar.update(1, unreadable=verdict.answer is None)
            best = answering.best_response(verdict, samples, chosen.confidence)
            early[verdict.question_id] = answering.Answer(
                questions[verdict.question_id],
                verdict,
                chosen.max_samples,
                response=None if best is None else best.text,
                withheld_by=_reason_to_withhold(fitted, verdict),
                finish=None if best is None else best.finish,
                samples_cut=sum(sample.finish == "length" for sample in samples[: verdict.samples_used]),
                calibrated_in_domain=in_domain.get(verdict.question_id),
            )
            while left and left[-1] in early:
                answers.append(early.pop(left.pop()))
                on_answer(answers[-1])

        with Progress(len(asked), label="Answering", unit="questions", enabled=len(asked) > 1) as bar:
            run_strategy(chosen, asked, source, lookahead=settings.lookahead, on_verdict=take)
    if len(asked) > 1 or source.failed:
        say(answering.summarise(answers, failed=source.failed))
    if (unreached := choices.unreached_note(chosen, [one.verdict for one in answers])) is not None:
        say(unreached)
    if source.failed and all(one.verdict.answer is None for one in answers):
        raise RunError(f"None of {len(asked):,} questions was answered: {source.failed:,} requests failed (see above).")
    return answers


def _read_by(asked: Sequence[Question]) -> str:
    tasks = dict.fromkeys(question.task for question in asked)
    modes = {name: getattr(getattr(get_task(name), "dataset", None), "verify_mode", None) for name in tasks}
    read_by = (name if mode is None else f"{name} (verify: {mode})" for name, mode in modes.items())
    return f"answers are read by task {', '.join(read_by)}"


def _questions(
    text: str | None, path: str | None, columns: Columns | None, *, task: str, chain_of_thought: bool
) -> list[Question]:
    if (text is None) == (path is None):
        got = "neither" if text is None else "both"
        raise InputError(f"Expected either `question` (a text) or `questions` (a file), but got {got}.")
    if path is not None:
        return answering.read_questions(path, task=task, chain_of_thought=chain_of_thought, columns=columns)
    if columns is not None:
        raise InputError("Expected `questions` with `columns`, which name the columns of a file, but got a question.")
    return [answering.ask_question(str(text), task=task, chain_of_thought=chain_of_thought)]


def _print(answer: answering.Answer, *, as_json: bool) -> None:
    line = json_format.dumps(answer.as_json(), ensure_ascii=False) if as_json else answer.as_text()
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _reason_to_withhold(fitted: FittedThreshold | None, verdict: Verdict) -> str | None:
    if fitted is None or verdict.answer is None or fitted.answers(verdict):
        return None
    sure = "no confidence" if verdict.confidence is None else f"confidence {verdict.confidence:.3f}"
    return f"{sure}, and {fitted.threshold:.3f} is needed for an error rate of at most {fitted.value:g}"
