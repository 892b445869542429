"""The vendors' own SDKs, over our HTTP client, against a vendor that speaks their dialects."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx
import httpx2
import openai
import pytest

from seawall import Breaker, Guard, RateLimited, Retry, Timeout, transient
from seawall.clients.llm import TokenLimits, async_http_client, http_client
from seawall.testing import run_virtual, virtual_time
from tests.clients.llm.support import HANG, Answer, Vendor, breaks, refuses, served, streams_error
from tests.support import let_pass, new_guard

HELLO: list[Any] = [{"role": "user", "content": "hello there"}]  # 3 tokens, and "user" is 1


def guard_of(limits: TokenLimits, **options: Any) -> Guard:
    """Return the usual stack around `limits`."""
    return new_guard(
        Retry(on=transient, attempts=4, backoff=0.5),
        Breaker(min_calls=50),
        limits,
        Timeout(30.0, sync="cooperative"),
        **options,
    )


def spent(guard: Guard) -> dict[str, int]:
    """Return what was taken of limits of 100 000 each."""
    limits = next(p for p in guard.snapshot()["policies"] if p["policy"] == "rate_limit")["limits"]
    return {name: 100_000 - limit["left"] for name, limit in limits.items()}


def wide() -> TokenLimits:
    """Return limits of 100 000 each, in so long a time that nothing comes back meanwhile."""
    rates = dict.fromkeys(("requests", "tokens", "input_tokens", "output_tokens"), "100k/week")
    return TokenLimits(**rates)  # type: ignore[arg-type]


def open_ai(http: Any) -> openai.AsyncOpenAI:
    """Return the SDK of one vendor."""
    return openai.AsyncOpenAI(http_client=http, max_retries=0, api_key="k", base_url="http://v/v1")


def claude(http: Any) -> anthropic.AsyncAnthropic:
    """Return the SDK of the other."""
    return anthropic.AsyncAnthropic(
        http_client=http, max_retries=0, api_key="k", base_url="http://v"
    )


async def chat(http: Any, **more: Any) -> str:
    """Ask one vendor; return the text."""
    answer = await open_ai(http).chat.completions.create(
        model="m", messages=HELLO, max_tokens=100, **more
    )
    return answer.choices[0].message.content or ""


async def chat_stream(http: Any, **more: Any) -> list[str]:
    """Ask one vendor for a stream, with its usage; return the pieces."""
    stream = await open_ai(http).chat.completions.create(
        model="m",
        messages=HELLO,
        max_tokens=100,
        stream=True,
        stream_options={"include_usage": True},
        **more,
    )
    return [item.choices[0].delta.content async for item in stream if item.choices]


async def message(http: Any) -> str:
    """Ask the other vendor; return the text."""
    answer = await claude(http).messages.create(model="m", messages=HELLO, max_tokens=100)
    return answer.content[0].text  # type: ignore[union-attr]


async def message_stream(http: Any) -> list[str]:
    """Ask the other vendor for a stream; return the pieces."""
    async with claude(http).messages.stream(model="m", messages=HELLO, max_tokens=100) as stream:
        return [text async for text in stream.text_stream]


def run(vendor: Vendor, guard_with: Callable[[], TokenLimits], main: Any) -> dict[str, int]:
    """Run `main(http)` in virtual time; return what was spent at its end."""

    async def all_of_it() -> dict[str, int]:
        guard = guard_of(guard_with())
        async with async_http_client(guard, vendor.transport()) as http:
            await main(http)
            assert vendor.opened == vendor.closed
            return spent(guard)

    return run_virtual(all_of_it())


def test_what_is_charged_is_what_the_vendors_counted() -> None:
    """By both SDKs, streamed or not, the sum of the usage is what the limits have given."""
    vendor = Vendor(used=(1234, 56))

    async def main(http: Any) -> None:
        assert await chat(http) == await message(http) == "one two three"
        assert await chat_stream(http) == await message_stream(http) == ["one ", "two ", "three"]

    used = {"input_tokens": 4 * 1234, "output_tokens": 4 * 56, "tokens": 4 * 1290}
    assert run(vendor, wide, main) == {"requests": 4, **used}


@pytest.mark.parametrize("ask", [chat_stream, message_stream])
def test_a_stream_is_retried_before_its_first_item(ask: Any) -> None:
    """529, a lost connection, and an error as the first event: all are over before an item."""
    vendor = Vendor(
        refuses(529, "overloaded_error"),
        breaks(httpx2.ReadError),
        streams_error("overloaded_error", after_ping=True),
    )

    async def main(http: Any) -> None:
        assert await ask(http) == ["one ", "two ", "three"]

    # What the lost connection has used is not known.
    lost = {"input_tokens": 4, "output_tokens": 100, "tokens": 104}
    used = {"input_tokens": 7, "output_tokens": 5, "tokens": 12}
    assert run(vendor, wide, main) == {"requests": 4, **{n: lost[n] + used[n] for n in used}}
    assert vendor.asked == 4


@pytest.mark.parametrize("ask", [chat_stream, message_stream])
def test_an_error_as_the_first_event_is_the_sdks_own(ask: Any) -> None:
    """When all attempts have ended so, the SDK raises what it raises for that status."""
    vendor = Vendor(*[streams_error("overloaded_error")] * 4)

    async def main(http: Any) -> None:
        with pytest.raises((openai.InternalServerError, anthropic.APIStatusError)) as raised:
            await ask(http)
        assert raised.value.status_code == 529

    assert run(vendor, wide, main)["tokens"] == 0
    assert vendor.asked == 4


def test_an_unknown_error_stays_in_its_stream() -> None:
    """An error without a recognizable status passes through unchanged."""
    vendor = Vendor(streams_error("something_new"))

    async def main(http: Any) -> None:
        with pytest.raises(openai.APIError):
            await chat_stream(http)

    run(vendor, wide, main)
    assert vendor.asked == 1


def test_never_after_the_first_item() -> None:
    """A stream that breaks off later is not begun again, and its estimate stays."""

    def breaks_off(path: str, body: dict[str, Any]) -> Answer:
        whole = Vendor().answer(path, json.dumps(body).encode(), {})
        return whole._replace(chunks=[*whole.chunks[:2], b"data: nonsense\n\n"])

    vendor = Vendor(breaks_off)

    async def main(http: Any) -> None:
        with pytest.raises(ValueError, match="Expecting value"):
            await chat_stream(http)

    assert run(vendor, wide, main)["tokens"] == 104
    assert vendor.asked == 1


def test_a_stream_that_hangs_before_its_first_item() -> None:
    """The attempt's timeout runs to the first item: then the stream is closed, and asked again."""

    def hangs(_path: str, _body: dict[str, Any]) -> Answer:
        return Answer(200, {"content-type": "text/event-stream"}, [b": wait\n\n", HANG])

    vendor = Vendor(hangs, hangs)

    async def main(http: Any) -> None:
        assert await message_stream(http) == ["one ", "two ", "three"]

    run(vendor, wide, main)
    assert vendor.asked == 3


