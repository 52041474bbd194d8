"""Values of questions beside the rows: of one origin and one content, added to, sealed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.store.annotations import QuestionAnnotation, question_annotation_names, question_values
from selfcal_lightning.data.store.shards import StoreCorruptError

ORIGIN = {"estimator": "probe", "states": {"levels": [0, 1]}}


def test_values_are_added_and_found_by_question_and_content(tmp_path: Path) -> None:
    annotation = QuestionAnnotation(tmp_path, "probe")
    assert annotation.record is None
    annotation.write({("a", "1"): 0.25, ("b", "1"): None}, origin=ORIGIN)
    annotation.write({("b", "1"): 0.5, ("c", "1"): 0.75}, origin=ORIGIN)
    keys = [("c", "1"), ("a", "1"), ("b", "1"), ("a", "2"), ("d", "1")]
    assert question_values(tmp_path, "probe", keys) == [0.75, 0.25, 0.5, None, None], "another content has none"
    assert question_annotation_names(tmp_path) == ["probe"]


def test_another_origin_is_refused_or_replaces_all(tmp_path: Path) -> None:
    annotation = QuestionAnnotation(tmp_path, "probe")
    annotation.write({("a", "1"): 0.25}, origin=ORIGIN)
    other = {**ORIGIN, "states": {"levels": [2]}}
    with pytest.raises(InputError, match=r"states.levels: \[0, 1\] in the store, \[2\] now"):
        annotation.write({("b", "1"): 0.5}, origin=other)
    annotation.write({("b", "1"): 0.5}, origin=other, overwrite=True)
    assert question_values(tmp_path, "probe", [("a", "1"), ("b", "1")]) == [None, 0.5]


def test_bad_names_and_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`name` to be letters"):
        QuestionAnnotation(tmp_path, "../probe")
    with pytest.raises(InputError, match="finite or None, but got another for 'a'"):
        QuestionAnnotation(tmp_path, "probe").write({("a", "1"): float("nan")}, origin=ORIGIN)
    with pytest.raises(InputError, match=r"Expected 'probe' to be a value of the questions .* but got none at all"):
        question_values(tmp_path, "probe", [])


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    QuestionAnnotation(tmp_path, "probe").write({("a", "1"): 0.25}, origin=ORIGIN)
    (file,) = tmp_path.rglob("question_values.json")
    content = json.loads(file.read_text())
    content["values"][0][2] = 0.75
    file.write_text(json.dumps(content))
    with pytest.raises(StoreCorruptError, match="run `selfcal score-questions` again"):
        question_values(tmp_path, "probe", [("a", "1")])
