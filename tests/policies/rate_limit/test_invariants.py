"""What RateLimit always keeps to, under random programs and orders; and that safeguards matter."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import (
    Bulkhead,
    BulkheadFull,
    DeadlineExceeded,
    RateLimit,
    RateLimited,
    deadline,
)
from seawall.clock import VirtualClock
from seawall.limits import Limit
from seawall.models.rate.buckets import TokenBucket
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.rate_limit import policy as rate_limit
from seawall.policies.rate_limit.gate import RateGate, RateWaiter
from seawall.policies.rate_limit.meters import SHUT, Meter, Meters
from seawall.testing import run_virtual, virtual_time
from tests.support import (
    SEEDS,
    examples,
    falsified,
    let_pass,
    new_guard,
    quarters,
    settled,
    without_addresses,
)

QUARTERS = quarters(12)


# A day of calls


class Visit(NamedTuple):
    """One call: when it comes, for whom, what it costs and really uses, and what disturbs it."""

    at: float
    user: str
    cost: int
    used: int
    lasts: float
    cancel: tuple[float, int] | None
    within: float | None
    refused: bool


class Day(NamedTuple):
    """Calls under a limit for each user and one for all."""

    algorithm: str
    settled: bool
    max_wait: float
    max_waiting: int
    visits: list[Visit]
    seed: int


VISITS = st.builds(
    Visit,
    at=QUARTERS,
    user=st.sampled_from(["ann", "bob"]),
    cost=st.integers(1, 3),
    used=st.integers(0, 3),
    lasts=quarters(4),
    cancel=st.none() | st.tuples(QUARTERS, st.integers(0, 3)),
    within=st.none() | QUARTERS,
    refused=st.booleans(),
)
DAYS = st.builds(
    Day,
    algorithm=st.sampled_from(["token_bucket", "fixed_window", "sliding_log", "leaky_bucket"]),
    settled=st.booleans(),
    max_wait=st.sampled_from([0.0, 1.0, 4.0, float("inf")]),
    max_waiting=st.integers(1, 6),
    visits=st.lists(VISITS, min_size=1, max_size=14),
    seed=SEEDS,
)
USER, ALL = 3, 5


class Went(NamedTuple):
    """A call that began: whose it was, and what it used."""

    number: int
    user: str
    at: float
    cost: int


class Office:
    """Carries out the calls of a day."""

    def __init__(self, day: Day) -> None:
        def cost(visit: Visit) -> int:
            return visit.cost

        settle = (lambda visit: min(visit.used, visit.cost)) if day.settled else None
        options: dict[str, Any] = {"algorithm": day.algorithm, "cost": cost, "settle": settle}
        self.day = day
        self.limit = RateLimit(
            Limit(f"{USER}/s", key=lambda visit: visit.user, name="user", **options),
            Limit(f"{ALL}/2s", name="all", **options),
            max_wait=day.max_wait,
            max_waiting=day.max_waiting,
        )
        self.guard = new_guard(self.limit)
        self.full = Bulkhead(1)
        self.refusing = new_guard(self.limit, self.full)
        self.went: list[Went] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.broken: list[str] = []

    def begin(self, number: int, visit: Visit) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.visit(number, visit))
        self.tasks.append(task)
        if visit.cancel is not None:
            after, turns = visit.cancel
            loop.call_later(after, self.cancel, task, turns)

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
        else:
            task.cancel()

    async def visit(self, number: int, visit: Visit) -> None:
        loop = asyncio.get_running_loop()

        async def work(visit: Visit) -> Visit:
            used = min(visit.used, visit.cost) if self.day.settled else visit.cost
            place = len(self.went)
            self.went.append(Went(number, visit.user, loop.time(), visit.cost))
            await let_pass(visit.lasts)
            # Only now it is known what it used; who is cancelled before keeps the estimate.
            self.went[place] = self.went[place]._replace(cost=used)
            return visit

        guard = self.refusing if visit.refused else self.guard
        with deadline(99.0 if visit.within is None else visit.within):
            try:
                await guard.acall(work, visit)
            except (RateLimited, DeadlineExceeded, BulkheadFull):
                pass

    def look(self) -> None:
        meters = self.limit._meters
        if meters.waiting > self.day.max_waiting:
            self.broken.append(f"{meters.waiting} wait")
        now = whole_microseconds(asyncio.get_running_loop().time())
        with meters.mutex, meters:
            for lane in [lane for meter in meters.all for lane in meter.queues.values()]:
                first = lane.first
                if meters.look(first._charges, now, first) is None:
                    self.broken.append("a lost wake-up: somebody waits who could go")


def bound(went: list[Went], algorithm: str, limit: int, period: float) -> None:
    """Check the bound of the algorithm over what was really used, in each stretch of time."""
    went = [one for one in went if one.cost]
    for first, begin in enumerate(went):
        total = Fraction(0)
        for one in went[first:]:
            total += one.cost
            length = Fraction(one.at) - Fraction(begin.at)
            if algorithm == "token_bucket":
                assert total <= limit + limit * length / Fraction(period) + Fraction(1, 100)
            elif algorithm == "sliding_log":
                assert total <= limit or length >= period
            elif algorithm == "fixed_window":
                assert total <= 2 * limit or length >= period
            elif one is not begin:
                assert length * limit >= begin.cost * Fraction(period) - Fraction(1, 10**5)
                break


def check_day(day: Day) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        office = Office(day)
        holder = new_guard(office.full)
        async with holder.hold():
            for number, visit in enumerate(day.visits):
                loop.call_later(visit.at, office.begin, number, visit)
            for n in range(80):
                loop.call_later(n / 4 + 0.125, office.look)
            await let_pass(200.0)
        assert not office.broken
        assert all(task.done() for task in office.tasks)
        assert all(task.cancelled() or task.exception() is None for task in office.tasks)
        bound(office.went, day.algorithm, ALL, 2.0)
        for user in ("ann", "bob"):
            own = [one for one in office.went if one.user == user]
            bound(own, day.algorithm, USER, 1.0)
        meters = office.limit._meters
        assert meters.waiting == 0
        assert not any(meter.queues for meter in meters.all)
        # By now all is paid: nothing was lost, nothing is held.
        peek = office.limit.peek(day.visits[0]._replace(cost=1))
        assert peek.left == (1 if day.algorithm == "leaky_bucket" else USER)

    run_virtual(main(), seed=day.seed)


@given(DAYS)
@examples(150)
def test_no_bound_is_broken_and_nothing_is_lost(day: Day) -> None:
    """Whoever waits, gives up, is cancelled, refused further in, or settled with less."""
    check_day(day)


def _do_nothing(*_: Any) -> None:
    pass


def _never_blocked(*_: Any) -> None:
    return None


def _look_at_the_first(
    self: Meters, charges: Any, now: float, waiter: Any = None, *, look: Any = Meters.look
) -> Any:
    return look(self, charges[:1], now, waiter)


DAY_ABLATIONS: dict[str, tuple[type, str, Any]] = {
    "everybody is admitted": (Meters, "look", _never_blocked),
    "only the first limit is asked": (Meters, "look", _look_at_the_first),
    "a cancelled waiter stays": (RateWaiter, "abandon", _do_nothing),
    "nothing is taken": (Meters, "take", _do_nothing),
    "who goes wakes nobody": (Meters, "attend", _do_nothing),
}


@pytest.mark.parametrize("missing", DAY_ABLATIONS)
def test_without_its_safeguards_a_bound_is_broken_or_a_waiter_lost(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    monkeypatch.setattr(*DAY_ABLATIONS[missing])
    assert falsified(check_day, DAYS)


# The hint


class Burst(NamedTuple):
    """Calls until one is refused, at any instant of a clock of floats."""

    start: float
    limit: int
    unit: str
    gaps: list[float]
    algorithm: str


BURSTS = st.builds(
    Burst,
    start=st.floats(0, 1e9),
    limit=st.integers(1, 7),
    unit=st.sampled_from(["s", "7ms", "min", "3h"]),
    gaps=st.lists(st.floats(0, 0.3), min_size=8, max_size=8),
    algorithm=st.sampled_from(
        ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]
    ),
)


def check_burst(burst: Burst) -> None:
    """Come back when told: admitted; a millisecond before that: not."""
    clock = VirtualClock(burst.start)
    limits = f"{burst.limit}/{burst.unit}", f"{burst.limit + 1}/2min"
    guard = new_guard(RateLimit(*limits, algorithm=burst.algorithm), clock=clock)
    for gap in burst.gaps:
        refusal = guard.attempt(lambda: None).error
        if refusal is not None:
            hint = _hint(refusal)
            if hint > 0.002:
                clock.advance(hint - 0.001)
                hint = _hint(guard.attempt(lambda: None).error)
                assert hint == pytest.approx(0.001, abs=1e-5)
            clock.advance(hint)
            assert guard.attempt(lambda: None).ok
        clock.advance(gap)
    guard.close()


def _hint(refusal: Any) -> float:
    assert isinstance(refusal, RateLimited)
    assert refusal.retry_after is not None
    return refusal.retry_after


@given(BURSTS)
@examples(150)
def test_who_comes_back_when_told_is_admitted(burst: Burst) -> None:
    """At any instant of a real clock, by every algorithm, with two limits at once."""
    check_burst(burst)


def test_a_hint_that_is_a_microsecond_short_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tell a little less, and somebody comes too early."""

    def short(wait: float | None, _now: float) -> float | None:
        return None if wait is None else wait / 1e6 - 1e-6

    monkeypatch.setattr(rate_limit, "_seconds", short)
    assert falsified(check_burst, BURSTS)


