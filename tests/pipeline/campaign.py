"""A campaign of kills: pipelines on a stream, in processes that die at random points.

One child writes numbered values of several keys to a stream. Others read them, do something in a
worker process, and store them in SQLite, each once by an inbox. Children die by SIGKILL at a step
of their own (around each question to the source, before and after each commit) or from outside;
worker processes die of some values, once; the stream's server is killed and started again. At the
end everything must be there, once, in the order of each key, and nothing may be stuck.

`Campaign` is the driver, for a test. Another kind of stream needs an entry in `KINDS`, and a server
with `url`, `kill()` and `start()`.

This module is run as the process that has imported everything and forks the children: each line of
its input describes one, and the answer is its process id.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Protocol

import nats
import psycopg

from seawall import Guard, RedisStore, Retry
from seawall.backoff import full_jitter
from seawall.clock import SYSTEM
from seawall.durable import Database, Inbox, Sqlite, migrate
from seawall.errors import StoreUnavailable
from seawall.pipeline import (
    DeadLetter,
    IterableSource,
    JetStreamSink,
    JetStreamSource,
    Pipeline,
    QueueSource,
    RedisStreamSink,
    RedisStreamSource,
    current_item,
    table,
)
from seawall.redis import PriorityQueue
from seawall.resources import CpuPool

ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE: Final = 120.0
"""Seconds for what must happen sooner or later, on a busy machine."""
KEYS: Final = 8
LOST_AFTER: Final = 0.8
STREAM: Final = "numbers"
OWN_DEATHS: Final = 0.8
"""The share of children that die at a step of their own; others are killed from outside."""
LONGEST_LIFE: Final = 2.0
"""Seconds after which those are killed at the latest."""
IDLE_LIFE: Final = 5.0
"""Seconds after which a child is killed that has not come to the step at which it dies."""
WITH_WORKERS: Final = 0.3
"""The share of readers that have a worker process."""
MOST_STEPS: Final = 100
"""The last step at which a child dies of itself."""
PARTITIONS: Final = 4


# The streams


class Kind(NamedTuple):
    """How to read and write one kind of stream, at a URL."""

    source: Callable[[str], Any]
    sink: Callable[[str], Any]
    is_ordered: bool = True
    """Whether the order of each key is kept."""
    prepare: Callable[[str], None] = lambda _url: None
    """Make the stream, if it does not make itself."""


def _key(value: dict[str, int]) -> int:
    return value["key"]


def _identity(value: dict[str, int]) -> str:
    return f"{value['key']}-{value['number']}"


def _redis_source(url: str, partitions: int | None) -> Any:
    return RedisStreamSource(
        url,
        STREAM,
        group="readers",
        partitions=partitions,
        lost_after=LOST_AFTER,
        most_deliveries=10_000,
    )


def _redis_sink(url: str, partitions: int | None) -> Any:
    keyed: dict[str, Any] = {"key": _key, "partitions": partitions} if partitions else {}
    return RedisStreamSink(url, STREAM, identity=_identity, max_length=100_000, **keyed)


class QueueSink:
    """Pushes jobs, each once for as long as the campaign lasts."""

    def __init__(self, queue: PriorityQueue) -> None:
        self._queue = queue

    async def __call__(self, values: list[dict[str, int]]) -> None:
        pushes = (self._queue.apush(value, dedupe=_identity(value)) for value in values)
        await asyncio.gather(*pushes)

    async def close(self) -> None:
        self._queue.store.close()


def _queue(url: str) -> PriorityQueue:
    settings = {"max_attempts": 10_000, "dedupe_window": 3000.0}
    return PriorityQueue(RedisStore(url, timeout=1.0), STREAM, **settings)


class TableSink:
    """Adds rows, each once; those that were there leave gaps."""

    def __init__(self, url: str) -> None:
        self._pool = _pool(url)

    def __call__(self, values: list[dict[str, int]]) -> None:
        with self._pool.connection() as connection:
            connection.cursor().executemany(
                f"INSERT INTO {STREAM} (key, number) VALUES (%(key)s, %(number)s)"  # noqa: S608 - our own
                " ON CONFLICT (key, number) DO NOTHING",
                values,
            )

    async def close(self) -> None:
        self._pool.close()


def _pool(url: str) -> Any:
    from psycopg_pool import ConnectionPool

    return ConnectionPool(url, min_size=1, max_size=4, timeout=5.0, open=True)


def make_table(url: str) -> None:
    """Make the table of the kind "table"."""
    with closing(_pool(url)) as pool:
        migrate(Database(pool))
        with pool.connection() as connection:
            columns = "id bigserial PRIMARY KEY, key integer, number integer, UNIQUE (key, number)"
            connection.execute(f"CREATE TABLE {STREAM} ({columns})")


def _table_source(url: str) -> Any:
    settings: dict[str, Any] = {"checkpoint": "readers", "every": 0.05, "poll": 0.02}
    return table(Database(_pool(url)), STREAM, columns=["key", "number"], follow=True, **settings)


def _jetstream_source(url: str, partitions: int | None) -> Any:
    return JetStreamSource(
        url,
        STREAM,
        consumer="readers",
        subject=f"{STREAM}.{{partition}}" if partitions else None,
        partitions=partitions,
        decode=lambda message: json.loads(message.data),
        lost_after=LOST_AFTER,
        most_deliveries=10_000,
    )


def _jetstream_sink(url: str, partitions: int | None) -> Any:
    subject = f"{STREAM}.{{partition}}" if partitions else f"{STREAM}.all"
    return JetStreamSink(url, subject, key=_key, partitions=partitions, identity=_identity)


def _make_jetstream(url: str) -> None:
    async def make() -> None:
        client = await nats.connect(url, connect_timeout=int(PATIENCE))
        await client.jetstream().add_stream(name=STREAM, subjects=[f"{STREAM}.>"])
        await client.close()

    asyncio.run(make())


KINDS: Final = {
    "jetstream": Kind(
        lambda url: _jetstream_source(url, 4 * PARTITIONS),
        lambda url: _jetstream_sink(url, 4 * PARTITIONS),
        prepare=_make_jetstream,
    ),
    "jetstream-shared": Kind(
        lambda url: _jetstream_source(url, None),
        lambda url: _jetstream_sink(url, None),
        is_ordered=False,
        prepare=_make_jetstream,
    ),
    "queue": Kind(
        lambda url: QueueSource(_queue(url), lease=LOST_AFTER),
        lambda url: QueueSink(_queue(url)),
        is_ordered=False,
    ),
    "table": Kind(_table_source, TableSink),
    "redis": Kind(
        lambda url: _redis_source(url, PARTITIONS), lambda url: _redis_sink(url, PARTITIONS)
    ),
    "redis-shared": Kind(
        lambda url: _redis_source(url, None), lambda url: _redis_sink(url, None), is_ordered=False
    ),
}


# The children


class Stepping:
    """A source whose user may die before and after each question."""

    def __init__(self, source: Any, step: Callable[[], None]) -> None:
        self._source = source
        self._step = step
        self.name = source.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    async def pull(self, most: int) -> Sequence[Any]:
        self._step()
        pulled: Sequence[Any] = await self._source.pull(most)
        self._step()
        return pulled

    async def acknowledge(self, handles: Sequence[Any]) -> None:
        self._step()
        await self._source.acknowledge(handles)
        self._step()

    async def give_back(self, handles: Sequence[Any]) -> None:
        await self._source.give_back(handles)
        self._step()

    async def close(self) -> None:
        await self._source.close()
        self._step()


def steps(dies: int) -> Callable[[], None]:
    """Return what counts the steps of a child, and kills it at that one; 0: never."""
    left = dies

    def step() -> None:
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def value_of(number: int) -> dict[str, int]:
    """Return the value with that number in the order of writing."""
    return {"key": number % KEYS, "number": number // KEYS}


def work(value: dict[str, int], folder: str) -> dict[str, int]:
    """Be the work of a worker process: some values kill it, once."""
    if value["key"] < KEYS / 2 and value["number"] % 25 == 3:
        try:
            Path(folder, f"killed-{_identity(value)}").touch(exist_ok=False)
        except FileExistsError:
            return value
        os.kill(os.getpid(), signal.SIGKILL)
    return value


async def bury(told: dict[str, Any], letter: DeadLetter) -> None:
    """Tell the driver of a dead letter, which must not be."""
    note(told, "letter", repr(letter))


async def write(told: dict[str, Any], step: Callable[[], None]) -> None:
    """Write all values, beginning where the writer before has ended."""
    total, folder = told["total"], Path(told["folder"])
    source = IterableSource(
        lambda offset: map(value_of, range(offset, total)),
        checkpoint=folder / "written",
        every=0.0,
    )
    sink = KINDS[told["kind"]].sink(told["url"])
    pipeline = Pipeline("writer", dead_letters=partial(bury, told))
    # Without it, what is written while the server is down would be a dead letter.
    retry = Retry(
        on=(StoreUnavailable, psycopg.Error),
        attempts=10_000,
        backoff=full_jitter(0.1, cap=1.0),
        budget=None,
    )
    flow = pipeline.read(Stepping(source, step))
    flow.sink(sink, batch=(20, 0.005), name="stream", guard=Guard("stream", retry))
    until_stopped(pipeline)
    if await pipeline.run():
        note(told, "done", "")
    await sink.close()


async def read(told: dict[str, Any], step: Callable[[], None]) -> None:
    """Read values, and store each once."""
    database = Database(Sqlite(Path(told["folder"], "effects.db"), busy_timeout=60), name="e")
    inbox = Inbox(database)

    def store(value: dict[str, int]) -> None:
        step()
        with database.transaction() as connection:
            with inbox.once(connection, "reader", current_item().id) as first:
                if first:
                    row = (value["key"], value["number"], os.getpid())
                    connection.execute("INSERT INTO effects (key, number, pid) VALUES (?,?,?)", row)
            step()
        step()

    pipeline = Pipeline("reader", dead_letters=partial(bury, told))
    flow = pipeline.read(Stepping(KINDS[told["kind"]].source(told["url"]), step))
    if told["cpu"]:
        pool = CpuPool("campaign", workers=1)
        function = Work(told["folder"])
        flow = flow.stage(function, workers=pool, ordered_by=_key, most_deaths=100, name="work")
    flow.sink(store, workers=2, ordered_by=_key)
    until_stopped(pipeline)
    await pipeline.run()


class Work:
    """`work` in one folder, for a worker process."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, value: dict[str, int]) -> dict[str, int]:
        return work(value, self.folder)


