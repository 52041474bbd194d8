"""How training data are chosen from stored responses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from selfcal_lightning.errors import InputError, unknown_name

Order = Literal["easiest", "hardest", "informative"]
LabelKind = Literal["majority", "ssc", "picked", "reference", "none"]
FUSED, SHARE, SSC, PICK = "fused", "share", "ssc", "pick"
# What fits the fusion where nothing is named: those of them that the responses have.
FUSED_FEATURES = ("mean_logprob", "min_logprob", "self_certainty", "token_entropy", "logit:p_true")


@dataclass(frozen=True)
class SelectionSettings:
    """Which response to each question is chosen, and which questions are kept.

    Attributes:
        pick: The score that chooses within a question: "fused" fits a fusion to the votes of these questions, without
            labels; "share" and "ssc" are the votes themselves; else the name of a confidence.
        keep: The score that chooses among questions, of the chosen response: "share", its answer's share of all
            responses to the question, "ssc", the share weighted by P(True), "pick", the score that chose it, or the
            name of a confidence.
        threshold: Kept is what reaches it: at least it in the order "easiest", at most it in the order "hardest", at
            least as near to one half in the order "informative".
        top: Share of all questions that is kept, in (0, 1].
        count: How many questions are kept.
        order: Which questions come first: those with the highest score, with the lowest, or those whose score is
            nearest to one half, where the responses differ most.
        label: What a question is labelled with: the answer of the majority or of the most confidence, that of the
            chosen response, the gold answer, or nothing.
        features: What the fusion reads; None takes those of ``FUSED_FEATURES`` that the responses have.
        scores: Further confidences that are written with the selection.
        references: Whether gold answers may be read. Without it nothing sees them.

    Raises:
        InputError: A setting is out of its range, two ways of keeping are named, or a gold answer is asked for in a
            run that may read none.
    """

    pick: str = FUSED
    keep: str = SHARE
    threshold: float | None = None
    top: float | None = None
    count: int | None = None
    order: Order = "easiest"
    label: LabelKind = "majority"
    features: tuple[str, ...] | None = None
    scores: tuple[str, ...] = ()
    references: bool = False

    def __post_init__(self) -> None:
        for name, known in (("order", get_args(Order)), ("label", get_args(LabelKind))):
            value = {"order": self.order, "label": self.label}[name]
            if value not in known:
                raise unknown_name(name, value, known)
        ways = {"threshold": self.threshold, "keep_top": self.top, "keep_count": self.count}
        given = {name: value for name, value in ways.items() if value is not None}
        if len(given) > 1:
            raise InputError(f"Expected one of `threshold`, `keep_top` and `keep_count`, but got {given}.")
        if self.top is not None and not 0.0 < self.top <= 1.0:
            raise InputError(f"Expected `keep_top` to lie in (0, 1], but got {self.top}.")
        if self.count is not None and self.count < 1:
            raise InputError(f"Expected `keep_count` to be at least 1, but got {self.count}.")
        if self.features is not None and self.pick != FUSED:
            raise InputError(f"Expected `features` with `pick` {FUSED!r}, but got it with {self.pick!r}.")
        check_label_free(self.label, references=self.references)

    @property
    def names(self) -> tuple[str, ...]:
        """The confidences of responses that are named, besides those of the fusion."""
        named = [name for name in (self.pick, self.keep) if name not in (FUSED, SHARE, SSC, PICK)]
        return tuple(dict.fromkeys([*named, *self.scores]))


def check_label_free(label: LabelKind, *, references: bool) -> None:
    """Raise InputError where gold answers are asked for in a run that may read none."""
    if label == "reference" and not references:
        raise InputError(
            "Expected `label` to be something else than 'reference' in a run without references, but got it. Set "
            "`references` if gold answers may be read; the manifest then says so."
        )