# First come, first served


class Queue(NamedTuple):
    """Calls of one key, one after another, some of which are cancelled while they wait."""

    costs: list[int]
    gaps: list[float]
    cancelled: list[bool]
    algorithm: str
    seed: int


QUEUES = st.integers(2, 8).flatmap(
    lambda n: st.builds(
        Queue,
        costs=st.lists(st.integers(1, 3), min_size=n, max_size=n),
        gaps=st.lists(quarters(2), min_size=n, max_size=n),
        cancelled=st.lists(st.booleans(), min_size=n, max_size=n),
        algorithm=st.sampled_from(["token_bucket", "fixed_window", "leaky_bucket"]),
        seed=SEEDS,
    )
)


def check_queue(queue: Queue) -> None:
    served: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        limit = RateLimit(
            "3/s", algorithm=queue.algorithm, cost=lambda _, cost: cost, max_wait=float("inf")
        )
        guard = new_guard(limit)

        async def note(number: int, _cost: int) -> None:
            served.append(number)

        tasks = []
        for number, (cost, gap) in enumerate(zip(queue.costs, queue.gaps, strict=True)):
            await let_pass(gap)
            tasks.append(loop.create_task(guard.acall(note, number, cost)))
            await let_pass(0.001)
        for task, gone in zip(tasks, queue.cancelled, strict=True):
            if gone:
                task.cancel()
        await asyncio.wait(tasks)
        assert limit.waiting == 0

    run_virtual(main(), seed=queue.seed)
    assert served == sorted(served)
    left = [n for n, gone in enumerate(queue.cancelled) if not gone]
    assert set(left) <= set(served)


