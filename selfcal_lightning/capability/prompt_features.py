"""Reading the hidden states of questions into a folder; what is there already is not read again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, cast

from selfcal_lightning.capability.feature_folder import FeatureFolder, prompt_digest
from selfcal_lightning.capability.prompt_model import PromptModel
from selfcal_lightning.engines.hidden_states import LevelSettings, PromptReader, PromptStates
from selfcal_lightning.records import Question
from selfcal_lightning.runtime.progress import Progress

CHUNK_QUESTIONS = 512


def feature_origin(model: PromptModel, settings: LevelSettings) -> dict[str, Any]:
    """Return what the features of a model depend on, JSON-able: weights, adapter, template and levels."""
    levels = {**asdict(settings), "levels": None if settings.levels is None else list(settings.levels)}
    return {"model": model.identity, "prompt": model.prompt_identity, "states": levels}


def read_features(
    model: PromptModel, questions: Sequence[Question], folder: FeatureFolder, settings: LevelSettings
) -> PromptStates:
    """Return the hidden states of questions in their order; those that are not in ``folder`` are read into it.

    A run that was killed goes on: what one pass over ``CHUNK_QUESTIONS`` questions gave is on disk at once.

    Args:
        model: The model; it is loaded only where states are missing. Its engine must give hidden states
            (``engines.hidden_states.check_gives_hidden_states``).
        questions: The questions.
        folder: Where the states lie.
        settings: Which levels.

    Raises:
        InputError: The folder holds states of another model, template or level.
    """
    folder.open(feature_origin(model, settings))
    prompts = [model.chat.prompt_ids(question.messages) for question in questions]
    keys = [(question.id, prompt_digest(ids)) for question, ids in zip(questions, prompts, strict=True)]
    known = folder.keys()
    # Of about one length together, since shorter ones are padded.
    rows = sorted((row for row, key in enumerate(keys) if key not in known), key=lambda row: len(prompts[row]))
    if rows:
        reader = cast("PromptReader", model.open())
        with Progress(len(rows), label=f"Reading hidden states into {folder.path}", unit="prompts") as progress:
            for start in range(0, len(rows), CHUNK_QUESTIONS):
                chunk = rows[start : start + CHUNK_QUESTIONS]
                folder.write(
                    [keys[row] for row in chunk], reader.prompt_states([prompts[row] for row in chunk], settings)
                )
                progress.update(len(chunk))
    return folder.read(keys)
