"""The arithmetic of LoRA training: how many floating-point operations the tokens of a batch need.

A multiplication with its addition counts as two. For a decoder of L layers with hidden size h, intermediate size i,
a query width q = heads x head size, a key-value width k = key-value heads x head size, a vocabulary of V, and
adapters of rank r on the query and value projections:

- *Frozen weights*. A layer holds F = h q + 2 h k + q h + 3 h i of them (query, key and value, output, gated MLP). Each
  takes 2 operations a token in the forward pass and 2 in the backward pass, for the gradient of its input; its own
  gradient is never formed. Together 4 L F a token. (Full training would take 6.)
- *Output layer*. Frozen as well, 4 h V, but only at the positions whose logits a loss asks for.
- *Adapters*. A layer holds A = r (h + q) + r (h + k) weights, which take 2 operations forward, 2 for the gradient of
  the input and 2 for their own: 6 L A a token.
- *Attention*. A token that attends to n keys, itself included, takes 2 q n for its scores and 2 q n for the weighted
  sum of values, and twice that backward: 12 q a pair of token and key, in every layer.

Embedding look-ups, norms, rotations and softmaxes are left out, as is usual. What gradient checkpointing or a fused
attention computes again in the backward pass is not counted: it is a cost, not a use. So the utilisation of a machine
is these operations, over the seconds that were taken and over the machine's measured rate in matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from selfcal_lightning.training.batches import SSCBatch


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder with LoRA on its query and value projections; the letters are those of the module's text."""

    hidden: int
    intermediate: int
    layers: int
    query_width: int
    key_width: int
    vocab: int
    rank: int

    @classmethod
    def of(cls, size: Mapping[str, Any], rank: int) -> Shape:
        """Return the shape of a Llama configuration."""
        head = size["hidden_size"] // size["num_attention_heads"]
        return cls(
            hidden=size["hidden_size"],
            intermediate=size["intermediate_size"],
            layers=size["num_hidden_layers"],
            query_width=head * size["num_attention_heads"],
            key_width=head * size["num_key_value_heads"],
            vocab=size["vocab_size"],
            rank=rank,
        )

    @property
    def frozen_weights(self) -> int:
        """Weights of the linear layers within all blocks, L F."""
        attention = 2 * self.hidden * self.query_width + 2 * self.hidden * self.key_width
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def adapter_weights(self) -> int:
        """Weights of the adapters, L A."""
        return self.layers * self.rank * (2 * self.hidden + self.query_width + self.key_width)


@dataclass(frozen=True)
class Load:
    """What a batch asks for, padding left out."""

    tokens: int
    pairs: int
    logits: int

    def __add__(self, other: Load) -> Load:
        return Load(self.tokens + other.tokens, self.pairs + other.pairs, self.logits + other.logits)


def training_flops(shape: Shape, load: Load) -> int:
    """Return the operations of a forward and a backward pass."""
    frozen = 4 * shape.frozen_weights * load.tokens
    head = 4 * shape.hidden * shape.vocab * load.logits
    adapters = 6 * shape.adapter_weights * load.tokens
    attention = 12 * shape.query_width * shape.layers * load.pairs
    return frozen + head + adapters + attention


def causal_pairs(tokens: int) -> int:
    """Return the pairs of a sequence of its own."""
    return tokens * (tokens + 1) // 2


def batch_load(batch: SSCBatch) -> Load:
    """Return the load of the project's batch, packed or apart."""
    logits = batch.batch_size + len(batch.label_position)
    if not batch.trees:
        lengths = batch.attention_mask.sum(dim=1).tolist()
        return Load(sum(lengths), sum(map(causal_pairs, lengths)), logits)
    tokens = sum(tree.stop - tree.start for tree in batch.trees)
    pairs = sum(
        causal_pairs(tree.prompt) + sum(tree.prompt * branch + causal_pairs(branch) for branch in tree.branches)
        for tree in batch.trees
    )
    return Load(tokens, pairs, logits)