def test_the_vendor_says_no() -> None:
    """`x-should-retry: false` or a bad request is not retried; tokens are returned."""
    vendor = Vendor(refuses(529, x_should_retry="false"), refuses(400, "invalid_request_error"))

    async def main(http: Any) -> None:
        for _ in range(2):
            with pytest.raises(openai.APIStatusError):
                await chat(http)

    assert run(vendor, wide, main) == {
        "requests": 2,
        "tokens": 0,
        "input_tokens": 0,
        "output_tokens": 0,
    }
    assert vendor.asked == 2


def test_retry_after_is_waited_for() -> None:
    """All calls wait for as long as a vendor's 429 asks, the next ones too."""

    async def main() -> None:
        vendor = Vendor(refuses(429, "rate_limit_error", retry_after_ms="12500"))
        guard = guard_of(TokenLimits(requests="100/s", max_wait=60.0))
        async with async_http_client(guard, vendor.transport()) as http:
            began = guard.clock.now()
            first = asyncio.create_task(chat(http))
            await let_pass(1.0)
            assert vendor.asked == 1
            await chat(http)
            assert guard.clock.now() - began >= 12.5
            await first
        assert vendor.asked == 3

    run_virtual(main())


def test_limits_hold_by_the_vendors_log() -> None:
    """However many ask at once, the vendor never sees more than its limits in any stretch."""

    async def main() -> None:
        guard = guard_of(TokenLimits(requests="600/min", tokens="2400/min", max_wait=600.0))
        clock, seen = guard.clock, []

        class Watched(Vendor):
            def answer(self, path: str, content: bytes, headers: dict[str, str]) -> Answer:
                seen.append(clock.now())
                return super().answer(path, content, headers)

        async with async_http_client(guard, Watched(used=(8, 72)).transport()) as http:
            asks = [chat, message, chat_stream, message_stream]
            await asyncio.gather(*(asks[n % 4](http) for n in range(60)))
        assert len(seen) == 60
        for first, begin in enumerate(seen):
            for last in range(first, len(seen)):
                tokens = (last - first + 1) * 80
                assert tokens <= 2400 + (seen[last] - begin) * 40 + 80

    run_virtual(main())