@given(QUEUES)
def test_nobody_overtakes(queue: Queue) -> None:
    """Calls for the same key go in the order in which they came, whatever they cost."""
    check_queue(queue)


def _alone(self: Meter, charge: Any, now: float, _waiter: Any) -> Any:
    rule, state = self.at(charge.place, now)
    return rule.wait(state, now, charge.cost)


def test_without_lanes_somebody_overtakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for oneself alone, and a small call slips in before a large one."""
    monkeypatch.setattr(Meter, "wait", _alone)
    assert falsified(check_queue, QUEUES)


# The success path


def _play(calls: list[tuple[float, int]], limit: RateLimit, *, fast: bool) -> str:
    """Return all that happens, by the generated path or by the interpreter, as text."""
    guard = new_guard(limit, clock=VirtualClock(1000.0))
    guarded = guard(lambda _: "went")
    seen: list[Any] = []
    for gap, user in calls:
        guard.clock.sleep(gap)
        try:
            if fast:
                seen.append(guarded(f"user {user}"))
            else:
                seen.append(guard.attempt(lambda _: "went", f"user {user}").unwrap())
        except RateLimited as error:
            seen.append((str(error), error.retry_after))
        seen.append(limit.peek(f"user {user}"))
    seen.append(guard.snapshot()["policies"])
    guard.close()
    return repr(seen).replace(guard.name, "guard")


@pytest.mark.parametrize(
    "options",
    [
        {"limits": ["3/s"]},
        {"limits": ["3/s", "7/2s"]},
        {"limits": ["3/s"], "algorithm": "leaky_bucket"},
        {"limits": ["3/s"], "key": lambda user: user},
        {"limits": ["3/s"], "key": lambda user: user, "cost": 2},
    ],
    ids=without_addresses,
)
def test_the_success_path_and_the_rule_agree(options: dict[str, Any]) -> None:
    """Verdicts, hints and states are the same with and without the generated path."""

    @given(st.lists(st.tuples(quarters(3), st.integers(0, 2)), max_size=20))
    @examples(50)
    def check(calls: list[tuple[float, int]]) -> None:
        rest = {name: value for name, value in options.items() if name != "limits"}
        fast, slow = (
            _play(calls, RateLimit(*options["limits"], **rest), fast=fast) for fast in (True, False)
        )
        assert fast == slow

    check()


# Threads


@pytest.fixture
def _hasty() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


THREADED: dict[str, Callable[[], RateLimit]] = {
    "plain": lambda: RateLimit("5000/day"),
    "two": lambda: RateLimit("5000/day", "6000/day"),
    "keyed": lambda: RateLimit("5000/day", key=lambda: "key"),
    "keyed by a number": lambda: RateLimit("5000/day", key=lambda: 7),
    "costly": lambda: RateLimit("5000/day", cost=lambda: 1),
    "window": lambda: RateLimit("5000/day", algorithm="fixed_window"),
}


@pytest.mark.parametrize("name", THREADED)
@pytest.mark.usefixtures("_hasty")
def test_threads_together_never_get_more_than_the_limit(name: str) -> None:
    """Eight threads ask for more than there is; exactly what there is is admitted."""
    with virtual_time():
        limit = THREADED[name]()
        guarded = new_guard(limit)(lambda: 1)
    start = threading.Barrier(8)
    admitted = []

    def work() -> None:
        start.wait(30)
        own = 0
        for _ in range(1500):
            try:
                own += guarded()
            except RateLimited:
                pass
        admitted.append(own)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(admitted) == 5000


def _meets_in_the_middle(monkeypatch: pytest.MonkeyPatch, key: Any) -> int:
    """Return how many of a burst of three get in, if a call meets a taking half done."""
    with virtual_time():
        limit = RateLimit("3/day", key=key)
        guard = new_guard(limit)
        guarded = guard(lambda: 1)
    guarded()
    met = threading.Event()
    take, enter = TokenBucket.take, RateGate.ask
    admitted = [1]

    def other() -> None:
        try:
            admitted.append(guarded())
        except RateLimited:
            pass
        met.set()

    def slow_take(self: TokenBucket, state: float, now: float, cost: int) -> Any:
        if thread.ident is None:
            thread.start()
            # It either goes through beside us, or is on its way to the lock that we hold.
            assert met.wait(30)
        return take(self, state, now, cost)

    def ask(self: Any, charges: Any, now: float) -> Any:
        if threading.current_thread() is thread:
            met.set()
        return enter(self, charges, now)

    thread = threading.Thread(target=other)
    with monkeypatch.context() as patch:
        patch.setattr(TokenBucket, "take", slow_take)
        patch.setattr(RateGate, "ask", ask)
        limit.reserve()
        admitted.append(1)
        thread.join(30)
    for _ in range(9):
        try:
            admitted.append(guarded())
        except RateLimited:
            pass
    return sum(admitted)


@pytest.mark.parametrize("key", [None, lambda: "a"])
def test_the_success_path_is_shut_while_somebody_holds_the_lock(
    key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that meets a taking half done waits for its end."""
    assert _meets_in_the_middle(monkeypatch, key) == 3


