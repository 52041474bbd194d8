import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.reward_models import stand_in
from support.store_samples import write_lines

from selfcal_lightning.cli import run
from selfcal_lightning.commands import answer as verb
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.data.step_settings import RewardSettings
from selfcal_lightning.data.steps import StepStops
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.engines.opening import open_engine
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.inference.driver import run_strategy
from selfcal_lightning.inference.registry import make_strategy
from selfcal_lightning.inference.sources import EngineSource
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Question, QuestionSamples, Sample, SamplingSettings
from selfcal_lightning.rewards.answering import check_live_rewards, open_live_rewards
from selfcal_lightning.rewards.formats import Score, reward_format
from selfcal_lightning.rewards.reading import RewardFile, RewardReader, open_rewards
from selfcal_lightning.rewards.search import BeamSearch, DiverseTreeSearch, ParticleFiltering

COMMANDS: dict[str, dict] = {
    "beam_search": {"width": 4, "keep": 2, "duplicates": "keep", "lookahead": 1},
    "diverse_tree_search": {"width": 4, "trees": 2},
    "particle_filtering": {"particles": 2},
    "adaptive_best_of_n": {"max_samples": 3},
}


class ByLength:
    """Scores a path by its length, so that the longer one is the better."""

    def score_paths(self, question: Question, paths: Sequence[tuple[int, ...]]) -> list[Score]:
        means = [len(path) / 100 for path in paths]
        return [Score(mean, mean, mean) for mean in means]


