"""The example of five sensors as real processes: each thing breaks in turn, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import psycopg
import pytest
import redis

from seawall.clock import SYSTEM
from seawall.pipeline import RedisStreamSink
from tests.durable.postgres import Postgres
from tests.redis.support import Server

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240.0
DRAIN = 2.0
STREAMS = [f"samples.{partition}" for partition in range(8)]
GENEROUS = 20.0
"""Seconds beyond the drain time: the machine may be busy."""
pytestmark = [pytest.mark.timeout(900), pytest.mark.alone]  # five processes and two servers
OTHERS = ("S1", "S2", "S4")
"""Sensors that no test breaks."""


class Works:
    """The processes of the example, its stream and its database."""

    def __init__(
        self, server: Postgres, valkey: Server, folder: Path, listening: socket.socket
    ) -> None:
        self.server = server
        self._valkey = redis.Redis.from_url(valkey.url, socket_timeout=PATIENCE)
        self._valkey_url = valkey.url
        # Readers remove what all groups have read. This one reads nothing, so all stays.
        for stream in STREAMS:
            self._valkey.xgroup_create(stream, "audit", id="0", mkstream=True)
        self._folder = folder
        self._listening = listening
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started = self._many = 0
        self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"

    def start(self, name: str) -> None:
        """Start one of the programs."""
        assert name not in self._running
        commands = {
            "plant": ["uvicorn", "plant:app", "--fd", str(self._listening.fileno())],
            "collector": ["seawall", "worker", "collector:opened"],
            "analytics": ["seawall", "worker", "analytics:opened", "--drain", str(DRAIN)],
        }
        settings = {
            "PYTHONPATH": str(ROOT / "src"),
            "DATABASE_URL": self.server.url.replace("://", "+asyncpg://"),
            "REDIS_URL": self._valkey_url,
            "LOST_AFTER": "3",
            "PLANT_URL": self._url,
        }
        self._started += 1
        with (self._folder / f"{self._started:02} {name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(  # noqa: S603 - our own example
                [sys.executable, "-W", "error", "-m", *commands[name.partition(" ")[0]]],
                cwd=ROOT / "examples" / "sensors",
                env=os.environ | settings,
                pass_fds=[self._listening.fileno()],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a program a signal, and return how it ended."""
        process = self._running.pop(name)
        process.send_signal(number)
        try:
            return process.wait(DRAIN + GENEROUS)
        finally:
            process.kill()
            process.wait()

    def end_all(self) -> list[int]:
        """End all that run; the plant may still wait for those who asked a dead sensor."""
        kinds = {"plant": signal.SIGKILL}
        return [self.end(name, kinds.get(name, signal.SIGTERM)) for name in list(self._running)]

    def said(self) -> str:
        """Return what the programs have written so far."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text('utf-8')}" for log in logs)

    @contextmanager
    def broken(self, what: str) -> Iterator[None]:
        """Break something of the plant for a while."""
        httpx.put(f"{self._url}/broken/{what}?on=1", timeout=PATIENCE).raise_for_status()
        yield
        httpx.put(f"{self._url}/broken/{what}?on=0", timeout=PATIENCE).raise_for_status()

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Ask the database."""
        with psycopg.connect(self.server.url) as connection:
            return connection.execute(query.encode(), values).fetchall()

    def stored(self, where: str = "true", *values: Any) -> int:
        """Return how many samples of a kind are stored."""
        query = f"SELECT count(*) FROM samples WHERE {where}"  # noqa: S608 - of this file
        return int(self.rows(query, *values)[0][0])

    def until(self, ask: Callable[[], T]) -> T:
        """Ask until the answer is true, while all programs run; return it."""
        until = SYSTEM.now() + PATIENCE
        while not (found := ask()):
            dead = [name for name, one in self._running.items() if one.poll() is not None]
            assert dead == [], self.said()
            assert SYSTEM.now() < until, self.said()
            SYSTEM.sleep(0.05)
        return found

    def until_more(self, where: str, *values: Any, more: int = 5) -> None:
        """Wait until so many more samples of a kind are stored."""
        before = self.stored(where, *values)
        self.until(lambda: self.stored(where, *values) >= before + more)

    def written(self) -> list[str]:
        """Return the ids of all samples that are in the stream now."""
        entries = [entry for stream in STREAMS for entry in self._valkey.xrange(stream)]
        return [json.loads(fields[b"value"])["id"] for _, fields in entries]

    def write_many(self, count: int) -> None:
        """Write whole samples to the stream, faster than any sensor does."""

        async def write() -> None:
            stream = RedisStreamSink(
                self._valkey_url, "samples", key=lambda one: one["sensor"], partitions=8
            )
            one = {"vibration": [0.5] * 64}
            self._many += 1
            await stream(
                [
                    {
                        "id": uuid4().hex,
                        "sensor": f"S{number % 5 + 1}",
                        "at": f"many {self._many:02} {number:04}",
                        **one,
                    }
                    for number in range(count)
                ]
            )
            await stream.close()

        asyncio.run(write())

    def ends(self) -> Counter[str]:
        """Return how often each sample has ended: in the database, or as a dead letter."""
        letters = self.rows("SELECT value FROM seawall_dead_letters")
        buried = [json.loads(value)["id"] for (value,) in letters]
        return Counter([*(one for (one,) in self.rows("SELECT id FROM samples")), *buried])

    def check_ends(self) -> None:
        """Wait until all that is written now has ended: each once, in the order of its sensor."""
        written = set(self.written())
        self.until(lambda: written <= set(self.ends()))
        assert [one for one, times in self.ends().items() if times != 1] == []
        in_order = "SELECT sensor, at FROM samples WHERE at LIKE 'many %%' ORDER BY number"
        by_sensor: dict[str, list[str]] = {}
        for sensor, at in self.rows(in_order):
            by_sensor.setdefault(sensor, []).append(at)
        assert all(places == sorted(places) for places in by_sensor.values())


