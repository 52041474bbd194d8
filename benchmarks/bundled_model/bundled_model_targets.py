"""What the bundled model must be able to do, in-domain and under the project's own sampling, to be put in its place."""

from __future__ import annotations

from dataclasses import dataclass

from bundled_model_measuring import Figures

COLUMN = "test_id, EDT"


@dataclass(frozen=True, slots=True)
class Target:
    """A range for one measured figure; ends are included."""

    figure: str
    low: float = float("-inf")
    high: float = float("inf")

    def is_met(self, figures: Figures) -> bool:
        value = figures[self.figure]["value"]
        return value is not None and self.low <= value <= self.high


TARGETS = (
    Target("within_auroc_p_true", low=0.70),
    Target("auroc_p_true", low=0.80),
    Target("overconfidence", low=0.15),
    Target("pass_at_1", low=0.40, high=0.55),
    Target("majority_gain", low=0.08),
    Target("unreadable", high=0.02),
)


def unmet_targets(columns: dict[str, Figures]) -> list[str]:
    """Return a sentence for each target that the measured ``columns`` miss."""
    figures = columns[COLUMN]
    sentences = []
    for target in TARGETS:
        if not target.is_met(figures):
            value = figures[target.figure]["value"]
            sentences.append(f"Expected `{target.figure}` to lie in [{target.low}, {target.high}], but got {value}.")
    return sentences
