"""``selfcal serve`` and ``selfcal batch``: answers with a calibrated confidence over the OpenAI protocol."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.core.progress import say
from selfcal_lightning.engines.opening import check_can_draw, check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.sampler import store_fingerprint
from selfcal_lightning.engines.settings import EngineOptions, EngineSettings
from selfcal_lightning.inference.choices import (
    CalibratedDefaults,
    check_sampled_alike,
    choose_strategy,
    load_fitted_files,
    promise_note,
    uncalibrated_note,
)
from selfcal_lightning.models.chat_format import DEFAULT_QUERY
from selfcal_lightning.models.folders import read_manifest, resolve_model
from selfcal_lightning.records import SamplingSettings
from selfcal_lightning.serving.settings import Limits

if TYPE_CHECKING:
    from selfcal_lightning.serving.app import Service

EXTRA = "serve"


@dataclass(frozen=True)
class ServiceSettings:
    """What both verbs take; the fields mean what the options of ``run_serve`` of these names do."""

    model: str
    engine: EngineOptions
    limits: Limits
    name: str | None = None
    task: str | None = None
    strategy: str | None = None
    strategy_args: Mapping[str, Any] = field(default_factory=dict)
    scorers: Sequence[str] | str = ()
    threshold_file: str | None = None
    sampling: SamplingSettings | None = None
    seed: int = 0
    query: str = DEFAULT_QUERY
    feedback_dir: str | None = None


def run_serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    task: str | None = None,
    strategy: str | None = None,
    strategy_args: dict[str, Any] | None = None,
    scorers: list[str] | str = [],  # noqa: B006 - never changed; shown as the default in the help
    threshold_file: str | None = None,
    limits: Limits = Limits(),
    sampling: SamplingSettings | None = None,
    seed: int = 0,
    query: str = DEFAULT_QUERY,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
    feedback_dir: str | None = None,
    api_key_env: str = "SELFCAL_API_KEY",
) -> None:
    """Answer clients of the OpenAI protocol, with a calibrated confidence in each answer.

    Each question is sampled as long as its confidence demands, within `limits`; a request may ask for a strategy and
    for less by an object `selfcal` in its body, or by the model's name (`NAME@adaptive_consistency:0.9`). SIGHUP reads
    the fitted confidences; SIGTERM finishes the requests in flight and ends.

    Args:
        model: Folder or hub name of the model, or "bundled".
        host: Address to listen at. One that other machines reach needs a key.
        port: Port to listen at.
        name: Name of the model for clients; null is the last part of `model`.
        task: How answers are read, such as local_number; null is free chat, where equal texts agree.
        strategy: Strategy of requests that name none; null is that of the threshold file, or early_stopping.
        strategy_args: Fields of that strategy, such as `--strategy_args.threshold 0.9`.
        scorers: Files of fitted confidences (`selfcal fit-confidence`). Those in `feedback_dir` are read too.
        threshold_file: File of a fitted threshold (`selfcal fit-threshold`).
        limits: Limits of the server; a request may ask for less.
        sampling: Sampling settings of requests that give none; null uses those of the calibration.
        seed: Seeds requests that bring no seed of their own.
        query: The confidence query; that of the calibration.
        engine: Which engine runs the model, and how.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter.
        feedback_dir: Folder for labels that clients send (`labels.jsonl`, a pool), and for confidences fitted on them.
        api_key_env: Environment variable with the key that clients must send; unset, this machine needs none.
    """
    for module in ("uvicorn", "starlette", "pydantic", "prometheus_client"):
        check_installed(module, extra=EXTRA)
    from selfcal_lightning.engines.openai.transport import read_key
    from selfcal_lightning.serving.app import is_loopback
    from selfcal_lightning.serving.running import serve

    key = read_key(api_key_env)
    if key is None and not is_loopback(host):
        raise InputError(f"Expected a key in ${api_key_env} for `host` {host!r}, which other machines reach.")
    settings = ServiceSettings(
        model, engine.of(revision=revision, adapter=adapter), limits, name, task, strategy, strategy_args or {},
        scorers, threshold_file, sampling, seed, query, feedback_dir,
    )  # fmt: skip
    service = open_service(settings, key=key)
    say(f"{service.model} answers at http://{host}:{port}/v1")
    serve(service, host=host, port=port)


def run_batch(
    model: str,
    input: str,
    output: str,
    name: str | None = None,
    task: str | None = None,
    strategy: str | None = None,
    strategy_args: dict[str, Any] | None = None,
    scorers: list[str] | str = [],  # noqa: B006 - never changed; shown as the default in the help
    threshold_file: str | None = None,
    limits: Limits = Limits(deadline_s=math.inf),
    sampling: SamplingSettings | None = None,
    seed: int = 0,
    query: str = DEFAULT_QUERY,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
) -> None:
    """Answer a file in OpenAI's batch format, each question with as few samples as its confidence allows.

    Answers are appended as they come, in any order; a request that is refused has its error in its own line. The same
    command continues after a kill, and answers nothing twice.

    Args:
        model: Folder or hub name of the model, or "bundled".
        input: File of requests: JSON lines with custom_id, method, url and body.
        output: File of answers.
        name: Name of the model in the requests; null is the last part of `model`.
        task: How answers are read, such as local_number; null is free chat, where equal texts agree.
        strategy: Decides when to stop sampling where a request names no strategy.
        strategy_args: Sets fields of that strategy.
        scorers: Files of fitted confidences (`selfcal fit-confidence`).
        threshold_file: File of a fitted threshold (`selfcal fit-threshold`).
        limits: Bounds what one request and the whole run may spend.
        sampling: How responses are drawn where a request does not say.
        seed: Seeds sampling.
        query: The confidence query.
        engine: Which engine runs the model, and how.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter.
    """
    for module in ("starlette", "pydantic", "prometheus_client"):
        check_installed(module, extra=EXTRA)
    from selfcal_lightning.serving.batch import read_requests, run_requests

    read_requests(Path(input))
    settings = ServiceSettings(
        model, engine.of(revision=revision, adapter=adapter), limits, name, task, strategy, strategy_args or {},
        scorers, threshold_file, sampling, seed, query,
    )  # fmt: skip
    service = open_service(settings)

    async def run() -> None:
        result = await run_requests(service, Path(input), Path(output))
        await service.desk.close(0.1)
        found = f" ({result.found:,} were there already)" if result.found else ""
        say(f"{result.answered:,} answered and {result.refused:,} refused{found}: {output}")

    asyncio.run(run())


def open_service(settings: ServiceSettings, *, key: str | None = None) -> Service:
    """Check everything that can be checked, then load the model."""
    from selfcal_lightning.inference.chat_source import CHAT_ARGS, VERBALIZED, ChatSource, served_name, shows_ids
    from selfcal_lightning.inference.sources import EngineSource
    from selfcal_lightning.serving.app import Service
    from selfcal_lightning.serving.desk import Desk
    from selfcal_lightning.serving.feedback import Feedback
    from selfcal_lightning.serving.replies import Calibration

    model, options = settings.model, settings.engine
    taught = CalibratedDefaults.of(model, options.adapter)
    sampling = taught.sampling_for(settings.sampling)
    if options.is_remote and settings.sampling is None and not options.engine_args.get("server_edt"):
        sampling = replace(sampling, edt_scale=None)  # a plain server has none
    check_can_draw(options, sampling)
    manifest_folder = Path(resolve_model(model) if options.adapter is None else options.adapter)
    manifest = read_manifest(manifest_folder) if manifest_folder.is_dir() else None
    given = [settings.scorers] if isinstance(settings.scorers, str) else list(settings.scorers)
    folder = None if settings.feedback_dir is None else Path(settings.feedback_dir)

    def load() -> Calibration:
        fitted = sorted(map(str, folder.glob("*.json"))) if folder is not None else []
        return Calibration(tuple(load_fitted_files([*given, *fitted], None)[0]), manifest)

    calibration, (_, fitted) = load(), load_fitted_files((), settings.threshold_file)
    fields = dict(settings.strategy_args)
    if settings.strategy is None and fitted is None and not calibration.scorers and not fields:
        fields |= taught.strategy_fields()
    strategy = settings.strategy
    check_engine(options, model) if not options.is_remote else check_installed("aiohttp", extra="openai")
    base_url = options.base_url or "http://127.0.0.1:8000/v1"
    if options.is_remote and not shows_ids(model, base_url, options):
        if fitted is not None:
            raise InputError("Expected no `threshold_file` for a server without token ids: its samples are not alike.")
        if strategy is None and not fields:  # two samples, each asked how likely it is right
            strategy, fields = "self_consistency", {"max_samples": 2}
        make = partial(ChatSource, served_name(model, options), base_url=base_url, max_batch=options.max_batch)
        own = {name: value for name, value in options.engine_args.items() if name in CHAT_ARGS}
        desk = Desk(partial(make, scorers=calibration.of_samples, **own), engine=None, chat=None, confidence=VERBALIZED)
    else:
        chosen = choose_strategy(strategy, fields, scorers=calibration.of_samples, fitted=fitted)
        notes = (uncalibrated_note(model, options.adapter, chosen), None if fitted is None else promise_note(fitted))
        for note in filter(None, notes):
            say(note)
        chat = load_chat(options, model, query=settings.query)
        engine = open_engine(options, model, chat=chat)
        if fitted is not None:
            check_sampled_alike(fitted, store_fingerprint(engine, chat, sampling, settings.seed))
        source = partial(EngineSource, engine, chat, sampling=sampling, seed=settings.seed, max_failures=2**31)
        desk = Desk(partial(source, scorers=calibration.of_samples), engine=engine, chat=chat, confidence=P_TRUE)
    return Service(
        settings.name or Path(model).name,
        desk,
        settings.limits,
        replace(sampling, max_new_tokens=min(sampling.max_new_tokens, settings.limits.max_new_tokens)),
        Feedback(folder),
        strategy=strategy,
        fields=fields,
        task=settings.task,
        seed=settings.seed,
        load=load,
        fitted=fitted,
        key=key,
        check_sampling=partial(check_can_draw, options),
        calibration=calibration,
    )
