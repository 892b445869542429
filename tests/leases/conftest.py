"""One real Valkey and one real PostgreSQL for these tests; each test has its own corner of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.durable.postgres import Postgres
from tests.leases.sites import KINDS, Site
from tests.redis.support import Server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the machine alone for what asks real servers that have to answer in real time."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """Return the PostgreSQL server of this run."""
    server = Postgres()
    yield server
    server.close()


@pytest.fixture(scope="session")
def valkey() -> Iterator[Server]:
    """Return the Valkey server of this run."""
    server = Server()
    yield server
    server.close()


@pytest.fixture(params=KINDS)
def site(
    request: pytest.FixtureRequest, valkey: Server, postgres: Postgres, tmp_path: Path
) -> Site:
    """Return each store in turn: the conformance suite."""
    return Site(request.param, valkey, postgres, tmp_path)
