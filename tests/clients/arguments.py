"""Bad arguments of the clients' edge: what is called, the bad values, and a word of the advice."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from math import inf, nan
from random import Random
from typing import Any

import boto3
from botocore.config import Config
from requests.adapters import HTTPAdapter

from seawall import Bulkhead, Guard, RedisStore, Timeout
from seawall.clients.aiohttp import GuardedMiddleware
from seawall.clients.boto3 import guard_client
from seawall.clients.grpc import GuardedInterceptor, aio_interceptors, retry_on
from seawall.clients.llm import Model, Models, Price, TokenLimits, async_http_client, http_client
from seawall.clients.requests import GuardedAdapter
from seawall.clients.sqlalchemy import guarded_pool
from seawall.clients.upstreams import HealthCheck, Outliers, Upstreams, UpstreamTransport
from seawall.clock import SystemClock
from seawall.models.outliers import ActionBound

HUGE = 10**400

_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_SECONDS += [(HUGE, ValueError), ([1], TypeError)]
_POSITIVE = [*_SECONDS, (0, ValueError), (inf, ValueError)]
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_NATURALS = [case for case in _COUNTS if case[0] != 0]
_RATIOS = [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("0.5", TypeError)]
_FLAGS = [("yes", TypeError), (1, TypeError), (None, TypeError)]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (None, ValueError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError)]
_NAMES = [("", (TypeError, ValueError)), (5, (TypeError, ValueError))]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError)]
_OTHERS = [(5, TypeError), ("x", TypeError)]
_GUARDS = [*_OTHERS, (None, TypeError), (Guard, TypeError)]
_STATUSES = [(503, TypeError), ("503", TypeError), (None, TypeError), ({200}, ValueError)]
_STATUSES += [({"503"}, TypeError), ({700}, ValueError)]
_TOLD = [(5, TypeError), ("deadline", TypeError), ({"nonsense"}, ValueError), (None, TypeError)]
_METHODS = [(5, TypeError), ("/a/B", TypeError), ({"Get"}, ValueError), ({5}, ValueError)]
_HOSTS = [
    (5, TypeError),
    ("http://10.0.0.1", TypeError),
    ([], ValueError),
    ([5], TypeError),
    (["http://a:0"], ValueError),
    (["http://me@a"], ValueError),
    (["http://a", "http://a/"], ValueError),
    (["http://a/path?x=1"], ValueError),
]
_RATES = [(5, TypeError), ("5", ValueError), ("x/min", ValueError)]

STORE = RedisStore("redis://127.0.0.1:1")  # never connected to
GUARD = Guard("bad clients", Timeout(2.0, sync="cooperative"))
SLOTS = Guard("bad slots", Bulkhead(2))
GUARD.close()  # its name is nobody's business
SLOTS.close()
UPSTREAMS = Upstreams("bad clients", ["http://127.0.0.1:1"])


def _upstreams(**options: Any) -> Upstreams:
    return Upstreams(options.pop("name", "x"), options.pop("hosts", ["http://h"]), **options)


def _tokens(**options: Any) -> TokenLimits:
    return TokenLimits(**{"tokens": "200k/min", **options})


def _shared(**options: Any) -> TokenLimits:
    return _tokens(**{"shared": STORE, "name": "x", **options})


def _models(*more: Any, **options: Any) -> Models:
    return Models(Model("large", print), *more, **options)


def _transports(make: Any, name: str, transport: str) -> list[tuple[Any, ...]]:
    """Return the rows of a transport that has another one inside."""
    return [
        (
            f"{name}({transport})",
            lambda x: make(GUARD, x),
            [(5, TypeError), ("http://h", TypeError)],
            "transport|adapter",
        ),
        *_terms(make, name),
    ]


def _terms(make: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the rows that the transports for all libraries have in common."""
    return [
        (f"{name}(guard)", make, _GUARDS, "Guard"),
        (f"{name}(retry_at)", lambda x: make(GUARD, retry_at=x), _CHOICES, "'edge'"),
        (f"{name}(generate_keys)", lambda x: make(GUARD, generate_keys=x), _FLAGS, "True or False"),
        (f"{name}(repeatable)", lambda x: make(GUARD, repeatable=x), _FUNCTIONS, "function"),
        (f"{name}(statuses)", lambda x: make(GUARD, statuses=x), _STATUSES, "write"),
        (f"{name}(propagate)", lambda x: make(GUARD, propagate=x), _TOLD, "deadline"),
        (f"{name}(reserve)", lambda x: make(GUARD, reserve=x), _SECONDS, "seconds"),
    ]


