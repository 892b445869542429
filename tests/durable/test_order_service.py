"""The example of a whole service: its API, worker, dispatcher and receiver as real processes."""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import psycopg
import pytest

import seawall.durable
from seawall.clock import SYSTEM
from tests.durable.postgres import Postgres

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "durable" / "order-service.md"
PATIENCE = 40.0
ANN = {"Authorization": "Bearer ann-secret"}
BOB = {"Authorization": "Bearer bob-secret"}
SERVERS = ("service", "warehouse")


class Shop:
    """The processes of the example on one database each, and what is in their databases."""

    def __init__(self, databases: dict[str, str], folder: Path, stack: ExitStack) -> None:
        self._databases = databases
        self._folder = folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        # We hold the listening sockets: whoever connects waits in them while a server is away.
        self._sockets = {
            name: stack.enter_context(socket.create_server(("127.0.0.1", 0))) for name in SERVERS
        }
        self.service, self.warehouse = (
            f"http://127.0.0.1:{self._sockets[name].getsockname()[1]}" for name in SERVERS
        )

    def start(self, name: str, warehouse: str | None = None) -> None:
        """Start one of the programs."""
        assert name not in self._running
        command, fds = [f"{name}.py"], []
        if name in SERVERS:
            fds = [self._sockets[name].fileno()]
            served = ["--fd", str(fds[0]), "--log-level", "warning"]
            command = ["-m", "uvicorn", f"{name}:app", *served]
        settings = {
            "PYTHONPATH": str(ROOT / "src"),
            "DATABASE_URL": self._databases["warehouse" if name == "warehouse" else "orders"],
            "TOKENS": "ann-secret=acme,bob-secret=other",
            "WEBHOOK_SECRET": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "WAREHOUSE_URL": warehouse or self.warehouse,
            "LEASE": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # sixteen starts: compile what they import once
        }
        self._started += 1
        with (self._folder / f"{self._started} {name}.log").open("wb") as log:
            self._running[name] = subprocess.Popen(  # noqa: S603 - our own example
                [sys.executable, "-W", "error", *command],
                cwd=ROOT / "examples" / "orders",
                env=os.environ | settings,
                pass_fds=fds,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, name: str) -> None:
        """End a program as a crash does."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self, *names: str) -> list[int]:
        """Ask programs to end, and return how they did; kill what does not."""
        processes = [self._running.pop(name) for name in names]
        for process in processes:
            process.terminate()
        try:
            return [process.wait(PATIENCE) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def stop_all(self) -> list[int]:
        """Do so with all that run."""
        return self.stop(*self._running)

    def check(self) -> None:
        """Assert that all programs still run, so that no test waits for a dead one."""
        dead = [name for name, process in self._running.items() if process.poll() is not None]
        assert dead == [], self.said()

    def said(self) -> str:
        """Return what the programs have written so far."""
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"{log.name}: {log.read_text('utf-8')}" for log in logs)

    def count(self, table: str, where: str = "1 = 1") -> int:
        """Return how many rows of the order service's there are."""
        url = self._databases["orders"]
        asked = f"SELECT count(*) FROM {table} WHERE {where}"  # noqa: S608 - of this file
        if url.startswith("sqlite"):
            with closing(sqlite3.connect(url.partition("///")[2], timeout=PATIENCE)) as file:
                return int(file.execute(asked).fetchone()[0])
        with psycopg.connect(url.replace("+asyncpg", "")) as connection:
            (found,) = connection.execute(asked.encode()).fetchone() or (0,)
            return int(found)


@contextmanager
def opened_shop(kind: str, postgres: Postgres, folder: Path, *programs: str) -> Iterator[Shop]:
    """Give the example with some of its programs at work, on databases of its own."""
    names = {name: f"{name}_{token_hex(4)}" for name in ("orders", "warehouse")}
    if kind == "postgres":
        with psycopg.connect(postgres.url, autocommit=True) as connection:
            for name in names.values():
                connection.execute(f"CREATE DATABASE {name}".encode())
        base = postgres.url.replace("://", "+asyncpg://").rpartition("/")[0]
        databases = {name: f"{base}/{own}" for name, own in names.items()}
    else:
        databases = {name: f"sqlite+aiosqlite:///{folder}/{own}.db" for name, own in names.items()}
    with ExitStack() as stack:
        shop = Shop(databases, folder, stack)
        stack.callback(shop.stop_all)
        for name in programs:
            shop.start(name)
        await_ready(shop)
        yield shop


