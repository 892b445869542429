"""A leader on virtual time: begins with the lease, stops before it ends, hands over."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from seawall import TimedOut
from seawall.clock import SYSTEM, Clock, current_clock
from seawall.errors import LeaseLost, StoreUnavailable
from seawall.leases import Lease
from seawall.leases.store import Command, Release, Renew, Take, Withdraw
from seawall.members import Leader, Term
from seawall.models.lease import Busy, LeaseGranted, LeaseModel
from seawall.runtime.layers import Kind
from seawall.runtime.store import StoreQuestion
from seawall.testing import run_virtual
from tests.support import let_pass

TTL = 10.0
MARGIN = 2.0


class Job:
    """A job that runs in the loop of the test."""

    def __init__(self, seconds: float, job: Callable[[], Any]) -> None:
        self._ring = asyncio.Event()
        self._task = asyncio.ensure_future(self._repeat(seconds, job))

    async def _repeat(self, seconds: float, job: Callable[[], Any]) -> None:
        while True:
            self._ring.clear()
            await job()
            try:
                async with asyncio.timeout(seconds):
                    await self._ring.wait()
            except TimeoutError:
                pass

    def soon(self) -> None:
        self._ring.set()

    def stop(self) -> None:
        self._task.get_loop().call_soon(self._task.cancel)


class NoJob:
    def soon(self) -> None:
        """Do nothing."""

    stop = soon


class Memory:
    """A store in memory, by the pure model: `LeaseStore` and `LeaseShare` in one."""

    store_name = "memory"
    timeout = 0.1

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or current_clock()
        self.model = LeaseModel()
        self.closed = False
        self.is_up = True
        self.renews = True
        self._listeners: list[Callable[[], object]] = []

    def recover(self) -> None:
        self.is_up = True

    def _lease(self, _name: str) -> Memory:
        return self

    def longest_poll(self, _ttl: float) -> float:
        return 30.0

    def ask(self, _kind: Kind, command: Command, _clock: Clock) -> StoreQuestion:
        return StoreQuestion(self, command, None, self._add)

    def _add(self, asking: StoreQuestion) -> None:
        asking.deliver(self._do(asking.item))

    def _do(self, command: Command) -> LeaseGranted | Busy:
        if not self.is_up:
            raise StoreUnavailable("the store is down")
        now, model = round(self.clock.now() * 1e6) + 1, self.model
        match command:
            case Take(holder, attempt, ttl):
                return model.take(now, holder, attempt, ttl)
            case Renew(token, ttl):
                done = model.renew(now, token, ttl)
            case Release(token):
                done = model.release(now, token)
            case Withdraw(holder, attempt):
                done = model.withdraw(now, holder, attempt)
        if done and not isinstance(command, Renew):
            for heard in list(self._listeners):
                heard()
        return LeaseGranted(model.token) if done else Busy(model.token, 0)

    def unwanted(self, item: Command, answer: LeaseGranted | Busy) -> None:
        if isinstance(item, Take) and isinstance(answer, LeaseGranted):
            self.post(Release(answer.token))

    async def call(self, command: Command, _patience: float) -> LeaseGranted | Busy:
        return self._do(command)

    def post(self, command: Command) -> None:
        if self.is_up:
            self._do(command)

    def start(self) -> None:
        """Be ready."""

    def every(self, seconds: float, job: Callable[[], Any]) -> Any:
        return Job(seconds, job) if self.renews else NoJob()

    def listen(self, heard: Callable[[], object]) -> Callable[[], None]:
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    def watch(self, _watcher: Callable[[bool, str], object]) -> Callable[[], None]:
        return lambda: None

    def keep(self, _holding: object) -> None:
        """Nothing is closed here."""

    forget = keep


def leader_of(store: Memory, **options: Any) -> Leader:
    return Leader(Lease(store, "leader", ttl=TTL, renew_every=2.5), **{"margin": MARGIN, **options})


async def forever(_term: Term) -> None:
    await asyncio.Event().wait()


def test_work_runs_while_the_lease_is_renewed_and_its_result_is_returned():
    """For many times the lease's time to live; afterwards the lease is free."""

    async def scenario():
        store = Memory()
        leader, seen = leader_of(store), []

        async def work(term):
            for _ in range(10):
                await let_pass(TTL)
                term.check()
                seen.append((leader.is_leader, leader.term is term, term.token, 0 < term.left <= 8))
            return "done"

        assert await leader.arun(work) == "done"
        assert seen == [(True, True, leader.lease.token, True)] * 10
        assert not leader.is_leader
        assert not leader.lease.held
        assert await Lease(store, "leader").atry_acquire()

    run_virtual(scenario())


