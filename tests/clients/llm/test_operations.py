"""What calls of language models used, took and cost: counted once, by model, as conventions say."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import CollectorRegistry

import seawall
from seawall import Bulkhead, Guard, Retry, Timeout, transient
from seawall.clients.llm import (
    Price,
    Usage,
    async_http_client,
    http_client,
    usage_of,
)
from seawall.clients.llm.operations import MOST_SERIES, OTHER, observers
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.sections import describe_row
from seawall.telemetry import export_opentelemetry, export_prometheus
from seawall.testing import run_virtual
from tests.clients.llm.support import HANG, Answer, Vendor, breaks, refuses, streams_error
from tests.support import let_pass, new_guard, nobody_else

CHAT, MESSAGES = "http://vendor/v1/chat/completions", "http://vendor/v1/messages"
USAGE = {"include_usage": True}


@pytest.fixture(autouse=True)
def _nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody_else(monkeypatch)


def _shown(name: str) -> list[dict[str, Any]]:
    (found,) = [one for one in seawall.snapshot()["llm"] if one["name"] == name]
    operations: list[dict[str, Any]] = found["operations"]
    return operations


def _ask(vendor: Vendor, url: str = CHAT, **body: Any) -> list[dict[str, Any]]:
    """Ask for `body` once, as a blocking client; return what was counted."""
    guard = new_guard(Bulkhead(5))
    with http_client(guard, vendor.transport(), prices={"m": Price(1.0, 2.0)}) as http:
        http.post(url, json={"model": "asked", **body})
        return _shown(guard.name)


def _amount(tally: dict[str, Any]) -> tuple[float, float]:
    return sum(tally["counts"]), tally["sum"]


# What is counted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("url", "provider", "went_in"), [(CHAT, "openai", 7), (MESSAGES, "anthropic", 1007)]
)
def test_tokens_and_models_are_those_of_the_answer(
    url: str, provider: str, went_in: int, *, stream: bool
):
    """Of both dialects, whole or streamed; what came from a cache went in, too."""
    (one,) = _ask(Vendor(used=(7, 5)), url, stream=stream, stream_options=USAGE)
    assert (one["operation"], one["provider"], one["error"]) == ("chat", provider, "")
    assert (one["request_model"], one["response_model"]) == ("asked", "m")
    assert _amount(one["input"]) == (1, went_in)
    assert _amount(one["output"]) == (1, 5)
    assert _amount(one["durations"])[0] == 1
    assert _amount(one["first_chunks"])[0] == stream


def test_tokens_that_no_answer_tells_are_not_reported():
    """A stream that was not asked for its usage reports none."""
    (one,) = _ask(Vendor(), stream=True)
    assert _amount(one["input"]) == _amount(one["output"]) == (0, 0)
    assert one["response_model"] == "m"


@pytest.mark.parametrize(
    ("step", "error"),
    [
        (refuses(429), "429"),
        (refuses(500), "500"),
        (streams_error("overloaded_error"), "529"),
        (breaks(httpx2.ConnectError), "ConnectError"),
    ],
)
def test_errors_are_counted_by_their_class(step: Callable[..., Answer], error: str):
    """By status, also where a stream begins with an error; else by the name of the exception."""
    guard = new_guard(Retry(on=transient, attempts=2, backoff=0))
    with http_client(guard, Vendor(step).transport()) as http:
        http.post(CHAT, json={"model": "asked"})
    failed, well = _shown(guard.name)
    assert (failed["error"], well["error"]) == (error, "")
    assert _amount(failed["durations"])[0] == _amount(well["durations"])[0] == 1
    assert _amount(failed["input"]) == (0, 0)


class _Broken(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A stream whose connection breaks after its first event."""

    def __iter__(self) -> Iterator[bytes]:
        yield b'data: {"model":"m","choices":[{"delta":{"content":"a"}}]}\n\n'
        raise httpx2.ReadError("the peer closed the connection")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


def _broken(_request: Any) -> httpx2.Response:
    return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=_Broken())


def _read_broken(guard: Guard, *, to_the_end: bool) -> Any:
    """Read a stream that breaks, or only its first event; return the client, which counts."""
    asked = {"model": "asked", "stream": True}
    with (
        http_client(guard, httpx2.MockTransport(_broken)) as http,
        http.stream("POST", CHAT, json=asked) as answer,
    ):
        pieces = answer.iter_raw()
        next(pieces)
        if to_the_end:
            next(pieces)
    return http


async def _aread_broken(guard: Guard, *, to_the_end: bool) -> Any:
    """Async twin of `_read_broken`."""
    asked = {"model": "asked", "stream": True}
    async with (
        async_http_client(guard, httpx2.MockTransport(_broken)) as http,
        http.stream("POST", CHAT, json=asked) as answer,
    ):
        pieces = answer.aiter_raw()
        await anext(pieces)
        if to_the_end:
            await anext(pieces)
    return http


