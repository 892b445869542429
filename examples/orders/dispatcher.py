"""Delivers the events of the order service to the warehouse, as signed webhooks.

    python dispatcher.py

The events of an order are delivered in order, at least once. Several dispatchers share the work;
another one takes over the events of a killed one when its lease expires.
"""

from __future__ import annotations

import asyncio
import os
import signal

import httpx
from storage import OrderStorage

from seawall.durable import Dispatcher, Webhook

storage = OrderStorage()


async def main() -> None:
    """Deliver until SIGTERM."""
    await storage.prepare()
    async with httpx.AsyncClient() as client:
        warehouse = Webhook(
            f"{os.environ['WAREHOUSE_URL']}/events",
            client=client,
            secret=os.environ["WEBHOOK_SECRET"],
        )
        dispatcher = Dispatcher(
            storage.outbox, warehouse, lease=storage.lease, listen=storage.listen
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, dispatcher.stop)
        await dispatcher.run()
        warehouse.close()
    await storage.close()


if __name__ == "__main__":
    asyncio.run(main())
