"""``make report-selection``: what choosing training data without reference answers is worth on the bundled model.

References only check the result. ``--table`` writes the tables of what is in ``--folder``.
"""

import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from shared.estimates import RESAMPLES, mean_over_seeds, metric_columns
from shared.study import Options, Study
from shared.tables import Criterion, criteria_table, exactly, held, section, show, table, triple

from selfcal_lightning.adaptation import picking
from selfcal_lightning.adaptation.picking import FUSED, PICK, SHARE, SSC, SelectionSettings
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.commands.selection import run_export_rl, run_extract_steps, run_select
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.estimators import WEIGHTS
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.arrays import AUROC, WITHIN_QUESTION_AUROC, Floats
from selfcal_lightning.metrics.bootstrap import Estimate, estimate_of, resample_weights
from selfcal_lightning.records import QuestionSamples, Sample, SamplingSettings

CRITERIA = (
    "min_logprob", "self_certainty", "token_entropy", "lowest_group_confidence", "step_certainty", "step_entropy",
    "step_coe_c", "step_self_evaluation", "coe_r", "coe_c", "coe_r_raw", "coe_c_raw", "sasc_std", "sasc_certainty",
    "sasc_double",
)  # fmt: skip
TOKENS = 120
OF_A_POOL = {weight.name for weight in WEIGHTS}
# What picks within a question and what keeps questions: the defaults of `selfcal select`, then votes alone.
PAIRS = ((FUSED, SHARE), (FUSED, SSC), (FUSED, PICK), (MEAN_LOGPROB, SHARE), (SHARE, SHARE), (SSC, SSC))
Score = Callable[[QuestionSamples, Sample], float | None]
Columns = dict[str, Floats]  # [1 + R] each, of one seed
SIZES = {
    "seeds": (3, "a store each"),
    "questions": (300, "in-domain test questions"),
    "samples": (8, "responses to each"),
    "kept": (0.35, "share of the questions that is kept"),
}


def run_jobs(study: Options) -> None:
    for seed in range(study.seeds):
        store = str(study.folder(seed))
        run_generate(
            "bundled", store, "word_problems", split="test_id", limit=study.questions, num_samples=study.samples,
            seed=seed, engine=EngineSettings(max_batch=512), sampling=SamplingSettings(max_new_tokens=TOKENS),
        )  # fmt: skip
        run_score(list(CRITERIA), store)


def assemble(study: Options) -> dict[str, Any]:
    stores, sizes = [study.folder(seed) for seed in range(study.seeds)], study.sizes(*SIZES)
    read = (SampleStore(store).samples(confidences=list(CRITERIA)) for store in stores)
    pools = [sorted(entries, key=lambda entry: entry.question.id) for entries in read]
    passed_on = [hand_on(one, study.output / f"{one.name}-selection", kept=study.kept) for one in stores]
    names = [FUSED, SHARE, SSC, MEAN_LOGPROB, P_TRUE, *CRITERIA]
    criteria = {name: _criterion(pools, name, study.kept) for name in names}
    settings = (SelectionSettings(pick=pick, keep=keep, top=study.kept) for pick, keep in PAIRS)
    selections = {f"{one.pick}, {one.keep}": worth_of(pools, one) for one in settings}
    right = [sample.correct for pool in pools for entry in pool for sample in entry.samples]
    return {
        "sizes": {**sizes, "responses": len(right), "right": sum(map(bool, right)) / len(right)},
        "selections": {name: _as_json(row) for name, row in selections.items()},
        "criteria": {name: _as_json(row) for name, row in criteria.items()},
        "targets": [one.as_json() for one in targets(selections, passed_on)],
        "handed_on": passed_on,
    }


def _criterion(pools: Sequence[Sequence[QuestionSamples]], name: str, kept: float) -> dict[str, Estimate]:
    found = worth_of(pools, SelectionSettings(pick=name, keep=SHARE if name in OF_A_POOL else PICK, top=kept))
    columns = []
    for pool in pools:
        fusion = (
            picking.fit_votes([picking.without_references(entry) for entry in pool], None) if name == FUSED else None
        )
        columns.append(
            score_tells(pool, lambda entry, sample, fusion=fusion: picking.score_of(entry, sample, name, fusion))
        )
    tells = over_seeds(columns)
    across = {} if name in OF_A_POOL else {"responses": tells["responses"], **found}
    return {"best": found["best"], "gain": found["gain"], "within": tells["within"], **across}


def targets(selections: Mapping[str, Mapping[str, Estimate]], passed_on: Sequence[dict[str, int]]) -> list[Criterion]:
    gains = {name: selections[f"{name}, {SHARE}"]["gain"] for name in (FUSED, MEAN_LOGPROB)}
    of_votes = {pair: selections[", ".join(pair)] for pair in ((FUSED, SHARE), (SHARE, SHARE), (SSC, SSC))}
    best = "best of all minus one sample: lower end above .03"
    found = [held(f"`{name}`, {best}", gain, "low", ">", 0.03) for name, gain in gains.items()]
    for (pick, keep), row in of_votes.items():
        what = f"picked by `{pick}`, kept by `{keep}`"
        found.append(held(f"{what}, accuracy of the kept: lower end at least .85", row["kept"], "low", ">=", 0.85))
        found.append(held(f"{what}, AUROC of the picked: at least .87", row["picked"], "value", ">=", 0.87))
    total = {name: sum(one[name] for one in passed_on) for name in passed_on[0]}
    counts = {
        f"key steps by rules: of {total['kept']:,} kept responses, those without": total["kept"] - total["with_steps"],
        "key steps by rules: forms with a number that the response lacks": total["ungrounded_forms"],
        f"`reward.py`: of {total['judged']:,} finished responses, those that it judges otherwise than the task":
            total["judged_otherwise"],
    }  # fmt: skip
    return [*found, *(Criterion(text, exactly(count), count == 0) for text, count in counts.items())]


