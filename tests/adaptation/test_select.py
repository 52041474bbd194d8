import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.store_samples import NUM_QUESTIONS, NUM_SAMPLES, annotate, select, sums_entry, sums_store
from support.strategy_pools import random_pool, with_samples

from selfcal_lightning.adaptation.picking import SelectionSettings, fit_votes, label_of, select_rows
from selfcal_lightning.adaptation.selection_files import examples, read_selection
from selfcal_lightning.cli import run
from selfcal_lightning.confidence.base import confidence_of
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.records import QuestionSamples


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sums_store(tmp_path_factory.mktemp("selection") / "store").path


def _rows(entries: list[QuestionSamples], **options: Any) -> Any:
    return select_rows(entries, SelectionSettings(**{"pick": "mean_logprob", **options})).rows


def test_the_best_readable_response_is_picked_and_its_votes_keep_it() -> None:
    entries = [sums_entry(number, right=right) for number, right in enumerate((3, 1, 4))]
    rows = _rows(entries, threshold=0.75)
    assert [row.index for row in rows] == [2, 0, 3], "the likeliest"
    assert [row.keep_score for row in rows] == [0.75, 0.25, 1.0], "unreadable responses are votes for nothing"
    assert [(row.kept, row.reason) for row in rows] == [(True, None), (False, "beyond the threshold"), (True, None)]
    assert [row.num_unreadable for row in rows] == [1, 1, 0]
    assert [row.label.text for row in rows] == ["7", "8", "9"]
    assert rows[0].label.share == 0.75
    assert rows[0].label.margin == 0.75


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, ["q000", "q001", "q002", "q003"]),
        ({"count": 2}, ["q002", "q003"]),
        ({"top": 0.5}, ["q002", "q003"]),
        ({"top": 0.51}, ["q001", "q002", "q003"]),
        ({"count": 1, "order": "hardest"}, ["q000"]),
        ({"threshold": 0.5, "order": "hardest"}, ["q000", "q001"]),
        ({"count": 1, "order": "informative"}, ["q001"]),
        ({"threshold": 0.75, "order": "informative"}, ["q000", "q001", "q002"]),
        ({"threshold": 0.9, "keep": "ssc"}, ["q002", "q003"]),
    ],
)
def test_questions_are_kept_by_threshold_share_or_count_in_any_order(options: dict[str, Any], kept: list[str]) -> None:
    entries = [sums_entry(number, right=number + 1) for number in range(4)]
    assert [row.question_id for row in _rows(entries, **options) if row.kept] == kept


def test_ties_at_the_edge_go_to_the_surer_pick() -> None:
    entries = [sums_entry(number, right=4) for number in range(3)]
    entries[1] = replace(entries[1], samples=tuple(replace(s, logprob=-0.001) for s in entries[1].samples))
    assert [row.kept for row in _rows(entries, count=1)] == [False, True, False]
    entries = [sums_entry(number, right=right, num_samples=10) for number, right in enumerate((3, 7))]
    rows = _rows(entries, threshold=0.7, order="informative")
    assert [(row.keep_score, row.kept) for row in rows] == [(0.3, True), (0.7, True)]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 9_999), st.sampled_from(["share", "ssc", "pick"]), st.sampled_from(["majority", "ssc", "picked"]))
def test_nothing_is_dropped_uncounted(seed: int, keep: str, label: str) -> None:
    entries = random_pool(seed)
    rows = _rows(entries, keep=keep, label=label)
    assert [row.question_id for row in rows] == [entry.question.id for entry in entries]
    for row, entry in zip(rows, entries, strict=True):
        assert row.kept == (row.reason is None)
        assert row.num_samples == len(entry.samples)
        answers = [sample.answer for sample in entry.samples]
        assert row.num_unreadable == answers.count(None)
        assert (row.reason == "no response can be read") == all(answer is None for answer in answers)
        if row.kept and keep == "share":
            assert row.keep_score == answers.count(row.answer) / len(answers)
        if row.index is not None:
            chosen = entry.samples[row.index]
            assert chosen.answer == row.answer is not None
            best = max(confidence_of(s, "mean_logprob") for s in entry.samples if s.answer is not None)
            assert confidence_of(chosen, "mean_logprob") == best


def without_scores(number: int) -> QuestionSamples:
    entry = sums_entry(number)
    return replace(entry, samples=tuple(replace(s, logprob=None, yes_mass=None) for s in entry.samples))


def test_a_question_without_the_score_is_counted_and_does_not_stop_the_others() -> None:
    entries = [without_scores(0), *(sums_entry(number, right=number) for number in (1, 2, 4))]
    for pick in ("mean_logprob", "fused"):
        rows = _rows(entries, pick=pick)
        assert [row.reason for row in rows] == ["no readable response has the score that picks", None, None, None]


