import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.reward_models import stand_in
from support.ssc_pools import Pool

from selfcal_lightning.cli import run
from selfcal_lightning.commands.fit_step_scaler import run_fit_step_scaler
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.scaling import SCALER_KINDS
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.files import sealed
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import Rate, StepEnd, StepStops, spans_of, step_prefixes, token_spans, token_step_ends
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.models.chat_format import ChatFormat, token_pieces
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample
from selfcal_lightning.rewards.formats import QUANTILE_PRM, Score, reward_format
from selfcal_lightning.rewards.layouts import RewardEncoder
from selfcal_lightning.rewards.rates import by_text
from selfcal_lightning.rewards.reading import RewardFile, open_rewards, read_reward_file
from selfcal_lightning.rewards.step_scaling import StepScaler, fit_step_map, open_scaled_rewards, step_rows

FORMAT = "trl-prm"
SHALLOW = True


@pytest.fixture(scope="module")
def model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return stand_in(tiny_model, tmp_path_factory.mktemp("scaled") / "m", reward_format(FORMAT))


def settings_of(model: str, scaler: Path | None = None) -> RewardSettings:
    return RewardSettings(model, FORMAT, "sentence", None if scaler is None else str(scaler))


def entry(*texts: str, answers: list[str | None], correct: list[bool | None]) -> QuestionSamples:
    samples = tuple(
        Sample("q", index, 0, text, None, finish="stop", answer=answer, correct=right)
        for index, (text, answer, right) in enumerate(zip(texts, answers, correct, strict=True))
    )
    return QuestionSamples(Question("q", "local_number", (Message("user", "q?"),), text="q?"), samples, "test", None)


def test_every_step_of_a_response_has_its_target() -> None:
    pool = [entry("One. Two. Three.", "Four.", " ", answers=["7", "8", None], correct=[True, False, None])]
    scores: list[list[list[float] | None]] = [[[0.1, 0.2, 0.3], [0.4], None]]
    steps: dict[str, Any] = {"steps": "sentence", "rates": {("q", "One."): Rate(0.25, 4)}}
    rows = step_rows(pool, scores, target="outcome", **steps)
    assert (rows.score.tolist(), rows.target.tolist()) == ([0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 1.0, 0.0])
    assert rows.num_left_out == 1
    assert step_rows(pool, scores, target="vote_share", **steps).target.tolist() == [0.5] * 4
    rolled = step_rows(pool, scores, target="success_rate", **steps)
    assert (rolled.score.tolist(), rolled.target.tolist()) == ([0.1, 0.3, 0.4], [0.25, 1.0, 0.0])  # 0.2: no rollout
    assert step_rows(pool, scores, target="hard", **steps).target.tolist() == [1.0, 1.0, 0.0]
    with pytest.raises(InputError, match="`target` of whole responses"):
        step_rows(pool, scores, target="success_prob", **steps)
    with pytest.raises(InputError, match="but got none: 3 responses"):
        fit_step_map("platt", step_rows(pool, [[None] * 3], target="outcome", **steps))
    upside = rows._replace(target=1.0 - np.linspace(0.0, 1.0, 4))
    with pytest.raises(InputError, match="scores that rise with the targets, but got a slope of -"):
        fit_step_map("platt", upside)
    for kind in SCALER_KINDS:
        with pytest.raises(InputError, match="right and wrong responses to fit on, but all 4 are 1"):
            fit_step_map(kind, rows._replace(target=np.ones(4)))