READERS: dict[str, Callable[..., Any]] = {
    "plain": _read_broken,
    "async": lambda guard, **how: asyncio.run(_aread_broken(guard, **how)),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_stream_that_breaks_after_its_first_event_is_an_error(kind: str):
    """The reader gets the exception, and the operation is counted by its name."""
    guard = new_guard(Bulkhead(5))
    with pytest.raises(httpx2.ReadError) as raised:
        READERS[kind](guard, to_the_end=True)
    (one,) = _shown(guard.name)
    del raised  # until here its traceback has kept the client, which counts
    assert (one["error"], one["response_model"]) == ("ReadError", "m")
    assert _amount(one["durations"])[0] == _amount(one["first_chunks"])[0] == 1


@pytest.mark.parametrize(
    ("event", "error"),
    [
        ({"type": "error", "error": {"type": "overloaded_error"}}, "overloaded_error"),
        ({"error": {"message": "no more", "code": "server_error"}}, "server_error"),
        ({"type": "response.failed", "response": {"error": {"code": "x y"}}}, "error"),
        ({"type": "response.created", "response": {"error": None}}, ""),
        ({"choices": [{"delta": {"content": '{"error": {"type": "a"}}'}}]}, ""),
    ],
)
def test_an_error_in_the_middle_of_a_stream_is_counted(event: dict[str, Any], error: str):
    """The answer began well with 200: what the vendor says later is how it ended."""
    begun = b'data: {"model":"m","choices":[{"delta":{"content":"a"}}]}\n\n'
    body = begun + b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"

    def stream(_request: Any) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=body)

    guard = new_guard(Bulkhead(5))
    with http_client(guard, httpx2.MockTransport(stream)) as http:
        assert http.post(CHAT, json={"model": "asked", "stream": True}).content == body
    (one,) = _shown(guard.name)
    assert one["error"] == error


@pytest.mark.parametrize("kind", READERS)
def test_a_stream_that_the_reader_leaves_is_no_error(kind: str):
    """A reader that has enough closes the stream."""
    guard = new_guard(Bulkhead(5))
    http = READERS[kind](guard, to_the_end=False)
    (one,) = _shown(guard.name)
    assert http.is_closed
    assert (one["error"], _amount(one["durations"])[0]) == ("", 1)


@pytest.mark.parametrize("path", ["/v1/moderations", "/v1/messages/count_tokens", "/v1/files"])
def test_other_requests_are_no_operations(path: str):
    """They ask no model for anything."""
    assert _ask(Vendor(), f"http://vendor{path}") == []


def test_time_goes_from_sending_to_the_last_piece():
    """The wait for a slot is no part of it, reading the stream is; the first chunk comes before."""

    async def slow(request: Any) -> Any:
        await let_pass(2.0)
        vendor = Vendor()
        given = vendor.answer(request.url.path, request.content, {})

        async def body() -> Any:
            for chunk in given.chunks:
                await let_pass(1.0)
                yield chunk

        return httpx2.Response(200, headers=given.headers, content=body())

    async def main() -> list[dict[str, Any]]:
        guard = Guard("timed", Bulkhead(1, max_wait=60.0))

        async def ask(http: Any) -> None:
            await http.post(CHAT, json={"model": "asked", "stream": True})

        async with async_http_client(guard, httpx2.MockTransport(slow)) as http:
            await asyncio.gather(ask(http), ask(http))
            shown = _shown("timed")
        guard.close()
        return shown

    (one,) = run_virtual(main())
    assert _amount(one["durations"]) == (2, pytest.approx(2 * (2.0 + 4.0)))
    assert _amount(one["first_chunks"]) == (2, pytest.approx(2 * 3.0))


def test_a_request_that_ran_out_of_time_is_counted():
    """Its timeout cancels it in the middle."""

    async def main() -> list[dict[str, Any]]:
        guard = Guard("late", Timeout(5.0))
        vendor = Vendor(
            lambda _path, _body: Answer(200, {"content-type": "text/event-stream"}, [HANG])
        )
        async with async_http_client(guard, vendor.transport()) as http:
            with pytest.raises(TimeoutError):
                await http.post(CHAT, json={"model": "asked", "stream": True})
            shown = _shown("late")
        guard.close()
        return shown

    (one,) = run_virtual(main())
    assert one["error"] == "CancelledError"
    assert _amount(one["durations"]) == (1, pytest.approx(5.0))


