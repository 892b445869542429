"""The live objects of this process, so that they can be listed, watched and checked together.

Guards are registered by name, which is unique. A guard is kept alive until it is closed: one that
is made inside a function must not lose its breaker's state when the function returns. A guard that
is part of something else (an edge, a database) lives as long as that. Everything else that has a
snapshot (queues, pools, workers, stores...) is entered when it is made, with its kind and a name,
and is not kept alive. Calls never touch this module.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from math import isfinite
from threading import RLock
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from seawall import _checks as check
from seawall.clock import Clock, current_clock

if TYPE_CHECKING:
    from seawall.family import Family
    from seawall.guard import Guard

GUARD: Final = "guard"

MOST_ITEMS: Final = 1000  # of one mapping or list in a snapshot; of the rest it has the number
DEEPEST: Final = 12  # maximum depth of a snapshot

_PLAIN: Final = frozenset({type(None), bool, int, str})
_USUAL: Final = _PLAIN | {float, dict, list, tuple}

OFTEN: Final = 100  # guards made at one place, or closed, from which `explain()` warns
MANY: Final = 1000  # live guards at which a log record asks whether each call makes one

_REMEDY: Final = (
    "make it once, outside of the function, or by get_guard(name, make); for one guard for each"
    " key, use Guard.family(...)"
)

_lock = RLock()
_making = RLock()
_guards: dict[str, Guard] = {}
_parts: WeakValueDictionary[str, Guard] = WeakValueDictionary()
"""Guards that live as long as what they are part of."""
_families: dict[str, Family] = {}  # families by name; their members are not entered one by one
_entries: WeakKeyDictionary[Any, RegistryEntry] = WeakKeyDictionary()


@dataclass(slots=True)
class GuardCounts:
    """Number of guards made and closed in this process; see `explain`."""

    made: int = 0
    closed: int = 0
    asked: bool = False  # whether the log record at `MANY` live guards was written


counts: Final = GuardCounts()


@contextmanager
def reserved(name: str, *, replace: bool = False) -> Iterator[None]:
    """Reserve `name` for a new guard; raise if another has it, or with `replace` close that one."""
    if name in _parts and not replace:
        # The old guard may only be waiting for the garbage collector. Collect outside of the lock,
        # since finalisers may need it.
        gc.collect()
    with _lock:
        known = _known(name) or _families.get(name)
        if known is not None and not replace:
            share = f"get_guard({name!r}, lambda: Guard({name!r}, ...)), which makes it once"
            if name in _families:
                share = "it once, at the top of a module"
            raise ValueError(
                f"a guard named {name!r} is alive already: {known!r}. If this line runs again (a"
                " notebook, a reload), write replace=True, which closes that one; if it is shared"
                f" (an app factory), write {share}; else choose another name, or close() that one"
            )
        yield
        if known is not None:
            known.close()


def add(guard: Guard) -> None:
    """Enter `guard` under its reserved name."""
    _parts.pop(guard.name, None)
    _guards[guard.name] = guard
    counts.made += 1
    if len(_guards) >= MANY and not counts.asked:
        counts.asked = True
        from logging import getLogger

        ((place, most),) = Counter(made.made_at for made in _guards.values()).most_common(1)
        getLogger("seawall").warning(
            "%d guards are alive, %d of them made at %s: is one made for each call? A guard lives"
            " until it is closed: %s",
            len(_guards),
            most,
            place,
            _REMEDY,
        )


def add_family(family: Family) -> None:
    """Enter `family` under its reserved name."""
    _families[family.name] = family


def remove(guard: Guard | Family) -> None:
    """Free the name of `guard`."""
    with _lock:
        counts.closed += 1
        _forget(guard)


def restore(guard: Guard) -> None:
    """Enter a closed guard again, because its replacement could not be made."""
    with _lock:
        guard.closed = False
        _guards.setdefault(guard.name, guard)


def release(guard: Guard) -> Guard:
    """Return `guard`, which from now on lives only as long as what it is part of."""
    with _lock:
        if _guards.get(guard.name) is guard:
            del _guards[guard.name]
            _parts[guard.name] = guard
    return guard


def _forget(guard: Guard | Family) -> None:
    known: MutableMapping[str, Any]
    for known in (_guards, _parts, _families):
        if known.get(guard.name) is guard:
            del known[guard.name]


def _known(name: str) -> Guard | None:
    return _guards.get(name) or _parts.get(name)


def guards() -> list[Guard]:
    """Return the live guards, sorted by name."""
    with _lock:
        return sorted((*_guards.values(), *_parts.values()), key=lambda guard: guard.name)


def is_part(guard: Guard) -> bool:
    """Return whether `guard` lives as long as what it is part of: an edge, a database."""
    return _parts.get(guard.name) is guard


def _everyone() -> list[Guard | Family]:
    return [*guards(), *families()]


def families() -> list[Family]:
    """Return the live families, sorted by name."""
    with _lock:
        return sorted(_families.values(), key=lambda family: family.name)


@contextmanager
def emptied() -> Iterator[None]:
    """Start the block without any guard; at its end, close its guards and restore the others."""
    global _guards, _parts, _families
    with _lock:
        before = _guards, _parts, _families
        _guards, _parts, _families = {}, WeakValueDictionary(), {}
    try:
        yield
    finally:
        for made in _everyone():
            made.close()
        with _lock:
            _guards, _parts, _families = before
            for known in _everyone():
                if known.closed:  # closed inside the block
                    _forget(known)


def free_name(name: str) -> str:
    """Return `name` if no live guard has it, else with a number: "edge 2", "edge 3"..."""
    taken = {known.name for known in _everyone()}
    names = (name, *(f"{name} {number}" for number in range(2, len(taken) + 3)))
    return next(free for free in names if free not in taken)


def get_guard(name: str, make: Callable[[], Guard] | None = None) -> Guard:
    """Return the live guard called `name`, or else the one that `make()` returns. Atomic.

    Without `make`, raise KeyError with the names there are.
    """
    guard = _known(name)
    if guard is not None:
        return guard
    if make is None:
        known = ", ".join(guard.name for guard in guards()) or "none"
        raise KeyError(f"no live guard is named {name!r}; there are: {known}")
    check.plain_function("make", make)
    with _making:
        guard = _known(name)
        if guard is None:
            guard = make()
            if _known(name) is not guard:
                raise ValueError(
                    f"get_guard({name!r}, make): make() returned {guard!r}; let it return a new"
                    f" guard of that name, as in lambda: Guard({name!r}, Timeout(2.0))"
                )
        return guard


def check_threads(budget: int) -> int:
    """Return the threads that all guards and executors may use together; raise if over `budget`.

    A pool that several guards share counts once. Each process of a `CpuPool` needs a thread too.
    """
    from seawall.runtime.workers import WorkerPool

    check.count("budget", budget)
    everyone = [*guards(), *(guard for family in families() for guard in family.guards().values())]
    owners = [(guard.name, policy) for guard in everyone for policy in guard.policies]
    owners += [(entry.name, thing) for thing, entry in entered()]
    pools: dict[int, tuple[str, WorkerPool]] = {}
    for name, owner in owners:
        pool = getattr(owner, "pool", None)
        if isinstance(pool, WorkerPool) and not pool.stopped:
            pools.setdefault(id(pool), (name, pool))
    total = sum(pool.size for _, pool in pools.values())
    if total > budget:
        parts = ", ".join(f"{name} {pool.size}" for name, pool in pools.values())
        raise ValueError(f"the pools need {total} threads, the budget is {budget}: {parts}")
    return total


# Everything else


@dataclass(slots=True, eq=False, repr=False)
class RegistryEntry:
    """Metadata of an entered object.

    `ask` names its coroutine method that queries a store or a database for its state, and the last
    answer is kept. `local` says whether it also has a `snapshot()` that needs no such query.
    """

    kind: str
    name: str
    ask: str | None
    local: bool
    clock: Clock = field(default_factory=current_clock)
    answer: Any = None
    answered_at: float = 0.0
    error: str | None = None

    def __repr__(self) -> str:
        return f"<Entry {self.kind} {self.name!r}>"


def enter(thing: Any, kind: str, name: str, *, ask: str | None = None, local: bool = True) -> None:
    """Include `thing` in `snapshot()` for as long as it lives; see `RegistryEntry`."""
    with _lock:
        _entries[thing] = RegistryEntry(kind, name, ask, local)


def answered(thing: Any, answer: Any) -> None:
    """Keep what a store or database has just answered about `thing`, for any caller."""
    with _lock:
        entry = _entries.get(thing)
    if entry is not None and entry.ask is not None:
        entry.answer, entry.answered_at, entry.error = answer, entry.clock.now(), None


def entered() -> list[tuple[Any, RegistryEntry]]:
    """Return the entered objects that are still alive, with their entries."""
    with _lock:
        return list(_entries.items())


def snapshot() -> dict[str, list[dict[str, Any]]]:
    """Return the state of every live object, by kind, as plain data that is fit for JSON.

    Each has its `name` and the fields of its own `snapshot()`. State that only a store or database
    knows is under `stored`, as of `stored_age` seconds ago, when it was last queried; nothing is
    queried here. An object that cannot be read has the cause under `snapshot_error` and does not
    hide the others.
    """
    return snapshot_with({})


def snapshot_with(kept: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return a snapshot that takes the guards in `kept`, by name, from an earlier snapshot."""
    shown: dict[str, list[dict[str, Any]]] = {}
    for known in _everyone():
        before = kept.get(known.name)
        seen = {**snapshot_of(known), "name": known.name} if before is None else before
        shown.setdefault(GUARD, []).append(seen)
    for thing, entry in entered():
        seen = snapshot_of(thing) if entry.local else {}
        if entry.ask is not None:
            seen |= _stored(entry)
        shown.setdefault(entry.kind, []).append({**seen, "name": entry.name})
    return {kind: sorted(shown[kind], key=lambda one: str(one["name"])) for kind in sorted(shown)}


