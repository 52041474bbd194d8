"""``selfcal adapt``: train on the model's own responses to unlabelled questions, export, and evaluate."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from selfcal_lightning.adaptation import evaluation as measures
from selfcal_lightning.adaptation import runs
from selfcal_lightning.adaptation.group_rewards import ANNOTATIONS, REFERENCE
from selfcal_lightning.adaptation.selection_files import read_selection
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.commands.two_stages import check_begun, check_fit, fit_stage, write_settings
from selfcal_lightning.core.files import json_object_or_none, write_atomically
from selfcal_lightning.engines.sampling.running import GenerationSettings, sample_questions
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.evaluation.metrics import caution
from selfcal_lightning.evaluation.tables import format_estimate, markdown_table, rich_table
from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget
from selfcal_lightning.models.chat_format import DEFAULT_QUERY, Prompt
from selfcal_lightning.models.folders import read_manifest, resolve_model
from selfcal_lightning.records import SamplingSettings

SETTINGS = ("base_model", "lr", "rounds", "num_samples", "batch_size", "seed")
CONFIG, RESULT, TABLES = "config.yaml", "adaptation.json", "adaptation.md"
SHOWN = ("pass@1", "greedy", "ece", "auroc")  # on the terminal, and the majority
ROUND_COLUMNS = {
    "pass@1": "pass@1", "label accuracy": "label_accuracy", "reward accuracy": "reward_accuracy",
    "agreement with round 0": "agreement", "vote share": "vote_share", "fall of log p": "logprob_fall",
}  # fmt: skip


def run_adapt(
    questions: runs.QuestionSlice,
    output_dir: str,
    base_model: str = "bundled",
    inductive: runs.QuestionSlice | None = None,
    out_of_domain: runs.QuestionSlice | None = None,
    reward: GroupReward = "majority",
    target: PoolTarget | None = None,
    rounds: int = 2,
    num_samples: int = 8,
    batch_size: int = 64,
    lr: float = 1e-5,
    selection: str | None = None,
    store_dir: str | None = None,
    sampling: SamplingSettings = SamplingSettings(),
    temperatures: list[float] = [1.0, 0.5],  # noqa: B006 - never changed; the command line shows it
    evaluation_samples: int = 8,
    base_samples: str | None = None,
    engine: EngineSettings = EngineSettings(),
    guard: dict[str, float] = {},  # noqa: B006
    fit_options: dict[str, Any] = {},  # noqa: B006
    seed: int = 0,
    revision: str | None = None,
    check: bool = False,
) -> dict[str, Any]:
    """Adapt a model to unlabelled questions, round by round, and evaluate it before and after.

    The training is a `selfcal fit` (its settings are written to config.yaml), which sees no gold answer unless
    ``reward: reference`` asks for them; a guard without labels stops a collapse. Then both models answer the questions
    adapted on (transductive) and others, and a table compares the change with what the base model does at other
    temperatures, greedily, and by a majority over as many additional tokens as the adaptation took. After a stop or a
    kill, the same command continues.

    Args:
        questions: The questions to adapt to. Their gold answers are read only by the evaluation.
        output_dir: Folder for samples/ (the rounds), adapter/, logs/, evaluation/, adaptation.json and adaptation.md.
        base_model: Folder or hub name of the model to adapt.
        inductive: Other questions of the same kind, to evaluate on; nothing is learnt from them.
        out_of_domain: Questions of another kind, to evaluate on.
        reward: The policy gradient learns from: majority (TTRL), vote_share (EMPO), ssc, self_certainty (INTUITOR),
            entropy (RENT), equations (checked arithmetic), fused (confidences fitted to votes), reference (gold
            answers), or none.
        target: P(True) learns from round (votes of the same round), anchor (votes of round 0), mix, or nothing (null).
        rounds: Rounds of sampling and learning. With self_certainty, entropy or a selection there is one.
        num_samples: Draws this many responses to a question in each round.
        batch_size: Responses in a micro-step, which is an optimiser step unless gradients are accumulated.
        lr: Peak learning rate.
        selection: Folder of `selfcal select` whose responses are learnt, with ``reward: none``; only of ``questions``.
        store_dir: Store of the selection; without a selection, rounds are stored under ``output_dir``.
        sampling: How the evaluation samples, and the maximum length of all responses. Rounds use temperature 1.
        temperatures: Evaluates the base model at these temperatures too.
        evaluation_samples: Draws this many responses to a question in the evaluation.
        base_samples: Folder for the base model's evaluation samples, to share it; null keeps them under ``output_dir``.
        engine: Which engine samples, and how.
        guard: Changes limits of the guard: `agreement` (.1), `unreadable` (.02), `logprob_fall` (.05).
        fit_options: Overrides settings of the training, such as `{model: {kl: 0.01}, trainer: {devices: 2}}`.
        seed: Seeds sampling, training and intervals.
        revision: Revision of the model on the hub: a branch, tag or commit.
        check: Checks the settings of the training, prints its plan, and stops.
    """
    model, folder = resolve_model(base_model), Path(output_dir)
    one = runs.Adaptation(
        model, revision, questions, reward, target, selection, store_dir, rounds, num_samples, batch_size, lr,
        sampling.max_new_tokens, seed,
    )  # fmt: skip
    named = {runs.TRANSDUCTIVE: questions, runs.INDUCTIVE: inductive, runs.OUT_OF_DOMAIN: out_of_domain}
    slices = {name: place for name, place in named.items() if place is not None}
    asked = runs.load_sets(slices)
    settings = runs.fit_settings(one, folder, engine=engine, guard=guard, options=fit_options)
    if one.selection is not None:
        runs.check_learnt(one.selection, str(one.store_dir), asked, learns_confidence=one.target is not None)
    learnt = settings["model"]["init_args"]
    query, prompt = learnt.get("query", DEFAULT_QUERY), learnt.get("prompt")
    prompt = None if prompt is None else Prompt.from_json(prompt)
    evaluation = runs.Evaluation(
        model, revision, folder / runs.ADAPTER, slices, sampling, temperatures, evaluation_samples, engine, seed,
        query, prompt, Path(base_samples or folder / "evaluation"), folder / "evaluation",
    )  # fmt: skip
    check_begun(folder / CONFIG, settings)
    # Written settings cannot be changed, so those that `fit` refuses are not written.
    if check or not (folder / CONFIG).exists():
        check_fit({"adapt": settings})
    if check:
        return {}
    write_settings(folder / CONFIG, settings)
    if one.reward in ANNOTATIONS:  # round 0 and the statistics of its tokens, unless they are there
        own = GenerationSettings(
            model=model, store_dir=str(folder / runs.SAMPLES), **runs.sampled(questions), store_split="train",
            num_samples=num_samples, engine=engine.of(revision=revision), seed=seed, query=query, prompt=prompt,
            sampling=SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=sampling.max_new_tokens),
        )  # fmt: skip
        sample_questions(own)
        run_score(ANNOTATIONS[one.reward], str(folder / runs.SAMPLES), engine=engine, revision=revision)
    fit_stage("adapt", folder)
    store = Path(store_dir or folder / runs.SAMPLES)
    found = measures.round_labels(store, asked[runs.TRANSDUCTIVE])
    compared = evaluation.compare(measures.cost_in_samples(store, asked[runs.TRANSDUCTIVE], found))
    result = _result(one, folder, compared, found)
    write_atomically(folder / RESULT, json.dumps(result, indent=1).encode())
    columns = ["round", *ROUND_COLUMNS]
    table = markdown_table(columns, _round_rows(result), rule="|---" * len(columns) + "|")
    page = "\n".join([*_facts(result), "", measures.adaptation_markdown(compared), table, ""])
    write_atomically(folder / TABLES, page.encode())
    _show(result, compared)
    sys.stdout.write(f"All tables are in {folder / TABLES}, all figures in {folder / RESULT}.\n")
    return result


def _result(
    one: runs.Adaptation,
    folder: Path,
    compared: Sequence[measures.SetComparison],
    labels: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    manifest, monitors = read_manifest(folder / runs.ADAPTER) or {}, json_object_or_none(folder / runs.GUARD_FILE) or {}
    chosen = None if one.selection is None else read_selection(one.selection)
    names = {one.name for one in compared}
    return {
        "reward": one.reward,
        "target": one.target,
        "reads_reference": one.reward == REFERENCE or (chosen is not None and chosen.reads_reference),
        "settings": {name: getattr(one, name) for name in SETTINGS},
        "run": manifest.get("run"),
        "stopped": [problem for row in monitors.values() for problem in row["problems"]],
        "rounds": {
            name: {**labels.get(name, {}), **monitors.get(name, {})} for name in sorted({*labels, *monitors}, key=int)
        },
        "sets": {one.name: one.as_json() for one in compared},
        "not_measured": [name for name in (runs.TRANSDUCTIVE, runs.INDUCTIVE, runs.OUT_OF_DOMAIN) if name not in names],
    }  # fmt: skip


def _facts(result: Mapping[str, Any]) -> list[str]:
    read = "Gold answers were read" if result["reads_reference"] else "No gold answer was read"
    return [
        f"Reward {result['reward']}, target of P(True) {result['target'] or 'none'}. {read} while training.",
        *(f"The guard stopped it: {problem}." for problem in result["stopped"]),
        *(f"Not measured, since no such questions were named: {name}." for name in result["not_measured"]),
    ]


def _round_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """The row after the last sampled round is of the model that was not sampled any more."""
    return [
        [
            name if "tokens" in row else f"{name}, not sampled",
            *("-" if row.get(key) is None else f"{row[key]:z.3f}" for key in ROUND_COLUMNS.values()),
        ]
        for name, row in result["rounds"].items()
    ]


def _show(result: Mapping[str, Any], compared: Sequence[measures.SetComparison]) -> None:
    console = Console()
    console.print("\n".join(_facts(result)), highlight=False)
    changes = rich_table(("questions", "metric", "base", "adapted", "change"), left=("questions", "metric"))
    for one in compared:
        first, heading = one.changes["pass@1"], f"{one.name} ({one.num_questions})"
        sentence = f"{heading}: {one.verdict} ({first.before:.3f} -> {first.after:.3f}){caution(one.num_questions)}."
        console.print(sentence, highlight=False, style="bold")
        for name, change in one.changes.items():
            if name in SHOWN or name.startswith("majority@"):
                ends = ["-" if value is None else f"{value:.3f}" for value in (change.before, change.after)]
                metric = name.upper() if name in measures.CALIBRATION else name
                changes.add_row(heading, metric, *ends, format_estimate(change.difference, signed=True))
                heading = ""
    console.print(changes)
    console.print(rich_table(("round", *ROUND_COLUMNS), _round_rows(result), left=("round",)))
