"""Real servers for sources and sinks, as in the tests of what they are built on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.durable.conftest import opening, postgres
from tests.redis.conftest import client, new_store, redis_url
from tests.redis.support import Server
from tests.support_nats import NatsServer

__all__ = [
    "client",
    "nats_server",
    "new_store",
    "opening",
    "postgres",
    "redis_url",
    "server",
]


@pytest.fixture
def server() -> Iterator[Server]:
    """Return a Valkey server of this test's own, to be killed, stopped and restarted.

    It keeps what it has confirmed, also when it is killed.
    """
    made = Server("--appendonly", "yes", "--appendfsync", "always")
    yield made
    made.close()


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Return a NATS server of the file's own."""
    made = NatsServer(tmp_path_factory.mktemp("nats"))
    yield made
    made.kill()
