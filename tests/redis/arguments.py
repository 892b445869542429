"""Bad arguments of what pods share: what is called, the bad values, and a word of the advice."""

from __future__ import annotations

import asyncio
from math import inf, nan
from random import Random
from typing import Any

from seawall import Breaker, RateLimit, RedisStore
from seawall.clock import SystemClock
from seawall.jobs import Claim, LocalQueue, Worker
from seawall.leases import Lease
from seawall.redis import PriorityQueue
from seawall.testing import FakeStore

HUGE = 10**400

_SECONDS = [(-1.0, ValueError), (nan, ValueError), ("2", TypeError), (True, TypeError)]
_POSITIVE = [*_SECONDS, (0, ValueError), (inf, ValueError), (HUGE, ValueError)]
_COUNTS = [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)]
_NATURALS = [case for case in _COUNTS if case[0] != 0]
_CHOICES = [("nonsense", ValueError), (5, ValueError), (None, ValueError)]
_NAMES = [("", (TypeError, ValueError)), (5, (TypeError, ValueError))]
_STORES = [(5, TypeError), ("redis://127.0.0.1", TypeError), (RedisStore, TypeError)]
_CLOCKS = [(5, TypeError), (SystemClock, TypeError)]
_RNGS = [(5, TypeError), (Random, TypeError)]
_FUNCTIONS = [(5, TypeError), ("f", TypeError)]
_OTHERS = [(5, TypeError), ("x", TypeError)]
_BACKOFFS = [("x", TypeError), (nan, ValueError)]
_TARGETS = [
    (5, TypeError),
    (None, TypeError),
    ("", ValueError),
    ("127.0.0.1:6379", ValueError),
    ("http://127.0.0.1", ValueError),
    ("redis://127.0.0.1:99999", ValueError),
]

STORE = RedisStore("redis://127.0.0.1:1")  # never connected to


def _limit(**options: Any) -> RateLimit:
    return RateLimit("100/s", **{"shared": STORE, "name": "x", **options})


def _breaker(**options: Any) -> Breaker:
    return Breaker(**{"shared": STORE, "name": "x", **options})


def _lease(**options: Any) -> Lease:
    return Lease(options.pop("store", STORE), options.pop("name", "x"), **options)


def _queues(**options: Any) -> PriorityQueue:
    return PriorityQueue(options.pop("store", STORE), options.pop("name", "x"), **options)


def _worker(**options: Any) -> Worker:
    queue = options.pop("queue", LocalQueue())
    return Worker(queue, options.pop("handler", print), **options)


def _of_queues(make: Any, name: str) -> list[tuple[Any, ...]]:
    """Return the rows that both kinds of queue have in common."""
    return [
        (f"{name}(name)", lambda x: make(name=x), _NAMES, "write"),
        (f"{name}(head_start)", lambda x: make(head_start=x), _SECONDS, "seconds"),
        (f"{name}(max_attempts)", lambda x: make(max_attempts=x), _COUNTS, "write"),
        (f"{name}(max_size)", lambda x: make(max_size=x), _COUNTS, "write"),
        (f"{name}(max_dead)", lambda x: make(max_dead=x), _COUNTS, "write"),
        (f"{name}(keep)", lambda x: make(keep=x), _POSITIVE, "seconds|write"),
        (f"{name}(result_ttl)", lambda x: make(result_ttl=x), _POSITIVE, "seconds|write"),
        (f"{name}(dedupe_window)", lambda x: make(dedupe_window=x), _SECONDS, "seconds"),
        (f"{name}(max_payload)", lambda x: make(max_payload=x), _COUNTS, "write"),
        (f"{name}(clock)", lambda x: make(clock=x), _CLOCKS, "clock"),
    ]


