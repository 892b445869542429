"""One of everything that can be registered, with something to tell of."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Criticality,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    RedisStore,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Timeout,
    criticality,
    registry,
    static,
)
from seawall.clients.llm import Model, Models, Price, http_client
from seawall.clients.upstreams import Upstreams
from seawall.durable import (
    Database,
    DeferredCalls,
    DeferredCallWorker,
    Dispatcher,
    FifoReceiver,
    Idempotency,
    IdempotentRequests,
    Inbox,
    Jobs,
    JobWorker,
    Outbox,
    Sqlite,
    amigrate,
)
from seawall.jobs import LocalQueue, Worker
from seawall.leases import Lease
from seawall.load import LoopWatchdog, ServiceLevels
from seawall.members import MemberState, MemberView
from seawall.members.group import Group
from seawall.pipeline import Collect, Pipeline
from seawall.redis import PriorityQueue
from seawall.resources import Channel, IoPool, Pool, Serializer
from seawall.shedding import by_criticality
from seawall.telemetry import arefresh
from seawall.web import Edge, Health, Lifecycle, RequestLimit, RequestLimits


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Answer nothing."""


async def _work(*_given: Any) -> None:
    """Do nothing."""


def _streamed(_request: Any) -> Any:
    """Answer as a vendor of language models does."""
    usage = b'data: {"model": "w-model", "usage": {"prompt_tokens": 7, "completion_tokens": 5}}'
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, content=usage + b"\n\n"
    )


class Members:
    """A group of members as `Heartbeats` and `Cluster` show theirs, with what a test puts in."""

    def __init__(self, name: str, *views: MemberView) -> None:
        self.group = Group(name)
        self.views = list(views)
        self.health_score: int | None = 0
        self.messages = {"sent": 0, "received": 0, "refused": 0}
        self.bytes = {"sent": 0, "received": 0}
        registry.enter(self, "members", name)

    def change(self, member: str, before: str, after: str, silence: float | None = None) -> None:
        """Publish a change of one member."""
        self.group.publish(
            member=member,
            before=MemberState(before),
            after=MemberState(after),
            reason="no answer",
            level=1.0,
            duration=2.0,
            silence=silence,
        )

    def snapshot(self) -> dict[str, Any]:
        """Return what the registry shows."""
        return {
            "kind": "cluster",
            "own": "pod-0",
            **self.group.snapshot(self.views, 10.0),
            "health_score": self.health_score,
            "messages": self.messages,
            "bytes": self.bytes,
        }


class World:
    """Everything, alive until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = Sqlite(folder / "world.db")
        self.database = Database(self.source, name="w-database")
        self.store = RedisStore("redis://127.0.0.1:1", name="w-store")
        self.breaker = Breaker(consecutive=2, counts="attempts")
        self.guard = Guard(
            "w-vendor",
            Fallback(static("less")),
            Cache(60.0, key=lambda: "one"),
            Retry(on=OSError, attempts=2, backoff=0, budget=RetryBudget()),
            self.breaker,
            RateLimit("1000/s"),
            Bulkhead(5),
            Timeout(1.0, sync="cooperative"),
        )
        self.shed = Guard("w-shed", Shed(by_criticality(0.1), load=lambda: 0.99))
        self.keyed = Guard("w-keyed", Breaker(consecutive=1, key=lambda key: key))
        shared = Breaker(shared=self.store, name="w-shared")
        self.others = [
            Guard("w-adaptive", AdaptiveLimit()),
            Guard("w-threads", ThreadBulkhead(2)),
            Guard("w-hedge", Hedge(0.5)),
            Guard("w-with-store", shared),
        ]
        self.kept: list[Any] = [
            Pool(lambda: object(), name="w-pool", max_size=2),  # noqa: PLW0108 - a new one each time
            Channel(3, name="w-channel"),
            Serializer(name="w-serializer"),
            ServiceLevels("w-levels", load=lambda: 0.0),
            LoopWatchdog(name="w-watchdog"),
            Lease(self.store, "w-lease"),
            PriorityQueue(self.store, "w-shared-queue"),
            Upstreams("w-upstreams", ["http://127.0.0.1:1"]),
            RequestLimits(RequestLimit("5/s", by="address", name="w-limit"), name="w-limits"),
            Health(name="w-service"),
            Lifecycle(name="w-service", signals=False),
            FifoReceiver(self.database, "w-fifo"),
            Inbox(self.database),
        ]
        self.llm = http_client(
            Guard("w-llm", Bulkhead(5)),
            httpx2.MockTransport(_streamed),
            prices={"w-model": Price(input=1.0, output=2.0)},
        )
        self.models = Models(Model("w-model", lambda: "answer"), name="w-models")
        self.executor = IoPool("w-executor", workers=2)
        self.queue = LocalQueue("w-queue")
        self.worker = Worker(self.queue, _work)
        self.outbox = Outbox(self.database, "w-outbox")
        self.jobs = Jobs(self.database, name="w-jobs")
        self.later = DeferredCalls(self.database, "w-later")
        self.idempotency = Idempotency(self.database, name="w-idempotency")
        self.requests = IdempotentRequests(
            _app, self.idempotency, routes=["/orders"], scope=lambda _incoming: "all"
        )
        self.members = Members("w-pods", MemberView("pod-1", MemberState.ALIVE, 1.0, level=0.5))
        self.collect = Collect({"S1": _read, "S2": _no_read}, minimum=1, within=1.0, name="w-sites")
        self.pipeline = Pipeline("w-pipeline")
        (
            self.pipeline.read([1, 2, 3])
            .stage(_odd, workers=1, name="odd")
            .sink(lambda _number: None, name="keep")
        )
        self.edge = Edge(_app, name="w-edge")
        self.workers = [
            Dispatcher(self.outbox, _work),
            JobWorker(self.jobs, {"report": _work}),
            DeferredCallWorker(self.later, _work),
        ]

    async def live(self) -> None:
        """Let something happen in each, and ask the database."""
        await amigrate(self.database)
        for _ in range(3):
            self.guard.attempt(_refused)
        self.breaker.close()
        self.guard.call(lambda: "answer")
        with criticality(Criticality.SHEDDABLE):
            self.shed.attempt(_refused)
        self.keyed.attempt(_fail, "a")
        with self.kept[0].borrow():
            pass
        self.llm.post("http://vendor/v1/chat/completions", json={"model": "w-model"})
        self.models.call()
        self.queue.push("job")
        with self.database.transaction() as connection:
            self.outbox.add(connection, "order", "7", "order.made", {})
        self.jobs.submit(None, "report", scope="all")
        for before, after in (("alive", "suspected"), ("suspected", "alive")):
            self.members.change("pod-1", before, after)
        self.members.change("pod-2", "suspected", "confirmed", silence=4.0)
        self.members.group.round_trips.add(0.01)
        self.members.group.note_own_pause(6.0)
        await self.collect.collect()
        await self.pipeline.run()
        await arefresh(self.outbox, self.jobs, self.later)

    def close(self) -> None:
        """Let nothing go on."""
        self.executor.close(0.0)
        self.llm.close()
        self.kept[0].close()
        self.edge.close()
        self.store.close()
        self.source.close()


async def _read() -> float:
    return 20.5


async def _no_read() -> float:
    raise ConnectionRefusedError


def _odd(number: int) -> int:
    if number == 2:
        raise ValueError
    return number


def _fail(_key: str) -> str:
    raise ConnectionRefusedError


def _refused() -> str:
    raise ConnectionRefusedError


def lived(folder: Path) -> World:
    """Return a world in which everything has happened once."""
    world = World(folder)
    asyncio.run(world.live())
    return world
