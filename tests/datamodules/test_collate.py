import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection

from selfcal_lightning.data.store.shards import StoredRow
from selfcal_lightning.datamodules.ssc.collate import SSCCollator, TupleRows
from selfcal_lightning.datamodules.ssc.sampler import MicroBatch
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Question, Sample
from selfcal_lightning.training.batches import SSCBatch


def make_row(chat: ChatFormat, text: str = "3+4=7. The answer is 7.", **changes: Any) -> StoredRow:
    question = Question("q", "word_problems", (Message("user", "Ann has 3 plums and gets 4. How many?"),))
    sample = Sample("q", 0, 0, text, chat.response_ids(text), "stop", "7", True)
    return StoredRow(question, replace(sample, **changes), "train", chat.prompt_ids(question.messages))


def make_rows(stored: list[StoredRow], *, fillers: int = 0) -> TupleRows:
    size = len(stored)
    real = np.arange(size) < size - fillers
    micro = MicroBatch(np.arange(size) + 100, real, real * 1.0, real * 1.0, 5.0, 2.0)
    return TupleRows(micro, stored, np.full(size, 0.5), np.full(size, np.nan), np.arange(size))


def test_a_row_is_prompt_response_and_query(chat: ChatFormat) -> None:
    row = make_row(chat)
    batch = SSCCollator(chat, max_length=256)(make_rows([row]))
    prompt, response, suffix = row.prompt_ids, row.sample.token_ids, chat.query.suffix_ids
    length = len(prompt) + len(response) + len(suffix)
    assert batch.input_ids[0, :length].tolist() == [*prompt, *response, *suffix]
    assert batch.attention_mask[0].tolist() == [1] * length + [0] * (batch.input_ids.shape[1] - length)
    assert batch.query_position.tolist() == [length - 1]
    # A response that stopped also learns its end-of-turn, which is the first id of the suffix.
    assert batch.label_id.tolist() == [*response, suffix[0]]
    assert batch.label_row.tolist() == [0] * len(batch.label_id)
    assert suffix[0] in chat.end_of_turn_ids
    assert batch.label_position.tolist() == list(range(len(prompt) - 1, len(prompt) + len(response)))
    assert (batch.calibration_total.item(), batch.generation_total.item()) == (5.0, 2.0)
    assert math.isnan(batch.correct.item())
    assert batch.row.tolist() == [100]
    for finish in ("length", None):  # one that did not stop has no end-of-turn label
        batch = SSCCollator(chat, max_length=256)(make_rows([make_row(chat, finish=finish)]))
        assert batch.label_id.tolist() == list(response)


@pytest.mark.parametrize("finish", ["stop", "length", None])
@pytest.mark.parametrize("shared_prefix", [False, True])
def test_an_empty_response_has_a_label_if_it_stopped(chat: ChatFormat, finish: str | None, shared_prefix: bool) -> None:
    rows = make_rows([make_row(chat), make_row(chat, text="", token_ids=(), finish=finish)])
    batch = SSCCollator(chat, max_length=256, shared_prefix=shared_prefix)(replace(rows, question_index=np.zeros(2)))
    assert len(batch.trees) == shared_prefix
    assert (batch.label_row == 1).sum() == (finish == "stop")
    assert len(batch.label_position) == len(batch.label_id) == len(batch.label_row)


@pytest.mark.parametrize("shared_prefix", [False, True])
def test_only_rows_that_generate_are_asked_for_their_tokens(chat: ChatFormat, shared_prefix: bool) -> None:
    """What is not asked is left out where the batch is made: on a GPU, leaving it out would wait for the device."""
    rows = make_rows([make_row(chat), make_row(chat, text="It is 8."), make_row(chat, text="Or 9?")])
    rows = replace(rows, question_index=np.zeros(3))
    some = replace(rows, micro=replace(rows.micro, generation_weight=np.array([1.0, 0.0, 2.0])))
    collator = SSCCollator(chat, max_length=256, shared_prefix=shared_prefix)
    whole, part = collator(rows), collator(some)
    kept = whole.label_row != 1
    for name in ("label_position", "label_id", "label_row"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[kept])
    for name in ("input_ids", "attention_mask", "query_position"):
        assert torch.equal(getattr(part, name), getattr(whole, name))


