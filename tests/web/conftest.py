"""The server's edge with shared limits is tested against a real store, and by both of its ways."""

from __future__ import annotations

import pytest

from tests.redis.conftest import client, frozen, new_store, redis_url, server, store

__all__ = ["both_ways", "client", "frozen", "new_store", "redis_url", "server", "store"]


@pytest.fixture(params=["short way", "long way"])
def both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain requests take the short way through the edge, and once more the long one."""
    if request.param == "long way":
        monkeypatch.setattr("seawall.web.edge.edge.plain_entry", lambda *_: None)
