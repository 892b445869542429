"""A vendor is down for five minutes: what its callers see, and how many calls it gets.

Ten calls a second, in virtual time, so that twenty minutes take a moment. Run it:

    python examples/outage.py
"""

# ruff: noqa: T201 - it prints what it finds

from __future__ import annotations

import asyncio
from random import Random

from seawall import Guard, static, subscribe
from seawall.events import BreakerChanged
from seawall.testing import run_virtual

CALLS = 12_000
GAP = 0.1
DOWN = range(300, 600)


class Vendor:
    """Answers in 50 ms, except for five minutes in which it refuses all connections."""

    def __init__(self) -> None:
        self.calls_while_down = 0

    async def complete(self, prompt: str) -> str:
        """Answer, or refuse."""
        now = asyncio.get_running_loop().time()
        if now // 1 in DOWN:
            self.calls_while_down += 1
            raise ConnectionError("connection refused")
        await asyncio.sleep(0.05)  # noqa: TID251 - the vendor's own time
        return prompt.upper()


async def main() -> None:
    """Call the vendor for twenty minutes, and print what happened."""
    vendor = Vendor()
    guard = Guard.standard(
        "vendor",
        on=ConnectionError,
        timeout=2.0,
        limit=50,
        fallback=static("try later"),
        rng=Random(1),  # noqa: S311 - the same pauses in each run
    )
    loop = asyncio.get_running_loop()

    def tell(event: BreakerChanged) -> None:
        if "half_open" not in (event.before, event.after):
            print(f"{loop.time():6.1f} s: {event.before} -> {event.after}")
        elif event.after == "closed":
            print(f"{loop.time():6.1f} s: closed again")

    unsubscribe = subscribe(tell, BreakerChanged)
    real = lesser = 0
    slowest = 0.0
    for _ in range(CALLS):
        result = await guard.aattempt(vendor.complete, "hello")
        real += not result.degraded
        lesser += result.degraded
        slowest = max(slowest, result.elapsed)
        await asyncio.sleep(GAP - result.elapsed % GAP)  # noqa: TID251 - the callers' own time
    unsubscribe()

    print(f"answers: {real} real, {lesser} 'try later', no errors")
    print(f"the vendor got {vendor.calls_while_down} calls while it was down")
    print(f"the slowest answer took {slowest:.2f} s")


if __name__ == "__main__":
    run_virtual(main())

# It prints:
#
# >  315.0 s: closed -> open
# >  601.4 s: closed again
# > answers: 8994 real, 3006 'try later', no errors
# > the vendor got 438 calls while it was down
# > the slowest answer took 0.18 s
