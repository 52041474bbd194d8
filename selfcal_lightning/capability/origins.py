"""Whether kept values of questions may be used with the responses beside them."""

from __future__ import annotations

from collections.abc import Sequence

from selfcal_lightning.capability.estimators import RESPONSE_ESTIMATORS
from selfcal_lightning.capability.inputs import CapabilityPool
from selfcal_lightning.capability.score_files import FITTED_ON, TAUGHT
from selfcal_lightning.errors import InputError
from selfcal_lightning.store.question_annotations import QuestionAnnotation
from selfcal_lightning.store.shards import question_digest


def check_origins(read: CapabilityPool, names: Sequence[str]) -> None:
    """Raise InputError where a kept value is of another model than the responses, or of a probe fitted on them."""
    if read.fingerprint is None:
        return
    digests = {question_digest(question) for question in read.questions}
    sampled = read.fingerprint.as_json()["model"]
    for name in names:
        record = None if name in RESPONSE_ESTIMATORS else QuestionAnnotation(read.path, name).record
        if record is None:
            continue
        model = record.origin.get("model") or record.origin.get("states", {}).get("model", {})
        # An adapter that was taught about questions says how often the model without it is right.
        compared = ("weights_sha256",) if TAUGHT in record.origin else ("weights_sha256", "adapter_sha256")
        if None not in (sampled["weights_sha256"], model.get("weights_sha256")) and any(
            sampled[key] != model.get(key) for key in compared
        ):
            raise InputError(
                f"Expected the values {name!r} to be of the model that gave the responses in {read.path}, but got "
                "those of another. Score its questions anew with that model."
            )
        if shared := digests.intersection(record.origin.get(FITTED_ON, [])):
            raise InputError(
                f"Expected questions that {name!r} was not fitted on, but got {len(shared):,} of {len(digests):,} that "
                "it was: it would look better than it is. Name another `split`, or other questions."
            )