def until_stopped(pipeline: Pipeline) -> None:
    """Stop at SIGTERM."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pipeline.stop, 10.0)


def note(told: dict[str, Any], kind: str, text: str) -> None:
    """Tell the driver that the writer is done, or what must not happen."""
    Path(told["folder"], f"{kind}-{os.getpid()}").write_text(text)


def live(told: dict[str, Any]) -> None:
    """Be a child, until killed or done."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        role = {"write": write, "read": read}[told["role"]]
        asyncio.run(role(told, steps(told["dies"])))
        code = 0
    except BaseException:  # noqa: BLE001 - the driver reads it
        note(told, "error", traceback.format_exc())
    finally:
        os._exit(code)


def fork_children() -> None:
    """Fork a child for each line of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            live(json.loads(line))
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


# The driver


class StreamServer(Protocol):
    """The server of a stream: killed, it has lost nothing that it has confirmed."""

    @property
    def url(self) -> str:
        """Return where it is."""

    def kill(self) -> None:
        """Kill it."""

    def start(self) -> None:
        """Start it again."""


class Child(NamedTuple):
    """A process of the campaign."""

    pid: int
    kill_at: float | None


class Campaign:
    """A writer and some readers that are killed and replaced."""

    def __init__(
        self, kind: str, server: StreamServer, folder: Path, total: int, seed: int
    ) -> None:
        """Write `total` values by a stream of that kind."""
        self.kills: Counter[str] = Counter()
        self._common = {"kind": kind, "url": server.url, "folder": str(folder), "total": total}
        self._kind = kind
        self._total = total
        self._server = server
        self._folder = folder
        self._rng = Random(seed)
        self._children: dict[str, Child] = {}
        KINDS[kind].prepare(server.url)
        source = Sqlite(folder / "effects.db")
        database = Database(source, name=f"campaign {seed}")
        migrate(database)
        rows = "id INTEGER PRIMARY KEY AUTOINCREMENT, key INTEGER, number INTEGER, pid INTEGER"
        source.run(lambda raw: raw.execute(f"CREATE TABLE effects ({rows})"))
        database.close()
        source.close()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline.campaign"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )  # fmt: skip

    def start(self, slot: str, *, mortal: bool, cpu: bool = False) -> None:
        """Start a child; a mortal one dies soon."""
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        rng = self._rng
        dies = rng.randint(1, MOST_STEPS) if mortal and rng.random() < OWN_DEATHS else 0
        told = {**self._common, "role": slot.partition("-")[0], "dies": dies, "cpu": cpu}
        self._nursery.stdin.write(json.dumps(told) + "\n")
        self._nursery.stdin.flush()
        life = IDLE_LIFE if dies or cpu else rng.uniform(0.0, LONGEST_LIFE)
        pid = int(self._nursery.stdout.readline())
        self._children[slot] = Child(pid, SYSTEM.now() + life if mortal else None)

    def has_ended(self, slot: str) -> bool:
        """Tell whether the child is no more."""
        try:
            os.kill(self._children[slot].pid, 0)
        except ProcessLookupError:
            return True
        return False

    def slot_of(self, pid: int) -> str:
        """Return the slot of a live child."""
        return next(slot for slot, child in self._children.items() if child.pid == pid)

    def kill(self, slot: str) -> None:
        """Kill a child where it stands."""
        with suppress(ProcessLookupError):
            os.kill(self._children[slot].pid, signal.SIGKILL)
        self.wait(lambda: self.has_ended(slot))

    def pause(self, slot: str, seconds: float) -> None:
        """Stop a child for so long, as a virtual machine may do, and let it go on."""
        pid = self._children[slot].pid
        os.kill(pid, signal.SIGSTOP)
        SYSTEM.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def wait(self, true: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until something is so."""
        until = SYSTEM.now() + seconds
        while not true():
            self.check_errors()
            assert SYSTEM.now() < until, f"stuck: {self.missing()[:20]}, {dict(self.kills)}"
            SYSTEM.sleep(0.01)

    def wait_for_effects(self) -> None:
        """Wait until everything is stored, as long as there is some progress."""
        while missing := len(self.missing()):
            self.wait(lambda before=missing: len(self.missing()) < before)

    def check_errors(self) -> None:
        """Fail if a child has failed, or made a dead letter."""
        for path in self._folder.iterdir():
            if path.name.startswith(("error-", "letter-")):
                raise AssertionError(path.read_text())

    def run(self, kills: int, *, readers: int = 2, servers: bool = True) -> None:
        """Kill so often; then let all values arrive, and check them."""
        slots = ["write", *(f"read-{number}" for number in range(readers))]
        for slot in slots:
            self.start(slot, mortal=True)
        done = 0
        while done < kills:
            if servers and done % 7 == 5:
                self._server.kill()
                SYSTEM.sleep(self._rng.uniform(0.0, 0.3))
                self._server.start()
                self.kills["server"] += 1
                done += 1
                continue
            slot = self.next_death(slots)
            if slot == "write" and any(self._folder.glob("done-*")):
                slots.remove(slot)  # it has ended, and was not killed
                del self._children[slot]
                continue
            self.kills[slot.partition("-")[0]] += 1
            done += 1
            self.start(slot, mortal=True, cpu=self._rng.random() < WITH_WORKERS)
        for slot in slots:
            self.kill(slot)
            self.start(slot, mortal=False, cpu=slot == "read-0")
        self.wait_for_effects()
        self.stop()
        self.kills["worker"] = len(list(self._folder.glob("killed-*")))
        self.check_effects()

    def next_death(self, slots: list[str]) -> str:
        """Return the slot of the next child that dies, or whose time has come."""
        until = SYSTEM.now() + PATIENCE
        while True:
            now = SYSTEM.now()
            for slot in slots:
                if self.has_ended(slot):
                    return slot
                kill_at = self._children[slot].kill_at
                if kill_at is not None and now >= kill_at:
                    self.kill(slot)
                    return slot
            self.check_errors()
            assert now < until, "no child dies"
            SYSTEM.sleep(0.002)

    def stop(self) -> None:
        """Stop all children in good order."""
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)
        self.wait(lambda: all(self.has_ended(slot) for slot in self._children))
        self._children.clear()

    def effects(self) -> list[tuple[int, int, int]]:
        """Return key, number and process of everything that was stored, in its order."""
        with closing(sqlite3.connect(self._folder / "effects.db", timeout=60)) as raw:
            return raw.execute("SELECT key, number, pid FROM effects ORDER BY id").fetchall()

    def missing(self) -> list[dict[str, int]]:
        """Return the values that are not stored yet."""
        stored = {(key, number) for key, number, _ in self.effects()}
        values = map(value_of, range(self._total))
        return [value for value in values if (value["key"], value["number"]) not in stored]

    def check_effects(self) -> None:
        """Check that every value is stored once, in the order of each key if that is kept."""
        by_key: dict[int, list[int]] = defaultdict(list)
        for key, number, _ in self.effects():
            by_key[key].append(number)
        for key, numbers in by_key.items():
            found = numbers if KINDS[self._kind].is_ordered else sorted(numbers)
            assert found == list(range(len(numbers))), (key, numbers)

    def close(self) -> None:
        """End everything, also after a failure."""
        for child in self._children.values():
            with suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.close()
        self._nursery.wait(PATIENCE)
        self._nursery.stdout.close()


if __name__ == "__main__":
    fork_children()
