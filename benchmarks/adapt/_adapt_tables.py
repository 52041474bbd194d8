"""The report on test-time training as Markdown, and what its figures are held to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from _adapt_extras import MOST_ROUNDS, WRECKING_RATE, Guarded, Packing

from selfcal_lightning.metrics.group_rewards import GroupReward, PoolTarget

# The reward, and what P(True) learns meanwhile.
METHODS: dict[str, tuple[GroupReward, PoolTarget | None]] = {
    "TTRL": ("majority", None),
    "calibrated, anchor": ("majority", "anchor"),
    "calibrated, round": ("majority", "round"),
    "equations": ("equations", None),
}
PLAIN, ANCHOR, ROUND, EQUATIONS = METHODS
ADAPTER: dict[str, Any] = {
    "r": 16, "alpha": 32, "dropout": 0.0, "activated": False,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip


def targets(
    tables: Mapping[str, Any],
    rounds_gain: Mapping[str, float | None] | None,
    packing: Packing | None,
    guarded: Guarded | None,
) -> list[dict[str, str]]:
    """Return what was asked of the figures, what came out, and whether that is met, missed or not measured."""
    trans, ind = tables["transductive"], tables["inductive"]
    ece = ind["changes"]["anchor less TTRL"]["ece"]
    gained = {name: table["changes"]["anchor less start"] for name, table in (("trans", trans), ("ind", ind))}
    after = {name: table["levels"][ANCHOR]["ece"] for name, table in (("trans", trans), ("ind", ind))}
    rows: list[tuple[str, str, bool | None]] = [
        ("anchor less TTRL, inductive ECE: upper bound < -.03", _cell(ece), ece["high"] < -0.03),
        (
            "anchor, ECE after <= .12 and upper bound of its change < +.03, transductive and inductive",
            "; ".join(f"{after[name]:.3f}, {_cell(gained[name]['ece'])}" for name in gained),
            all(gained[name]["ece"]["high"] < 0.03 and after[name] <= 0.12 for name in gained),
        ),
        (
            "anchor, inductive pass@1: lower bound of its change > -.02",
            _cell(gained["ind"]["pass@1"]),
            gained["ind"]["pass@1"]["low"] > -0.02,
        ),
        (
            "anchor, pass@k: lower bounds of its change > -.10, transductive and inductive",
            "; ".join(_cell(gained[name]["pass@k"]) for name in gained),
            all(gained[name]["pass@k"]["low"] > -0.10 for name in gained),
        ),
        _equations_target(trans, ind),
        _rounds_target(rounds_gain),
        _packing_target(packing),
        _guard_target(guarded),
        ("selection, key steps and exports", "the report on selection", None),
    ]
    words = {True: "met", False: "missed", None: "not measured here"}
    return [{"target": name, "found": found, "verdict": words[met]} for name, found, met in rows]


def _equations_target(trans: Mapping[str, Any], ind: Mapping[str, Any]) -> tuple[str, str, bool | None]:
    name, label = "equations: pass@1, lower bounds > 0 transductive and > -.02 inductive", "equations less start"
    if label not in trans["changes"]:
        return name, "-", None
    first, second = (table["changes"][label]["pass@1"] for table in (trans, ind))
    return name, f"{_cell(first)}; {_cell(second)}", first["low"] > 0.0 and second["low"] > -0.02


def _rounds_target(gain: Mapping[str, float | None] | None) -> tuple[str, str, bool | None]:
    name = "TTRL: pass@1 at temperature 1 rises from the first round to the last, lower bound > 0"
    if gain is None or gain["low"] is None:
        return name, "one round has no change", None
    return name, _cell(gain), gain["low"] > 0.0


def _guard_target(guarded: Guarded | None) -> tuple[str, str, bool | None]:
    name = f"the guard stops a run at a rate of {WRECKING_RATE:g} within {MOST_ROUNDS} rounds, and restores"
    if guarded is None:
        return name, "-", None
    if guarded.rounds is None:
        return name, "it was not stopped", False
    restored = "the last good adapter was left" if guarded.is_restored else "another adapter was left"
    return name, f"before round {guarded.rounds}: {'; '.join(guarded.problems)}; {restored}", guarded.is_restored


def _packing_target(packing: Packing | None) -> tuple[str, str, bool | None]:
    name = "a group packed against rows of their own: >= 1.4 x the responses a CPU second, forward and backward"
    if packing is None:
        return name, "-", None
    said = (
        f"{packing.speed_up:.2f} x; {packing.packed_tokens:.0f} and {packing.apart_tokens:.0f} tokens a response "
        "(equal gradients: a test)"
    )
    return name, said, packing.speed_up >= 1.4


def markdown(content: Mapping[str, Any]) -> str:
    """Return the tables."""
    sizes = content["sizes"]
    over = "questions and seeds" if sizes["seeds_done"] > 1 else "questions"
    updates = -(-sizes["questions"] * sizes["samples"] // sizes["batch_size"]) * sizes["rounds"]
    lines = [
        f"Command: `{content['command']}`.",
        "",
        f"Sizes: {sizes['seeds_done']} seed(s); start calibrated on {sizes['start_questions']} questions x "
        f"{sizes['samples']}; adapted on {sizes['questions']} x {sizes['samples']}, {sizes['rounds']} rounds, "
        f"{updates} updates of {sizes['batch_size']} responses, LoRA of rank 16, peak learning rate {sizes['lr']:g}; "
        f"{sizes['questions']} other and {sizes['out_of_domain']} out-of-domain questions x {sizes['samples']} at the "
        f"usual sampling (EDT .8). Intervals: 95 %, paired, over {over}; those that exclude 0 in bold.",
        "",
    ]
    columns = ("pass@1", "greedy", "majority", "pass@k", "distinct", "tokens", "ece", "brier", "auroc")
    lines += [f"| questions | model | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, table in content["sets"].items():
        for label, row in table["levels"].items():
            lines.append(f"| {name} | {label} | {' | '.join(f'{row[column]:.3f}' for column in columns)} |")
    lines += _untrained(content["start"])
    changed = ("pass@1", "greedy", "majority", "pass@k", "ece", "brier", "auroc")
    lines += ["", f"| questions | change | {' | '.join(changed)} |", "|---|---|" + "---|" * len(changed)]
    for name, table in content["sets"].items():
        for label, row in table["changes"].items():
            lines.append(f"| {name} | {label} | {' | '.join(_cell(row[column]) for column in changed)} |")
    lines += _verdicts(content["sets"])
    if content["not_measured"]:
        lines += ["", f"Not measured at this size: {', '.join(content['not_measured'])}."]
    lines += ["", "| target | found | |", "|---|---|---|"]
    lines += [f"| {row['target']} | {row['found']} | {row['verdict']} |" for row in content["targets"]]
    heads = ("run", "round", "pass@1 at T = 1", "label accuracy", "reward accuracy", "agreement", "votes", "lost log p")
    lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    keys = ("pass@1", "label_accuracy", "reward_accuracy", "agreement", "vote_share", "logprob_fall")
    for run, result in content["runs"].items():
        for number, row in result["rounds"].items():
            cells = ["-" if row.get(key) is None else f"{row[key]:.3f}" for key in keys]
            lines.append(f"| {run} | {number} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(found: Mapping[str, float | None]) -> str:
    value, low, high = found["change"], found["low"], found["high"]
    if value is None or low is None or high is None:
        return "-"
    text = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def _untrained(start: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Return what the start does in other ways of sampling, the votes of as many tokens as an adaptation among them."""
    columns = ("pass@1", "majority", "pass@k", "distinct", "samples")
    lines = ["", f"| questions | without training | {' | '.join(columns)} |", "|---|---|" + "---|" * len(columns)]
    for name, rows in start.items():
        for way, row in rows.items():
            cells = ["-" if column not in row else f"{row[column]:.3f}" for column in columns[:-1]]
            shown = way.replace("base", "start", 1)
            lines.append(f"| {name} | {shown} | {' | '.join(cells)} | {row['samples']:.0f} |")
    return lines


def _verdicts(sets: Mapping[str, Any]) -> list[str]:
    methods = list(next(iter(sets.values()))["verdicts"])
    lines = ["", f"| what pass@1 comes to | {' | '.join(sets)} |", "|---|" + "---|" * len(sets)]
    return lines + [f"| {one} | {' | '.join(table['verdicts'][one] for table in sets.values())} |" for one in methods]
