"""Confidences of models that show nothing but text: how far the responses to a question agree, and what they state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from selfcal_lightning.confidence.base import MEAN_LOGPROB, confidence_of
from selfcal_lightning.confidence.verbalized import Verbalized
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.records import QuestionSamples

if TYPE_CHECKING:
    from selfcal_lightning.models.chat_format import ChatFormat

Entails = Callable[[Sequence[tuple[str, str]]], list[bool]]
PAIRS_AT_ONCE = 32


class EntailmentModel:
    """Tells whether a text follows from another, by a classifier such as ``microsoft/deberta-large-mnli``.

    The label is found by its name in the model's configuration, since models number their labels differently.
    """

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._model = AutoModelForSequenceClassification.from_pretrained(
            model, trust_remote_code=False, use_safetensors=True
        ).eval()
        names = {int(number): str(name).lower() for number, name in self._model.config.id2label.items()}
        found = [number for number, name in names.items() if name.startswith("entail")]
        if len(found) != 1:
            raise InputError(
                f"Expected one label of {model!r} to be named entailment, but got {sorted(names.values())}."
            )
        self._label = found[0]

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> list[bool]:
        """Return whether the second text of each pair follows from the first."""
        import torch

        verdicts: list[bool] = []
        for start in range(0, len(pairs), PAIRS_AT_ONCE):
            first, second = zip(*pairs[start : start + PAIRS_AT_ONCE], strict=True)
            batch = self._tokenizer(list(first), list(second), padding=True, truncation=True, return_tensors="pt")
            with torch.no_grad():
                verdicts += (self._model(**batch).logits.argmax(-1) == self._label).tolist()
        return verdicts


def meaning_clusters(texts: Sequence[str], entails: Entails) -> list[int]:
    """Return the cluster of each text: that of the first text before it which it entails and is entailed by.

    A text is compared with the first member of each cluster, not with every text (Kuhn et al., arXiv 2302.09664).

    Example:
        >>> meaning_clusters(["a", "b", "A"], lambda pairs: [one.lower() == other.lower() for one, other in pairs])
        [0, 1, 0]
    """
    first: list[str] = []
    clusters: list[int] = []
    for text in texts:
        equal = [i for i, other in enumerate(first) if other == text]
        if not equal and first:
            both = entails([pair for other in first for pair in ((other, text), (text, other))])
            equal = [i for i in range(len(first)) if both[2 * i] and both[2 * i + 1]]
        if not equal:
            first.append(text)
        clusters.append(equal[0] if equal else len(first) - 1)
    return clusters


class _Agreement(ABC):
    """Clusters of the responses to a question: by canonical answer, or by meaning where an entailment model is given.

    Args:
        entailment: Folder or hub name of a classifier with a label named entailment; None compares answers.
    """

    is_probability: ClassVar[bool] = True
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "pool"

    def __init__(self, *, entailment: str | Entails | None = None) -> None:
        self._entails = EntailmentModel(entailment) if isinstance(entailment, str) else entailment

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None where there is nothing to compare."""
        return [self.score_question(entry, self.clusters(entry)) for entry in pool]

    def clusters(self, entry: QuestionSamples) -> list[Any]:
        """Return the cluster of each response; None for one that is unreadable."""
        if self._entails is None:
            return [sample.answer for sample in entry.samples]
        return list(
            meaning_clusters([f"{entry.question.text} {sample.text}" for sample in entry.samples], self._entails)
        )

    @abstractmethod
    def score_question(self, entry: QuestionSamples, clusters: Sequence[Any]) -> list[float | None]:
        """Return the confidence of each response, given its cluster."""


class SemanticShare(_Agreement):
    """The share of the responses to a question that mean what a response means, itself included, in [0, 1]."""

    name: ClassVar[str] = "semantic_share"

    def score_question(self, entry: QuestionSamples, clusters: Sequence[Any]) -> list[float | None]:
        """Return the shares."""
        sizes = Counter(clusters)
        return [None if cluster is None else sizes[cluster] / len(clusters) for cluster in clusters]