def check_outage(margin: float) -> float:
    """Let the store go away for good; return how long before the lease's end the work stopped."""

    async def scenario():
        store = Memory()
        leader = leader_of(store, margin=margin)
        stopped = []

        async def work(term):
            try:
                await let_pass(1)
                store.is_up = False
                await forever(term)
            finally:
                stopped.append(leader.lease.left)
                leader.close()

        assert await leader.arun(work) is None
        return stopped[0]

    return run_virtual(scenario())


def test_without_the_store_the_work_stops_a_margin_before_the_lease_can_be_anothers():
    """By the monotonic clock of this process alone."""
    assert check_outage(MARGIN) == pytest.approx(MARGIN, abs=0.001)
    assert check_outage(1.0) == pytest.approx(1.0, abs=0.001)


def late_effects(margin: float) -> int:
    """Cut the leader off from the store; count its effects that arrive after the next leader's.

    An effect is a request that is a second on its way: nothing can cancel it.
    """

    async def scenario():
        here, there = Memory(), Memory()
        there.model = here.model
        effects: list[int] = []
        one, other = leader_of(here, margin=margin), leader_of(there)

        async def act(term):
            here.is_up = False
            while True:
                term.check()
                asyncio.get_running_loop().call_later(1.0, effects.append, term.token)
                await let_pass(0.1)

        async def follow(term):
            effects.append(term.token)
            await let_pass(5)

        acting = asyncio.ensure_future(one.arun(act))
        await let_pass(0.1)
        await other.arun(follow)
        one.close()
        await acting
        newest = max(effects)
        return len([token for token in effects[effects.index(newest) :] if token != newest])

    return run_virtual(scenario())


def test_an_effect_within_the_margin_arrives_before_any_later_leader_acts():
    """Even without a fence: there is time for it."""
    assert late_effects(MARGIN) == 0


def test_without_the_margin_effects_of_two_leaders_mix():
    """The last ones were sent in time, and arrive too late."""
    assert late_effects(0.01) > 0


def test_a_work_that_was_cut_off_begins_again_in_the_next_term():
    """With a higher token, once the store is back."""

    async def scenario():
        store = Memory()
        leader, tokens = leader_of(store), []

        async def work(term):
            tokens.append(term.token)
            if len(tokens) == 1:
                store.is_up = False
                asyncio.get_running_loop().call_later(60, store.recover)
                await forever(term)
            return "second"

        assert await leader.arun(work) == "second"
        assert tokens == sorted(set(tokens))
        assert len(tokens) == 2

    run_virtual(scenario())


def test_a_lease_that_another_took_ends_the_term_at_the_next_renewal():
    """After the store forgot this leader, the next one does not wait for the margin."""

    async def scenario():
        store = Memory()
        leader, left = leader_of(store), []

        async def work(term):
            try:
                await let_pass(1)
                store.model.until = 0
                assert await Lease(store, "leader", ttl=TTL).atry_acquire()
                await forever(term)
            finally:
                left.append(term._lease.clock.now())
                leader.close()

        await leader.arun(work)
        assert left == [pytest.approx(2.5, abs=0.1)]

    run_virtual(scenario())


def check_revival() -> float:
    """Let a renewal succeed just after the term was over; return what is left of the term."""

    async def scenario():
        store = Memory()
        store.renews = False
        leader, left = leader_of(store), []

        async def work(term):
            try:
                await forever(term)
            except asyncio.CancelledError:
                await leader.lease._holding.renew()
                assert leader.lease.left > MARGIN
                left.append(term.left)
                leader.close()
                raise

        await leader.arun(work)
        return left[0]

    return run_virtual(scenario())


def test_a_term_that_is_over_stays_over():
    """Its work has begun to stop: it is not to act again."""
    assert check_revival() == 0


def test_unless_its_end_is_kept(monkeypatch):
    """The lease alone would let it act again."""
    end = Term._end

    def forgetful(term: Term, reason: str) -> bool:
        ended = end(term, reason)
        term._lasting.append(True)
        return ended

    monkeypatch.setattr(Term, "_end", forgetful)
    assert check_revival() > 0


def test_stepping_down_hands_over_and_lets_others_go_first():
    """The work is cancelled, the lease released, and a rival leads long before the ttl is over."""

    async def scenario():
        store = Memory()
        one, other = leader_of(store), leader_of(store)
        order = []

        async def first(_term):
            order.append("one")
            await asyncio.Event().wait()

        async def second(_term):
            order.append("other")

        leading = asyncio.ensure_future(one.arun(first))
        await let_pass(0.1)
        following = asyncio.ensure_future(other.arun(second))
        await let_pass(0.1)
        began = current_clock().now()
        one.step_down()
        await following
        assert current_clock().now() - began < TTL / 4
        await let_pass(TTL)
        assert order == ["one", "other", "one"]
        one.close()
        assert await leading is None

    run_virtual(scenario())


