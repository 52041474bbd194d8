"""``selfcal serve`` and ``selfcal batch``: answers with a calibrated confidence over the OpenAI protocol."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from selfcal_lightning.confidence.base import P_TRUE
from selfcal_lightning.confidence.fusion import load_scorers
from selfcal_lightning.confidence.live import PROBE_AND_THRESHOLD, load_live_probe, open_live_probe
from selfcal_lightning.core.errors import InputError
from selfcal_lightning.core.imports import check_installed
from selfcal_lightning.core.progress import say
from selfcal_lightning.data.tasks.registry import get_task
from selfcal_lightning.engines.opening import check_can_draw, check_engine, load_chat, open_engine
from selfcal_lightning.engines.sampling.sampler import store_fingerprint
from selfcal_lightning.engines.settings import EngineSettings, check_gives_hidden_states
from selfcal_lightning.inference import choices
from selfcal_lightning.inference.thresholds import FittedThreshold
from selfcal_lightning.serving.settings import Limits, ServiceSettings

if TYPE_CHECKING:
    from selfcal_lightning.serving.app import Service

EXTRA = "serve"
LIBRARIES = ("uvicorn", "starlette", "pydantic", "prometheus_client")


def run_serve(
    model: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
    feedback_dir: str | None = None,
    api_key_env: str = "SELFCAL_API_KEY",
    **settings: Any,
) -> None:
    """Answer clients of the OpenAI protocol, with a calibrated confidence in each answer.

    Each question is sampled as long as its confidence demands, within `limits`; a request may ask for a strategy and
    for less by an object `selfcal` in its body, or by the model's name (`NAME@adaptive_consistency:0.9`). SIGHUP reads
    the fitted confidences; SIGTERM finishes the requests in flight and ends.

    Args:
        model: Folder or hub name of the model, or "bundled".
        host: Address to listen at. One that other machines reach needs a key.
        port: Port to listen at.
        engine: Which engine runs the model, and how.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter.
        feedback_dir: Folder for labels that clients send (`labels.jsonl`, a pool), and for confidences fitted on them,
            which are read as those of `scorers` are.
        api_key_env: Environment variable with the key that clients must send; unset, this machine needs none.
        settings: Fields of ``ServiceSettings``.
    """
    for module in LIBRARIES:
        check_installed(module, extra=EXTRA)
    from selfcal_lightning.engines.openai.transport import is_loopback, read_key
    from selfcal_lightning.serving.running import serve

    key = read_key(api_key_env)
    if key is None and not is_loopback(host):
        raise InputError(f"Expected a key in ${api_key_env} for `host` {host!r}, which other machines reach.")
    if not 1 <= port < 2**16:
        raise InputError(f"Expected `port` to lie in [1, {2**16 - 1}], but got {port}.")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise InputError(f"Expected to listen at {host}:{port}, but got: {error}. Name another `port`.") from None
    chosen = ServiceSettings(model, engine=engine.of(revision=revision, adapter=adapter), **settings)
    # By default it would end the process, which systemd does not take for a failure.
    signal.signal(signal.SIGHUP, lambda *_: say("SIGHUP comes too early: the model is being loaded. Send it again."))
    service = open_service(chosen, folder=None if feedback_dir is None else Path(feedback_dir), key=key)
    say(f"{service.model} answers at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
    serve(service, host=host, port=port)


def run_batch(
    model: str,
    input: str,
    output: str,
    engine: EngineSettings = EngineSettings(),
    revision: str | None = None,
    adapter: str | None = None,
    limits: Limits = Limits(deadline_s=math.inf),
    **settings: Any,
) -> None:
    """Answer a file in OpenAI's batch format, each question with as few samples as its confidence allows.

    Answers are appended as they come, in any order; a request that is refused has its error in its own line. The same
    command continues after a kill, and answers nothing twice.

    Args:
        model: Folder or hub name of the model, or "bundled".
        input: File of requests: JSON lines with custom_id, method, url and body.
        output: File of answers.
        engine: Which engine runs the model, and how.
        revision: Revision of the model on the hub.
        adapter: Folder of a LoRA adapter.
        limits: Bounds what one request and the whole run may spend.
        settings: Fields of ``ServiceSettings``.
    """
    for module in LIBRARIES:
        check_installed(module, extra=EXTRA)
    from selfcal_lightning.serving.batch import open_output, read_requests, run_requests

    requests = read_requests(Path(input))
    if Path(output).exists() and Path(output).samefile(input):
        raise InputError(f"Expected `output` to be another file than `input`, but got {output} for both.")
    options = engine.of(revision=revision, adapter=adapter)
    chosen = ServiceSettings(model, engine=options, limits=limits, **settings)
    file, done = open_output(Path(output), requests, settings=chosen.identity)
    service = open_service(chosen)
    said = asyncio.run(run_requests(service, requests, file, done, chosen.identity))
    say(f"{said}: {output}")


def open_service(settings: ServiceSettings, *, folder: Path | None = None, key: str | None = None) -> Service:
    """Check everything that can be checked, then load the model; ``folder`` is that of the feedback."""
    from selfcal_lightning.inference.chat_source import VERBALIZED, served_model
    from selfcal_lightning.inference.sources import EngineSource, check_live
    from selfcal_lightning.serving.app import Service
    from selfcal_lightning.serving.desk import Desk
    from selfcal_lightning.serving.feedback import Feedback
    from selfcal_lightning.serving.replies import Calibration

    model, options, strategy = settings.model, settings.engine, settings.strategy
    if settings.probe is not None:
        check_gives_hidden_states(options)
        if settings.threshold_file is not None:
            raise InputError(PROBE_AND_THRESHOLD)
    if options.is_remote and math.isfinite(limit := settings.limits.deadline_s):  # a longer wait would hold up others
        options = replace(options, engine_args={"deadline": limit, **options.engine_args})
    taught = choices.CalibratedDefaults.of(model, options.adapter)
    sampling = taught.sampling_for(settings.sampling)
    if options.is_remote and settings.sampling is None and not options.engine_args.get("server_edt"):
        sampling = replace(sampling, edt_scale=None)  # a plain server has none
    sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, settings.limits.max_new_tokens))
    check_can_draw(options, sampling)
    given = [settings.scorers] if isinstance(settings.scorers, str) else settings.scorers
    if settings.task is not None:
        get_task(settings.task)
    check_installed("aiohttp", extra="openai") if options.is_remote else check_engine(options, model)
    make, shown = served_model(model, options) if options.is_remote else (None, None)
    is_closed = shown is not None and not shown.ids

    def load() -> Calibration:
        learnt = [] if folder is None else sorted(map(str, folder.glob("*.json")))
        probe = None if settings.probe is None else load_live_probe(settings.probe, model, settings.query, options)
        live = None if probe is None else open_live_probe(probe, lambda: desk.tokens, lambda name: desk.asked(name))
        found = Calibration(tuple(load_scorers([*given, *learnt])), taught.manifest, live)
        if not is_closed:
            check_live(P_TRUE, found.of_samples)
        if fitted is not None:  # a scorer that was fitted again since is another one
            choices.choose_strategy(None, {}, scorers=found.of_samples, fitted=fitted)
        return found

    feedback = Feedback(folder)  # locks its file
    fitted = None if settings.threshold_file is None else FittedThreshold.load(settings.threshold_file)
    calibration = load()
    if fitted is not None and (wanted := fitted.fields["max_samples"]) > settings.limits.max_samples:
        raise InputError(
            f"Expected `limits.max_samples` to be at least {wanted}, which {fitted.name!r} was fitted with, but got "
            f"{settings.limits.max_samples}. Raise it, or fit a threshold with fewer samples."
        )
    fields = dict(settings.strategy_args)
    if strategy is None and fitted is None and not calibration.of_samples and not fields:
        fields |= taught.strategy_fields()
    if make is not None and is_closed:
        if fitted is not None:
            raise InputError("Expected no `threshold_file` for a server without token ids: its samples are not alike.")
        if strategy is None and not fields:  # two samples, each asked how likely it is right
            strategy, fields = "self_consistency", {"max_samples": 2}
        choices.choose_strategy(strategy, fields, scorers=calibration.of_samples)
        desk = Desk(make, confidence=VERBALIZED)
    else:
        chosen = choices.choose_strategy(strategy, fields, scorers=calibration.of_samples, fitted=fitted)
        for note in choices.notes_on(model, options.adapter, chosen, fitted):
            say(note)
        chat = load_chat(options, model, query=settings.query)
        engine = open_engine(options, model, chat=chat)
        if fitted is not None:
            choices.check_sampled_alike(fitted, store_fingerprint(engine, chat, sampling, settings.seed))
        source = partial(EngineSource, engine, chat, sampling=sampling, seed=settings.seed, max_failures=2**31)
        desk = Desk(source, engine=engine, chat=chat, confidence=P_TRUE)
    return Service(
        replace(settings, strategy=strategy, strategy_args=fields), desk, sampling=sampling,
        calibration=calibration, feedback=feedback, load=load, fitted=fitted, key=key,
    )  # fmt: skip
