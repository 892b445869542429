"""The layer that understands models: what it holds it gives free, wherever it is stopped."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from seawall import Breaker, Guard, Retry, TimedOut, Timeout, transient
from seawall.clients.llm import TokenLimits, async_http_client, http_client
from seawall.clients.llm import transport as module
from seawall.clients.llm import usage as _llm_usage
from seawall.testing import run_virtual, virtual_time
from tests.clients.llm.support import Vendor, refuses, streams_error
from tests.support import new_guard

URL = "http://v/v1/chat/completions"
BODY = {
    "messages": [{"role": "user", "content": "hello there"}],
    "max_tokens": 96,
    "stream": True,
    "stream_options": {"include_usage": True},
}  # 100 tokens are guessed, 12 are used
LAST = 40
"""After so many turns of the loop all is over."""


def tokens_left(guard: Guard) -> int:
    """Return what is left of the limit of tokens."""
    return guard.snapshot()["policies"][2]["limits"]["tokens"]["left"]  # type: ignore[no-any-return]


def stopped_after(turns: int) -> tuple[bool, int, int]:
    """Cancel a call after that many loop turns; return whether it ended, asks, and charge."""

    async def main() -> tuple[bool, int, int]:
        vendor = Vendor(refuses(529), streams_error("overloaded_error"))
        guard = new_guard(
            Retry(on=transient, backoff=0.0001),
            Breaker(min_calls=50),
            TokenLimits(requests="9/week", tokens="1000/week", max_wait=1.0),
            Timeout(30.0),
        )

        async def ask() -> None:
            async with http.stream("POST", URL, json=BODY) as answer:
                async for _ in answer.aiter_raw():
                    pass

        async with async_http_client(guard, vendor.transport()) as http:
            task = asyncio.create_task(ask())
            for _ in range(turns):
                if task.done():
                    break
                await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, not time
            # Virtual time passes only when nothing else is left to do: pauses count as one turn.
            if turns >= LAST:
                await task
            ended = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert vendor.opened == vendor.closed
            assert guard.policies[2].waiting == 0  # type: ignore[attr-defined]
            return ended, vendor.asked, 1000 - tokens_left(guard)

    return run_virtual(main())


def test_cancelled_anywhere() -> None:
    """Wherever a call is cancelled, each body is closed, and what is charged is what it may be."""
    seen = set()
    for turns in range(LAST + 1):
        ended, asked, charge = stopped_after(turns)
        # Refused attempts give their tokens back; the one that was cancelled keeps its estimate.
        assert charge == 12 if ended else charge in (0, 12, 100)
        seen.add((ended, asked, charge))
    assert (False, 0, 0) in seen
    assert (True, 3, 12) in seen
    assert any(not ended and charge == 100 for ended, _, charge in seen)


def answered_at_last() -> bool:
    """Tell whether a stream that begins with an error twice is answered all the same."""
    with virtual_time():
        vendor = Vendor(streams_error("overloaded_error"), streams_error("api_error"))
        guard = new_guard(Retry(on=transient))
        with http_client(guard, vendor.transport()) as http:
            return b"two" in http.post(URL, json=BODY).content


def test_an_error_instead_of_the_first_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that begins with an error is retried; not so without the check."""
    assert answered_at_last()
    monkeypatch.setattr(module, "_status_of", lambda _: None)
    assert not answered_at_last()


def test_closed_twice_is_closed_once() -> None:
    """Reading to the end, closing, and closing again settle once, for the sync client too."""
    with virtual_time():
        vendor = Vendor()
        limits = TokenLimits(tokens="1000/week")
        guard = new_guard(Retry(on=transient), Breaker(), limits)
        with http_client(guard, vendor.transport()) as http:
            with http.stream("POST", URL, json=BODY) as answer:
                pieces = list(answer.iter_raw())
                answer.close()
            answer.close()
            assert b"".join(pieces).count(b"data:") == 5
            assert tokens_left(guard) == 988
            with http.stream("POST", URL, json=BODY) as answer:
                pass  # nobody has read it
            assert tokens_left(guard) == 888
        assert vendor.opened == vendor.closed == 2


def test_a_body_that_breaks_off_before_its_first_item() -> None:
    """It is closed, and the request is sent again."""

    class Broken(httpx2.SyncByteStream):
        closed = 0

        def __iter__(self) -> Any:
            yield b": wait\n\n"
            raise httpx2.ReadError("gone")

        def close(self) -> None:
            Broken.closed += 1

    with virtual_time():
        vendor = Vendor()
        inner = vendor.transport()
        first = [
            httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=Broken())
        ]

        class Transport(httpx2.BaseTransport):
            def handle_request(self, request: Any) -> Any:
                return first.pop() if first else inner.handle_request(request)

        guard = new_guard(Retry(on=transient))
        with http_client(guard, Transport()) as http:
            assert b"three" in http.post(URL, json=BODY).content
        assert (Broken.closed, vendor.asked) == (1, 1)


