"""A protected pod of the service: the same work as in `plain_pod`, guarded by Seawall.

At the edge, each user has a rate limit by tier, and under pressure paying users are served first.
Calls to the vendor time out quickly, are retried within a budget, are stopped by a breaker for all
pods at once when the vendor is down, and then fall back to the last known price.
"""

from __future__ import annotations

import asyncio
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from seawall_demo._lifeline import Lifeline
from seawall_demo._settings import EVERY, HOST, ITEMS, PROTECTED, pause

if TYPE_CHECKING:
    from fastapi import FastAPI

    from seawall import Guard, RedisStore
    from seawall.members import Cluster

ASGI = Callable[[Any, Any, Any], Awaitable[None]]

MOUNTED: Final = "/seawall"
"""Path of the dashboard of a pod."""


class Prices:
    """The last known prices, as a fallback."""

    def __init__(self, most: int = 4 * ITEMS) -> None:
        """Start empty, and keep at most `most` prices."""
        self._known: OrderedDict[int, Any] = OrderedDict()
        self._most = most

    def keep(self, item: int, price: Any) -> None:
        """Remember the price of an item."""
        self._known[item] = price
        self._known.move_to_end(item)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def last_known(self, item: int) -> Any:
        """Return the price, or raise: then the next fallback answers."""
        return self._known[item]


def vendor_guard(prices: Prices, store: RedisStore | None, name: str = "vendor") -> Guard:
    """Return the guard around the vendor; with a store, breaker and rate limit are shared."""
    from seawall import (
        Breaker,
        Bulkhead,
        Fallback,
        Guard,
        RateLimit,
        Retry,
        RetryBudget,
        Timeout,
        static,
        transient,
    )
    from seawall.policies.breaker import growing, slow_start

    sharing: dict[str, Any] = {} if store is None else {"shared": store, "name": name}
    return Guard(
        name,
        Fallback(prices.last_known, static({"price": None})),
        Retry(on=transient, attempts=2, backoff=0.05, budget=RetryBudget()),
        Breaker(consecutive=6, break_for=growing(0.25, cap=0.5), probes=slow_start(), **sharing),
        RateLimit("120/s", burst=40, **sharing),  # what the vendor allows all pods together
        # 15 calls per second of 40 ms need one slot. With many more, a slow vendor would have a
        # queue of calls whose callers have given up, and would still work on them after it has
        # recovered.
        Bulkhead(6, max_wait=0.1),
        Timeout(0.6),
    )


def service(vendor_url: str, store: RedisStore | None) -> FastAPI:
    """Return the protected app; with a store, the vendor's protection is shared by all pods."""
    import httpx
    from fastapi import FastAPI

    from seawall import AdaptiveLimit, Cache, Criticality, Guard, Hedge, Shed, Timeout
    from seawall.context import current_criticality
    from seawall.jobs import Claim, LocalQueue, Worker
    from seawall.limits import vegas
    from seawall.load.signals import occupancy
    from seawall.shedding import by_criticality
    from seawall.web import RequestLimit, RequestLimits, Trust, api_key
    from seawall.web.fastapi import protect

    prices = Prices()
    vendor = vendor_guard(prices, store)
    search = Guard("search", Cache(3.0, stale_if_error=600.0), Hedge(0.05), Timeout(1.0))
    receipts = LocalQueue("receipts", result_ttl=10.0, max_size=10_000)
    client = httpx.AsyncClient(base_url=vendor_url, headers={"x-account": PROTECTED})

    async def sent(_claim: Claim) -> str:
        await pause(0.05)  # simulates sending a mail
        return "sent"

    worker = Worker(receipts, sent, concurrency=4)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        working = asyncio.create_task(worker.run())
        async with client:
            yield
        worker.stop(grace=0.2)
        await working
        if store is not None:
            await store.aclose()

    app = FastAPI(lifespan=lifespan, openapi_url=None)
    places = AdaptiveLimit(
        vegas(initial=16, minimum=16), max_wait=0.5, max_waiting=32, order="criticality"
    )
    users = RequestLimit("6/s", burst=12, by=api_key(), tiers={"premium": "60/s"}, name="user")
    shared_limits: dict[str, Any] = {} if store is None else {"shared": store}
    protect(
        app,
        timeout=2.0,
        trust=Trust(callers=[HOST]),  # the gateway in front reports who pays
        shed=Shed(by_criticality(), load=occupancy(places)),
        limits=RequestLimits(users, tier=tier_of, name="users", **shared_limits),
        concurrency=places,
        # It depends on how busy the loop is, which here is how busy the machine of all pods is.
        loop_admission=None,
    )

    async def asked(path: str, item: int) -> Any:
        answer = await client.get(path, params={"item": item})
        answer.raise_for_status()
        return answer.json()

    async def found_for(item: int) -> Any:
        return await asked("/search", item)

    async def price_of(item: int) -> Any:
        price = await asked("/price", item)
        prices.keep(item, price)
        return price

    @app.get("/quote")
    async def quote(item: int) -> dict[str, Any]:
        found = await search.acall(found_for, item)
        priced = await vendor.aattempt(price_of, item)
        if current_criticality() >= Criticality.CRITICAL:
            receipts.push({"item": item})
        return {"item": item, **found, **priced.unwrap(), "degraded": priced.degraded}

    return app


def tier_of(incoming: Any) -> str | None:
    """Return the tier of a user; the gateway has looked the key up."""
    for name, value in incoming.scope["headers"]:
        if name == b"x-api-key":
            return "premium" if value.startswith(b"premium-") else None
    return None


def beside(app: ASGI, dashboard: ASGI) -> ASGI:
    """Serve the dashboard beside the app, not behind its edge: it is needed when that refuses."""

    async def both(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path + "/").startswith(MOUNTED + "/"):
            root = scope.get("root_path", "") + MOUNTED
            await dashboard({**scope, "root_path": root}, receive, send)
        else:
            await app(scope, receive, send)

    return both


def membership(bind: str, pods: Sequence[str]) -> Cluster:
    """Return the membership of the pod at `bind` in the group of all `pods`.

    A pod is suspected after one to two seconds of silence, and confirmed six seconds later: a pod
    that is paused for five seconds has time to refute the suspicion.
    """
    from seawall.members import Cluster, local

    patient = replace(local(), timeout=0.5, suspicion_multiplier=6, pause=3.0)
    name = f"pod-{pods.index(bind) + 1}"
    return Cluster("pods", member=name, bind=bind, seeds=pods, preset=patient)


async def _main(lifeline: Lifeline, vendor_url: str, redis_url: str, bind: str, *pods: str) -> None:
    from seawall.dashboard import Dashboard
    from seawall_demo._serving import serve

    store = None
    if redis_url:
        from seawall import RedisStore

        # Generous: a machine that runs all of this is busy at times.
        store = RedisStore(redis_url, prefix="demo", timeout=0.25)
    app = service(vendor_url, store)
    async with membership(bind, pods) as cluster:
        dashboard = Dashboard(
            local=True, operate=lambda _visit: "demo", shared=store, pod=cluster.member, every=EVERY
        )
        await serve(beside(app, dashboard), lifeline, lifespan="on")


if __name__ == "__main__":
    asyncio.run(_main(Lifeline(), *sys.argv[1:]))
