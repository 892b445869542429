"""Calls that a signal handler ends at any moment: what they held is free again afterwards.

Each scenario is run once for every place at which CPython lets a signal in, and then looked at.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    BulkheadFull,
    Cache,
    CircuitOpen,
    RateLimit,
    ThreadBulkhead,
    TimedOut,
    Timeout,
)
from seawall.clock import VirtualClock
from seawall.errors import PoolExhausted
from seawall.limits import aimd
from seawall.policies.breaker import ramp
from seawall.policies.rate_limit.meters import KeyQueue
from seawall.resources import Channel, IoPool, Pool, Serializer
from seawall.resources.pool.lending import Lending
from seawall.runtime.slots import Slot, Slots, SlotWaiter
from seawall.shedding import codel
from seawall.testing import run_virtual
from tests.runtime.interrupts import interrupted_guard, interrupts

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="CPython 3.14 looks for signals between a lock's `with` and the block (gh-148874)",
)

Made = tuple[Callable[[], Any], Callable[[], Any]]


def ok() -> int:
    """Answer."""
    return 1


def fail() -> None:
    """Raise."""
    raise ConnectionError


def quietly(work: Callable[[], Any]) -> Callable[[], None]:
    """Do `work`; its own errors are of no interest."""

    def run() -> None:
        try:
            work()
        except (ConnectionError, BulkheadFull):
            pass

    return run


def elsewhere(work: Callable[[], Any]) -> Any:
    """Do `work` in another thread; "stuck" if it does not come back."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:  # noqa: BLE001 - it is the answer
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20.0)
    return done[0] if done else "stuck"


def bulkhead(work: Callable[[], Any]) -> Made:
    """Make one call in a stack of gates."""
    limit = Bulkhead(2)
    guard = interrupted_guard(Breaker(), RateLimit("1000/s"), limit)
    guard.call(ok)
    return quietly(lambda: guard.call(work)), lambda: limit.in_flight


def refused() -> Made:
    """Make one call that is refused further in."""
    limit, full = Bulkhead(2), Bulkhead(1)
    taken = interrupted_guard(full).hold()
    taken.__enter__()
    guard = interrupted_guard(limit, full)
    work = quietly(lambda: guard.call(ok))
    work()
    return work, lambda: (taken, limit.in_flight)[1]


def adaptive(**options: Any) -> Made:
    """Make one call in an adaptive limit."""
    limit = AdaptiveLimit(aimd(slow_after=9.0, initial=4), **options)
    guard = interrupted_guard(limit)
    guard.call(ok)

    def held() -> int:
        places = limit.partitions
        return limit.in_flight + (0 if places is None else sum(places.in_flight.values()))

    return lambda: guard.call(ok), held


def in_task() -> Made:
    """Make one awaited call."""
    limit = Bulkhead(2)
    guard = interrupted_guard(Breaker(), limit)

    async def answer() -> int:
        return 1

    def work() -> None:
        try:
            guard.acall(answer).send(None)
        except StopIteration:
            pass

    work()
    return work, lambda: limit.in_flight


def held_block() -> Made:
    """Enter and leave a block."""
    limit = Bulkhead(2)
    guard = interrupted_guard(limit)

    def work() -> None:
        with guard.hold():
            pass

    work()
    return work, lambda: limit.in_flight


class Handing(VirtualClock):
    """A clock that hands over the slot while somebody waits for it."""

    give_up: Callable[[], None]

    def wait(self, lock: threading.Lock, seconds: float | None) -> bool:
        """Give up what is held; the lock comes with it."""
        self.give_up()
        return lock.acquire(timeout=0 if seconds is None else 1.0)


def waiting() -> Made:
    """Make one call that waits for the slot of another, which ends meanwhile in this thread."""
    limit, clock = Bulkhead(1, max_wait=5.0), Handing()
    guard = interrupted_guard(limit, clock=clock)
    taken: list[Slot] = []
    clock.give_up = lambda: [limit.slots.give_back(taken.pop()) for _ in taken[:]]

    def work() -> None:
        taken.append(limit.slots.free.pop())
        guard.call(ok)

    def held() -> tuple[int, ...] | None:
        """Tell what is left behind, if that is anything; others get in afterwards."""
        taken.clear()
        left = limit.in_flight, limit.waiting, int(elsewhere(lambda: guard.call(ok)) != 1)
        return left if any(left) else None

    work()
    return quietly(work), held