@pytest.mark.parametrize("key", [None, lambda: "a"])
def test_with_an_open_success_path_a_taking_is_lost(
    key: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leave it open, and what was taken meanwhile is overwritten: one too many gets in."""
    monkeypatch.setattr(Meters, "__enter__", lambda self: self._nesting.enter())
    assert _meets_in_the_middle(monkeypatch, key) == 4


def test_threads_and_tasks_of_several_loops_wait_in_one_line() -> None:
    """All get their turn, and none before its time."""
    callers, calls = 3, 20
    guard = new_guard(RateLimit("50k/s", burst=1, max_wait=60.0))
    lock = threading.Lock()
    went: list[float] = []

    def note() -> None:
        with lock:
            went.append(guard.clock.now())

    async def anote() -> None:
        note()

    def thread() -> None:
        start.wait(30)
        for _ in range(calls):
            guard.call(note)

    def loop() -> None:
        async def main() -> None:
            await asyncio.gather(*[guard.acall(anote) for _ in range(calls)])

        start.wait(30)
        asyncio.run(main())

    start = threading.Barrier(2 * callers)
    workers = [threading.Thread(target=kind) for kind in (thread, loop) for _ in range(callers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert len(went) == 2 * callers * calls
    assert max(went) - min(went) >= (len(went) - 2) * 20e-6
    assert guard.policies[0].waiting == 0  # type: ignore[attr-defined]


# The collector, forks, and loops that are gone


def test_a_waiter_dropped_inside_the_section_leaves_at_its_end() -> None:
    """The collector may end a call while its own thread holds the lock."""

    async def main() -> None:
        limit = RateLimit("1/min", max_wait=999.0)
        guard = new_guard(limit)
        await guard.acall(let_pass, 0.0)
        waiting = asyncio.ensure_future(guard.acall(let_pass, 0.0))
        await let_pass(0.1)
        (lane,) = limit._meters.all[0].queues.values()
        with limit._meters.mutex, limit._meters:
            lane.first.abandon()
            assert limit.waiting == 1
        settled(limit._meters.mutex)
        assert limit.waiting == 0
        waiting.cancel()
        await asyncio.wait([waiting])

    run_virtual(main())


def test_a_child_process_begins_without_those_who_waited() -> None:
    """What was taken stays taken; the lines are empty and the success path is open."""

    async def main() -> None:
        limit = RateLimit("2/min", max_wait=999.0)
        guard = new_guard(limit)
        calls = [asyncio.ensure_future(guard.acall(let_pass, 0.0)) for _ in range(4)]
        await let_pass(0.1)
        assert limit.waiting == 2
        limit._meters._after_fork()
        assert limit.waiting == 0
        assert limit.peek().left == 0
        assert limit._meters.all[0].slack > 0
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert limit.waiting == 0

    run_virtual(main())


def test_a_waiter_whose_loop_is_closed_holds_nobody_up() -> None:
    """Nobody listens there: who comes after it is served."""
    with virtual_time() as clock:
        limit = RateLimit("1/s", max_wait=999.0)
        guard = new_guard(limit)
        guard.call(lambda: None)

        class Gone(RateWaiter):
            __slots__ = ()

        gate: Any = guard.bounds[0]
        gone = Gone(gate, limit._charges((), {}), clock.now())
        gone.publish(lambda: False)
        assert limit.waiting == 1
        with limit._meters.mutex, limit._meters:
            limit._meters.attend_all()
        assert limit.waiting == 0
        guard.call(lambda: None)
        assert clock.now() == pytest.approx(1.0)


def test_a_limit_that_is_asked_whether_it_rests_stays_closed_for_the_holder_of_the_lock() -> None:
    """A family asks this of its members while other threads take from them under the lock."""
    limit = RateLimit("1/s")
    meters = limit._meters
    asking = threading.Thread(target=limit._at_rest, args=(0.0,))
    with meters.mutex, meters:
        asking.start()
        asking.join(0.2)  # it waits for the lock
        assert meters.all[0].slack == SHUT
    asking.join()
    assert meters.all[0].slack != SHUT