@pytest.mark.parametrize("timeout", [0.0, TTL / 8])
def test_a_leader_that_stepped_down_takes_no_lease_within_its_rest(timeout):
    """A time limit that is shorter than the rest ends the wait, and not the rest."""

    async def scenario():
        leader = leader_of(Memory())
        with pytest.raises(LeaseLost):
            async with leader.lead():
                leader.step_down()
        began = current_clock().now()
        with pytest.raises(TimedOut, match="lets others go first"):
            async with leader.lead(timeout):
                pytest.fail("it must not lead")
        assert current_clock().now() - began == pytest.approx(timeout)
        async with leader.lead(TTL) as term:
            assert term.left

    run_virtual(scenario())


def test_a_leader_in_a_thread_that_stepped_down_takes_no_lease_within_its_rest():
    """A time limit of 0 asks once, which would be too early."""
    store = Memory(SYSTEM)
    store.renews = False
    leader = leader_of(store)
    with pytest.raises(LeaseLost), leader.lead():
        leader.step_down()
    with pytest.raises(TimedOut, match="lets others go first"), leader.lead(0.0):
        pytest.fail("it must not lead")


def test_the_lease_is_released_only_when_the_work_has_ended():
    """Work that needs a while to clean up is still protected: the lease is renewed meanwhile."""

    async def scenario():
        store = Memory()
        leader, rival = leader_of(store), Lease(store, "leader", ttl=TTL)

        async def work(_term):
            try:
                await asyncio.Event().wait()
            finally:
                await let_pass(3 * TTL)
                assert not await rival.atry_acquire()

        leading = asyncio.ensure_future(leader.arun(work))
        await let_pass(1)
        leader.close()
        await leading
        assert await rival.atry_acquire()

    run_virtual(scenario())


def test_work_that_ignores_its_cancellation_is_shouted_about(caplog):
    """Nothing can stop it; the log says that only the token protects from here on."""

    async def scenario():
        store = Memory()
        leader = leader_of(store)

        async def work(_term):
            store.is_up = False
            for _ in range(4):
                try:
                    await let_pass(5)
                except asyncio.CancelledError:
                    continue
            leader.close()

        await leader.arun(work)

    with caplog.at_level(logging.ERROR, "seawall"):
        run_virtual(scenario())
    assert caplog.text.count("its work goes on though the lease is over") == 1


def test_a_cancelled_leader_releases_its_lease():
    """The cancellation of the caller is no loss of the lease."""

    async def scenario():
        store = Memory()
        leader = leader_of(store)
        leading = asyncio.ensure_future(leader.arun(forever))
        await let_pass(1)
        leading.cancel()
        await asyncio.gather(leading, return_exceptions=True)
        assert leading.cancelled()
        assert await Lease(store, "leader").atry_acquire()

    run_virtual(scenario())


def test_errors_of_the_work_reach_the_caller():
    """The lease is released before."""

    async def scenario():
        store = Memory()

        async def work(_term):
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await leader_of(store).arun(work)
        assert await Lease(store, "leader").atry_acquire()

    run_virtual(scenario())


def test_work_that_meets_a_fence_rests_before_it_leads_again():
    """A resource that knows a higher token would be asked in a circle."""

    async def scenario():
        store = Memory()
        leader, times = leader_of(store), []

        async def work(_term):
            times.append(current_clock().now())
            if len(times) < 3:
                raise LeaseLost("the fence has seen a higher token")

        await leader.arun(work)
        assert [b - a for a, b in pairwise(times)] == [pytest.approx(TTL / 2)] * 2

    run_virtual(scenario())


def test_closing_ends_waiting():
    """A leader that has never led returns at once; nothing is left behind."""

    async def scenario():
        store = Memory()
        assert await Lease(store, "leader", ttl=1000).atry_acquire()
        leader = leader_of(store)
        leading = asyncio.ensure_future(leader.arun(forever))
        await let_pass(3)
        leader.close()
        assert await leading is None
        with pytest.raises(LeaseLost, match="was closed"):
            async with leader.lead():
                raise AssertionError
        assert await leader.arun(forever) is None

    run_virtual(scenario())


def test_waiting_for_a_term_ends_in_time():
    """As waiting for a lease does."""

    async def scenario():
        store = Memory()
        rival = Lease(store, "leader", ttl=1000)
        assert await rival.atry_acquire()
        leader = leader_of(store)
        with pytest.raises(TimedOut):
            async with leader.lead(timeout=5):
                raise AssertionError
        await rival.arelease()
        async with leader.lead(timeout=0) as term:
            assert term.token == leader.lease.token

    run_virtual(scenario())


