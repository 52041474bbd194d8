import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import zscore
from support.house import Vectors
from support.recorded_pools import sample_store

from selfcal_lightning.commands.score import run_score
from selfcal_lightning.confidence.certainty import (
    chain_of_embedding,
    lowest_group_confidence,
    token_statistics,
    top_k_confidence,
)
from selfcal_lightning.confidence.estimators import PTrue, StepSelfEvaluation
from selfcal_lightning.confidence.registry import ESTIMATORS, CriteriaSettings
from selfcal_lightning.confidence.token_reader import ResponseStatistics, TokenReader
from selfcal_lightning.data.steps import Span, token_step_ends
from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.metrics.consistency import masked_standardised_weights
from selfcal_lightning.models.chat_format import token_pieces
from selfcal_lightning.records import QuestionSamples, Sample

Pool = list[QuestionSamples]
SHALLOW = True


@pytest.fixture(scope="module")
def pool(engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory) -> Pool:
    store = sample_store(engine, tmp_path_factory.mktemp("pool") / "store", num_questions=2)
    text = "34+1=35. So 35+2=37.\nThe answer is 37."
    (first, *rest) = store.samples()
    spoken = replace(first.samples[0], text=text, token_ids=engine.chat.response_ids(text))
    return [replace(first, samples=(spoken, *first.samples[1:])), *rest]


