"""What a run that samples did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from selfcal_lightning.errors import RunError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What a run did.

    Attributes:
        store_dir: Where the samples are.
        questions: Questions of this share.
        reused: Those of them that the store had already.
        generated: Responses sampled.
        unreadable: Sampled responses without a readable answer.
        truncated: Sampled responses that the token limit cut.
        refused: Requests that the engine refuses by itself; stored as empty, unfinished responses.
        left_out: Questions of which other requests failed; they are not stored, and the next run samples them.
        seconds: Wall-clock time.
        cut_read: Those of the responses that the token limit cut that have an answer all the same.
    """

    store_dir: str
    questions: int
    reused: int
    generated: int
    unreadable: int
    truncated: int
    refused: int
    left_out: int
    seconds: float
    cut_read: int = 0

    def __str__(self) -> str:
        sampled = max(self.generated, 1)
        return (
            f"{self.questions:,} questions ({self.reused:,} stored before), {self.generated:,} responses in "
            f"{self.seconds:.0f} s ({self.generated / max(self.seconds, 1e-9):.1f} a second): "
            f"{self.unreadable / sampled:.1%} unreadable, {self.truncated / sampled:.1%} cut by the token limit"
            f"{self._reading_of_cut()}, "
            f"{self.refused:,} refused, {self.left_out:,} questions left out. Samples in {self.store_dir}"
        )

    def _reading_of_cut(self) -> str:
        if not self.truncated:
            return ""
        return f" (an answer was read in {self.cut_read / self.truncated:.1%} of these)"

    def check_complete(self) -> None:
        """Raise RuntimeError where questions were left out: the run is not done."""
        if self.left_out:
            raise RunError(
                f"Expected all {self.questions:,} questions to be answered, but {self.left_out:,} had requests that "
                f"failed and were left out. What is complete is kept in {self.store_dir}: start the same command again "
                "to sample them."
            )
