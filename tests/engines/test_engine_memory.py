from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from selfcal_lightning.callbacks.generation import engine_weights_bytes
from selfcal_lightning.engines.settings import memory_share

GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "limit", "share"),
    [
        (80, None, 0.9),  # an empty GPU: the usual bound
        (40, None, 0.47),  # .95 * .5, rounded down
        (40, 0.3, 0.3),
        (40, 0.8, 0.47),
    ],
)
def test_it_takes_what_is_free_up_to_the_limit(free: int, limit: float | None, share: float) -> None:
    assert memory_share(free * GIB, 80 * GIB, weights=GIB, limit=limit) == share


@pytest.mark.parametrize(("free", "limit", "told"), [(20, None, 0.9), (80, 0.2, 0.2)])
def test_too_little_names_the_setting(free: int, limit: float | None, told: float) -> None:
    # 16 GiB of 80 and 2 % for a cache: .22 are needed.
    assert memory_share(20 * GIB, 80 * GIB, weights=15 * GIB) == 0.23
    with pytest.raises(ValueError, match=rf"at least 0\.2[67] .* the limit is {told}\. .*`engine: transformers`"):
        memory_share(free * GIB, 80 * GIB, weights=20 * GIB - (0 if limit else 1), limit=limit)


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.float32, "auto", 2 * 100 + 8 * 10),  # vLLM halves what is stored in 32 bits
        (torch.float32, "float32", 4 * 100 + 8 * 10),
        (torch.float32, "bfloat16", 2 * 100 + 8 * 10),
        (torch.bfloat16, "auto", 2 * 100 + 8 * 10),
        (torch.bfloat16, "float32", 4 * 100 + 8 * 10),
    ],
)
def test_weights_are_counted_as_the_engine_holds_them(
    tmp_path: Path, stored: torch.dtype, asked: str, expected: int
) -> None:
    tensors = {"weight": torch.zeros(10, 10, dtype=stored), "steps": torch.zeros(10, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert engine_weights_bytes(str(tmp_path), revision=None, dtype=asked) == expected


def test_weights_of_other_names_count_as_they_lie_on_disk(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(10, dtype=torch.bfloat16)}, tmp_path / "consolidated.safetensors")
    size = (tmp_path / "consolidated.safetensors").stat().st_size
    assert engine_weights_bytes(str(tmp_path), revision=None, dtype="float32") == size
