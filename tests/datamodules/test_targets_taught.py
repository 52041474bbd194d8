"""Targets that are mixed with a teacher, and the order of the responses to one question."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.module_batches import Row, batch_of
from support.ssc_pools import Pool

from selfcal_lightning.confidence.fusion import Fusion, fit_fusion
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.datamodules.ssc.tuples import read_recipe
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer
from selfcal_lightning.training.losses import calibration_loss, group_ranking_loss
from selfcal_lightning.training.self_calibration import calibration_part
from selfcal_lightning.training.settings import LossSettings


def teacher_of(store: str, path: Path, features: tuple[str, ...] = ("logit:p_true",)) -> Fusion:
    fusion = fit_fusion(list(SampleStore(store).samples(split="train")), features, target="vote_share")
    fusion.save(path)
    return fusion


@pytest.mark.parametrize("share", [0.25, 1.0])
@pytest.mark.parametrize("features", [("logit:p_true",), ("p_true", "num_tokens")])
def test_the_target_is_mixed_with_the_teacher(
    share: float, features: tuple[str, ...], pool: Pool, tmp_path: Path
) -> None:
    store = pool.write(f"taught {share} {len(features)}", stated=7)
    fusion = teacher_of(store, tmp_path / "fused.json", features)
    settings = {"target": "consistency", "num_samples": 8}
    plain = pool.data(store, **settings).train_dataloader().dataset.table
    taught = pool.data(store, **settings, teacher=str(tmp_path / "fused.json"), teacher_share=share)
    table = taught.train_dataloader().dataset.table
    samples = {
        (entry.question.id, sample.index): sample
        for entry in SampleStore(store).samples(split="train")
        for sample in entry.samples
    }
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
    described = [
        pool.data(store_dir, teacher=str(tmp_path / name), teacher_share=0.5).training_settings()
        for name in ("one.json", "two.json")
    ]
    assert described[0] == described[1]
    assert described[0] != pool.data(store_dir).training_settings()
    assert str(tmp_path) not in str(described)


@pytest.mark.parametrize(
    ("teacher", "share", "message"),
    [
        (None, 0.5, r"`teacher_share` 0\.5 needs a `teacher`"),
        ("fused.json", 0.0, "`teacher_share` must be above 0"),
        ("fused.json", 1.5, r"`teacher_share` must lie in \[0, 1\], but got 1\.5"),
        ("absent.json", 0.5, "absent.json"),
    ],
)
def test_wrong_teachers(teacher: str | None, share: float, message: str, tmp_path: Path, store_dir: str) -> None:
    teacher_of(store_dir, tmp_path / "fused.json")
    with pytest.raises((ValueError, OSError), match=message):
        read_recipe("ssc", None if teacher is None else str(tmp_path / teacher), share)


def test_what_the_teacher_reads_must_be_in_the_store(pool: Pool, store_dir: str, tmp_path: Path) -> None:
    fusion = teacher_of(store_dir, tmp_path / "fused.json")
    replace(fusion, features=("self_certainty",)).save(tmp_path / "other.json")
    data = pool.data(store_dir, teacher=str(tmp_path / "other.json"), teacher_share=0.5)
    with pytest.raises(ValueError, match="self_certainty"):
        data.train_dataloader()
    replace(fusion, features=("mean_logprob",)).save(tmp_path / "third.json")
    data = pool.data(store_dir, teacher=str(tmp_path / "third.json"), teacher_share=0.5)
    with pytest.raises(ValueError, match="nothing for the teacher to read"):
        data.train_dataloader()


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
    with pytest.raises(ValueError, match="`group` must have one shape"):
        group_ranking_loss(scores, target, torch.tensor([1]))


def test_the_term_is_part_of_the_calibration_loss(tiny_model: str) -> None:
    chat = ChatFormat(load_tokenizer(tiny_model))
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
