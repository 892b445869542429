"""State of a policy's limits: what each key has taken, and which calls wait for it.

A `Meter` is the state of one limit; `Meters` are all limits of a policy, checked, taken and waited
for under one lock. Calls that wait for the same key form a FIFO queue.

The lock-free success path of `RateLimit` changes states without the lock, in steps that nothing can
interrupt (see `LOCK_FREE`). So a holder of the lock first closes that path, with a slack
that no call fits, and opens it again at the end.

Three things keep that path sound. It looks up only text among text, so no comparison runs user
code: other keys are resolved once, before anything is read, and are represented by an `_Other`. The
state it finds is one number: a bucket with open estimates is stored elsewhere, as an `Account`,
until they are settled. And it is open only outside of the lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall._forks import survives_fork
from seawall.models.rate.buckets import Account, LeakyBucket, SettledBucket, TokenBucket
from seawall.models.rate.caps import Caps
from seawall.models.rate.rule import RateRule
from seawall.models.rate.split import divided, follow
from seawall.models.rate.windows import AlignedWindow
from seawall.policies.rate_limit.reservation import Charge
from seawall.runtime.mutex import Mutex, Nesting

if TYPE_CHECKING:
    from seawall.policies.rate_limit.gate import RateWaiter
    from seawall.policies.rate_limit.limit import Limit
    from seawall.policies.rate_limit.reservation import Charge

SHUT: Final = -1.0  # the slack of a meter whose success path is closed

NEVER: Final = float("-inf")
"""A time before all others; also the state of a bucket from which nothing was taken."""

SHARED: Final = 1024  # number of shared buckets for keys without a state of their own

RESETS: Final = 1024
"""Number of keys whose reset is remembered. Beyond it, all keys count as reset together."""

_SWEEP_FROM: Final = 1024
_SWEEP: Final = 2
_SWEEP_WHEN_FULL: Final = 16


class _Stripe:
    """Place of a state that several keys share."""

    __slots__ = ()


class _Other:
    """Place of the state of a key that is not text, whose comparison may run user code."""

    __slots__ = ("key", "stripe")

    def __init__(self, key: Hashable, stripe: _Stripe | None) -> None:
        self.key = key
        self.stripe = stripe


class KeyedCaps:
    """Caps of one limit, by the place of their key. False while there are none."""

    def __init__(self, beside: Callable[[Hashable], Hashable]) -> None:
        """Use `beside(place)` to find the shared place of that key."""
        self._beside = beside
        self._caps: dict[Hashable, Caps] = {}
        self._unchecked: list[Hashable] = []

    def __bool__(self) -> bool:
        return bool(self._caps)

    def at(self, place: Hashable, now: float) -> Caps | None:
        """Return the caps that apply at `place` now, if any."""
        for where in (place, self._beside(place)):
            caps = self._caps.get(where)
            if caps is not None:
                if caps.rest(now):
                    return caps
                del self._caps[where]
        return None

    def lower(self, place: Hashable, now: float, remaining: int, until: float) -> None:
        """Allow no more than `remaining` to be taken at `place` until `until`."""
        caps = self.at(place, now)
        if caps is None or place not in self._caps:
            caps = self._caps[place] = Caps() if caps is None else caps.copy()
        caps.lower(now, remaining, until)
        self._sweep(now)

    def forget(self, place: Hashable) -> None:
        """Remove the caps at `place`."""
        self._caps.pop(place, None)

    def _sweep(self, now: float) -> None:
        """Check a few places, and remove expired caps."""
        for _ in range(_SWEEP):
            if not self._unchecked:
                self._unchecked = list(self._caps)
            if self._unchecked:
                self.at(self._unchecked.pop(), now)


class Meter:
    """The state and the rule of one limit."""

    def __init__(self, limit: Limit, max_keys: int) -> None:
        self.queues: dict[Hashable, KeyQueue] = {}
        self.states: dict[Hashable, Any] = {}
        self.accounts: dict[Hashable, Account] = {}
        """States of buckets with open estimates. These are not in `states`."""
        self.caps = KeyedCaps(self._beside)
        self._others: dict[Hashable, _Other] = {}
        self._unchecked: list[Hashable] = []
        self._horizon = NEVER
        """The latest time at which a state was evicted. A new one must not start earlier."""
        self._shared: list[_Stripe] = []
        self.step = self._opened = 0.0
        """What a call takes from a plain bucket, and the slack that it has to fit into."""
        self.tat = NEVER
        """The only state, where there is one and it is a plain number, for the success path.

        Until something was taken it is `NEVER`, which fits any clock: the guard brings its own.
        """
        self.since = NEVER  # takings up to this time, under other settings, are not given back
        self._resets: dict[Hashable, float] = {}
        """When the count at a place was reset. Earlier takings are never given back.

        The entry None applies to all places.
        """
        self._origin = 0.0
        self.configure(limit, limit._rule(), max_keys)
        self.reopen()

    def align(self, origin: float) -> None:
        """Let windows begin at multiples of the period from the time `origin` on."""
        self._origin = origin
        if isinstance(self.rule, AlignedWindow):
            self.rule.origin = origin

    def configure(self, limit: Limit, rule: RateRule[Any], max_keys: int) -> None:
        """Apply settings. The states stay as they are."""
        self.limit = limit
        self.rule = rule
        self.align(self._origin)
        self.settled = SettledBucket(rule) if isinstance(rule, TokenBucket) else None
        """The same rule for accounts."""
        self.max_keys = max_keys
        self.plain = False
        """Whether the success path can be used: states are numbers, and all calls cost the same."""
        if (
            isinstance(rule, (TokenBucket, LeakyBucket))
            and isinstance(limit.cost, int)
            and limit.settle is None
        ):
            self.plain = True
            self.step = rule.amount(limit.cost)
            self._opened = rule.tolerance if isinstance(rule, TokenBucket) else self.step
        self.single = self.plain and limit.key is None  # whether the state is `tat`

    def reopen(self) -> None:
        """Open the success path, unless a call waits or the rule is not suitable for it."""
        fit = self.plain and not (self.queues or self.caps or (self.single and self.accounts))
        self.slack = self._opened if fit else SHUT

    @property
    def keys(self) -> int:
        """Number of keys that have a state."""
        return len(self.states) + len(self.accounts)

    def at_rest(self, now: float) -> bool:
        """Return whether no call waits and all that was taken has been refilled."""
        if self.queues or self.keys > _SWEEP_WHEN_FULL:
            return False
        places = [None] if self.single else [*self.states, *self.accounts]
        return not any(self.standing(place, now)[1] for place in places)

    # Places of states

    def place(self, key: Hashable, now: float) -> Hashable:
        """Return the place of the state of `key`: its own, or a shared one if there is no room.

        A shared place is never more lenient: it also counts what the other keys took. While a call
        waits in one of the two places, no call with that key goes to the other.
        """
        own = key if type(key) is str else self._others.get(key)
        if own is not None and (self._holds(own) or own in self.queues):
            return own
        stripe = self._shared[hash(key) % SHARED] if self._shared else None
        if stripe in self.queues:
            return stripe
        if not self._has_room(now):
            self._shared = self._shared or [_Stripe() for _ in range(SHARED)]
            return self._shared[hash(key) % SHARED]
        if type(key) is not str:
            own = self._others.setdefault(key, _Other(key, stripe))
            if not self._holds(own):
                self.states[own] = self.read(own, now)
        return own

    def _holds(self, place: Hashable) -> bool:
        return self.single or place in self.states or place in self.accounts

    def _has_room(self, now: float) -> bool:
        if self.keys >= self.max_keys:
            self._sweep(_SWEEP_WHEN_FULL, now)
        elif self.keys >= _SWEEP_FROM:
            self._sweep(_SWEEP, now)
        return self.keys < self.max_keys

    def _sweep(self, steps: int, now: float) -> None:
        """Check a few states and evict those that are equal to a fresh one.

        No others: a flood of keys must not make the limit forget what a key has taken.
        """
        for _ in range(steps):
            if not self._unchecked:
                self._unchecked = [*self.accounts, *reversed(self.states)]
                if not self._unchecked:
                    return
            place = self._unchecked.pop()
            if self._holds(place) and place not in self.queues:
                rule, state = self.at(place, now)
                if not rule.rest(state, now) and not (self.caps and self.caps.at(place, now)):
                    if isinstance(place, _Other):
                        self._others.pop(place.key, None)
                    self.states.pop(place, None)
                    self._horizon = max(self._horizon, now)

    # States

    def at(self, place: Hashable, now: float) -> tuple[RateRule[Any], Any]:
        """Return the state at `place`, or a new one, and the rule for it."""
        if not self.accounts:
            return self.rule, self.tat if self.single else self.read(place, now)
        account = self.accounts.get(place)
        if account is None or self.settled is None:
            return self.rule, self.read(place, now)
        if account.owed_until > now:
            return self.settled, account
        self._dissolve(place, account)  # all is paid, so nothing of it can be given back
        return self.rule, account.owed_until

    def read(self, place: Hashable, now: float) -> Any:
        """Return the state at `place`, or a new one, unless it is an account."""
        if self.single:
            return self.tat
        state = self.states.get(place)
        if state is not None:
            return state
        stripe = self._beside(place)
        if stripe is not None and self._holds(stripe):
            # While there was no room, this key was counted there.
            account = self.accounts.get(stripe)
            return self.rule.copy(self.states[stripe]) if account is None else account.owed_until
        return self.rule.fresh(max(now, self._horizon))

    def _beside(self, place: Hashable) -> _Stripe | None:
        """Return the place where the key of `place` was counted while it had no room."""
        if isinstance(place, _Other):
            return place.stripe
        return self._shared[hash(place) % SHARED] if self._shared and type(place) is str else None

    def write(self, place: Hashable, state: Any) -> None:
        """Store `state` at `place`."""
        if self.single:
            self.tat = state
        else:
            self.states[place] = state

    def _dissolve(self, place: Hashable, account: Account) -> None:
        """Replace `account` by its debt, as one number."""
        del self.accounts[place]
        self.write(place, account.owed_until)

    def take(self, charge: Charge, now: float) -> None:
        """Take the cost of `charge`."""
        place, settled = charge.place, self.settled
        charge.rule, charge.at = self.rule, now
        if self.caps and (caps := self.caps.at(place, now)):
            caps.take(charge.cost)
        rule, state = self.at(place, now)
        if charge.estimated and settled is not None:
            if rule is not settled:
                state = self.accounts[place] = Account(state)
                self.states.pop(place, None)
            charge.account, charge.mark = settled.estimate(state, now, charge.cost)
        else:
            state, charge.mark = rule.take(state, now, charge.cost)
            if rule is self.rule:
                self.write(place, state)

    def settle(self, charge: Charge, used: int, now: float) -> bool:
        """Settle `charge` with the actual cost `used`. Return whether something is given back."""
        place, given = charge.place, False
        if self.caps and (caps := self.caps.at(place, now)):
            if used >= charge.cost:
                caps.take(used - charge.cost)
            elif self._counts(charge):
                caps.give_back(charge.cost - used, charge.at)
        if used > charge.cost:
            if self.limit.key is not None and not self._holds(place):
                place = self.place(charge.key, now)
            rule, state = self.at(place, now)
            state = rule.owe(state, now, used - charge.cost)
            if rule is self.rule:
                self.write(place, state)
        elif used < charge.cost and self._counts(charge) and self._holds(place):
            given = self._give_back(charge, used, now)
        self._close(charge)
        return given

    def _counts(self, charge: Charge) -> bool:
        """Return whether the taking of `charge` still counts: same rule, and no reset since."""
        if charge.rule is not self.rule:
            return False
        resets = self._resets
        return charge.at >= max(resets.get(None, NEVER), resets.get(charge.place, NEVER))

    def _give_back(self, charge: Charge, used: int, now: float) -> bool:
        place, settled = charge.place, self.settled
        rule, state = self.at(place, now)
        taken = charge.cost
        if charge.account is not None:
            if charge.account is not state or settled is None:
                return False  # it was paid, and its account is gone
            settled.settle(state, now, taken, used, charge.mark)
            return True
        state = rule.give_back(state, now, taken, used, charge.mark)
        if rule is self.rule:
            self.write(place, state)
        return True

    def _close(self, charge: Charge) -> None:
        account, charge.account = charge.account, None
        if account is not None:
            account.end(charge.mark)
            if not account.open and self.accounts.get(charge.place) is account:
                self._dissolve(charge.place, account)

    def update(self, fresh: Meter, now: float) -> None:
        """Take over the settings of `fresh`, which counts nothing yet, and convert the states.

        What was taken under other settings is no longer given back; under the same ones, it is.
        """
        old, rule = self.rule, fresh.rule
        if self._numbers() == fresh._numbers():
            rule = old
        else:
            self._adopt(rule, now)
        self.configure(fresh.limit, rule, fresh.max_keys)

    def follow(self, rule: RateRule[Any], now: float) -> None:
        """Follow another rule of the same kind, and convert the states."""
        self._adopt(rule, now)
        self.configure(self.limit, rule, self.max_keys)

    def divide(self, pods: int, now: float) -> None:
        """Follow the rule for one of `pods`, and count the gain as taken."""
        whole = self.limit._rule()
        if isinstance(whole, AlignedWindow):
            whole.origin = self._origin
        self.follow(follow(divided(whole, pods), self.rule, now), now)

    def _adopt(self, rule: RateRule[Any], now: float) -> None:
        old = self.rule
        self.since = now
        for place, account in list(self.accounts.items()):
            self._dissolve(place, account)
        if self.single and self.tat > NEVER:
            self.tat = rule.adopt(self.tat, old, now)
        elif self.single and rule.rest(fresh := rule.fresh(now), now):
            self.tat = fresh
        for place, state in self.states.items():
            self.states[place] = rule.adopt(state, old, now)

    def _numbers(self) -> tuple[Any, ...]:
        return self.rule.rate, self.rule.capacity, self.rule.debt, self.limit.cost

    # Queries

    def wait(self, charge: Charge, now: float, waiter: RateWaiter | None) -> float | None:
        """Return how long `charge` waits behind all earlier waiters; None if it never fits."""
        rule, state = self.at(charge.place, now)
        queue = self.queues.get(charge.place) if self.queues else None
        ahead = 0 if queue is None else queue.ahead(waiter)
        wait = rule.wait(state, now, charge.cost, ahead)
        if self.caps and wait is not None and (caps := self.caps.at(charge.place, now)):
            wait = max(wait, caps.wait(now, ahead + charge.cost))
        # An earlier waiter could go but has not gone yet: stay behind it.
        return 1.0 if ahead and wait == 0 else wait

    def standing(self, place: Hashable, now: float) -> tuple[int, float]:
        """Return what is left at `place`, and the time until all takings have expired."""
        rule, state = self.at(place, now)
        left, rest = rule.left(state, now), rule.rest(state, now)
        if self.caps and (caps := self.caps.at(place, now)):
            return caps.left(now, left), max(rest, caps.rest(now))
        return left, rest

    def refill(self, place: Hashable, now: float) -> tuple[int, float]:
        """Return what is left at `place`, and the time until there is more.

        If there is never more, the time until nothing is owed.
        """
        left, rest = self.standing(place, now)
        rule, state = self.at(place, now)
        wait = rule.wait(state, now, left + 1)
        if wait is None:
            return left, rest
        if self.caps and (caps := self.caps.at(place, now)):
            wait = max(wait, caps.wait(now, left + 1))
        return left, wait

    def lower(self, key: Hashable, now: float, remaining: int, until: float) -> None:
        """Allow no more than `remaining` to be taken for `key` until `until`."""
        place = key if self.limit.key is None else self.place(key, now)
        if not self._holds(place):
            self.states[place] = self.read(place, now)
        self.caps.lower(place, now, remaining, until)

    def reset(self, key: Hashable, now: float) -> Hashable:
        """Reset the count of `key`, and return the place of its state.

        A key in a shared place keeps its state: other keys are counted there too.
        """
        place = key if self.limit.key is None else self.place(key, now)
        if isinstance(place, _Stripe):
            return place
        self.accounts.pop(place, None)
        self.caps.forget(place)
        self.write(place, self.rule.fresh(max(now, self._horizon)))
        if len(self._resets) >= RESETS and place not in self._resets:
            self._resets = {None: max(self._resets.values())}
        self._resets[place] = now
        return place


class KeyQueue:
    """The calls that wait for one key of one limit, first come, first served."""

    __slots__ = ("total", "waiters")

    def __init__(self) -> None:
        # Leaving from the middle is as cheap as leaving from the front.
        self.waiters: OrderedDict[RateWaiter, None] = OrderedDict()
        self.total = 0  # the cost of all waiters together

    @property
    def first(self) -> RateWaiter:
        """The waiter whose turn is next."""
        return next(iter(self.waiters))

    def ahead(self, waiter: RateWaiter | None) -> int:
        """Return the total cost of the waiters before `waiter`; of all, if None."""
        if waiter is None or waiter.number > next(reversed(self.waiters)).number:
            return self.total
        ahead = 0
        for other in self.waiters:
            if other.number >= waiter.number:
                break
            ahead += other.cost
        return ahead

    def join(self, waiter: RateWaiter) -> None:
        """Insert `waiter` behind all that began to wait before it."""
        newer = []
        for other in reversed(self.waiters):
            if other.number < waiter.number:
                break
            newer.append(other)
        self.waiters[waiter] = None
        self.total += waiter.cost
        if newer:
            for other in reversed(newer):
                self.waiters.move_to_end(other)


class Blocked(NamedTuple):
    """Why a call cannot go now."""

    first: Charge  # the first limit that is exceeded, in the order in which they were given
    longest: Charge  # the limit with the longest wait
    wait: float | None  # minimum wait in microseconds; None if the call can never go

    @classmethod
    def by(cls, waits: Sequence[tuple[Charge, float | None]]) -> Blocked | None:
        """Return what these charges and their waits mean for a call; None if there are none."""
        if not waits:
            return None
        for charge, wait in waits:
            if wait is None:
                return cls(charge, charge, None)
        longest, most = max(waits, key=lambda one: one[1] or 0.0)
        return cls(waits[0][0], longest, most)


class Meters:
    """The limits of one policy, checked and taken together: `with meters.mutex, meters:`.

    Entering the block closes the lock-free success path; leaving it opens the path again.
    """

    def __init__(self, meters: Sequence[Meter], max_waiting: int) -> None:
        self.all = tuple(meters)
        self.max_waiting = max_waiting
        self.waiting = 0
        self.numbers = count()  # sequence numbers of waiters: a lower number began to wait earlier
        self._latest = NEVER
        self._nesting = Nesting()
        self.mutex = Mutex()
        survives_fork(self)

    def __enter__(self) -> None:
        self._nesting.enter()
        for meter in self.all:
            meter.slack = SHUT

    def __exit__(self, *exc: object) -> None:
        # A nested section (a signal handler, a key's own comparison) opens nothing.
        if self._nesting.leave():
            for meter in self.all:
                if meter.plain:
                    meter.reopen()

    def do(self, work: Callable[[], None]) -> None:
        """Run `work` under the lock, or slightly later if this thread holds it: see `Mutex`."""

        def shut() -> None:
            with self:
                work()

        self.mutex.do(shut)

    def _after_fork(self) -> None:
        """Reset in a child process, which has none of the waiters of its parent."""
        self.mutex = Mutex()
        self._nesting = Nesting()
        self.waiting = 0
        for meter in self.all:
            meter.queues.clear()
            meter.reopen()

    def look(
        self, charges: Sequence[Charge], now: float, waiter: RateWaiter | None = None
    ) -> Blocked | None:
        """Return why the charges cannot all be taken now; None if they can."""
        for charge in charges:
            meter = charge.meter
            # Look up the place each time, since keys gain and lose room; a waiter keeps its place.
            if meter.limit.key is not None and (waiter is None or waiter.charge is not charge):
                charge.place = meter.place(charge.key, now)
            if meter.queues:
                self.remove_late(charge, now, waiter)
        waits = [(one, one.meter.wait(one, now, waiter)) for one in charges if one.cost]
        return Blocked.by([(charge, wait) for charge, wait in waits if wait != 0])

    def take(self, charges: Sequence[Charge], now: float) -> None:
        """Take all of the charges."""
        self._latest = max(self._latest, now)
        for charge in charges:
            if charge.cost:
                charge.meter.take(charge, now)

    def settle(self, charge: Charge, used: int, now: float) -> None:
        """Settle `charge` with the actual cost `used`."""
        if charge.meter.settle(charge, used, max(now, self._latest)):
            self.attend(charge.meter, charge.place)

    # Waiting

    def join(self, waiter: RateWaiter, charge: Charge) -> None:
        """Put `waiter` into the queue of `charge`, behind all that began to wait before it."""
        queue = charge.meter.queues.get(charge.place) or KeyQueue()
        waiter.cost = charge.cost
        queue.join(waiter)
        # Nothing is called from here on: a signal cannot leave a queue without a waiter.
        waiter.queue, waiter.charge = queue, charge
        charge.meter.queues[charge.place] = queue
        self.waiting += 1

    def leave_queue(self, waiter: RateWaiter) -> None:
        """Remove `waiter` from its queue and wake the next one."""
        charge = waiter.charge
        if charge is not None and self._remove(waiter):
            self.attend(charge.meter, charge.place)

    def _remove(self, waiter: RateWaiter) -> bool:
        """Remove `waiter` from its queue. Return whether it was the first."""
        queue, charge = waiter.queue, waiter.charge
        waiter.queue = waiter.charge = None
        if queue is None or charge is None or charge.meter.queues.get(charge.place) is not queue:
            return False  # in a child process its queue is gone
        first = queue.first is waiter
        del queue.waiters[waiter]
        queue.total -= waiter.cost
        self.waiting -= 1
        if not queue.waiters:
            del charge.meter.queues[charge.place]
        return first

    def remove_late(self, charge: Charge, now: float, waiter: RateWaiter | None) -> None:
        """Remove late waiters at the front: a blocked event loop must not block others."""
        meter, place = charge.meter, charge.place
        passed = False
        while (queue := meter.queues.get(place)) is not None:
            first = queue.first
            if first is waiter or not first.is_late(now):
                break
            self._remove(first)
            passed = True
        if passed:
            self.attend(meter, place)

    def attend(self, meter: Meter, place: Hashable) -> None:
        """Wake the first waiter at `place`."""
        while (queue := meter.queues.get(place)) is not None:
            first = queue.first
            if first.wake():
                return
            self._remove(first)  # its caller is gone

    def attend_all(self) -> None:
        """Wake the first waiter of each queue: the settings have changed."""
        for meter in self.all:
            for place in list(meter.queues):
                self.attend(meter, place)
