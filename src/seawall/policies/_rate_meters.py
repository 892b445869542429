"""The counting behind a rate limit: a state for each key, who waits for which, and one lock.

The lock-free success path of `RateLimit` changes states without the lock, in steps that nothing can
interrupt (see `seawall.runtime.gil`). So whoever holds the lock first shuts that path, by a slack
that nothing fits, and opens it again at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.models.rate_buckets import Account, LeakyBucket, SettledBucket, TokenBucket
from seawall.models.rate_rule import Rule
from seawall.runtime.mutex import Mutex, survives_fork

if TYPE_CHECKING:
    from seawall.policies._rate_settings import Limit
    from seawall.policies._rate_waiting import RateWaiter

SHUT: Final = -1.0
"""The slack of a meter whose success path is shut."""

SHARED: Final = 1024
"""Into so many buckets are put together all keys that find no room of their own."""

_SWEEP_FROM: Final = 1024
_SWEEP: Final = 2
_SWEEP_WHEN_FULL: Final = 16


class _Stripe:
    """Where the states of several keys are kept together."""

    __slots__ = ()


class Charge:
    """What one call takes, or has taken, from one limit."""

    __slots__ = ("cost", "estimated", "kind", "mark", "meter", "place", "placed")

    def __init__(self, meter: Meter, key: Hashable, cost: int, *, estimated: bool) -> None:
        """Want `cost` of what `key` may have; `estimated` if the actual cost is told later."""
        self.meter = meter
        self.place = key
        self.placed = meter.limit.key is None
        """Whether `place` is where the state is kept; before, it is the key itself."""
        self.cost = cost
        self.estimated = estimated
        self.mark = 0.0
        self.kind: type[Rule[Any]] | None = None
        """The rule by which it was taken; None while it is not."""


class Lane:
    """Those who wait for the same, in the order in which they came."""

    __slots__ = ("total", "waiters")

    def __init__(self) -> None:
        self.waiters: deque[RateWaiter] = deque()
        self.total = 0
        """What they want, together."""


class Meter:
    """One limit at work."""

    __slots__ = (
        "_hand",
        "_horizon",
        "_opened",
        "_shared",
        "lanes",
        "limit",
        "max_keys",
        "plain",
        "rule",
        "single",
        "slack",
        "states",
        "step",
        "tat",
    )

    def __init__(self, limit: Limit, max_keys: int) -> None:
        """Begin with nothing taken."""
        self.lanes: dict[Hashable, Lane] = {}
        self.states: dict[Hashable, Any] = {}
        self._hand: list[Hashable] = []
        self._horizon = float("-inf")
        """A state was forgotten at this instant: no new one may begin earlier."""
        self._shared: list[_Stripe] = []
        self.step = self._opened = 0.0
        """What a call takes from a plain bucket, and the slack that it has to fit into."""
        self.tat = float("-inf")
        """The state where there is but one and it is a plain number, for the success path."""
        self.configure(limit, limit.rule(), max_keys)

    def configure(self, limit: Limit, rule: Rule[Any], max_keys: int) -> None:
        """Take on settings; states are as they were."""
        self.limit = limit
        self.rule = rule
        self.max_keys = max_keys
        self.plain = False
        """Whether a state is one number and each call takes as much: fit for the success path."""
        if (
            isinstance(rule, (TokenBucket, LeakyBucket))
            and isinstance(limit.cost, int)
            and limit.settle is None
        ):
            self.plain = True
            self.step = rule.amount(limit.cost)
            self._opened = rule.tolerance if isinstance(rule, TokenBucket) else self.step
        self.single = self.plain and limit.key is None
        """Whether the state is `tat`."""
        self.reopen()

    def reopen(self) -> None:
        """Open the success path, unless somebody waits or it is not for this rule."""
        self.slack = self._opened if self.plain and not self.lanes else SHUT

    @property
    def keys(self) -> int:
        """How many keys have a state."""
        return len(self.states)

    # States

    def place(self, key: Hashable, now: float) -> Hashable:
        """Return where the state of `key` is kept: by itself, or where there is no room, shared.

        Shared is never more lenient: who shares has what others took counted too.
        """
        if key in self.states or self._has_room(now):
            return key
        if not self._shared:
            self._shared = [_Stripe() for _ in range(SHARED)]
        return self._shared[hash(key) % SHARED]

    def _has_room(self, now: float) -> bool:
        if len(self.states) >= self.max_keys:
            self._sweep(_SWEEP_WHEN_FULL, now)
        return len(self.states) < self.max_keys

    def _sweep(self, steps: int, now: float) -> None:
        """Look at a few states and forget those that are as good as none.

        Only these: so no flood of keys makes the limit forget what somebody has taken.
        """
        for _ in range(steps):
            if not self._hand:
                self._hand = list(reversed(self.states))
                if not self._hand:
                    return
            key = self._hand.pop()
            state = self.states.get(key)
            if state is not None and key not in self.lanes and not self.rule.rest(state, now):
                del self.states[key]
                self._horizon = max(self._horizon, now)

    def read(self, place: Hashable, now: float) -> Any:
        """Return the state kept at `place`, a new one if there is none."""
        if self.single:
            return self.tat
        state = self.states.get(place)
        if state is not None:
            return state
        if self._shared and not isinstance(place, _Stripe):
            # While there was no room, what this key took was counted there.
            shared = self.states.get(self._shared[hash(place) % SHARED])
            if shared is not None:
                return self.rule.copy(shared)
        return self.rule.fresh(max(now, self._horizon))

    def write(self, place: Hashable, state: Any, now: float) -> None:
        """Keep `state` at `place`."""
        if self.single:
            self.tat = state
            return
        if place not in self.states and len(self.states) >= _SWEEP_FROM:
            self._sweep(_SWEEP, now)
        self.states[place] = state

    def settles(self) -> None:
        """Keep account of takings from now on, so that they can be settled exactly."""
        rule = self.rule
        if not isinstance(rule, TokenBucket):
            return
        self.rule = SettledBucket(rule)
        single = self.single
        self.plain = self.single = False
        # Another map: the success path of keys knows the old one, and finds nothing in it.
        old, self.states = self.states, {}
        for key, state in old.items():
            self.states[key] = Account(state)
        old.clear()
        if single:
            self.states[None] = Account(self.tat)

    def update(self, fresh: Meter, now: float) -> None:
        """Take the settings of `fresh`, which counts nothing yet, and translate the states."""
        old, rule = self.rule, fresh.rule
        if isinstance(old, SettledBucket) and isinstance(rule, TokenBucket):
            rule = SettledBucket(rule)
        if self.single:
            self.tat = rule.adopt(self.tat, old, now)
        for key, state in self.states.items():
            self.states[key] = rule.adopt(state, old, now)
        self.configure(fresh.limit, rule, fresh.max_keys)

    # Questions

    def wait(self, charge: Charge, now: float, waiter: RateWaiter | None) -> float | None:
        """Return for how long `charge` has to wait, behind all who came before; None for ever."""
        ahead = 0
        lane = self.lanes.get(charge.place)
        if lane is not None:
            if waiter is None:
                ahead = lane.total
            else:
                for other in lane.waiters:
                    if other.number >= waiter.number:
                        break
                    ahead += other.wants
        wait = self.rule.wait(self.read(charge.place, now), now, charge.cost, ahead)
        # Who comes first has not gone yet, though it could: not before it, then.
        return 1.0 if ahead and wait == 0 else wait


class Blocked(NamedTuple):
    """Why a call cannot go now."""

    first: Charge
    """The first limit that is exceeded, in the order in which they were given."""
    longest: Charge
    """The one that keeps it longest."""
    wait: float | None
    """For how many microseconds, at least; None: for ever."""


class Meters:
    """The limits of one policy, checked and taken together. All but the section: under the lock."""

    def __init__(self, meters: Sequence[Meter], max_waiting: int) -> None:
        """Let up to `max_waiting` wait, for all limits and keys together."""
        self.all = tuple(meters)
        self.max_waiting = max_waiting
        self.waiting = 0
        self.numbers = count()
        """Tell who began to wait before whom."""
        self._mutex = Mutex()
        survives_fork(self)

    def __enter__(self) -> None:
        self._mutex.__enter__()
        for meter in self.all:
            meter.slack = SHUT

    def __exit__(self, *exc: object) -> None:
        for meter in self.all:
            if meter.plain:
                meter.reopen()
        self._mutex.__exit__(*exc)

    def do(self, work: Callable[[], None]) -> None:
        """Do `work` under the lock, or a little later, if this thread holds it: see `Mutex`."""

        def shut() -> None:
            with self:
                work()

        self._mutex.do(shut)

    def _after_fork(self) -> None:
        """Be usable in a child process: who waits has not come along."""
        self._mutex = Mutex()
        self.waiting = 0
        for meter in self.all:
            meter.lanes.clear()
            meter.reopen()

    def look(
        self, charges: Sequence[Charge], now: float, waiter: RateWaiter | None = None
    ) -> Blocked | None:
        """Return why the charges cannot be taken now, all of them; None if they can."""
        first = longest = None
        most = 0.0
        for charge in charges:
            meter = charge.meter
            if not charge.placed:
                charge.place = meter.place(charge.place, now)
                charge.placed = True
            if not charge.cost:
                continue
            wait = meter.wait(charge, now, waiter)
            if wait == 0:
                continue
            first = first or charge
            if wait is None:
                return Blocked(charge, charge, None)
            if longest is None or wait > most:
                longest, most = charge, wait
        return None if first is None or longest is None else Blocked(first, longest, most)

    def take(self, charges: Sequence[Charge], now: float) -> None:
        """Take all of the charges."""
        for charge in charges:
            meter, place = charge.meter, charge.place
            state, charge.mark = meter.rule.take(meter.read(place, now), now, charge.cost)
            charge.kind = type(meter.rule)
            meter.write(place, state, now)

    def settle(self, charge: Charge, used: int, now: float) -> None:
        """Count `used` for what was taken by `charge`."""
        meter, place = charge.meter, charge.place
        rule = meter.rule
        if used > charge.cost:
            state, _mark = rule.take(meter.read(place, now), now, used - charge.cost)
            meter.write(place, state, now)
        elif type(rule) is charge.kind and (meter.single or place in meter.states):
            state = rule.give_back(meter.read(place, now), now, charge.cost, used, charge.mark)
            meter.write(place, state, now)
            self.attend(meter, place)

    # Who waits

    def join(self, waiter: RateWaiter, charge: Charge) -> None:
        """Let `waiter` wait for `charge`, behind all who began to wait before it."""
        lane = charge.meter.lanes.setdefault(charge.place, Lane())
        place = len(lane.waiters)
        while place and lane.waiters[place - 1].number > waiter.number:
            place -= 1
        lane.waiters.insert(place, waiter)
        lane.total += charge.cost
        waiter.lane, waiter.charge, waiter.wants = lane, charge, charge.cost
        self.waiting += 1

    def part(self, waiter: RateWaiter) -> None:
        """Let `waiter` wait no more; who comes after it has its turn."""
        charge = waiter.charge
        if charge is not None and self._remove(waiter):
            self.attend(charge.meter, charge.place)

    def _remove(self, waiter: RateWaiter) -> bool:
        """Take `waiter` out of its lane; tell whether it was the first there."""
        lane, charge = waiter.lane, waiter.charge
        waiter.lane = waiter.charge = None
        if lane is None or charge is None or charge.meter.lanes.get(charge.place) is not lane:
            return False  # in a child process, its lane is gone
        first = lane.waiters[0] is waiter
        lane.waiters.remove(waiter)
        lane.total -= waiter.wants
        self.waiting -= 1
        if not lane.waiters:
            del charge.meter.lanes[charge.place]
        return first

    def attend(self, meter: Meter, place: Hashable) -> None:
        """Let the first who waits at `place` look again."""
        while (lane := meter.lanes.get(place)) is not None:
            first = lane.waiters[0]
            if first.poke():
                return
            self._remove(first)  # nobody listens there any more

    def attend_all(self) -> None:
        """Let all who are first look again: the settings have changed."""
        for meter in self.all:
            for place in list(meter.lanes):
                self.attend(meter, place)
