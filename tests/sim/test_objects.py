"""Edges, queues and pipelines in a world: the objects of production, on virtual time."""

from __future__ import annotations

from typing import Any

from seawall import Bulkhead, Guard, Retry
from seawall.jobs import LocalQueue, Worker
from seawall.pipeline import Pipeline
from seawall.sim import Latency, World, asgi
from seawall.sim.services import pause
from seawall.web import Edge


def test_an_edge_refuses_what_its_app_cannot_do():
    """Ten times the load: without the edge nobody is served in time, with it the app stays busy."""

    def share(*, has_edge: bool) -> float:
        with World(seed=1) as world:
            database = world.service("database", workers=10, latency=Latency.exponential(0.1))

            async def app(_scope: Any, _receive: Any, send: Any) -> None:
                await database.acall()
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"hello"})

            edge = Edge(app, concurrency=Bulkhead(10, max_wait=0.2, max_waiting=1000))
            api = world.service("api", handler=asgi(edge if has_edge else app))
            users = world.clients("users", api.acall, rate=50, patience=1.0)
            world.at(10, users.surge(10), lasts=20)
            return world.run(seconds=40).goodput(15, 30)

    assert share(has_edge=False) < 20
    assert share(has_edge=True) > 80


def test_a_queue_and_its_worker_survive_an_outage():
    """Jobs wait while the vendor is down, and all are done afterwards."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=0.01)
        queue = LocalQueue("mails", max_size=10_000)
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=50, backoff=1.0, budget=None))
        done = []

        async def send(job: Any) -> None:
            await vendor.acall()
            done.append(job.payload)

        async def work() -> None:
            worker = Worker(queue, send, guard=guard, concurrency=20)
            await worker.run()

        async def put() -> None:
            await queue.apush("mail")

        world.background(work)
        world.clients("users", put, rate=20)
        world.at(10, vendor.down(), lasts=10)
        result = world.run(seconds=60)
    assert result.share() == 1.0
    assert len(done) == result.came()


def test_a_pipeline_goes_on_after_a_partition():
    """Every item is stored once, though the way to the store was cut for five seconds."""
    stored = []
    with World(seed=1) as world:
        network = world.network(delay=0.001)
        database = world.service("database", latency=0.01, network=network)
        retry = Retry(on=ConnectionError, attempts=20, backoff=0.5, budget=None)
        guard = Guard("database", retry)

        async def source() -> Any:
            for number in range(200):
                await pause(0.1)
                yield number

        async def store(number: int) -> None:
            await database.acall(number)
            stored.append(number)

        async def run() -> None:
            pipeline = Pipeline("numbers")
            pipeline.read(source()).sink(store, guard=guard)
            await pipeline.run()

        world.background(run)
        world.at(5, network.partition(refuses=True), lasts=5)
        world.run(seconds=60)
    assert sorted(stored) == list(range(200))
