"""Real GRPO steps of TRL on the bundled model with our rewards; run by tests/adaptation/test_rewards.py.

The bundled model states no confidence, so it first learns the form: a few supervised steps on reference answers and
random confidences. Prints one line of JSON. On its own:
`OMP_NUM_THREADS=1 python tests/support/grpo_steps.py FOLDER 20`.
"""

import json
import random
import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from selfcal_lightning.adaptation.rewards import rlcr_reward
from selfcal_lightning.data.tasks.word_problems import WordProblems, stream_problems, write_solution
from selfcal_lightning.models.folders import BUNDLED_MODEL


def main(folder: str, steps: int) -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    teach_the_form(model, tokenizer, rng)
    source, problems = {"data_source": "selfcal/word_problems"}, WordProblems().load("train", limit=64)
    rows = [{"prompt": [{"role": "user", "content": one.text}], "answer": one.reference, **source} for one in problems]
    calls: list[tuple[list[str], object, list[float | None]]] = []

    def recorded(prompts: list, completions: list, completion_ids: list, **columns: object) -> list[float | None]:
        found = rlcr_reward(prompts, completions, completion_ids=completion_ids, **columns)
        columns["log_extra"]("answer", list(columns["answer"]))  # a column of the logged completions
        calls.append(([one[-1]["content"] for one in completions], columns["answer"], found))
        return found

    settings = GRPOConfig(
        output_dir=folder, max_steps=steps, per_device_train_batch_size=16, num_generations=8, learning_rate=1e-4,
        max_completion_length=140, logging_steps=1, report_to="none", use_cpu=True, save_strategy="no",
        bf16=False, seed=0, log_completions=True, num_completions_to_print=0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, reward_funcs=[recorded], args=settings, train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )  # fmt: skip
    start = [one.detach().clone() for one in model.parameters()]
    trainer.train()
    moved = max(float((one - old).abs().max()) for one, old in zip(model.parameters(), start, strict=True))
    logs = [one for one in trainer.state.log_history if "reward" in one]
    names = ("reward", "confidence/mean", "confidence/std", "confidence/missing", "confidence/outside")
    curves = {name: [one.get(name) for one in logs] for name in names}
    sys.stdout.write(json.dumps({"curves": curves, "calls": calls, "moved": moved}))


def teach_the_form(model: torch.nn.Module, tokenizer: object, rng: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    problems = stream_problems("train", seed=1)
    for _ in range(300):
        rows = []
        for _ in range(16):
            problem = next(problems)
            text = f"{write_solution(problem, rng)} Confidence: 0.{rng.randint(1, 9)}"
            chat = [{"role": "user", "content": problem.question}]
            prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text)]
            rows.append((ids[0], [*ids[1], tokenizer.eos_token_id]))
        width = max(len(a) + len(b) for a, b in rows)
        pad = [width - len(a) - len(b) for a, b in rows]
        ids = torch.tensor([a + b + [0] * n for (a, b), n in zip(rows, pad, strict=True)])
        labels = torch.tensor([[-100] * len(a) + b + [-100] * n for (a, b), n in zip(rows, pad, strict=True)])
        model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
