"""The batch of test-time training: responses, and how much better each was than those of its group."""

from __future__ import annotations

from torch import Tensor

from selfcal_lightning.modules.batch import SSCBatch


class PolicyBatch(SSCBatch):
    """An ``SSCBatch`` whose rows carry an advantage. Immutable.

    ``generation_weight`` is the weight of a row in what is learnt of its tokens (policy gradient, KL and entropy, or
    the likelihood of a selection): its number of tokens where tokens weigh alike, 1 where responses do, and 0 where it
    teaches nothing. ``calibration_weight`` is 1 where P(True) has a target. What nobody may know while training is not
    here: ``correct`` is nan unless the reward is made of references.

    Attributes:
        advantage: Reward of each row over those of its group, float32, [B]; 0 where it has none.
    """

    advantage: Tensor

    def __init__(self, *, advantage: Tensor, **fields: Tensor | tuple | None) -> None:
        super().__init__(**fields)  # type: ignore[arg-type]
        self.__dict__["advantage"] = advantage
