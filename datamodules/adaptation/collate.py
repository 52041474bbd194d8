"""Responses as rows of test-time training: what ``SSCCollator`` makes of them, and their advantages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.mixture import IntArray
from selfcal_lightning.datamodules.ssc.tuples import TupleTable
from selfcal_lightning.modules.adaptation.batch import PolicyBatch


class PolicyCollator(SSCCollator):
    """Encodes and packs rows as ``SSCCollator`` does, with the advantage that stands beside their target."""

    def __call__(self, rows: TupleRows) -> PolicyBatch:
        """Return the batch of ``rows``; rows without an advantage have 0."""
        beside = np.zeros((len(rows.stored), 1)) if rows.beside_target is None else rows.beside_target
        batch = super().__call__(replace(rows, beside_target=None))
        advantage = torch.as_tensor(np.nan_to_num(beside[:, 0]), dtype=torch.float32)
        return PolicyBatch(advantage=advantage, **batch.__dict__)

    def label_tokens(self, table: TupleTable) -> IntArray:
        """Return how many tokens of each row are asked for: those of its response, and the end of its turn, [R]."""
        suffix = self.chat.query.suffix_ids
        room = self.room_for_response(table.prompt_length)
        kept = table.length - table.prompt_length - len(suffix)
        is_whole = (kept < room) | (table.index.num_tokens == room)
        ends = suffix[0] in self.chat.end_of_turn_ids
        return kept + (ends & is_whole & (table.index.finish == "stop"))
