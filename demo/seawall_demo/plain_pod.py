"""The service as it is often written: a client with its own timeout, and three retries.

Does the same work as `pod`, without protection.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from seawall_demo._lifeline import Lifeline
from seawall_demo._settings import UNPROTECTED

MOST: Final = 150
"""Maximum number of connections.

Without it, the client would search ever longer lists of waiting requests, keep a core busy, and
hardly ever recover: more than the demo should show.
"""

if TYPE_CHECKING:
    from fastapi import FastAPI


def service(vendor_url: str) -> FastAPI:
    """Return the app, which calls the vendor at that URL."""
    import httpx
    from fastapi import FastAPI, HTTPException

    client = httpx.AsyncClient(base_url=vendor_url, headers={"x-account": UNPROTECTED})

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with client:
            yield

    app = FastAPI(lifespan=lifespan, openapi_url=None)

    async def asked(path: str, item: int) -> Any:
        for _ in range(4):
            try:
                answer = await client.get(path, params={"item": item})
                answer.raise_for_status()
            except httpx.HTTPError:
                continue
            return answer.json()
        raise HTTPException(502, "the vendor does not answer")

    @app.get("/quote")
    async def quote(item: int) -> dict[str, Any]:
        found = await asked("/search", item)
        price = await asked("/price", item)
        return {"item": item, **found, **price, "degraded": False}

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        return {"status": "pass"}

    return app


async def _main(lifeline: Lifeline, vendor_url: str) -> None:
    from seawall_demo._serving import serve

    await serve(service(vendor_url), lifeline, lifespan="on", most=MOST)


if __name__ == "__main__":
    asyncio.run(_main(Lifeline(), sys.argv[1]))
