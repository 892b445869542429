"""The server's edge with shared limits is tested against a real store."""

from __future__ import annotations

from tests.redis.conftest import client, frozen, new_store, redis_url, server, store

__all__ = ["client", "frozen", "new_store", "redis_url", "server", "store"]