def _interceptors(make: Any, name: str) -> list[tuple[Any, ...]]:
    return [
        (f"{name}(guard)", make, _GUARDS, "Guard"),
        (f"{name}(idempotent)", lambda x: make(GUARD, idempotent=x), _METHODS, "such as"),
        (f"{name}(retry_at)", lambda x: make(GUARD, retry_at=x), _CHOICES, "'edge'"),
        (f"{name}(propagate)", lambda x: make(GUARD, propagate=x), _TOLD, "deadline"),
        (f"{name}(reserve)", lambda x: make(GUARD, reserve=x), _SECONDS, "seconds"),
    ]


_PRICES: list[tuple[Any, type[Exception]]] = [
    (5, TypeError),
    ({"m": 2.5}, TypeError),
    ({"m": (1.0, 2.0)}, TypeError),
    ({7: Price(1.0, 2.0)}, TypeError),
    ({"": Price(1.0, 2.0)}, TypeError),
    ({"m": Price(-1.0, 2.0)}, ValueError),
    ({"m": Price(1.0, float("nan"))}, ValueError),
    ({"m": Price(1.0, 2.0, "free")}, TypeError),  # type: ignore[arg-type]
]


def _http_clients(make: Any, name: str) -> list[tuple[Any, ...]]:
    return [
        (f"{name}(guard)", make, _GUARDS, "Guard"),
        (f"{name}(transport)", lambda x: make(GUARD, x), _OTHERS, "Transport"),
        (
            f"{name}(library)",
            lambda x: make(GUARD, library=x),
            [("nonsense", ValueError), (5, ValueError)],
            "'httpx2'",
        ),
        (f"{name}(repeatable)", lambda x: make(GUARD, repeatable=x), _FUNCTIONS, "function"),
        (f"{name}(prices)", lambda x: make(GUARD, prices=x), _PRICES, "Price|number"),
        (f"{name}(options)", lambda x: make(GUARD, **x), [({"mounts": {}}, TypeError)], "mounts"),
    ]


def _guard_client() -> list[tuple[Any, ...]]:
    once = Config(retries={"total_max_attempts": 1})
    client: Any = boto3.client("sqs", region_name="eu-west-1", config=once)
    own: Any = boto3.client("sqs", region_name="eu-west-1")
    name = "clients.boto3.guard_client"
    names = [("PutItem", TypeError), (5, TypeError), (None, TypeError), ({"PutItem"}, ValueError)]
    return [
        (
            f"{name}(client)",
            lambda x: guard_client(x, GUARD),
            [(5, TypeError), ("s3", TypeError), (own, ValueError)],
            r"boto3\.client",
        ),
        (f"{name}(guard)", lambda x: guard_client(client, x), _GUARDS, "Guard"),
        (f"{name}(repeatable)", lambda x: guard_client(client, GUARD, repeatable=x), names, "such"),
    ]


def _of_httpx() -> Iterable[tuple[Any, ...]]:
    """Yield the rows of both libraries, and of clients sync and async."""
    for library in ("httpx", "httpx2"):
        module = importlib.import_module(f"seawall.clients.{library}")
        for kind in ("GuardedTransport", "AsyncGuardedTransport"):
            make = getattr(module, kind)
            yield from _transports(make, f"clients.{library}.{kind}", "transport")