def explain() -> str:
    """Return every guard's `explain()`, and the dangers of the process as a whole."""
    texts = [one.explain() for one in _everyone()]
    found = process_dangers()
    if found:
        texts.append("\n".join(["in this process, take care:", *(f"  - {one}" for one in found)]))
    return "\n\n".join(texts) or "no guards are alive in this process"


def process_dangers() -> list[str]:
    """Return the dangers of the process as a whole, and of what is no guard."""
    found = []
    for place, alive in Counter(guard.made_at for guard in guards()).most_common(3):
        if place and alive >= OFTEN:
            found.append(f"{alive} guards are alive that were made at {place}: {_REMEDY}")
    if counts.closed >= OFTEN:
        found.append(
            f"{counts.closed} of {counts.made} guards were made and closed again, and what their"
            f" breakers and budgets had learnt is lost: {_REMEDY}"
        )
    for thing, entry in entered():
        dangers: list[str] = getattr(thing, "dangers", list)()
        found += [f"{entry.kind} {entry.name!r}: {danger}" for danger in dangers]
    return found


def snapshot_of(thing: Any) -> dict[str, Any]:
    """Return the snapshot of one object; if it cannot be read, only the cause."""
    try:
        return dict(plain(thing.snapshot()))
    except Exception as error:  # noqa: BLE001 - whatever it is, the others must be shown
        from seawall._failures import described

        return {"snapshot_error": described(error)}


