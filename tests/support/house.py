from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Script = Callable[[str], ModuleType]  # the fixture `script`
FillStore = Callable[[Path], Path]  # the fixture `fill_store`
Vectors = Callable[[str], dict[str, Any]]  # the fixture `vectors`
ROOT = Path(__file__).resolve().parents[2]
