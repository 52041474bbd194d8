from dataclasses import fields
from typing import Any

from selfcal_lightning.engines.settings import EngineSettings
from selfcal_lightning.records import SamplingSettings

OF_SAMPLING = {field.name for field in fields(SamplingSettings)}
OF_ENGINE = {field.name for field in fields(EngineSettings)} - {"name"}


def nested(**options: Any) -> dict[str, Any]:
    """Return ``options`` with those of sampling and of the engine, whose name is "engine", in their records."""
    sampling = {name: options.pop(name) for name in OF_SAMPLING & options.keys()}
    engine = {name: options.pop(name) for name in OF_ENGINE & options.keys()}
    if "engine" in options:
        engine["name"] = options.pop("engine")
    records = {"sampling": SamplingSettings(**sampling)} if sampling else {}
    return options | records | ({"engine": EngineSettings(**engine)} if engine else {})
