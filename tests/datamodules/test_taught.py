import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.capability_pools import capability_store
from support.module_batches import Row, batch_of
from support.ssc_pools import Pool
from support.training_runs import data_module, module_of, trainer_with

from selfcal_lightning.callbacks.adapter_export import AdapterExport
from selfcal_lightning.capability.estimators import BEFORE_QUERY
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.capability.scoring import check_origins
from selfcal_lightning.commands.capability import run_score_questions
from selfcal_lightning.confidence.fusion import Fusion, fit_fusion
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import QuestionAnnotation
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.ssc.tuples import check_auxiliary
from selfcal_lightning.metrics.capability import agreeing_pairs, top_share
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.models.lora import LoraSettings
from selfcal_lightning.training.losses import calibration_loss, group_ranking_loss
from selfcal_lightning.training.self_calibration import calibration_part
from selfcal_lightning.training.settings import AuxiliarySettings, LossSettings


def teacher_of(store: str, path: Path, features: tuple[str, ...] = ("logit:p_true",)) -> Fusion:
    fusion = fit_fusion(list(SampleStore(store).samples(split="train")), features, target="vote_share")
    fusion.save(path)
    return fusion


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("features", [("logit:p_true",), ("p_true", "num_tokens")])
def test_a_target_is_mixed_with_a_teacher(share: float, features: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    store = pool.write(f"taught {share} {len(features)}", stated=7)
    fusion = teacher_of(store, tmp_path / "fused.json", features)
    settings = {"target": "consistency", "num_samples": 8}
    plain = pool.data(store, **settings).train_dataloader().dataset.table
    taught = pool.data(store, **settings, teacher=str(tmp_path / "fused.json"), teacher_share=share)
    table = taught.train_dataloader().dataset.table
    entries = SampleStore(store).samples(split="train")
    samples = {(sample.question_id, sample.index): sample for entry in entries for sample in entry.samples}
    keys = zip(table.index.question_id, table.index.sample_index.tolist(), strict=True)
    said = np.array([fusion.score_sample(samples[key]) for key in keys])
    assert said.std() > 0.001
    np.testing.assert_allclose(table.target, (1 - share) * plain.target + share * said, atol=1e-9)
    assert table.digest() != plain.digest()
    assert taught.val_dataloader().dataset.table.target == pytest.approx(
        pool.data(store, **settings).val_dataloader().dataset.table.target, nan_ok=True
    ), "what is trained is held against the target itself"


def test_what_the_rows_depend_on_names_the_teacher_by_its_content(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        teacher_of(store_dir, tmp_path / name)
    teachers = [str(tmp_path / name) for name in ("one.json", "two.json")]
    described = [pool.data(store_dir, teacher=one, teacher_share=0.5).training_settings() for one in teachers]
    assert described[0] == described[1]
    assert described[0] != pool.data(store_dir).training_settings()
    assert str(tmp_path) not in str(described)


def test_what_the_teacher_reads_must_be_in_the_store(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    fusion, path = teacher_of(store_dir, tmp_path / "fused.json"), tmp_path / "other.json"
    for name, said in {"self_certainty": "self_certainty", "mean_logprob": "nothing for the teacher to read"}.items():
        replace(fusion, features=(name,)).save(path)
        with pytest.raises(ValueError, match=said):
            pool.data(store_dir, teacher=str(path), teacher_share=0.5).train_dataloader()


# ---- the order of the responses to one question


def test_ranking_by_hand() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, 5.0], requires_grad=True)
    target = torch.tensor([0.9, 0.1, 0.9, 0.5])
    found = group_ranking_loss(scores, target, torch.tensor([4, 4, 4, 7]))
    # 0 against 1 is wrong by 1, 2 against 1 is right by 1; 0 and 2 are tied, and 3 is alone.
    wrong, right = math.log1p(math.e), math.log1p(math.exp(-1.0))
    torch.testing.assert_close(found, torch.tensor([wrong, (wrong + right) / 2, right, 0.0]))
    found.sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert scores.grad[3] == 0.0


def test_the_term_is_part_of_the_calibration_loss(chat: ChatFormat) -> None:
    rows = [Row(3, target=0.2), Row(3, target=0.8), Row(3, target=0.4, calibration_weight=0.0), Row(5, target=0.6)]
    batch = batch_of(rows, chat, totals=(4.0, 0.0))
    confidence = torch.tensor([0.7, 0.6, 0.9, 0.5])
    plain = calibration_part(batch, confidence, LossSettings())
    difference = (torch.logit(torch.tensor(0.7)) - torch.logit(torch.tensor(0.6))).item()
    pair = math.log1p(math.exp(difference))
    wanted = plain + 0.5 * 2 * pair / 4.0  # the row without weight is ordered with nobody
    torch.testing.assert_close(calibration_part(batch, confidence, LossSettings(ranking=0.5)), wanted)
    others = torch.tensor([0.2, 0.8, float("nan"), 0.1])
    replaced = calibration_part(batch, confidence, LossSettings(), targets=others)
    expected = calibration_loss(confidence, others.nan_to_num()) * batch.calibration_weight
    torch.testing.assert_close(replaced, expected.sum() / 4.0)


# ---- P(True) before there is a response: the query behind an empty one

OF_TARGETS: dict[str, Callable[[list[Any]], float | None]] = {
    "agreeing_pairs": lambda samples: agreeing_pairs([one.answer for one in samples]),
    "top_share": lambda samples: top_share([one.answer for one in samples]),
    "expected_accuracy": lambda samples: float(np.mean([bool(one.correct) for one in samples])),
}


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    dataset = data.train_dataloader().dataset
    for row in dataset.store.read_rows(dataset.table.index.locate([0])):
        encoded = collator.encode(row)
        assert encoded.ids == (*row.prompt_ids, *collator.chat.query.suffix_ids)
        assert encoded.response_start == encoded.response_end == len(row.prompt_ids)
    batch = next(iter(data.train_dataloader()))
    assert len(batch.label_id) == 0, "nothing is generated"
    assert batch.generation_weight.sum() == 0
    with pytest.raises(InputError, match="`query` was"):
        pool.data(store_dir, target="consistency", query=BEFORE_QUERY, num_samples=8).train_dataloader()


def test_an_epoch_is_all_questions_and_validation_all_responses(pool: Pool, store_dir: str) -> None:
    table = pool.data(store_dir, target="agreeing_pairs", num_samples=8).val_dataloader().dataset.table
    assert len(table) == 5 * 8
    assert (~np.isnan(table.target)).sum() == 5
    assert not np.isnan(table.correct).any()
    data = pool.data(store_dir, target="agreeing_pairs", num_samples=8, total_tuples=None)
    loader = data.train_dataloader()
    rows = torch.cat([batch.row for batch in loader])
    assert sorted(rows[rows >= 0].tolist()) == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("activated", [True, False])
def test_a_taught_adapter_answers_through_the_verb(activated: bool, answered: Path, tmp_path: Path) -> None:
    store = answered
    module = module_of("bundled", lora=LoraSettings(r=4, activated=activated), query=BEFORE_QUERY, lr=3e-2)
    data = data_module("bundled", store, target="agreeing_pairs", query=BEFORE_QUERY, total_tuples=8)
    adapter = str(tmp_path / "adapter")
    trainer_with(AdapterExport(adapter), max_epochs=2, limit_val_batches=0).fit(module, datamodule=data)
    asked = {"adapter": adapter, "name": "taught", "overwrite": True}
    values = run_score_questions("p_true_before", store_dir=str(store), split="train", **asked)
    record = QuestionAnnotation(store, "taught").record
    assert record.origin["prompt"]["query"] == BEFORE_QUERY, "that of the adapter"
    assert record.origin["taught"] == "agreeing_pairs"
    read = load_capability_pool(str(store), split="train", task=None)
    check_origins(read, ["taught"])  # an estimate of the model that the adapter was put on
    module.eval()
    loader = data_module("bundled", store, target="agreeing_pairs", query=BEFORE_QUERY).train_dataloader()
    batch, index = next(iter(loader)), loader.dataset.table.index
    p_true = module.confidence(batch).p_true.tolist()
    said = {index.question_id[row]: p for row, p in zip(batch.row.tolist(), p_true, strict=True)}
    found = dict(zip([question.id for question in read.questions], values, strict=True))
    assert {name: found[name] for name in said} == pytest.approx(said, abs=1e-4)


def test_an_adapter_that_was_not_taught_is_another_model(answered: Path, tmp_path: Path) -> None:
    store, adapter = answered, str(tmp_path / "adapter")
    data = data_module("bundled", store, target="consistency")
    trainer_with(AdapterExport(adapter), max_steps=1, limit_val_batches=0).fit(module_of("bundled"), datamodule=data)
    with pytest.raises(InputError, match="Expected the model and adapter that gave the responses"):
        run_score_questions("p_true_before", store_dir=str(store), adapter=adapter)


def test_what_does_not_go_together(pool: Pool) -> None:
    with pytest.raises(InputError, match="`generation_ratio` must be 0 with the target 'agreeing_pairs'"):
        pool.data("nowhere", target="agreeing_pairs", generation_ratio=0.3).check_fit()
    for teacher, share, target, said in (
        (None, 0.5, "ssc", r"`teacher_share` 0\.5 needs a `teacher`"),
        ("teacher.json", 0.0, "ssc", "`teacher_share` must be above 0"),
        ("teacher.json", 0.5, "top_share", "takes no `teacher`, but got teacher.json"),
    ):
        with pytest.raises(InputError, match=said):
            pool.data("nowhere", target=target, teacher=teacher, teacher_share=share).recipes()
    auxiliary = {"a": AuxiliarySettings(target="agreeing_pairs")}
    with pytest.raises(InputError, match="all learn from responses or all from questions, but got 'label' and 'agree"):
        check_auxiliary(auxiliary, target="label", num_buckets=None, num_samples=4)
