"""Calibrate a model on questions of one's own, without labels, from Python: an adapter that wakes at the query.

python examples/your_questions.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning

import selfcal_lightning as sc


def write_questions(path: Path) -> None:
    """Stand-in for your own file: JSON lines with `question` and `answer`."""
    problems = sc.get_task("word_problems").load("train", limit=60)
    rows = [{"question": one.text, "answer": one.reference} for one in problems]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/examples/your_questions")
    folder.mkdir(parents=True, exist_ok=True)
    write_questions(folder / "questions.jsonl")
    file = str(folder / "questions.jsonl")
    lightning.seed_everything(0)
    lora = sc.LoraSettings(r=8, alpha=16, dropout=0.0)
    module = sc.SelfCalibrationModule("bundled", lora=lora, lr=2e-3, warmup_steps=2)
    data = sc.SSCDataModule(
        base_model="bundled",
        store_dir=str(folder / "samples"),
        num_samples=6,
        train=[sc.QuestionSource("local_number", path=file, limit=48)],
        validation=[sc.QuestionSource("local_number", path=file, offset=48, limit=12)],
        max_length=320,
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[sc.SSCGeneration(max_new_tokens=120), sc.AdapterExport(str(folder / "adapter"))],
    )
    trainer.fit(module, data)
    print("Written:", folder / "adapter")
    sc.answer(
        "bundled",
        question="Tom has 3 boxes of 4 pens. How many pens has he?",
        task="local_number",
        adapter=str(folder / "adapter"),
        max_new_tokens=120,
    )
