"""``make report-real``: what an activated adapter knows on a real language model, against what it is had for.

SmolLM2-135M-Instruct answers questions about countries (``examples/smollm``); confidences are compared on the same
responses: its own P(True), the likelihood, the share of four votes, fusions, and the adapter, trained without labels.
Every job is a command that a user would type, and done once: an interrupted report goes on where it stopped. Figures go
to ``benchmarks/results/report_real.{json,md,png}``; cells that were not run are named there.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _real_jobs import JOINT, LEAVE_ONE_OUT, TARGETS, TUNED, Jobs, Sizes
from _real_report import as_markdown, assemble, figure
from shared.study import IMAGES, RESULTS, command_line
from shared.tables import write_report

from selfcal_lightning.evaluation.figures import save_figure

DPI = 110
VARIANTS = ("activated", JOINT, TUNED)
# The demonstration's account of time is made of these. One core with AVX512-BF16 was measured, shared with other work:
# 12 responses sampled (bfloat16), 4 trained on (float32) and 26 scored (bfloat16) a CPU second. Two idle ones are
# reckoned to train half as fast again, and to gain nothing where rows are few.
CONVERT_SECONDS, OVERHEAD_SECONDS = 30.0, 120.0
SAMPLED_A_SECOND, TRAINED_A_SECOND, SCORED_A_SECOND = 12.0, 6.0, 25.0
DEMO = {
    "output": Path("runs/demo-real"), "train": 130, "test": 110, "seeds": [0], "variants": ["activated"],
    "targets": [LEAVE_ONE_OUT],
}  # fmt: skip


def main() -> int:
    """Run the jobs that are asked for, then compute and write the report.

    Exit status 1 when a target is missed; the demonstration, which is too small to be held to them, ends with 0.
    """
    options = parse_arguments()
    started = time.monotonic()
    sizes = Sizes(options.train, options.test, options.calibration, options.num_samples, options.train_samples)
    jobs = Jobs(options.output, options.model, sizes)
    if not options.figures:
        if options.demo:
            print(account(jobs), flush=True)
        run(jobs, options)
    report = assemble(jobs, seeds=options.seeds, texts=jobs.texts(options.targets[0], options.seeds[0]))
    report["command"] = command_line("real/report_real.py")
    report["sizes"] |= {"train": options.train, "calibration": options.calibration, "samples": options.num_samples}
    report["sizes"]["train_samples"] = sizes.samples_of("train")
    report["minutes"] = round((time.monotonic() - started) / 60, 1)
    folder = options.output if options.demo else RESULTS
    picture = figure(report)
    write_report(folder, "report_real", report, as_markdown(report), picture=picture, dpi=DPI, indent=1)
    if not options.demo:
        save_figure(picture, IMAGES / "report_real.png", dpi=DPI)
    print(f"Written to {folder}: report_real.md, report_real.png and report_real.json.")
    held = report["held_to"]
    return 0 if options.demo or (held and all(row["met"] for row in held.values())) else 1


def account(jobs: Jobs) -> str:
    """Return what the demonstration is going to do, and about how long each part takes on two idle cores."""
    sizes = jobs.sizes
    train, test = ((count or 0) * sizes.num_samples for count in (sizes.train, sizes.test))
    fitted = sizes.calibration * sizes.num_samples
    rows = (
        ("convert the model, once", CONVERT_SECONDS),
        (f"sample {train:,} training, {test:,} test and {fitted:,} calibration responses",
         (train + test + fitted) / SAMPLED_A_SECOND),
        (f"train an adapter on {train:,} responses, without labels", train / TRAINED_A_SECOND),
        (f"score {test + fitted:,} responses by it", (test + fitted) / SCORED_A_SECOND),
        ("load programs and models, compute the tables", OVERHEAD_SECONDS),
    )  # fmt: skip
    lines = [f"  {text:<76}{seconds / 60:5.1f} min" for text, seconds in rows]
    total = sum(seconds for _, seconds in rows) / 60
    return "\n".join([f"On two idle cores, about {total:.0f} minutes:", *lines, f"Log: {jobs.folder / 'log.txt'}"])


def run(jobs: Jobs, options: argparse.Namespace) -> None:
    jobs.convert()
    for split in ("train", "validation"):
        jobs.sample(jobs.model, jobs.samples, split)
    jobs.sample(jobs.model, jobs.test, "test", seed=1)
    if not options.demo:
        jobs.probe()
    if "activated" in options.variants:
        for target in options.targets:  # the headline's first
            for seed in options.seeds:
                jobs.score_both(jobs.activate(target, seed), f"{target}_{seed}")
        if not options.demo:
            target, seed = options.targets[0], options.seeds[0]
            jobs.sample_twice(jobs.folder / target / f"seed-{seed}" / "adapter", jobs.texts(target, seed))
    for seed in options.joint_seeds if {JOINT, TUNED} & set(options.variants) else ():
        merged = jobs.tune(seed)
        jobs.sample(merged, jobs.own_test(seed), "test", seed=1)
        if TUNED in options.variants:
            jobs.sample(merged, jobs.own_samples(seed), "train")
            adapter = jobs.activate(LEAVE_ONE_OUT, seed, model=merged, samples=jobs.own_samples(seed))
            jobs.score(jobs.own_test(seed), adapter, TUNED, split="test")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/report-real"), help="samples and adapters go here")
    parser.add_argument("--model", type=Path, default=Path("runs/real/smollm2"), help="folder of the converted model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--joint_seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--train", type=int, default=415, help="training questions; 415 are all")
    parser.add_argument("--test", type=int, default=None, help="test questions; all 499 where left out")
    parser.add_argument("--calibration", type=int, default=50, help="labelled questions for scalers and fusions")
    parser.add_argument("--num_samples", type=int, default=8, help="responses to a question")
    parser.add_argument("--train_samples", type=int, default=None, help="to a training question; as many if left out")
    parser.add_argument("--figures", action="store_true", help="run no job: compute from what is there")
    parser.add_argument("--demo", action="store_true", help="a small one, in minutes, beside whose samples it writes")
    if "--demo" in sys.argv[1:]:
        parser.set_defaults(**DEMO)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
