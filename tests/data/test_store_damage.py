import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.fakes import fake_questions
from support.kill_worker import die_at
from support.processes import files_of_at_most
from support.store_samples import FINGERPRINT, MODEL, annotate, leftovers, make_group, make_store, shards, write

from selfcal_lightning.data.store.annotations import Annotation
from selfcal_lightning.data.store.manifest import write_record
from selfcal_lightning.data.store.parts import part_entries, read_part
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.data.store.shards import StoreCorruptError


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "found"),
    [(lambda path: os.truncate(path, 200), "bytes long, but got"), (_flip, "sha256"), (Path.unlink, "no such file")],
)
def test_damage_is_named_and_repaired(tmp_path: Path, damage: object, found: str) -> None:
    store, questions = make_store(tmp_path), fake_questions(6)
    write(store, questions)
    store.join()
    bad = shards(store)[0]
    damage(bad)  # type: ignore[operator]
    with pytest.raises(StoreCorruptError, match=found) as caught:
        SampleStore(tmp_path).index()
    assert str(bad) in str(caught.value)
    assert "--repair true" in str(caught.value)
    report = SampleStore(tmp_path).repair()
    assert report.moved == (f"parts/a/{bad.name}",)
    assert report.questions == 3
    assert str(report).startswith("1 damaged file with 3 questions moved aside, 0 duplicates settled")
    assert not bad.exists()
    assert (tmp_path / "aside" / f"a-{bad.name}").exists() == (damage is not Path.unlink)
    kept = SampleStore(tmp_path).question_ids(include_parts=True)
    assert kept == {q.id for q in questions[3:]}
    write(store, [q for q in questions if q.id not in kept])
    store.join()
    assert len(SampleStore(tmp_path).index()) == 24
    assert bad.name not in {path.name for path in shards(store)}, "the name of a lost shard is not used again"


def test_damaged_manifests(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, fake_questions(3))
    whole = shards(store)[0].read_bytes()
    _flip(shards(store)[0])
    with pytest.raises(StoreCorruptError, match="sha256"):
        store.join()
    shards(store)[0].write_bytes(whole)
    store.join()
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreCorruptError, match=r"manifest.json to be a JSON file"):
        store.index()
    write(store, fake_questions(1, prefix="more"), part="b")
    store.join()
    assert len(store.index()) == 16
    (tmp_path / "parts" / "a" / "part.json").write_text("")
    with pytest.raises(StoreCorruptError, match=r"part.json to be a JSON file.*--repair true"):
        store.join()
    assert SampleStore(tmp_path).repair().moved == ("parts/a",)
    assert len(list((tmp_path / "aside").rglob("*.parquet"))) == 1
    assert len(SampleStore(tmp_path).index()) == 4


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    store, questions = make_store(tmp_path), fake_questions(4)
    write(store, questions[:1])
    with store.writer("a") as writer:
        for question in questions[1:3]:
            writer.append(make_group(question))
        with monkeypatch.context() as patch:
            patch.setattr(os, step, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
            with pytest.raises(OSError, match=r"bytes of space to write .*shard-000001"):
                writer.commit()
        assert not leftovers(store)
        assert store.question_ids(include_parts=True) == {questions[0].id}
        writer.append(make_group(questions[3]))
    store.join()
    assert store.question_ids() == {q.id for q in questions}, "what was buffered is kept for the next commit"


def test_a_real_write_error_leaves_no_file(tmp_path: Path) -> None:
    """A limit on the size of files makes the kernel itself refuse, half-way through the file."""
    store = make_store(tmp_path)
    with store.writer("a") as writer:
        writer.append(make_group(fake_questions(1)[0]))
        with files_of_at_most(1000), pytest.raises(OSError, match="File too large"):
            writer.commit()
        assert not leftovers(store)
        assert not shards(store)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupt_keeps_whole_questions_and_an_error_does_not(tmp_path: Path, error: type[BaseException]) -> None:
    store = make_store(tmp_path)
    with pytest.raises(error), store.writer("a") as writer:  # noqa: PT012
        writer.append(make_group(fake_questions(1)[0]))
        raise error
    assert len(store.question_ids(include_parts=True)) == (1 if error is KeyboardInterrupt else 0)


def test_files_of_a_killed_writer_are_ignored_then_removed(tmp_path: Path) -> None:
    store, questions = make_store(tmp_path), fake_questions(4)
    write(store, questions[:3], part="rank-1-of-1")
    write(store, questions[3:], part="rank-1-of-10")
    folder = tmp_path / "parts" / "rank-1-of-1"
    orphan = folder / "round-000-shard-000001.parquet"
    shutil.copy(shards(store, "rank-1-of-1")[0], orphan)
    (folder / ".round-000-shard-000002.parquet.1-ab.tmp").write_bytes(b"half")
    store.join()
    assert len(store.index()) == 16
    with store.writer("rank-1-of-1"):
        assert not orphan.exists()
    assert len(shards(store, "rank-1-of-10")) == 1
    assert not leftovers(store)


def killed_while_it_writes(work: Callable[[], object], *, file: int = 1) -> None:
    """Let a child do ``work`` and die before its file number ``file`` is flushed; each takes three calls."""
    child = os.fork()
    if not child:
        die_at(3 * file - 2)
        work()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def test_a_resumed_run_clears_what_kills_left_in_all_folders(tmp_path: Path) -> None:
    questions = fake_questions(6)
    killed_while_it_writes(lambda: make_store(tmp_path))
    (left,) = (tmp_path / "rounds").iterdir()
    store = make_store(tmp_path)
    assert not left.exists()
    write(store, questions[:3])
    killed_while_it_writes(store.join)
    killed_while_it_writes(lambda: write(store, questions[3:], part="rank-3-of-4"), file=2)
    assert {file.parent.name for file in leftovers(store)} == {"rank-3-of-4", tmp_path.name}
    make_store(tmp_path)
    assert not leftovers(store)
    write(store, questions[3:], part="b")
    store.join()
    assert len(SampleStore(tmp_path).index()) == 24


def test_a_part_has_one_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = make_store(tmp_path)
    with store.writer("a"):
        second = store.writer("a")
        second._lock.wait_seconds = 0.2
        with pytest.raises(RuntimeError, match=rf"Expected .*/a to have one writer.* while process {os.getpid()} on "):
            second.__enter__()
        (waiting,) = [record.getMessage() for record in caplog.records]  # said once, not at every look
        assert f"process {os.getpid()} on " in waiting
        with pytest.raises(RuntimeError, match="to have one writer"):
            store.repair()
        with store.writer("b"):
            pass
    with store.writer("a"):
        pass
    for part in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="Expected `part`"):
            store.writer(part)


