"""What choosing training data without gold answers is worth on the bundled model, and what it is held to.

    python benchmarks/selection/report_selection.py

Samples, scores and selects what is not in ``--folder`` yet, a store a seed; ``--table`` writes the tables of what is
there. Gold answers judge and do nothing else: the fusion is fitted to votes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _selection_measures import HandedOn, Score, hand_on, over_seeds, score_tells, selection_worth
from shared.study import RESULTS, ROOT, Study, sizes_parser
from shared.tables import Criterion, criteria_table, exactly, held, section, show, table, triple

from selfcal_lightning.adaptation.picking import (
    FUSED,
    PICK,
    SHARE,
    SSC,
    SelectionSettings,
    fit_votes,
    score_of,
    without_references,
)
from selfcal_lightning.commands.generate import run_generate
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.base import MEAN_LOGPROB, P_TRUE
from selfcal_lightning.confidence.estimators import WEIGHTS
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.metrics.bootstrap import Estimate
from selfcal_lightning.records import QuestionSamples, SamplingSettings

CRITERIA = (
    "min_logprob", "self_certainty", "token_entropy", "lowest_group_confidence", "step_certainty", "step_entropy",
    "step_coe_c", "step_self_evaluation", "coe_r", "coe_c", "coe_r_raw", "coe_c_raw", "sasc_std", "sasc_certainty",
    "sasc_double",
)  # fmt: skip
TOKENS = 120
OF_A_POOL = {weight.name for weight in WEIGHTS}
# What else is asked of these parts, and where it is looked at.
ELSEWHERE = {
    "criteria agree with recorded vectors to 1e-6": "tests",
    "key steps through an API: at least 99 % can be read after one repair": "no service here; tests script its replies",
    "rows load in `datasets`, with the columns of each trainer": "tests",
    "what an adaptation changes": "the report on adaptation",
}
# What picks within a question and what keeps questions: the defaults of `selfcal select`, then votes alone.
PAIRS = ((FUSED, SHARE), (FUSED, SSC), (FUSED, PICK), (MEAN_LOGPROB, SHARE), (SHARE, SHARE), (SSC, SSC))


SIZES = {
    "seeds": (3, "a store each"),
    "questions": (300, "in-domain test questions"),
    "samples": (8, "responses to each"),
    "kept": (0.35, "share of the questions that is kept"),
}


def main() -> None:
    parser = sizes_parser(__doc__, SIZES)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "report-selection")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default="report_selection", help="of the results")
    parser.add_argument("--table", action="store_true", help="write the tables of what is there")
    study = parser.parse_args(namespace=Study())
    stores = [study.folder / f"seed-{seed}" for seed in range(study.seeds)]
    if not study.table:
        for seed, store in enumerate(stores):
            sample(store, seed, study)
    pools = [read_pool(store) for store in stores]
    passed_on = [hand_on(store, study.folder / f"{store.name}-selection", kept=study.kept) for store in stores]
    content = assemble(pools, passed_on, study.sizes(*SIZES))
    content["command"] = " ".join(["python benchmarks/selection/report_selection.py", *study.changed(SIZES)])
    study.publish(study.name, content, markdown(content), indent=1)


def sample(store: Path, seed: int, sizes: Study) -> None:
    """Sample and score a pool, as far as that was not done."""
    run_generate(
        "bundled", str(store), "word_problems", split="test_id", limit=sizes.questions, num_samples=sizes.samples,
        seed=seed, engine=EngineSettings(max_batch=512), sampling=SamplingSettings(max_new_tokens=TOKENS),
    )  # fmt: skip
    run_score(list(CRITERIA), str(store))


def read_pool(store: Path) -> list[QuestionSamples]:
    entries = SampleStore(str(store)).samples(confidences=list(CRITERIA))
    return sorted(entries, key=lambda entry: entry.question.id)


def assemble(
    pools: Sequence[Sequence[QuestionSamples]], passed_on: Sequence[HandedOn], sizes: Mapping[str, Any]
) -> dict[str, Any]:
    names = [FUSED, SHARE, SSC, MEAN_LOGPROB, P_TRUE, *CRITERIA]
    criteria = {name: _criterion(pools, name, sizes["kept"]) for name in names}
    selections = {
        f"{pick}, {keep}": _selection(pools, SelectionSettings(pick=pick, keep=keep, top=sizes["kept"]))
        for pick, keep in PAIRS
    }
    right = [sample.correct for pool in pools for entry in pool for sample in entry.samples]
    return {
        "sizes": {**sizes, "responses": len(right), "right": sum(map(bool, right)) / len(right)},
        "selections": {name: _as_json(row) for name, row in selections.items()},
        "criteria": {name: _as_json(row) for name, row in criteria.items()},
        "targets": [one.as_json() for one in targets(selections, passed_on)],
        "handed_on": [asdict(one) for one in passed_on],
    }


def _criterion(pools: Sequence[Sequence[QuestionSamples]], name: str, kept: float) -> dict[str, Estimate]:
    """Return what a criterion is worth that picks and, where it says something across questions, keeps as well."""
    found = _selection(pools, SelectionSettings(pick=name, keep=SHARE if name in OF_A_POOL else PICK, top=kept))
    tells = over_seeds([score_tells(pool, _score(pool, name)) for pool in pools])
    across = {} if name in OF_A_POOL else {"responses": tells["responses"], **found}
    return {"best": found["best"], "gain": found["gain"], "within": tells["within"], **across}


def _selection(pools: Sequence[Sequence[QuestionSamples]], settings: SelectionSettings) -> dict[str, Estimate]:
    return dict(over_seeds([selection_worth(pool, settings) for pool in pools]))


def _score(pool: Sequence[QuestionSamples], name: str) -> Score:
    fusion = fit_votes([without_references(entry) for entry in pool], None) if name == FUSED else None
    return lambda entry, sample: score_of(entry, sample, name, fusion)


def targets(selections: Mapping[str, Mapping[str, Estimate]], passed_on: Sequence[HandedOn]) -> list[Criterion]:
    gains = {name: selections[f"{name}, {SHARE}"]["gain"] for name in (FUSED, MEAN_LOGPROB)}
    of_votes = {pair: selections[", ".join(pair)] for pair in ((FUSED, SHARE), (SHARE, SHARE), (SSC, SSC))}
    found = [
        held(f"`{name}`, best of all minus one sample: lower end above .03", gain, "low", ">", 0.03)
        for name, gain in gains.items()
    ]
    for (pick, keep), row in of_votes.items():
        what = f"picked by `{pick}`, kept by `{keep}`"
        found.append(held(f"{what}, accuracy of the kept: lower end at least .85", row["kept"], "low", ">=", 0.85))
        found.append(held(f"{what}, AUROC of the picked: at least .87", row["picked"], "value", ">=", 0.87))
    return [*found, *_of_files(passed_on)]


def _of_files(passed_on: Sequence[HandedOn]) -> list[Criterion]:
    kept, with_steps = (sum(getattr(one, name) for one in passed_on) for name in ("kept", "with_steps"))
    ungrounded, judged, apart = (
        sum(getattr(one, name) for one in passed_on) for name in ("ungrounded_forms", "judged", "judged_otherwise")
    )
    counts = {
        f"key steps by rules: of {kept:,} kept responses, those without": kept - with_steps,
        "key steps by rules: forms with a number that the response lacks": ungrounded,
        f"`reward.py`: of {judged:,} finished responses, those that it judges otherwise than the task": apart,
    }
    return [Criterion(text, exactly(count), count == 0) for text, count in counts.items()]


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
    elsewhere = [f"| {text} | {where} | not measured here |" for text, where in ELSEWHERE.items()]
    lines = [
        *section("head", [head]),
        *section("targets", [*criteria_table(content["targets"])[:-1], *elsewhere]),
        *section(
            "selections", _table("picks, keeps", ("best", "gain", "picked", "kept"), heads, content["selections"])
        ),
        *section("criteria", _table("criterion", tuple(heads), heads, content["criteria"])),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def _table(
    first: str, names: Sequence[str], heads: Mapping[str, str], rows: Mapping[str, Mapping[str, Sequence[float | None]]]
) -> list[str]:
    def cell(row: Mapping[str, Sequence[float | None]], name: str) -> str:
        return show(row[name], sign="+" if name == "gain" else "") if name in row else "-"

    lines = [[f"`{label}`", *(cell(row, name) for name in names)] for label, row in rows.items()]
    return table([first, *(heads[name] for name in names)], lines)


if __name__ == "__main__":
    main()
