"""The named guards that live, so that they can be listed, watched and checked together."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from seawall import _checks as check
from seawall.runtime.workers import WorkerPool

if TYPE_CHECKING:
    from seawall.guard import Guard

_lock = RLock()
_guards: Final[WeakValueDictionary[str, Guard]] = WeakValueDictionary()


@contextmanager
def reserved(name: str) -> Iterator[None]:
    """Keep `name` for the guard made in the block; raises if another live guard has it."""
    if name in _guards:
        # It may be only waiting for the garbage collector, whose finalisers may want the lock.
        gc.collect()
    with _lock:
        known = _guards.get(name)
        if known is not None:
            raise ValueError(
                f"a guard named {name!r} is alive already: {known!r}. Use that one"
                f" (get_guard({name!r})), close() it, or choose another name"
            )
        yield


def add(guard: Guard) -> None:
    """Enter `guard` under its name, which is reserved."""
    _guards[guard.name] = guard


def remove(guard: Guard) -> None:
    """Free the name of `guard`."""
    with _lock:
        if _guards.get(guard.name) is guard:
            del _guards[guard.name]


def guards() -> list[Guard]:
    """Return the live guards, by name."""
    with _lock:
        return sorted(_guards.values(), key=lambda guard: guard.name)


def get_guard(name: str) -> Guard:
    """Return the live guard called `name`; raises KeyError with the names there are."""
    with _lock:
        guard = _guards.get(name)
        if guard is None:
            known = ", ".join(sorted(_guards)) or "none"
            raise KeyError(f"no live guard is named {name!r}; there are: {known}")
        return guard


def check_threads(budget: int) -> int:
    """Return how many threads the pools of all guards may use together; raise if over `budget`.

    A pool that several guards share counts once.
    """
    check.count("budget", budget)
    pools: dict[int, tuple[str, WorkerPool]] = {}
    for guard in guards():
        for policy in guard.policies:
            pool = getattr(policy, "pool", None)
            if isinstance(pool, WorkerPool):
                pools.setdefault(id(pool), (guard.name, pool))
    total = sum(pool.size for _, pool in pools.values())
    if total > budget:
        parts = ", ".join(f"{name} {pool.size}" for name, pool in pools.values())
        raise ValueError(f"the pools need {total} threads, the budget is {budget}: {parts}")
    return total


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 - the old one may be held by a thread that is gone
    _lock = RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
