import contextlib
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.openai_engines import KEY, KEY_NAME

from selfcal_lightning.engines.openai import wire
from selfcal_lightning.engines.openai.engine import OpenAIEngine
from selfcal_lightning.engines.openai.transport import BackgroundJobs, check_base_url, presentable, read_key

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["token_id:5", "stop", -1.0, 10**400]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["choices", "logprobs", "tokens", "token_logprobs", "top_logprobs", "finish_reason", "data", "id",
                 "stop_reason", "max_model_len", "token_id:5"]
            ),
            inner,
        )
    ),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(reply=JSON)
def test_whatever_a_server_says_fails_one_request_at_most(reply: object) -> None:
    told = {"choices": [reply, {"logprobs": reply}, reply][:1]}
    for said in (reply, told, {"choices": [{"logprobs": reply, "finish_reason": None}]}, {"data": reply}):
        with contextlib.suppress(wire.ServerError):
            wire.SampleReader([7], max_tokens=8, vocabulary=100).take(said)
        with contextlib.suppress(wire.ServerError):
            wire.read_probabilities(said, [5])
        with contextlib.suppress(wire.ServerError, ValueError):
            wire.choose_model(said, wanted=None, default="m")


@pytest.mark.parametrize(
    ("url", "accepted"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://localhost/v1/", True),
        ("http://[::1]:8000/v1", True),
        ("https://api.example.com/v1", True),
        ("http://10.0.0.7:8000/v1", False),
        ("http://0.0.0.0:8000/v1", False),
        ("http://127.0.0.1.evil.example/v1", False),
        ("http://localhost.evil.example/v1", False),
        ("http://127.0.0.1@evil.example/v1", False),
        ("http://evil.example\\@127.0.0.1/v1", False),
        ("https://user:secret@host/v1", False),
        ("https://host/v1?api_key=secret", False),
        ("http://127.0.0.1:99999/v1", False),
        ("https://[1:2]:8000/v1", False),
        ("ftp://host/v1", False),
        ("", False),
    ],
)
def test_addresses(url: str, accepted: bool) -> None:
    if accepted:
        assert check_base_url(url) == url.rstrip("/")
        return
    with pytest.raises(ValueError, match="Expected `base_url` to") as caught:
        check_base_url(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("told", [True, -5, 0, "512", 1e9])
def test_a_limit_that_is_none_is_not_believed(told: object) -> None:
    assert wire.choose_model({"data": [{"id": "m", "max_model_len": told}]}, wanted=None, default="m") == ("m", None)


def test_an_adapter_has_the_limit_of_its_model() -> None:
    said = {"data": [{"id": "m", "max_model_len": 512}, {"id": "a", "max_model_len": None, "parent": "m"}]}
    assert wire.choose_model(said, wanted="a", default="m") == ("a", 512)


def test_plain_http_to_another_machine_is_the_users_choice() -> None:
    assert check_base_url("http://gpu-7:8000/v1", allow_http=True) == "http://gpu-7:8000/v1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "`max_batch` to be at least 1, but got 0"),
        ({"max_retries": -1}, "`max_retries` to be at least 0, but got -1"),
        ({"stream_interval": 0}, "`stream_interval` to be at least 1"),
        ({"deadline": 0.0}, "`deadline` to be above 0 seconds, but got 0.0"),
        ({"base_url": "http://gpu-7:8000/v1"}, "in the clear"),
        ({"adapter": "folder"}, "`served_model` to be the server's name for `adapter`"),
    ],
)
def test_bad_settings_are_named(tiny_model: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenAIEngine(tiny_model, **options)


def test_a_key_that_cannot_be_sent_is_refused_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_NAME, "secret\nX-Header: 1")
    with pytest.raises(ValueError, match=KEY_NAME) as caught:
        read_key(KEY_NAME)
    assert "secret" not in str(caught.value)
    monkeypatch.setenv(KEY_NAME, " \n")
    assert read_key(KEY_NAME) is None


def test_what_is_shown_is_short_printable_and_without_the_key() -> None:
    shown = presentable("\x1b[31m" + "x" * 795 + KEY + "\r\n" + "y" * 5000, key=KEY)
    assert shown.startswith("[31mxxx")
    assert len(shown) < 810
    assert "sk-" not in shown
    assert shown.isprintable()


def test_waits_are_what_the_server_says_or_double_up_to_a_limit() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    date = format_datetime(now + timedelta(seconds=90), usegmt=True)
    past = format_datetime(now - timedelta(days=1), usegmt=True)
    wanted = {"2": 2.0, "0.5": 0.5, "-3": 0.0, date: 90.0, past: 0.0}
    wanted |= dict.fromkeys([None, "soon", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT", "nan", "inf", ""])
    assert {value: wire.retry_after_seconds(value, now=now) for value in wanted} == wanted
    least = [wire.backoff_seconds(n, first=0.5, longest=3.0, chance=0.0) for n in range(5)]
    assert least == [0.25, 0.5, 1.0, 1.5, 1.5]
    assert wire.backoff_seconds(5000, first=0.5, longest=3.0, chance=0.999) < 3.0


def test_jobs_that_break_in_an_unforeseen_way_are_not_lost() -> None:
    async def breaks() -> None:
        raise KeyError("a bug")

    jobs = BackgroundJobs(limit=1)
    jobs.add([(7, breaks)])
    number, result, error = jobs.take()
    assert (number, result, repr(error)) == (7, None, "KeyError('a bug')")
    jobs.close()
    jobs.close()
