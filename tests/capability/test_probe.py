import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from safetensors import safe_open
from support.capability_pools import SPLITS, capability_store, chance
from support.other_models import changed_copy, plain_copy

from selfcal_lightning.capability import features as prompt_features
from selfcal_lightning.capability.probe import fit_probe, load_probe
from selfcal_lightning.capability.question_table import load_capability_pool
from selfcal_lightning.cli import run
from selfcal_lightning.commands.capability import run_fit_probe, run_score_questions
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.fitted_files import check_states_origin
from selfcal_lightning.core.errors import InputError, RunError
from selfcal_lightning.data.store.annotations import QuestionAnnotation, question_annotation_names
from selfcal_lightning.data.store.features import FeatureFolder
from selfcal_lightning.engines.settings import EngineSettings, PromptStates
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.metrics.discrimination import spearman
from selfcal_lightning.models.chat_format import ChatFormat, load_tokenizer


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose hidden states have been read, and a probe beside it."""
    folder = tmp_path_factory.mktemp("capability")
    capability_store(folder / "store")
    run_fit_probe(str(folder / "store"), str(folder / "probe"))
    return folder


@pytest.fixture
def place(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "own"))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("nothing has to be loaded"))
    monkeypatch.setattr("selfcal_lightning.engines.transformers.engine.load_network", refuse)


def test_a_probe_without_labels_knows_other_questions(place: Path) -> None:
    probe = load_probe(place / "probe")
    assert (probe.target, probe.pooling, probe.fitted_on.num_questions) == ("agreeing_pairs", "both", 40)
    assert probe.head.num_features == 2 * 128
    values = run_score_questions(probe=str(place / "probe"), store_dir=str(place / "store"), split="test")
    pool = load_capability_pool(str(place / "store"), split="test", task=None)
    assert len(values) == SPLITS["test"][1]
    assert all(0.0 <= value <= 1.0 for value in values if value is not None)
    assert (spearman(values, [chance(question) for question in pool.questions]) or 0.0) > 0.5
    states = PromptStates(*np.zeros((2, 3, 1, 6), dtype=np.float32))
    with pytest.raises(InputError, match="at least 10 questions to fit a probe on, but got 3"):
        fit_probe(states, pool.pool.entries[:3], origin={}, sampling=None)


def test_states_are_kept_with_what_they_are_of(place: Path, no_engine: None) -> None:
    (folder,) = (place / "store" / "features").iterdir()
    origin: Any = FeatureFolder(folder).origin
    assert origin["states"] == {"levels": None, "average": True, "final_norm": True}
    assert set(origin) == {"model", "prompt", "states", "dtype"}
    assert set(origin["model"]) == {"weights_sha256", "adapter_sha256"}
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, framework="numpy") as opened:
        assert opened.get_slice("last_token").get_shape() == [40, 1, 128]
        assert len(json.loads(opened.metadata()["keys"])) == 40
    again = run_fit_probe(str(place / "store"), str(place / "probe"))  # which reads what is there
    assert again.digest == load_probe(place / "probe").digest


def test_a_killed_reading_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(place / "store" / "features")
    monkeypatch.setattr(prompt_features, "CHUNK_QUESTIONS", 16)
    read: list[int] = []
    whole = TransformersEngine.prompt_states

    def killed(self: TransformersEngine, prompts: Any, settings: Any) -> PromptStates:
        read.append(len(prompts))
        if len(read) == 3:
            raise KeyboardInterrupt
        return whole(self, prompts, settings)

    monkeypatch.setattr(TransformersEngine, "prompt_states", killed)
    with pytest.raises(KeyboardInterrupt):
        run_fit_probe(str(place / "store"), str(place / "probe"))
    probe = run_fit_probe(str(place / "store"), str(place / "probe"))
    assert read == [16, 16, 8, 8], "the first two passes are not read again"
    np.testing.assert_allclose(probe.head.weights, load_probe(place / "probe").head.weights)


def test_a_damaged_file_is_named(place: Path) -> None:
    (folder,) = (place / "store" / "features").iterdir()
    (file,) = folder.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    for damaged in (content, b"nothing"):
        file.write_bytes(damaged)
        with pytest.raises(RunError, match=rf"{file.name} is damaged"):
            run_fit_probe(str(place / "store"), str(place / "probe"))


def test_values_stand_beside_the_rows_and_are_of_one_origin(place: Path) -> None:
    store, probe = str(place / "store"), str(place / "probe")
    values = run_score_questions(probe=probe, store_dir=store, split="test")
    record: Any = QuestionAnnotation(store, "probe").record
    assert sorted(record.values.values(), key=str) == sorted(values, key=str)
    assert record.origin["probe"] == load_probe(probe).digest
    other = str(place / "labelled")
    run_fit_probe(store, other, target="label", features="last_token")
    with pytest.raises(InputError, match=r"values 'probe' .*target: 'agreeing_pairs'"):
        run_score_questions(probe=other, store_dir=store, split="test")
    run_score_questions(probe=other, store_dir=store, split="test", name="labelled")
    run_score_questions(probe=other, store_dir=store, split="test", overwrite=True)
    assert question_annotation_names(store) == ["labelled", "probe"]


def test_targets_and_poolings_differ(place: Path, no_engine: None) -> None:
    found = [
        run_fit_probe(str(place / "store"), str(place / "other"), target=target, features=features)
        for target in ("agreeing_pairs", "label")
        for features in ("both", "last_token", "token_mean")
    ]
    assert len({probe.digest for probe in found}) == 6
    assert [probe.head.num_features for probe in found] == [256, 128, 128] * 2


def test_a_file_of_questions(place: Path) -> None:
    (place / "q.jsonl").write_text('{"question": "Tom has 3 boxes of 4 pens. How many pens has he?", "id": "tom"}\n')
    options = {"questions": str(place / "q.jsonl"), "output": str(place / "out.jsonl"), "model": "bundled"}
    for estimator in ({"probe": str(place / "probe")}, {"estimator": "p_true_before"}):
        (value,) = run_score_questions(**options, **estimator)
        (line,) = [json.loads(line) for line in (place / "out.jsonl").read_text().splitlines()]
        assert (line["id"], line["capability"]) == ("tom", value)
    with pytest.raises(InputError, match="estimator 'probe', but got"):
        run_score_questions(**options, estimator="p_true_before", probe=str(place / "probe"))
    (place / "out.jsonl").write_text("something else\n")
    with pytest.raises(InputError, match="a new file or earlier scores of questions"):
        run_score_questions(**options, estimator="p_true_before")


def test_p_true_before_is_the_query_after_an_empty_response(place: Path, tiny_model: str) -> None:
    values = run_score_questions("p_true_before", store_dir=str(place / "store"), split="test", query="Sure?")
    engine = TransformersEngine(tiny_model)
    question = load_capability_pool(str(place / "store"), split="test", task=None).questions[0]
    chat = ChatFormat(load_tokenizer(tiny_model), query="Sure?")
    ids = chat.prompt_ids(question.messages) + chat.query.suffix_ids
    yes, no = (sum((engine.next_token_probabilities([ids], each) or [[]])[0] or []) for each in
               (chat.query.yes_ids, chat.query.no_ids))  # fmt: skip
    assert values[0] == pytest.approx(yes / (yes + no), abs=1e-5)


def test_what_cannot_be_fitted(place: Path, tiny_model: str, tmp_path: Path) -> None:
    other = changed_copy(tiny_model, tmp_path / "other")
    retold = Path(plain_copy(tiny_model, tmp_path / "retold"))
    template = retold / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    pool = tmp_path / "pool.jsonl"
    pool.write_text('{"question": "1 + 1?", "answer": "2", "responses": []}\n')
    store, output = str(place / "store"), tmp_path / "probe"
    for options, message in (
        ({"model": other}, "Expected the model and adapter that gave the responses"),
        ({"model": str(retold)}, "sampled with another chat template"),
        ({"split": "none"}, "questions of split 'none' .* but got none. It holds the split calibration"),
        ({"pool": str(pool), "task": "gsm8k", "model": "bundled", "split": None}, r"pool.jsonl"),
        ({"engine": EngineSettings("vllm")}, "to be transformers where hidden states are read"),
        ({"output": store}, "which is no probe"),
    ):
        with pytest.raises(InputError, match=message):
            run_fit_probe(**{"pool": store, "output": str(output), **options})
    assert not output.exists()


def test_a_probe_belongs_to_its_model_and_its_sampling(place: Path, tiny_model: str, tmp_path: Path) -> None:
    other = changed_copy(tiny_model, tmp_path / "other")
    (place / "q.jsonl").write_text('{"question": "1 + 1?"}\n')
    options = {"probe": str(place / "probe"), "questions": str(place / "q.jsonl"), "output": str(place / "o.jsonl")}
    with pytest.raises(InputError, match=r"model.weights_sha256: '\w+' in the probe"):
        run_score_questions(**options, model=other)
    warmer = capability_store(tmp_path / "warmer", temperature=1.0)
    with pytest.raises(InputError, match=r"sampled differently: temperature: 0\.8 in the fit, 1.0 now"):
        run_score_questions(probe=str(place / "probe"), store_dir=str(warmer))
    probe = load_probe(place / "probe")
    origin = {**probe.origin, "model": {**probe.origin["model"], "adapter_sha256": "that of another"}}
    with pytest.raises(InputError, match=r"model\.adapter_sha256: None in the probe, 'that of another'"):
        check_states_origin(probe.origin, origin)


def test_a_model_that_is_gone_is_asked_for(tiny_model: str, tmp_path: Path) -> None:
    gone = Path(plain_copy(tiny_model, tmp_path / "gone"))
    store = str(capability_store(tmp_path / "store", model=str(gone), samples=2))
    shutil.rmtree(gone)
    words = rf"no '{gone}'.*`model`"
    with pytest.raises(InputError, match=words):
        run_fit_probe(store, str(tmp_path / "probe"))
    with pytest.raises(InputError, match=words):
        run_score("mean_logprob", store)
    assert not (tmp_path / "probe").exists()


def test_targets_that_teach_nothing_are_refused(tmp_path: Path, no_engine: None) -> None:
    single = capability_store(tmp_path / "single", samples=1)
    unjudged = capability_store(tmp_path / "unjudged", judged=False)
    for store, target, message in (
        (single, "agreeing_pairs", "at least 2 responses to a question"),
        (unjudged, "label", "`target` 'label' needs reference answers"),
        (single, "top_share", "`target` top_share is 1 for all 40"),
    ):
        with pytest.raises(InputError, match=message):
            run_fit_probe(str(store), str(tmp_path / "probe"), target=target)
    assert not (tmp_path / "probe").exists()


def test_the_command_line(place: Path, capsys: pytest.CaptureFixture) -> None:
    store, probe = str(place / "store"), str(place / "probe")
    assert run(["fit-probe", "--pool", store, "--output", probe, "--levels", "[0,-1]", "--average", "false"]) == 0
    assert "Fitted on 40 questions with 320 responses: 512 features (both)" in capsys.readouterr().out
    assert run(["score-questions", "--store_dir", store, "--probe", probe, "--split", "test"]) == 0
    assert "probe: 24 questions, mean capability" in capsys.readouterr().out
    assert run(["fit-probe", "--pool", store, "--output", probe, "--levels", "[9]"]) == 1
    assert "from 0, the embedding, to 8" in capsys.readouterr().err


def test_a_damaged_probe_is_refused(place: Path) -> None:
    for name in ("probe.safetensors", "probe.json"):
        content = (place / "probe" / name).read_bytes()
        (place / "probe" / name).write_bytes(content[:-40] + bytes([content[-40] ^ 1]) + content[-39:])
        with pytest.raises(InputError, match=rf"{name} was changed or is damaged"):
            load_probe(place / "probe")
        (place / "probe" / name).write_bytes(content)