@pytest.fixture(scope="module", params=["postgres", "sqlite"])
def shop(
    request: pytest.FixtureRequest, postgres: Postgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    """Return the whole example at work; in the end all of it has ended well."""
    folder = tmp_path_factory.mktemp("orders")
    programs = ("service", "warehouse", "worker", "dispatcher")
    with opened_shop(request.param, postgres, folder, *programs) as shop:
        yield shop
        ended = shop.stop_all()
        # A server tells its signal by dying of it, after it has shut down.
        assert set(ended) <= {0, -15}, shop.said()
        # On a busy machine a dispatcher may hang up while the warehouse reads what it sends.
        assert shop.said().count("Traceback") == shop.said().count("raise ClientDisconnect()")
        assert "Warning" not in shop.said()


def await_ready(shop: Shop) -> None:
    """Wait until both servers answer; a request waits in the socket until they do."""
    until = SYSTEM.now() + PATIENCE
    for url in (getattr(shop, name) for name in SERVERS if name in shop._running):
        while True:
            shop.check()
            try:
                httpx.get(f"{url}/health/ready", timeout=2.0).raise_for_status()
                break
            except httpx.TimeoutException:
                assert SYSTEM.now() < until, shop.said()


class Client:
    """A client of the order service that keeps its key, and asks again."""

    def __init__(self, shop: Shop, http: httpx.AsyncClient) -> None:
        self.shop = shop
        self.http = http

    async def order(self, key: str | None, quantity: int = 1, who: Any = ANN) -> httpx.Response:
        """Send an order once."""
        headers = who if key is None else {**who, "Idempotency-Key": f'"{key}"'}
        order = {"item": "hat", "quantity": quantity}
        return await self.http.post(f"{self.shop.service}/orders", json=order, headers=headers)

    async def placed(self, key: str, quantity: int = 1) -> httpx.Response:
        """Send an order until it is taken, whatever happens in between."""
        until = SYSTEM.now() + PATIENCE
        while True:
            self.shop.check()
            try:
                answer = await self.order(key, quantity)
            except httpx.TransportError:  # the service died: nobody knows what it did
                assert SYSTEM.now() < until
                continue
            if answer.status_code == 201:
                return answer
            assert answer.status_code in {409, 503}, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert SYSTEM.now() < until, self.shop.said()
            await pause()

    async def invoice(self, order: httpx.Response, key: str, **more: str) -> httpx.Response:
        """Have an invoice made."""
        url = self.shop.service + order.headers["location"] + "/invoice"
        headers = {**ANN, "Idempotency-Key": key, **more}
        return await self.http.post(url, headers=headers)

    async def status(self, place: str, who: Any = ANN) -> httpx.Response:
        """Ask how a job is getting on."""
        return await self.http.get(self.shop.service + place, headers=who)

    async def until(self, place: str, fits: Callable[[Any], bool]) -> Any:
        """Ask so until the answer fits, and return it."""
        return await eventually(self.shop, self._asking(place), fits)

    def _asking(self, place: str) -> Callable[[], Any]:
        async def asked() -> Any:
            return (await self.status(place)).json()

        return asked

    async def parcels(self, order: httpx.Response, least: int = 1) -> list[str]:
        """Return the warehouse's parcels of an order, once there are that many."""

        async def asked() -> list[str]:
            told = (await self.http.get(f"{self.shop.warehouse}/parcels")).json()["parcels"]
            return [one["content"] for one in told if one["order_id"] == order.json()["id"]]

        return await eventually(self.shop, asked, lambda found: len(found) >= least)


async def pause() -> None:
    await asyncio.sleep(0.05)  # noqa: TID251 - other processes take real time


async def eventually(shop: Shop, ask: Callable[[], Any], fits: Callable[[Any], bool]) -> Any:
    """Ask until the answer fits, and return it."""
    until = SYSTEM.now() + PATIENCE
    while not fits(found := await ask()):
        shop.check()
        assert SYSTEM.now() < until, f"{found}\n{shop.said()}"
        await pause()
    return found


def with_client(shop: Shop, main: Callable[[Client], Any]) -> None:
    """Run a test's body in an event loop."""

    async def run() -> None:
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(timeout=PATIENCE, limits=limits) as http:
            await main(Client(shop, http))

    asyncio.run(run())


# --- Orders ---


def test_a_repeated_order_is_one_order(shop: Shop):
    """A repeat gets the same bytes and leaves one row; its order can be read at once."""

    async def main(client: Client) -> None:
        key, before = token_hex(8), shop.count("orders")
        first, again = await client.order(key, 2), await client.order(key, 2)
        assert (first.status_code, again.status_code) == (201, 201)
        assert first.content == again.content
        assert first.headers["location"] == again.headers["location"]
        assert "idempotent-replayed" not in first.headers
        assert again.headers["idempotent-replayed"] == "true"
        assert shop.count("orders") == before + 1
        place = shop.service + first.headers["location"]
        assert (await client.http.get(place, headers=ANN)).json() == first.json()
        assert (await client.http.get(place, headers=BOB)).status_code == 404
        assert await client.parcels(first) == ["2 x hat"]

        other = await client.order(key, 2, BOB)  # the same key of somebody else is another one
        assert other.status_code == 201
        assert other.json()["id"] != first.json()["id"]

    with_client(shop, main)


def test_what_is_wrong_is_told(shop: Shop):
    """No key is 400, another payload 422, a stranger 403: all as problem+json, and no row."""

    async def main(client: Client) -> None:
        key = token_hex(8)
        order = await client.placed(key)
        before = shop.count("orders")
        told = {
            "no key": (await client.order(None), 400, "key_missing"),
            "a reused key": (await client.order(key, 2), 422, "key_reused"),
            "no number": (await client.order(token_hex(8), 0), 422, None),
            "a stranger": (await client.order(token_hex(8), who={}), 403, "scope_unknown"),
            "no order": (await client.http.get(f"{shop.service}/orders/0", headers=ANN), 404, None),
            "nobody": (await client.http.get(f"{shop.service}/orders/1"), 403, None),
            "no key of a job": (
                await client.http.post(
                    shop.service + order.headers["location"] + "/invoice", headers=ANN
                ),
                400,
                "key_missing",
            ),
        }
        for what, (answer, status, reason) in told.items():
            assert answer.status_code == status, what
            assert answer.headers["content-type"] == "application/problem+json", what
            assert answer.json().get("reason") == reason, what
        assert shop.count("orders") == before

        unsigned = await client.http.post(f"{shop.warehouse}/events", json=order.json())
        assert (unsigned.status_code, unsigned.json()["reason"]) == (403, "bad_signature")

    with_client(shop, main)


def test_64_clients_with_one_key_make_one_order(shop: Shop):
    """However many send it at once, there is one row, and all get the same bytes in the end."""

    async def main(client: Client) -> None:
        key, before = token_hex(8), shop.count("orders")
        answers = await asyncio.gather(*(client.placed(key) for _ in range(64)))
        assert len({answer.content for answer in answers}) == 1
        assert shop.count("orders") == before + 1
        assert await client.parcels(answers[0]) == ["1 x hat"]

    with_client(shop, main)


def test_dropped_connections_make_no_key_useless(postgres: Postgres, tmp_path: Path):
    """A service that loses its database connections in mid-transaction places each order once.

    A failure that is replayed would stay for a day, though everything was rolled back.
    """

    async def placed(client: Client, key: str, failures: list[int]) -> None:
        until = SYSTEM.now() + PATIENCE
        while SYSTEM.now() < until:
            shop.check()
            with suppress(httpx.TransportError):  # after an error a server may close what it had
                answer = await client.order(key)
                if answer.status_code == 201:
                    return
                assert "idempotent-replayed" not in answer.headers, answer.text
                assert answer.status_code in {409, 500, 503}, answer.text
                failures.append(answer.status_code)
            await pause()
        pytest.fail(shop.said())

    async def dropping(database: str) -> None:
        async with await psycopg.AsyncConnection.connect(postgres.url, autocommit=True) as admin:
            while True:
                await admin.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = %s AND state LIKE 'idle in transaction%%' LIMIT 1",
                    [database],
                )
                await pause()

    async def main(client: Client) -> None:
        before, failures = shop.count("orders"), list[int]()
        async with asyncio.TaskGroup() as tasks:
            dropper = tasks.create_task(dropping(shop._databases["orders"].rpartition("/")[2]))
            rounds = 0
            while rounds < 5 or 500 not in failures:
                rounds += 1
                keys = [token_hex(8) for _ in range(8)]
                await asyncio.gather(*(placed(client, key, failures) for key in keys))
            dropper.cancel()
        assert shop.count("orders") == before + 8 * rounds

    with opened_shop("postgres", postgres, tmp_path, "service") as shop:
        with_client(shop, main)