@pytest.mark.parametrize("file", ["../../../outside.parquet", "/outside.parquet", "..", "sub/outside.parquet"])
def test_a_record_that_names_files_outside_the_store_moves_and_reads_none(tmp_path: Path, file: str) -> None:
    store = make_store(tmp_path / "store")
    write(store, fake_questions(3))
    outside = tmp_path / "outside.parquet"
    outside.write_bytes(shards(store)[0].read_bytes())
    named = str(outside) if file.startswith("/") else file
    part = read_part(store.path / "parts" / "a")
    write_record(
        store.path / "parts" / "a" / "part.json",
        {**part.as_json(), "shards": [{**shard.as_json(), "file": named, "bytes": 1} for shard in part.shards]},
    )
    for look in (store.join, lambda: store.question_ids(include_parts=True)):
        with pytest.raises(StoreCorruptError, match="expected `file` to be a"):
            look()
    assert SampleStore(tmp_path / "store").repair().moved == ("parts/a",), "the part goes aside as a whole"
    assert outside.exists()


def test_samples_under_a_round_that_was_created_again_are_refused(tmp_path: Path) -> None:
    questions = fake_questions(3)
    for round in (0, 1):
        write(make_store(tmp_path, round=round), questions, round=round)
    SampleStore(tmp_path).join()
    (tmp_path / "rounds" / "round-001.json").unlink()
    other = replace(FINGERPRINT, model=replace(MODEL, adapter_sha256="new"))
    store = SampleStore.create_or_open(tmp_path, other, num_samples=4, engine={}, round=1)
    for count in (lambda: store.stored_questions(round=1, include_parts=True), store.join):
        with pytest.raises(StoreCorruptError, match=r"another model, prompt or sampling.*drop-rounds .* --first 1"):
            count()
    assert len(store.stored_questions(round=0)) == 3


def test_later_rounds_are_dropped(tmp_path: Path) -> None:
    questions = fake_questions(5)
    for round in (0, 1, 2):
        for part, share in (("a", questions[:3]), ("b", questions[3:])):
            write(make_store(tmp_path, round=round), share, part=part, round=round)
    store = SampleStore(tmp_path)
    store.join()
    before = [sample for group in store.samples(round=1) for sample in group.samples]
    assert store.drop_rounds(2) == 2
    assert list(SampleStore(tmp_path).manifest.rounds) == [0, 1]
    assert [sample for group in SampleStore(tmp_path).samples(round=1) for sample in group.samples] == before
    assert store.drop_rounds(1) == 2
    assert store.drop_rounds(1) == 0
    assert len(list(tmp_path.glob("parts/*/*.parquet"))) == 2
    write(make_store(tmp_path, round=1), questions[:3], round=1)
    assert len(SampleStore(tmp_path).stored_questions(round=1, include_parts=True)) == 3
    with store.writer("a", round=1), pytest.raises(RuntimeError, match="one writer"):
        store.drop_rounds(1)
    with pytest.raises(ValueError, match="`first` must be at least 1"):
        store.drop_rounds(0)


# ---- its JSON files: damaged ones, and those of other formats


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    store = make_store(tmp_path / "store")
    write(store, fake_questions(3))
    store.join()
    annotate(store.path, "sure", 0.0, model="x")
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


def test_a_damaged_round_without_a_copy_is_created_again(store: SampleStore) -> None:
    (store.path / "rounds" / "round-000.json").write_text("{")
    (store.path / "manifest.json").write_text("{")
    assert store.repair().moved == ("rounds/round-000.json",)
    again = make_store(store.path)
    again.join()
    assert len(again.index()) == 12
