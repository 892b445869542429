"""Whatever is wrong in an argument is told where it was given, with what to write instead."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
from collections.abc import Iterator
from contextvars import ContextVar
from enum import Enum
from math import inf, nan
from operator import attrgetter
from random import Random
from typing import Any, get_origin

import pytest

import seawall
from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    Criticality,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    criticality,
    deadline,
    full_jitter,
    get_guard,
    guards_from_toml,
    static,
    subscribe,
)
from seawall.backoff import (
    constant,
    decorrelated_jitter,
    exponential,
    linear,
    plus_minus,
)
from seawall.clock import SystemClock, VirtualClock
from seawall.config import guard_from_table, guards_to_toml, update_from_toml
from seawall.context import Deadline, idempotency_key, tenant, tier
from seawall.limits import Limit, aimd, gradient2, vegas
from seawall.load import LoopWatchdog, ServiceLevel, ServiceLevels, signals
from seawall.policies.breaker import growing, n_of_m, ramp, slow_start
from seawall.policies.hedge import quantile
from seawall.policies.retry import (
    InFlightRatio,
    RequestRatio,
    RetryThresholds,
    SuccessDeposit,
    adaptive_attempts,
)
from seawall.policies.timeout import adaptive_timeout, timeout_for
from seawall.resources import (
    Channel,
    CpuPool,
    IoPool,
    Pool,
    Serializer,
    Stripes,
    aupdate_optimistically,
    check_threads,
    pool_advice,
    pool_size,
    update_optimistically,
)
from seawall.shedding import (
    adaptive_lifo,
    by_chance,
    by_cost,
    by_criticality,
    by_deadline,
    by_fraction,
    by_latency,
    by_queue,
    by_tier,
    codel,
)
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    retries,
    run_virtual,
    slow,
    virtual_time,
)
from seawall.web import primed
from tests.clients.arguments import CLIENTS, UNCHECKED_BY_CLIENTS
from tests.durable.arguments import DURABLE, UNCHECKED_BY_DURABLE
from tests.members.arguments import MEMBERS, UNCHECKED_BY_MEMBERS
from tests.pipeline.arguments import PIPELINE, UNCHECKED_BY_PIPELINES
from tests.redis.arguments import SHARED, UNCHECKED_BY_REDIS
from tests.web.arguments import UNCHECKED_BY_WEB, WEB

HUGE = 10**400


def _retry(**settings):
    return Retry(**{"on": OSError, **settings})


def _standard(**settings):
    return Guard.standard("bad", **{"on": OSError, "timeout": 2.0, **settings})


def _family(**settings):
    return Guard.family(**{"name": "bad", "make": lambda _key: [Timeout(2.0)], **settings})


def _guard(*policies, **settings):
    return Guard("bad", *(policies or (Timeout(2.0),)), **settings)


def _deadline():
    return Deadline(10.0, VirtualClock())


def _table(**table):
    return guard_from_table("bad", table)


_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (None, TypeError)]
_SECONDS += [(True, TypeError), (HUGE, ValueError), ([1], TypeError)]
_POSITIVE = [*_SECONDS, (0, ValueError), (inf, ValueError)]
_SETTINGS = {"max_connections": "100"}
_FINITE = [*_SECONDS, (inf, ValueError)]
_PAUSES = [case for case in _FINITE if case[0] != [1]]  # a list of delays is a backoff
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), (nan, TypeError), ("3", TypeError)]
_COUNTS += [(True, TypeError), (None, TypeError)]
_NATURALS = [case for case in _COUNTS if case[0] != 0]
_RATIOS = [(-0.1, ValueError), (1.1, ValueError), (nan, ValueError), ("0.5", TypeError)]
_RATIOS += [(True, TypeError), (inf, ValueError)]
_SHARES = [*_RATIOS, (0, ValueError)]
_FACTORS = [(0.5, ValueError), (nan, ValueError), (inf, ValueError), ("2", TypeError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError), (0, TypeError), ("", TypeError), (False, TypeError)]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (["enforce"], ValueError)]


def _optional(cases):
    """Leave None out, which means: as by default."""
    return [case for case in cases if case[0] is not None]


# What is called, which argument is bad, the bad values, and a word of the advice.
ROWS_WITH_OWN_LABELS = [
    # --- policies ---
    ("Timeout", Timeout, _POSITIVE, r"seconds"),
    ("Timeout sync", lambda x: Timeout(1, sync=x), _CHOICES, "'cooperative', 'thread'"),
    ("Timeout threads", lambda x: Timeout(1, sync="thread", max_threads=x), _COUNTS, "write"),
    ("Timeout threads unused", lambda x: Timeout(1, max_threads=x), _COUNTS, "write"),
    ("Timeout update", lambda x: Timeout(1).update(seconds=x), _POSITIVE, "seconds"),
    ("Retry attempts", lambda x: _retry(attempts=x), _COUNTS, "write .*number|1 or more"),
    ("Retry backoff", lambda x: _retry(backoff=x), [*_PAUSES, ("", TypeError)], "seconds"),
    ("Retry delays", lambda x: _retry(backoff=[0.1, x]), _FINITE, "seconds"),
    ("Retry no delays", lambda x: _retry(backoff=x), [([], ValueError)], "at least one delay"),
    (
        "Retry on",
        lambda x: Retry(on=x),
        [
            ("OSError", TypeError),
            ((), ValueError),
            ([], ValueError),
            (None, TypeError),
            (5, TypeError),
            (True, TypeError),
            (BaseException, TypeError),
            ((OSError, "x"), TypeError),
            ((OSError, KeyboardInterrupt), TypeError),
            ((OSError, 5), TypeError),
            (int, TypeError),
            (OSError(), TypeError),
        ],
        r"exception types, such as on=ConnectionError",
    ),
    ("Retry on missing", lambda _: Retry(), [(None, TypeError)], "on"),
    (
        "Retry budget",
        lambda x: _retry(budget=x),
        [(True, TypeError), (0.2, TypeError), (SuccessDeposit(), TypeError), (0, TypeError)],
        r"budget=RetryBudget\(",
    ),
    ("Retry reader", lambda x: _retry(retry_after=x), _FUNCTIONS, "function"),
    ("Retry longest", lambda x: _retry(max_retry_after=x), _FINITE, "seconds"),
    ("Retry update", lambda x: _retry().update(attempts=x), _COUNTS, "write"),
    ("Retry update pause", lambda x: _retry().update(backoff=x), _PAUSES, "seconds"),
    ("adaptive_attempts", adaptive_attempts, [*_COUNTS, (1, ValueError)], "write"),
    (
        "adaptive_attempts rule",
        lambda x: adaptive_attempts(4, x),
        [(0.5, TypeError), ({}, TypeError)],
        "function",
    ),
    (
        "adaptive_attempts signals",
        lambda x: adaptive_attempts(4, signals=x),
        [(0.5, TypeError), ([0.5], TypeError)],
        "write|pass",
    ),
    ("RetryThresholds wait", lambda x: RetryThresholds(queue_wait=x), _SECONDS, "seconds"),
    ("RetryThresholds average", lambda x: RetryThresholds(average_queue_wait=x), _SECONDS, "sec"),
    ("RetryThresholds slots", lambda x: RetryThresholds(saturation=x), _FINITE, "number"),
    ("RetryThresholds load", lambda x: RetryThresholds(load=x), _FINITE, "number"),
    (
        "RetryThresholds errors",
        lambda x: RetryThresholds(error_rates=x),
        [(0.5, TypeError), ({1.5: 1}, ValueError), ({0.5: -1}, ValueError), ([0.5], TypeError)],
        "write",
    ),
    ("RetryBudget", RetryBudget, [(0.2, TypeError), (True, TypeError)], r"SuccessDeposit\(\)"),
    ("SuccessDeposit", SuccessDeposit, [(2, ValueError), (nan, ValueError), ("9", TypeError)], "3"),
    ("SuccessDeposit ratio", lambda x: SuccessDeposit(10, x), _SHARES, "share"),
    ("RequestRatio", RequestRatio, _RATIOS, "share"),
    ("RequestRatio window", lambda x: RequestRatio(window=x), _POSITIVE, "seconds"),
    ("RequestRatio floor", lambda x: RequestRatio(floor=x), _FINITE, "number"),
    ("InFlightRatio", InFlightRatio, _RATIOS, "share"),
    ("InFlightRatio floor", lambda x: InFlightRatio(floor=x), _NATURALS, "write"),
    ("Fallback reserve", lambda x: Fallback(static(1), reserve=x), _optional(_SECONDS), "seconds"),
    ("Bulkhead", Bulkhead, _COUNTS, "write"),
    ("Bulkhead wait", lambda x: Bulkhead(1, max_wait=x), _SECONDS, "seconds"),
    ("Bulkhead room", lambda x: Bulkhead(1, max_waiting=x), _optional(_COUNTS), "write"),
    ("Bulkhead order", lambda x: Bulkhead(1, order=x), _CHOICES, "'fifo', 'lifo', 'criticality'"),
    ("Bulkhead mode", lambda x: Bulkhead(1, mode=x), _CHOICES, "'enforce', 'shadow', 'off'"),
    ("Bulkhead update", lambda x: Bulkhead(1).update(limit=x), _COUNTS, "write"),
    ("Bulkhead update mode", lambda x: Bulkhead(1).update(mode=x), _CHOICES, "'shadow'"),
    ("Bulkhead update wait", lambda x: Bulkhead(1).update(max_wait=x), _SECONDS, "seconds"),
    ("ThreadBulkhead", ThreadBulkhead, _COUNTS, "write"),
    (
        "ThreadBulkhead queue",
        lambda x: ThreadBulkhead(1, max_queue=x),
        _optional(_NATURALS),
        "write",
    ),
    ("Cache", Cache, _POSITIVE, "seconds"),
    ("Cache stale", lambda x: Cache(1, stale_if_error=x), _FINITE, "seconds"),
    ("Cache entries", lambda x: Cache(1, max_entries=x), _COUNTS, "write"),
    ("Cache key", lambda x: Cache(1, key=x), _FUNCTIONS, "function"),
    ("Cache update", lambda x: Cache(1).update(ttl=x), _POSITIVE, "seconds"),
    ("Cache update size", lambda x: Cache(1).update(max_entries=x), _COUNTS, "write"),
    ("Fallback empty", lambda _: Fallback(), [(None, ValueError)], r"static\('try later'\)"),
    (
        "Fallback",
        Fallback,
        [(5, TypeError), ("x", TypeError), (None, TypeError)],
        r"write static\(",
    ),
    (
        "Fallback on",
        lambda x: Fallback(static(1), on=x),
        [
            (5, TypeError),
            (None, TypeError),
            ("OSError", TypeError),
            ((), TypeError),
            (int, TypeError),
            (KeyboardInterrupt, TypeError),
            ((OSError, 5), TypeError),
        ],
        "exception types, such as on=ConnectionError",
    ),
    ("Breaker ratio", lambda x: Breaker(failure_ratio=x), _SHARES, "share"),
    ("Breaker window", lambda x: Breaker(window=x), _optional(_POSITIVE), "seconds"),
    ("Breaker calls", lambda x: Breaker(window_calls=x), _optional(_COUNTS), "write"),
    ("Breaker least", lambda x: Breaker(min_calls=x), _optional(_COUNTS), "write"),
    ("Breaker consecutive", lambda x: Breaker(consecutive=x), _optional(_COUNTS), "write"),
    (
        "Breaker slow",
        lambda x: Breaker(slow_after=x, slow_ratio=1),
        _optional(_POSITIVE),
        "seconds",
    ),
    ("Breaker slow ratio", lambda x: Breaker(slow_after=1, slow_ratio=x), _SHARES, "share"),
    ("Breaker slow alone", lambda x: Breaker(slow_after=x), [(1.0, ValueError)], "slow_ratio"),
    ("Breaker break", lambda x: Breaker(break_for=x), _POSITIVE, "seconds"),
    ("Breaker break made", lambda x: Breaker(break_for=lambda _: x), _POSITIVE, "seconds"),
    (
        "Breaker probes",
        lambda x: Breaker(probes=x),
        [(3, TypeError), ("x", TypeError)],
        "single_probe()",
    ),
    ("Breaker probe time", lambda x: Breaker(probe_timeout=x), _POSITIVE, "seconds"),
    ("Breaker probe", lambda x: Breaker(probe=x), _FUNCTIONS, "function"),
    ("Breaker probe often", lambda x: Breaker(probe=print, probe_every=x), _POSITIVE, "seconds"),
    ("Breaker classifier", lambda x: Breaker(is_failure=x), _FUNCTIONS, "function"),
    ("Breaker counts", lambda x: Breaker(counts=x), _CHOICES, "'calls', 'attempts'"),
    ("Breaker key", lambda x: Breaker(key=x), _FUNCTIONS, "function"),
    ("Breaker keys", lambda x: Breaker(max_keys=x), _COUNTS, "write"),
    ("Breaker mode", lambda x: Breaker(mode=x), _CHOICES, "'enforce', 'shadow', 'off'"),
    ("Breaker update", lambda x: Breaker().update(failure_ratio=x), _SHARES, "share"),
    ("Breaker isolate", lambda x: Breaker().isolate(x), [("key", TypeError)], "keyed"),
    ("Breaker trip", lambda x: Breaker().trip(x), [("key", TypeError)], "keyed"),
    (
        "Breaker isolate keyed",
        lambda _: Breaker(key=len).isolate(),
        [(None, TypeError)],
        "give the key",
    ),
    # --- settings that do not exist ---
    ("update nothing", lambda x: x.update(), [(Timeout(1), TypeError)], "name what to change"),
    (
        "update unknown",
        lambda x: x.update(nonsense=1),
        [
            (Timeout(1), TypeError),
            (Bulkhead(1), TypeError),
            (Breaker(), TypeError),
            (Cache(1), TypeError),
            (_retry(), TypeError),
        ],
        "it takes",
    ),
    (
        "update fixed",
        lambda x: x.update(nonsense=1),
        [(Fallback(static(1)), TypeError), (ThreadBulkhead(1), TypeError)],
        "nothing that can be changed",
    ),
    # --- numbers for policies ---
    ("adaptive p", lambda x: adaptive_timeout(p=x, floor=1, cap=2), _SHARES, "share"),
    (
        "adaptive factor",
        lambda x: adaptive_timeout(factor=x, floor=1, cap=2),
        _FACTORS,
        "at least 1",
    ),
    ("adaptive floor", lambda x: adaptive_timeout(floor=x, cap=2), _POSITIVE, "seconds"),
    ("adaptive cap", lambda x: adaptive_timeout(floor=1, cap=x), _POSITIVE, "seconds"),
    (
        "adaptive order",
        lambda x: adaptive_timeout(floor=2, cap=x),
        [(1, ValueError)],
        "a cap of at least",
    ),
    ("constant", constant, _FINITE, "seconds"),
    ("constant jitter", lambda x: constant(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("full_jitter", full_jitter, _FINITE, "seconds"),
    ("full_jitter cap", lambda x: full_jitter(1, x), _FINITE, "seconds"),
    ("full_jitter order", lambda x: full_jitter(2, x), [(1, ValueError)], r"write cap=2.0 or more"),
    ("exponential", exponential, _FINITE, "seconds"),
    ("exponential factor", lambda x: exponential(1, factor=x), _FACTORS, "at least 1"),
    ("exponential jitter", lambda x: exponential(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("linear", linear, _FINITE, "seconds"),
    ("linear step", lambda x: linear(1, step=x), _optional(_FINITE), "seconds"),
    ("linear jitter", lambda x: linear(1, jitter=x), _CHOICES, "'full', 'equal'"),
    ("decorrelated_jitter", decorrelated_jitter, _FINITE, "seconds"),
    ("decorrelated cap", lambda x: decorrelated_jitter(1, x), _FINITE, "seconds"),
    ("plus_minus", plus_minus, _SHARES, "share"),
    ("growing", growing, _POSITIVE, "seconds"),
    ("growing factor", lambda x: growing(1, factor=x), _FACTORS, "at least 1"),
    ("growing cap", lambda x: growing(1, cap=x), _POSITIVE, "seconds"),
    ("growing order", lambda x: growing(10, cap=x), [(5, ValueError)], "cap"),
    ("n_of_m n", lambda x: n_of_m(x, 3), _COUNTS, "write"),
    ("n_of_m m", lambda x: n_of_m(1, x), _COUNTS, "write"),
    ("n_of_m order", lambda x: n_of_m(3, x), [(2, ValueError)], "n <= m"),
    ("ramp step", lambda x: ramp(step=x), _POSITIVE, "seconds"),
    ("slow_start step", lambda x: slow_start(step=x), _POSITIVE, "seconds"),
    ("ramp shares", lambda x: ramp((0.1, x), step=1), _SHARES, "share"),
    (
        "ramp order",
        lambda x: ramp(x, step=1),
        [((), ValueError), ((0.5, 0.1), ValueError), ((0.5, 0.5), ValueError)],
        "growing shares",
    ),
    ("ramp no shares", lambda x: ramp(x, step=1), [(5, TypeError), (0.5, TypeError)], "shares"),
    (
        "pool_advice settings",
        lambda x: pool_advice(x, pods=1, size=1),
        [(5, TypeError), ({}, TypeError), (None, TypeError)],
        "CONNECTION_SETTINGS",
    ),
    ("pool_advice pods", lambda x: pool_advice(_SETTINGS, pods=x, size=1), _COUNTS, "write"),
    ("pool_advice size", lambda x: pool_advice(_SETTINGS, pods=1, size=x), _COUNTS, "write"),
    ("pool_size", lambda x: pool_size(x, 1), _FINITE, "number"),
    ("pool_size time", lambda x: pool_size(1, x), _FINITE, "seconds"),
    ("pool_size headroom", lambda x: pool_size(1, 1, x), _FACTORS, "at least 1"),
    ("timeout_for", timeout_for, _POSITIVE, "seconds"),
    ("timeout_for factor", lambda x: timeout_for(1, x), _FACTORS, "at least 1"),
    ("timeout_for budget", lambda x: timeout_for(1, 2, x), _optional(_POSITIVE), "seconds"),
    # --- guards ---
    ("Guard name", lambda x: Guard(x, Timeout(1)), [("", TypeError), (5, TypeError)], "a name"),
    ("Guard no name", lambda _: Guard(Timeout(1)), [(None, TypeError)], "such as 'vendor'"),
    ("Guard empty", lambda _: Guard("bad"), [(None, ValueError)], "at least one policy"),
    ("Guard class", _guard, [(Timeout, TypeError)], r"write Timeout\(\.\.\.\)"),
    ("Guard value", _guard, [(5, TypeError), ([Timeout(1)], TypeError)], "no policy"),
    ("Guard twice", lambda x: _guard(x, x), [(Timeout(1), ValueError)], "make a second one"),
    (
        "Guard idempotent",
        lambda x: _guard(idempotent=x),
        [("no", TypeError), (None, TypeError)],
        "True or False",
    ),
    (
        "Guard max_wait",
        lambda x: _guard(max_wait=x),
        [(-1.0, ValueError), ("1", TypeError), (float("nan"), ValueError)],
        "max_wait",
    ),
    (
        "Guard replace",
        lambda x: _guard(replace=x),
        [("yes", TypeError), (None, TypeError)],
        "True or False",
    ),
    ("Guard clock", lambda x: _guard(clock=x), [(5, TypeError), (SystemClock, TypeError)], "clock"),
    ("Guard rng", lambda x: _guard(rng=x), [(5, TypeError), (Random, TypeError)], "Random"),
    (
        "Guard mark",
        lambda x: _guard()(idempotent=x),
        [("no", TypeError)],
        "True or False",
    ),
    ("Guard call", lambda x: _guard(Bulkhead(1)).call(x), [(5, TypeError)], "function|callable"),
    (
        "Guard map function",
        lambda x: _guard(Bulkhead(1)).map(x, []),
        [(5, TypeError)],
        "function",
    ),
    (
        "Guard amap function",
        lambda x: run_virtual(_guard(Bulkhead(1)).amap(x, [])),
        [(5, TypeError)],
        "function",
    ),
    ("Guard map items", lambda x: _guard(Bulkhead(1)).map(int, x), [(5, TypeError)], "a list"),
    (
        "Guard amap items",
        lambda x: run_virtual(_guard(Bulkhead(1)).amap(int, x)),
        [(5, TypeError)],
        "a list",
    ),
    (
        "Guard map concurrency",
        lambda x: _guard(Bulkhead(1)).map(int, [], concurrency=x),
        _optional(_COUNTS),
        "write",
    ),
    (
        "Guard amap concurrency",
        lambda x: run_virtual(_guard(Bulkhead(1)).amap(int, [], concurrency=x)),
        _optional(_COUNTS),
        "write",
    ),
    ("standard on", lambda _: Guard.standard("bad", timeout=1), [(None, TypeError)], "on"),
    ("standard timeout", lambda x: _standard(timeout=x), _POSITIVE, "seconds"),
    ("standard attempts", lambda x: _standard(attempts=x), _COUNTS, "write"),
    ("standard backoff", lambda x: _standard(backoff=x), _PAUSES, "seconds"),
    ("standard total", lambda x: _standard(total_timeout=x), _optional(_POSITIVE), "seconds"),
    (
        "standard total unused",
        lambda x: _standard(total_timeout=x, attempts=1),
        _optional(_POSITIVE),
        "seconds",
    ),
    ("standard limit", lambda x: _standard(limit=x), _optional(_COUNTS), "write"),
    ("standard wait", lambda x: _standard(limit=1, max_wait=x), _SECONDS, "seconds"),
    ("standard wait unused", lambda x: _standard(max_wait=x), _SECONDS, "seconds"),
    ("standard wait no limit", lambda x: _standard(max_wait=x), [(1.0, ValueError)], "limit"),
    (
        "standard fallback",
        lambda x: _standard(fallback=x),
        [(5, TypeError), ("later", TypeError), ([5], TypeError), ([], ValueError)],
        "static",
    ),
    ("standard sync", lambda x: _standard(sync=x), _CHOICES, "'cooperative', 'thread'"),
    ("get_guard make", lambda x: get_guard("bad", x), _FUNCTIONS, "function"),
    ("get_guard", get_guard, [("nobody", KeyError), (5, KeyError)], "there are"),
    ("check_threads", check_threads, _COUNTS, "write"),
    ("subscribe", subscribe, [(5, TypeError), (None, TypeError)], "takes one event"),
    ("subscribe types", lambda x: subscribe(print, x), [(5, TypeError), (int, TypeError)], "event"),
    # --- context ---
    ("deadline", deadline, _FINITE, "seconds"),
    ("deadline clock", lambda x: deadline(1.0, clock=x), [(5, TypeError)], "clock"),
    (
        "Deadline",
        lambda x: Deadline(x, VirtualClock()),
        [("soon", TypeError), (nan, ValueError), (None, TypeError)],
        "instant",
    ),
    ("shrink", lambda x: _deadline().shrink(x), _FINITE, "seconds"),
    ("split", lambda x: _deadline().split(x), [(0, ValueError), (-1, ValueError)], "1 or more"),
    ("split type", lambda x: _deadline().split(x), [(1.5, TypeError), (None, TypeError)], "split"),
    ("split weights", lambda x: _deadline().split([1, x]), _FINITE, "number"),
    (
        "split nothing",
        lambda x: _deadline().split(x),
        [([], ValueError), ([0], ValueError)],
        r"\[1,",
    ),
    ("criticality", criticality, [(2, TypeError), ("CRITICAL", TypeError)], "Criticality.CRITICAL"),
    ("idempotency_key", idempotency_key, [("", ValueError), (5, ValueError)], "non-empty string"),
    ("VirtualClock", VirtualClock, _FINITE, "number"),
    ("VirtualClock sleep", lambda x: VirtualClock().sleep(x), _FINITE, "seconds"),
    ("VirtualClock back", lambda x: VirtualClock(5).advance_to(x), [(1, ValueError)], "later"),
    # --- settings from tables ---
    ("table", lambda x: guard_from_table("bad", x), [(5, TypeError), ([], TypeError)], "a table"),
    ("table empty", lambda _: _table(), [(None, ValueError)], "'standard' or"),
    ("table both", lambda _: _table(standard={}, policies=[]), [(None, ValueError)], "either"),
    ("table unknown", lambda _: _table(nonsense=1), [(None, ValueError)], "there are policies"),
    ("table standard", lambda x: _table(standard=x), [(5, TypeError), ("x", TypeError)], "table"),
    (
        "table policies",
        lambda x: _table(policies=x),
        [(5, TypeError), ("x", (TypeError, ValueError))],
        "list|one of",
    ),
    ("table no policies", lambda x: _table(policies=x), [([], ValueError)], "at least one policy"),
    (
        "table policy",
        lambda x: _table(policies=[x]),
        [({}, ValueError), ({"policy": "x"}, ValueError), (5, ValueError)],
        "write one of adaptive_limit, breaker, bulkhead",
    ),
    (
        "table idempotent",
        lambda x: _table(standard={"on": "OSError", "timeout": 1}, idempotent=x),
        [("no", TypeError)],
        "True or False|true or false",
    ),
    (
        "table on",
        lambda x: _table(standard={"on": x, "timeout": 1}),
        [("Nonsense", ValueError), ("int", ValueError), (["print"], ValueError)],
        "names=",
    ),
    (
        "table on type",
        lambda x: _table(standard={"on": x, "timeout": 1}),
        [(5, TypeError), ([5], TypeError), ([["OSError"]], TypeError)],
        "exception",
    ),
    (
        "table fallback",
        lambda x: _table(standard={"on": "OSError", "timeout": 1, "fallback": x}),
        [("later", ValueError), (["later"], ValueError)],
        r"names=\{'later'",
    ),
    ("toml", guards_from_toml, [("", ValueError), ("a = 1", ValueError)], r"\[guards.vendor"),
    ("toml type", guards_from_toml, [(b"", TypeError)], "str|text"),
    ("update", update_from_toml, [("", ValueError), ("a = 1", ValueError)], r"\[pools"),
    ("update type", update_from_toml, [(b"", TypeError)], "str|text"),
    ("write", guards_to_toml, [(5, TypeError), ("vendor", TypeError), ([5], TypeError)], "guards"),
    # --- helpers for tests ---
    ("retries", lambda x: retries(x).__enter__(), _CHOICES, "'instant', 'off'"),
    ("answer", lambda x: answer(times=x), _optional(_COUNTS), "write"),
    ("hang", lambda x: hang(times=x), _optional(_COUNTS), "write"),
    ("slow", slow, _SECONDS, "seconds"),
    ("fail", fail, [("x", TypeError), (5, TypeError), (KeyboardInterrupt(), TypeError)], "rror"),
    ("ScriptedService", ScriptedService, [(5, TypeError), ("x", TypeError)], "answer"),
    ("ScriptedService empty", lambda _: ScriptedService(), [(None, ValueError)], "answer"),
    ("virtual_time", lambda x: virtual_time(x).__enter__(), [(5, TypeError)], "VirtualClock"),
    (
        "run_virtual",
        run_virtual,
        [(bad, (TypeError, ValueError)) for bad in (5, print)],
        "coroutine",
    ),
]


# --- What is scarce ---


async def _later(*_args: object) -> None:
    """Be a function that a sync caller cannot use."""


def _pool(connect: Any = object, **settings: Any) -> Pool[object]:
    return Pool(connect, **{"name": "bad", "max_size": 2, **settings})


def _service_levels(**settings: Any) -> ServiceLevels:
    return ServiceLevels("bad", **{"load": lambda: 0.0, **settings})


def _update(read: Any = lambda: (1, 1), **settings: Any) -> Any:
    arguments = {"change": abs, "write": lambda *_: True, **settings}
    return update_optimistically(read, **arguments)


def _aupdate(read: Any = lambda: (1, 1), **settings: Any) -> Any:
    arguments = {"change": abs, "write": lambda *_: True, **settings}
    return run_virtual(aupdate_optimistically(read, **arguments))


def _rule(rule: Any) -> Shed:
    return Shed(rule, load=lambda: 0.0)


_local_var: Any = [ContextVar("not_a_global")]

_RATES = [
    (5, TypeError),
    (None, TypeError),
    (b"60/s", TypeError),
    (["60/s"], TypeError),
    (Limit, TypeError),
    ("", ValueError),
    ("60", ValueError),
    ("/s", ValueError),
    ("0/s", ValueError),
    ("-1/s", ValueError),
    ("60/fortnight", ValueError),
    ("60/0s", ValueError),
    ("1.5/s", ValueError),
    ("nan/s", ValueError),
    ("inf/s", ValueError),
    ("1e3/s", ValueError),
    ("9" * 31 + "/s", ValueError),
    ("9" * 400 + "/s", ValueError),
    ("60/s; drop", ValueError),
]
_AT_LEAST_ZERO = [(-1.0, ValueError), (nan, ValueError), (inf, ValueError), ("2", TypeError)]
_AT_LEAST_ZERO += [(None, TypeError), (True, TypeError), (HUGE, ValueError)]
_AT_LEAST_ONE = [*_AT_LEAST_ZERO, (0.5, ValueError)]
_STARTS = [*_RATIOS, (1, ValueError), (None, TypeError)]
_FLAGS = [("yes", TypeError), (1, TypeError), (None, TypeError), (0, TypeError)]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError), ("now", TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError), ("seed", TypeError)]
_NAMES = [
    ("", (TypeError, ValueError)),
    (5, (TypeError, ValueError)),
    (None, (TypeError, ValueError)),
]
_ERRORS = [
    (5, TypeError),
    ("OSError", TypeError),
    (None, TypeError),
    (int, TypeError),
    (KeyboardInterrupt, TypeError),
    (OSError(), TypeError),
    ((OSError, 5), TypeError),
    ((OSError, BaseException), TypeError),
]
_LEVELS = [("nonsense", ValueError), ("FULL", ValueError), (1, ValueError), (None, ValueError)]
_LEVELS += [([], ValueError)]
_REFUSALS = [*_ERRORS[:-2], ((), ValueError), ((OSError, "x"), TypeError)]
_REFUSALS += [((OSError, KeyboardInterrupt), TypeError)]
_RULES = [(5, TypeError), (None, TypeError), ("x", TypeError), (by_criticality, TypeError)]
_RULES += [(codel(), TypeError), ([by_criticality()], TypeError)]
_KEPT = [(True, TypeError), ("critical", TypeError), (Criticality.SHEDDABLE, ValueError)]
_KEPT += [(4, ValueError), (-1, ValueError)]
_SHEDS = [(5, TypeError), ("codel", TypeError), (codel, TypeError)]
_PARTITIONS = [
    (5, TypeError),
    ("live", TypeError),
    ({}, TypeError),
    ([("live", 0.5)], TypeError),
    ({5: 0.5}, TypeError),
    ({"": 0.5}, TypeError),
    ({"live": "0.5"}, TypeError),
    ({"live": 0}, ValueError),
    ({"live": nan}, ValueError),
    ({"live": 1.5}, ValueError),
    ({"live": 0.6, "batch": 0.6}, ValueError),
]
_LATENCIES = [
    (0, ValueError),
    (-1.0, ValueError),
    (nan, ValueError),
    (inf, ValueError),
    (HUGE, ValueError),
    ("1", TypeError),
    (True, TypeError),
    ((), ValueError),
    ((0.1,), ValueError),
    ((0.1, 0.2, 0.3), ValueError),
    ((0.5, 0.1), ValueError),
    ((-1, 0.1), ValueError),
    (("0.1", 1), TypeError),
    ((0.1, inf), ValueError),
    ((0.1, None), TypeError),
]
_THRESHOLDS = [
    (5, TypeError),
    ("cached", TypeError),
    ([("cached", 0.5)], TypeError),
    ({"nonsense": 0.5}, ValueError),
    ({5: 0.5}, ValueError),
    ({"full": 0.5}, ValueError),
    ({"cached": -1}, ValueError),
    ({"cached": nan}, ValueError),
    ({"cached": "0.5"}, TypeError),
    ({"cached": 0.9, "static": 0.5}, ValueError),
    ({"cached": 0.5, "static": 0.5}, ValueError),
]
_TIERS = [
    (5, TypeError),
    (None, TypeError),
    ("free", TypeError),
    (["free"], TypeError),
    ({5: 0.7}, TypeError),
    ({"free": -1}, ValueError),
    ({"free": nan}, ValueError),
    ({"free": "0.7"}, (TypeError, ValueError)),
    ({"free": None}, (TypeError, ValueError)),
    ({"free": True}, (TypeError, ValueError)),
]
_BARS = [
    (bars["free"], error) for bars, error in _TIERS if isinstance(bars, dict) and "free" in bars
]

# The label says which argument of what: a test looks whether one is missing.
ROWS = [
    ("Family(name)", lambda x: _family(name=x), [("", TypeError), (5, TypeError)], "a name"),
    ("Family(make)", lambda x: _family(make=x), [*_FUNCTIONS, (None, TypeError)], "function"),
    ("Family(max_keys)", lambda x: _family(max_keys=x), _COUNTS, "write"),
    (
        "Family(max_wait)",
        lambda x: _family(max_wait=x),
        [(-1.0, ValueError), ("1", TypeError)],
        "max_wait",
    ),
    ("Family(idempotent)", lambda x: _family(idempotent=x), [(5, TypeError)], "True or False"),
    ("Family(replace)", lambda x: _family(replace=x), [(5, TypeError)], "True or False"),
    (
        "Family(clock)",
        lambda x: _family(clock=x),
        [(5, TypeError), (SystemClock, TypeError)],
        "clo",
    ),
    ("Family(rng)", lambda x: _family(rng=x), [(5, TypeError), (Random, TypeError)], "Random"),
    ("Family.worst(most)", lambda x: _family().worst(x), _COUNTS, "write"),
    ("Family.map(function)", lambda x: _family().map(x, []), [(5, TypeError)], "function"),
    ("Family.map(items)", lambda x: _family().map(int, x), [(5, TypeError)], "a list"),
    ("Family.map(by)", lambda x: _family().map(int, [], by=x), _FUNCTIONS, "function"),
    (
        "Family.map(concurrency)",
        lambda x: _family().map(int, [], concurrency=x),
        _COUNTS,
        "write",
    ),
    (
        "Family.amap(function)",
        lambda x: run_virtual(_family().amap(x, [])),
        [(5, TypeError)],
        "function",
    ),
    (
        "Family.amap(items)",
        lambda x: run_virtual(_family().amap(int, x)),
        [(5, TypeError)],
        "a list",
    ),
    (
        "Family.amap(by)",
        lambda x: run_virtual(_family().amap(int, [], by=x)),
        _FUNCTIONS,
        "function",
    ),
    (
        "Family.amap(concurrency)",
        lambda x: run_virtual(_family().amap(int, [], concurrency=x)),
        _COUNTS,
        "write",
    ),
    ("Family by", lambda x: _family()(by=x), [*_FUNCTIONS[::2], (None, TypeError)], "function"),
    # --- rate limits ---
    ("RateLimit(limits)", RateLimit, _RATES, "such as '60/s'|'1/2s'"),
    ("RateLimit(limits) none", lambda _: RateLimit(), [(None, TypeError)], "'60/s'"),
    ("RateLimit(limits) alike", lambda x: RateLimit(x, x), [("1/s", ValueError)], "name="),
    ("RateLimit(burst)", lambda x: RateLimit("1/s", burst=x), _optional(_COUNTS), "write"),
    ("RateLimit(burst) huge", lambda x: RateLimit("1/s", burst=x), [(HUGE, ValueError)], "write"),
    ("RateLimit(algorithm)", lambda x: RateLimit("1/s", algorithm=x), _CHOICES, "'leaky_bucket'"),
    ("RateLimit(key)", lambda x: RateLimit("1/s", key=x), _FUNCTIONS, "function"),
    (
        "RateLimit(cost)",
        lambda x: RateLimit("5/s", cost=x),
        [*_COUNTS, (6, ValueError)],
        "write|most|more",
    ),
    ("RateLimit(settle)", lambda x: RateLimit("1/s", settle=x), _FUNCTIONS, "function"),
    (
        "RateLimit(max_debt)",
        lambda x: RateLimit("1/s", max_debt=x),
        _optional(_AT_LEAST_ZERO),
        "seconds",
    ),
    ("RateLimit(max_wait)", lambda x: RateLimit("1/s", max_wait=x), _SECONDS, "seconds"),
    ("RateLimit(max_waiting)", lambda x: RateLimit("1/s", max_waiting=x), _COUNTS, "write"),
    ("RateLimit(max_keys)", lambda x: RateLimit("1/s", max_keys=x), _COUNTS, "write"),
    ("RateLimit(mode)", lambda x: RateLimit("1/s", mode=x), _CHOICES, "'shadow'"),
    (
        "RateLimit(limits) options",
        lambda x: RateLimit(Limit("1/s"), **x),
        [({"burst": 3}, TypeError), ({"key": len}, TypeError), ({"cost": 2}, TypeError)],
        "inside Limit",
    ),
    (
        "RateLimit(burst) of a window",
        lambda x: RateLimit("1/s", burst=3, algorithm=x),
        [("leaky_bucket", ValueError), ("fixed_window", ValueError), ("sliding_log", ValueError)],
        "token bucket",
    ),
    (
        "RateLimit.update(limits)",
        lambda x: RateLimit("1/s").update(limits=x),
        [case for case in _RATES if case[1] is ValueError],
        "'60/s'|'1/2s'",
    ),
    (
        "RateLimit.update(limits) others",
        lambda x: RateLimit("1/s").update(limits=x),
        [
            (("1/s", "1/min"), ValueError),
            (Limit("1/s", algorithm="sliding_log"), ValueError),
            (Limit("1/s", key=len), ValueError),
        ],
        "make a new RateLimit",
    ),
    (
        "RateLimit.update(burst)",
        lambda x: RateLimit("1/s").update(burst=x),
        _optional(_COUNTS),
        "write",
    ),
    ("RateLimit.update(max_wait)", lambda x: RateLimit("1/s").update(max_wait=x), _SECONDS, "sec"),
    ("RateLimit.update(max_keys)", lambda x: RateLimit("1/s").update(max_keys=x), _COUNTS, "write"),
    (
        "RateLimit.update(max_waiting)",
        lambda x: RateLimit("1/s").update(max_waiting=x),
        _COUNTS,
        "w",
    ),
    ("RateLimit.update(mode)", lambda x: RateLimit("1/s").update(mode=x), _CHOICES, "'shadow'"),
    (
        "RateLimit.update(key)",
        lambda x: RateLimit("1/s").update(key=x),
        [(len, TypeError)],
        "it takes",
    ),
    ("RateLimit.divide(pods)", lambda x: RateLimit("9/s").divide(x), _COUNTS, "write"),
    (
        "RateLimit.reserve(cost)",
        lambda x: RateLimit("9/s").reserve(cost=x),
        _optional(_NATURALS),
        "write",
    ),
    (
        "RateLimit.reserve(key)",
        lambda x: RateLimit("9/s", key=lambda: x).reserve(),
        [([], TypeError), ({}, TypeError)],
        "return text",
    ),
    ("RateLimit.peek(cost)", lambda x: RateLimit("9/s", cost=lambda: x).peek(), _NATURALS, "write"),
    (
        "RateLimit.peek(cost=)",
        lambda x: RateLimit("9/s").peek(cost=x),
        _optional(_NATURALS),
        "write",
    ),
    (
        "RateLimit.apeek(cost)",
        lambda x: asyncio.run(RateLimit("9/s").apeek(cost=x)),
        _optional(_NATURALS),
        "write",
    ),
    (
        "Reservation.settle(actual)",
        lambda x: RateLimit("9/s").reserve().settle(x),
        _NATURALS,
        "write",
    ),
    ("Limit(rate)", Limit, _RATES, "such as '60/s'|'1/2s'"),
    ("Limit(burst)", lambda x: Limit("1/s", burst=x), _optional(_COUNTS), "write"),
    ("Limit(algorithm)", lambda x: Limit("1/s", algorithm=x), _CHOICES, "'leaky_bucket'"),
    ("Limit(key)", lambda x: Limit("1/s", key=x), _FUNCTIONS, "function"),
    ("Limit(cost)", lambda x: Limit("5/s", cost=x), [*_COUNTS, (6, ValueError)], "write|more"),
    ("Limit(settle)", lambda x: Limit("1/s", settle=x), _FUNCTIONS, "function"),
    ("Limit(max_debt)", lambda x: Limit("1/s", max_debt=x), _optional(_AT_LEAST_ZERO), "seconds"),
    (
        "Limit(name)",
        lambda x: Limit("1/s", name=x),
        [("", TypeError), (5, TypeError)],
        "text, such",
    ),
    ("Guard.standard(rate)", lambda x: _standard(rate=x), _RATES[2:], "such as '60/s'|'1/2s'"),
    # --- shedding ---
    ("Shed(rules)", _rule, _RULES, "by_criticality"),
    ("Shed(rules) none", lambda _: Shed(load=lambda: 0.0), [(None, TypeError)], "give it a rule"),
    ("Shed(load)", lambda x: Shed(by_fraction(0.1), load=x), _FUNCTIONS, "function"),
    (
        "Shed(load) missing",
        Shed,
        [
            (by_criticality(), TypeError),
            (by_tier(), TypeError),
            (by_chance(), TypeError),
            (by_cost(len, most=9), TypeError),
        ],
        "write load=",
    ),
    (
        "Shed(load) without meaning",
        lambda x: Shed(x, load=lambda: 0.5),
        [(by_fraction(0.1), TypeError), (by_deadline(), TypeError), (by_latency(1.0), TypeError)],
        "leave load= out",
    ),
    ("Shed(mode)", lambda x: Shed(by_fraction(0.1), mode=x), _CHOICES, "'shadow'"),
    (
        "Shed.update(rules)",
        lambda x: Shed(by_fraction(0.1)).update(rules=x),
        [*_RULES[:-1], ([], TypeError)],
        "rule",
    ),
    (
        "Shed.update(rules) others",
        lambda x: Shed(by_fraction(0.1)).update(rules=x),
        [([by_deadline()], ValueError), ([by_fraction(0.1), by_deadline()], ValueError)],
        "the same rules",
    ),
    ("Shed.update(load)", lambda x: Shed(by_fraction(0.1)).update(load=x), _FUNCTIONS, "function"),
    ("Shed.update(mode)", lambda x: Shed(by_fraction(0.1)).update(mode=x), _CHOICES, "'shadow'"),
    ("by_criticality(start)", by_criticality, _STARTS, "write"),
    ("by_criticality(keep)", lambda x: by_criticality(keep=x), _KEPT, "write a Criticality"),
    ("by_tier(keep)", lambda x: by_tier(keep=x), _KEPT, "write a Criticality"),
    ("by_cost(keep)", lambda x: by_cost(len, most=9, keep=x), _KEPT, "write a Criticality"),
    ("by_chance(keep)", lambda x: by_chance(keep=x), _KEPT, "write a Criticality"),
    ("by_fraction(keep)", lambda x: by_fraction(0.1, keep=x), _KEPT, "write a Criticality"),
    ("by_latency(keep)", lambda x: by_latency(1.0, keep=x), _KEPT, "write a Criticality"),
    ("by_tier(bars)", by_tier, _TIERS, "'free': 0.7|a load such as 0.7"),
    ("by_tier(others)", lambda x: by_tier(others=x), _BARS, "a load such as"),
    ("by_tier(tier)", lambda x: by_tier(tier=x), _FUNCTIONS, "function"),
    ("by_cost(cost)", lambda x: by_cost(x, most=9), [*_FUNCTIONS, (None, TypeError)], "function"),
    (
        "by_cost(most)",
        lambda x: by_cost(len, most=x),
        [*_AT_LEAST_ZERO, (0, ValueError), (0.5, ValueError)],
        "write",
    ),
    (
        "by_cost(least)",
        lambda x: by_cost(len, most=9, least=x),
        [*_AT_LEAST_ZERO, (0, ValueError), (9, ValueError)],
        "write",
    ),
    ("by_cost(start)", lambda x: by_cost(len, most=9, start=x), _STARTS, "write"),
    ("by_queue(length)", lambda x: by_queue(x, of=int), _COUNTS, "write"),
    (
        "by_queue(of)",
        lambda x: by_queue(1, of=x),
        [(5, TypeError), (None, TypeError), ("q", TypeError)],
        "a function that returns a length",
    ),
    ("by_deadline(reserve)", lambda x: by_deadline(reserve=x), _FINITE, "seconds"),
    ("by_deadline(quantile)", lambda x: by_deadline(quantile=x), _SHARES, "share"),
    ("by_fraction(share)", by_fraction, _RATIOS, "share"),
    (
        "by_fraction(start)",
        lambda x: by_fraction(0.1, start=x),
        [(value, error) for value, error in _STARTS if value is not None],
        "write",
    ),
    ("by_fraction(key)", lambda x: by_fraction(0.1, key=x), _FUNCTIONS, "function"),
    ("by_latency(sla)", by_latency, _POSITIVE, "seconds"),
    ("by_latency(quantile)", lambda x: by_latency(1.0, quantile=x), _SHARES, "share"),
    ("by_latency(key)", lambda x: by_latency(1.0, key=x), _FUNCTIONS, "function"),
    ("by_chance(start)", by_chance, _STARTS, "write"),
    ("by_chance(key)", lambda x: by_chance(key=x), _FUNCTIONS, "function"),
    ("codel(target)", codel, [*_POSITIVE, (0.1, ValueError)], "seconds|such as 20 times"),
    (
        "codel(interval)",
        lambda x: codel(interval=x),
        [*_POSITIVE, (0.005, ValueError)],
        "seconds|20 times",
    ),
    ("codel(scale)", lambda x: codel(scale=x), _AT_LEAST_ZERO, "number"),
    ("adaptive_lifo(timeout)", adaptive_lifo, [*_POSITIVE, (0.2, ValueError)], "seconds|20 times"),
    (
        "adaptive_lifo(patience)",
        lambda x: adaptive_lifo(patience=x),
        [*_POSITIVE, (0.001, ValueError)],
        "seconds|20 times",
    ),
    ("adaptive_lifo(scale)", lambda x: adaptive_lifo(scale=x), _AT_LEAST_ZERO, "number"),
    ("Bulkhead(shed)", lambda x: Bulkhead(1, max_wait=1, shed=x), _SHEDS, r"codel\(\)"),
    ("Bulkhead(shed) unused", lambda x: Bulkhead(1, shed=x), [(codel(), ValueError)], "max_wait"),
    (
        "Bulkhead.update(shed)",
        lambda x: Bulkhead(1, max_wait=1).update(shed=x),
        _SHEDS,
        r"codel\(\)",
    ),
    ("Throttle(k)", lambda x: Throttle(k=x), _AT_LEAST_ONE, "number of at least 1"),
    (
        "Throttle(k) levels",
        lambda x: Throttle(k={x: 2.0}),
        [("CRITICAL", TypeError), (2, TypeError)],
        "Criticality",
    ),
    (
        "Throttle(k) of levels",
        lambda x: Throttle(k={Criticality.CRITICAL: x}),
        _AT_LEAST_ONE,
        "number of at least 1",
    ),
    ("Throttle(window)", lambda x: Throttle(window=x), _POSITIVE, "seconds"),
    ("Throttle(on)", lambda x: Throttle(on=x), _REFUSALS, "exception types, such as"),
    ("Throttle(probe_every)", lambda x: Throttle(probe_every=x), _optional(_POSITIVE), "seconds"),
    ("Throttle(mode)", lambda x: Throttle(mode=x), _CHOICES, "'shadow'"),
    ("Throttle.update(k)", lambda x: Throttle().update(k=x), _AT_LEAST_ONE, "number of at least 1"),
    ("Throttle.update(window)", lambda x: Throttle().update(window=x), _POSITIVE, "seconds"),
    (
        "Throttle.update(probe_every)",
        lambda x: Throttle().update(probe_every=x),
        _optional(_POSITIVE),
        "seconds",
    ),
    ("Throttle.update(mode)", lambda x: Throttle().update(mode=x), _CHOICES, "'shadow'"),
    # --- adaptive limits ---
    (
        "AdaptiveLimit(limit)",
        AdaptiveLimit,
        [(5, TypeError), ("vegas", TypeError), (vegas, TypeError), (Limit("1/s"), TypeError)],
        r"vegas\(\)",
    ),
    ("AdaptiveLimit(window)", lambda x: AdaptiveLimit(window=x), _POSITIVE, "seconds"),
    ("AdaptiveLimit(max_wait)", lambda x: AdaptiveLimit(max_wait=x), _SECONDS, "seconds"),
    (
        "AdaptiveLimit(max_waiting)",
        lambda x: AdaptiveLimit(max_waiting=x),
        _optional(_COUNTS),
        "write",
    ),
    ("AdaptiveLimit(order)", lambda x: AdaptiveLimit(order=x), _CHOICES, "'criticality'"),
    ("AdaptiveLimit(partitions)", lambda x: AdaptiveLimit(partitions=x), _PARTITIONS, "write"),
    (
        "AdaptiveLimit(partition)",
        lambda x: AdaptiveLimit(partitions={"a": 0.5}, partition=x),
        _FUNCTIONS,
        "function",
    ),
    (
        "AdaptiveLimit(partition) alone",
        lambda x: AdaptiveLimit(partition=x),
        [(len, TypeError)],
        "write partitions=",
    ),
    ("AdaptiveLimit(shed)", lambda x: AdaptiveLimit(max_wait=1, shed=x), _SHEDS, r"codel\(\)"),
    (
        "AdaptiveLimit(shed) unused",
        lambda x: AdaptiveLimit(shed=x),
        [(codel(), ValueError)],
        "max_wait",
    ),
    ("AdaptiveLimit(is_drop)", lambda x: AdaptiveLimit(is_drop=x), _FUNCTIONS, "function"),
    ("AdaptiveLimit(mode)", lambda x: AdaptiveLimit(mode=x), _CHOICES, "'shadow'"),
    (
        "AdaptiveLimit.update(minimum)",
        lambda x: AdaptiveLimit().update(minimum=x),
        [*_COUNTS, (2000, ValueError)],
        "write",
    ),
    (
        "AdaptiveLimit.update(maximum)",
        lambda x: AdaptiveLimit(gradient2()).update(maximum=x),
        [*_COUNTS, (3, ValueError)],
        "write",
    ),
    (
        "AdaptiveLimit.update(window)",
        lambda x: AdaptiveLimit().update(window=x),
        _POSITIVE,
        "seconds",
    ),
    (
        "AdaptiveLimit.update(max_wait)",
        lambda x: AdaptiveLimit().update(max_wait=x),
        _SECONDS,
        "seconds",
    ),
    (
        "AdaptiveLimit.update(max_waiting)",
        lambda x: AdaptiveLimit().update(max_waiting=x),
        _optional(_COUNTS),
        "write",
    ),
    (
        "AdaptiveLimit.update(partitions)",
        lambda x: AdaptiveLimit(partitions={"live": 0.5}).update(partitions=x),
        [*_PARTITIONS, ({"other": 0.5}, ValueError)],
        "write",
    ),
    ("AdaptiveLimit.update(mode)", lambda x: AdaptiveLimit().update(mode=x), _CHOICES, "'shadow'"),
    (
        "AdaptiveLimit.update(limit)",
        lambda x: AdaptiveLimit().update(limit=x),
        [(5, TypeError)],
        "it takes",
    ),
    (
        "aimd(slow_after)",
        lambda x: aimd(slow_after=x),
        [case for case in _POSITIVE if case[0] != inf],
        "seconds",
    ),
    ("aimd(shrink)", lambda x: aimd(slow_after=1, shrink=x), _SHARES, "share"),
    ("vegas(alpha)", lambda x: vegas(alpha=x), [*_AT_LEAST_ZERO, (7, ValueError)], "write"),
    ("vegas(beta)", lambda x: vegas(beta=x), [*_AT_LEAST_ZERO, (1, ValueError)], "write"),
    *(
        (
            f"{name}({argument})",
            lambda x, make=make, argument=argument: make(**{argument: x}),
            [*_COUNTS, *more],
            "write",
        )
        for name, make in (
            ("aimd", lambda **given: aimd(slow_after=1.0, **given)),
            ("vegas", vegas),
            ("gradient2", gradient2),
        )
        for argument, more in (
            ("initial", [(10**6, ValueError)]),
            ("minimum", [(10**6, ValueError)]),
            ("maximum", [(3, ValueError)]),
        )
    ),
    # --- hedging and chaos ---
    ("Hedge(delay)", Hedge, _POSITIVE, "seconds"),
    ("Hedge(most)", lambda x: Hedge(1.0, most=x), _COUNTS, "write"),
    ("Hedge(cap)", lambda x: Hedge(1.0, cap=x), _RATIOS, "share"),
    ("Hedge(burst)", lambda x: Hedge(1.0, burst=x), _COUNTS, "write"),
    (
        "Hedge(budget)",
        lambda x: Hedge(1.0, budget=x),
        [
            (0.1, TypeError),
            (True, TypeError),
            (SuccessDeposit(), TypeError),
            (RetryBudget, TypeError),
        ],
        r"RetryBudget\(\)",
    ),
    ("Hedge(dispose)", lambda x: Hedge(1.0, dispose=x), _FUNCTIONS, "function"),
    (
        "Hedge(sync)",
        lambda x: Hedge(1.0, sync=x),
        [*_CHOICES, ("cooperative", ValueError)],
        "'thread'",
    ),
    ("Hedge(workers)", lambda x: Hedge(1.0, sync="thread", workers=x), _COUNTS, "write"),
    ("Hedge(workers) unused", lambda x: Hedge(1.0, workers=x), _COUNTS, "write"),
    ("Hedge.update(delay)", lambda x: Hedge(1.0).update(delay=x), _POSITIVE, "seconds"),
    ("Hedge.update(most)", lambda x: Hedge(1.0).update(most=x), _COUNTS, "write"),
    ("Hedge.update(cap)", lambda x: Hedge(1.0).update(cap=x), _RATIOS, "share"),
    ("Hedge.update(burst)", lambda x: Hedge(1.0).update(burst=x), _COUNTS, "write"),
    ("quantile(p)", quantile, [*_SHARES, (1, ValueError), (None, TypeError)], "share"),
    ("quantile(floor)", lambda x: quantile(0.9, floor=x), _FINITE, "seconds"),
    ("Chaos(share)", lambda x: Chaos(x, hang=True), [*_RATIOS, (None, TypeError)], "share"),
    ("Chaos(latency)", lambda x: Chaos(0.5, latency=x), _LATENCIES, "seconds|pair|lower number"),
    (
        "Chaos(error)",
        lambda x: Chaos(0.5, error=x),
        [
            (OSError(), TypeError),
            ("x", TypeError),
            (5, TypeError),
            (KeyboardInterrupt(), TypeError),
        ],
        "error=ConnectionError",
    ),
    ("Chaos(hang)", lambda x: Chaos(0.5, error=OSError, hang=x), _FLAGS, "True or False"),
    ("Chaos(when)", lambda x: Chaos(0.5, hang=True, when=x), _FUNCTIONS, "function"),
    ("Chaos(seed)", lambda x: Chaos(0.5, hang=True, seed=x), _NATURALS, "write"),
    ("Chaos(enabled)", lambda x: Chaos(0.5, hang=True, enabled=x), _FLAGS, "True or False"),
    ("Chaos nothing", Chaos, [(0.5, ValueError)], "write latency="),
    (
        "Chaos(result) and more",
        lambda x: Chaos(0.5, **x),
        [
            ({"error": OSError, "hang": True}, ValueError),
            ({"error": OSError, "result": None}, ValueError),
            ({"hang": True, "latency": 1.0}, ValueError),
        ],
        "several Chaos policies",
    ),
    ("Chaos.update(share)", lambda x: Chaos(0.5, hang=True).update(share=x), _RATIOS, "share"),
    (
        "Chaos.update(latency)",
        lambda x: Chaos(0.5, latency=1.0).update(latency=x),
        _LATENCIES,
        "seconds|pair|lower",
    ),
    ("Chaos.update(enabled)", lambda x: Chaos(0.5, hang=True).update(enabled=x), _FLAGS, "True or"),
    ("Chaos.update(seed)", lambda x: Chaos(0.5, hang=True).update(seed=x), _NATURALS, "write"),
    (
        "Chaos.update(hang)",
        lambda x: Chaos(0.5, latency=1.0).update(hang=x, error=OSError),
        [(True, ValueError)],
        "several",
    ),
    # --- pools ---
    ("Pool(connect)", _pool, [*_FUNCTIONS, (None, TypeError)], "function"),
    ("Pool(name)", lambda x: _pool(name=x), _NAMES, "such as 'database'"),
    ("Pool(max_size)", lambda x: _pool(max_size=x), _COUNTS, "write"),
    ("Pool(min_size)", lambda x: _pool(min_size=x), [*_NATURALS, (3, ValueError)], "write"),
    ("Pool(close)", lambda x: _pool(close=x), _FUNCTIONS, "function"),
    ("Pool(validate)", lambda x: _pool(validate=x), _FUNCTIONS, "function"),
    (
        "Pool(reusable)",
        lambda x: _pool(reusable=x),
        _ERRORS,
        "classes of errors, such as",
    ),
    ("Pool(connect_timeout)", lambda x: _pool(connect_timeout=x), _optional(_POSITIVE), "seconds"),
    ("Pool(read_timeout)", lambda x: _pool(read_timeout=x), _optional(_POSITIVE), "seconds"),
    ("Pool(idle_timeout)", lambda x: _pool(idle_timeout=x), _optional(_POSITIVE), "seconds"),
    (
        "Pool(checkout_timeout)",
        lambda x: _pool(checkout_timeout=x),
        [*_SECONDS, (0, ValueError)],
        "seconds",
    ),
    ("Pool(close_timeout)", lambda x: _pool(close_timeout=x), _POSITIVE, "seconds"),
    ("Pool(max_lifetime)", lambda x: _pool(max_lifetime=x), _optional(_POSITIVE), "seconds"),
    (
        "Pool(when_exhausted)",
        lambda x: _pool(when_exhausted=x),
        _CHOICES,
        "'wait', 'fail', 'degrade'",
    ),
    ("Pool(degraded)", lambda x: _pool(degraded=x), _FUNCTIONS, "function"),
    (
        "Pool(degraded) missing",
        lambda x: _pool(when_exhausted=x),
        [("degrade", ValueError)],
        "pass degraded=",
    ),
    ("Pool(max_waiting)", lambda x: _pool(max_waiting=x), _optional(_COUNTS), "write"),
    ("Pool(order)", lambda x: _pool(order=x), _CHOICES, "'fifo', 'lifo', 'criticality'"),
    ("Pool(leak_after)", lambda x: _pool(leak_after=x), _optional(_POSITIVE), "seconds"),
    ("Pool(clock)", lambda x: _pool(clock=x), _CLOCKS, "clock"),
    ("Pool(rng)", lambda x: _pool(rng=x), _RNGS, "Random"),
    ("Pool.close(timeout)", lambda x: _pool().close(x), _FINITE, "seconds"),
    ("Pool.aclose(timeout)", lambda x: run_virtual(_pool().aclose(x)), _FINITE, "seconds"),
    *(
        (f"Pool.update({name})", lambda x, name=name: _pool().update(**{name: x}), cases, "write")
        for name, cases in (
            ("max_size", _COUNTS),
            ("min_size", [*_NATURALS, (3, ValueError)]),
            ("connect_timeout", _optional(_POSITIVE)),
            ("read_timeout", _optional(_POSITIVE)),
            ("idle_timeout", _optional(_POSITIVE)),
            ("checkout_timeout", [*_SECONDS, (0, ValueError)]),
            ("close_timeout", _POSITIVE),
            ("max_lifetime", _optional(_POSITIVE)),
            ("when_exhausted", _CHOICES),
            ("max_waiting", _optional(_COUNTS)),
            ("leak_after", _optional(_POSITIVE)),
        )
    ),
    (
        "Pool.update unknown",
        lambda x: _pool().update(**x),
        [({"name": "x"}, TypeError), ({}, TypeError)],
        "it takes",
    ),
    # --- channels ---
    ("Channel(capacity)", Channel, _COUNTS, "write"),
    ("Channel(when_full)", lambda x: Channel(1, when_full=x), _CHOICES, "'block', 'drop_newest'"),
    ("Channel(demand)", lambda x: Channel(1, demand=x), _FLAGS, "True or False"),
    ("Channel(on_drop)", lambda x: Channel(1, on_drop=x), _FUNCTIONS, "function"),
    ("Channel(shed)", lambda x: Channel(1, shed=x), _SHEDS, "write codel"),
    ("Channel(name)", lambda x: Channel(1, name=x), _NAMES, "such as"),
    ("Channel(clock)", lambda x: Channel(1, clock=x), _CLOCKS, "clock"),
    ("Channel.put(timeout)", lambda x: Channel(1).put(1, x), _optional(_SECONDS), "seconds"),
    ("Channel.get(timeout)", lambda x: Channel(1).get(x), _optional(_SECONDS), "seconds"),
    (
        "Channel.aput(timeout)",
        lambda x: run_virtual(Channel(1).aput(1, x)),
        _optional(_SECONDS),
        "sec",
    ),
    (
        "Channel.aget(timeout)",
        lambda x: run_virtual(Channel(1).aget(x)),
        _optional(_SECONDS),
        "seconds",
    ),
    ("Channel.drain(timeout)", lambda x: Channel(1).drain(x), _optional(_SECONDS), "seconds"),
    (
        "Channel.adrain(timeout)",
        lambda x: run_virtual(Channel(1).adrain(x)),
        _optional(_SECONDS),
        "sec",
    ),
    ("Channel.request(n)", lambda x: Channel(1, demand=True).request(x), _COUNTS, "write"),
    (
        "Channel.request(n) unasked",
        lambda x: Channel(1).request(x),
        [(1, TypeError)],
        "demand=True",
    ),
    (
        "Channel.update(capacity)",
        lambda x: Channel(1).update(capacity=x),
        _optional(_COUNTS),
        "write",
    ),
    ("Channel.update(when_full)", lambda x: Channel(1).update(when_full=x), _CHOICES, "'reject'"),
    (
        "web.primed(source)",
        primed,
        [(5, TypeError), (None, TypeError), (primed, TypeError)],
        "pass a stream",
    ),
    # --- executors ---
    ("CpuPool(name)", CpuPool, _NAMES, "write a name"),
    ("CpuPool(workers)", lambda x: CpuPool("bad", workers=x), _optional(_COUNTS), "write"),
    ("CpuPool(kind)", lambda x: CpuPool("bad", kind=x), _CHOICES, "'process', 'thread'"),
    ("CpuPool(max_queue)", lambda x: CpuPool("bad", max_queue=x), _optional(_NATURALS), "write"),
    (
        "CpuPool(start)",
        lambda x: CpuPool("bad", start=x),
        [*_CHOICES, ("fork", ValueError)],
        "'spawn'",
    ),
    (
        "CpuPool(context)",
        lambda x: CpuPool("bad", context=x),
        [([5], TypeError), (["x"], TypeError), (_local_var, ValueError)],
        r"such as context=\[|global",
    ),
    ("CpuPool(clock)", lambda x: CpuPool("bad", clock=x), _CLOCKS, "clock"),
    (
        "CpuPool.run(function)",
        lambda x: CpuPool("bad", kind="thread").run(x),
        [(5, TypeError), (None, TypeError), (_later, TypeError)],
        "a plain function",
    ),
    (
        "CpuPool.arun(function)",
        lambda x: run_virtual(CpuPool("bad").arun(x)),
        [(5, TypeError), (_later, TypeError)],
        "a plain function",
    ),
    ("CpuPool.close(drain)", lambda x: CpuPool("bad").close(x), _SECONDS, "seconds"),
    ("CpuPool.aclose(drain)", lambda x: run_virtual(CpuPool("bad").aclose(x)), _SECONDS, "seconds"),
    ("IoPool(name)", lambda x: IoPool(x, workers=1), _NAMES, "write a name"),
    ("IoPool(throughput)", lambda x: IoPool("bad", throughput=x, latency=1), _FINITE, "write"),
    ("IoPool(latency)", lambda x: IoPool("bad", throughput=1, latency=x), _FINITE, "write"),
    ("IoPool(workers)", lambda x: IoPool("bad", workers=x), _COUNTS, "write"),
    (
        "IoPool(workers) too",
        lambda x: IoPool("bad", throughput=1, latency=1, workers=x),
        [(1, TypeError)],
        "or workers=",
    ),
    (
        "IoPool(max_queue)",
        lambda x: IoPool("bad", workers=1, max_queue=x),
        _optional(_NATURALS),
        "write",
    ),
    ("IoPool(clock)", lambda x: IoPool("bad", workers=1, clock=x), _CLOCKS, "clock"),
    (
        "IoPool.run(function)",
        lambda x: IoPool("bad", workers=1).run(x),
        [(5, TypeError), (_later, TypeError)],
        "a plain function",
    ),
    (
        "IoPool.arun(function)",
        lambda x: run_virtual(IoPool("bad", workers=1).arun(x)),
        [(5, TypeError)],
        "a plain function",
    ),
    (
        "IoPool.map(function)",
        lambda x: IoPool("bad", workers=1).map(x, []),
        [(5, TypeError), (_later, TypeError)],
        "function",
    ),
    (
        "IoPool.map(items)",
        lambda x: IoPool("bad", workers=1).map(int, x),
        [(5, TypeError)],
        "a list",
    ),
    (
        "IoPool.map(concurrency)",
        lambda x: IoPool("bad", workers=1).map(int, [], concurrency=x),
        _optional(_COUNTS),
        "write",
    ),
    (
        "IoPool.amap(function)",
        lambda x: run_virtual(IoPool("bad", workers=1).amap(x, [])),
        [(5, TypeError), (_later, TypeError)],
        "function",
    ),
    (
        "IoPool.amap(items)",
        lambda x: run_virtual(IoPool("bad", workers=1).amap(int, x)),
        [(5, TypeError)],
        "a list",
    ),
    (
        "IoPool.amap(concurrency)",
        lambda x: run_virtual(IoPool("bad", workers=1).amap(int, [], concurrency=x)),
        _optional(_COUNTS),
        "write",
    ),
    ("IoPool.close(drain)", lambda x: IoPool("bad", workers=1).close(x), _SECONDS, "seconds"),
    (
        "IoPool.aclose(drain)",
        lambda x: run_virtual(IoPool("bad", workers=1).aclose(x)),
        _SECONDS,
        "sec",
    ),
    # --- contention ---
    ("Serializer(max_waiting)", lambda x: Serializer(max_waiting=x), _NATURALS, "write"),
    ("Serializer(max_wait)", lambda x: Serializer(max_wait=x), _SECONDS, "seconds"),
    ("Serializer(max_keys)", lambda x: Serializer(max_keys=x), _COUNTS, "write"),
    ("Serializer(stripes)", lambda x: Serializer(stripes=x), _optional(_COUNTS), "write"),
    ("Serializer(clock)", lambda x: Serializer(clock=x), _CLOCKS, "clock"),
    (
        "Serializer.hold(key)",
        lambda x: Serializer().hold(x),
        [([], TypeError), ({}, TypeError)],
        "unhashable",
    ),
    (
        "Serializer.hold(key) striped",
        lambda x: Serializer(stripes=2).hold(x),
        [([], TypeError), (1.5, TypeError), (object(), TypeError)],
        "write a str",
    ),
    ("Serializer.run(key)", lambda x: Serializer().run(x, int), [([], TypeError)], "unhashable"),
    (
        "Serializer.arun(key)",
        lambda x: run_virtual(Serializer().arun(x, _later)),
        [([], TypeError)],
        "unhashable",
    ),
    (
        "Serializer.run(function)",
        lambda x: Serializer().run(1, x),
        [(_later, TypeError)],
        "await serializer.arun",
    ),
    (
        "Serializer.update(max_waiting)",
        lambda x: Serializer().update(max_waiting=x),
        _optional(_NATURALS),
        "write",
    ),
    (
        "Serializer.update(max_wait)",
        lambda x: Serializer().update(max_wait=x),
        _optional(_SECONDS),
        "seconds",
    ),
    (
        "Serializer.update(max_keys)",
        lambda x: Serializer().update(max_keys=x),
        _optional(_COUNTS),
        "write",
    ),
    ("Stripes(n)", lambda x: Stripes(x, list), _COUNTS, "write"),
    ("Stripes(make)", lambda x: Stripes(2, x), [*_FUNCTIONS, (None, TypeError)], "function"),
    (
        "Stripes.index(key)",
        lambda x: Stripes(2, list).index(x),
        [([], TypeError), (1.5, TypeError)],
        "write a str",
    ),
    *(
        row
        for name, update in (
            ("update_optimistically", _update),
            ("aupdate_optimistically", _aupdate),
        )
        for row in (
            (f"{name}(read)", update, [*_FUNCTIONS, (None, TypeError)], "function"),
            (
                f"{name}(change)",
                lambda x, update=update: update(change=x),
                [*_FUNCTIONS, (None, TypeError)],
                "function",
            ),
            (
                f"{name}(write)",
                lambda x, update=update: update(write=x),
                [*_FUNCTIONS, (None, TypeError)],
                "function",
            ),
            (
                f"{name}(on)",
                lambda x, update=update: update(on=x),
                _ERRORS,
                "classes of errors, such as",
            ),
            (f"{name}(attempts)", lambda x, update=update: update(attempts=x), _COUNTS, "write"),
            (f"{name}(backoff)", lambda x, update=update: update(backoff=x), _PAUSES, "seconds"),
            (f"{name}(clock)", lambda x, update=update: update(clock=x), _CLOCKS, "clock"),
        )
    ),
    (
        "update_optimistically(read) async",
        _update,
        [(_later, TypeError)],
        "await aupdate_optimistically",
    ),
    (
        "update_optimistically(write) async",
        lambda x: _update(write=x),
        [(_later, TypeError)],
        "await aupdate_optimistically",
    ),
    # --- the levels ---
    ("ServiceLevels(name)", lambda x: ServiceLevels(x, load=int), _NAMES, "a name, such as 'shop'"),
    ("ServiceLevels(load)", lambda x: _service_levels(load=x), _FUNCTIONS, "function"),
    (
        "ServiceLevels(load) missing",
        lambda _: ServiceLevels("bad"),
        [(None, ValueError)],
        "say what moves it",
    ),
    (
        "ServiceLevels(depends_on)",
        lambda x: _service_levels(depends_on=x),
        [([5], TypeError), ("x", TypeError), (Breaker(), TypeError)],
        "write {breaker",
    ),
    (
        "ServiceLevels(depends_on) what",
        lambda x: _service_levels(depends_on={x: "cached"}),
        [(5, TypeError), ("x", TypeError), (Guard("no breaker", Timeout(1)), TypeError)],
        "pass a breaker",
    ),
    (
        "ServiceLevels(depends_on) level",
        lambda x: _service_levels(depends_on={Breaker(): x}),
        _LEVELS,
        "'cached'",
    ),
    (
        "ServiceLevels(thresholds)",
        lambda x: _service_levels(thresholds=x),
        _THRESHOLDS,
        "write|begin with",
    ),
    (
        "ServiceLevels(gap)",
        lambda x: _service_levels(gap=x),
        [*_AT_LEAST_ZERO, (0.7, ValueError)],
        "write",
    ),
    ("ServiceLevels(hold)", lambda x: _service_levels(hold=x), _FINITE, "seconds"),
    (
        "ServiceLevels(recover_after)",
        lambda x: _service_levels(recover_after=x),
        _FINITE,
        "seconds",
    ),
    ("ServiceLevels(clock)", lambda x: _service_levels(clock=x), _CLOCKS, "clock"),
    ("ServiceLevels.allows(level)", lambda x: _service_levels().allows(x), _LEVELS, "'cached'"),
    ("ServiceLevels.pin(level)", lambda x: _service_levels().pin(x), _LEVELS, "'cached'"),
    ("ServiceLevels.gate(level)", lambda x: _service_levels().gate(x), _LEVELS, "'cached'"),
    ("ServiceLevels.gate(mode)", lambda x: _service_levels().gate(mode=x), _CHOICES, "'shadow'"),
    (
        "ServiceLevels.gate().update(level)",
        lambda x: _service_levels().gate().update(level=x),
        _LEVELS,
        "'cached'",
    ),
    (
        "ServiceLevels.gate().update(mode)",
        lambda x: _service_levels().gate().update(mode=x),
        _CHOICES,
        "'shadow'",
    ),
    ("ServiceLevels.at(level)", lambda x: _service_levels().at(x, int), _LEVELS, "'cached'"),
    (
        "ServiceLevels.at(function)",
        lambda x: _service_levels().at("cached", x),
        [*_FUNCTIONS, (None, TypeError)],
        "function",
    ),
    (
        "ServiceLevels.update(thresholds)",
        lambda x: _service_levels().update(thresholds=x),
        _THRESHOLDS,
        "write|begin",
    ),
    (
        "ServiceLevels.update(gap)",
        lambda x: _service_levels().update(gap=x),
        [*_AT_LEAST_ZERO, (0.7, ValueError)],
        "write",
    ),
    ("ServiceLevels.update(hold)", lambda x: _service_levels().update(hold=x), _FINITE, "seconds"),
    (
        "ServiceLevels.update(recover_after)",
        lambda x: _service_levels().update(recover_after=x),
        _FINITE,
        "seconds",
    ),
    (
        "ServiceLevels.update unknown",
        lambda x: _service_levels().update(**x),
        [({"load": int}, TypeError)],
        "it takes",
    ),
    (
        "ServiceLevels.update nothing",
        lambda _: _service_levels().update(),
        [(None, TypeError)],
        "name what to change",
    ),
    # --- the watchdog ---
    ("LoopWatchdog(threshold)", LoopWatchdog, _POSITIVE, "seconds"),
    ("LoopWatchdog(name)", lambda x: LoopWatchdog(name=x), _NAMES, "such as 'api'"),
    ("LoopWatchdog(clock)", lambda x: LoopWatchdog(clock=x), _CLOCKS, "clock"),
    # --- context ---
    ("tenant(name)", tenant, _NAMES, "non-empty string"),
    ("tier(name)", tier, _NAMES, "non-empty string"),
    # --- signals ---
    ("signals.Signal(name)", lambda x: signals.Signal(x, int), _NAMES, "a name, such as"),
    (
        "signals.Signal(read)",
        lambda x: signals.Signal("bad", x),
        [*_FUNCTIONS, (None, TypeError)],
        "function",
    ),
    (
        "signals.Signal(limit)",
        lambda x: signals.Signal("bad", int, limit=x),
        [*_AT_LEAST_ZERO, (0, ValueError)],
        "write",
    ),
    ("signals.Signal(every)", lambda x: signals.Signal("bad", int, every=x), _FINITE, "seconds"),
    ("signals.Signal(clock)", lambda x: signals.Signal("bad", int, clock=x), _CLOCKS, "clock"),
    (
        "signals.in_flight(target)",
        signals.in_flight,
        [(5, TypeError), (None, TypeError), (Timeout(1), TypeError)],
        "pass a Bulkhead",
    ),
    (
        "signals.occupancy(target)",
        signals.occupancy,
        [(5, TypeError), (None, TypeError), (Timeout(1), TypeError), (Bulkhead, TypeError)],
        "pass a Bulkhead",
    ),
    (
        "signals.queue_time(target)",
        signals.queue_time,
        [(5, TypeError), (None, TypeError), (Timeout(1), TypeError)],
        "pass a Bulkhead",
    ),
    (
        "signals.queue_time(limit)",
        lambda x: signals.queue_time(Bulkhead(1), x),
        _POSITIVE,
        "seconds",
    ),
    (
        "signals.thread_queue(target)",
        signals.thread_queue,
        [(5, TypeError), (None, TypeError), (Bulkhead(1), TypeError)],
        "pass a ThreadBulkhead",
    ),
    (
        "signals.thread_queue(limit)",
        lambda x: signals.thread_queue(ThreadBulkhead(1), x),
        _optional(_COUNTS),
        "write",
    ),
    ("signals.process_cpu(limit)", signals.process_cpu, _SHARES, "share"),
    (
        "signals.process_cpu(cores)",
        lambda x: signals.process_cpu(cores=x),
        [*_optional(_AT_LEAST_ZERO), (0, ValueError)],
        "number",
    ),
    ("signals.process_cpu(read)", lambda x: signals.process_cpu(read=x), _FUNCTIONS, "function"),
    ("signals.process_cpu(clock)", lambda x: signals.process_cpu(clock=x), _CLOCKS, "clock"),
    (
        "signals.process_memory(limit)",
        lambda x: signals.process_memory(x, total=9),
        _SHARES,
        "share",
    ),
    (
        "signals.process_memory(total)",
        lambda x: signals.process_memory(total=x),
        _optional(_COUNTS),
        "write",
    ),
    (
        "signals.process_memory(read)",
        lambda x: signals.process_memory(total=9, read=x),
        _FUNCTIONS,
        "function",
    ),
    (
        "signals.process_memory(clock)",
        lambda x: signals.process_memory(total=9, clock=x),
        _CLOCKS,
        "clock",
    ),
    ("signals.gc_pauses(limit)", signals.gc_pauses, _SHARES, "share"),
    ("signals.gc_pauses(clock)", lambda x: signals.gc_pauses(clock=x), _CLOCKS, "clock"),
    ("signals.loop_lag(limit)", signals.loop_lag, _POSITIVE, "seconds"),
    ("signals.highest(signals)", signals.highest, [*_FUNCTIONS, (None, TypeError)], "function"),
    (
        "signals.highest(signals) none",
        lambda _: signals.highest(),
        [(None, ValueError)],
        "at least one",
    ),
    ("signals.smoothed(signal)", signals.smoothed, [*_FUNCTIONS, (None, TypeError)], "function"),
    ("signals.smoothed(half_life)", lambda x: signals.smoothed(int, x), _POSITIVE, "seconds"),
    ("signals.latched(signal)", signals.latched, [*_FUNCTIONS, (None, TypeError)], "function"),
    (
        "signals.latched(rise)",
        lambda x: signals.latched(int, rise=x),
        [*_AT_LEAST_ZERO, (0.5, ValueError)],
        "write",
    ),
    (
        "signals.latched(fall)",
        lambda x: signals.latched(int, fall=x),
        [*_AT_LEAST_ZERO, (0.9, ValueError)],
        "write",
    ),
    ("signals.latched(hold)", lambda x: signals.latched(int, hold=x), _FINITE, "seconds"),
    # --- found missing once ---
    (
        "signals.in_flight(target) class",
        signals.in_flight,
        [(Bulkhead, TypeError)],
        "pass a Bulkhead",
    ),
    (
        "RateLimit.update(limits) type",
        lambda x: RateLimit("1/s").update(limits=x),
        [(5, TypeError), (None, TypeError), (Limit, TypeError)],
        "'60/s'",
    ),
    ("Throttle(k) none", lambda x: Throttle(k=x), [({}, ValueError)], "Criticality"),
    (
        "Chaos(error) type",
        lambda x: Chaos(0.5, error=x),
        [(int, TypeError), (KeyboardInterrupt, TypeError)],
        "error=ConnectionError",
    ),
    ("Channel(capacity) huge", Channel, [(HUGE, ValueError)], "write"),
    ("Bulkhead(limit) huge", Bulkhead, [(HUGE, ValueError)], "write"),
    ("Pool(max_size) huge", lambda x: _pool(max_size=x), [(HUGE, ValueError)], "write"),
    (
        "aimd(initial) huge",
        lambda x: aimd(slow_after=1, initial=x, maximum=x),
        [(HUGE, ValueError)],
        "write",
    ),
    (
        "RateLimit(cost) huge",
        lambda x: RateLimit("1/s", algorithm="leaky_bucket", cost=x),
        [(HUGE, ValueError)],
        "write",
    ),
    ("by_tier(bars) huge", by_tier, [({"free": HUGE}, ValueError)], "write"),
    (
        "CpuPool(context) unlisted",
        lambda x: CpuPool("bad", context=x),
        [(5, TypeError), (None, TypeError), ("x", TypeError)],
        r"such as context=\[",
    ),
    ("Serializer(name)", lambda x: Serializer(name=x), _NAMES, "write a name"),
    (
        "Serializer.run(function) none",
        lambda x: Serializer().run(1, x),
        [(5, TypeError), (None, TypeError)],
        "function",
    ),
    (
        "Serializer.arun(function)",
        lambda x: run_virtual(Serializer().arun(1, x)),
        [(5, TypeError)],
        "function",
    ),
    (
        "LoopWatchdog.check(frame_of)",
        lambda x: LoopWatchdog().check(x),
        [(5, TypeError), ("f", TypeError)],
        "function",
    ),
    ("update_optimistically(rng)", lambda x: _update(rng=x), _RNGS, "Random"),
    ("aupdate_optimistically(rng)", lambda x: _aupdate(rng=x), _RNGS, "Random"),
    (
        "Bulkhead(shed) rule",
        lambda x: Bulkhead(1, max_wait=1, shed=x),
        [(by_criticality(), TypeError)],
        r"codel\(\)",
    ),
    (
        "AdaptiveLimit(shed) rule",
        lambda x: AdaptiveLimit(max_wait=1, shed=x),
        [(by_criticality(), TypeError)],
        r"codel\(\)",
    ),
    (
        "signals.queue_time(target) class",
        signals.queue_time,
        [(Bulkhead, TypeError)],
        "pass a Bulkhead",
    ),
    (
        "by_queue(of) class",
        lambda x: by_queue(1, of=x),
        [(Bulkhead, TypeError)],
        "a function that returns a length",
    ),
    (
        "ServiceLevels(depends_on) class",
        lambda x: _service_levels(depends_on={x: "cached"}),
        [(Breaker, TypeError)],
        "pass a breaker",
    ),
]

NAMES_WITH_OWN_LABELS = frozenset(
    [
        "Backoff",
        "Batch",
        "Breaker",
        "Cache",
        "Fallback",
        "Guard",
        "InFlightRatio",
        "JobQueue",  # as LocalQueue and PriorityQueue
        "Policy",
        "Pressure",
        "RequestRatio",
        "Result",
        "Retry",
        "RetryBudget",
        "RetryThresholds",
        "SuccessDeposit",
        "ThreadBulkhead",
        "Timeout",
        "VirtualClock",
        "SystemClock",
        "Clock",
        "Deadline",
        "adaptive_timeout",
        "adaptive_attempts",
        "check_threads",
        "constant",
        "criticality",
        "deadline",
        "decorrelated_jitter",
        "exponential",
        "full_jitter",
        "get_guard",
        "growing",
        "guard_from_table",
        "guards_from_toml",
        "guards_to_toml",
        "idempotency_key",
        "linear",
        "n_of_m",
        "plus_minus",
        "pool_advice",
        "pool_size",
        "ramp",
        "slow_start",
        "static",
        "subscribe",
        "timeout_for",
        "transient",
        "update_from_toml",
    ]
)
"""Names whose rows are in ROWS_WITH_OWN_LABELS, or that nobody makes but Seawall."""

UNCHECKED = frozenset(
    [
        "Bulkhead(limit)",
        "Bulkhead(max_wait)",
        "Bulkhead(max_waiting)",
        "Bulkhead(mode)",
        "Bulkhead(order)",
        "Chaos(result)",
        "Channel.put(item)",
        "Channel.give_back(items)",
        "Channel.aput(item)",
        "Borrowed(lending)",
        "Borrowed(place)",
    ]
)
"""Arguments that may be anything, are in ROWS_WITH_OWN_LABELS, or that Seawall itself gives."""

METHODS_FOR_SEAWALL = frozenset(
    [
        "refused",
        "end_window",
        "queue_wait",
        "limits",
        "breaker",
        "heartbeats",
        "lease",
        "__call__",
    ]
)
"""Methods for Seawall's own use, with arguments of Seawall's own."""


EDGES = (
    "clients.aiohttp",
    "clients.boto3",
    "clients.grpc",
    "clients.httpx",
    "clients.httpx2",
    "clients.llm",
    "clients.requests",
    "clients.sqlalchemy",
    "clients.upstreams",
    "durable",
    "members",
    "web",
    "web.checks",
    "web.fastapi",
    "web.flask",
    "web.grpc",
    "web.wsgi",
)


PARTS = frozenset(
    [
        "backoff",
        "clock",
        "config",
        "context",
        "events",
        "jobs",
        "leases",
        "limits",
        "load",
        "policies.breaker",
        "policies.hedge",
        "policies.retry",
        "policies.timeout",
        "redis",
        "resources",
        "shedding",
    ]
)
"""Modules whose names have no prefix in the tables."""


def _arguments() -> Iterator[str]:
    """Yield each argument of what is public: against scarcity, at the edges, in a database."""
    modules = [("", seawall), ("signals.", signals)]
    modules += [("", importlib.import_module(f"seawall.{name}")) for name in sorted(PARTS)]
    modules += [(f"{name}.", importlib.import_module(f"seawall.{name}")) for name in EDGES]
    for prefix, module in modules:
        for name in module.__all__:
            thing = getattr(module, name)
            is_alias = get_origin(thing) is not None
            if (not prefix and name in NAMES_WITH_OWN_LABELS) or is_alias or not callable(thing):
                continue
            if not isinstance(thing, type):
                yield from _parameters(f"{prefix}{name}", thing)
            elif not issubclass(
                thing, (Exception, seawall.events.Event, tuple, ServiceLevel, Enum)
            ):
                yield from _methods(f"{prefix}{name}", thing)


def _methods(name: str, kind: type) -> Iterator[str]:
    if name != "Reservation" and kind.__init__ is not object.__init__:
        yield from _parameters(name, kind.__init__)
    for method, function in vars(kind).items():
        ours = method.startswith("_") or method in METHODS_FOR_SEAWALL or kind is Limit
        if inspect.isfunction(function) and not ours:
            yield from _parameters(f"{name}.{method}", function)


def _parameters(name: str, function: Any) -> Iterator[str]:
    for parameter in inspect.signature(function).parameters.values():
        gathers = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if parameter.name != "self" and not (
            gathers and parameter.name in ("args", "kwargs", "changes")
        ):
            yield f"{name}({parameter.name})"


SUBJECTS = ROWS + SHARED + WEB + CLIENTS + DURABLE + MEMBERS + PIPELINE


def test_no_argument_is_left_out():
    """Each argument of each public constructor, function and method has bad values to refuse."""
    tested = {label for label, *_ in SUBJECTS}
    tested |= (
        UNCHECKED
        | UNCHECKED_BY_REDIS
        | UNCHECKED_BY_WEB
        | UNCHECKED_BY_CLIENTS
        | UNCHECKED_BY_DURABLE
    )
    tested |= UNCHECKED_BY_MEMBERS | UNCHECKED_BY_PIPELINES
    missing = [argument for argument in _arguments() if argument not in tested]
    assert missing == [], (
        f"write a row for each of these, such as ({missing[0]!r}, a function that passes a bad"
        " value there, the bad values, what the message says): in ROWS here, or in"
        " arguments.py in the tests of its package; what needs no check goes into UNCHECKED here,"
        " or into UNCHECKED_BY_... there"
    )


CASES = [
    pytest.param(make, bad, error, advice, id=f"{name}({str(bad)[:20]})")
    for name, make, bads, advice in ROWS_WITH_OWN_LABELS + SUBJECTS
    for bad, error in bads
]


@pytest.mark.parametrize(("make", "bad", "error", "advice"), CASES)
def test_a_bad_argument_is_told_with_advice(make, bad, error, advice):
    """It raises at construction, and the message says what to write instead."""
    with pytest.raises(error) as raised:
        make(bad)
    assert re.search(advice, str(raised.value)), raised.value


def test_bad_changes_change_nothing():
    """update() with one bad value among good ones leaves all settings as they were."""
    bulkhead, cache, retry = Bulkhead(1), Cache(1.0), _retry(attempts=2)
    breaker, timeout = Breaker(failure_ratio=0.5), Timeout(1.0)
    for policy, changes in (
        (bulkhead, {"limit": 5, "max_wait": -1}),
        (cache, {"ttl": 5.0, "max_entries": 0}),
        (retry, {"attempts": 5, "backoff": nan}),
        (breaker, {"failure_ratio": 0.9, "mode": "nonsense"}),
        (breaker, {"mode": "off", "failure_ratio": 9}),
        (timeout, {"seconds": 5.0, "sync": "thread"}),
    ):
        with pytest.raises((TypeError, ValueError)):
            policy.update(**changes)
    assert (bulkhead.limit, cache.ttl, retry.attempts, timeout.seconds) == (1, 1.0, 2, 1.0)
    assert (breaker.settings.failure_ratio, breaker.mode) == (0.5, "enforce")


def test_bad_changes_of_what_is_scarce_change_nothing():
    """The same for policies, pools and the like against scarcity."""
    changes: list[tuple[Any, dict[str, Any], str]] = [
        (RateLimit("5/s"), {"limits": "9/s", "max_wait": -1}, ""),
        (RateLimit("5/s"), {"max_keys": 5, "limits": "nonsense"}, "max_keys"),
        (Shed(by_fraction(0.1)), {"mode": "off", "rules": []}, "mode"),
        (Throttle(), {"k": 3.0, "window": nan}, "k"),
        (Throttle(), {"mode": "off", "probe_every": 0}, "mode"),
        (AdaptiveLimit(), {"max_wait": 5.0, "minimum": 5000}, "max_wait"),
        (AdaptiveLimit(), {"mode": "off", "partitions": {"live": 0.5}}, "mode"),
        (Bulkhead(1, max_wait=1.0), {"limit": 5, "shed": 5}, "limit"),
        (Hedge(1.0), {"delay": 2.0, "cap": 9}, "delay"),
        (Chaos(0.5, latency=1.0), {"share": 0.9, "latency": -1}, "share"),
        (_pool(), {"max_size": 5, "min_size": 9}, "settings.max_size"),
        (Channel(1), {"capacity": 5, "when_full": "panic"}, "capacity"),
        (Serializer(), {"max_waiting": 5, "max_wait": nan}, "max_waiting"),
        (_service_levels(), {"hold": 9.0, "gap": -1}, "settings"),
        (_service_levels().gate(), {"mode": "off", "level": "nonsense"}, "mode"),
    ]
    for thing, given, name in changes:
        read = attrgetter(name) if name else repr
        before = read(thing)
        with pytest.raises((TypeError, ValueError)):
            thing.update(**given)
        assert read(thing) == before, thing


def test_good_arguments_of_what_is_scarce_are_taken_at_the_edges():
    """The least and greatest values that make sense raise nothing."""
    RateLimit("1/ms", burst=1, max_wait=inf, max_waiting=1, max_keys=1).reserve(cost=0).settle(0)
    Limit(" 1_000 per 15 minutes ", name="x")
    Shed(by_criticality(0), by_tier({}, others=inf), load=lambda: 0.0)
    by_cost(len, most=1.5, least=1.0), by_fraction(0), by_fraction(1), by_deadline(quantile=1)
    codel(scale=0), adaptive_lifo(0.1, patience=0.1, scale=0)
    Throttle(k=1, probe_every=None)
    AdaptiveLimit(aimd(slow_after=inf, shrink=1, initial=1, maximum=1), partitions={"all": 1})
    Hedge(1e-9, most=1, cap=0, burst=1)
    Chaos(0, latency=(0, 1e-9)), Chaos(1, result=None, seed=0)
    _pool(min_size=2, connect_timeout=None, idle_timeout=None, checkout_timeout=inf)
    Channel(1).put(1, timeout=0)
    Serializer(max_waiting=0, max_wait=0, stripes=1), Stripes(1, list)
    IoPool("edge", throughput=0, latency=0, max_queue=0)
    _service_levels(gap=0, hold=0, recover_after=0, thresholds={})


def test_good_arguments_at_the_edges_are_taken():
    """The least and greatest values that make sense raise nothing."""
    Timeout(1e-9)
    Bulkhead(1, max_wait=inf)
    Retry(on=[OSError, lambda _error, _value: False], attempts=1, backoff=0, max_retry_after=0)
    Breaker(failure_ratio=1, min_calls=1, break_for=growing(1.0))
    Cache(1, stale_if_error=0, max_entries=1)
    ThreadBulkhead(1, max_queue=0)
    SuccessDeposit(3, 1)
    Deadline(5.0, VirtualClock()).split([0, 1])
    with criticality(Criticality.SHEDDABLE), deadline(0):
        pass
