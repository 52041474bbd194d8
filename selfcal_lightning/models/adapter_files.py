"""What the files of an adapter say of it: which tokens wake it, and what it changes. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from selfcal_lightning.model_files.fingerprints import weights_sha256
from selfcal_lightning.runtime.json_files import read_json_object

CONFIG_FILE = "adapter_config.json"
INVOCATION = "alora_invocation_tokens"


def invoked_by(query_ids: Sequence[int]) -> dict[str, Any]:
    """Return what makes of a PEFT configuration that of an adapter which these tokens wake.

    PEFT looks for their last occurrence in every row, and the adapter acts from its first token on. It stands in the
    file alone, not in the configuration of a model in training, which runs the queries of many rows as one row.
    """
    return {INVOCATION: list(query_ids)}


def read_invocation_ids(adapter: str) -> tuple[int, ...] | None:
    """Return the tokens that wake an activated adapter; None for one that is always awake.

    Args:
        adapter: Folder or hub name of a PEFT adapter.
    """
    if Path(adapter).is_dir():
        file = Path(adapter) / CONFIG_FILE
        config = read_json_object(file, what="the configuration of an adapter") if file.is_file() else {}
    else:
        from peft import PeftConfig

        config = PeftConfig.from_pretrained(adapter).to_dict()
    ids = config.get(INVOCATION)
    return None if ids is None else tuple(ids)


def adapter_identity(adapter: str | None) -> dict[str, str | None]:
    """Return the hash of an adapter, under the name that says what it changes.

    ``adapter_sha256`` changes texts and confidences. ``activated_adapter_sha256`` changes confidences alone: texts and
    their log-probabilities are the base model's. It is left out where there is none, so that what was written before
    there were activated adapters is still found.
    """
    if adapter is None:
        return {"adapter_sha256": None}
    digest = weights_sha256(adapter)
    if read_invocation_ids(adapter) is None:
        return {"adapter_sha256": digest}
    return {"adapter_sha256": None, "activated_adapter_sha256": digest}
