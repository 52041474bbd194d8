"""Confidences by agreement, against the figures of uqlm and lm-polygraph on the same inputs."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from selfcal_lightning.confidence import agreement
from selfcal_lightning.confidence.estimators import ResponseConsistency
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.records import Question, QuestionSamples, Sample


def pool(answers: list[str | None], logprobs: list | None = None, name: str = "q") -> list[QuestionSamples]:
    samples = [
        Sample(name, i, 0, f"It is {answer}.", tuple(range(len(row))), "stop", answer, None, logprob=sum(row))
        for i, (answer, row) in enumerate(zip(answers, logprobs or [[-0.5]] * len(answers), strict=True))
    ]
    return [QuestionSamples(Question(name, "local_text", (), None, "Who?"), tuple(samples), "test")]


@pytest.mark.parametrize(
    ("answers", "negentropy"),
    [  # uqlm 0.6.7: 1 - normalize_entropy(compute_semantic_entropy(...), n - 1), discrete probabilities
        (["7", "7", "8", "7"], 0.5943609377704335),
        (["a", "b", "c"], 0.0),
        (["x", "x"], 1.0),
        (["1", "2", "1", "2", "3", "3", "3", "4"], 0.36478697925681114),
    ],
)
def test_semantic_entropy_is_that_of_uqlm(answers: list[str | None], negentropy: float) -> None:
    (found,) = agreement.SemanticEntropy().score(pool(answers))
    assert found == pytest.approx([negentropy] * len(answers), abs=1e-12)
    (shares,) = agreement.SemanticShare().score(pool(answers))
    assert shares == [answers.count(answer) / len(answers) for answer in answers]


@pytest.mark.parametrize(
    ("others", "tokens", "uncertainty"),
    [  # lm-polygraph 0.7.0: CocoaPPL with similarities 1 of the same answer and 0 of another
        (["7", "8", "7"], [-0.1, -0.2], 0.05),
        (["8", "9", "8"], [-0.5, -0.25, -0.75], 0.5),
    ],
)
def test_cocoa_is_that_of_lm_polygraph(others: list[str], tokens: list[float], uncertainty: float) -> None:
    (found,) = agreement.Cocoa().score(pool(["7", *others], [tokens, [-1.0], [-1.0], [-1.0]]))
    assert found[0] == pytest.approx(-uncertainty)


def test_unreadable_and_lone_responses_have_no_agreement() -> None:
    assert agreement.SemanticShare().score(pool([None, "7"])) == [[None, 0.5]]
    assert agreement.SemanticEntropy().score(pool([None, None])) == [[pytest.approx(0.0)] * 2]
    assert agreement.SemanticEntropy().score(pool(["7"])) == agreement.Cocoa().score(pool(["7"])) == [[None]]
    (entry,) = pool(["7", "7", "8", "9"])
    entry = replace(entry, samples=tuple(replace(s, text=s.text if s.index < 2 else " ") for s in entry.samples))
    found = [
        kind(entailment=lambda pairs: [True] * len(pairs)).score([entry])[0]
        for kind in (agreement.SemanticShare, agreement.Cocoa)
    ]
    assert found == [[0.5, 0.5, None, None], [pytest.approx(-0.5 * 2 / 3)] * 2 + [None] * 2]
    assert agreement.hybrid(["7", "7", "8"], [0.8, 0.6, 1.0]) == [0.85, 0.55, 0.75]
    assert agreement.hybrid(["7"], [0.9]) == agreement.hybrid([None, "7"], [0.9, None])[:1] == [None]


def test_meanings_are_compared_both_ways_with_the_first_of_each_cluster() -> None:
    asked: list[tuple[str, str]] = []
    follows = {("Paris", "France"), ("Paris", "the capital"), ("the capital", "Paris")}

    def entails(pairs: list[tuple[str, str]]) -> list[bool]:
        asked.extend(pairs)
        return [pair in follows for pair in pairs]

    texts = ["Paris", "France", "the capital", "Paris", "France"]
    assert agreement.meaning_clusters(texts, entails) == [0, 1, 0, 0, 1]
    assert len(asked) == 2 + 4  # "the capital" with two clusters; equal texts are not asked about


def make_classifier(folder: Path, names: list[str], order: list[int]) -> None:
    """A random classifier, whose label ``i`` has the name and the weights of ``order[i]``."""
    words = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *"abcdefgh"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106 - no password
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    PreTrainedTokenizerFast(tokenizer_object=plain, **special).save_pretrained(folder)
    torch.manual_seed(0)
    labels = {i: names[old] for i, old in enumerate(order)}
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=len(words), id2label=labels, initializer_range=1.0, **sizes)
    model = BertForSequenceClassification(config)
    model.classifier.weight.data.normal_()
    model.classifier.weight.data = model.classifier.weight.data[order]
    model.save_pretrained(folder)


def test_the_entailment_label_is_found_by_name(tmp_path: Path) -> None:
    names = ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]
    pairs = [(one, other) for one in "abcdefgh" for other in ("a b", "c", "d e f")]
    found = []
    for place, order in enumerate(([0, 1, 2], [2, 0, 1])):
        make_classifier(tmp_path / str(place), names, order)
        found.append(agreement.EntailmentModel(str(tmp_path / str(place)))(pairs))
    assert found[0] == found[1]
    assert 0 < sum(found[0]) < len(pairs)
    make_classifier(tmp_path / "none", ["no", "yes", "perhaps"], [0, 1, 2])
    with pytest.raises(InputError, match=r"none.*entailment.*perhaps"):
        agreement.EntailmentModel(str(tmp_path / "none"))


def test_the_formula_equals_the_vectors(vectors: Callable[[str], dict[str, Any]]) -> None:
    """The reference draws k samples and takes the share of the commonest; the draw is replayed here."""
    compared = 0
    for case in vectors("response_consistency")["cases"]:
        drawn = random.Random(case["seed"]).sample(case["parsed"], case["k"])
        commonest = case["out"]["most_common_answer"]
        scores = ResponseConsistency().score(pool(drawn))[0]
        if commonest is None:  # there None is an answer, here it has no confidence
            assert scores == [None] * len(drawn)
            continue
        assert drawn.count(commonest) == case["out"]["answer_frequency"], "the draw is not the reference's"
        assert max(score for score in scores if score is not None) == pytest.approx(case["out"]["confidence"])
        compared += 1
    assert compared >= 3


def test_by_hand() -> None:
    found = [*pool(["7", "7", "8", None]), *pool([None]), *pool([])]
    assert ResponseConsistency().score(found) == [[0.5, 0.5, 0.25, None], [None], []]
    assert ResponseConsistency(num_samples=9).score(found[:1]) == [[0.5, 0.5, 0.25, None]]
    # Of 4 readable equal answers and 4 unreadable, any draw of 4 gives the number of readable ones in it over 4.
    row = ResponseConsistency(num_samples=4).score(pool(["7", None] * 4))[0]
    assert row[1::2] == [None] * 4
    assert len(set(row[::2])) == 1
    assert row[0] in {0.0, 0.25, 0.5, 0.75, 1.0}


def test_the_draw_is_without_replacement_and_by_question() -> None:
    entries = pool([str(i) for i in range(8)])
    (row,) = ResponseConsistency(num_samples=3).score(entries)
    assert sorted(row) == [0.0] * 5 + [pytest.approx(1 / 3)] * 3
    assert ResponseConsistency(num_samples=3).score([*pool(["b"]), *entries])[1] == row, "alone or not"
    others = [ResponseConsistency(num_samples=3).score(pool([*"abcdefgh"], name=f"q{i}"))[0] for i in range(9)]
    assert len({tuple(other) for other in others}) > 1
    assert ResponseConsistency(num_samples=3, seed=1).score(entries)[0] != row