@pytest.fixture(scope="module")
def reward(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A reward model of the policy's tokens with a head at random."""
    folder = stand_in(tiny_model, tmp_path_factory.mktemp("reward") / "m", reward_format("quantile-prm"))
    RewardFile("quantile-prm", "sentence", (0.1, 0.9), "outcome").write(Path(folder))
    return folder


def check_counts(engine: Engine, chat: ChatFormat, scorer: RewardReader) -> None:
    """Search a question in three ways; what was drawn is what is counted, and steps end where steps end."""
    stops = StepStops.of(chat.tokenizer, "sentence")
    (question,) = get_task("word_problems").load("calibration", limit=1)
    strategies = [
        BeamSearch(scorer, width=2, keep=1, max_steps=2, lookahead=1),
        DiverseTreeSearch(scorer, width=2, trees=2, max_steps=2),
        ParticleFiltering(scorer, particles=2, max_steps=2),
    ]
    for strategy in strategies:
        source = EngineSource(engine, chat, sampling=SamplingSettings(max_new_tokens=60), stops=stops)
        seen: list[Sample] = []
        (verdict,) = run_strategy(strategy, [question], source, on_verdict=lambda _, samples: seen.extend(samples))  # noqa: B023
        looked = verdict.tokens_generated - sum(sample.drawn_tokens or 0 for sample in seen)
        assert 0 < looked <= sum(sample.finish == "step" for sample in seen), "at most one token behind each full stop"
        assert len([sample for sample in seen if not sample.prefix_tokens]) == 2
        assert all(sample.finish != "step" or (sample.token_ids or ())[-1] in stops.tokens for sample in seen)
        assert verdict.samples_used == len(seen) <= strategy.max_samples
        begun = {sample.token_ids for sample in seen if sample.finish == "step"}
        followed = [sample for sample in seen if sample.prefix_tokens]
        assert followed
        assert all((one.token_ids or ())[: one.prefix_tokens] in begun for one in followed), "a step that was drawn"
        whole = [sample for sample in seen if sample.finish == "stop" and sample.answer is not None]
        scores = scorer.score_paths(question, [tuple(sample.token_ids or ()) for sample in whole])
        chosen = [sample for sample, score in zip(whole, scores, strict=True) if score.mean == verdict.confidence]
        assert verdict.answer in {sample.answer for sample in chosen} or verdict.answer is None


def test_live_searches_count_tokens_to_the_step(tiny_model: str) -> None:
    engine = TransformersEngine(tiny_model)
    check_counts(engine, engine.chat, ByLength())
    engine.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Engine]]:
    """One engine for all commands of a test; it is opened by the first of them and closed at the end."""
    engines: list[Engine] = []
    ends = []

    def open_once(*arguments: object, **options: object) -> Engine:
        if not engines:
            engines.append(open_engine(*arguments, **options))
            ends.append(engines[0].close)
            monkeypatch.setattr(engines[0], "close", lambda: None)
        return engines[0]

    monkeypatch.setattr(verb, "open_engine", open_once)
    yield engines
    for end in ends:
        end()


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_searches_as_transformers_does(
    tiny_model: str, reward: str, chat: ChatFormat, started: list[Engine], questions: str,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    """Greedily both engines find the same by the same steps; drawn at random, what is counted was drawn."""
    greedy = ["--sampling.temperature", "0", "--sampling.edt_scale", "null", "--sampling.max_new_tokens", "80"]
    args = json.dumps({"max_context": 256, "kv_cache_memory_bytes": 1 << 27})
    engines = {
        "vllm": ["--engine.name", "vllm", "--engine.dtype", "float32", "--engine.engine_args", args],
        "transformers": ["--engine.dtype", "float32"],
    }
    found: dict[str, list[list[dict]]] = {}
    for engine, options in engines.items():
        with pytest.MonkeyPatch.context() as patch:
            if engine == "transformers":
                patch.setattr(verb, "open_engine", open_engine)
            for name, fields in COMMANDS.items():
                given = [part for key, value in fields.items() for part in (f"--strategy_args.{key}", str(value))]
                command = ["answer", "--model", tiny_model, "--questions", questions, "--strategy", name, *given]
                command += ["--task", "word_problems", "--reward.model", reward, "--json", "true", *options, *greedy]
                assert run(command) == 0, capsys.readouterr().err
                lines = capsys.readouterr().out.splitlines()
                found.setdefault(engine, []).append([json.loads(line) for line in lines])
    for name, ours, theirs in zip(COMMANDS, found["vllm"], found["transformers"], strict=True):
        assert len(ours) == len(theirs) == 3
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.pop("confidence") == pytest.approx(other.pop("confidence"), abs=1e-5), name
            assert mine == other
        assert any(line["answer"] is not None for line in ours), "something was found"
    assert isinstance(started[0], VLLMEngine)
    check_counts(started[0], chat, open_rewards(RewardSettings(reward)))


TEXTS = ("First 34+75=109. So 109+1=110. The answer is 110.", "First 3+4=7. The answer is 7.", "")


def test_a_live_response_has_the_score_of_a_recorded_one(reward: str, chat: ChatFormat) -> None:
    (question,) = get_task("word_problems").load("calibration", limit=1)
    samples = tuple(
        Sample(question.id, index, 0, text, tuple(chat.response_ids(text)), "stop", "1", True)
        for index, text in enumerate(TEXTS)
    )
    settings = RewardSettings(reward)
    ends = ExitStack()
    lowest, last = open_live_rewards(["prm_min", "prm"], settings, [question], chat=chat, dtype="float32", ends=ends)
    recorded = [QuestionSamples(question, samples, "test", chat.prompt_ids(question.messages))]
    ((*steps, nothing),) = open_rewards(settings, dtype="float32").read(recorded)
    assert (nothing, last.score_sample(samples[2])) == (None, None), "it has no steps"
    for sample, scores in zip(samples, steps, strict=False):
        assert scores is not None
        assert last.score_sample(sample) == pytest.approx(scores[-1], abs=1e-6)
        assert lowest.score_sample(sample) == pytest.approx(min(scores), abs=1e-6)
    ends.close()


@pytest.fixture
def questions(tmp_path: Path) -> str:
    asked = get_task("word_problems").load("calibration", limit=3)
    rows = ({"question": one.text, "answer": one.reference} for one in asked)
    return str(write_lines(tmp_path / "questions.jsonl", *rows))


@pytest.mark.parametrize(("strategy", "options"), [
    ("early_stopping", {"threshold": 0.0}), ("best_of_n", {}), ("cisc", {"confidence": "prm_lower"}),
])  # fmt: skip
def test_strategies_read_a_reward_model_live(
    strategy: str, options: dict, reward: str, questions: str, tiny_model: str,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    fields = {"confidence": "prm", "max_samples": 2, **options}
    command = ["answer", "--model", tiny_model, "--task", "word_problems", "--questions", questions]
    command += ["--strategy", strategy, *(part for key, value in fields.items() for part in (f"--{key}", str(value)))]
    command += ["--reward.model", reward, "--sampling.max_new_tokens", "60", "--json", "true"]
    assert run(command) == 0
    printed = capsys.readouterr()
    assert "LOAD REPORT" not in printed.out
    answers = [json.loads(line) for line in printed.out.splitlines()]
    assert len(answers) == 3
    assert all(0.0 <= answer["confidence"] <= 1.0 for answer in answers if answer["confidence"] is not None)
    if strategy == "early_stopping":
        assert all(answer["samples_used"] == 1 for answer in answers if answer["answer"] is not None)


def test_what_reads_no_reward_model_or_has_none_is_refused(reward: str) -> None:
    reads = make_strategy("best_of_n", confidence="prm")
    assert check_live_rewards(reads, [], RewardSettings(reward)) == ["prm"]
    assert check_live_rewards(make_strategy("self_consistency"), [], RewardSettings()) == []
    with pytest.raises(InputError, match=r"reads prm: .* `reward\.model`"):
        check_live_rewards(reads, [], RewardSettings())
    with pytest.raises(InputError, match=r"`reward` needs .* or a `confidence`"):
        check_live_rewards(make_strategy("self_consistency"), [], RewardSettings(reward))
    with pytest.raises(InputError, match=r"'orm' cannot read .* judges steps by a probability"):
        check_live_rewards(make_strategy("best_of_n", confidence="orm"), [], RewardSettings(reward))
