"""Signals from policies, pools and executors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from seawall import _checks as check
from seawall.signals._signal import QUICK_EVERY, Load, Signal, clock_of


def in_flight(target: Any) -> Signal:
    """Return the share of slots in use: of a bulkhead, pool or executor, or a guard's fullest."""
    share = _worst_of(target, _share_in_use, "in_flight", "a Bulkhead, a pool, an executor")
    return Signal(f"in_flight({_name(target)})", share, every=0.0)


def occupancy(target: Any) -> Signal:
    """Return the share of places taken: slots, and the room to wait for one.

    The target is a bulkhead, pool or executor, or a guard, whose fullest one counts. Without room
    to wait, it equals `in_flight`.
    """
    share = _worst_of(target, _share_of_places, "occupancy", "a Bulkhead, a pool, an executor")
    return Signal(f"occupancy({_name(target)})", share, every=0.0)


def queue_time(target: Any, limit: float = 0.1) -> Signal:
    """Return how long the longest waiter for a slot has waited; 1.0 is `limit` seconds.

    The target is a bulkhead, a pool, or a guard. The signal lags: its present value was caused when
    the longest waiter arrived. For shedding, `occupancy` reacts sooner.
    """
    wait = _worst_of(target, _longest_wait, "queue_time", "a Bulkhead, a pool")
    limit = check.seconds("limit", limit)
    return Signal(f"queue_time({_name(target)})", wait, limit=limit, every=QUICK_EVERY)


def thread_queue(target: Any, limit: int | None = None) -> Signal:
    """Return how much work waits for a thread, as a share of `limit`.

    The target is a ThreadBulkhead (or a guard's fullest) or an executor, where `limit` defaults to
    `max_queue`; or a `concurrent.futures.ThreadPoolExecutor`, where it defaults to the number of
    threads.
    """
    most = None if limit is None else check.count("limit", limit)

    def reader(part: Any) -> Load | None:
        return _queued_share(part, most)

    share = _worst_of(target, reader, "thread_queue", "a ThreadBulkhead, an executor")
    return Signal(f"thread_queue({_name(target)})", share, every=0.0)


def _worst_of(target: Any, reader: Callable[[Any], Load | None], made_by: str, wanted: str) -> Load:
    """Return a function that reads `target` itself, or the highest of a guard's policies."""
    parts = () if isinstance(target, type) else getattr(target, "policies", (target,))
    found = [read for part in parts if (read := reader(part)) is not None]
    if not found:
        raise TypeError(f"{made_by}({target!r}): pass {wanted}, or a guard that has one")
    return found[0] if len(found) == 1 else lambda: max(read() for read in found)


def _name(target: Any) -> str:
    return str(getattr(target, "name", None) or getattr(target, "kind", type(target).__name__))


def _inside(part: Any) -> Any:
    """Return the object that counts the slots of a policy, pool or executor: itself or a part."""
    parts = (getattr(part, name, None) for name in ("pool", "slots"))
    return next((found for found in parts if found is not None), part)


def _share_in_use(part: Any) -> Load | None:
    inside = _inside(part)
    used = "in_flight" if hasattr(inside, "in_flight") else "in_use"
    most = "limit" if hasattr(inside, "limit") else "size"
    if not (hasattr(inside, used) and hasattr(inside, most)):
        return None
    return lambda: float(getattr(inside, used) / getattr(inside, most))


def _share_of_places(part: Any) -> Load | None:
    inside = _inside(part)
    if hasattr(inside, "queued") and hasattr(inside, "queue"):
        return lambda: (inside.in_use + inside.queued) / (inside.size + inside.queue)
    if not (hasattr(inside, "waiting") and hasattr(inside, "queue")):
        return None

    def share() -> float:
        room = inside.queue.limit if getattr(part, "max_wait", True) else 0
        return float((inside.in_use + inside.waiting) / (inside.limit + room))

    return share


def _longest_wait(part: Any) -> Load | None:
    inside = _inside(part)
    if not hasattr(inside, "queue_wait"):
        return None
    return lambda: inside.queue_wait(clock_of(part).now())


def _queued_share(part: Any, limit: int | None) -> Load | None:
    pool = _inside(part)
    if hasattr(pool, "queued") and hasattr(pool, "queue"):
        if limit or pool.queue:
            return lambda: pool.queued / (limit or pool.queue)
        return lambda: pool.in_use / pool.size  # without a queue, the threads are the limit
    waiting: Any = getattr(part, "_work_queue", None)  # an executor of the standard library
    if not hasattr(waiting, "qsize"):
        return None
    return lambda: waiting.qsize() / (limit or part._max_workers)  # noqa: SLF001
