from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Script = Callable[[str], ModuleType]  # the fixture `script`
Vectors = Callable[[str], dict[str, Any]]  # the fixture `vectors`
ROOT = Path(__file__).resolve().parents[2]