def test_a_service_that_is_killed_has_placed_each_order_once(shop: Shop):
    """Clients that send again what was cut off find one order for each key, and one parcel."""

    async def main(client: Client) -> None:
        before = shop.count("orders")
        keys = [token_hex(8) for _ in range(24)]
        placing = [asyncio.create_task(client.placed(key)) for key in keys]
        await eventually(
            shop,
            lambda: asyncio.to_thread(shop.count, "orders"),
            lambda rows: rows > before + 2,
        )
        shop.kill("service")
        shop.start("service")
        placed = await asyncio.gather(*placing)
        assert shop.count("orders") == before + len(keys)
        assert len({answer.content for answer in placed}) == len(keys)
        again = await asyncio.gather(*(client.placed(key) for key in keys))
        assert [answer.content for answer in again] == [answer.content for answer in placed]
        for answer in placed:
            assert await client.parcels(answer) == ["1 x hat"]

    with_client(shop, main)


# --- Events ---


@asynccontextmanager
async def swallowing(url: str) -> AsyncIterator[str]:
    """Pass requests on to `url`, and no answer back; gives where."""
    tasks = set()

    async def pass_on(asked: asyncio.StreamReader, asking: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        host, port = url.removeprefix("http://").split(":")
        _, out = await asyncio.open_connection(host, int(port))
        with closing(asking), closing(out), suppress(asyncio.CancelledError, ConnectionError):
            while part := await asked.read(65_536):
                out.write(part)

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def test_an_event_that_is_delivered_twice_arrives_once(shop: Shop):
    """A dispatcher dies after the warehouse has committed: the next delivers again, in vain."""

    async def main(client: Client) -> None:
        async def duplicates() -> int:
            told = (await client.http.get(f"{shop.warehouse}/parcels")).json()
            return int(told["duplicates"])

        assert shop.stop("dispatcher") == [0]
        async with swallowing(shop.warehouse) as url:
            shop.start("dispatcher", warehouse=url)
            order = await client.placed(token_hex(8), 7)
            assert await client.parcels(order) == ["7 x hat"]  # which the dispatcher never learns
            shop.kill("dispatcher")
        before = await duplicates()
        shop.start("dispatcher")  # which waits for the lease of the other
        await eventually(shop, duplicates, lambda number: number > before)
        assert await client.parcels(order) == ["7 x hat"]

    with_client(shop, main)


# --- Jobs ---


def test_an_invoice_is_asked_for_until_it_is_made(shop: Shop):
    """202 says where and when to ask; a repeated key is the same job, or 422."""

    async def main(client: Client) -> None:
        order, key = await client.placed(token_hex(8), 2), token_hex(8)
        accepted = await client.invoice(order, key)
        assert accepted.status_code == 202
        place = accepted.headers["location"]
        assert accepted.json()["status_url"] == place
        assert (await client.status(place, BOB)).status_code == 404
        answer = accepted
        while "retry-after" in answer.headers:
            await asyncio.sleep(int(answer.headers["retry-after"]))  # noqa: TID251 - as it was told
            answer = await client.status(place)
        done = answer.json()
        assert (done["state"], done["progress"]) == ("succeeded", 1.0)
        assert done["result"]["cents"] == 500

        again = await client.invoice(order, key)
        assert (again.status_code, again.json()) == (200, done)
        assert shop.count("invoices", f"order_id = {order.json()['id']}") == 1
        other = await client.placed(token_hex(8), 2)
        assert (await client.invoice(other, key)).status_code == 422
        waited = await client.invoice(other, token_hex(8), prefer="wait=10")
        assert (waited.status_code, waited.json()["state"]) == (200, "succeeded")
        assert waited.headers["preference-applied"] == "wait=10"

    with_client(shop, main)


def test_an_invoice_that_is_cancelled_is_not_made(shop: Shop):
    """It is seen to get on, is cancelled at work, and is the cancelled one for the same key."""

    async def main(client: Client) -> None:
        order, key = await client.placed(token_hex(8), 1000), token_hex(8)
        place = (await client.invoice(order, key)).headers["location"]
        seen = await client.until(place, lambda job: (job["progress"] or 0) > 0)
        assert (seen["state"], seen["message"][-13:]) == ("running", "of 1000 items")
        asked = await client.http.delete(shop.service + place, headers=ANN)
        assert asked.status_code == 202
        await client.until(place, lambda job: job["state"] == "cancelled")
        again = await client.invoice(order, key)
        assert (again.status_code, again.json()["state"]) == (200, "cancelled")
        assert shop.count("invoices", f"order_id = {order.json()['id']}") == 0

    with_client(shop, main)


def test_an_invoice_whose_worker_is_killed_is_made_once(shop: Shop):
    """Another worker takes the job over when the lease is over, and there is one invoice."""

    async def main(client: Client) -> None:
        order = await client.placed(token_hex(8), 10)
        place = (await client.invoice(order, token_hex(8))).headers["location"]
        await client.until(place, lambda job: job["state"] == "running")
        shop.kill("worker")
        shop.start("worker")
        done = await client.until(place, lambda job: job["state"] == "succeeded")
        assert done["result"]["cents"] == 2500
        assert shop.count("invoices", f"order_id = {order.json()['id']}") == 1

    with_client(shop, main)


# --- The page ---


def test_the_page_has_the_defaults_of_the_code():
    """Each default that the page names, as in `Dispatcher(poll=1.0)`, is the code's."""
    named = re.findall(r"^\| `(\w+)\((\w+)=([^`]+)\)`", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len(named) >= 10
    for owner, argument, written in named:
        signature = inspect.signature(getattr(seawall.durable, owner))
        assert repr(signature.parameters[argument].default) == written, (owner, argument)