def test_headers_lower_the_budget() -> None:
    """What the vendor says is left is all that is asked of it, until it said it has more."""
    said = {
        "x_ratelimit_limit_requests": "60",
        "x_ratelimit_remaining_requests": "2",
        "x_ratelimit_reset_requests": "40s",
    }

    async def main() -> None:
        vendor = Vendor(**said)
        guard = guard_of(TokenLimits(requests="1000/min", tokens="1M/min"))
        async with async_http_client(guard, vendor.transport()) as http:
            await chat(http)
            vendor.headers = {}
            results = await asyncio.gather(*(chat(http) for _ in range(9)), return_exceptions=True)
            assert results.count("one two three") == 2
            refused = [r for r in results if isinstance(r, openai.APIConnectionError)]
            assert len(refused) == 7
            assert isinstance(refused[0].__cause__, RateLimited)
            assert refused[0].__cause__.limit == "requests"
        assert vendor.asked == 3

    run_virtual(main())


def test_a_stream_that_is_closed_early_settles_once() -> None:
    """What went in is known by then; of what comes out the estimate stays."""
    vendor = Vendor(used=(1234, 56))

    async def main(http: Any) -> None:
        async with claude(http).messages.stream(
            model="m", messages=HELLO, max_tokens=100
        ) as stream:
            async for _ in stream.text_stream:
                break
        await stream.close()

    used = {"input_tokens": 1234, "output_tokens": 100, "tokens": 104}
    assert run(vendor, wide, main) == {"requests": 1, **used}


def test_a_cancelled_stream_gives_everything_free() -> None:
    """Who is cancelled between two items leaves no stream open, and an estimate that stays."""
    vendor = Vendor()

    async def main(http: Any) -> None:
        stream = await open_ai(http).chat.completions.create(
            model="m", messages=HELLO, max_tokens=100, stream=True
        )

        async def read() -> None:
            async with stream:
                async for _ in stream:
                    await asyncio.get_running_loop().create_future()

        task = asyncio.create_task(read())
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert run(vendor, wide, main)["tokens"] == 104


def test_never_sent_never_charged() -> None:
    """No connection, no charge: neither a request nor tokens."""
    vendor = Vendor(*[breaks(httpx2.ConnectError)] * 4)

    async def main(http: Any) -> None:
        with pytest.raises(openai.APIConnectionError):
            await chat(http)

    assert set(run(vendor, wide, main).values()) == {0}
    assert vendor.asked == 4


