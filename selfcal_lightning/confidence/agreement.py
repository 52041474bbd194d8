"""Confidences of models that show nothing but text: how far the responses to a question agree, and what they state."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from selfcal_lightning.confidence.base import MEAN_LOGPROB, STATED, VOTE_SHARE, confidence_of
from selfcal_lightning.confidence.verbalized import Verbalized
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.engines.base import Engine
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import QuestionSamples, Sample

Entails = Callable[[Sequence[tuple[str, str]]], list[bool]]
PAIRS_AT_ONCE = 32


class EntailmentModel:
    """Tells whether a text follows from another, by a classifier such as ``microsoft/deberta-large-mnli``."""

    def __init__(self, model: str) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        self._model = AutoModelForSequenceClassification.from_pretrained(
            model, trust_remote_code=False, use_safetensors=True
        ).eval()
        names = {int(number): str(name).lower() for number, name in self._model.config.id2label.items()}
        found = [number for number, name in names.items() if name.startswith("entail")]
        if len(found) != 1:  # models number their labels differently, so the name counts
            raise InputError(f"Expected one label of {model!r} to be named entailment, got {sorted(names.values())}.")
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


Clusters = Sequence[Any]  # of the responses to a question; None for one that is unreadable


@dataclass(frozen=True)
class Agreement:
    """An estimator that clusters the responses to a question: by answer, or by meaning with an entailment model."""

    name: str
    of_clusters: Callable[[Sequence[Sample], Clusters], list[float | None]]  # of the responses to a question
    is_probability: bool = True
    entails: Entails | None = None
    needs_pool: ClassVar[bool] = True
    reads: ClassVar[str] = "pool"

    def __call__(self, *, entailment: str | Entails | None = None) -> Self:
        """Return the estimator that clusters by the classifier in a folder or on the hub; without one, by answers."""
        return replace(self, entails=EntailmentModel(entailment) if isinstance(entailment, str) else entailment)

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the confidence of every sample, [question][sample]; None where there is nothing to compare."""
        return [self.of_clusters(entry.samples, self._clusters(entry)) for entry in pool]

    def _clusters(self, entry: QuestionSamples) -> Clusters:
        if self.entails is None:
            return [sample.answer for sample in entry.samples]
        texts = [sample.text for sample in entry.samples]
        spoken = [f"{entry.question.text} {text}" for text in texts if text.strip()]
        found = iter(meaning_clusters(spoken, self.entails))
        return [next(found) if text.strip() else None for text in texts]


def _shares(_: Sequence[Sample], clusters: Clusters) -> list[float | None]:
    sizes = Counter(clusters)
    return [None if cluster is None else sizes[cluster] / len(clusters) for cluster in clusters]


def _negentropies(_: Sequence[Sample], clusters: Clusters) -> list[float | None]:
    n = len(clusters)
    # An unreadable response means something that no other one means.
    sizes = Counter(("alone", i) if cluster is None else cluster for i, cluster in enumerate(clusters))
    entropy = math.fsum(-size / n * math.log(size / n) for size in sizes.values())
    return [None if n < 2 else max(1.0 - entropy / math.log(n), 0.0)] * n


def _cocoa(samples: Sequence[Sample], clusters: Clusters) -> list[float | None]:
    sizes, others = Counter(clusters), len(clusters) - 1
    values = [confidence_of(sample, MEAN_LOGPROB) for sample in samples]
    return [
        None if value is None or cluster is None or not others else value * (others + 1 - sizes[cluster]) / others
        for value, cluster in zip(values, clusters, strict=True)
    ]


# Share: of the responses that mean the same. Entropy: ``1 - H / log n`` over the clusters, one number for all n
# responses (Farquhar et al., Nature 2024, with discrete probabilities). CoCoA: mean log-probability times the share of
# the others that mean something else, at most 0 (Vashurin et al., arXiv 2502.04964, with perplexity).
SemanticShare = Agreement("semantic_share", _shares)
SemanticEntropy = Agreement("semantic_entropy", _negentropies)
Cocoa = Agreement("cocoa", _cocoa, is_probability=False)
OF_ANSWER = {STATED, VOTE_SHARE, Cocoa.name}  # what a server knows of an answer, but of no response alone


class TwoSampleHybrid(Verbalized):
    """``(v + a) / 2`` over a response and the next one: stated confidence v and agreement a, both in [0, 1].

    ``a`` is the share of the two that give the response's answer, ``v`` the mean of what those state in words. It works
    with a server that shows nothing but text; scale it by Platt where labels exist. Of ``num_samples``, this response
    is compared with those after it, wrapping around; other options are as in ``Verbalized`` (arXiv 2603.19118).
    """

    name: ClassVar[str] = "two_sample_hybrid"
    needs_pool: ClassVar[bool] = True

    def __init__(self, engine: Engine, chat: ChatFormat, *, num_samples: int = 2, **options: Any) -> None:
        super().__init__(engine, chat, **options)
        self._num_samples = num_samples

    def score(self, pool: Sequence[QuestionSamples]) -> list[list[float | None]]:
        """Return the hybrid of every sample; None without an answer or a stated confidence."""
        rows = zip(pool, super().score(pool), strict=True)
        return [hybrid([s.answer for s in entry.samples], row, num_samples=self._num_samples) for entry, row in rows]


def hybrid(
    answers: Sequence[str | None], stated: Sequence[float | None], *, num_samples: int = 2
) -> list[float | None]:
    """Return the hybrid of each response to a question, see :class:`TwoSampleHybrid`."""
    found: list[float | None] = []
    for i, answer in enumerate(answers):
        picked = [(i + step) % len(answers) for step in range(min(num_samples, len(answers)))]
        agreeing = [j for j in picked if answer is not None and answers[j] == answer]
        known = [value for j in agreeing if (value := stated[j]) is not None]
        value = None if not known or len(picked) < 2 else (sum(known) / len(known) + len(agreeing) / len(picked)) / 2
        found.append(value)
    return found