@pytest.mark.parametrize(
    ("host", "provider"),
    [
        ("api.openai.com", "openai"),
        ("api.mistral.ai", "mistral_ai"),
        ("orders.openai.azure.com", "azure.ai.openai"),
        ("evil-api.mistral.ai.example", "openai"),
        ("localhost", "openai"),
    ],
)
def test_providers_are_known_by_their_hosts(host: str, provider: str):
    """Others by the dialect that they are spoken to in."""
    (one,) = _ask(Vendor(), f"https://{host}/v1/chat/completions")
    assert one["provider"] == provider


def test_names_of_models_are_bounded():
    """Model names from requests are bounded: invented ones do not fill the memory."""
    guard = new_guard(Bulkhead(5))
    with http_client(guard, Vendor().transport()) as http:
        for number in range(MOST_SERIES + 50):
            http.post(CHAT, json={"model": f"m{number}"})
        http.post(CHAT, json={"model": "long" * 100})
        http.post(CHAT, json={"model": ["no", "name"]})
    shown = _shown(guard.name)
    assert len(shown) == MOST_SERIES + 1
    assert sum(_amount(one["durations"])[0] for one in shown) == MOST_SERIES + 52
    assert shown[-1]["request_model"] == shown[-1]["response_model"] == OTHER


def test_the_sdk_of_a_vendor_is_counted():
    """As it is really used."""
    guard = new_guard(Bulkhead(5))
    with http_client(guard, Vendor().transport()) as http:
        sdk = openai.OpenAI(http_client=http, max_retries=0, api_key="k", base_url="http://v/v1")
        messages: list[Any] = [{"role": "user", "content": "hello"}]
        stream = sdk.chat.completions.create(model="gpt", messages=messages, stream=True)
        assert len(list(stream)) == 3
    (one,) = _shown(guard.name)
    assert (one["request_model"], one["response_model"]) == ("gpt", "m")
    assert _amount(one["first_chunks"])[0] == 1


# Cost


def _cost(model: str, usage: dict[str, Any], **prices: Price) -> tuple[float, int]:
    guard = new_guard(Bulkhead(5))
    table = {name.replace("_", "-"): price for name, price in prices.items()}

    def answer(_request: Any) -> Any:
        return httpx2.Response(200, json={"model": model, "usage": usage})

    with http_client(guard, httpx2.MockTransport(answer), prices=table) as http:
        http.post(CHAT, json={"model": "asked"})
        (shown,) = [one for one in seawall.snapshot()["llm"] if one["name"] == guard.name]
    return sum(one["cost"] for one in shown["operations"]), shown["unpriced"]


PLAIN = {"prompt_tokens": 1_000_000, "completion_tokens": 500_000}


@pytest.mark.parametrize(
    "model", ["large", "large-2026-01-31", "large-20260131", "large-0131", "large-latest"]
)
def test_cost_is_by_the_model_that_answered(model: str):
    """A dated name has the price of the model, unless it has one of its own."""
    assert _cost(model, PLAIN, large=Price(2.0, 8.0)) == (pytest.approx(6.0), 0)


def test_cost_is_by_the_model_that_was_asked_for_if_the_other_has_no_price():
    """A gateway may answer by another name."""
    assert _cost("hidden", PLAIN, asked=Price(2.0, 8.0)) == (pytest.approx(6.0), 0)


@pytest.mark.parametrize("model", ["large-mini", "larger", ""])
def test_a_model_without_a_price_costs_nothing_known(model: str):
    """No other model's price is used; the result says that a price is missing."""
    assert _cost(model, PLAIN, large=Price(2.0, 8.0)) == (0.0, 1)


def test_what_came_from_a_cache_costs_less():
    """As a part of the input with one vendor, beside it with the other."""
    price = Price(input=2.0, output=8.0, cached=0.5)
    part = {**PLAIN, "prompt_tokens_details": {"cached_tokens": 400_000}}
    assert _cost("large", part, large=price)[0] == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 4)
    beside = {
        "input_tokens": 600_000,
        "cache_read_input_tokens": 400_000,
        "output_tokens": 500_000,
    }
    assert _cost("large", beside, large=price)[0] == pytest.approx(0.6 * 2 + 0.4 * 0.5 + 4)
    assert _cost("large", part, large=Price(2.0, 8.0))[0] == pytest.approx(6.0)


@given(st.integers(0, 2**41), st.integers(0, 2**41))
def test_no_more_of_the_input_is_from_a_cache_than_there_is(went_in: int, cached: int):
    """What comes over the wire is not trusted: a cost is never negative."""
    usage = {"prompt_tokens": went_in, "prompt_tokens_details": {"cached_tokens": cached}}
    found = usage_of({"usage": usage})
    assert 0 <= found.cached_input <= (found.input or 0)
    assert Usage(1, 2).cached_input == 0


