"""Your own strategy, live on an engine: stop when an answer has come twice.

python examples/your_strategy.py
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import selfcal_lightning as sc
from selfcal_lightning.inference.base import Ask, Solving, make_verdict


@dataclass(frozen=True)
class FirstTwice:
    """Draws one response at a time until an answer has come twice or the budget is spent."""

    name: ClassVar[str] = "first_twice"

    max_samples: int = 6
    confidence: str | None = None

    def solve(self, question: sc.Question) -> Solving:
        """Return the answer that came twice, or else the most frequent one."""
        seen: list[sc.Sample] = []
        votes: Counter[str] = Counter()
        while len(seen) < self.max_samples and max(votes.values(), default=0) < 2:
            drawn = yield Ask(1)
            if not drawn:  # a recorded question has no more
                break
            seen += drawn
            votes.update(sample.answer for sample in drawn if sample.answer is not None)
        answer = votes.most_common(1)[0][0] if votes else None
        return make_verdict(question, seen, answer, confidence=None, stopped_early=len(seen) < self.max_samples)


if __name__ == "__main__":
    engine = sc.TransformersEngine("bundled")
    questions = sc.get_task("word_problems").load("test_id", limit=12)
    source = sc.EngineSource(engine, engine.chat, sampling=sc.SamplingSettings(max_new_tokens=120), seed=0)
    verdicts = sc.run_strategy(FirstTwice(), questions, source)
    for verdict in verdicts:
        print(verdict.answer, verdict.samples_used, "samples", "right" if verdict.correct else "wrong")
    print(sum(bool(verdict.correct) for verdict in verdicts), "of", len(verdicts), "right")
    engine.close()
