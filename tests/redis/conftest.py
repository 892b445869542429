"""One real server for all of these tests, and stores on it that do not see each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

import pytest
import redis

from seawall.redis.store import RedisStore
from tests.redis.faults import Site, no_collection
from tests.redis.support import FrozenClock, Server

HERE: Final = Path(__file__).parent

IN_NO_HURRY: Final = frozenset(
    {
        "breaker/test_agreement.py",
        "breaker/test_properties.py",
        "breaker/test_report.py",
        "limits/test_agreement.py",
        "limits/test_edges.py",
        "limits/test_leased_bounds.py",
        "limits/test_leased_split.py",
        "limits/test_limits.py",
        "limits/test_words.py",
        "queue/test_agreement.py",
        "test_fake.py",
        "test_standard.py",
    }
)
"""Files that measure no real time: the store's clock stands still, or nothing depends on it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the machine alone for what asks a real server that has to answer in real time."""
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        if item.path.relative_to(HERE).as_posix() not in IN_NO_HURRY:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Return where the server is: REDIS_URL if it is set, else one that is started here."""
    given = os.environ.get("REDIS_URL")
    if given:
        yield given
        return
    server = Server()
    yield server.url
    server.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """Return a plain client, for looking at what is stored."""
    with redis.Redis.from_url(redis_url, socket_timeout=5) as made:
        yield made


@pytest.fixture
def new_store(redis_url: str, client: redis.Redis) -> Iterator[Callable[..., RedisStore]]:
    """Return a function that makes stores with one prefix: each acts as another pod.

    Their timeout is generous, so that a busy machine is no failure; tests of failures give theirs.
    """
    prefix = f"test-{token_hex(4)}"
    made: list[RedisStore] = []

    def make(**options: Any) -> RedisStore:
        options = {"prefix": prefix, "timeout": 10.0, **options}
        made.append(RedisStore(options.pop("url", redis_url), **options))
        return made[-1]

    yield make
    for store in made:
        store.close()
    for key in client.scan_iter(match=f"{prefix}:*", count=1000):
        client.delete(key)


@pytest.fixture
def store(new_store: Callable[..., RedisStore]) -> RedisStore:
    """Return a store of this test's own."""
    return new_store()


@pytest.fixture
def frozen(store: RedisStore, client: redis.Redis) -> Iterator[FrozenClock]:
    """Return the server's clock as the scripts of `store` see it, standing still."""
    clock = FrozenClock(store, client)
    yield clock
    client.delete(clock._key)


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a server of this test's own, to be killed, stopped and restarted."""
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Return a server of this file's own behind a proxy, for all of its tests."""
    made = Site()
    yield made
    made.close()


@pytest.fixture(name="no_collection")
def no_collection_fixture() -> Iterator[None]:
    """Keep the garbage collector off during the test."""
    with no_collection():
        yield
