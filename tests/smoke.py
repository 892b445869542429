"""Run one guarded call of each kind, to show that an installed package works.

It needs nothing but the package: `python tests/smoke.py`.
"""

from __future__ import annotations

import asyncio

from seawall import Breaker, Bulkhead, Guard, Retry, Timeout

guard = Guard(
    "smoke",
    Retry(attempts=2, on=ValueError),
    Breaker(),
    Bulkhead(2),
    Timeout(1.0, sync="cooperative"),
)


@guard
def double(number: int) -> int:
    """Return twice the number."""
    return 2 * number


@guard
async def triple(number: int) -> int:
    """Return three times the number."""
    return 3 * number


def main() -> None:
    """Call both, and say so if they answered."""
    answers = double(21), asyncio.run(triple(14))
    if answers != (42, 42):
        raise SystemExit(f"wrong answers: {answers}")
    print("ok")


if __name__ == "__main__":
    main()
