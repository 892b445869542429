"""Bad arguments of the server's edge: what is called, the bad values, and a word of the advice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf, nan
from typing import Any

from fastapi import FastAPI
from flask import Flask

from seawall import Bulkhead, Guard, RedisStore, Retry, guards
from seawall.clock import SystemClock
from seawall.web import (
    Edge,
    Health,
    Inbound,
    Lifecycle,
    LoopAdmission,
    RequestLimit,
    RequestLimits,
    Trust,
    address_and_route,
    api_key,
    checks,
    user,
    wsgi,
)
from seawall.web.fastapi import guarded, limited, protect
from seawall.web.flask import guarded as flask_guarded
from seawall.web.flask import limited as flask_limited
from seawall.web.flask import protect as flask_protect
from seawall.web.grpc import AioServerInterceptor, ServerInterceptor
from seawall.web.wsgi import QueueAdmission

HUGE = 10**400

_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_SECONDS += [(HUGE, ValueError), ([1], TypeError), (inf, ValueError)]
_POSITIVE = [*_SECONDS, (0, ValueError)]
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_RATIOS = [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("0.5", TypeError)]
_FLAGS = [("yes", TypeError), (1, TypeError), (None, TypeError)]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (None, ValueError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError)]
_NAMES = [("", (TypeError, ValueError)), (5, (TypeError, ValueError))]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError)]
_OTHERS = [(5, TypeError), ("x", TypeError)]
_GUARDS = [*_OTHERS, (Guard, TypeError)]
_TRUSTS = [*_OTHERS, (Trust, TypeError), (["10.0.0.0/8"], TypeError)]
_NETWORKS = [
    (5, TypeError),
    ("10.0.0.0/8", TypeError),
    ([5], TypeError),
    (["nonsense"], ValueError),
    (["10.0.0.0/99"], ValueError),
    (["10.0.0.1/8"], ValueError),
]
_ROUTES = [
    ({"orders": Bulkhead(1)}, ValueError),
    ({"/*/x": Bulkhead(1)}, ValueError),
    ({5: Bulkhead(1)}, ValueError),
    ({"/x": 5}, TypeError),
    ({"/x": LoopAdmission()}, TypeError),
]
_LEVELS = [("critical", TypeError), (2, TypeError), (None, TypeError)]

STORE = RedisStore("redis://127.0.0.1:1")  # never connected to
RETRYING = Guard("bad retrying", Retry(on=OSError))
RETRYING.close()  # its name is nobody's business


async def _app(_scope: Any, _receive: Any, _send: Any) -> None:
    pass


def _edge(**parts: Any) -> Edge:
    """Make an edge and free its name, whatever comes of it."""
    before = guards()
    try:
        return Edge(parts.pop("app", _app), **parts)
    finally:
        for guard in guards():
            if guard not in before:
                guard.close()


def _wsgi_edge(**parts: Any) -> wsgi.Edge:
    before = guards()
    try:
        return wsgi.Edge(parts.pop("app", _app), **parts)
    finally:
        for guard in guards():
            if guard not in before:
                guard.close()


def _flask_protect(**parts: Any) -> wsgi.Edge:
    before = guards()
    try:
        return flask_protect(Flask("bad"), **parts)
    finally:
        for guard in guards():
            if guard not in before:
                guard.close()


def _protect(**parts: Any) -> Edge:
    before = guards()
    try:
        return protect(parts.pop("app", None) or FastAPI(), **parts)
    finally:
        for guard in guards():
            if guard not in before:
                guard.close()


def _limit(**options: Any) -> RequestLimit:
    return RequestLimit(options.pop("rate", "5/s"), by=options.pop("by", "address"), **options)


def _limits(*more: Any, **options: Any) -> RequestLimits:
    return RequestLimits(_limit(), *more, **options)


def _shared(**options: Any) -> RequestLimits:
    return _limits(**{"shared": STORE, "name": "bad-arguments", **options})


def _add(check: Any = print, **options: Any) -> Any:
    return Health().add(options.pop("name", "db"), check, **options)


def _warm_up(function: Any = print, **options: Any) -> Any:
    return Lifecycle(signals=False).warm_up(function, **options)


def _parts(make: Callable[..., Any], name: str) -> list[tuple[Any, ...]]:
    """Return the rows of what every edge is put together from, under ASGI and WSGI."""
    places = [*_OTHERS, (LoopAdmission(), TypeError), (Bulkhead, TypeError)]
    return [
        (f"{name}(name)", lambda x: make(name=x), _NAMES, "name|write"),
        (f"{name}(shed)", lambda x: make(shed=x), [*_OTHERS, (Bulkhead(1), TypeError)], "Shed"),
        (f"{name}(concurrency)", lambda x: make(concurrency=x), places, "Bulkhead"),
        (
            f"{name}(report_degraded)",
            lambda x: make(report_degraded=x),
            [(5, TypeError), (None, TypeError), ("", TypeError), ("a b", TypeError)],
            "write True",
        ),
        (f"{name}(routes)", lambda x: make(routes=x), [(5, TypeError), *_ROUTES], "write|such as"),
        (f"{name}(trust)", lambda x: make(trust=x), _TRUSTS, "Trust"),
        (f"{name}(limits)", lambda x: make(limits=x), [*_OTHERS, ("5/s", TypeError)], "limit"),
        (f"{name}(health)", lambda x: make(health=x), [*_OTHERS, (Health, TypeError)], "Health"),
        (
            f"{name}(lifecycle)",
            lambda x: make(lifecycle=x),
            [*_OTHERS, (Lifecycle, TypeError)],
            "Lifecycle",
        ),
    ]


def _policies(make: Callable[..., Any], name: str) -> list[tuple[Any, ...]]:
    """Return the rows of an ASGI edge, made by hand or by `protect`."""
    places = [*_OTHERS, (LoopAdmission(), TypeError), (Bulkhead, TypeError)]
    return [
        *_parts(make, name),
        (
            f"{name}(loop_admission)",
            lambda x: make(loop_admission=x),
            [*_OTHERS, (LoopAdmission, TypeError)],
            "LoopAdmission",
        ),
        (f"{name}(websockets)", lambda x: make(websockets=x), places, "Bulkhead"),
        (
            f"{name}(websockets_per_address)",
            lambda x: make(websockets=Bulkhead(4), websockets_per_address=x),
            _COUNTS,
            "write",
        ),
        (f"{name}(stall)", lambda x: make(stall=x), _POSITIVE, "seconds"),
    ]


def _wsgi_policies(make: Callable[..., Any], name: str) -> list[tuple[Any, ...]]:
    """Return the rows of a WSGI edge, made by hand or by `protect`."""
    return [
        *_parts(make, name),
        (f"{name}(timeout)", lambda x: make(timeout=x), _POSITIVE, "seconds"),
        (f"{name}(reserve)", lambda x: make(reserve=x), _SECONDS, "seconds"),
        (f"{name}(classify)", lambda x: make(classify=x), _FUNCTIONS, "function"),
        (
            f"{name}(queue_admission)",
            lambda x: make(queue_admission=x),
            [*_OTHERS, (QueueAdmission, TypeError), (LoopAdmission(), TypeError)],
            "QueueAdmission",
        ),
    ]


def _limit_rows(name: str) -> list[tuple[Any, ...]]:
    """Return the rows of one limit, which has two names."""
    return [
        (
            f"{name}(rate)",
            lambda x: _limit(rate=x),
            [(5, TypeError), (None, TypeError), ("", ValueError), ("5", ValueError)],
            "write|such as",
        ),
        (
            f"{name}(by)",
            lambda x: _limit(by=x),
            [("nonsense", ValueError), (5, TypeError)],
            "'address'|user",
        ),
        (
            f"{name}(otherwise)",
            lambda x: _limit(by="tenant", otherwise=x),
            [("nonsense", ValueError), (5, TypeError)],
            "'address'|user",
        ),
        (
            f"{name}(tiers)",
            lambda x: _limit(tiers=x),
            [
                (5, TypeError),
                (["free"], TypeError),
                ({5: "1/s"}, TypeError),
                ({"": "1/s"}, TypeError),
            ],
            "write",
        ),
        (f"{name}(burst)", lambda x: _limit(burst=x), _COUNTS, "write"),
        (f"{name}(algorithm)", lambda x: _limit(algorithm=x), _CHOICES, "token_bucket"),
        (f"{name}(cost)", lambda x: _limit(cost=x), [(-1, ValueError), ("x", TypeError)], "cost"),
        (f"{name}(soft)", lambda x: _limit(soft=x), _FLAGS, "True or False"),
        (f"{name}(local)", lambda x: _limit(local=x), _FLAGS, "True or False"),
        (
            f"{name}(name)",
            lambda x: _limit(name=x),
            [(5, (TypeError, ValueError)), ("x" * 99, ValueError), ("a\nb", ValueError)],
            "write",
        ),
    ]


def _interceptors(make: Any, name: str) -> list[tuple[Any, ...]]:
    return [
        (f"{name}(guard)", make, [*_GUARDS, (RETRYING, TypeError)], "[Gg]uard"),
        (f"{name}(trust)", lambda x: make(trust=x), _TRUSTS, "Trust"),
        (f"{name}(timeout)", lambda x: make(timeout=x), _POSITIVE, "seconds"),
        (f"{name}(stream_timeout)", lambda x: make(stream_timeout=x), _POSITIVE, "seconds"),
        (f"{name}(reserve)", lambda x: make(reserve=x), _SECONDS, "seconds"),
        (f"{name}(max_criticality)", lambda x: make(max_criticality=x), _LEVELS, "Criticality"),
        (f"{name}(classify)", lambda x: make(classify=x), _FUNCTIONS, "function"),
    ]


WEB: list[tuple[Any, ...]] = [
    ("web.Edge(app)", lambda x: _edge(app=x), [(5, TypeError), (None, TypeError)], "app"),
    ("web.Edge(inbound)", lambda x: _edge(inbound=x), [*_OTHERS, (Inbound, TypeError)], "Inbound"),
    ("web.Edge(clock)", lambda x: _edge(clock=x), _CLOCKS, "clock"),
    *_policies(_edge, "web.Edge"),
    ("web.Health(name)", lambda x: Health(name=x), _NAMES, "write"),
    (
        "web.Health(version)",
        lambda x: Health(version=x),
        [(5, TypeError), (b"1", TypeError)],
        "text",
    ),
    (
        "web.Health(prefix)",
        lambda x: Health(prefix=x),
        [("health", ValueError), (5, ValueError), (None, ValueError)],
        "'/health'",
    ),
    (
        "web.Health(lifecycle)",
        lambda x: Health(lifecycle=x),
        [*_OTHERS, (Lifecycle, TypeError)],
        "Lifecycle",
    ),
    ("web.Health(details)", lambda x: Health(details=x), _CHOICES, "'deep'"),
    ("web.Health(clock)", lambda x: Health(clock=x), _CLOCKS, "clock"),
    ("web.Health(wall)", lambda x: Health(wall=x), _FUNCTIONS, "function"),
    (
        "web.Health.add(name)",
        lambda x: _add(name=x),
        [("", ValueError), (5, ValueError), ("a:b", ValueError), ("x" * 999, ValueError)],
        "such as 'db'",
    ),
    ("web.Health.add(check_)", _add, [*_OTHERS, (dict, TypeError)], "pass"),
    ("web.Health.add(level)", lambda x: _add(level=x), _CHOICES, "'ready'"),
    ("web.Health.add(timeout)", lambda x: _add(timeout=x), _POSITIVE, "seconds"),
    ("web.Health.add(ttl)", lambda x: _add(ttl=x), _SECONDS, "seconds"),
    ("web.Health.add(critical)", lambda x: _add(critical=x), _FLAGS, "True or False"),
    ("web.Health.add(failures)", lambda x: _add(failures=x), _COUNTS, "write"),
    ("web.Health.add(successes)", lambda x: _add(successes=x), _COUNTS, "write"),
    (
        "web.Health.state_of(level)",
        lambda x: asyncio.run(Health().state_of(x)),
        _CHOICES,
        "'ready'",
    ),
    ("web.Inbound(trust)", lambda x: Inbound(trust=x), _TRUSTS, "Trust"),
    ("web.Inbound(timeout)", lambda x: Inbound(timeout=x), _POSITIVE, "seconds"),
    ("web.Inbound(reserve)", lambda x: Inbound(reserve=x), _SECONDS, "seconds"),
    (
        "web.Inbound(max_criticality)",
        lambda x: Inbound(max_criticality=x),
        _LEVELS,
        "Criticality",
    ),
    ("web.Inbound(classify)", lambda x: Inbound(classify=x), _FUNCTIONS, "function"),
    ("web.Lifecycle(name)", lambda x: Lifecycle(name=x), _NAMES, "write"),
    ("web.Lifecycle(drain_timeout)", lambda x: Lifecycle(drain_timeout=x), _SECONDS, "seconds"),
    ("web.Lifecycle(delay)", lambda x: Lifecycle(delay=x), _SECONDS, "seconds"),
    ("web.Lifecycle(delay) long", lambda x: Lifecycle(delay=x), [(99.0, ValueError)], "drain"),
    ("web.Lifecycle(signals)", lambda x: Lifecycle(signals=x), _FLAGS, "True or False"),
    ("web.Lifecycle.warm_up(function)", _warm_up, [*_OTHERS, (dict, TypeError)], "pass"),
    ("web.Lifecycle.warm_up(timeout)", lambda x: _warm_up(timeout=x), _POSITIVE, "seconds"),
    ("web.Lifecycle.warm_up(on_failure)", lambda x: _warm_up(on_failure=x), _CHOICES, "'retry'"),
    *_limit_rows("web.RequestLimit"),
    *_limit_rows("web.RequestLimit"),
    (
        "web.RequestLimits(limits)",
        _limits,
        [(5, TypeError), ("5/s", TypeError), (_limit(), ValueError)],
        "write RequestLimit",
    ),
    ("web.RequestLimits(tier)", lambda x: _limits(tier=x), _FUNCTIONS, "function"),
    ("web.RequestLimits(headers)", lambda x: _limits(headers=x), _FLAGS, "True or False"),
    ("web.RequestLimits(max_keys)", lambda x: _limits(max_keys=x), _COUNTS, "write"),
    (
        "web.RequestLimits(shared)",
        lambda x: _shared(shared=x),
        [(5, TypeError), ("redis://127.0.0.1", TypeError), (RedisStore, TypeError)],
        "[sS]tore",
    ),
    ("web.RequestLimits(sharing)", lambda x: _shared(sharing=x), _CHOICES, "'leased'"),
    (
        "web.RequestLimits(sharing) alone",
        lambda x: _limits(sharing=x),
        [("leased", TypeError)],
        "shared=",
    ),
    (
        "web.RequestLimits(on_store_failure)",
        lambda x: _shared(on_store_failure=x),
        _CHOICES,
        "'closed'",
    ),
    (
        "web.RequestLimits(name)",
        lambda x: _shared(name=x),
        [(None, TypeError), (5, (TypeError, ValueError))],
        "name=",
    ),
    ("web.RequestLimits(clock)", lambda x: _limits(clock=x), _CLOCKS, "clock"),
    ("web.Trust(proxies)", lambda x: Trust(proxies=x), _NETWORKS, "write"),
    ("web.Trust(callers)", lambda x: Trust(callers=x), _NETWORKS, "write"),
    ("web.Trust(forwarded)", lambda x: Trust(forwarded=x), _CHOICES, "'forwarded'"),
    ("web.LoopAdmission(slice)", lambda x: LoopAdmission(slice=x), _POSITIVE, "seconds"),
    ("web.LoopAdmission(target)", lambda x: LoopAdmission(target=x), _POSITIVE, "seconds"),
    ("web.LoopAdmission(cheap)", lambda x: LoopAdmission(cheap=x), _SECONDS, "seconds"),
    ("web.LoopAdmission(patience)", lambda x: LoopAdmission(patience=x), _POSITIVE, "seconds"),
    ("web.LoopAdmission(mode)", lambda x: LoopAdmission(mode=x), _CHOICES, "'shadow'"),
    (
        "web.LoopAdmission.update(target)",
        lambda x: LoopAdmission().update(target=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "web.address_and_route(routes)",
        address_and_route,
        [("orders", ValueError), (5, ValueError), ("/*/x", ValueError)],
        "such as '/",
    ),
    (
        "web.api_key(header)",
        api_key,
        [("", ValueError), (5, (TypeError, ValueError)), ("a b", ValueError), ("a\nb", ValueError)],
        "'x-api-key'",
    ),
    ("web.api_key(known)", lambda x: api_key(known=x), _FUNCTIONS, "function"),
    ("web.user(read)", user, _FUNCTIONS, "function"),
    # --- checks ---
    ("web.checks.DatabaseRead(connect)", checks.DatabaseRead, _FUNCTIONS, "function"),
    (
        "web.checks.DatabaseRead(statement)",
        lambda x: checks.DatabaseRead(print, statement=x),
        [(5, TypeError), (None, TypeError)],
        "write text",
    ),
    ("web.checks.DatabaseWrite(connect)", checks.DatabaseWrite, _FUNCTIONS, "function"),
    (
        "web.checks.DatabaseWrite(table)",
        lambda x: checks.DatabaseWrite(print, table=x),
        [("a b", ValueError), ("x;", ValueError), (5, (TypeError, ValueError))],
        "plain name|write text",
    ),
    (
        "web.checks.DatabaseWrite(statement)",
        lambda x: checks.DatabaseWrite(print, statement=x),
        [(5, TypeError)],
        "write text",
    ),
    ("web.checks.Disk(path)", checks.Disk, [(5, TypeError), (None, TypeError)], "write text"),
    ("web.checks.Disk(degraded)", lambda x: checks.Disk("/", degraded=x), _RATIOS, "share"),
    ("web.checks.Disk(unhealthy)", lambda x: checks.Disk("/", unhealthy=x), _RATIOS, "share"),
    (
        "web.checks.Disk(unhealthy) more",
        lambda x: checks.Disk("/", unhealthy=x),
        [(0.5, ValueError)],
        "at most",
    ),
    ("web.checks.Disk(write)", lambda x: checks.Disk("/", write=x), _FLAGS, "True or False"),
    (
        "web.checks.EventLoop(degraded)",
        lambda x: checks.EventLoop(degraded=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "web.checks.EventLoop(unhealthy)",
        lambda x: checks.EventLoop(unhealthy=x),
        [(0.01, ValueError), ("2", TypeError), (nan, ValueError)],
        "at least",
    ),
    ("web.checks.GuardState(guard)", checks.GuardState, _GUARDS, "Guard"),
    (
        "web.checks.HttpUpstream(url)",
        checks.HttpUpstream,
        [("users", ValueError), ("ftp://users", ValueError), (5, TypeError)],
        "such as 'http|write text",
    ),
    (
        "web.checks.HttpUpstream(client)",
        lambda x: checks.HttpUpstream("http://u", client=x),
        [(5, TypeError)],
        "httpx",
    ),
    (
        "web.checks.HttpUpstream(method)",
        lambda x: checks.HttpUpstream("http://u", method=x),
        [*_CHOICES, ("POST", ValueError)],
        "'HEAD'",
    ),
    (
        "web.checks.HttpUpstream(statuses)",
        lambda x: checks.HttpUpstream("http://u", statuses=x),
        [(5, TypeError), (["200"], TypeError), ("200", TypeError)],
        "statuses",
    ),
    ("web.checks.QueueAge(queue)", checks.QueueAge, _OTHERS, "queue"),
    (
        "web.checks.QueueAge(degraded)",
        lambda x: checks.QueueAge(Health(), degraded=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "web.checks.QueueAge(unhealthy)",
        lambda x: checks.QueueAge(Health(), unhealthy=x),
        [(0.01, ValueError), ("2", TypeError), (nan, ValueError)],
        "at least",
    ),
    ("web.checks.RedisPing(target)", checks.RedisPing, _OTHERS, "ping"),
    # --- WSGI ---
    ("web.wsgi.Edge(app)", lambda x: _wsgi_edge(app=x), [(5, TypeError), (None, TypeError)], "app"),
    ("web.wsgi.Edge(clock)", lambda x: _wsgi_edge(clock=x), _CLOCKS, "clock"),
    *_wsgi_policies(_wsgi_edge, "web.wsgi.Edge"),
    (
        "web.wsgi.QueueAdmission(target)",
        lambda x: QueueAdmission(target=x),
        [*_POSITIVE, (2.0, ValueError)],
        "seconds|patience",
    ),
    (
        "web.wsgi.QueueAdmission(patience)",
        lambda x: QueueAdmission(patience=x),
        [*_POSITIVE, (0.01, ValueError)],
        "seconds|target",
    ),
    ("web.wsgi.QueueAdmission(mode)", lambda x: QueueAdmission(mode=x), _CHOICES, "'shadow'"),
    (
        "web.wsgi.QueueAdmission.update(target)",
        lambda x: QueueAdmission().update(target=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "web.flask.protect(app)",
        flask_protect,
        [(5, TypeError), (Flask, TypeError), (_app, TypeError)],
        "Flask",
    ),
    *_wsgi_policies(_flask_protect, "web.flask.protect"),
    ("web.flask.guarded(guard)", flask_guarded, _GUARDS, "Guard"),
    (
        "web.flask.limited(limits)",
        flask_limited,
        [(5, TypeError), ("5/s", TypeError)],
        "write RequestLimit",
    ),
    (
        "web.flask.limited(options)",
        lambda x: flask_limited(_limit(), **x),
        [({"headers": 5}, TypeError), ({"tier": 5}, TypeError), ({"max_keys": 0}, ValueError)],
        "write|function",
    ),
    # --- FastAPI, gRPC ---
    ("web.fastapi.guarded(guard)", guarded, _GUARDS, "Guard"),
    (
        "web.fastapi.limited(limits)",
        limited,
        [(5, TypeError), ("5/s", TypeError)],
        "write RequestLimit",
    ),
    (
        "web.fastapi.limited(options)",
        lambda x: limited(_limit(), **x),
        [({"headers": 5}, TypeError), ({"tier": 5}, TypeError), ({"max_keys": 0}, ValueError)],
        "write|function",
    ),
    (
        "web.fastapi.protect(app)",
        lambda x: _protect(app=x),
        [(5, TypeError), (FastAPI, TypeError), (_app, TypeError)],
        "FastAPI",
    ),
    ("web.fastapi.protect(timeout)", lambda x: _protect(timeout=x), _POSITIVE, "seconds"),
    ("web.fastapi.protect(reserve)", lambda x: _protect(reserve=x), _SECONDS, "seconds"),
    ("web.fastapi.protect(classify)", lambda x: _protect(classify=x), _FUNCTIONS, "function"),
    *_policies(_protect, "web.fastapi.protect"),
    *_interceptors(ServerInterceptor, "web.grpc.ServerInterceptor"),
    *_interceptors(AioServerInterceptor, "web.grpc.AioServerInterceptor"),
]


def _given_by_seawall(name: str, *arguments: str) -> Iterable[str]:
    return (f"web.{name}({argument})" for argument in arguments)


UNCHECKED_BY_WEB = frozenset(
    [
        # what a check says of itself: made fit to be shown, whatever it is
        *_given_by_seawall("Degraded", "output", "value", "unit"),
        *_given_by_seawall("CheckFinding", "output", "value", "unit"),
        *_given_by_seawall("Healthy", "output", "value", "unit"),
        *_given_by_seawall("Unhealthy", "output", "value", "unit"),
        # what a request is, and what is done with it
        *_given_by_seawall("Health.answer", "scope"),
        *_given_by_seawall("Health.remove", "name"),
        *_given_by_seawall("Inbound.read", "incoming", "clock", "no_headers"),
        *_given_by_seawall("Inbound.undo", "incoming", "tokens"),
        *_given_by_seawall("Incoming", "scope", "trust"),
        *_given_by_seawall("Incoming.header", "name"),
        *_given_by_seawall("Incoming.replace_headers", "headers"),
        *_given_by_seawall("Lifecycle.closing_send", "scope", "send"),
        *_given_by_seawall("Lifecycle.lifespan", "app", "scope", "receive", "send"),
        *_given_by_seawall(
            "Problem", "status", "title", "detail", "type", "retry_after", "extensions"
        ),
        *_given_by_seawall("Problem.response", "more", "method"),
        *_given_by_seawall("RequestLimits.admit", "incoming"),
        *_given_by_seawall("RequestLimits.aadmit", "incoming"),
        *_given_by_seawall("Trust.client_address", "peer", "headers"),
        *_given_by_seawall("Trust.is_proxy", "peer"),
        *_given_by_seawall("Trust.believes", "peer", "headers"),
        *_given_by_seawall("problem_of", "error", "rng"),
        *_given_by_seawall(
            "grpc.ServerInterceptor.intercept_service", "continuation", "handler_call_details"
        ),
        *_given_by_seawall(
            "grpc.AioServerInterceptor.intercept_service", "continuation", "handler_call_details"
        ),
    ]
)
"""What servers, frameworks and the edge itself give, or what may be anything."""