class SemanticEntropy(_Agreement):
    """``1 - H / log n`` with H the entropy of the shares of n responses' meanings, in [0, 1]; one value a question.

    An unreadable response is a meaning of its own.

    Reference:
        Farquhar et al., Detecting hallucinations using semantic entropy, Nature 2024 (the discrete form).
    """

    name: ClassVar[str] = "semantic_entropy"

    def score_question(self, entry: QuestionSamples, clusters: Sequence[Any]) -> list[float | None]:
        """Return the value of the question for each of its responses."""
        n = len(clusters)
        sizes = Counter(("unreadable", i) if cluster is None else cluster for i, cluster in enumerate(clusters))
        entropy = math.fsum(-size / n * math.log(size / n) for size in sizes.values())
        value = None if n < 2 else max(1.0 - entropy / math.log(n), 0.0)
        return [value] * n


class Cocoa(_Agreement):
    """Confidence times consistency: mean log-probability times the share of others that mean something else; <= 0.

    Reference:
        Vashurin et al., CoCoA, arXiv 2502.04964 (with perplexity).
    """

    name: ClassVar[str] = "cocoa"
    is_probability: ClassVar[bool] = False

    def score_question(self, entry: QuestionSamples, clusters: Sequence[Any]) -> list[float | None]:
        """Return the products; None for a response without log-probability or without others."""
        sizes, others = Counter(clusters), len(clusters) - 1
        values = [confidence_of(sample, MEAN_LOGPROB) for sample in entry.samples]
        return [
            None if value is None or cluster is None or not others else value * (others + 1 - sizes[cluster]) / others
            for value, cluster in zip(values, clusters, strict=True)
        ]


class TwoSampleHybrid(Verbalized):
    """``(v + a) / 2`` over a response and the next one: stated confidence v and agreement a, both in [0, 1].

    ``a`` is the share of the two that give the response's answer, ``v`` the mean of what those state in words. It is
    what a server that gives text alone has to offer; scale it by Platt where labels exist.

    Args:
        engine: Who is asked what it states.
        chat: Chat format of its tokenizer.
        num_samples: Responses that are compared: this one and those after it, the first after the last.
        **options: As in ``Verbalized``.

    Reference:
        Del et al., How Uncertainty Estimation Scales with Sampling in Reasoning Models, arXiv 2603.19118.
    """

    name: ClassVar[str] = "two_sample_hybrid"
    needs_pool: ClassVar[bool] = True

    def __init__(self, engine: Engine, chat: ChatFormat, *, num_samples: int = 2, **options: Any) -> None:
        super().__init__(engine, chat, **options)
        self._num_samples = num_samples

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the hybrid of every sample, [question][sample]; None without an answer or a stated confidence."""
        stated = super().score(pool)
        return [
            hybrid([sample.answer for sample in entry.samples], row, num_samples=self._num_samples)
            for entry, row in zip(pool, stated, strict=True)
        ]


def hybrid(
    answers: Sequence[str | None], stated: Sequence[float | None], *, num_samples: int = 2
) -> list[float | None]:
    """Return the hybrid of each response to a question, see :class:`TwoSampleHybrid`.

    Example:
        >>> hybrid(["7", "7", "8"], [0.8, 0.6, 1.0])
        [0.85, 0.55, 0.75]
    """
    found: list[float | None] = []
    for i, answer in enumerate(answers):
        picked = [(i + step) % len(answers) for step in range(min(num_samples, len(answers)))]
        agreeing = [j for j in picked if answer is not None and answers[j] == answer]
        known = [value for j in agreeing if (value := stated[j]) is not None]
        value = None if not known or len(picked) < 2 else (sum(known) / len(known) + len(agreeing) / len(picked)) / 2
        found.append(value)
    return found
