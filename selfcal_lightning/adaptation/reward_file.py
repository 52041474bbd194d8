"""Rewards of exported questions for RL trainers: 1 where a response gives the label, else 0."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.core.errors import unknown_name
from selfcal_lightning.core.plugins import load_installed_plugins, loaded_plugins
from selfcal_lightning.data.tasks.base import Task
from selfcal_lightning.data.tasks.registry import get_task

_FILE = '''"""Rewards of exported questions: 1 where a response gives the label, else 0. Written by `selfcal export-rl`.

- verl:     reward.custom_reward_function.path=reward.py reward.custom_reward_function.name=compute_score
- TRL:      GRPOTrainer(reward_funcs=[correct_reward], ...) with `from reward import correct_reward`
- OpenRLHF: --reward.remote_url reward.py
"""

from selfcal_lightning.adaptation.reward_file import TaskRewards
{plugins}
rewards = TaskRewards({names})
judge, compute_score = rewards.judge, rewards.compute_score
correct_reward, reward_func = rewards.correct_reward, rewards.reward_func
'''

_PLUGINS = """from selfcal_lightning.core.plugins import load_plugins

load_plugins({places})
"""
# OpenRLHF decodes queries with their special tokens, of which the last ones end the turn.
_END_OF_TURN = re.compile(r"(?:(?:<\|[^<>|]{1,40}\|>|<｜[^<>｜]{1,40}｜>|</s>|<eos>|<end_of_turn>)\s*)+\Z")


class TaskRewards:
    """Reads and judges responses as the named tasks do, behind the function that each trainer calls.

    Args:
        names: Names of registered tasks; the ``data_source`` of an exported row is ``selfcal/NAME``.
    """

    def __init__(self, *names: str) -> None:
        load_installed_plugins()  # a trainer loads none
        self._tasks = {f"selfcal/{name}": get_task(name) for name in names}

    def judge(self, data_source: str, response: str, label: str | None) -> float | None:
        """Return 1.0 where a response gives the label, 0.0 where it does not, and None without a label."""
        if not label:
            return None
        if data_source not in self._tasks:
            raise unknown_name("data_source", data_source, self._tasks)
        task = self._tasks[data_source]
        return float(task.verify(task.extract(response), label))

    def compute_score(
        self, data_source: str, solution_str: str, ground_truth: str, extra_info: object = None, **kwargs: object
    ) -> dict[str, float]:
        """Return the score of one response for verl; 0 without a label."""
        reward = self.judge(data_source, solution_str, ground_truth) or 0.0
        return {"score": reward, "has_label": float(bool(ground_truth))}

    def correct_reward(
        self,
        prompts: object,
        completions: Sequence[Any],
        answer: Sequence[Any],
        data_source: Sequence[str],
        **_: object,
    ) -> list[float | None]:
        """Return the reward of each completion for TRL; None without a label."""
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [self.judge(*each) for each in zip(data_source, texts, answer, strict=True)]

    def reward_func(
        self, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str], **_: object
    ) -> dict[str, Any]:
        """Return the rewards of a batch for OpenRLHF; 0 without a label."""
        import torch

        texts = [query.removeprefix(prompt) for query, prompt in zip(queries, prompts, strict=True)]
        rows = zip(texts, map(json.loads, labels), strict=True)
        judged = [self.judge(one["data_source"], _END_OF_TURN.sub("", text), one["answer"]) for text, one in rows]
        rewards = torch.tensor([reward or 0.0 for reward in judged])
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"correct": rewards}}


def reward_source(tasks: Iterable[Task]) -> str:
    """Return the file; it loads the plug-ins of this process, since a task may be of one."""
    names = ", ".join(f'"{name}"' for name in sorted(task.name for task in tasks))
    places = [str(Path(name).resolve()) if name.endswith(".py") else name for name in loaded_plugins()]
    plugins = _PLUGINS.replace("{places}", json.dumps(places)) if places else ""
    return _FILE.replace("{names}", names).replace("{plugins}", plugins)
