"""Memory, the store and the pure rules come to the same verdicts, for every algorithm.

One machine drives all three with the same random history: calls of several users under a limit of
their own and one for all, some refused further in, reservations settled or cancelled later, batches
granted and given back in part, takings of what is left, resets, words of vendors, other numbers,
time, and a server's clock that is set back. The store is flushed at every step, and what it refused
is not remembered (that has tests of its own). Mistakes in the script are found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import redis
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    rule,
    run_state_machine_as_test,
)

from seawall import Breaker, CircuitOpen, Guard, RateLimit, RateLimited
from seawall.clock import VirtualClock
from seawall.limits import Limit, Reservation
from seawall.models.rate.buckets import Account, SettledBucket, TokenBucket
from seawall.models.rate.caps import Caps
from seawall.policies.rate_limit.reservation import Charge
from seawall.redis.limits.wire import ScriptKeys, TakeRequest, read
from seawall.redis.store import RedisStore
from seawall.runtime.background import run_in
from tests.redis.support import FrozenClock, mutate
from tests.support import new_guard

ALGORITHMS = ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]
USERS = st.sampled_from(["ann", "ann", "ann", "bob"])
USED = st.integers(0, 6) | st.sampled_from([9, 40, 10**12])
"""What a call has used: often more than it took, and sometimes more than can be true."""
START = 1_000_000.0
"""Seconds on all clocks at the beginning."""


class PatientClock(VirtualClock):
    """A virtual clock that stands still while a thread waits for the store."""

    def wait(self, lock: Any, seconds: float | None) -> bool:
        """Wait for the answer, in real time."""
        del seconds
        return bool(lock.acquire(timeout=20))


class Order(NamedTuple):
    """What a call is about."""

    user: str
    cost: int
    used: int


def user_of(order: Order) -> str:
    """Be the key of a limit."""
    return order.user


def cost_of(order: Order) -> int:
    """Be the cost of a limit."""
    return order.cost


def used_of(used: int) -> int:
    """Be what settles a limit."""
    return used


class Said(NamedTuple):
    """What came of a call."""

    admitted: bool
    limit: str = ""
    retry_after: float | None = 0.0


class Pure:
    """The rules and nothing else: one limit and key each, all taken or none."""

    def __init__(self, limits: list[Limit]) -> None:
        self.limits = limits
        self.rules = [limit._rule() for limit in limits]
        self.states: dict[tuple[int, str | None], Any] = {}
        self.caps: dict[tuple[int, str | None], Caps] = {}
        self.resets: dict[tuple[int, str | None], float] = {}
        self.latest = 0.0

    def places(self, user: str) -> list[tuple[int, str | None]]:
        return [(0, user), (1, None)]

    def at(self, place: tuple[int, str | None], now: float) -> tuple[Any, Any]:
        """Return the rule and the state, an account where estimates are open."""
        rule_ = self.rules[place[0]]
        state = self.states.setdefault(place, rule_.fresh(now))
        if not isinstance(state, Account):
            return rule_, state
        if state.owed_until > now:
            return SettledBucket(rule_), state
        self.states[place] = state.owed_until
        return rule_, state.owed_until

    def cap(self, place: tuple[int, str | None]) -> Caps:
        return self.caps.setdefault(place, Caps())

    def look(self, user: str, costs: list[int], now: float) -> Said:
        first, most = "", 0.0
        for place, cost in zip(self.places(user), costs, strict=True):
            if not cost:
                continue
            rule_, state = self.at(place, now)
            wait = rule_.wait(state, now, cost)
            name = self.limits[place[0]].name
            if wait is None:
                return Said(admitted=False, limit=name, retry_after=None)
            wait = max(wait, self.cap(place).wait(now, cost))
            if wait:
                first, most = first or name, max(most, wait)
        return Said(admitted=not first, limit=first, retry_after=most)

    def take(self, user: str, costs: list[int], now: float, estimated: list[bool]) -> list[Any]:
        """Take without asking; return what it takes to settle it."""
        self.latest = max(self.latest, now)
        taken = []
        for place, cost, estimate in zip(self.places(user), costs, estimated, strict=True):
            if not cost:
                taken.append((place, 0, now, None, now, self.rules[place[0]]))
                continue
            rule_, state = self.at(place, now)
            self.cap(place).take(cost)
            account = None
            if estimate and isinstance(self.rules[place[0]], TokenBucket):
                if not isinstance(state, Account):
                    state = self.states[place] = Account(state)
                account, mark = SettledBucket(self.rules[place[0]]).estimate(state, now, cost)
            else:
                self.states[place], mark = rule_.take(state, now, cost)
            taken.append((place, cost, mark, account, now, self.rules[place[0]]))
        return taken

    def settle(self, taken: list[Any], used: list[int | None], now: float) -> None:
        for place, cost, mark, account, at, by in taken:
            actual = used[place[0]]
            if actual is None:
                continue
            if by is not self.rules[place[0]] or at < self.resets.get(place, 0.0):
                actual = max(actual, cost)  # taken by other numbers, or forgotten
            later = max(now, self.latest)
            rule_, state = self.at(place, later)
            if actual > cost:
                # What cannot be true is cut by the policy, wherever the limit is kept.
                actual = min(actual, cost + self.rules[place[0]].overdraft)
                self.cap(place).take(actual - cost)
                self.states[place] = rule_.owe(state, later, actual - cost)
            elif actual < cost:
                self.cap(place).give_back(cost - actual, at)
                self._give_back(rule_, state, place, (cost, actual, mark, account), later)
            if account is not None:
                account.end(mark)
                if not account.open and self.states[place] is account:
                    self.states[place] = account.owed_until

    def _give_back(
        self, rule_: Any, state: Any, place: tuple[int, str | None], taking: Any, now: float
    ) -> None:
        cost, actual, mark, account = taking
        if account is not None:
            if account is state:
                rule_.settle(state, now, cost, actual, mark)
        elif isinstance(state, Account):
            rule_.give_back(state, now, cost, actual, mark)
        else:
            self.states[place] = rule_.give_back(state, now, cost, actual, mark)

    def lower(self, place: tuple[int, str | None], now: float, left: int, until: float) -> None:
        self.cap(place).lower(now, left, until)

    def reset(self, place: tuple[int, str | None], now: float) -> None:
        self.states[place] = self.rules[place[0]].fresh(now)
        self.caps.pop(place, None)
        self.resets[place] = now

    def update(self, limits: list[Limit], now: float) -> None:
        self.limits = limits
        for number, limit in enumerate(limits):
            old, new = self.rules[number], limit._rule()
            if new.rate == old.rate:
                continue
            self.rules[number] = new
            for place, state in self.states.items():
                if place[0] == number:
                    kept = state.owed_until if isinstance(state, Account) else state
                    self.states[place] = new.adopt(kept, old, now)

    def peek(self, user: str, costs: list[int], now: float) -> Any:
        said = self.look(user, costs, now)
        shown = []
        for place in self.places(user):
            rule_, state = self.at(place, now)
            name = self.limits[place[0]].name
            if said.admitted or name == said.limit:
                left = self.cap(place).left(now, rule_.left(state, now))
                rest = max(rule_.rest(state, now), self.cap(place).rest(now))
                shown.append((left, name, said.retry_after, rest))
        return min(shown, key=lambda one: one[0])


class Machine(RuleBasedStateMachine):
    """Three back ends, one history."""

    store: RedisStore
    frozen: FrozenClock
    algorithms: list[str] = ALGORITHMS
    serial = 0
    steps = 0

    reservations = Bundle("reservations")
    grants = Bundle("grants")

    @initialize(
        algorithms=st.runner().flatmap(
            lambda machine: st.tuples(*[st.sampled_from(machine.algorithms)] * 2)
        ),
        rates=st.sampled_from([("3/s", "5/2s"), ("4/300ms", "7/s"), ("2/s", "2/s")]),
        settles=st.tuples(st.booleans(), st.booleans()),
        debt=st.sampled_from([None, 0.0, 0.4, 3.0]),
    )
    def begin(
        self,
        algorithms: tuple[str, str],
        rates: tuple[str, str],
        settles: tuple[bool, bool],
        debt: float | None,
    ) -> None:
        Machine.serial += 1
        self.clock = PatientClock(START)
        self.frozen.set(int(START * 1e6))
        self.ahead = 0
        self.algorithms_, self.rates, self.settles = algorithms, rates, settles
        self.debt = debt
        self.wait = 1.0
        limits = self.limits(rates)
        self.pure = Pure(limits)
        self.memory = RateLimit(*limits)
        self.shared = RateLimit(*limits, shared=self.store, name=f"machine-{Machine.serial}")
        self.isolated = Breaker(consecutive=1)
        self.isolated.isolate()
        self.guards = [new_guard(p, clock=self.clock) for p in (self.memory, self.shared)]
        self.shut = [
            new_guard(p, self.isolated, clock=self.clock) for p in (self.memory, self.shared)
        ]

    def limits(self, rates: tuple[str, ...]) -> list[Limit]:
        return [
            Limit(
                rates[n],
                algorithm=self.algorithms_[n],  # type: ignore[arg-type]
                key=user_of if n == 0 else None,
                cost=cost_of,
                settle=used_of if self.settles[n] else None,
                max_debt=self.debt,
                name=("user", "all")[n],
            )
            for n in (0, 1)
        ]

    def teardown(self) -> None:
        if hasattr(self, "guards"):
            for guard in (*self.guards, *self.shut):
                guard.close()

    @property
    def us(self) -> float:
        return float(self.frozen.now_us + self.ahead)

    def flush(self) -> None:
        """Let all that was posted be done, and what is known be forgotten."""
        flush(self.store)
        assert self.shared._sharing is not None
        self.shared._sharing.exhausted.clear()

    def same(self, pure: Said, memory: Said, shared: Said) -> None:
        Machine.steps += 1
        wait = pure.retry_after
        self.wait = wait or self.wait
        if wait is not None:
            now = self.clock.now()
            wait = max(0.0, (self.us + wait) / 1e6 - now) if wait else 0.0
        assert memory == shared == pure._replace(retry_after=wait)

    @rule(us=st.sampled_from([1, 40_000, 142_857, 250_000, 333_334, 400_000, 1_000_000]))
    def time_passes(self, us: int) -> None:
        self.frozen.advance(us)
        self.clock.advance_to(self.us / 1e6)

    @rule(us=st.sampled_from([1, 300_000, 3_600_000_000]))
    def the_servers_clock_is_set_back(self, us: int) -> None:
        self.peek("ann", 1)  # so that the store has heard of the time before, and of that after
        self.frozen.advance(-us)
        self.ahead += us
        self.peek("ann", 1)

    @rule(numbers=st.tuples(st.integers(1, 8), st.integers(1, 8)))
    def other_numbers(self, numbers: tuple[int, int]) -> None:
        both = zip(numbers, self.rates, strict=True)
        limits = self.limits(tuple(f"{number}/{rate.split('/')[1]}" for number, rate in both))
        for policy in (self.memory, self.shared):
            policy.update(limits=limits)
        self.pure.update(limits, self.us)
        for user in ("ann", "bob"):  # the store translates what it kept when it is next asked
            self.peek(user, 1)

    @rule(less=st.integers(0, 1))
    def the_wait_passes_that_was_told(self, less: int) -> None:
        self.time_passes(int(self.wait) - less)

    @rule(
        user=USERS,
        cost=st.integers(0, 4),
        used=USED,
    )
    def call(self, user: str, cost: int, used: int) -> None:
        order = Order(user, cost, used)
        said = [said_by(guard, order) for guard in self.guards]
        expected = self.pure.look(user, [cost, cost], self.us)
        if expected.admitted:
            taken = self.pure.take(user, [cost, cost], self.us, list(self.settles))
            actual = [used if settles else None for settles in self.settles]
            self.pure.settle(taken, actual, self.us)
        self.same(expected, *said)
        self.flush()

    @rule(user=USERS, cost=st.integers(1, 4))
    def refused_further_in(self, user: str, cost: int) -> None:
        order = Order(user, cost, 0)
        said = [said_by(guard, order) for guard in self.shut]
        expected = self.pure.look(user, [cost, cost], self.us)
        if expected.admitted:
            taken = self.pure.take(user, [cost, cost], self.us, list(self.settles))
            self.pure.settle(taken, [0, 0], self.us)
        self.same(expected, *said)
        self.flush()

    @rule(target=reservations, user=USERS, cost=st.integers(1, 4))
    def reserve(self, user: str, cost: int) -> Any:
        said, made = [], []
        for limit in (self.memory, self.shared):
            try:
                made.append(limit.reserve(Order(user, cost, 0)))
                said.append(Said(admitted=True))
            except RateLimited as error:
                said.append(Said(admitted=False, limit=error.limit, retry_after=error.retry_after))
        expected = self.pure.look(user, [cost, cost], self.us)
        self.same(expected, *said)
        if not expected.admitted:
            return multiple()
        # Both limits have a cost function, so a reservation estimates both.
        return self.pure.take(user, [cost, cost], self.us, [True, True]), made

    @rule(reservation=consumes(reservations), used=USED)
    def settle(self, reservation: tuple[list[Any], list[Reservation]], used: int) -> None:
        taken, made = reservation
        self.pure.settle(taken, [used, used], self.us)
        for one in made:
            one.settle(used)
        self.flush()
        self.peek("ann", 1)

    @rule(reservation=consumes(reservations))
    def cancel(self, reservation: tuple[list[Any], list[Reservation]]) -> None:
        taken, made = reservation
        self.pure.settle(taken, [0, 0], self.us)
        for one in made:
            one.cancel()
        self.flush()
        self.peek("ann", 1)

    @rule(
        target=grants,
        place=st.sampled_from([(0, "ann"), (0, "bob"), (1, None)]),
        want=st.integers(1, 6),
        least=st.integers(1, 3),
    )
    def grant(self, place: tuple[int, str | None], want: int, least: int) -> Any:
        want = max(want, least)
        number, key = place
        rule_, state = self.pure.at(place, self.us)
        left = self.pure.cap(place).left(self.us, rule_.left(state, self.us))
        cost = max(least, min(left, want))
        costs = [cost if n == number else 0 for n in (0, 1)]
        expected = self.pure.look(key or "ann", costs, self.us)
        terms, meters = self.terms, self.memory._meters
        charge = Charge(meters.all[number], key, cost, estimated=False)
        names = ScriptKeys(terms)
        question = f'[["g",{number + 1},{names.state(number + 1, key)},{want},{least}]]'
        reply = self.store._core.call("rates", names.keys, (terms.settings, question))
        _now, (answer,) = read(reply, 1)
        with meters.mutex, meters:
            blocked = meters.look([charge], self.us)
            if blocked is None:
                meters.take([charge], self.us)
        assert (blocked is None) == expected.admitted
        if blocked is not None:
            wait = -1 if expected.retry_after is None else int(expected.retry_after)
            assert answer == f"0,{wait}"
            return multiple()
        taken, mark = map(int, answer.split(","))
        assert taken == cost
        item = TakeRequest(terms, ((number + 1, key, cost),), frozenset(), "")
        item.marks = [mark]
        return self.pure.take(key or "ann", costs, self.us, [False, False]), charge, item

    @rule(grant=consumes(grants), used=st.integers(0, 6))
    def give_back(self, grant: tuple[list[Any], Charge, TakeRequest], used: int) -> None:
        taken, charge, item = grant
        number = item.takings[0][0] - 1
        actual = [min(used, item.takings[0][2]) if n == number else None for n in (0, 1)]
        self.pure.settle(taken, actual, self.us)
        self.memory._meters.settle(charge, actual[number] or 0, self.us)
        names = ScriptKeys(self.terms)
        question = item.settle(names, actual)
        self.store._core.call("rates", names.keys, (self.terms.settings, f"[{question}]"))
        self.peek("ann", 1)

    @property
    def terms(self) -> Any:
        assert self.shared._sharing is not None
        share: Any = self.shared._sharing.share
        return share.terms

    @rule(
        user=USERS,
        limit=st.sampled_from(["user", "all"]),
        remaining=st.integers(0, 4),
        us=st.sampled_from([0, 100_000, 700_000, 3_000_000]),
    )
    def lower(self, user: str, limit: str, remaining: int, us: int) -> None:
        for policy in (self.memory, self.shared):
            policy.lower(remaining, us / 1e6, Order(user, 1, 1), limit=limit)
        place = (0, user) if limit == "user" else (1, None)
        most = 60e6 if self.debt is None else self.debt * 1e6
        self.pure.lower(place, self.us, remaining, self.us + min(us, most))
        self.flush()

    @rule(user=USERS, cost=st.integers(1, 4))
    def peek(self, user: str, cost: int) -> None:
        memory, shared = (p.peek(Order(user, cost, 0)) for p in (self.memory, self.shared))
        left, name, wait, rest = self.pure.peek(user, [cost, cost], self.us)
        assert (memory.left, memory.limit, memory.reset_after) == (left, name, rest / 1e6)
        assert memory == shared
        assert (memory.retry_after is None) == (wait is None)


class MachineByHand(Machine):
    """The same, and takings of what is left, and resets.

    Apart, since with more rules a mistake in one of them is found less often.
    """

    @rule(user=USERS, most=st.integers(0, 9))
    def take_up_to(self, user: str, most: int) -> None:
        order = Order(user, 1, 1)
        memory, shared = (p.take_up_to(most, order) for p in (self.memory, self.shared))
        taken = most
        for place in self.pure.places(user):
            rule_, state = self.pure.at(place, self.us)
            taken = min(taken, self.pure.cap(place).left(self.us, rule_.left(state, self.us)))
        if self.pure.look(user, [taken, taken], self.us).admitted:
            self.pure.take(user, [taken, taken], self.us, [False, False])
        else:
            taken = 0
        assert memory == shared == taken
        self.peek(user, 1)

    @rule(user=USERS, limit=st.sampled_from([None, "user", "all"]))
    def reset(self, user: str, limit: str | None) -> None:
        for policy in (self.memory, self.shared):
            policy.reset(Order(user, 1, 1), limit=limit)
        for place in self.pure.places(user):
            if limit in {None, self.pure.limits[place[0]].name}:
                self.pure.reset(place, self.us)
        self.peek(user, 1)


class MachineOfReservations(Machine):
    """Calls, reservations and time alone: for mistakes that need several of them in a row."""

    the_servers_clock_is_set_back = other_numbers = refused_further_in = None  # type: ignore[assignment]
    grant = give_back = lower = None  # type: ignore[assignment]


def said_by(guard: Guard, order: Order) -> Said:
    """Return what a guard says to a call."""
    try:
        guard.call(lambda order: order.used, order)
    except RateLimited as error:
        return Said(admitted=False, limit=error.limit, retry_after=error.retry_after)
    except CircuitOpen:
        pass
    return Said(admitted=True)


def flush(store: RedisStore) -> None:
    """Wait until all that was posted is done."""
    posts = store._core._send_queue
    if posts._waiting or posts._asked or posts._sender is not None:
        run_in(store._core._background, posts.flush, 10.0)


@pytest.fixture
def machine(store: RedisStore, client: redis.Redis) -> Iterator[type[Machine]]:
    """Return the machine, with a server whose clock stands still."""
    Machine.store = store
    Machine.frozen = FrozenClock(store, client, int(START * 1e6))
    yield Machine
    client.delete(Machine.frozen._key)


def run(machine: type[Machine], examples: int, *phases: Phase) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=16,
            deadline=None,
            report_multiple_bugs=False,
            phases=phases or tuple(Phase),
        ),
    )


@pytest.mark.timeout(180)
def test_memory_store_and_rules_agree(machine: type[Machine]) -> None:
    """The same history has the same verdicts, over 500 examples of all algorithms."""
    Machine.steps = 0
    run(machine, 500)
    assert Machine.steps > 1000


@pytest.mark.timeout(180)
@pytest.mark.usefixtures("machine")
def test_resets_and_takings_of_what_is_left_agree() -> None:
    """Whatever was taken, settled and granted before, over 300 examples."""
    run(MachineByHand, 300)


MUTANTS: dict[str, tuple[str, str, str]] = {
    "all or nothing": (
        "token_bucket",
        "if first then return refusal(first, longest, wait), true end",
        "if first == 1 then return refusal(first, longest, wait), true end",
    ),
    "the window before": (
        "sliding_counter",
        "state.begin, state.used, state.before = state.begin + limit.period, 0, state.used",
        "state.begin, state.used, state.before = state.begin + limit.period, 0, 0",
    ),
    "what was too much in the window before": (
        "sliding_counter",
        "state.begin, state.used, min(state.before, most)",
        "state.begin, state.used, state.before",
    ),
    "a debt without bound": (
        "token_bucket",
        "state.owed = min(state.owed, max(owed, now + limit.tolerance + limit.debt))",
        "state.owed = state.owed",
    ),
    "a debt that is forgotten": (
        "leaky_bucket",
        "state.owed = min(state.owed, max(owed, now + limit.tolerance + limit.debt))",
        "state.owed = min(state.owed, now + limit.tolerance + limit.debt)",
    ),
    "what was paid meanwhile": (
        "token_bucket",
        "local unpaid = min(unused, owed, account.lows[first] or owed)",
        "local unpaid = min(unused, owed)",
    ),
    "what a log gives back": (
        "sliding_log",
        "state.used = state.used - unused",
        "state.used = state.used",
    ),
    "a clock that is set back": (
        "fixed_window",
        "if now < latest then ahead, now = ahead + latest - now, latest end",
        "if now < latest then now = latest end",
    ),
    "other numbers": (
        "leaky_bucket",
        "state.owed = now + over(units, state.time * limit.units)",
        "state.owed = now + over(units, state.time)",
    ),
    "what is granted": (
        "sliding_log",
        "local granted = min(left_of(limit, state), want)",
        "local granted = want",
    ),
    "what is left of all": (
        "sliding_log",
        "if charge[5] == 1 then most = min(most, left_of(at(charge[1], charge[2]))) end",
        "if charge[5] == 1 then most = min(most, left_of(at(charge[1], charge[2]))); break end",
    ),
    "a vendor's word": (
        "fixed_window",
        "if wait >= 0 and state.caps then",
        "if wait > 0 and state.caps then",
    ),
}


FOUND_BY = {
    "what is left of all": MachineByHand,
    "what was paid meanwhile": MachineOfReservations,
}
"""The machines of mistakes that `Machine` cannot find, or only by luck."""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_in_the_script_is_found(
    name: str, machine: type[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a mistake in one line of the script, the verdicts differ."""
    algorithm, before, after = MUTANTS[name]
    mutate(monkeypatch, "rates", before, after)
    monkeypatch.setattr(Machine, "algorithms", [algorithm])
    with pytest.raises(AssertionError):
        run(FOUND_BY.get(name, machine), 2000, Phase.generate)