def _as_json(row: Mapping[str, Estimate]) -> dict[str, list[float | None]]:
    return {name: triple(estimate) for name, estimate in row.items()}


def markdown(content: Mapping[str, Any]) -> str:
    sizes = content["sizes"]
    heads = {
        "best": "best of all", "gain": "minus one sample", "responses": "AUROC of responses",
        "within": "within questions", "picked": "of the picked", "kept": f"{sizes['kept']:.0%} kept",
    }  # fmt: skip
    head = (
        f"Command: `{content['command']}`. The bundled model on {sizes['questions']:,} in-domain test questions x "
        f"{sizes['samples']} at the usual sampling (EDT .8), {sizes['seeds']} seed(s): {sizes['responses']:,} "
        f"responses, {sizes['right']:.3f} of them right. Means over seeds, 95 % intervals over questions and seeds."
    )
    select = {name: heads[name] for name in ("best", "gain", "picked", "kept")}
    lines = [
        *section("head", [head]),
        *section("targets", criteria_table(content["targets"])[:-1]),
        *section("selections", _table("picks, keeps", select, content["selections"])),
        *section("criteria", _table("criterion", heads, content["criteria"])),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(first: str, heads: Mapping[str, str], rows: Mapping[str, Mapping[str, Sequence[float | None]]]) -> list[str]:
    lines = [
        [f"`{label}`", *(show(row[name], "+" if name == "gain" else "") if name in row else "-" for name in heads)]
        for label, row in rows.items()
    ]
    return table([first, *heads.values()], lines)


def selection_worth(entries: Sequence[QuestionSamples], settings: SelectionSettings) -> Columns:
    """Select without gold answers, and judge the selection by them.

    A resample draws questions of the one selection that was made; it does not select anew.
    """
    rows = picking.select_rows(entries, settings).rows
    right = np.array([
        any(bool(sample.correct) for sample in entry.samples if sample.index == row.index)
        for entry, row in zip(entries, rows, strict=True)
    ], dtype=np.float64)  # fmt: skip
    single = np.array([np.mean([bool(sample.correct) for sample in entry.samples]) for entry in entries])
    weights = resample_weights(len(entries), num_resamples=RESAMPLES)
    kept = np.array([row.kept for row in rows], dtype=np.float64)
    share = kept @ weights
    scores = np.array([row.keep_score for row in rows], dtype=np.float64)  # None is nan, and comes last
    columns = np.nan_to_num(scores, nan=np.nanmin(scores) - 1.0), right.astype(bool), np.arange(len(rows))
    return {
        "best": right @ weights,
        "gain": (right - single) @ weights,
        "picked": metric_columns(columns, [AUROC], num_resamples=RESAMPLES)[AUROC],
        "kept": np.divide((right * kept) @ weights, share, out=np.full_like(share, np.nan), where=share > 0.0),
    }


def score_tells(entries: Sequence[QuestionSamples], score: Score) -> Columns:
    """Return how well a score tells right from wrong responses; one without it comes last."""
    values = np.array([score(entry, sample) for entry in entries for sample in entry.samples], dtype=np.float64)
    correct = np.array([bool(sample.correct) for entry in entries for sample in entry.samples])
    questions = np.repeat(np.arange(len(entries)), [len(entry.samples) for entry in entries])
    columns = np.nan_to_num(values, nan=np.nanmin(values) - 1.0), correct, questions
    found = metric_columns(columns, [AUROC, WITHIN_QUESTION_AUROC], num_resamples=RESAMPLES)
    return {"responses": found[AUROC], "within": found[WITHIN_QUESTION_AUROC]}


def worth_of(pools: Sequence[Sequence[QuestionSamples]], settings: SelectionSettings) -> dict[str, Estimate]:
    return over_seeds([selection_worth(pool, settings) for pool in pools])


def over_seeds(found: Sequence[Columns]) -> dict[str, Estimate]:
    """Return estimates by name over seeds: every resample draws questions, the same for all seeds, and seeds."""
    return {name: estimate_of(mean_over_seeds(np.array([one[name] for one in found]))) for name in found[0]}


def hand_on(store: Path, folder: Path, *, kept: float) -> dict[str, int]:
    """Select, extract key steps and export a store; return what is kept, and how the exported rewards judge."""
    selection, export = folder / "selection", folder / "export"
    chosen = run_select(str(store), str(selection), keep_top=kept)
    rates = run_extract_steps(str(selection), overwrite=True).rates
    run_export_rl(str(selection), str(export), "verl")
    judge = runpy.run_path(str(export / "reward.py"))["judge"]
    judged = otherwise = 0
    for entry in SampleStore(str(store)).samples():
        for sample in entry.samples:
            if sample.finish != "length" and entry.question.reference is not None:
                judged += 1
                given = judge(f"selfcal/{entry.question.task}", sample.text, entry.question.reference)
                otherwise += given != float(bool(sample.correct))
    steps = {name: rates[name] for name in ("with_steps", "ungrounded_forms")}
    return {"kept": len(chosen.kept), **steps, "judged": judged, "judged_otherwise": otherwise}


STUDY = Study(
    "selection/report_selection.py", SIZES, run_jobs, assemble, markdown, collect="--table", layout={"indent": 1},
    met=lambda *_: True,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(STUDY.main())
