import json
import os
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
from support.fakes import fake_questions
from support.store_samples import make_store, write

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store import annotations, manifest
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import SampleIndex, StoreCorruptError

ORIGIN = {"model": {"sha256": "a"}, "targets": ("q", "v")}


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    """Three training and two validation questions with four samples each, in two parts."""
    store, questions = make_store(tmp_path / "store"), fake_questions(5)
    write(store, questions[:3], part="a")
    write(store, questions[3:], part="b", split="validation")
    store.join()
    return store


def annotate(
    store: SampleStore, index: SampleIndex, values: Any, *, run: str = "run", parts: int = 1, **settings: Any
) -> annotations.Annotation:
    annotation = annotations.Annotation(store.path, "later")
    names = [f"rank-{rank}-of-{parts}" for rank in range(parts)]
    for rank, name in enumerate(names):
        mine = np.arange(len(index)) % parts == rank
        annotation.write_part(run, name, index.select(mine), np.asarray(values)[mine], store.manifest.shards)
    annotation.publish(run, names, **{"origin": ORIGIN, "details": {"by": run}, **settings})
    return annotation


def read(store: SampleStore, **where: Any) -> list[float]:
    return SampleStore(store.path).index(confidences=["later"], **where).confidences["later"].tolist()


@pytest.mark.parametrize("parts", [1, 3])
def test_values_come_back_at_their_rows(store: SampleStore, parts: int) -> None:
    index = store.index()
    values = np.arange(20) / 20
    annotation = annotate(store, index, values, parts=parts)
    assert read(store) == values.tolist()
    assert read(store, split="validation") == values[index.split == "validation"].tolist()
    assert annotation.record.rows == 20
    assert [part.details["by"] for part in annotation.record.parts] == ["run"] * parts
    assert annotations.annotation_names(store.path) == ["later"]
    samples = [s for group in store.samples(confidences=["later"]) for s in group.samples]
    assert [sample.confidences["later"] for sample in samples] == values.tolist()
    assert samples[2].confidences["length"] == 2 / 8
    assert "later" not in next(store.samples()).samples[0].confidences
    few = SampleStore(store.path, num_samples=2).index(confidences=["later"])
    assert few.confidences["later"].tolist() == values[index.sample_index < 2].tolist()


def test_rows_without_a_value_are_counted(store: SampleStore, caplog: pytest.LogCaptureFixture) -> None:
    index = store.index(split="validation")
    annotate(store, index, [0.5, np.nan, *[0.25] * 6])
    found = store.index(confidences=["later"])
    assert found.num_missing("later") == 13
    assert "13 of 20 responses" in caplog.text
    confidences = [s.confidences for group in store.samples(split="validation", confidences=["later"])
                   for s in group.samples]  # fmt: skip
    assert [c.get("later") for c in confidences[:3]] == [0.5, None, 0.25]


def test_a_later_run_of_the_same_origin_adds_and_comes_first(store: SampleStore) -> None:
    train, validation = store.index(split="train"), store.index(split="validation")
    annotate(store, train, np.full(12, 0.1), run="one")
    annotate(store, validation, np.full(8, 0.2), run="two")
    assert sorted(read(store)) == [0.1] * 12 + [0.2] * 8
    first = train.select(train.sample_index == 0)
    annotation = annotate(store, first, np.full(3, 0.9), run="three")
    assert sorted(read(store)) == [0.1] * 9 + [0.2] * 8 + [0.9] * 3
    assert annotation.record.rows == 20
    # Parts that a later run covers are gone, from the record and from the disk.
    annotate(store, train, np.full(12, 0.3), run="four")
    assert sorted(read(store)) == [0.2] * 8 + [0.3] * 12
    left = [part.file for part in annotation.record.parts]
    assert left == ["two-rank-0-of-1.parquet", "four-rank-0-of-1.parquet"]
    assert sorted(left) == sorted(file.name for file in annotation.folder.glob("*.parquet"))


def test_another_origin_is_refused_or_takes_the_place_of_all(store: SampleStore) -> None:
    annotate(store, store.index(), np.full(20, 0.1))
    other = {**ORIGIN, "model": {"sha256": "b"}}
    message = r"model\.sha256: 'a' in the store, 'b' now\. Set `overwrite`"
    with pytest.raises(ValueError, match=message):
        annotations.Annotation(store.path, "later").check_origin(other)
    with pytest.raises(ValueError, match=message):
        annotate(store, store.index(), np.full(20, 0.7), run="other", origin=other)
    assert read(store) == [0.1] * 20
    validation = store.index(split="validation")
    annotate(store, validation, np.full(8, 0.7), run="other", origin=other, overwrite=True)
    assert read(store, split="validation") == [0.7] * 8
    assert np.isnan(read(store, split="train")).all()