SHARED: list[tuple[Any, ...]] = [
    ("RedisStore(target)", RedisStore, _TARGETS, "redis://|65535"),
    ("RedisStore(name)", lambda x: RedisStore("redis://h", name=x), _NAMES, "write text"),
    ("RedisStore(prefix)", lambda x: RedisStore("redis://h", prefix=x), _NAMES, "write text"),
    (
        "RedisStore(expected_pods)",
        lambda x: RedisStore("redis://h", expected_pods=x),
        _COUNTS,
        "write",
    ),
    ("RedisStore(timeout)", lambda x: RedisStore("redis://h", timeout=x), _POSITIVE, "seconds"),
    ("FakeStore(name)", lambda x: FakeStore(name=x), _NAMES, "write text"),
    ("FakeStore(clock)", lambda x: FakeStore(clock=x), _CLOCKS, "clock"),
    ("RateLimit(shared)", lambda x: RateLimit("1/s", shared=x, name="x"), _STORES, "store|Store"),
    ("RateLimit(name)", lambda x: _limit(name=x), [*_NAMES, (None, TypeError)], "name="),
    (
        "RateLimit(name) alone",
        lambda x: RateLimit("1/s", **x),
        [
            ({"name": "x"}, TypeError),
            ({"sharing": "leased"}, TypeError),
            ({"on_store_failure": "open"}, TypeError),
            ({"batch": 5}, ValueError),
        ],
        "shared=|sharing=",
    ),
    ("RateLimit(sharing)", lambda x: _limit(sharing=x), _CHOICES, "'leased'"),
    ("RateLimit(batch)", lambda x: _limit(sharing="leased", batch=x), _COUNTS, "write"),
    ("RateLimit(batch) exact", lambda x: _limit(batch=x), [(5, ValueError)], "leased"),
    ("RateLimit(on_store_failure)", lambda x: _limit(on_store_failure=x), _CHOICES, "'closed'"),
    (
        "RateLimit.areserve(cost)",
        lambda x: asyncio.run(RateLimit("1/s").areserve(cost=x)),
        _NATURALS,
        "cost",
    ),
    ("RateLimit.lower(remaining)", lambda x: RateLimit("1/s").lower(x, 1.0), _NATURALS, "write"),
    ("RateLimit.lower(reset_after)", lambda x: RateLimit("1/s").lower(1, x), _SECONDS, "seconds"),
    (
        "RateLimit.lower(limit)",
        lambda x: RateLimit("1/s").lower(1, 1.0, limit=x),
        [("2/s", ValueError), (5, ValueError)],
        "'1/s'",
    ),
    (
        "RateLimit.lower(limit) of several",
        lambda x: RateLimit("1/s", "9/min").lower(1, 1.0, limit=x),
        [(None, TypeError)],
        "limit=",
    ),
    (
        "RateLimit.alower(remaining)",
        lambda x: asyncio.run(RateLimit("1/s").alower(x, 1.0)),
        _NATURALS,
        "write",
    ),
    (
        "RateLimit.alower(reset_after)",
        lambda x: asyncio.run(RateLimit("1/s").alower(1, x)),
        _SECONDS,
        "seconds",
    ),
    (
        "RateLimit.alower(limit)",
        lambda x: asyncio.run(RateLimit("1/s").alower(1, 1.0, limit=x)),
        [("2/s", ValueError)],
        "'1/s'",
    ),
    (
        "RateLimit.take_up_to(most)",
        lambda x: RateLimit("1/s").take_up_to(x),
        _NATURALS,
        "write",
    ),
    (
        "RateLimit.atake_up_to(most)",
        lambda x: asyncio.run(RateLimit("1/s").atake_up_to(x)),
        _NATURALS,
        "write",
    ),
    (
        "RateLimit.reset(limit)",
        lambda x: RateLimit("1/s").reset(limit=x),
        [("2/s", ValueError), (5, ValueError), ([], ValueError)],
        "'1/s'",
    ),
    (
        "RateLimit.areset(limit)",
        lambda x: asyncio.run(RateLimit("1/s").areset(limit=x)),
        [("2/s", ValueError)],
        "'1/s'",
    ),
    ("Breaker(shared)", lambda x: Breaker(shared=x, name="x"), _STORES, "store|Store"),
    ("Breaker(name)", lambda x: _breaker(name=x), [*_NAMES, (None, TypeError)], "name="),
    (
        "Breaker(name) alone",
        lambda x: Breaker(**x),
        [
            ({"name": "x"}, TypeError),
            ({"quorum": 2}, TypeError),
            ({"on_store_failure": "open"}, TypeError),
        ],
        "shared=",
    ),
    ("Breaker(on_store_failure)", lambda x: _breaker(on_store_failure=x), _CHOICES, "'closed'"),
    ("Breaker(quorum)", lambda x: _breaker(quorum=x), _COUNTS, "write"),
    ("Lease(store)", lambda x: _lease(store=x), [*_STORES, (None, TypeError)], "RedisStore"),
    ("Lease(name)", lambda x: _lease(name=x), [*_NAMES, (None, TypeError)], "write"),
    ("Lease(ttl)", lambda x: _lease(ttl=x), [*_POSITIVE, (None, TypeError)], "seconds|write"),
    ("Lease(renew_every)", lambda x: _lease(renew_every=x), _POSITIVE, "seconds|write"),
    ("Lease(renew_every) late", lambda x: _lease(renew_every=x), [(11.0, ValueError)], "ttl"),
    ("Lease(on_lost)", lambda x: _lease(on_lost=x), _FUNCTIONS, "function"),
    ("Lease(clock)", lambda x: _lease(clock=x), _CLOCKS, "clock"),
    ("Lease(rng)", lambda x: _lease(rng=x), _RNGS, "random|Random"),
    ("Lease.acquire(timeout)", lambda x: _lease().acquire(x), _SECONDS, "seconds"),
    (
        "Lease.aacquire(timeout)",
        lambda x: asyncio.run(_lease().aacquire(x)),
        _SECONDS,
        "seconds",
    ),
    ("PriorityQueue(store)", lambda x: _queues(store=x), _STORES, "RedisStore"),
    *_of_queues(_queues, "PriorityQueue"),
    *_of_queues(LocalQueue, "LocalQueue"),
    ("Worker(queue)", lambda x: _worker(queue=x), _OTHERS, "Queue"),
    ("Worker(handler)", lambda x: _worker(handler=x), _FUNCTIONS, "function"),
    (
        "Worker(guard)",
        lambda x: _worker(guard=x),
        [(5, TypeError), ("x", TypeError)],
        "Guard|guard",
    ),
    ("Worker(concurrency)", lambda x: _worker(concurrency=x), _COUNTS, "write"),
    ("Worker(lease)", lambda x: _worker(lease=x), _POSITIVE, "seconds|write"),
    (
        "Worker(shed)",
        lambda x: _worker(shed=x),
        [(5, TypeError), ("codel", TypeError), (int, TypeError)],
        "write codel",
    ),
    (
        "Worker(backoff)",
        lambda x: _worker(backoff=x),
        [("x", TypeError), (nan, ValueError)],
        "write",
    ),
    ("Worker(rng)", lambda x: _worker(rng=x), _RNGS, "random|Random"),
    ("Worker.stop(grace)", lambda x: _worker().stop(x), _SECONDS, "seconds"),
    ("Worker.run_sync(drain)", lambda x: _worker().run_sync(x), _SECONDS, "seconds"),
]

UNCHECKED_BY_REDIS = frozenset(f"Claim({name})" for name in Claim.__slots__)
"""What only queues make."""
