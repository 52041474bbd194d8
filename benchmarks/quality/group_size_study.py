"""What ``group_size`` costs in quality: training rows one by one against groups of a question.

Every arm of a seed trains on the same tuples in another order, in as many steps. Packing changes no figure, so it is
off.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import rounds_study
from shared.study import Options, Study
from shared.tables import show, table

ARMS = {"one by one": 1, "groups of 4": 4, "groups of 8": 8}
FIRST = next(iter(ARMS))
SIZES = {
    "questions": (700, "training questions"),
    "responses": (10, "responses a training question"),
    "tuples": (7000, "training tuples"),
    "test": (600, "in-domain test questions"),
    "num_samples": (8, "responses per test question"),
    "workers": (2, "jobs at a time, one core each"),
}
QUICK = {"seeds": [0], "questions": 24, "responses": 8, "tuples": 96, "test": 20, "num_samples": 4}


def calibrate(options: argparse.Namespace, arm: str, seed: int) -> None:
    config = rounds_study.configuration(options, arm, seed)
    config["data"]["init_args"] |= {"packing": "off", "group_size": ARMS[arm]}
    rounds_study.fit_arm(options, FIRST, arm, seed, config)


def assemble(options: Options) -> dict[str, Any]:
    arms = rounds_study.arm_values(options, FIRST, ARMS, "difference")
    del arms[FIRST]["difference"]
    sizes = options.sizes("questions", "responses", "tuples", "test", "num_samples", "seeds")
    training = rounds_study.training_of(rounds_study.configuration(options, FIRST, options.seeds[0]))
    training["group_size"] = list(ARMS.values())
    return {"sizes": sizes, "training": training, "arms": arms, "minutes": options.minutes}


def as_markdown(study: dict[str, Any]) -> str:
    sizes, arms = study["sizes"], study["arms"]
    rows = [[arm, *map(show, entry["values"].values())] for arm, entry in arms.items()]
    less = [[arm, *map(show, entry["difference"].values())] for arm, entry in arms.items() if "difference" in entry]
    lines = [
        f"Command: `{study['command']}` ({study['minutes']} minutes for the jobs that were not done before). "
        f"{sizes['questions']} training questions x {sizes['responses']} responses, {sizes['tuples']:,} tuples, 32 "
        f"to a step, {rounds_study.describe_training(study)}; {sizes['test']} in-domain test questions x "
        f"{sizes['num_samples']} responses, each model on its own samples; means over seeds {sizes['seeds']}, 95 % "
        "intervals over questions and seeds.",
        "",
        *table(["training rows", *rounds_study.METRICS], rows),
        "",
        *table([f"minus {FIRST}", *rounds_study.METRICS], less),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    study = Study(
        "quality/group_size_study.py", SIZES, lambda options: rounds_study.run_arms(options, FIRST, ARMS, calibrate),
        assemble, as_markdown, quick=QUICK, layout={"indent": 1},
    )  # fmt: skip
    raise SystemExit(study.main())
