"""The layer that understands models: what it holds it gives free, wherever it is stopped."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from seawall import Breaker, Guard, Retry, Timeout
from seawall.clients import _llm_transport as module
from seawall.clients.llm import TokenLimits, async_http_client, http_client, retryable
from seawall.testing import run_virtual, virtual_time
from tests.clients.support_llm import Vendor, breaks, refuses, streams_error
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
    """Cancel a call after so many turns of the loop; return whether it ended, asks, and charge."""

    async def main() -> tuple[bool, int, int]:
        vendor = Vendor(refuses(529), streams_error("overloaded_error"))
        guard = new_guard(
            Retry(on=retryable, backoff=0.0001),
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
        guard = new_guard(Retry(on=retryable))
        with http_client(guard, vendor.transport()) as http:
            return b"two" in http.post(URL, json=BODY).content


def test_an_error_instead_of_the_first_item(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that begins with an error is asked for again; not so if nobody looks."""
    assert answered_at_last()
    monkeypatch.setattr(module, "_status_of", lambda _: None)
    assert not answered_at_last()


def test_closed_twice_is_closed_once() -> None:
    """Reading to the end, closing, and closing again settle once, for the sync client too."""
    with virtual_time():
        vendor = Vendor()
        limits = TokenLimits(tokens="1000/week")
        guard = new_guard(Retry(on=retryable), Breaker(), limits)
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

        guard = new_guard(Retry(on=retryable))
        with http_client(guard, Transport()) as http:
            assert b"three" in http.post(URL, json=BODY).content
        assert (Broken.closed, vendor.asked) == (1, 1)


def test_what_may_be_sent_again() -> None:
    """What only asks is retried by POST; what makes something (a file, a batch) is not."""
    for path, asked in {"/v1/messages": 3, "/v1/embeddings": 3, "/v1/batches": 1}.items():
        with virtual_time():
            vendor = Vendor(*[refuses(500)] * 3)
            guard = new_guard(Retry(on=retryable))
            with http_client(guard, vendor.transport()) as http:
                assert http.post(f"http://v{path}", json={}).status_code == 500
            assert vendor.asked == asked
    with virtual_time():
        vendor = Vendor(breaks(httpx2.ReadError))
        with (
            http_client(
                new_guard(Retry(on=retryable)), vendor.transport(), repeatable=bool
            ) as http,
        ):
            assert http.post("http://v/v1/batches", json={}).status_code == 200


def test_a_limit_that_fails_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trouble with what a vendor says is logged; the answer is handed out."""

    def fails(*_args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(TokenLimits, "hear", fails)
    with virtual_time():
        vendor = Vendor()
        with http_client(new_guard(TokenLimits(tokens="1M/min")), vendor.transport()) as http:
            assert http.post(URL, json=BODY).status_code == 200
    assert "not understood" in caplog.text
