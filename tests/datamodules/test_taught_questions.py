"""P(True) before there is a response: the ordinary training with the query behind an empty response."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.capability_pools import capability_store
from support.ssc_pools import Pool
from support.training_runs import data_module, module_of, trainer_with

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.capability.estimators import BEFORE_QUERY
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.capability.scoring import check_origins
from selfcal_lightning.commands.capability import run_score_questions
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.ssc.tuples import check_auxiliary, check_teacher
from selfcal_lightning.metrics.capability import agreeing_pairs, top_share
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.settings import AuxiliarySettings

OF_LABELS = "expected_accuracy"
OF_TARGETS: dict[str, Callable[[list[Any]], float | None]] = {
    "agreeing_pairs": lambda samples: agreeing_pairs([one.answer for one in samples]),
    "top_share": lambda samples: top_share([one.answer for one in samples]),
    OF_LABELS: lambda samples: float(np.mean([bool(one.correct) for one in samples])),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up responses to real questions, under the name of the bundled model."""
    return capability_store(tmp_path_factory.mktemp("taught") / "store")


@pytest.mark.parametrize("target", sorted(OF_TARGETS))
def test_a_question_is_one_row_with_what_its_responses_say(pool: Pool, store_dir: str, target: str) -> None:
    data = pool.data(store_dir, target=target, num_samples=8, total_tuples=12)
    table = data.train_dataloader().dataset.table
    samples = {entry.question.id: list(entry.samples) for entry in SampleStore(store_dir).samples(split="train")}
    assert sorted(table.index.question_id.tolist()) == sorted(samples)
    wanted = [OF_TARGETS[target](samples[name]) for name in table.index.question_id]
    np.testing.assert_allclose(table.target, wanted)


def test_the_query_stands_behind_the_prompt(pool: Pool, store_dir: str) -> None:
    """Also where the samples were drawn with another query, since no confidence of theirs is read."""
    data = pool.data(store_dir, target="agreeing_pairs", query=BEFORE_QUERY, num_samples=8, packing="off")
    collator = data.collator()
    stored = {row.question.id: row for row in data.train_dataloader().dataset[0].stored}
    for row in stored.values():
        encoded = collator.encode(row)
        assert encoded.ids == (*row.prompt_ids, *collator.chat.query.suffix_ids)
        assert encoded.response_start == encoded.response_end == len(row.prompt_ids)
    batch = next(iter(data.train_dataloader()))
    assert len(batch.label_id) == 0, "nothing is generated"
    assert batch.generation_weight.sum() == 0
    with pytest.raises(InputError, match="`query` was"):
        pool.data(store_dir, target="consistency", query=BEFORE_QUERY, num_samples=8).train_dataloader()


def test_all_responses_are_validated_with_the_confidence_of_their_question(pool: Pool, store_dir: str) -> None:
    table = pool.data(store_dir, target="agreeing_pairs", num_samples=8).val_dataloader().dataset.table
    assert len(table) == 5 * 8
    assert (~np.isnan(table.target)).sum() == 5
    assert not np.isnan(table.correct).any()


def test_an_epoch_is_all_questions_once(pool: Pool, store_dir: str) -> None:
    data = pool.data(store_dir, target="agreeing_pairs", num_samples=8, total_tuples=None)
    loader = data.train_dataloader()
    rows = torch.cat([batch.row for batch in loader])
    assert sorted(rows[rows >= 0].tolist()) == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("activated", [True, False])
def test_a_taught_adapter_answers_through_the_verb(activated: bool, answered: Path, tmp_path: Path) -> None:
    store = answered
    lora = LoraSettings(r=4, activated=activated)
    module = module_of("bundled", lora=lora, query=BEFORE_QUERY, lr=3e-2)
    data = data_module("bundled", store, target="agreeing_pairs", query=BEFORE_QUERY, total_tuples=8)
    adapter = str(tmp_path / "adapter")
    trainer_with(AdapterExport(adapter), max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
    values = run_score_questions(
        "p_true_before", store_dir=str(store), split="train", adapter=adapter, name="taught", overwrite=True
    )
    record = QuestionAnnotation(store, "taught").record
    assert record is not None
    assert record.origin["prompt"]["query"] == BEFORE_QUERY, "that of the adapter"
    assert record.origin["taught"] == "agreeing_pairs"
    read = load_capability_pool(str(store), split="train", task=None)
    check_origins(read, ["taught"])  # an estimate of the model that the adapter was put on
    module.eval()
    loader = data_module("bundled", store, target="agreeing_pairs", query=BEFORE_QUERY).train_dataloader()
    batch, index = next(iter(loader)), loader.dataset.table.index
    said = {
        index.question_id[row]: p
        for row, p in zip(batch.row.tolist(), module.confidence(batch).p_true.tolist(), strict=True)
    }
    found = dict(zip([question.id for question in read.questions], values, strict=True))
    assert {name: found[name] for name in said} == pytest.approx(said, abs=1e-4)


def test_an_adapter_that_was_not_taught_is_another_model(answered: Path, tmp_path: Path) -> None:
    store, adapter = answered, str(tmp_path / "adapter")
    trainer_with(AdapterExport(adapter), max_steps=1, limit_val_batches=0).fit(
        module_of("bundled"), datamodule=data_module("bundled", store, target="consistency")
    )
    with pytest.raises(InputError, match="Expected the model and adapter that gave the responses"):
        run_score_questions("p_true_before", store_dir=str(store), adapter=adapter)


def test_what_does_not_go_together(pool: Pool) -> None:
    with pytest.raises(InputError, match="`generation_ratio` must be 0 with the target 'agreeing_pairs'"):
        pool.data("nowhere", target="agreeing_pairs", generation_ratio=0.3).check_fit()
    with pytest.raises(InputError, match=r"takes no `teacher`, but got teacher.json"):
        check_teacher("teacher.json", 0.5, target="top_share")
    with pytest.raises(
        InputError, match="all learn from responses or all from questions, but got 'label' and 'agreeing_pairs'"
    ):
        check_auxiliary(
            {"a": AuxiliarySettings(target="agreeing_pairs")}, target="label", num_buckets=None, num_samples=4
        )