def test_labels() -> None:
    entry = sums_entry(0, right=1, num_samples=4)  # answers 7, 9, 10 and none; P(True) .8, .3, .3 and .3
    assert label_of(entry, "majority", picked="10").text == "7", "the first seen"
    assert label_of(entry, "picked", picked="10").text == "10"
    by_confidence = label_of(entry, "ssc", picked=None)
    assert by_confidence.text == "7"
    assert by_confidence.confidence == pytest.approx(0.8 / 1.4)
    gold = label_of(entry, "reference", picked="10")
    assert (gold.text, gold.share) == ("7", 0.25)
    rewritten = replace(entry, question=replace(entry.question, reference="7.0"))
    assert replace(label_of(rewritten, "reference", picked=None), text="7") == gold
    assert gold.confidence == by_confidence.confidence
    assert label_of(entry, "none", picked="10").text is None


def test_the_fusion_is_fitted_to_votes_and_never_sees_a_label() -> None:
    """Wrong labels, and none, give the same selection."""
    entries = [sums_entry(number, right=number % 5) for number in range(20)]
    swapped = with_samples(entries, lambda sample: replace(sample, correct=not sample.correct))
    lies = [replace(entry, question=replace(entry.question, reference="no")) for entry in swapped]
    options = SelectionSettings(scores=("p_true",))
    found, other = select_rows(entries, options), select_rows(lies, options)
    assert found == other
    assert found.fusion.features == ("mean_logprob", "logit:p_true"), "those of the default that are there"
    assert found.fusion.target == "vote_share"
    assert found.fusion.scores[0].auroc is None, "no figure that needs labels"
    assert all(row.pick_score is None or 0.0 <= row.pick_score <= 1.0 for row in found.rows)


def test_what_is_on_disk_is_what_was_chosen_and_says_what_was_read(store: Path, tmp_path: Path) -> None:
    made = select(store, tmp_path / "chosen", keep_top=0.25, scores=["p_true"])
    read = read_selection(tmp_path / "chosen")
    assert read == made
    assert len(read.rows) == NUM_QUESTIONS
    assert [row.question_id for row in read.kept] == ["q003", "q004", "q009"]
    assert read.rows[4].scores == {"mean_logprob": pytest.approx(-0.07), "p_true": 0.8}
    manifest = read.manifest
    assert manifest["reads_reference"] is False
    assert manifest["store"]["fingerprint"] == SampleStore(store).round_manifest().digest
    assert manifest["counts"]["questions"] == sum(manifest["counts"]["dropped"].values()) + manifest["counts"]["kept"]
    assert manifest["counts"]["responses"] == NUM_QUESTIONS * NUM_SAMPLES
    assert manifest["threshold"]["value"] == 0.75
    assert len(manifest["threshold"]["chosen_on"]["questions_sha256"]) == 64
    again = select(store, tmp_path / "again", keep_top=0.25, scores=["p_true"])
    assert again.sha256 == made.sha256


def test_examples_are_the_chosen_responses_without_gold_answers(store: Path, tmp_path: Path) -> None:
    found = list(examples(select(store, tmp_path / "free", threshold=0.5)))
    assert [one.question.id for one in found] == [row.question_id for row in read_selection(tmp_path / "free").kept]
    for one in found:
        assert one.sample.index == one.row.index
        assert one.sample.token_ids == tuple(one.sample.text.encode())
        assert one.question.reference is None
        assert one.sample.correct is None
        assert one.prompt_ids == (1, 2, 3)
    judged = list(examples(select(store, tmp_path / "gold", threshold=0.5, references=True, label="reference")))
    assert [one.question.reference for one in judged] == [one.row.label.text for one in judged]
    assert all(one.sample.correct for one in judged)


def test_a_moved_store_is_found_by_its_name_and_another_one_is_refused(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "there")
    selection = select(tmp_path / "there", tmp_path / "chosen")
    (tmp_path / "there").rename(tmp_path / "moved")
    assert list(examples(selection, store_dir=tmp_path / "moved"))
    fingerprint = replace(SampleStore(store).round_manifest().fingerprint, seed=5)
    other = SampleStore.create_or_open(tmp_path / "other", fingerprint, num_samples=4, engine={})
    with pytest.raises(ValueError, match="is not the store that"):
        next(examples(selection, store_dir=other.path))
    fewer = sums_store(tmp_path / "fewer", num_questions=2)
    with pytest.raises(ValueError, match=r"sampled again\. Run `selfcal select` again"):
        list(examples(selection, store_dir=fewer.path))