class _Spans:
    """Stands for a reader: gives the spans that it is told and needs no model."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = [Span(*span) for span in spans]

    def steps(self, token_ids: tuple[int, ...], rule: str) -> list[Span]:
        return self.spans

    def watch(self, steps: str | None) -> None:
        """Nothing is read."""


def _score(name: str, statistics: ResponseStatistics, spans: Sequence[tuple[int, int]] = (), **options: Any) -> float:
    return ESTIMATORS[name](_Spans(spans), **options).read(statistics)


def _recorded(vectors: Vectors) -> tuple[dict[str, Any], ResponseStatistics]:
    case = vectors("ttt_step_confidence")["cases"][0]
    start = len(case["prompt_ids"])
    logits = torch.tensor(case["logits_full_sequence"]).double()[start - 1 : -1]
    ids = tuple(case["response_ids"])
    statistics = token_statistics(logits, torch.tensor(ids))
    return case, ResponseStatistics(ids, logits.shape[1], statistics, top_k_confidence(logits, logits.shape[1]))


def test_step_criteria_equal_the_vectors_on_right_spans_and_not_on_drifted_ones(vectors: Vectors) -> None:
    _, statistics = _recorded(vectors)
    for case in vectors("ttt_step_confidence_alignment")["cases"]:
        options = {"spans": case["correct_spans"], "weight": case["lambda"]}
        certainty = _score("step_certainty", statistics, **options)
        assert certainty == pytest.approx(case["self_certainty_aligned"], abs=1e-6)
        assert certainty != pytest.approx(case["self_certainty_drifted"], abs=0.1)
        entropy = _score("step_entropy", statistics, **options)
        assert entropy == pytest.approx(case["entropy_mean_aligned"], abs=1e-6)


def test_response_criteria_equal_the_vectors(vectors: Vectors) -> None:
    case, statistics = _recorded(vectors)
    assert _score("response_certainty", statistics) == pytest.approx(case["response_certainty"], abs=1e-6)
    assert _score("min_logprob", statistics) == pytest.approx(min(case["per_token_logprob"]), abs=1e-6)
    assert -_score("token_entropy", statistics) == pytest.approx(
        sum(case["per_token_entropy"]) / len(case["per_token_entropy"]), abs=1e-6
    )
    for other in vectors("self_certainty")["cases"]:
        batch = torch.tensor(other["logits"]).double()
        batch = batch if batch.dim() == 3 else batch[None]
        masks = torch.tensor(other["mask"]).bool().reshape(batch.shape[:2]) if "mask" in other else [slice(None)]
        for row, mask, expected in zip(batch, masks, np.atleast_1d(other["self_certainty"]), strict=True):
            logits = row[mask]
            ids = torch.zeros(len(logits), dtype=torch.long)
            read = ResponseStatistics(tuple(ids.tolist()), logits.shape[1], token_statistics(logits, ids), ids.double())
            assert _score("self_certainty", read) == pytest.approx(expected, abs=1e-6)
    for undefined in vectors("coe_edge_cases")["cases"]:
        trajectories = {None: torch.tensor([undefined["layer_means"]]).double()}
        assert math.isnan(_score("coe_c", replace(statistics, trajectories=trajectories)))


def test_trajectories_are_those_of_the_model_s_own_states(tokens: TokenReader, pool: Pool) -> None:
    """Of whole responses and of their steps, whatever is beside them in the batch."""
    steps = ("step_coe_c", "step_coe_c_normalised", "step_coe_r", "step_coe_r_normalised")
    found = {name: ESTIMATORS[name](tokens).score(pool) for name in ("coe_r", "coe_c", "coe_c_raw", *steps)}
    entry, sample = pool[0], pool[0].samples[0]
    ids = [*entry.prompt_ids, *sample.token_ids]
    with torch.no_grad():
        out = tokens.network(torch.tensor([ids]), output_hidden_states=True)
    states = torch.cat(out.hidden_states)
    start = len(entry.prompt_ids)
    means = states[:, start - 1 : -1].float().mean(1)
    assert found["coe_r"][0][0] == pytest.approx(chain_of_embedding(means).coe_r, abs=1e-5)
    assert found["coe_c"][0][0] == pytest.approx(chain_of_embedding(means).coe_c, rel=1e-5)
    raw = chain_of_embedding(means, normalise=False).coe_c
    assert found["coe_c_raw"][0][0] == pytest.approx(raw, rel=1e-5)
    logprob = out.logits[0, start - 1 : -1].log_softmax(-1).gather(1, torch.tensor([sample.token_ids]).T)[:, 0]
    expected: dict[str, list[float]] = {name: [] for name in steps}
    for a, b in tokens.steps(sample.token_ids, "auto"):
        chance, means = logprob[a:b].mean().exp().item(), states[:, start - 1 + a : start - 1 + b].mean(1)
        for normalise, ending in ((False, ""), (True, "_normalised")):
            step = chain_of_embedding(means, normalise=normalise)
            expected[f"step_coe_c{ending}"].append(math.sqrt(step.coe_c * chance))
            expected[f"step_coe_r{ending}"].append(step.coe_r)
    for name, values in expected.items():
        assert len(values) == 2
        assert found[name][0][0] == pytest.approx(np.mean(values), rel=1e-4, abs=1e-4), name


def test_all_criteria_of_tokens_cost_one_pass(tokens: TokenReader, pool: Pool) -> None:
    names = ("coe_c", "step_coe_c", "step_certainty", "step_entropy", "lowest_group_confidence", "min_logprob")
    passes: list[int] = []
    tokens.read(pool[:1])  # after which it is known whether the model can pack
    handle = tokens.network.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    try:
        estimators = [ESTIMATORS[name](tokens) for name in names]
        scores = [estimator.score(pool) for estimator in estimators]
        # A response that occurs twice is read once, and gives the same numbers.
        twice = replace(pool[0], samples=pool[0].samples * 2)
        assert estimators[-1].score([twice]) == [scores[-1][0] * 2]
    finally:
        handle.remove()
    assert len(passes) == 1
    assert all(math.isfinite(value) for rows in scores for row in rows for value in row)
    assert not any(estimator.is_probability for estimator in estimators)


def test_the_least_sure_stretch_is_that_of_the_function(tokens: TokenReader, pool: Pool) -> None:
    entry, sample = pool[0], pool[0].samples[0]
    ids = torch.tensor([[*entry.prompt_ids, *sample.token_ids]])
    with torch.no_grad():
        logits = tokens.network(ids).logits[0, len(entry.prompt_ids) - 1 : -1]
    sure = top_k_confidence(logits, 20)
    for window, lowest in ((4, 0.0), (4, 0.5), (2048, 0.0)):
        estimator = ESTIMATORS["lowest_group_confidence"](tokens, window=window, lowest=lowest)
        found, options = estimator.score([entry])[0][0], {"window": window, "share": lowest}
        assert found == pytest.approx(lowest_group_confidence(sure, **options), abs=1e-5)


def test_weights_are_those_of_the_recorded_votes(vectors: Vectors) -> None:
    for case in vectors("sasc_strategies")["cases"]:
        responses = case["responses"]
        spread, sure, steps = (
            np.array([response[key] for response in responses])
            for key in ("std_topk_entropy", "avg_certainty", "step_std_entropy")
        )
        found = {
            "w_std": masked_standardised_weights(-spread), "w_cert": masked_standardised_weights(sure),
            "w_double": masked_standardised_weights(-spread) * masked_standardised_weights(-steps),
        }  # fmt: skip
        answers = [response["extracted_answer"].removesuffix(".0") for response in responses]
        kept = spread <= np.quantile(spread, 0.8)
        for answer, votes in case["votes"].items():
            mine = np.array([one == answer for one in answers])
            for name, weights in found.items():
                assert weights[mine].sum() == pytest.approx(votes[name], abs=1e-6)
            assert found["w_std"][mine & kept].sum() == pytest.approx(case["combo_votes"].get(answer, 0.0), abs=1e-6)


def test_weights_are_standardised_within_a_question(tokens: TokenReader, pool: Pool) -> None:
    entry = pool[0]
    logprob = ESTIMATORS["mean_logprob"](tokens).score([entry])[0]
    spread = -np.array(tokens.scores([entry], lambda found: float(np.std(found.tokens.entropy.numpy())))[0])
    steps = -np.array(tokens.scores([entry], lambda found: _step_spread(found.tokens.entropy))[0])
    steady = ESTIMATORS["token_steadiness"](tokens).score([entry])[0]
    assert steady == pytest.approx(spread.tolist(), abs=1e-9)
    expected = {
        "sasc_std": np.exp(zscore(spread)), "sasc_certainty": np.exp(zscore(logprob)),
        "sasc_double": np.exp(zscore(spread) + zscore(steps)),
    }  # fmt: skip
    empty = replace(entry.samples[0], text="", token_ids=())
    for name, weights in expected.items():
        options = {"steps": "line"} if name == "sasc_double" else {}
        partly, failed = replace(entry, samples=(empty, *entry.samples)), replace(entry, samples=(empty, empty))
        found = ESTIMATORS[name](_TwoSteps(tokens), **options).score([entry, partly, failed])
        assert found[0] == pytest.approx(weights.tolist(), rel=1e-6)
        assert found[1:] == [[None, *found[0]], [None, None]]
    one = replace(entry, samples=entry.samples[:1])
    assert ESTIMATORS["sasc_std"](tokens).score([one, *pool[1:]])[0] == [1.0], "nothing to stand out from"


def _step_spread(entropy: torch.Tensor) -> float:
    return float(np.std([float(half.mean()) for half in entropy.split(max((len(entropy) + 1) // 2, 1))]))


class _TwoSteps:
    """A reader whose responses have two steps of about one length."""

    def __init__(self, tokens: TokenReader) -> None:
        self.scores = tokens.scores

    def steps(self, token_ids: tuple[int, ...], rule: str) -> list[Span]:
        size = max((len(token_ids) + 1) // 2, 1)
        return [Span(start, min(start + size, len(token_ids))) for start in range(0, len(token_ids), size)]


def test_steps_are_asked_one_by_one_and_the_last_is_p_true(engine: TransformersEngine, pool: Pool) -> None:
    entry = replace(pool[0], samples=pool[0].samples[:1])
    ids = entry.samples[0].token_ids
    ends = [*token_step_ends(engine.chat.tokenizer, ids, "sentence")[:-1], len(ids)]
    assert len(ends) == 3
    texts = [engine.chat.decode(ids[:end]) for end in ends]
    samples = [replace(entry.samples[0], text=text, token_ids=ids[:end]) for text, end in zip(texts, ends, strict=True)]
    (each,) = PTrue(engine, engine.chat).score([replace(entry, samples=tuple(samples))])
    for how, expected in (("mean", np.mean(each)), ("min", min(each)), ("last", each[-1])):
        found = StepSelfEvaluation(engine, engine.chat, steps="sentence", over_steps=how).score([entry])
        assert found[0][0] == pytest.approx(expected, abs=1e-5)


def test_none_where_there_is_no_step_or_no_room(engine: TransformersEngine, tokens: TokenReader, pool: Pool) -> None:
    whole = pool[0].samples[0]
    failed = Sample(whole.question_id, 1, 0, "", (), None, None, None)
    samples = (whole, failed, replace(failed, finish="stop"), replace(whole, text=whole.text * 40, token_ids=None))
    entry = replace(pool[0], samples=samples)
    for name in ("coe_c", "step_coe_c", "step_certainty", "lowest_group_confidence", "min_logprob", "sasc_double"):
        found = ESTIMATORS[name](tokens).score([entry])[0]
        assert [value is None for value in found] == [False, True, True, True], name
    found = StepSelfEvaluation(engine, engine.chat).score([entry])[0]
    assert [value is None for value in found] == [False, True, True, True]


def test_pieces_of_a_decoder_that_trims_its_start_are_those_of_the_whole() -> None:
    """As vocabularies of words do, whose first token loses its space."""
    words = [" a", " b", "c", " d"]
    assert token_pieces(lambda ids: "".join(words[i] for i in ids).strip(), [0, 1, 2, 3]) == ["a", " b", "c", " d"]


def test_settings_reach_those_that_take_them_and_the_origin(engine: TransformersEngine, tmp_path: Path) -> None:
    store = str(sample_store(engine, tmp_path / "store", num_questions=1).path)
    criteria = CriteriaSettings(steps="line", weight=0.0)
    run_score(["step_entropy", "coe_c"], store, criteria=criteria)
    with pytest.raises(ValueError, match=r"computed in the same way, but got .*weight"):
        run_score("step_entropy", store)
    for name, message in (("coe_c", "`criteria.steps`"), ("lowest_group_confidence", "`criteria.steps`")):
        with pytest.raises(ValueError, match=f"Expected {message} with an estimator that takes it"):
            run_score(name, store, criteria=criteria)