@pytest.fixture(scope="module")
def works(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Works]:
    """Return the example at work; in the end nothing has crashed, and each sample ended once."""
    server, valkey = Postgres(), Server()
    folder = tmp_path_factory.mktemp("sensors")
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            works = Works(server, valkey, folder, listening)
            try:
                for name in ("plant", "collector", "analytics"):
                    works.start(name)
                works.until(lambda: "runs analytics" in works.said())
                works.until_more("rms > 0")
                yield works
                assert works.end("collector") == 0
                works.check_ends()
                assert works.end("analytics") == 0
                assert "Traceback" not in works.said()
            finally:
                works.end_all()
    finally:
        server.close()
        valkey.close()


def test_flaky_sensors_are_asked_again(works: Works):
    """Two sensors fail three times in ten, and their samples arrive whole all the same."""
    for sensor in ("S2", "S4"):
        works.until_more("sensor = %s AND rms > 0 AND place <> '' AND missing = ''", sensor)


def test_a_dead_sensor_is_missing_with_its_cause_and_the_others_go_on(works: Works):
    """Each collection notes that it is missing, and why; mended, it is back."""
    with works.broken("S3"):
        works.until_more("sensor = 'S3' AND missing <> '' AND rms IS NULL")
        for sensor in OTHERS:
            works.until_more("sensor = %s AND rms > 0", sensor, more=2)
        causes = {cause for (cause,) in works.rows("SELECT missing FROM samples WHERE sensor='S3'")}
        assert any("timed out" in cause or "open" in cause for cause in causes), causes
    works.until_more("sensor = 'S3' AND rms > 0")


def test_without_the_directory_samples_are_stored_as_lesser_ones(works: Works):
    """They have their features, no place, and say why; none is a dead letter."""
    letters = works.rows("SELECT count(*) FROM seawall_dead_letters")
    with works.broken("places"):
        works.until_more("lesser LIKE 'no place: %%' AND place IS NULL AND rms > 0", more=10)
    works.until_more("lesser = '' AND place <> ''", more=10)
    assert works.rows("SELECT count(*) FROM seawall_dead_letters") == letters


def test_a_record_that_kills_worker_processes_is_a_dead_letter_and_the_others_go_on(works: Works):
    """After the third death the sample is set aside, with its cause; it has cost no other."""
    with works.broken("wire"):
        letters = works.until(
            lambda: works.rows("SELECT stage, attempts, error, value FROM seawall_dead_letters")
        )
    for stage, attempts, cause, value in letters:
        assert (stage, attempts) == ("with_features", 3)
        assert "WorkerDied" in cause
        assert json.loads(value)["sensor"] == "S5"
    for sensor in (*OTHERS, "S5"):
        works.until_more("sensor = %s AND rms > 0", sensor, more=2)


def test_a_database_that_fails_over_costs_no_sample(works: Works):
    """It dies under load and comes back: what was read waited, and is stored once."""
    works.write_many(60)
    works.server.stop("immediate")
    before = len(works.written())
    works.until(lambda: len(works.written()) > before + 20)  # the collector goes on
    letters_before = works.said().count("is a dead letter")
    works.server.start()
    works.check_ends()
    assert works.said().count("is a dead letter") == letters_before


def test_a_process_that_is_killed_has_stored_each_sample_once(works: Works):
    """The next one has its samples after a while, and stores none a second time."""
    works.write_many(60)
    works.until_more("true", more=10)
    assert works.end("analytics", signal.SIGKILL) == -signal.SIGKILL
    works.start("analytics")
    works.check_ends()


def test_sigterm_under_load_leaves_the_rest_to_the_next_process(works: Works):
    """It ends well within the drain time; what it did not finish, the next one does."""
    before = works.stored()
    works.write_many(300)
    works.until(lambda: works.stored() > before)
    assert works.end("analytics") == 0
    in_flight = re.findall(r"'analytics' stops, within \S+ s; in flight: (\d+)", works.said())
    assert int(in_flight[-1]) > 0
    works.start("analytics")
    works.check_ends()


def test_sigterm_ends_a_process_that_can_finish_nothing(works: Works):
    """The database is away for longer than the drain time: all is given back, and done later."""
    opened = works.said().count("'database': closed -> open")
    works.server.stop("immediate")
    works.write_many(60)
    works.until(lambda: works.said().count("'database': closed -> open") > opened)
    assert works.end("analytics") == 0
    works.server.start()
    assert not set(works.written()) <= set(works.ends())
    works.start("analytics")
    works.check_ends()


def test_two_processes_share_the_sensors_and_one_takes_over_from_the_other(works: Works):
    """One joins, takes its share, and is killed: nothing is lost, doubled or out of order."""
    works.start("analytics second")
    works.write_many(120)
    works.until_more("true", more=50)
    works.end("analytics second", signal.SIGKILL)
    works.check_ends()