CLIENTS: list[tuple[Any, ...]] = [
    *_of_httpx(),
    *_terms(GuardedMiddleware, "clients.aiohttp.GuardedMiddleware"),
    *_guard_client(),
    (
        "clients.sqlalchemy.guarded_pool(guard)",
        guarded_pool,
        [*_GUARDS, (GUARD, ValueError)],
        "Guard|Bulkhead",
    ),
    (
        "clients.sqlalchemy.guarded_pool(base)",
        lambda x: guarded_pool(SLOTS, x),
        [(5, TypeError), (dict, TypeError), (None, TypeError)],
        "QueuePool",
    ),
    *_transports(GuardedAdapter, "clients.requests.GuardedAdapter", "adapter"),
    (
        "clients.requests.GuardedAdapter(adapter) retrying",
        lambda x: GuardedAdapter(GUARD, HTTPAdapter(max_retries=x)),
        [(3, ValueError)],
        "retr",
    ),
    *_interceptors(GuardedInterceptor, "clients.grpc.GuardedInterceptor"),
    *_interceptors(aio_interceptors, "clients.grpc.aio_interceptors"),
    (
        "clients.grpc.retry_on(codes)",
        retry_on,
        [(14, TypeError), ("UNAVAILABLE", TypeError), (None, TypeError)],
        "StatusCode",
    ),
    # --- several hosts ---
    ("clients.upstreams.Upstreams(name)", lambda x: _upstreams(name=x), _NAMES, "name"),
    (
        "clients.upstreams.Upstreams(hosts)",
        lambda x: _upstreams(hosts=x),
        _HOSTS,
        "http://|once|user",
    ),
    (
        "clients.upstreams.Upstreams(half_life)",
        lambda x: _upstreams(half_life=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "clients.upstreams.Upstreams(outliers)",
        lambda x: _upstreams(outliers=x),
        [*_OTHERS, (Outliers, TypeError)],
        "Outliers",
    ),
    (
        "clients.upstreams.Upstreams(health)",
        lambda x: _upstreams(health=x),
        [*_OTHERS, (HealthCheck, TypeError)],
        "HealthCheck",
    ),
    ("clients.upstreams.Upstreams(breaker)", lambda x: _upstreams(breaker=x), _OTHERS, "function"),
    (
        "clients.upstreams.Upstreams(breaker) made",
        lambda x: _upstreams(breaker=lambda _: x),
        _OTHERS,
        "Breaker",
    ),
    (
        "clients.upstreams.Upstreams(is_failure)",
        lambda x: _upstreams(is_failure=x),
        _FUNCTIONS,
        "function",
    ),
    ("clients.upstreams.Upstreams(clock)", lambda x: _upstreams(clock=x), _CLOCKS, "clock"),
    ("clients.upstreams.Upstreams(rng)", lambda x: _upstreams(rng=x), _RNGS, "random.Random"),
    (
        "clients.upstreams.Upstreams.pick(tried)",
        lambda x: _upstreams().pick(tried=x),
        [(5, TypeError), (["http://h"], TypeError)],
        "set",
    ),
    (
        "clients.upstreams.Upstreams.transport(transport)",
        lambda x: _upstreams().transport(x),
        _OTHERS,
        "transport",
    ),
    (
        "clients.upstreams.Upstreams.set_aside(hosts)",
        lambda x: UPSTREAMS.set_aside(x, cause="x", bound=ActionBound()),
        [(5, TypeError), ("http://h", TypeError), (None, TypeError)],
        "list",
    ),
    (
        "clients.upstreams.Upstreams.set_aside(cause)",
        lambda x: UPSTREAMS.set_aside([], cause=x, bound=ActionBound()),
        [(5, TypeError), ("", TypeError), (None, TypeError)],
        "suspected",
    ),
    (
        "clients.upstreams.Upstreams.set_aside(bound)",
        lambda x: UPSTREAMS.set_aside([], cause="x", bound=x),
        [(0.5, TypeError), (None, TypeError), (ActionBound, TypeError)],
        "ActionBound",
    ),
    (
        "clients.upstreams.Upstreams.update(hosts)",
        lambda x: _upstreams().update(hosts=x),
        _HOSTS,
        "http://|once|user",
    ),
    (
        "clients.upstreams.UpstreamTransport(upstreams)",
        UpstreamTransport,
        [*_OTHERS, (["http://h"], TypeError)],
        "Upstreams",
    ),
    (
        "clients.upstreams.UpstreamTransport(transport)",
        lambda x: UpstreamTransport(UPSTREAMS, x),
        _OTHERS,
        "transport",
    ),
    (
        "clients.upstreams.HealthCheck(path)",
        HealthCheck,
        [("health", ValueError), (5, ValueError), ("", ValueError), ("/a b", ValueError)],
        "'/health/ready'",
    ),
    ("clients.upstreams.HealthCheck(every)", lambda x: HealthCheck(every=x), _POSITIVE, "seconds"),
    (
        "clients.upstreams.HealthCheck(timeout)",
        lambda x: HealthCheck(timeout=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "clients.upstreams.HealthCheck(failures)",
        lambda x: HealthCheck(failures=x),
        _COUNTS,
        "write",
    ),
    (
        "clients.upstreams.HealthCheck(successes)",
        lambda x: HealthCheck(successes=x),
        _COUNTS,
        "write",
    ),
    ("clients.upstreams.HealthCheck(panic)", lambda x: HealthCheck(panic=x), _RATIOS, "share"),
    (
        "clients.upstreams.HealthCheck(probe)",
        lambda x: HealthCheck(probe=x),
        _FUNCTIONS,
        "function",
    ),
    ("clients.upstreams.HealthCheck(ssl)", lambda x: HealthCheck(ssl=x), _OTHERS, "SSLContext"),
    (
        "clients.upstreams.Outliers(consecutive)",
        lambda x: Outliers(consecutive=x),
        _COUNTS,
        "write",
    ),
    (
        "clients.upstreams.Outliers(failure_ratio)",
        lambda x: Outliers(failure_ratio=x),
        [*_RATIOS, (0, ValueError)],
        "share",
    ),
    (
        "clients.upstreams.Outliers(deviations)",
        lambda x: Outliers(deviations=x),
        [(0.5, ValueError), ("3", TypeError), (nan, ValueError)],
        "at least",
    ),
    ("clients.upstreams.Outliers(window)", lambda x: Outliers(window=x), _POSITIVE, "seconds"),
    ("clients.upstreams.Outliers(min_calls)", lambda x: Outliers(min_calls=x), _COUNTS, "write"),
    (
        "clients.upstreams.Outliers(eject_for)",
        lambda x: Outliers(eject_for=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "clients.upstreams.Outliers(max_eject_for)",
        lambda x: Outliers(max_eject_for=x),
        [*_POSITIVE, (1.0, ValueError)],
        "seconds|eject_for",
    ),
    (
        "clients.upstreams.Outliers(max_ejected)",
        lambda x: Outliers(max_ejected=x),
        _RATIOS,
        "share",
    ),
    # --- language models ---
    ("clients.llm.Model(name)", lambda x: Model(x, print), _NAMES, "name"),
    ("clients.llm.Model(ask)", lambda x: Model("x", x), _FUNCTIONS, "function"),
    ("clients.llm.Model(guard)", lambda x: Model("x", print, guard=x), _OTHERS, "Guard"),
    (
        "clients.llm.Models(candidates)",
        _models,
        [(5, TypeError), (print, TypeError), (Model("large", print), ValueError)],
        "Model|same name",
    ),
    ("clients.llm.Models(name)", lambda x: _models(name=x), _NAMES, "write text"),
    ("clients.llm.Models(fall_back_on)", lambda x: _models(fall_back_on=x), _FUNCTIONS, "function"),
    ("clients.llm.TokenLimits(requests)", lambda x: _tokens(requests=x), _RATES, "such as|write"),
    ("clients.llm.TokenLimits(tokens)", lambda x: TokenLimits(tokens=x), _RATES, "such as|write"),
    (
        "clients.llm.TokenLimits(tokens) none",
        lambda x: TokenLimits(tokens=x),
        [(None, TypeError)],
        "such as",
    ),
    (
        "clients.llm.TokenLimits(input_tokens)",
        lambda x: _tokens(input_tokens=x),
        _RATES,
        "such as|write",
    ),
    (
        "clients.llm.TokenLimits(output_tokens)",
        lambda x: _tokens(output_tokens=x),
        _RATES,
        "such as|write",
    ),
    ("clients.llm.TokenLimits(count)", lambda x: _tokens(count=x), _FUNCTIONS, "function"),
    ("clients.llm.TokenLimits(output)", lambda x: _tokens(output=x), _NATURALS, "write"),
    ("clients.llm.TokenLimits(cached)", lambda x: _tokens(cached=x), _FLAGS, "True or False"),
    ("clients.llm.TokenLimits(per_model)", lambda x: _tokens(per_model=x), _FLAGS, "True or False"),
    ("clients.llm.TokenLimits(refill)", lambda x: _tokens(refill=x), _CHOICES, "'steady'"),
    (
        "clients.llm.TokenLimits(max_debt)",
        lambda x: _tokens(max_debt=x),
        [(-1.0, ValueError), (float("nan"), ValueError), ("2", TypeError)],
        "seconds",
    ),
    (
        "clients.llm.TokenLimits(max_pushback)",
        lambda x: _tokens(max_pushback=x),
        _SECONDS,
        "seconds",
    ),
    ("clients.llm.TokenLimits(max_wait)", lambda x: _tokens(max_wait=x), _SECONDS, "seconds"),
    (
        "clients.llm.TokenLimits(max_waiting)",
        lambda x: _tokens(max_wait=1.0, max_waiting=x),
        _COUNTS,
        "write",
    ),
    ("clients.llm.TokenLimits(mode)", lambda x: _tokens(mode=x), _CHOICES, "'shadow'"),
    ("clients.llm.TokenLimits(shared)", lambda x: _shared(shared=x), _OTHERS, "[sS]tore"),
    (
        "clients.llm.TokenLimits(name)",
        lambda x: _shared(name=x),
        [*_NAMES, (None, TypeError)],
        "name=",
    ),
    ("clients.llm.TokenLimits(sharing)", lambda x: _shared(sharing=x), _CHOICES, "'leased'"),
    (
        "clients.llm.TokenLimits(batch)",
        lambda x: _shared(sharing="leased", batch=x),
        _COUNTS,
        "write",
    ),
    (
        "clients.llm.TokenLimits(on_store_failure)",
        lambda x: _shared(on_store_failure=x),
        _CHOICES,
        "'closed'",
    ),
    (
        "clients.llm.TokenLimits.settle(taken)",
        lambda x: _tokens().settle(x, {}),
        [(5, TypeError), (None, TypeError)],
        "reserve",
    ),
    *_http_clients(http_client, "clients.llm.http_client"),
    *_http_clients(async_http_client, "clients.llm.async_http_client"),
]


def _given(name: str, *arguments: str) -> Iterable[str]:
    return (f"clients.{name}({argument})" for argument in arguments)


_CALLS = ("continuation", "client_call_details")

UNCHECKED_BY_CLIENTS = frozenset(
    [
        # predicates are asked about whatever came of a call
        *_given("llm.should_fall_back", "error"),
        # answers of vendors are what they are
        *_given("llm.usage_of", "answer"),
        *_given("llm.TokenLimits.settle", "answer"),
        *_given("llm.TokenLimits.apply_headers", "headers", "status"),
        *_given("upstreams.Pick.answered", "response"),
        # called by the libraries
        *_given("grpc.GuardedInterceptor.intercept_unary_unary", *_CALLS, "request"),
        *_given("grpc.GuardedInterceptor.intercept_unary_stream", *_CALLS, "request"),
        *_given("grpc.GuardedInterceptor.intercept_stream_unary", *_CALLS, "request_iterator"),
        *_given("grpc.GuardedInterceptor.intercept_stream_stream", *_CALLS, "request_iterator"),
        *_given(
            "requests.GuardedAdapter.send",
            *("request", "stream", "timeout", "verify", "cert", "proxies"),
        ),
        *_given("upstreams.UpstreamTransport.handle_request", "request"),
        *_given("upstreams.UpstreamTransport.handle_async_request", "request"),
        # made by Seawall
        *_given("grpc.Rpc", "details", "request", "send"),
        *_given("upstreams.Pick", "hosts", "is_failure", "tried"),
        *_given("upstreams.Outliers.lasts", "ejections"),
        *_given("upstreams.Outliers.most_out", "hosts"),
    ]
)
"""What libraries, vendors and Seawall itself give, or what may be anything."""
