"""Makes the invoices: the worker of the order service.

    python worker.py

Several workers share the jobs. Another one takes over the jobs of a killed one when its lease
expires, so a job may run twice; its effect has a key, and happens once.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from sqlalchemy import insert
from storage import OrderStorage, invoices

from seawall.durable import JobHandle, JobWorker, NewEvent

storage = OrderStorage()
CENTS = 250


async def make_invoice(job: JobHandle) -> Any:
    """Write an invoice, item by item, and store it with an event for others."""
    order = job.payload
    for number in range(order["quantity"]):
        job.progress(number / order["quantity"], f"{number} of {order['quantity']} items")
        await asyncio.sleep(0.05)  # noqa: TID251 - stands for the work; a cancelled job ends here
    async with (
        storage.engine.begin() as connection,
        storage.idempotency.once(
            connection, scope=job.scope, operation="invoice", key=job.id, fingerprint=None
        ) as once,
    ):
        if once.first:
            values = {"order_id": order["id"], "cents": CENTS * order["quantity"]}
            row = await connection.execute(insert(invoices).values(values).returning(invoices.c.id))
            made = {"invoice": row.scalar_one(), **values}
            event = NewEvent("order", str(order["id"]), "order.invoiced", made)
            once.answer(made, outbox=storage.outbox, events=[event], notify=True)
    return once.value


async def main() -> None:
    """Work until SIGTERM; then finish running jobs for up to 10 seconds, or give them back."""
    await storage.prepare()
    worker = JobWorker(storage.jobs, {"invoice": make_invoice}, listen=storage.listen)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, worker.stop)
    await worker.run()
    await storage.close()


if __name__ == "__main__":
    asyncio.run(main())
