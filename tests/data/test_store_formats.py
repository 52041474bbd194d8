"""The JSON files of a store: damaged ones and those of other formats are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.fakes import fake_questions
from support.store_samples import FINGERPRINT, MODEL, make_store, write

from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.parts import part_entries
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    store = make_store(tmp_path / "store")
    write(store, fake_questions(3))
    store.join()
    annotation, index = Annotation(store.path, "sure"), store.index()
    annotation.write_part("run", "part", index, np.zeros(len(index)), store.manifest.shards)
    annotation.publish("run", ["part"], origin={"model": "x"}, details={"split": "train"})
    return store


READERS: dict[str, Callable[[SampleStore], object]] = {
    "rounds/round-000.json": lambda store: store.round_manifest(),
    "parts/a/part.json": lambda store: part_entries(store.path),
    "manifest.json": lambda store: store.manifest,
    "annotations/sure/annotation.json": lambda store: Annotation(store.path, "sure").record,
}


@pytest.mark.parametrize("name", READERS)
def test_no_changed_file_is_read_as_something_else(store: SampleStore, name: str) -> None:
    """One bit after the other: refused, or nothing but layout."""
    read, file = READERS[name], store.path / name
    whole, wanted, refused = file.read_bytes(), read(store), 0
    for place in range(0, len(whole), 2):
        changed = bytearray(whole)
        changed[place] ^= 1 << (place // 2 % 7)
        file.write_bytes(changed)
        try:
            found = read(store)
        except StoreCorruptError:
            refused += 1
        else:
            assert found == wanted, (place, whole[place : place + 20])
    assert refused > len(whole) / 4


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff\xfe", b'{"format": 2}', b"[" * 100_000, b"9" * 5000])
def test_what_is_no_record_is_named(store: SampleStore, name: str, content: bytes) -> None:
    file = store.path / name
    file.write_bytes(content)
    with pytest.raises(StoreCorruptError) as caught:
        READERS[name](store)
    assert str(file) in str(caught.value)
    assert "estore it from a copy" in str(caught.value)


@pytest.mark.parametrize("name", READERS)
def test_a_later_format_is_no_damage(store: SampleStore, name: str) -> None:
    file = store.path / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 3, "more": True}))
    content = file.read_bytes()
    with pytest.raises(StoreCorruptError, match="to have format 2 at most, but got 3: a later version"):
        READERS[name](store)
    if not name.startswith("annotations"):
        with pytest.raises(StoreCorruptError, match="a later version"):
            store.repair()
    assert file.read_bytes() == content


def test_a_damaged_round_is_put_back_from_the_joined_manifest(store: SampleStore) -> None:
    file = store.path / "rounds" / "round-000.json"
    wanted = store.round_manifest()
    file.write_text(file.read_text().replace('"num_samples": 4', '"num_samples": 2'))
    with pytest.raises(StoreCorruptError, match=r"to hold what was written.*--repair true"):
        make_store(store.path)
    assert store.repair().moved == ("rounds/round-000.json",)
    assert store.round_manifest() == wanted
    assert len(list((store.path / "aside").iterdir())) == 1
    assert len(make_store(store.path).index()) == 12


def test_a_damaged_round_without_a_copy_is_created_again_and_checked_against_its_shards(store: SampleStore) -> None:
    (store.path / "rounds" / "round-000.json").write_text("{")
    (store.path / "manifest.json").write_text("{")
    assert store.repair().moved == ("rounds/round-000.json",)
    again = make_store(store.path)
    again.join()
    assert len(again.index()) == 12
    (store.path / "rounds" / "round-000.json").unlink()
    other = replace(FINGERPRINT, model=replace(MODEL, adapter_sha256="new"))
    again = SampleStore.create_or_open(store.path, other, num_samples=4, engine={})
    with pytest.raises(StoreCorruptError, match="another model, prompt or sampling"):
        again.stored_questions(include_parts=True)


def test_more_is_written_after_a_manifest_was_damaged(store: SampleStore) -> None:
    (store.path / "manifest.json").write_bytes((store.path / "manifest.json").read_bytes()[:-9])
    write(store, fake_questions(1, prefix="more"), part="b")
    store.join()
    assert len(store.question_ids()) == 4
