"""Contexts of which one begins another, in one row: who sees whom, and how many tokens are read."""

import torch

from selfcal_lightning.engines.transformers.engine import TransformersEngine
from selfcal_lightning.engines.transformers.prefixes import NestedRow, nested_batch, nested_rows


def test_every_context_is_in_one_row() -> None:
    contexts = [(1,), (1, 2), (1, 3), (1, 3, 4), (2,), (1, 2), ()]
    rows = nested_rows(contexts)
    assert sorted(member for row in rows for member in row.members) == list(range(len(contexts)))
    for row in rows:
        trunk = contexts[row.members[0]]
        assert [contexts[member] for member in row.members] == [trunk[:end] for end in row.ends]
    assert len(rows) == 3, "(2,), (1, 3, 4) with (1, 3), and (1, 2) with all that begins it"


def test_a_tail_sees_its_own_context_alone() -> None:
    """A trunk a b c with tails of two tokens behind c and behind a, and a shorter row of one tail."""
    ids, positions, visible, last = nested_batch(
        [NestedRow((0, 1), (3, 1)), NestedRow((2,), (2,))], [(5, 6, 7), (5,), (8, 9)], (1, 2)
    )
    assert ids.tolist() == [[1, 2, 1, 2, 5, 6, 7], [1, 2, 0, 0, 8, 9, 0]]
    assert positions.tolist() == [[3, 4, 1, 2, 0, 1, 2], [2, 3, 0, 0, 0, 1, 0]]
    assert last.tolist() == [1, 3]
    first, second = visible[:, 0].int()
    assert first.tolist() == [
        [1, 0, 0, 0, 1, 1, 1],
        [1, 1, 0, 0, 1, 1, 1],
        [0, 0, 1, 0, 1, 0, 0],
        [0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 1, 1],
    ]
    assert second[[2, 3, 6]].tolist() == torch.eye(7, dtype=torch.int)[[2, 3, 6]].tolist(), "padding sees itself"
    assert second[1].tolist() == [1, 1, 0, 0, 1, 1, 0]


def test_a_response_is_read_once_for_all_its_steps(shallow_model: str) -> None:
    engine = TransformersEngine(shallow_model, device="cpu", dtype="float32")
    query, response = engine.chat.query.suffix_ids, tuple(range(20, 60))
    prompts = [(*response[:end], *query) for end in (10, 20, 30, 40)]
    sizes: list[torch.Size] = []
    embedding = engine._model.network.get_input_embeddings()
    with embedding.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape)):
        together = engine.next_token_probabilities(prompts, range(50))
    assert sizes == [(1, len(response) + 4 * len(query))]
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = engine.next_token_probabilities([prompt], range(50))
        torch.testing.assert_close(torch.tensor(row), torch.tensor(alone), atol=1e-6, rtol=0.0)
