"""The verb of test-time training."""

from __future__ import annotations

from selfcal_lightning.faces import face

__getattr__, __dir__, __all__ = face(__name__, {"adapt": ["run_adapt"]})
