"""Processes, workers and servers that are killed at random points: nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from seawall.clock import SYSTEM
from tests.durable.postgres import Postgres
from tests.pipeline.campaign import LOST_AFTER, Campaign, StreamServer, make_table
from tests.support_nats import NatsServer

pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]


@pytest.fixture
def stream_server(
    kind: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StreamServer]:
    """Return a server of this test's own, for a kind of stream."""
    if not kind.startswith("jetstream"):
        yield request.getfixturevalue("server")
        return
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


def campaign(kind: str, server: StreamServer, folder: Path, kills: int, seed: int) -> None:
    made = Campaign(kind, server, folder, total=kills * 10, seed=seed)
    try:
        made.run(kills)
    finally:
        made.close()
    assert sum(made.kills[what] for what in ("read", "write", "server")) == kills
    assert made.kills["read"]
    assert made.kills["server"]


@pytest.mark.parametrize("kind", ["redis", "queue", "jetstream"])
def test_kills_lose_nothing_and_double_nothing(
    kind: str, stream_server: StreamServer, tmp_path: Path
):
    """Ten of them; each key's order is kept where there are partitions."""
    campaign(kind, stream_server, tmp_path, 10, seed=1)


@pytest.mark.parametrize("kind", ["queue"])
def test_what_is_written_while_the_server_is_down_arrives(
    kind: str, stream_server: StreamServer, tmp_path: Path
):
    """The writer waits for the server; otherwise a kill at the wrong moment would lose a batch."""
    made = Campaign(kind, stream_server, tmp_path, total=100, seed=5)
    try:
        stream_server.kill()
        made.start("write", mortal=False)
        SYSTEM.sleep(2.0)
        stream_server.start()
        made.start("read-0", mortal=False)
        made.wait_for_effects()
        made.stop()
        made.check_effects()
    finally:
        made.close()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("kind", "kills"),
    [
        ("redis", 1000),
        ("redis-shared", 200),
        ("queue", 200),
        ("jetstream", 1000),
        ("jetstream-shared", 200),
    ],
)
def test_many_kills_lose_nothing_and_double_nothing(
    kind: str, kills: int, stream_server: StreamServer, tmp_path: Path
):
    """The same, for as long as it takes."""
    campaign(kind, stream_server, tmp_path, kills, seed=2)


class CrashingPostgres(Postgres):
    """A server that is stopped as by a crash."""

    def kill(self) -> None:
        """Stop it at once; what was committed is kept."""
        self.stop("immediate")


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(3600)
def test_kills_around_a_table_lose_nothing_and_double_nothing(kills: int, tmp_path: Path):
    """Two readers with one checkpoint, a writer whose numbers have gaps, crashes of PostgreSQL."""
    server = CrashingPostgres()
    try:
        make_table(server.url)
        campaign("table", server, tmp_path, kills, seed=4)
    finally:
        server.close()


@pytest.mark.parametrize("kind", ["redis", "jetstream"])
def test_one_is_killed_and_one_joins_and_each_keys_order_is_kept(
    kind: str, stream_server: StreamServer, tmp_path: Path
):
    """Of two processes that share a stream one that works is killed; others do the rest."""
    made = Campaign(kind, stream_server, tmp_path, total=400, seed=3)
    try:
        for slot in ("write", "read-0", "read-1"):
            made.start(slot, mortal=False)
        made.wait(lambda: len(made.effects()) >= 100)
        (_key, _number, worker), *_ = made.effects()
        made.kill(made.slot_of(worker))
        made.start("read-2", mortal=False)
        made.wait_for_effects()
        made.stop()
        made.check_effects()
        assert len({pid for _, _, pid in made.effects()}) >= 2
    finally:
        made.close()


@pytest.mark.parametrize("kind", ["redis"])
def test_a_paused_process_that_comes_back_too_late_breaks_no_order(
    kind: str, stream_server: StreamServer, tmp_path: Path
):
    """Others have its partitions by then; what it still does is done already."""
    made = Campaign(kind, stream_server, tmp_path, total=300, seed=4)
    try:
        for slot in ("write", "read-0", "read-1"):
            made.start(slot, mortal=False)
        for number, slot in enumerate(("read-0", "read-1", "read-0"), 1):
            made.wait(lambda least=40 * number: len(made.effects()) >= least)
            made.pause(slot, 2.5 * LOST_AFTER)
        made.wait_for_effects()
        made.stop()
        made.check_effects()
    finally:
        made.close()
