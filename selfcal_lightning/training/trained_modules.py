"""What a LightningModule offers to data modules, callbacks and verbs."""

from __future__ import annotations

from typing import Protocol, cast

from selfcal_lightning.training.contracts import check_members

MODULE = "a module"


class ReadingModule(Protocol):
    """What ``SSCDataModule`` asks of the module that it makes batches for."""

    @property
    def activated(self) -> bool:
        """Whether what is trained acts on the confidence query alone, so that rows of generation train nothing."""
        ...

    @property
    def attn_implementation(self) -> str | None:
        """Attention of the model that reads the rows; None where the module chooses one that can read packed rows."""
        ...


def reading_module(module: object, *, who: str) -> ReadingModule:
    """Return a module as what a data module reads of it.

    Raises:
        InputError: It lacks members of ``ReadingModule``.
    """
    check_members(module, ReadingModule, who=who, kind=MODULE)
    return cast("ReadingModule", module)
