"""Estimators over a store against a naive float64 forward pass, one response at a time."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.fakes import FakeChat, FakeEngine
from support.recorded_pools import Naive, naive_statistics

from selfcal_lightning.confidence.base import entry_ids
from selfcal_lightning.confidence.estimators import MeanLogprob, PTrue, SelfCertainty, SequenceLogprob, TokenEntropy
from selfcal_lightning.confidence.token_reader import TokenReader
from selfcal_lightning.data.store.sample_store import SampleStore
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.models import packing as packing_support
from selfcal_lightning.models.packing import PackingError
from selfcal_lightning.records import Message, Question, QuestionSamples, Sample

Pool = list[QuestionSamples]


@pytest.fixture(scope="module")
def pool(sampled: Path) -> Pool:
    return list(SampleStore(sampled).samples())


@pytest.fixture(scope="module")
def naive(tiny_model: str, engine: TransformersEngine, pool: Pool) -> list[list[Naive]]:
    return naive_statistics(tiny_model, engine, pool)


def flat(rows: list[list[float | None]]) -> list[float | None]:
    return [value for row in rows for value in row]


@pytest.mark.parametrize(
    ("estimator", "attribute", "sign"),
    [
        (SequenceLogprob, "logprob", 1.0),
        (MeanLogprob, "mean_logprob", 1.0),
        (SelfCertainty, "certainty", 1.0),
        (TokenEntropy, "entropy", -1.0),
    ],
)
def test_token_statistics_equal_the_naive_ones(
    tokens: TokenReader, pool: Pool, naive: list[list[Naive]], estimator: type, attribute: str, sign: float
) -> None:
    scores = estimator(tokens).score(pool)
    expected = [[sign * getattr(one, attribute) for one in row] for row in naive]
    assert [len(row) for row in scores] == [len(entry.samples) for entry in pool]
    assert flat(scores) == pytest.approx(flat(expected), abs=1e-4, rel=1e-5)
    assert len(set(flat(expected))) > 1
    assert estimator.is_probability is False


def test_p_true_equals_the_naive_one_and_the_stored(engine: TransformersEngine, pool: Pool, naive: list) -> None:
    scores = flat(PTrue(engine, engine.chat).score(pool))
    assert scores == pytest.approx([one.p_true for row in naive for one in row], abs=1e-5)
    assert scores == pytest.approx([sample.p_true for entry in pool for sample in entry.samples], abs=1e-5)
    raw = flat(PTrue(engine, engine.chat, normalised=False).score(pool))
    assert raw == pytest.approx([sample.yes_mass for entry in pool for sample in entry.samples], abs=1e-5)
    assert all(mass < value for mass, value in zip(raw, scores, strict=True))


def test_batches_of_any_size_agree(engine: TransformersEngine, pool: Pool, tokens: TokenReader) -> None:
    one_by_one = TokenReader(engine._model.network, engine.chat, forward_tokens=1)
    few_logits = TokenReader(engine._model.network, engine.chat, logit_elements=60 * 628)
    expected = flat(SelfCertainty(tokens).score(pool))
    assert flat(SelfCertainty(one_by_one).score(pool)) == pytest.approx(expected, abs=1e-4)
    assert flat(SelfCertainty(few_logits).score(pool)) == pytest.approx(expected, abs=1e-4)


def test_packed_rows_and_rows_apart_agree(engine: TransformersEngine, pool: Pool) -> None:
    found, sizes = {}, {}
    for packs in (True, False):
        reader = TokenReader(engine._model.network, engine.chat)
        reader.watch(None)
        reader._can_pack = None if packs else False
        shapes: list[torch.Size] = []
        embedding = engine._model.network.get_input_embeddings()
        with embedding.register_forward_hook(lambda _, inputs, __, shapes=shapes: shapes.append(inputs[0].shape)):
            rows = [one for row in reader.read(pool) for one in row if one is not None]
        found[packs], sizes[packs] = rows, shapes
    assert engine._model.network.config._attn_implementation == "sdpa", "as it was"
    for packed, apart in zip(found[True], found[False], strict=True):
        for one, other in zip(packed.tokens, apart.tokens, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.top_confidence, apart.top_confidence, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(packed.trajectories[None], apart.trajectories[None], atol=1e-5, rtol=1e-5)
    keys = {(entry.prompt_ids, sample.token_ids) for entry in pool for sample in entry.samples}
    assert sizes[True][-1] == (1, sum(map(len, {prompt for prompt, _ in keys})) + sum(len(ids) for _, ids in keys))


def test_a_model_that_packs_wrongly_reads_rows_apart(
    engine: TransformersEngine, pool: Pool, tokens: TokenReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    differs = Mock(side_effect=PackingError("Expected the same logits, but they differ."))
    monkeypatch.setattr(packing_support, "check_packed_equals_separate", differs)
    apart = TokenReader(engine._model.network, engine.chat)
    found = flat(SelfCertainty(apart).score(pool))
    assert apart._can_pack is False
    assert found == pytest.approx(flat(SelfCertainty(tokens).score(pool)), abs=1e-5)
    assert engine._model.network.config._attn_implementation == "sdpa"


def test_responses_made_elsewhere_are_encoded(engine: TransformersEngine, tokens: TokenReader, pool: Pool) -> None:
    bare = [
        replace(entry, prompt_ids=None, samples=tuple(replace(s, token_ids=None, finish=None) for s in entry.samples))
        for entry in pool
    ]
    assert all(ids.encoded for entry in bare for ids in entry_ids(entry, engine.chat))
    assert not any(ids.encoded for entry in pool for ids in entry_ids(entry, engine.chat))
    # The bundled tokenizer writes its own responses as the model wrote them, so the numbers are those of the ids.
    assert PTrue(engine, engine.chat).score(bare) == PTrue(engine, engine.chat).score(pool)
    assert SelfCertainty(tokens).score(bare) == SelfCertainty(tokens).score(pool)


def test_ids_of_another_tokenizer_are_not_taken(engine: TransformersEngine, pool: Pool) -> None:
    sample = pool[0].samples[0]
    strange = replace(pool[0], samples=(replace(sample, token_ids=sample.token_ids[::-1]),))
    (found,) = entry_ids(strange, engine.chat)
    assert found.encoded
    assert found.response == sample.token_ids
    assert found.prompt == pool[0].prompt_ids


def test_none_where_there_is_nothing_to_score(engine: TransformersEngine, tokens: TokenReader, pool: Pool) -> None:
    whole = pool[0].samples[0]
    failed = Sample(whole.question_id, 1, 0, "", (), None, None, None)
    silent = replace(failed, finish="stop")
    long = replace(whole, text=whole.text * 20, token_ids=None)
    entry = replace(pool[0], samples=(whole, failed, silent, long))
    p_true = PTrue(engine, engine.chat).score([entry])[0]
    assert [value is None for value in p_true] == [False, True, False, True]
    assert SequenceLogprob(tokens).score([entry])[0][1:] == [None, 0.0, None]
    for estimator in (MeanLogprob, SelfCertainty, TokenEntropy):
        assert [v is None for v in estimator(tokens).score([entry])[0]] == [False, True, True, True]
    assert PTrue(engine, engine.chat).score([replace(entry, samples=())]) == [[]]
    assert PTrue(engine, engine.chat).score([]) == []


def test_p_true_asks_once_for_equal_responses_and_keeps_to_the_context() -> None:
    class Counting(FakeEngine):
        asked: list[int]

        def next_token_probabilities(self, prompts, token_ids):  # noqa: ANN001, ANN202
            self.asked = [len(prompt) for prompt in prompts]
            return super().next_token_probabilities(prompts, token_ids)

    chat = FakeChat()
    engine = Counting(max_context=60)
    texts = ["The answer is 3.", "The answer is 3.", "The answer is 3, and that after a long thought."]
    samples = tuple(Sample("q", i, 0, text, tuple(text.encode()), "stop", "3", True) for i, text in enumerate(texts))
    entry = QuestionSamples(Question("q", "fake", (Message("user", "?"),)), samples, "test")
    scores = PTrue(engine, chat).score([entry])[0]
    assert scores[0] == scores[1] is not None
    assert scores[2] is None
    assert engine.asked == [len("user: ?") + 1 + len(texts[0]) + len(chat.query.suffix_ids)]
