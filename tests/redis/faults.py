"""Ways for a store to fail: what the server itself can do, and a proxy that hurts connections.

Each fault of `FAULTS` is a context manager around a `Site`; when it ends the store is as before.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Self

import redis

from seawall.clock import SYSTEM
from tests.redis.support import Server

CHUNK = 65536


class Proxy:
    """A TCP relay in front of a server, in a thread of its own; set an attribute to hurt it.

    `delay`: seconds that each reply is held back. `hole`: nothing is answered, nor passed on; with
    `deafen()` on the connections of this moment only. `cut`: each reply to a script ends after so
    many bytes, and so does its connection. `mangle`: what each reply to a script is replaced by;
    `mangle_pushes`: what is pushed. `dribble`: replies come in pieces of so many bytes.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._restore()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._writers: set[asyncio.StreamWriter] = set()
        self._deaf: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: asyncio.Server | None = None
        self.port = 0
        self.connections = 0
        self._thread.start()
        self._do(self._listen())
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def _restore(self) -> None:
        self.delay = 0.0
        self.hole = False
        self.cut: int | None = None
        self.mangle: Callable[[bytes], bytes] | None = None
        self.mangle_pushes: Callable[[bytes], bytes] | None = None
        self.dribble: int | None = None

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def refuse(self) -> None:
        """Refuse new connections, and end those that there are."""
        self._do(self._stop())

    def deafen(self) -> None:
        """Let the connections that there are be black holes; new ones are as good as ever."""
        self._deaf |= self._writers

    def sever(self) -> None:
        """End all connections; new ones are welcome."""
        self._do(self._sever())

    def heal(self) -> None:
        """Be a plain relay again."""
        self._restore()
        if self._listening is None:
            self._do(self._listen())

    def close(self) -> None:
        """End the thread."""
        if self._listening is not None:
            self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        assert self._listening is not None
        self._listening.close()
        self._listening = None
        await self._sever()

    async def _sever(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = self._loop.create_task(self._serve(reader, writer))
        self._tasks.add(task)

        def end(task: asyncio.Task[None]) -> None:
            """Close it here: a task that is cancelled before it began closes nothing."""
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

        task.add_done_callback(end)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back: asyncio.StreamWriter | None = None
        try:
            source, back = await asyncio.open_connection("127.0.0.1", self._target)
            self._writers.add(back)
            # Whether a script was the last thing asked for, and whether anything is listened to.
            asked = [False, False]
            sides = [
                self._loop.create_task(self._forth(reader, back, asked)),
                self._loop.create_task(self._back(source, writer, asked)),
            ]
            try:
                await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for side in sides:
                    side.cancel()
                await asyncio.gather(*sides, return_exceptions=True)
        except OSError:
            pass  # the server is gone
        finally:
            for one in (writer, back):
                if one is not None:
                    self._writers.discard(one)
                    self._deaf.discard(one)
                    one.transport.abort()

    async def _forth(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[bool]
    ) -> None:
        while data := await reader.read(CHUNK):
            if self.hole or writer in self._deaf:
                continue
            asked[0] = b"EVAL" in data
            asked[1] = asked[1] or b"SUBSCRIBE" in data
            writer.write(data)
            await writer.drain()

    async def _back(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[bool]
    ) -> None:
        while data := await reader.read(CHUNK):
            if self.hole or writer in self._deaf:
                continue
            if self.delay:
                await asyncio.sleep(self.delay)  # noqa: TID251 - the delay itself
            if asked[0] and self.mangle is not None:
                data = self.mangle(data)
            if asked[1] and self.mangle_pushes is not None:
                data = self.mangle_pushes(data)
            if asked[0] and self.cut is not None:
                writer.write(data[: self.cut])
                await writer.drain()
                return
            step = self.dribble or len(data)
            for place in range(0, len(data), max(1, step)):
                writer.write(data[place : place + step])
                await writer.drain()
                if self.dribble:
                    await asyncio.sleep(0.0005)  # noqa: TID251 - or the kernel joins the pieces


class Lateness:
    """How late this machine itself is, for as long as the block lasts: of a thread that sleeps."""

    def __enter__(self) -> Self:
        self._late: list[float] = []
        self._over = False
        self._thread = threading.Thread(target=self._measure)
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over = True
        self._thread.join()

    def _measure(self) -> None:
        while not self._over:
            began = SYSTEM.now()
            SYSTEM.sleep(0.002)
            self._late.append(SYSTEM.now() - began - 0.002)

    @property
    def worst(self) -> float:
        """Seconds."""
        return max(self._late)


class Site:
    """A server of our own behind a proxy: where stores are pointed at, and hurt."""

    def __init__(self) -> None:
        self.server = Server()
        self.proxy = Proxy(self.server.port)
        self.url = self.proxy.url

    def admin(self, **options: Any) -> redis.Redis:
        """Return a client of the server itself, past the proxy."""
        return self.server.client(**options)

    def close(self) -> None:
        self.proxy.close()
        self.server.close()


def _until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    over = SYSTEM.now() + seconds
    while not true():
        assert SYSTEM.now() < over, "it has not happened"
        SYSTEM.sleep(0.002)


@contextmanager
def killed(site: Site) -> Iterator[None]:
    """SIGKILL; started again, empty, at the end."""
    site.server.kill()
    try:
        yield
    finally:
        site.server.start()


@contextmanager
def stopped(site: Site) -> Iterator[None]:
    """SIGSTOP: connections are taken, and nothing is answered."""
    site.server.freeze()
    try:
        yield
    finally:
        site.server.thaw()


@contextmanager
def read_only(site: Site) -> Iterator[None]:
    """READONLY: the server is a replica of nobody."""
    with site.admin() as admin:
        admin.replicaof("127.0.0.1", 1)
        try:
            yield
        finally:
            admin.replicaof("NO", "ONE")


@contextmanager
def full(site: Site) -> Iterator[None]:
    """No memory left: OOM."""
    with _configured(site, "maxmemory", "1", "0"):
        yield


@contextmanager
def without_replicas(site: Site) -> Iterator[None]:
    """Too few replicas to write: NOREPLICAS."""
    with _configured(site, "min-replicas-to-write", "1", "0"):
        yield


@contextmanager
def _configured(site: Site, name: str, bad: str, good: str) -> Iterator[None]:
    with site.admin() as admin:
        admin.config_set(name, bad)
        try:
            yield
        finally:
            admin.config_set(name, good)


@contextmanager
def busy(site: Site) -> Iterator[None]:
    """Somebody's script never ends: BUSY."""
    with _configured(site, "lua-time-limit", "5", "5000"), site.admin() as admin:

        def endless() -> None:
            with suppress(redis.RedisError):
                admin.eval("while true do end", 0)

        thread = threading.Thread(target=endless)
        thread.start()
        _until(lambda: _says(site, "BUSY"))
        try:
            yield
        finally:
            with site.admin() as other:
                _until(lambda: _killed_script(other))
            thread.join()


def _says(site: Site, word: str) -> bool:
    with site.admin() as admin:
        try:
            admin.get("x")
        except redis.RedisError as error:
            return word.lower() in f"{type(error).__name__} {error}".lower()
    return False


def _killed_script(admin: redis.Redis) -> bool:
    try:
        admin.script_kill()
    except redis.RedisError as error:
        return "NOTBUSY" in str(error) or "No scripts" in str(error)
    return False


@contextmanager
def loading(site: Site) -> Iterator[None]:
    """Say that the data is still being read from disk: LOADING."""
    site.proxy.mangle = lambda _data: b"-LOADING Valkey is loading the dataset in memory\r\n"
    try:
        yield
    finally:
        site.proxy.heal()


@contextmanager
def cut(site: Site) -> Iterator[None]:
    """Every reply ends in its middle, and so does the connection."""
    site.proxy.cut = 2
    try:
        yield
    finally:
        site.proxy.heal()


@contextmanager
def black_hole(site: Site) -> Iterator[None]:
    """Nothing is ever answered; connections are taken and stay open."""
    site.proxy.hole = True
    try:
        yield
    finally:
        site.proxy.sever()  # what was swallowed is never answered: such connections end
        site.proxy.heal()


@contextmanager
def refused(site: Site) -> Iterator[None]:
    """Nobody listens."""
    site.proxy.refuse()
    try:
        yield
    finally:
        site.proxy.heal()


@contextmanager
def slow(site: Site) -> Iterator[None]:
    """Every answer takes 80 ms."""
    site.proxy.delay = 0.08
    try:
        yield
    finally:
        site.proxy.heal()


NONSENSE = (
    b":7\r\n",
    b"$3\r\nabc\r\n",
    b"$-1\r\n",
    b"$-7\r\n",
    b":abc\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n*1\r\n*1\r\n:1\r\n",
    b"*" + b"1\r\n*" * 5000 + b"0\r\n",
    b"*3\r\n-ERR x\r\n$-1\r\n:99999999999999999999999999\r\n",
    b"+OK\r\n",
    b"!nonsense\r\n",
    b"-NOSCRIPT no such thing\r\n",
    b"-MOVED nonsense\r\n",
    b"-ERR \xff\xfe\r\n",
    b"x" * 70000,
    b"*2\r\n$1\r\nx\r\n$" + b"9" * 20 + b"\r\n",
)
"""Replies that no script of ours gives."""


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector off: a nested reply uses up the stack.

    Finalizers that a collection ran there would fail, with errors that pytest reports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nonsense(site: Site) -> Iterator[None]:
    """Every reply to a script is something else, each time another."""
    turn = iter(range(10**9))
    site.proxy.mangle = lambda _data: NONSENSE[next(turn) % len(NONSENSE)]
    try:
        with no_collection():
            yield
    finally:
        site.proxy.sever()
        site.proxy.heal()


FAULTS = {
    fault.__name__: fault
    for fault in (
        killed,
        stopped,
        read_only,
        full,
        without_replicas,
        busy,
        loading,
        cut,
        black_hole,
        refused,
        slow,
        nonsense,
    )
}
