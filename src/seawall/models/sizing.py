"""Little's law: how many calls are in flight, and what follows for pools and timeouts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Final

from seawall import _checks as check

CONNECTION_SETTINGS: Final = (
    "SELECT name, setting FROM pg_settings WHERE name IN"
    " ('max_connections', 'superuser_reserved_connections', 'reserved_connections')"
)
"""A query for PostgreSQL: what `pool_advice` must know about the server."""


def in_flight(throughput: float, service_time: float) -> float:
    """Return the number of calls in flight at `throughput` per second of `service_time` each."""
    rate = check.at_least("throughput", throughput, 0)
    busy = check.seconds("service_time", service_time, zero=True)
    return check.at_least("throughput * service_time", rate * busy, 0)


def pool_size(throughput: float, service_time: float, headroom: float = 1.5) -> int:
    """Return the size of a pool for that traffic, with headroom, at least one."""
    wanted = in_flight(throughput, service_time) * check.at_least("headroom", headroom, 1)
    # Do not round up because of a rounding error just above a whole number.
    return max(1, ceil(check.at_least("pool size", wanted, 0) * (1 - 1e-12)))


def timeout_for(p99: float, factor: float = 2.5, caller_budget: float | None = None) -> float:
    """Return a timeout for a dependency with that p99, never above the caller's budget."""
    timeout = check.seconds("p99", p99) * check.at_least("factor", factor, 1)
    if caller_budget is None:
        return check.seconds("p99 * factor", timeout)
    return min(timeout, check.seconds("caller_budget", caller_budget))


def pool_advice(settings: Mapping[str, str | int], *, pods: int, size: int) -> str | None:
    """Return what to change if the pools of all pods exceed the server; None if they fit.

    `settings` are the rows of `CONNECTION_SETTINGS` as a dictionary; `size` is the most that one
    pod opens (SQLAlchemy: pool_size + max_overflow).
    """
    pods, size = check.count("pods", pods), check.count("size", size)
    if not isinstance(settings, Mapping) or "max_connections" not in settings:
        raise TypeError(f"settings={settings!r}: write dict(rows of CONNECTION_SETTINGS)")
    known = {name: int(value) for name, value in settings.items()}
    most = known.pop("max_connections")
    usable = most - sum(known.values())
    total = pods * size
    if total <= usable:
        return None
    each = usable // pods
    smaller = f"let each pod open at most {each}, " if each else ""
    return (
        f"{pods} pods with {size} each open up to {total} connections, and the server accepts"
        f" {usable}: {smaller}set max_connections = {total + most - usable}, or put a pooler such"
        " as PgBouncer in front of the server"
    )