def test_an_sdk_that_retries_too(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once that attempts multiply; nothing of it is said without reason."""
    vendor = Vendor(*[refuses(500)] * 2)

    async def main() -> None:
        guard = new_guard(wide())
        async with async_http_client(guard, vendor.transport()) as http:
            sdk = open_ai(http)
            await sdk.with_options(max_retries=2).chat.completions.create(
                model="m", messages=HELLO, max_tokens=1
            )
            await chat(http, extra_headers={"x-stainless-retry-count": "1"})

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    assert [record.getMessage().count("max_retries=0") for record in caplog.records] == [1]


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
def test_plain_clients_of_both_libraries(library: Any) -> None:
    """The client is of the library that is asked for, and an answer goes by byte for byte."""
    module: Any = {"httpx": httpx, "httpx2": httpx2}[library]
    vendor = Vendor()
    body = {"messages": HELLO, "stream": True, "max_tokens": 10}
    with virtual_time():
        guard = guard_of(wide())
        with http_client(guard, vendor.transport(module), library=library) as http:
            assert isinstance(http, module.Client)
            answer = http.post("http://v/v1/messages", json=body)
            whole = Vendor().answer("/v1/messages", json.dumps(body).encode(), {})
            assert answer.content == b"".join(whole.chunks)
        assert spent(guard)["tokens"] == 12
        assert "seawall-attempt" not in vendor.log[0][2]


@pytest.fixture
def server() -> Iterator[tuple[str, Vendor]]:
    """Serve a vendor over a socket, packed where that is accepted."""
    vendor = Vendor(refuses(503), used=(1234, 56))
    with served(vendor, packed=True) as url:
        yield url, vendor


def test_sync_sdks_over_a_socket(server: tuple[str, Vendor]) -> None:
    """The blocking SDKs, real sockets and packed answers: retried, and charged what was used."""
    url, vendor = server
    guard = new_guard(Retry(on=transient, backoff=0.001), wide())
    with http_client(guard) as http:
        first = openai.OpenAI(http_client=http, max_retries=0, api_key="k", base_url=f"{url}/v1")
        other = anthropic.Anthropic(http_client=http, max_retries=0, api_key="k", base_url=url)
        answer = first.chat.completions.create(model="m", messages=HELLO, max_tokens=100)
        assert answer.choices[0].message.content == "one two three"
        with other.messages.stream(model="m", messages=HELLO, max_tokens=100) as stream:
            assert list(stream.text_stream) == ["one ", "two ", "three"]
        other.messages.create(model="m", messages=HELLO, max_tokens=100)
    assert vendor.asked == 4
    # The 503 keeps its estimate: nobody knows.
    assert spent(guard) == {
        "requests": 4,
        "tokens": 3 * 1290 + 104,
        "input_tokens": 3 * 1234 + 4,
        "output_tokens": 3 * 56 + 100,
    }
    assert {headers["accept-encoding"] for _, _, headers in vendor.log} == {"gzip, deflate"}


def test_a_proxy_is_behind_the_guard(
    server: tuple[str, Vendor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a proxy that is named, or of the environment, requests are guarded all the same."""
    url, vendor = server
    for name in ("http_proxy", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    guard = new_guard(Retry(on=transient, backoff=0.001), wide())

    def ask(to: str = "http://api.vendor.test", **options: Any) -> int:
        before = vendor.asked
        with http_client(guard, **options) as http:
            answer = http.post(f"{to}/v1/messages", json={"messages": HELLO, "max_tokens": 100})
        assert answer.status_code == 200
        return vendor.asked - before

    assert ask(proxy=url) == 2  # a 503, then an answer
    monkeypatch.setenv("HTTP_PROXY", url)
    vendor.steps.append(refuses(503))
    assert ask() == 2
    assert spent(guard)["requests"] == 4
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nobody is
    assert ask(url, trust_env=False) == 1
    monkeypatch.setenv("NO_PROXY", "example.com, 127.0.0.1")
    assert ask(url) == 1
    assert spent(guard)["requests"] == 6


def test_answers_that_are_there_at_once() -> None:
    """A transport that makes its answers of bytes is charged for them too, and its errors seen."""
    event = b'data: {"error": {"type": "overloaded_error"}}\n\n'
    answers = [
        httpx2.Response(200, content=event, headers={"content-type": "text/event-stream"}),
        httpx2.Response(200, json={"usage": {"input_tokens": 1, "output_tokens": 2}}),
    ]
    with virtual_time():
        guard = guard_of(wide())
        with http_client(guard, httpx2.MockTransport(lambda _: answers.pop(0))) as http:
            answer = http.post("http://v/v1/messages", json={"messages": HELLO})
            assert answer.json()["usage"]["input_tokens"] == 1
        assert spent(guard)["tokens"] == 3