def test_answers_that_were_read_anew_are_noticed(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    selection = select(tmp_path / "store", tmp_path / "chosen")
    SampleStore(tmp_path / "store").reread(
        lambda entry: replace(entry, samples=tuple(replace(s, answer="0") for s in entry.samples)), readers={}
    )
    with pytest.raises(ValueError, match="and is '0'"):
        list(examples(selection))


def test_rows_that_were_changed_are_not_believed(store: Path, tmp_path: Path) -> None:
    select(store, tmp_path / "chosen")
    file = tmp_path / "chosen" / "selection.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="differs from what its manifest says"):
        read_selection(tmp_path / "chosen")
    manifest = tmp_path / "chosen" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"reads_reference": false', '"reads_reference": true'))
    with pytest.raises(ValueError, match="was changed or is damaged"):
        read_selection(tmp_path / "chosen")


def test_the_files_of_the_reference_system_claim_nothing_that_nobody_judged(store: Path, tmp_path: Path) -> None:
    select(store, tmp_path / "free", threshold=0.75, reference_files=True)
    rows = json.loads((tmp_path / "free" / "selected.json").read_text())
    results = json.loads((tmp_path / "free" / "results.json").read_text())
    assert rows[0] == {"question": "What is 3+7?", "answer": "10", "gpt_response": "3+7=10. So the answer is 10."}
    assert results["accuracy"] is None
    assert {row["correct"] for row in results["results"]} == {None}
    assert results["results"][0]["max_confidence"] == pytest.approx(-0.08)
    select(store, tmp_path / "free", threshold=0.75)
    assert not (tmp_path / "free" / "selected.json").exists(), "it would be taken for that of this selection"
    select(store, tmp_path / "gold", threshold=0.75, reference_files=True, references=True)
    assert json.loads((tmp_path / "gold" / "results.json").read_text())["accuracy"] == 1.0


def test_what_cannot_be_is_refused(store: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"threshold": 2.0}, r"at least one of 12 questions, but got none: scores lie between 0.25 and 1"),
        ({"label": "reference"}, "without `references`"),
        ({"keep_top": 0.5, "keep_count": 3}, "Expected one of `threshold`, `keep_top` and `keep_count`"),
        ({"split": "test"}, "no question of split 'test'"),
        ({"keep": "self_certainty"}, "Run `selfcal score --estimator self_certainty"),
        ({"keep": "fused"}, "`keep` to be one of share, ssc, pick, .* but got 'fused'"),
    ):
        with pytest.raises(ValueError, match=message):
            select(store, tmp_path / "chosen", **options)
        assert not (tmp_path / "chosen").exists()


@pytest.mark.parametrize("options", [{"keep": "steady"}, {"pick": "steady", "keep": "pick"}])
def test_a_score_within_questions_picks_and_does_not_keep(store: Path, tmp_path: Path, options: dict[str, str]) -> None:
    shutil.copytree(store, tmp_path / "store")
    annotate(tmp_path / "store", "steady", 1.0, estimator="sasc_std")
    with pytest.raises(ValueError, match="'steady' compares responses to one"):
        select(tmp_path / "store", tmp_path / "chosen", **options)
    picked = select(tmp_path / "store", tmp_path / "chosen", pick="steady", threshold=0.5)
    assert {row.pick_score for row in picked.kept} == {1.0}


def test_a_stored_confidence_called_fused_keeps_questions(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    values = SampleStore(store).index().question_index / NUM_QUESTIONS
    annotate(tmp_path / "store", "fused", values, estimator="fused")  # as `selfcal fit-confidence` names it
    chosen = select(tmp_path / "store", tmp_path / "chosen", keep="fused", keep_count=3)
    assert [row.question_id for row in chosen.kept] == ["q009", "q010", "q011"]
    assert [row.scores["fused"] for row in chosen.kept] == [0.75, 10 / 12, 11 / 12]


def test_votes_cannot_be_learnt_from_votes_nor_from_nothing() -> None:
    with pytest.raises(ValueError, match="which depend on the other responses"):
        fit_votes([sums_entry(1)], ("response_consistency",))
    with pytest.raises(ValueError, match="or name another `pick`"):
        fit_votes([without_scores(1)], None)


def test_other_folders_are_left_as_they_are(store: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is left as it is"):
        select(store, tmp_path)
    with pytest.raises(ValueError, match="Expected `output` to lie apart from the store"):
        select(store, store / "chosen")
    with pytest.raises(ValueError, match="to be the folder of a selection, but got none"):
        read_selection(tmp_path)


def test_a_selection_that_was_cut_short_is_made_again(store: Path, tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.1-abcd.tmp").write_text("{")
    (select(store, tmp_path).path / "manifest.json").unlink()
    (tmp_path / "key_steps.json").write_text("{}")
    assert select(store, tmp_path).kept


def test_the_verb_says_what_it_kept(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["select", "--store_dir", str(store), "--output", str(tmp_path / "s"), "--keep_count"]
    assert run([*arguments, "3"]) == 0
    said = capsys.readouterr().out
    assert "Kept 3 of 12 questions" in said
    assert "9 not kept: not among the first" in said
    assert "No gold answer was read." in said
    assert run([*arguments, "99"]) == 0
    assert "`keep_count` asked for 99" in capsys.readouterr().out
