"""Key steps on disk: ``key_steps.json`` beside the selection that they belong to, so that a stopped run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from selfcal_lightning.errors import InputError
from selfcal_lightning.selection.files import Selection
from selfcal_lightning.selection.key_steps.base import EMPTY, Extracted, KeyStep
from selfcal_lightning.selection.loading import digest_of
from selfcal_lightning.store.records import read_record, write_record

FILE = "key_steps.json"


@dataclass(frozen=True)
class KeySteps:
    """The key steps of a selection.

    Attributes:
        extractor: What found them.
        selection_sha256: Digest of the selection's rows.
        found: What was found, one a response.
    """

    extractor: Mapping[str, Any]
    selection_sha256: str
    found: tuple[Extracted, ...]

    @property
    def by_response(self) -> dict[tuple[str, int, int], Extracted]:
        """What was found, by question, round and response."""
        return {one.key: one for one in self.found}

    @property
    def rates(self) -> dict[str, Any]:
        """How many responses gave steps, how many needed a repair or gave none, and what the checks left out."""
        reasons = Counter(one.reason for one in self.found if one.reason is not None)
        steps = [step for one in self.found for step in one.steps or ()]
        forms = sum(len(step.forms) for step in steps)
        left_out = sum(one.ungrounded for one in self.found)
        leaking = sum(one.leaking for one in self.found)
        checked = [step.checked for step in steps if step.checked is not None]
        return {
            "responses": len(self.found),
            "with_steps": sum(one.steps is not None for one in self.found),
            "repaired": sum(one.repaired and one.steps is not None for one in self.found),
            "empty": reasons[EMPTY],
            "without_steps": dict(sorted(reasons.items())),
            "steps": len(steps),
            "forms": forms,
            "ungrounded_forms": left_out,
            "grounded": forms / (forms + left_out) if forms + left_out else None,
            "leaking_forms": leaking,
            "checked_steps": len(checked),
            "true_steps": sum(checked),
        }


def read_key_steps(selection: Selection) -> KeySteps | None:
    """Return the key steps of a selection; None where none were extracted.

    Raises:
        InputError: They belong to another selection.
    """
    file = selection.path / FILE
    if not file.exists():
        return None
    content = read_record(file, dict)
    if content["selection_sha256"] != selection.sha256:
        raise InputError(
            f"Expected {file} to belong to the selection beside it, but got steps of an earlier one. Run "
            "`selfcal extract-steps --overwrite true`."
        )
    return KeySteps(content["extractor"], content["selection_sha256"], tuple(map(_from_json, content["found"])))


def check_extractor(selection: Selection, extractor: Mapping[str, Any], *, overwrite: bool) -> list[Extracted]:
    """Return what the same extractor found before.

    Raises:
        InputError: Another one did, and it may not be replaced.
    """
    if overwrite:
        return []
    known = read_key_steps(selection)
    if known is None:
        return []
    if digest_of(dict(known.extractor)) != digest_of(dict(extractor)):
        raise InputError(
            f"Expected the steps in {selection.path / FILE} to have been extracted in the same way, but got another "
            f"{'backend' if known.extractor['backend'] != extractor['backend'] else 'model or prompt'}. Set "
            "`overwrite` to replace them."
        )
    return list(known.found)


def write_key_steps(selection: Selection, extractor: Mapping[str, Any], found: Iterable[Extracted]) -> KeySteps:
    """Write what was found, in the order of questions, with its rates."""
    steps = KeySteps(extractor, selection.sha256, tuple(sorted(found, key=lambda one: one.key)))
    content = {
        "extractor": dict(extractor),
        "selection_sha256": steps.selection_sha256,
        "rates": steps.rates,
        "found": [asdict(one) for one in steps.found],
    }
    write_record(selection.path / FILE, content)
    return steps


def _from_json(content: Mapping[str, Any]) -> Extracted:
    steps = content["steps"]
    made = (
        None
        if steps is None
        else tuple(
            KeyStep(tuple(step["forms"]), None if step["span"] is None else tuple(step["span"]), step["checked"])
            for step in steps
        )
    )
    return Extracted(**{**content, "steps": made})