def _stored(entry: RegistryEntry) -> dict[str, Any]:
    shown: dict[str, Any] = {"stored": None, "stored_age": None}
    if entry.answer is not None:
        age = max(0.0, entry.clock.now() - entry.answered_at)
        shown = {"stored": plain(entry.answer), "stored_age": age}
    if entry.error is not None:
        shown["stored_error"] = entry.error
    return shown


def plain(value: Any, depth: int = 0) -> Any:
    """Return `value` as bounded JSON data, without values that JSON cannot express."""
    kind = type(value)
    if kind not in _USUAL and isinstance(value, Enum):
        value = value.value
        kind = type(value)
    if kind in _PLAIN or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if depth >= DEEPEST:
        return repr(value)[:200]
    depth += 1
    # Check the items' types inline: a call for each of hundreds of numbers takes longer.
    if isinstance(value, (dict, Mapping)):
        items = list(value.items())
        shown = {
            str(key): item if type(item) in _PLAIN else plain(item, depth)
            for key, item in items[:MOST_ITEMS]
        }
        if len(items) > MOST_ITEMS:
            shown["(more)"] = len(items) - MOST_ITEMS
        return shown
    if isinstance(value, (list, tuple, set, frozenset)):
        listed = list(value)[:MOST_ITEMS]
        return [item if type(item) in _PLAIN else plain(item, depth) for item in listed]
    return repr(value)[:200]


def _after_fork() -> None:
    # A vanished thread may have held the lock, or have been iterating over the entries.
    global _lock, _making, _parts, _entries  # noqa: PLW0603
    _lock, _making = RLock(), RLock()
    _parts = WeakValueDictionary(_parts)
    _entries = WeakKeyDictionary(_entries)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
