from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.fakes import FakeEngine, ReplyingEngine
from support.openai_server import Exchange, FakeServer, canned, status
from support.training_runs import data_module, generation, module_of, trainer_with

from selfcal_lightning.callbacks.generation import SSCGeneration
from selfcal_lightning.cli import run
from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.estimators import PTrue
from selfcal_lightning.confidence.verbalized import Verbalized
from selfcal_lightning.data.store.annotations import annotation_names
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.base import EngineStoppedError, Failure, RequestsFailedError, generate
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.vllm import engine as vllm
from selfcal_lightning.engines.vllm.engine import VLLMEngine
from selfcal_lightning.engines.vllm.records import EngineCrashedError
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import Message, Question, QuestionSamples, Request, Response, Sample, SamplingSettings

NUM_QUESTIONS, NUM_SAMPLES = 12, 3


class Outage:
    """The server answers so many completions and is then out of order, until it is mended."""

    def __init__(self, server: FakeServer, after: int) -> None:
        self.left = after
        self._fault, self._complete = status(503, "out of order"), server._complete
        server._complete = self._answer

    def mend(self) -> None:
        self.left = 10**9

    async def _answer(self, exchange: Exchange) -> None:
        self.left -= 1
        await (self._complete(exchange) if self.left >= 0 else self._fault(exchange))


@pytest.fixture
def server(chat: ChatFormat) -> Iterator[FakeServer]:
    server = FakeServer(canned(chat), chat.tokenizer)
    yield server
    server.close()


def arguments(server: FakeServer, store: Path, *more: str) -> list[str]:
    waits = {"first_wait": 0.001, "longest_wait": 0.002, "max_retries": 1}
    return [
        "generate", "--model", "bundled", "--store_dir", str(store), "--task", "word_problems",
        "--engine.name", "openai", "--engine.base_url", server.base_url, "--sampling.edt_scale", "null",
        "--limit", str(NUM_QUESTIONS), "--num_samples", str(NUM_SAMPLES), "--engine.max_batch", "4",
        "--questions_per_shard", "2",
        *(f"--engine.engine_args.{name}={value}" for name, value in waits.items()), *more,
    ]  # fmt: skip


def stored(store: Path) -> list[Sample]:
    return [sample for group in SampleStore(store).samples() for sample in group.samples]