def test_nothing_shows_before_it_is_published(store: SampleStore) -> None:
    index, annotation = store.index(), annotations.Annotation(store.path, "later")
    annotation.write_part("run", "rank-0-of-2", index, np.full(20, 0.1), store.manifest.shards)
    with pytest.raises(ValueError, match=r"got 'later'; it has \[\]"):
        store.index(confidences=["later"])
    with pytest.raises(RuntimeError, match=r"got none of \['run-rank-1-of-2.parquet'\]"):
        annotation.publish("run", ["rank-0-of-2", "rank-1-of-2"], origin=ORIGIN, details={})
    assert annotation.record is None


def test_rows_that_were_sampled_again_lose_their_values(store: SampleStore) -> None:
    index = store.index()
    annotate(store, index, np.full(20, 0.1))
    shard = store.path / "parts" / "a" / "round-000-shard-000000.parquet"
    shard.write_bytes(shard.read_bytes()[:-9])
    store = SampleStore(store.path)
    store.repair()
    write(store, fake_questions(5)[:3], part="a", mark="again ")
    store.join()
    assert np.isnan(read(store, split="train")).all()
    assert read(store, split="validation") == [0.1] * 8


def test_damage_and_mistakes_are_named(store: SampleStore) -> None:
    index = store.index()
    annotation = annotate(store, index, np.full(20, 0.1))
    (file,) = annotation.folder.glob("*.parquet")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(StoreCorruptError, match="the `selfcal score` or `selfcal predict` that wrote it again"):
        read(store)
    file.unlink()
    with pytest.raises(StoreCorruptError, match="no such file"):
        read(store)
    os.mkfifo(file)  # reading one would never end
    with pytest.raises(StoreCorruptError, match="not a regular file"):
        read(store)
    for name in ("../escape", "", "a/b"):
        with pytest.raises(ValueError, match="Expected `name` to be letters"):
            annotations.Annotation(store.path, name)
    own = annotations.Annotation(store.path, "length")
    own.write_part("run", "part", index, np.full(20, 0.1), store.manifest.shards)
    own.publish("run", ["part"], origin=ORIGIN, details={})
    with pytest.raises(ValueError, match="'length' to be an annotation only"):
        store.index(confidences=["length"])


PROBE = {"estimator": "probe", "states": {"levels": [0, 1]}}


def test_values_of_questions_are_added_found_and_of_one_origin(tmp_path: Path) -> None:
    annotation = annotations.QuestionAnnotation(tmp_path, "probe")
    assert annotation.record is None
    annotation.write({("a", "1"): 0.25, ("b", "1"): None}, origin=PROBE)
    annotation.write({("b", "1"): 0.5, ("c", "1"): 0.75}, origin=PROBE)
    keys = [("c", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("d", "1")]
    assert annotations.question_values(tmp_path, "probe", keys) == [0.75, 0.25, 0.5, None, None], (
        "another content has none"
    )
    assert annotations.question_annotation_names(tmp_path) == ["probe"]
    other = {**PROBE, "states": {"levels": [2]}}
    with pytest.raises(InputError, match=r"states.levels: \[0, 1\] in the store, \[2\] now"):
        annotation.write({("b", "1"): 0.5}, origin=other)
    annotation.write({("b", "1"): 0.5}, origin=other, overwrite=True)
    assert annotations.question_values(tmp_path, "probe", [("a", "1"), ("b", "1")]) == [None, 0.5]
    (file,) = tmp_path.rglob("question_values.json")
    content = json.loads(file.read_text())
    content["values"][0][2] = 0.75
    file.write_text(json.dumps(content))
    with pytest.raises(StoreCorruptError, match="run `selfcal score-questions` again"):
        annotations.question_values(tmp_path, "probe", [("b", "1")])
    with pytest.raises(InputError, match=r"Expected 'other' to be a value of the questions .* but got \['probe'\]"):
        annotations.question_values(tmp_path, "other", [])
    with pytest.raises(InputError, match="`name` to be letters"):
        annotations.QuestionAnnotation(tmp_path, "../probe")


def test_writers_at_one_time_keep_each_others_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(name: str) -> None:
        annotations.QuestionAnnotation(tmp_path, "probe").write({(name, "1"): 0.5}, origin=PROBE)

    second, write_record = Thread(target=add, args=("b",)), manifest.write_record

    def write_late(path: Path, content: dict[str, Any]) -> None:
        if second.ident is None:  # the first writer has read what is there, and not yet written
            second.start()
            second.join(0.5)
        write_record(path, content)

    monkeypatch.setattr(manifest, "write_record", write_late)
    add("a")
    second.join()
    assert annotations.question_values(tmp_path, "probe", [("a", "1"), ("b", "1")]) == [0.5, 0.5]
