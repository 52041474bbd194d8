"""The adapter that a round is sampled with, on disk before its first sample is drawn.

Layout beside the store's own files::

    adapters/round-001/         the adapter, its tokenizer and manifest, put there in one rename, never replaced
    adapters/round-001.ckpt     the trainer's checkpoint of the same moment

A run that is killed while it samples a round, and resumed, goes on with the adapter in that folder, whatever its own
weights have become.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selfcal_lightning.engines.transformers.model import MASKABLE_ATTENTION
from selfcal_lightning.errors import InputError
from selfcal_lightning.exports.writing import write_export
from selfcal_lightning.model_files.manifests import read_manifest
from selfcal_lightning.models.evaluation_mode import evaluation_mode
from selfcal_lightning.models.lora import adapter_difference, adapter_state, read_adapter_state, set_adapter_state
from selfcal_lightning.training.trained_modules import RoundModule

_LOG = logging.getLogger(__name__)


def adapter_folder(store_dir: str | Path, round: int) -> Path:
    """Return the folder of the adapter that ``round`` is sampled with."""
    return Path(store_dir) / "adapters" / f"round-{round:03d}"


def checkpoint_file(store_dir: str | Path, round: int) -> Path:
    """Return the trainer's checkpoint from right before ``round`` was sampled."""
    return Path(store_dir) / "adapters" / f"round-{round:03d}.ckpt"


def keep_adapter(module: RoundModule, store_dir: str | Path, *, round: int, training: str) -> Path:
    """Write the module's adapter as that of ``round``, unless it lies there; to be called by one process.

    What lies there is kept. It must be of this training: of the same weights, or (where arithmetic is not exact to the
    last bit, as on GPUs) of a run with the same settings, whose samples are then completed with *its* adapter.

    Args:
        module: The module at the end of an epoch.
        store_dir: Folder of the sample store.
        round: The round that will be sampled.
        training: What identifies the training, such as a hash of its settings.

    Raises:
        ValueError: The store holds the adapter of another training.
    """
    folder = adapter_folder(store_dir, round)
    if not folder.exists():
        return write_export(module, folder, store={"path": str(store_dir), "round": round, "training": training})
    difference = adapter_difference(module.model, folder)
    if difference == 0.0:
        return folder
    check_same_training(folder, round, training)
    _LOG.warning(
        "Round %d was begun with the adapter in %s; the weights that arrive there now differ from it by up to %.3g. "
        "The round is completed with the adapter on disk.",
        round,
        folder,
        difference,
    )
    return folder


def check_same_training(folder: Path, round: int, training: str) -> None:
    """Raise ValueError where the adapter of ``round`` in ``folder`` is of another training than ``training``."""
    manifest = read_manifest(folder)
    if manifest is None or manifest["store"]["training"] != training:
        raise InputError(
            f"Expected round {round} of the store to belong to this training, but got {folder}, the adapter of a "
            "training with other settings. Samples are never mixed: go back to those settings, or use another "
            "`store_dir`. To keep the samples of the base model, copy this store and take the later rounds out of the "
            "copy with `selfcal drop-rounds --store_dir COPY --first 1`."
        )


@contextmanager
def serving(module: RoundModule, folder: Path) -> Iterator[None]:
    """In the block the module's model is in evaluation mode, with the adapter of ``folder`` and plain attention.

    Afterwards it is as it was: its own adapter, the modes of all its parts, its attention implementation.
    """
    model = module.model
    own = None
    if adapter_difference(model, folder) != 0.0:
        own = adapter_state(model)
        set_adapter_state(model, read_adapter_state(folder))
    attention = model.config._attn_implementation
    if attention not in MASKABLE_ATTENTION:
        model.set_attn_implementation("sdpa")
    try:
        with evaluation_mode(model):
            yield
    finally:
        if attention not in MASKABLE_ATTENTION:
            model.set_attn_implementation(attention)
        if own is not None:
            set_adapter_state(model, own)