SLOTS: dict[str, Callable[[], Made]] = {
    "a call that succeeds": lambda: bulkhead(ok),
    "a call that fails": lambda: bulkhead(fail),
    "a call that is refused further in": refused,
    "a call in an adaptive limit": adaptive,
    "a call in a partition": lambda: adaptive(partitions={"live": 0.5}, partition=lambda: "live"),
    "a call in a task": in_task,
    "a block": held_block,
    "a call that waits": waiting,
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scenario", SLOTS)
def test_no_signal_costs_a_slot(scenario: str) -> None:
    """Wherever the handler raises, the slot is free when the error is gone."""
    lost = [place for place, held in interrupts(SLOTS[scenario]) if held()]
    assert lost == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in Slot.__del__
def test_without_looking_for_them_slots_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal just after a slot was taken loses it: nobody knows of it any more."""
    monkeypatch.setattr(Slots, "recover", lambda *_: None)
    assert any(held() for _, held in interrupts(SLOTS["a call that succeeds"]))


def test_a_slot_that_was_found_is_counted() -> None:
    """The snapshot tells how many were lost by their holders."""
    limit = Bulkhead(3)
    guard = interrupted_guard(limit)
    limit.slots.free.pop()
    assert limit.in_flight == 0
    (shown,) = guard.snapshot()["policies"]
    assert shown["recovered"] == 1


def test_a_slot_that_was_found_goes_to_who_waits() -> None:
    """Nobody waits in vain for one whose holder is gone."""
    limit, clock = Bulkhead(1, max_wait=5.0), Handing()
    guard = interrupted_guard(limit, clock=clock)
    taken = [limit.slots.free.pop()]
    clock.give_up = taken.clear
    assert guard.call(ok) == 1
    assert limit.in_flight == 0


def test_a_signal_between_joining_a_queue_and_waiting_leaves_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody is left in the queue to be granted a slot that it will never use."""
    limit = Bulkhead(1, max_wait=5.0)
    guard = interrupted_guard(limit)
    publish = SlotWaiter.publish

    def interrupted(waiter: SlotWaiter, wake: Callable[[], bool]) -> None:
        publish(waiter, wake)
        raise KeyboardInterrupt

    monkeypatch.setattr(SlotWaiter, "publish", interrupted)
    with guard.hold():
        with pytest.raises(KeyboardInterrupt):
            guard.call(ok)
        assert limit.waiting == 0
    assert limit.in_flight == 0


def test_a_signal_as_a_call_queues_for_a_rate_leaves_the_queue_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The signal is raised as it is, and others wait as ever."""
    limit = RateLimit("1/s", max_wait=5.0)
    guard = interrupted_guard(limit, clock=VirtualClock(1000.0))
    guard.call(ok)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KeyQueue, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            guard.call(ok)
    assert limit.waiting == 0
    assert guard.call(ok) == 1


def test_a_timeout_that_has_ended_does_not_end_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal after it ended, while other policies are left, is raised as it is."""
    limit = Bulkhead(2)
    guard = interrupted_guard(limit, Timeout(60.0))

    def interrupted() -> None:
        raise KeyboardInterrupt

    async def answer() -> int:
        return 1

    async def calls() -> None:
        await guard.acall(answer)
        limit.slots.attention = True
        monkeypatch.setattr(limit.slots, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await guard.acall(answer)

    run_virtual(calls())
    assert limit.in_flight == 0


def thread_bulkhead() -> Made:
    """Make one call in a thread of a pool."""
    limit = ThreadBulkhead(1)
    guard = interrupted_guard(limit)
    guard.call(ok)
    return lambda: guard.call(ok), lambda: elsewhere(lambda: _patiently(guard))


def _patiently(guard: Any) -> Any:
    while True:
        try:
            return guard.call(ok)
        except BulkheadFull:
            pass


def single_flight() -> Made:
    """Fetch what others wait for."""
    cache = Cache(9.0, key=lambda: "key")
    guard = interrupted_guard(cache)
    guard.call(ok)
    cache.clear()
    return lambda: guard.call(ok), lambda: elsewhere(lambda: guard.call(ok))


def turn() -> Made:
    """Enter and leave a block that one at a time may enter."""
    serializer = Serializer(max_wait=0.0)

    def work() -> None:
        with serializer.hold("key"):
            pass

    return work, lambda: elsewhere(lambda: serializer.run("key", ok))


def pool(*, idle: bool = True, work: Callable[[], Any] = ok, **options: Any) -> Made:
    """Borrow a resource of two, which is idle or has to be made, and give it back."""
    resources: Pool[list[int]] = Pool(
        list,
        name="interrupted",
        max_size=2,
        checkout_timeout=0.001,
        connect_timeout=None,
        close=lambda _resource: None,
        **options,
    )
    if idle:
        with resources.borrow():
            pass
    stock = resources._stock

    def borrow() -> None:
        with resources.borrow():
            work()

    def left() -> tuple[int, ...] | None:
        """Tell what is left behind, if that is anything; all can be borrowed afterwards."""
        resources.reap()
        try:
            with resources.borrow(), resources.borrow():
                pass
        except PoolExhausted:
            return (-1,)
        resources.reap()
        lost = len(stock.live) - stock.idle
        seen = resources.in_use, lost, len(stock.closing), resources.waiting
        return seen if any(seen) or stock.size > 2 else None

    return quietly(borrow), left


def channel(**options: Any) -> Made:
    """Put an item into a channel and get it out."""
    items: Channel[int] = Channel(2, **options)

    def work() -> None:
        items.put(1)
        items.get()

    def left() -> int | None:
        """Tell whether less fits in than should, or somebody waits for what is not there."""
        while items.depth:
            if isinstance(elsewhere(lambda: items.get(0.0)), TimedOut):
                return -1
        fits = [elsewhere(lambda: items.put(1, 0.0)) for _ in range(3)].count(True)
        return None if fits == 2 else fits

    work()
    return quietly(work), left


def _until_free(threads: IoPool) -> int:
    while True:
        try:
            return threads.run(ok)
        except BulkheadFull:
            pass


def executor() -> Made:
    """Run something in a thread of an executor."""
    threads = IoPool("interrupted", workers=1)
    threads.run(ok)

    def left() -> int | None:
        elsewhere(lambda: _until_free(threads))
        count = threads.snapshot()["in_flight"]
        threads.close(0.0)
        return count or None

    return lambda: threads.run(ok), left


HOLDERS: dict[str, Callable[[], Made]] = {
    "an idle resource": pool,
    "a resource that is made": lambda: pool(idle=False),
    "a resource after an error": lambda: pool(work=fail),
    "a channel": channel,
    "a channel that sheds": lambda: channel(shed=codel()),
    "an executor": executor,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scenario", HOLDERS)
def test_no_signal_costs_a_resource_a_place_or_a_thread(scenario: str) -> None:
    """Wherever the handler raises, all of them can be had afterwards."""
    seen = [(place, left()) for place, left in interrupts(HOLDERS[scenario])]
    assert [one for one in seen if one[1]] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_without_looking_for_lost_borrowers_resources_are_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: what an interrupted block had is found because its borrower is gone."""
    monkeypatch.setattr(Lending, "lose", lambda *_: None)
    assert any(left() for _, left in interrupts(HOLDERS["an idle resource"]))


OTHERS = {
    "a thread": thread_bulkhead,
    "a single flight": single_flight,
    "a turn": turn,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("scenario", OTHERS)
def test_no_signal_locks_others_out(scenario: str) -> None:
    """Wherever the handler raises, another thread gets its answer afterwards."""
    seen = [(place, check()) for place, check in interrupts(OTHERS[scenario])]
    assert [one for one in seen if one[1] != 1] == []


BREAK = 5.0
STUCK_FOR = 60.0


def breaker(*before: Callable[[], Any] | float, **options: Any) -> Made:
    """Make one call of a breaker at which `before` has happened: calls and seconds."""
    clock = VirtualClock(1000.0)
    policy = Breaker(**{"consecutive": 1, "break_for": BREAK, **options})
    guard = interrupted_guard(policy, clock=clock)
    *earlier, last = before
    for step in earlier:
        if isinstance(step, float):
            clock.advance(step)
        else:
            quietly(lambda step=step: guard.call(step))()

    def goes_on() -> list[str]:
        """Tell how it stands when all is well again, after a failure, and after a break."""
        seen = []
        for _ in range(4):
            clock.advance(STUCK_FOR)  # a probe whose end was interrupted is given up by then
            seen.append(guard.attempt(ok).reason)
        states = [policy.state]
        guard.attempt(fail)
        states += [policy.state, type(guard.attempt(ok).error).__name__]
        for _ in range(3):
            clock.advance(STUCK_FOR)
            guard.attempt(ok)
        return [*states, policy.state, *({str(why) for why in seen} - {"None", "circuit_open"})]

    def work() -> None:
        try:
            guard.call(last)
        except (ConnectionError, CircuitOpen):
            pass

    return work, goes_on


BREAKERS: dict[str, Callable[[], Made]] = {
    "opens": lambda: breaker(ok, fail),
    "is open": lambda: breaker(fail, ok),
    "half-opens, and closes": lambda: breaker(fail, BREAK, ok),
    "half-opens, and opens": lambda: breaker(fail, BREAK, fail),
    "closes by a ramp": lambda: breaker(
        fail, BREAK, ok, BREAK, ok, BREAK, ok, probes=ramp((0.1, 0.5), step=BREAK)
    ),
    "goes up a ramp": lambda: breaker(
        fail, BREAK, ok, BREAK, ok, probes=ramp((0.1, 0.5), step=BREAK)
    ),
    "counts slow calls": lambda: breaker(fail, BREAK, ok, ok, slow_after=3.0, slow_ratio=0.5),
}


@pytest.mark.parametrize("scenario", BREAKERS)
def test_a_breaker_goes_on_after_a_signal_in_its_change(scenario: str) -> None:
    """It closes, opens, refuses and closes again, wherever the handler raised."""
    wrong = [
        (place, seen)
        for place, check in interrupts(BREAKERS[scenario])
        if (seen := check()) != ["closed", "open", "CircuitOpen", "closed"]
    ]
    assert wrong == []