def test_prefixes_of_one_text_share_their_rollouts(tmp_path: Path) -> None:
    lines = [{"id": f"q#{i}", "question_id": "q", "reasoning_prefix": f"One.{end}"} for i, end in enumerate(["", "\n"])]
    (tmp_path / "prefixes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert by_text(str(tmp_path), {"q#0": Rate(1.0, 3), "q#1": Rate(0.0, 1)}) == {("q", "One."): Rate(0.75, 4)}
    assert by_text(str(tmp_path), {"q#1": Rate(0.5, 2)}) == {("q", "One."): Rate(0.5, 2)}


@pytest.mark.parametrize("kind", ["temperature", "platt", "isotonic"])
def test_a_scaler_is_kept(kind: Any, model: str, store_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "scaler.json"
    options = {"kind": kind, "split": "train", "num_samples": 4, "reward": settings_of(model)}
    fitted = run_fit_step_scaler(store_dir, str(path), **options)
    assert "held out after" in capsys.readouterr().out
    assert StepScaler.load(path) == fitted
    entries = list(SampleStore(store_dir, num_samples=4).samples(split="validation"))
    plain, scaled = open_rewards(settings_of(model)).read(entries), open_scaled_rewards(settings_of(model, path))
    for before, after in zip(plain, scaled.read(entries), strict=True):
        for one, other in zip(before, after, strict=True):
            assert other == pytest.approx(fitted.map.transform(np.array(one)).tolist(), abs=1e-12)
    (low,) = fitted([Score(0.5, 0.2, 0.9)])
    assert low.low <= low.mean <= low.high
    worth = fitted.scores
    assert worth["fitted after"]["steps/Brier"] <= worth["fitted before"]["steps/Brier"] + 1e-3


def test_scalers_of_votes_need_no_labels(model: str, pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def unlabelled(question: Any, rng: Any) -> list[dict[str, Any]]:
        answers = [str(rng.choice(["7", "8"])) for _ in range(4)]
        return [{"text": f"So {a}+0={a}. The answer is {a}.", "answer": a, "correct": None} for a in answers]

    store = pool.write("unlabelled_scaling", unlabelled)
    path = tmp_path / "scaler.json"
    options = ["--store_dir", store, "--output", str(path), "--split", "train", "--kind", "isotonic"]
    reward = ["--reward.model", model, "--reward.format", FORMAT, "--reward.steps", "sentence"]
    assert run(["fit-step-scaler", *options, *reward]) == 1
    assert "steps with a score and a target, but got none" in capsys.readouterr().err
    assert run(["fit-step-scaler", *options, *reward, "--target", "vote_share"]) == 0
    scaled = SampleStore(store).samples
    run_score(["prm", "prm_min"], store_dir=store, reward=settings_of(model, path))
    knots = json.loads(path.read_text())["parameters"]["y"]
    for one in scaled(confidences=["prm", "prm_min"]):
        for sample in one.samples:
            assert min(knots) - 1e-9 <= sample.confidences["prm_min"] <= sample.confidences["prm"] + 1e-9
    with pytest.raises(InputError, match="overwrite"):
        run_score("prm", store_dir=store, reward=settings_of(model))


def test_what_cannot_be_scaled_is_refused(model: str, tiny_model: str, store_dir: str, tmp_path: Path) -> None:
    path = tmp_path / "scaler.json"
    options: dict[str, Any] = {"split": "train", "num_samples": 2}
    run_fit_step_scaler(store_dir, str(path), "isotonic", reward=settings_of(model), **options)
    other = stand_in(tiny_model, tmp_path / "other", reward_format("reasoneval"))
    with pytest.raises(InputError, match="was fitted to another reward model, format or steps"):
        open_scaled_rewards(RewardSettings(other, "reasoneval", "sentence", str(path)))
    with pytest.raises(InputError, match=r"`reward\.scaler` to be a file of `selfcal fit-step-scaler`"):
        open_scaled_rewards(settings_of(model, tmp_path / "none.json"))
    content = json.loads(path.read_text())
    (tmp_path / "damaged.json").write_bytes(sealed({**content, "parameters": {"x": [0, 1], "y": [1, 0]}}))
    with pytest.raises(InputError, match=r"to hold a whole steps_isotonic, but got .* isotonic.*Fit it again"):
        open_scaled_rewards(settings_of(model, tmp_path / "damaged.json"))
    whole = stand_in(tiny_model, tmp_path / "whole", reward_format("sequence-classifier"))
    with pytest.raises(InputError, match=r"a probability for each step.*`selfcal fit-confidence`"):
        run_fit_step_scaler(store_dir, str(path), reward=RewardSettings(whole, "sequence-classifier"), **options)
    with pytest.raises(InputError, match=r"no `reward\.scaler` with 'sequence-classifier'"):
        open_scaled_rewards(RewardSettings(whole, "sequence-classifier", scaler=str(path)))
    for changed, message in (
        ({"target": "hard"}, "`rollouts` with the targets"),
        ({"reward": settings_of(model, path)}, r"no `reward\.scaler` to fit one"),
    ):
        with pytest.raises(InputError, match=message):
            run_fit_step_scaler(store_dir, str(path), **{"reward": settings_of(model), **options, **changed})


TEXT = "First 34+75=109. So 109+1=110. The answer is 110"
MARKER = "marker:="
EQUATIONS = ["First 34+75=", "109. So 109+1=", "110. The answer is 110"]


def test_all_that_read_steps_cut_behind_the_marker(chat: ChatFormat) -> None:
    ids = chat.response_ids(TEXT)
    ends = token_step_ends(chat.tokenizer, ids, MARKER)
    cut = [chat.decode(ids[a:b]).strip() for a, b in zip([0, *ends], ends, strict=False)]
    assert cut == EQUATIONS
    assert [step for step, _ in step_prefixes(TEXT, MARKER)] == [step.rstrip("=") for step in EQUATIONS]
    pieces = token_pieces(chat.decode, ids)
    spans = token_spans(pieces, spans_of("".join(pieces), MARKER))
    assert next(chat.decode(ids[a:b]).strip() for a, b in spans) == "First 34+75"

    question = Question("q", "local_number", (Message("user", "How many?"),), text="How many?")
    sample = Sample("q", 0, 0, TEXT, tuple(ids), "stop", "110", True)
    prompt = chat.prompt_ids(question.messages)
    encoder = RewardEncoder(reward_format(QUANTILE_PRM), chat.tokenizer)
    scored = encoder.continued(QuestionSamples(question, (sample,), "test", prompt), sample, MARKER)
    assert [place + 1 - len(prompt) for place in scored.positions] == ends

    stops = StepStops.of(chat.tokenizer, MARKER)
    assert [number + 1 for number, token in enumerate(ids) if token in stops.tokens] == ends[:-1]
    found = [stops.first_end(ids[:end], after=start) for start, end in zip([0, *ends], ends[:-1], strict=False)]
    assert found == [StepEnd(end, is_settled=True) for end in ends[:-1]]


def test_steps_that_no_search_can_end_at_are_refused(chat: ChatFormat, tmp_path: Path) -> None:
    RewardFile(QUANTILE_PRM, "marker: ", (0.1, 0.9), "outcome").write(tmp_path)
    for make, message in (
        (lambda: StepStops.of(chat.tokenizer, f"marker:{chat.tokenizer.eos_token}"), "a text that responses can hold"),
        (lambda: StepStops.of(chat.tokenizer, "auto"), "but got 'auto', which needs a whole response"),
        (lambda: RewardSettings(steps="marker"), "marker:TEXT, but got"),
        (lambda: read_reward_file(tmp_path), "to name the text after each step"),
    ):
        with pytest.raises(InputError, match=message):
            make()
