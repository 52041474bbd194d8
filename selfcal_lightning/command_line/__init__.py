"""The command line around the verbs: parsing, the Trainer's verbs, first looks and plans."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(
    __name__,
    {
        "trainer_start": ["look_first", "short_help", "wants_short_help"],
        "verb_parser": ["VerbParser"],
    },
)