def test_a_limit_that_fails_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trouble with what a vendor says is logged; the answer is handed out."""

    def fails(*_args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(TokenLimits, "apply_headers", fails)
    with virtual_time():
        vendor = Vendor()
        with http_client(new_guard(TokenLimits(tokens="1M/min")), vendor.transport()) as http:
            assert http.post(URL, json=BODY).status_code == 200
    assert "not understood" in caplog.text


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_uses_no_tokens_is_charged_none(method: str) -> None:
    """To look at an answer again, to count tokens and to have a text judged costs a request."""
    paths = ["/responses/r"] if method == "GET" else ["/messages/count_tokens", "/moderations"]
    with virtual_time():
        vendor = Vendor(streams_error("overloaded_error"))
        guard = new_guard(Retry(on=transient), Breaker(), TokenLimits(tokens="1000/week"))
        with http_client(guard, vendor.transport()) as http:
            for path in paths:
                answer = http.request(method, f"http://v/v1{path}", json={**BODY, "stream": False})
                assert "usage" in answer.json()
        assert tokens_left(guard) == 1000
        assert vendor.asked == len(paths) + 1  # a stream of theirs is looked at all the same


def streams(chunks: Any) -> Any:
    """Return a transport that answers by a stream of these chunks."""

    class Body(httpx2.SyncByteStream):
        def __iter__(self) -> Any:
            return iter(chunks())

    class Transport(httpx2.BaseTransport):
        def handle_request(self, _request: Any) -> Any:
            kind = {"content-type": "text/event-stream"}
            return httpx2.Response(200, headers=kind, stream=Body())

    return Transport()


def keep_alives_until() -> float:
    """Return when a stream of keep-alives, for a minute, is given up by a timeout of 5 s."""
    with virtual_time() as clock:

        def chunks() -> Any:
            for _ in range(60):
                clock.advance(1.0)
                yield b": wait\n\n"

        guard = new_guard(Timeout(5.0, sync="cooperative"))
        with http_client(guard, streams(chunks)) as http, suppress(TimedOut):
            http.post(URL, json=BODY)
        return clock.now()


def test_keep_alives_do_not_outlive_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blocking call's timeout holds between stream pieces; not so without the check."""
    assert keep_alives_until() == 5.0
    monkeypatch.setattr(module, "check_deadline", lambda: None)
    assert keep_alives_until() == 60.0


def test_the_start_of_a_stream_takes_linear_time() -> None:
    """Eight times the pieces before the first event take about eight times the time."""

    def seconds(pieces: int) -> float:
        def chunks() -> Any:
            yield from [b":"] * pieces
            yield b"\n\ndata: [DONE]\n\n"

        took = []
        with http_client(new_guard(Retry(on=transient)), streams(chunks)) as http:
            for _ in range(3):
                began = time.thread_time()
                assert len(http.post(URL, json=BODY).content) > pieces
                took.append(time.thread_time() - began)
        return min(took)

    assert seconds(16_000) < 20 * seconds(2_000)


def read_ahead() -> int:
    """Return how much is read of a stream that never comes to its first event."""
    read = 0

    def chunks() -> Any:
        nonlocal read
        for _ in range(300):
            read += 1024
            yield b": wait\n\n" * 128

    with (
        http_client(new_guard(Retry(on=transient)), streams(chunks)) as http,
        http.stream("POST", URL, json=BODY),
    ):
        return read


def test_little_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no first event is passed on as it is; without a bound, all of it would be kept."""
    assert read_ahead() <= module.FIRST_EVENT + 2048
    for place in (module, _llm_usage):
        monkeypatch.setattr(place, "FIRST_EVENT", 1 << 30)
    assert read_ahead() == 300 * 1024


def test_a_redirect_uses_no_tokens() -> None:
    """Where an answer is elsewhere, the tokens are used there."""
    vendor = Vendor(refuses(307, location="/v1/messages"))
    with virtual_time():
        guard = new_guard(Retry(on=transient), Breaker(), TokenLimits(tokens="1000/week"))
        with http_client(guard, vendor.transport()) as http:
            http.post("http://v/v0/messages", json=BODY)
        assert tokens_left(guard) == 988
