"""Engines over the fake server, with a key and with waits of milliseconds, and what is asked of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.openai_models import CannedModel
from support.openai_server import FakeServer

from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.models.chat_format import ChatFormat
from selfcal_lightning.records import ConfidenceQuery, Message, Request, SamplingSettings

KEY_NAME = "SELFCAL_TEST_KEY"
KEY = "sk-very-secret-0123456789"
PLAIN = SamplingSettings(temperature=0.7, edt_scale=None, max_new_tokens=64)
EVENT = b'data: {"choices":[{"logprobs":{"tokens":["token_id:5","token_id:6"],"token_logprobs":[-1,-2]},' + (
    b'"finish_reason":null}]}\n\n'
)
Connect = Callable[..., OpenAIEngine]


@contextmanager
def connecting(server: FakeServer, model: str, chat: ChatFormat) -> Iterator[Connect]:
    """Make engines over ``server``; they are closed at the end."""
    engines: list[OpenAIEngine] = []

    def make(**options: object) -> OpenAIEngine:
        settings = {
            "base_url": server.base_url, "chat": chat, "api_key_env": KEY_NAME, "first_wait": 0.002,
            "longest_wait": 0.01, "max_retries": 3, "deadline": 20.0,
        }  # fmt: skip
        engines.append(OpenAIEngine(model, **{**settings, **options}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def over_server(base_url: str, model: str, **options: object) -> OpenAIEngine:
    """Return an engine over a server that runs the bundled model in float32."""
    settings = {
        "base_url": base_url, "weights": model, "dtype": "float32", "max_context": 256, "server_edt": True,
        "api_key_env": "SELFCAL_TEST_NO_KEY",
    }  # fmt: skip
    return OpenAIEngine(model, **{**settings, **options})


def canned(chat: ChatFormat) -> CannedModel:
    return CannedModel([*chat.response_ids("The answer is 8."), min(chat.end_of_turn_ids)])


def requests_of(chat: ChatFormat, count: int, query: ConfidenceQuery | None = None) -> list[Request]:
    prompt = chat.prompt_ids([Message("user", "What is 5 + 3?")])
    return [Request(str(j), prompt, PLAIN, seed=j, query=query) for j in range(count)]
