"""Similar guards, one for each key: hosts, tenants, sensors.

Promises:
- Keys are isolated: one key uses up nothing of another, neither retry budget nor slots.
- There are never more than `max_keys` guards, and they are not garbage-collected.
- A key is evicted only if it has no call in progress, no limit usage that eviction would erase, and
  no breaker that is open or probing. The longest unused and healthy keys go first.
- A key that finds no room shares one guard with the others that find none: `make("(others)")`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, update_wrapper
from inspect import Parameter, signature
from threading import RLock
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

from seawall import _checks as check
from seawall import registry
from seawall._failures import log_failure
from seawall._forks import survives_fork
from seawall.clock import Clock, check_clock, current_clock
from seawall.guard import Guard
from seawall.models.histogram import Tally
from seawall.policies.breaker import Breaker
from seawall.rules import switches
from seawall.runtime.batch import CONCURRENCY, Batch, Room, arun_batch, run_batch
from seawall.runtime.functions import kind_of, with_arguments
from seawall.runtime.generators import guard_async_generator, guard_generator
from seawall.runtime.layers import Inline, Layer, Outcome
from seawall.runtime.policy import Bound, GateBound, GatePolicy, Policy, bindings_of
from seawall.runtime.stats import COUNTS, last_error_of

if TYPE_CHECKING:
    from random import Random

A = TypeVar("A")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Make = Callable[[Any], Iterable[Policy]]
KeyOf = Callable[[tuple[Any, ...], dict[str, Any]], Hashable]

CHECKED_AT_ONCE: Final = 64  # members checked to find one to evict: a flood of keys must stay cheap
WORST_SHOWN: Final = 10  # number of keys that a snapshot names
OTHERS: Final = "(others)"  # key of the guard shared by all keys that find no room
_STATES: Final = ("isolated", "open", "half_open", "closed")  # states of a breaker, worst first


class Family:
    """A guard for each key, made on the key's first use. Make it with `Guard.family(...)`."""

    def __init__(
        self,
        name: str,
        make: Make,
        *,
        max_keys: int = 1024,
        max_wait: float | None = None,
        idempotent: bool = True,
        replace: bool = False,
        clock: Clock | None = None,
        rng: Random | None = None,
    ) -> None:
        """Make each key's guard with the policies that `make(key)` returns, outermost first.

        At most `max_keys` guards are kept. Keys that find no room share one guard with the policies
        of `make("(others)")`. If `make` returns the same policy object for several keys, they share
        it. The other arguments are as in `Guard`.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"family({name!r}): the first argument is a name, such as 'sensor'")
        self.name = name
        self.make = check.plain_function("make", make)
        self.max_keys = check.count("max_keys", max_keys)
        self.max_wait = None if max_wait is None else check.seconds("max_wait", max_wait, zero=True)
        self.idempotent = check.flag("idempotent", idempotent)
        self.clock: Clock = current_clock() if clock is None else check_clock(clock)
        self._rng = None if rng is None else check.chance("rng", rng)
        self.closed = False
        """Whether `close()` was called."""
        self.evicted = 0
        """Number of keys evicted to make room."""
        self.overflowed = 0
        """Number of times a key found no room."""
        self._members: dict[Hashable, _Member] = {}
        self._unchecked: list[Hashable] = []  # keys not yet checked in the current eviction sweep
        self._others: Guard | None = None
        self._evicted_counts: dict[str, int] = dict.fromkeys(COUNTS, 0)
        self._evicted_policies: dict[tuple[int, str], dict[str, Any]] = {}
        self._evicted_durations, self._evicted_waits = Tally(), Tally()
        """Counts of evicted members, so that no counter ever decreases."""
        self._lock = RLock()
        survives_fork(self)
        with registry.reserved(name, replace=check.flag("replace", replace)):
            registry.add_family(self)

    def __repr__(self) -> str:
        return f"<Family {self.name!r}: {len(self._members)} of {self.max_keys} keys>"

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._members

    def __getitem__(self, key: Hashable) -> Guard:
        """Return the guard of `key`; make it if the key is new."""
        try:
            member = self._members[key]
        except KeyError:
            return self._new(key)
        except TypeError as error:
            raise TypeError(
                f"family {self.name!r}: {error}; a key is text, a number or a tuple"
            ) from None
        member.used = True
        return member.guard

    def __call__(self, *, by: str | Callable[..., Hashable]) -> Callable[[F], F]:
        """Decorate: `@family(by="host")`, or `by` a function of the call's arguments."""
        if not isinstance(by, str):
            check.plain_function("by", by)

        def decorate(function: F) -> F:
            kind = kind_of(function)
            key_of = _argument(by, function) if isinstance(by, str) else _calculated(by)
            guarded: F = self._guarded(function, kind, key_of)
            update_wrapper(guarded, function)
            return guarded

        return decorate

    def _guarded(self, function: Any, kind: str, key_of: KeyOf) -> Any:
        def pick(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Guard, Any]:
            guard = self[key_of(args, kwargs)]
            return guard, guard._stream_layers("sync" if kind == "generator" else "async")  # noqa: SLF001 - its own member

        def guarded(*args: Any, **kwargs: Any) -> Any:
            plan = self[key_of(args, kwargs)]._plan  # noqa: SLF001 - its own member
            return plan.bind(function, "sync")(*args, **kwargs)

        async def aguarded(*args: Any, **kwargs: Any) -> Any:
            plan = self[key_of(args, kwargs)]._plan  # noqa: SLF001 - its own member
            return await plan.bind(function, "async")(*args, **kwargs)

        if kind == "generator":
            return guard_generator(pick, function)
        if kind == "async generator":
            return guard_async_generator(pick, function)
        return aguarded if kind == "async" else guarded

    def map(
        self,
        function: Callable[[A], T],
        items: Iterable[A],
        /,
        *,
        by: Callable[[A], Hashable] | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Batch[A, T]:
        """Call a plain function with each of `items`, each under the guard of its key.

        `by(item)` is the key; without `by`, the item itself. At most `concurrency` calls run at the
        same time, in threads, and for each key as many as its bulkheads admit. An item that finds
        its bulkhead full waits, and items of other keys go first. An item that fails does not stop
        others.
        """
        check.plain_function("function", function, "amap(...) is for an async one")
        key_of = _itself if by is None else check.plain_function("by", by)

        def room(item: A) -> Room:
            return self._room(key_of(item), Guard.attempt, function)

        return run_batch(room, items, check.count("concurrency", concurrency))

    @overload
    async def amap(
        self,
        function: Callable[[A], Awaitable[T]],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        by: Callable[[A], Hashable] | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Batch[A, T]: ...
    @overload
    async def amap(
        self,
        function: Callable[[A], T],
        items: Iterable[A] | AsyncIterable[A],
        /,
        *,
        by: Callable[[A], Hashable] | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Batch[A, T]: ...
    async def amap(
        self,
        function: Any,
        items: Iterable[Any] | AsyncIterable[Any],
        /,
        *,
        by: Callable[[Any], Hashable] | None = None,
        concurrency: int = CONCURRENCY,
    ) -> Any:
        """Async twin of `map`: an async function, and each item in its own task."""
        check.function("function", function)
        key_of = _itself if by is None else check.plain_function("by", by)

        def room(item: Any) -> Room:
            return self._room(key_of(item), Guard.aattempt, function)

        return await arun_batch(room, items, check.count("concurrency", concurrency))

    def _room(self, key: Hashable, attempt: Callable[..., Any], function: Any) -> Room:
        """Return where to call an item; its key is not evicted until the item has ended."""
        with self._lock:
            guard = self[key]
            member = self._members.get(key)
            if member is not None:
                member.calls.enter(0.0)
        return Room(
            guard.name,
            partial(attempt, guard, function),
            guard._bulkheads(),  # noqa: SLF001 - its own member
            None if member is None else member.calls.end,
        )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies of one member; the others are alike. Empty before the first key."""
        return next((guard.policies for guard in self._all().values()), ())

    # Members

    def _new(self, key: Hashable) -> Guard:
        with self._lock:
            member = self._members.get(key)
            if member is not None:
                return member.guard
            if len(self._members) >= self.max_keys and not self._evict():
                self.overflowed += 1
                if self._others is None:
                    self._others = self._guard(OTHERS, self._shared_policies(key))
                    from logging import getLogger

                    getLogger("seawall").warning(
                        "family %r: %d keys, and none of them may be forgotten: further keys share"
                        " one guard. Write a larger max_keys=, or a coarser key",
                        self.name,
                        self.max_keys,
                    )
                return self._others
            calls = _CallsUnderWay()
            guard = self._guard(key, self.make(key), around=calls)
            self._members[key] = _Member(guard, calls)
            return guard

    def _guard(self, key: Hashable, policies: Iterable[Policy], **more: Any) -> Guard:
        return Guard._unregistered(  # noqa: SLF001 - its own member
            f"{self.name}[{key}]",
            tuple(policies),
            max_wait=self.max_wait,
            idempotent=self.idempotent,
            clock=self.clock,
            rng=self._rng,
            **more,
        )

    def _shared_policies(self, key: Hashable) -> Iterable[Policy]:
        """Return the policies of the guard for keys without room; `key` is the first such key."""
        try:
            return self.make(OTHERS)
        except Exception:  # noqa: BLE001 - logged
            # Refusing the call would be worse: a flood of keys would stop calls.
            message = (
                "family %r: make(%r) failed, so keys that find no room share the policies of %r"
            )
            log_failure(message, self.name, OTHERS, key)
            return self.make(key)

    def _evict(self) -> bool:
        """Evict the cheapest of some members to lose; return False if none may be evicted."""
        now = self.clock.now()
        best: Hashable = None
        least: int | None = None
        for _ in range(min(CHECKED_AT_ONCE, 2 * len(self._members))):
            if not self._unchecked:
                self._unchecked = list(reversed(self._members))
            key = self._unchecked.pop()
            member = self._members.get(key)
            if member is None or not member.is_evictable(now):
                continue
            missed = 2 * member.used + (member.guard.stats.error_rate(now) > 0)
            member.used = False
            if least is None or missed < least:
                best, least = key, missed
            if not missed:
                break
        if least is None:
            return False
        self._forget(best, now)
        return True

    def _forget(self, key: Hashable, now: float) -> None:
        guard = self._members.pop(key).guard
        self.evicted += 1
        guard.stats.fold(now)
        for name in COUNTS:
            self._evicted_counts[name] += getattr(guard.stats, name)
        self._evicted_durations.merge(guard.stats.tally(now))
        self._evicted_waits.merge(guard.stats.waits)
        for place, bound in enumerate(guard.bounds):
            kind = bound.policy.kind
            gone = self._evicted_policies.setdefault((place, kind), {"policy": kind})
            _add_counts(gone, bound, own=len(bindings_of(bound.policy)) == 1)

    def guards(self) -> dict[Hashable, Guard]:
        """Return the current guards, by key."""
        with self._lock:
            return {key: member.guard for key, member in self._members.items()}

    # Observability

    def worst(self, most: int = WORST_SHOWN) -> dict[Hashable, Guard]:
        """Return the guards in most trouble, worst first: broken ones, then failing ones."""
        check.count("most", most)
        now = self.clock.now()
        ranked = [
            (_STATES.index(_state(guard)), -guard.stats.error_rate(now), place, key, guard)
            for place, (key, guard) in enumerate(self._all().items())
        ]
        well = len(_STATES) - 1
        ranked = [one for one in ranked if one[0] < well or one[1] < 0]
        return {key: guard for *_, key, guard in sorted(ranked, key=lambda one: one[:3])[:most]}

    def snapshot(self) -> dict[str, Any]:
        """Return the state of all members together, and of the worst ones by key.

        It has the shape of a guard's snapshot: counts and policies cover all members, including
        evicted ones. `family` describes the keys.
        """
        now = self.clock.now()
        members = self._all()
        total = dict(self._evicted_counts)
        recent = [0, 0]
        durations, waits = deepcopy((self._evicted_durations, self._evicted_waits))
        for guard in members.values():
            durations.merge(guard.stats.tally(now))
            waits.merge(guard.stats.waits)
            for place, number in enumerate(guard.stats.recent(now)):
                recent[place] += number
            for name in COUNTS:
                total[name] += getattr(guard.stats, name)
        worst = self.worst()
        return {
            "name": self.name,
            "switches": switches(),
            **total,
            "abandoned": sum(guard.stats.abandoned for guard in members.values()),
            "error_rate": recent[1] / sum(recent) if recent[1] else 0.0,
            "last_error": last_error_of((guard.stats for guard in members.values()), now),
            **dict.fromkeys(("p50", "p95", "p99")),
            "histogram": durations.snapshot(),
            "waits": waits.snapshot(),
            "policies": self._policies(list(members.values()), worst),
            "family": {
                "keys": len(self._members),
                "max_keys": self.max_keys,
                "evicted": self.evicted,
                "overflowed": self.overflowed,
                "worst": {str(key): guard.snapshot() for key, guard in worst.items()},
            },
        }

    def _policies(
        self, guards: list[Guard], worst: Mapping[Hashable, Guard]
    ) -> list[dict[str, Any]]:
        seen = {place: deepcopy(gone) for place, gone in self._evicted_policies.items()}
        known: set[int] = set()  # a policy shared by members has one state
        for guard in guards:
            for place, bound in enumerate(guard.bounds):
                policy = bound.policy
                summary = seen.setdefault((place, policy.kind), {"policy": policy.kind})
                new = id(policy) not in known
                known.add(id(policy))
                _add_counts(summary, bound, own=new)
                if new:
                    _add_state(summary, policy)
        for summary in seen.values():
            if summary["policy"] == "breaker" and "state" in summary:
                summary["keys"] = {
                    str(key): {"state": _state(guard)} for key, guard in worst.items()
                }
                summary["all_keys"] = len(guards)
        return [seen[place] for place in sorted(seen)]

    def explain(self) -> str:
        """Return the stack that each key has, and its dangers."""
        member = next(iter(self._all().values()), None)
        head = f"family {self.name!r}: {len(self._members)} of at most {self.max_keys} keys"
        if member is None:
            return f"{head}; no stack is known before the first key"
        return f"{head}, each with its own\n{member.explain()}"

    def dangers(self) -> list[str]:
        """Return what is dangerous in the stack that each key has."""
        member = next(iter(self._all().values()), None)
        return [] if member is None else member.dangers()

    def _all(self) -> dict[Hashable, Guard]:
        members = self.guards()
        if self._others is not None:
            members[OTHERS] = self._others
        return members

    def close(self) -> None:
        """Free the name and forget all keys; calls in progress and decorated functions continue."""
        if not self.closed:
            self.closed = True
            registry.remove(self)
        with self._lock:
            self._members.clear()

    def _after_fork(self) -> None:
        """Reset lock and call counts in a child process, which has no calls of other threads."""
        self._lock = RLock()
        for member in self._members.values():
            member.calls.under_way.clear()


@dataclass(slots=True, eq=False)
class _Member:
    """A guard and its call count."""

    guard: Guard
    calls: _CallsUnderWay
    used: bool = False  # since the last eviction check; a new key starts as unused

    def is_evictable(self, now: float) -> bool:
        """Return whether evicting this member breaks no limit and erases no penalty."""
        if self.calls.under_way:
            return False
        return all(policy._at_rest(now) for policy in self.guard.policies)  # noqa: SLF001 - its own member


class _CallsUnderWay(Layer):
    """Counts the calls of one member: its key is kept while any is in progress."""

    until_stopped = True

    def __init__(self) -> None:
        self.under_way: deque[None] = deque()
        self.inline = Inline(
            names={"append": self.under_way.append, "pop": self.under_way.pop},
            enter=("{ticket} = {append}(None)",),
            leave=(
                "if {left} is None:",
                "    try:",
                "        {pop}()",
                "    except IndexError_:",
                "        pass",
            ),
        )

    def enter(self, _now: float) -> None:
        self.under_way.append(None)

    def leave(self, ticket: None, outcome: Outcome, detail: object, now: float) -> None:
        self.end()

    def end(self) -> None:
        """Count a call out; ignore calls of the parent process, which a fork has forgotten."""
        try:
            self.under_way.pop()
        except IndexError:
            pass


def _itself(item: Any) -> Any:
    return item


def _state(guard: Guard) -> str:
    states = [policy.state for policy in guard.policies if isinstance(policy, Breaker)]
    return min(states, key=_STATES.index, default=_STATES[-1])


def _add_counts(summary: dict[str, Any], bound: Bound, *, own: bool) -> None:
    """Add a policy's counts; `own` says whether its own counters are still to be added."""
    if isinstance(bound, GateBound):
        summary["rejected"] = summary.get("rejected", 0) + bound.refused
        summary["would_reject"] = summary.get("would_reject", 0) + bound.would_refuse
    if own and isinstance(bound.policy, Breaker):
        transitions = summary.setdefault("transitions", {})
        for name, times in bound.policy.transitions.items():
            transitions[name] = transitions.get(name, 0) + times


def _add_state(summary: dict[str, Any], policy: Policy) -> None:
    """Add a policy's current state: sum up slots, keep the worst breaker state."""
    if isinstance(policy, GatePolicy):
        summary["mode"] = policy.mode
    for name in ("limit", "in_flight", "waiting"):
        number = getattr(policy, name, None)
        if isinstance(number, int):
            summary[name] = summary.get(name, 0) + number
    if isinstance(policy, Breaker):
        state = policy.state
        summary["state"] = min(summary.get("state", state), state, key=_STATES.index)
        summary["open_keys"] = summary.get("open_keys", 0) + (state in ("open", "isolated"))


def _calculated(by: Callable[..., Hashable]) -> KeyOf:
    ask = with_arguments(by)
    return lambda args, kwargs: ask(*args, **kwargs)


def _argument(by: str, function: Callable[..., Any]) -> KeyOf:
    shape = signature(function)
    parameter = shape.parameters.get(by)
    if parameter is None or parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
        raise ValueError(
            f"by={by!r}: the function takes {[*shape.parameters]}; name one of these, or pass a"
            " function of the call's arguments"
        )
    place = list(shape.parameters).index(by)
    positional = parameter.kind is not Parameter.KEYWORD_ONLY
    default = parameter.default

    def read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        if positional and place < len(args):
            key: Hashable = args[place]
        elif by in kwargs:
            key = kwargs[by]
        else:
            if default is Parameter.empty:
                shape.bind(*args, **kwargs)  # raises the error that the function itself would raise
            key = default
        return key

    return read