# In threads, in real time


def test_a_thread_leads_until_its_stop_is_set():
    """`term.stop` is set when the leader is closed, and the lease is released."""
    store = Memory(SYSTEM)
    store.renews = False
    leader = Leader(Lease(store, "thread", ttl=60.0))
    begun, seen = threading.Event(), []

    def work(term: Term) -> None:
        begun.set()
        term.check()
        assert term.stop.wait(30)
        seen.append((term.left, term.reason, leader.is_leader))

    running = threading.Thread(target=lambda: seen.append(leader.run(work)))
    running.start()
    assert begun.wait(30)
    leader.close()
    running.join(30)
    assert seen == [(0.0, "the leader was closed", False), None]
    assert Lease(store, "thread").try_acquire()


def test_a_thread_without_renewals_is_stopped_before_the_lease_ends():
    """The watching thread sets `stop` while the lease is still held for sure."""
    store = Memory(SYSTEM)
    store.renews = False
    leader = Leader(Lease(store, "late", ttl=1.5, renew_every=0.1), margin=1.0)
    left = []

    def work(term: Term) -> str:
        assert term.stop.wait(30)
        left.append(leader.lease.left)
        leader.close()
        with pytest.raises(LeaseLost, match="not renewed in time"):
            term.check()
        return "unused"

    assert leader.run(work) is None
    assert left[0] <= 1.0


def test_the_result_of_plain_work_is_returned():
    """And another run leads again."""
    store = Memory(SYSTEM)
    store.renews = False
    leader = Leader(Lease(store, "result"))
    assert leader.run(lambda term: term.token) == leader.lease.token
    assert leader.run(lambda _term: 7) == 7
    with pytest.raises(ZeroDivisionError):
        leader.run(lambda _term: 1 / 0)
    with leader.lead() as term:
        assert leader.term is term
    assert leader.term is None


# Arguments


def test_bad_arguments_are_refused_at_once():
    """The message says what to write."""
    store = Memory(SYSTEM)
    lease = Lease(store, "bad", ttl=10.0, renew_every=2.5)
    with pytest.raises(TypeError, match="pass a Lease"):
        Leader("bad")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin=7: write less than 7"):
        Leader(lease, margin=7.0)
    with pytest.raises(ValueError, match="margin"):
        Leader(lease, margin=0)
    leader = Leader(lease)
    assert leader.margin == 2.0
    with pytest.raises(TypeError, match=r"await leader\.arun"):
        leader.run(forever)
    with pytest.raises(TypeError, match=r"leader\.run"):
        asyncio.run(leader.arun(lambda term: term.token))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="timeout=-1"):
        leader.lead(-1)


def test_a_term_that_ends_with_its_block_leaves_nothing_behind():
    """The look at the end of the term comes when the block is over: no error in the loop."""

    async def scenario():
        failures = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, context: failures.append(context))
        leader = leader_of(Memory())
        with pytest.raises(LeaseLost, match="it stepped down"):
            async with leader.lead():
                leader.step_down()
        await let_pass(1)
        assert not failures

    run_virtual(scenario())


def test_a_leader_that_cannot_watch_its_term_gives_the_lease_back(monkeypatch):
    """Without a thread for that, another process has to lead."""
    store = Memory(SYSTEM)
    store.renews = False
    leader = leader_of(store)

    def refuse(_thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="new thread"), leader.lead():
        pytest.fail("it must not lead")
    assert not leader.lease.held
    assert not leader.is_leader
    assert Lease(store, "leader").try_acquire()


def test_a_leader_rests_before_others_can_see_that_its_term_is_over():
    """Its own thread competes again as soon as it sees that."""

    async def scenario():
        leader = leader_of(Memory())
        seen = []

        async def work(term):
            term._on_end(lambda: seen.append(leader._resume_at))
            leader.step_down()
            leader.close()

        assert await leader.arun(work) is None
        assert seen == [pytest.approx(current_clock().now() + TTL / 2)]

    run_virtual(scenario())


def test_a_signal_handler_may_end_a_term_for_which_its_thread_begins_to_wait(monkeypatch):
    """It runs after the thread has seen that the event is not set, and before it waits."""
    term = Term(Lease(Memory(SYSTEM), "leader"), MARGIN)
    leader = leader_of(Memory(SYSTEM))
    for event in (term.stop, leader._closed):
        looks = []

        def look(event=event, looks=looks):
            looks.append(threading.Event.is_set(event))
            if len(looks) == 1:
                event.set()  # as the handler does, in this thread
            return looks[-1]

        monkeypatch.setattr(event, "is_set", look)
        assert event.wait(30.0)
        assert looks == [False, True]
