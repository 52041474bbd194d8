"""What calibrating a model cost, in the currency of test time: generated tokens."""

from __future__ import annotations

from dataclasses import dataclass

from selfcal_lightning.errors import InputError
from selfcal_lightning.pools.recorded import load_recorded_pool
from selfcal_lightning.tasks.token_costs import total_tokens


@dataclass(frozen=True)
class TrainingCost:
    """What was spent once, before the first test question.

    Attributes:
        generated_tokens: Tokens that were generated for training.
        store: Store of the training samples, whose tokens (and confidence queries) are added to them.
        trained_tokens: Tokens that training went over, all epochs together.
        trained_token_price: Generated tokens that a trained one costs; forward and backward pass are about three
            forward passes.
        seconds: What it all took instead, where tokens are not known; needs ``tokens_per_second``.
        tokens_per_second: How fast the same machine generates at test time.
    """

    generated_tokens: float = 0.0
    store: str | None = None
    trained_tokens: float = 0.0
    trained_token_price: float = 3.0
    seconds: float | None = None
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        numbers = (self.generated_tokens, self.trained_tokens, self.trained_token_price, self.seconds or 0.0)
        if min(numbers) < 0.0:
            raise InputError(f"Expected costs of at least 0, but got {self}.")
        if (self.seconds is None) != (self.tokens_per_second is None):
            raise InputError(f"Expected `seconds` and `tokens_per_second` together, but got {self}.")
        if self.seconds is not None and (self.generated_tokens or self.trained_tokens or self.store):
            raise InputError("Expected the cost either in `seconds` or in tokens, but got both.")

    def tokens(self) -> float:
        """Return the cost in generated tokens.

        Example:
            >>> TrainingCost(generated_tokens=1000.0, trained_tokens=500.0).tokens()
            2500.0
            >>> TrainingCost(seconds=60.0, tokens_per_second=100.0).tokens()
            6000.0
        """
        if self.seconds is not None and self.tokens_per_second is not None:
            return self.seconds * self.tokens_per_second
        stored = 0.0 if self.store is None else stored_tokens(self.store)
        return self.generated_tokens + stored + self.trained_tokens * self.trained_token_price


def stored_tokens(store: str) -> float:
    """Return the tokens of all samples of a store (round 0), those of their confidence queries too.

    Raises:
        ValueError: The length of a response is unknown.
    """
    pool = load_recorded_pool(store, texts=False)
    total = total_tokens((sample for entry in pool.entries for sample in entry.samples), pool.query_tokens)
    if total is None:
        raise InputError(f"Expected the lengths of all responses in {store}, but some are unknown.")
    return float(total)
