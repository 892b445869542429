"""Real servers for sources and sinks, as in the tests of what they are built on."""

from __future__ import annotations

from tests.durable.conftest import postgres
from tests.shared.conftest import client, new_store, redis_url

__all__ = ["client", "new_store", "postgres", "redis_url"]