@pytest.mark.parametrize("more", [("--max_failures", "5"), ()], ids=["stopped", "to the end"])
def test_an_outage_fails_the_run_and_the_same_command_completes_it(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    """The run once ended with status 0, all questions in the store for ever, three quarters of them empty."""
    outage = Outage(server, after=2 * NUM_SAMPLES * 5)
    assert run(arguments(server, tmp_path, *more)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("selfcal generate: error: Expected ")
    assert "start the same command again" in error
    assert ("HTTP 503" in error) == bool(more)
    assert len(server.completions()) < (60 if more else 200), "a stopped run asks no more"
    assert not (tmp_path / "manifest.json").exists(), "nothing is joined"
    kept = SampleStore(tmp_path).question_ids(include_parts=True)
    assert 2 <= len(kept) <= 5
    outage.mend()
    asked = len(server.completions())
    assert run(arguments(server, tmp_path, *more)) == 0
    assert len(server.completions()) - asked == 2 * NUM_SAMPLES * (NUM_QUESTIONS - len(kept)), "the rest alone"
    assert {(s.text, s.finish, s.p_true) for s in stored(tmp_path)} == {("The answer is 8.", "stop", 0.5)}
    assert len(stored(tmp_path)) == NUM_QUESTIONS * NUM_SAMPLES


@pytest.mark.slow
def test_workers_keep_what_is_complete_and_fail_the_run(server: FakeServer, tmp_path: Path) -> None:
    outage = Outage(server, after=2 * NUM_SAMPLES * 5)
    assert run(arguments(server, tmp_path, "--devices", "2")) == 1
    kept = SampleStore(tmp_path).question_ids(include_parts=True)
    assert 1 <= len(kept) < NUM_QUESTIONS
    outage.mend()
    assert run(arguments(server, tmp_path, "--devices", "2")) == 0
    assert {sample.finish for sample in stored(tmp_path)} == {"stop"}
    assert len(stored(tmp_path)) == NUM_QUESTIONS * NUM_SAMPLES


def test_answer_stops_too(server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Outage(server, after=20)
    (tmp_path / "questions.txt").write_text("".join(f"What is {i} + 1?\n" for i in range(50)))
    kept = [argument for argument in arguments(server, tmp_path) if not argument.startswith("--engine.engine_args")]
    options = kept[kept.index("--engine.name") : kept.index("--limit")]
    status = run(
        ["answer", "--model", "bundled", "--questions", str(tmp_path / "questions.txt"), "--max_failures", "6",
         "--engine.engine_args.max_retries=0", *options]
    )  # fmt: skip
    assert status == 1
    assert "6 requests in a row failed" in capsys.readouterr().err.splitlines()[-1]


class Failing(FakeEngine):
    """Fails one request of each question that it is told, once."""

    def __init__(self, tiny: TransformersEngine, failing: int) -> None:
        super().__init__(slots=8)
        self._tiny, self.failing = tiny, failing

    def describe(self) -> dict[str, Any]:
        return self._tiny.describe()

    def poll(self) -> list[Response]:
        if self.failing and self._waiting:
            self.failing -= 1
            name = next(iter(self._waiting))
            self.cancel([name])
            raise RequestsFailedError({name: Failure("lost")})
        return super().poll()


def test_training_waits_for_the_whole_store(tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = TransformersEngine(tiny_model)
    engines = [Failing(tiny, 1), Failing(tiny, 0)]
    monkeypatch.setattr(SSCGeneration, "_start", lambda *_: engines.pop(0))
    store = tmp_path / "store"
    with pytest.raises(RuntimeError, match="8 questions to be answered, but 1 had requests that failed"):
        trainer_with(generation()).fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    assert len(SampleStore(store).question_ids(include_parts=True)) == 7
    trainer_with(generation()).fit(module_of(tiny_model), datamodule=data_module(tiny_model, store))
    assert len(SampleStore(store).question_ids(split="train")) == 8
    assert all(sample.finish is not None for sample in stored(store))


def test_a_broken_gpu_is_no_poison_prompt(tiny_model: str, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt was once quarantined in its turn, so that a whole run became empty responses."""
    monkeypatch.setattr("selfcal_lightning.core.imports.is_installed", lambda module: True)
    monkeypatch.setattr(vllm, "is_cpu_build", lambda: True)
    worker = Mock(pid=1)  # a child that starts and dies over whatever it is given
    limits = {"max_context": 256, "model_limit": 256, "vocabulary": 512, "max_batch": 64, "dtype": "float32"}
    worker.start.return_value, worker.bury.return_value = limits, "Nothing is left of it."
    worker.channel.receive.side_effect = EOFError("it died")
    monkeypatch.setattr(vllm, "WorkerProcess", Mock(return_value=worker))
    engine = VLLMEngine(tiny_model, chat=chat, max_restarts=5)
    plain = SamplingSettings(temperature=1.0, edt_scale=None, max_new_tokens=8)
    requests = [Request(f"{p}/{s}", (5, 6, p), plain, seed=s) for p in range(7, 30) for s in range(2)]
    with pytest.raises(EngineCrashedError, match=r"crashed over 6 different prompts in a row, .*it died"):
        generate(engine, requests)
    assert engine.statistics()["quarantined"] < 20
    assert issubclass(EngineCrashedError, EngineStoppedError)


def test_estimators_tell_a_refused_prompt_from_a_lost_answer(chat: ChatFormat) -> None:
    question = Question("q", "word_problems", (Message("user", "1 + 2?"),))
    texts = ("It is 3.", "It is 4.")
    samples = tuple(Sample("q", i, 0, t, chat.response_ids(t), "stop", "3", True) for i, t in enumerate(texts))
    entry = QuestionSamples(question, samples, "test", chat.prompt_ids(question.messages))
    refused = (*entry.prompt_ids, *samples[0].token_ids, *chat.query.suffix_ids)
    engine = ReplyingEngine(lambda _: Failure("lost"))
    engine.next_token_probabilities = lambda prompts, ids: [
        None if p == refused else [0.01] * len(ids) for p in prompts
    ]
    ((first, second),) = PTrue(engine, chat).score([entry])
    assert first is None
    assert second == pytest.approx(len(chat.query.yes_ids) / (len(chat.query.yes_ids) + len(chat.query.no_ids)))
    with pytest.raises(RequestsFailedError, match="lost"):
        Verbalized(engine, chat).score([entry])
    assert not engine._waiting


def test_score_counts_refused_prompts_and_keeps_no_lost_answers(
    tiny_model: str, server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(arguments(server, tmp_path)) == 0
    plain, lost = TransformersEngine.next_token_probabilities, True

    def read(self: TransformersEngine, prompts: Any, token_ids: Any) -> list[list[float] | None]:
        if lost:
            raise RequestsFailedError({"prompt 0": Failure("HTTP 503")})
        return [None, *plain(self, prompts[1:], token_ids)]

    monkeypatch.setattr(TransformersEngine, "next_token_probabilities", read)
    with pytest.raises(RequestsFailedError, match="HTTP 503"):
        run_score("p_true", str(tmp_path), model="bundled", name="other")
    assert annotation_names(tmp_path) == []
    lost = False
    (report,) = run_score("p_true", str(tmp_path), model="bundled", name="other")
    assert (report.scored, report.unknown) == (NUM_QUESTIONS * NUM_SAMPLES, NUM_SAMPLES)
