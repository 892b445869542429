"""What the project does: orders, with an event and a job each, and what becomes of them."""

from __future__ import annotations

from typing import Any

from django.db import connection, transaction

from seawall.durable import Database, Dispatcher, DjangoAlias, Jobs, JobWorker, Outbox

database = Database(DjangoAlias("default"), name="shop")
outbox = Outbox(database)
jobs = Jobs(database)


def place(order: int, *, fail: bool = False) -> None:
    """Place an order in one transaction."""
    with transaction.atomic():
        outbox.add(connection, "order", order, "order.made", {"order": order})
        jobs.submit(connection, "invoice", {"order": order}, scope="shop")
        if fail:
            raise LookupError("no stock")


def say(words: str) -> None:
    """Tell the test."""
    print(words, flush=True)  # noqa: T201 - the test reads it


def invoice(job: Any) -> None:
    """Execute a job."""
    say(f"invoice {job.payload['order']}")


dispatcher = Dispatcher(outbox, lambda event: say(f"event {event.json()['order']}"))
worker = JobWorker(jobs, {"invoice": invoice})
