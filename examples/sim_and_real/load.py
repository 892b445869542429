"""Requests that come whatever happens, from a process of their own: `python load.py PLAN`.

PLAN is JSON: `url`, `began` (monotonic), `seconds`, `rate`, `surge` (from, to, factor), `numbered`.
Prints one line of JSON for each request: when it came, how it ended, and what it took since then.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx

from seawall.clock import SYSTEM

REFUSED = (429, 503)


async def main(plan: dict[str, Any]) -> None:
    """Send all requests, and print what became of them."""
    if SYSTEM.now() > plan["began"]:
        raise SystemExit("too late: this machine is too busy")
    ended: list[dict[str, Any]] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with (
        httpx.AsyncClient(base_url=plan["url"], timeout=30.0, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):

        async def ask(came: float, key: int) -> None:
            try:
                status = (await client.get("/", headers={"key": str(key)})).status_code
            except httpx.TransportError:
                status = 0
            outcome = "ok" if status == httpx.codes.OK else "refused"
            outcome = outcome if status in (httpx.codes.OK, *REFUSED) else "failed"
            seconds = SYSTEM.now() - plan["began"] - came
            ended.append({"came": came, "outcome": outcome, "seconds": seconds})

        came, key = 0.0, 0
        since, until, factor = plan["surge"]
        while came < plan["seconds"]:
            came += 1 / (plan["rate"] * (factor if since <= came < until else 1.0))
            await asyncio.sleep(max(0.0, plan["began"] + came - SYSTEM.now()))  # noqa: TID251
            group.create_task(ask(came, key if plan["numbered"] else -1))
            key += 1
    for one in ended:
        print(json.dumps(one))  # noqa: T201 - its result


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