def test_texts_made_elsewhere_are_encoded_like_stored_ids(chat: ChatFormat) -> None:
    row = make_row(chat)
    elsewhere = StoredRow(row.question, make_row(chat, token_ids=None).sample, "train", None)
    collator = SSCCollator(chat, max_length=256)
    assert collator.encode(elsewhere) == collator.encode(row)


def test_too_long_responses_lose_their_end_and_too_long_prompts_are_named(chat: ChatFormat) -> None:
    row = make_row(chat, text="1+1=2. " * 60)
    suffix = list(chat.query.suffix_ids)
    collator = SSCCollator(chat, max_length=101)
    batch = collator(make_rows([row]))
    ids = batch.input_ids[0].tolist()
    assert len(ids) == 101
    assert ids[-len(suffix) :] == suffix
    assert ids[: len(row.prompt_ids)] == list(row.prompt_ids)
    kept = 101 - len(suffix) - len(row.prompt_ids)
    assert collator.room_for_response(len(row.prompt_ids)) == kept
    assert batch.label_id.tolist() == list(row.sample.token_ids[:kept])
    row = make_row(chat)
    collator = SSCCollator(chat, max_length=len(row.prompt_ids) + len(chat.query.suffix_ids))
    with pytest.raises(ValueError, match="prompt of question 'q'"):
        collator.encode(row)
    with pytest.raises(ValueError, match="`max_length` 8 leaves no room"):
        SSCCollator(chat, max_length=8)


def test_padding_goes_to_the_longest_of_the_batch_which_may_be_empty(chat: ChatFormat) -> None:
    rows = [make_row(chat), make_row(chat, text="The answer is 7.")]
    lengths = [len(row.prompt_ids) + len(row.sample.token_ids) + len(chat.query.suffix_ids) for row in rows]
    for multiple, width in {1: max(lengths), 8: -(-max(lengths) // 8) * 8, 64: -(-max(lengths) // 64) * 64}.items():
        batch = SSCCollator(chat, max_length=512, pad_to_multiple_of=multiple)(make_rows(rows, fillers=1))
        assert batch.input_ids.shape == (2, width)
        assert batch.attention_mask.sum(dim=1).tolist() == lengths
        assert (batch.input_ids[batch.attention_mask == 0] == chat.pad_id).all()
        assert batch.query_position.tolist() == [lengths[0] - 1, width + lengths[1] - 1]
        assert batch.calibration_weight.tolist() == [1.0, 0.0]
        assert batch.row.tolist() == [100, -1]
    narrow = SSCCollator(chat, max_length=max(lengths) + 1, pad_to_multiple_of=64)(make_rows(rows))
    assert narrow.input_ids.shape == (2, max(lengths) + 1)
    batch = SSCCollator(chat, max_length=64)(make_rows([]))
    assert batch.batch_size == 0
    assert batch.input_ids.shape == (0, 8)
    assert batch.task == ()


def test_a_batch_survives_what_lightning_and_workers_do_to_it(chat: ChatFormat) -> None:
    batch = SSCCollator(chat, max_length=256)(make_rows([make_row(chat)]))
    copy = pickle.loads(pickle.dumps(batch))  # noqa: S301
    assert torch.equal(copy.input_ids, batch.input_ids)
    # bf16-true casts every float tensor it finds; targets and totals must keep their digits.
    cast = apply_to_collection(batch, torch.Tensor, lambda tensor: tensor.bfloat16())
    assert cast.target.dtype == torch.float32
    moved = move_data_to_device(batch, torch.device("meta"))
    assert isinstance(moved, SSCBatch)
    assert moved.input_ids.device.type == "meta"
    assert moved.task == batch.task
    with pytest.raises(AttributeError, match="use `replace`"):
        batch.task = ()
    assert batch.replace(task=("other",)).task == ("other",)