# What is exported


@pytest.fixture
def reader() -> Iterator[tuple[InMemoryMetricReader, MeterProvider]]:
    """Return a reader and its provider."""
    made = InMemoryMetricReader()
    provider = MeterProvider([made], shutdown_on_exit=False)
    yield made, provider
    provider.shutdown()


def test_opentelemetry_has_the_names_of_the_conventions(reader: Any):
    """Instruments, units, bounds and attributes; what is not known is left out."""
    memory, provider = reader
    guard = new_guard(Bulkhead(5))
    prices = {"m": Price(1_000_000.0, 2_000_000.0)}
    with (
        export_opentelemetry(provider, spans=False),
        http_client(guard, Vendor(used=(7, 5)).transport(), prices=prices) as http,
    ):
        http.post(CHAT, json={"model": "asked", "stream": True, "stream_options": USAGE})
        data = memory.get_metrics_data()
    found = {
        metric.name: metric
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        if metric.name.startswith("gen_ai.") or metric.name == "seawall.llm_cost"
    }
    common = {
        "guard": guard.name,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "asked",
        "gen_ai.response.model": "m",
    }
    tokens = found["gen_ai.client.token.usage"]
    assert tokens.unit == "{token}"
    points = {
        point.attributes["gen_ai.token.type"]: (dict(point.attributes), point.count, point.sum)
        for point in tokens.data.data_points
    }
    for kind, number in (("input", 7), ("output", 5)):
        assert points[kind] == ({**common, "gen_ai.token.type": kind}, 1, pytest.approx(number))
    for name in ("operation.duration", "operation.time_to_first_chunk"):
        metric = found[f"gen_ai.client.{name}"]
        (point,) = metric.data.data_points
        assert (metric.unit, dict(point.attributes)) == ("s", common)
        assert point.explicit_bounds[0] == 0.01
        assert point.explicit_bounds[-1] == pytest.approx(81.92)
    (point,) = found["seawall.llm_cost"].data.data_points
    assert point.value == pytest.approx(17.0)


def test_prometheus_has_them_as_they_are_translated():
    """With underscores, and with the unit in the name."""
    guard, registry = new_guard(Bulkhead(5)), CollectorRegistry()
    labels = {
        "guard": guard.name,
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "openai",
        "gen_ai_request_model": "asked",
        "gen_ai_response_model": "m",
    }
    with (
        export_prometheus(registry),
        http_client(guard, Vendor(used=(7, 5)).transport()) as http,
    ):
        http.post(CHAT, json={"model": "asked"})
        of_input = {**labels, "gen_ai_token_type": "input"}
        tokens = registry.get_sample_value("gen_ai_client_token_usage_sum", of_input)
        seconds = registry.get_sample_value(
            "gen_ai_client_operation_duration_seconds_count", {**labels, "error_type": ""}
        )
    assert (tokens, seconds) == (7.0, 1.0)


def test_the_span_of_a_call_tells_what_it_used():
    """By the attributes of the conventions, while spans are asked for, and not after that."""
    tracing = TracerProvider(shutdown_on_exit=False)
    guard = new_guard(Bulkhead(5))
    prices = {"m": Price(1_000_000.0, 2_000_000.0)}
    with http_client(guard, Vendor(used=(7, 5)).transport(), prices=prices) as http:

        def asked() -> dict[str, Any]:
            with tracing.get_tracer("test").start_as_current_span("request") as span:
                http.post(CHAT, json={"model": "asked", "stream": True, "stream_options": USAGE})
            return dict(span.attributes)  # type: ignore[attr-defined]

        with export_opentelemetry(MeterProvider(shutdown_on_exit=False)):
            told = asked()
            http.post(CHAT, json={"model": "asked"})  # in no span: nowhere to tell it
        assert not observers
        assert asked() == {}
    assert told.pop("gen_ai.response.time_to_first_chunk") >= 0
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "asked",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "seawall.llm.cost": pytest.approx(17.0),
    }
    tracing.shutdown()


def test_the_page_tells_requests_tokens_and_cost_by_model():
    """One line for a client, one fact for a model."""
    guard = new_guard(Retry(on=transient, attempts=2, backoff=0))
    vendor = Vendor(refuses(500), used=(7, 5))
    prices = {"m": Price(1_000_000.0, 2_000_000.0)}
    with http_client(guard, vendor.transport(), prices=prices) as http:
        http.post(CHAT, json={"model": "asked"})
        (seen,) = seawall.snapshot()["llm"]
    line = describe_row("llm", guard.name, seen, Counters())
    assert line.facts == [("asked", "2 requests, 1 failed, 7 tokens in, 5 out, cost 17")]
