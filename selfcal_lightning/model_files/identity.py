"""Which base model is this? An identity that survives a move to another folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from selfcal_lightning.model_files.fingerprints import weights_sha256
from selfcal_lightning.model_files.locations import resolve_model
from selfcal_lightning.runtime.json_files import read_json_object

DIGESTS = ("config_sha256", "weights_sha256")
INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def base_model_identity(base_model: str, *, revision: str | None = None) -> dict[str, Any]:
    """Return ``{"model", "revision", "config_sha256", "weights_sha256"}`` of a folder or of a downloaded hub model."""
    from transformers.utils import cached_file

    place = resolve_model(base_model)
    config = read_json_object(
        cached_file(place, "config.json", revision=revision), what="the configuration of the base model"
    )
    return {
        "model": base_model,
        "revision": revision,
        "config_sha256": config_sha256(config),
        "weights_sha256": weights_sha256(place, revision=revision),
    }


def same_base_model(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two identities are of one model: by their digests, whatever the folder is called.

    Example:
        >>> a = {"model": "org/m", "revision": None, "config_sha256": "1", "weights_sha256": "2"}
        >>> same_base_model(a, {**a, "model": "/disk/m"}), same_base_model(a, {**a, "weights_sha256": "3"})
        (True, False)
    """
    return all(one[key] == other[key] for key in DIGESTS)


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a model's ``config.json``, without keys that do not change what the model computes."""
    kept = {key: value for key, value in config.items() if key not in INCIDENTAL}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
