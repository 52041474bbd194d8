from collections.abc import Iterator

import pytest
from support.openai_engines import KEY, KEY_NAME, Connect, canned, connecting
from support.openai_server import FakeServer

from selfcal_lightning.models.chat_format import ChatFormat


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, KEY)


@pytest.fixture
def server(chat: ChatFormat) -> Iterator[FakeServer]:
    server = FakeServer(canned(chat), chat.tokenizer, key=KEY)
    yield server
    server.close()


@pytest.fixture
def connect(server: FakeServer, tiny_model: str, chat: ChatFormat) -> Iterator[Connect]:
    with connecting(server, tiny_model, chat) as connect:
        yield connect
