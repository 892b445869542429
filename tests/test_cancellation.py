"""Cancellation at every await point of everything that waits, and what it must not leave behind."""

from __future__ import annotations

import asyncio
import threading
import types
from collections.abc import Callable, Iterator
from contextvars import Context
from random import Random
from typing import Any

import pytest

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Chaos,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    deadline,
)
from seawall._expiry import is_expiry
from seawall.backoff import constant
from seawall.clock import VirtualClock
from seawall.context import attempt_var, deadline_scope
from seawall.limits import Limit, aimd, vegas
from seawall.models.rate.rates import whole_microseconds
from seawall.policies.adaptive_limit import AdaptiveGate, PartitionedGate, _PartitionWaiter
from seawall.policies.breaker import n_of_m, ramp, single_probe
from seawall.policies.cache import Answers
from seawall.policies.fallback import fallback_reason
from seawall.policies.hedge.tasks import TaskCopies
from seawall.policies.rate_limit.gate import RateWaiter
from seawall.policies.rate_limit.policy import RateGate
from seawall.policies.retry import InFlightRatio, RequestRatio
from seawall.policies.throttle import _ThrottleGate
from seawall.policies.timeout import adaptive_timeout
from seawall.policies.timeout.async_flow import AsyncTimeout, ExpiryQueue
from seawall.runtime import interpreter
from seawall.runtime.call import Call, trace_var
from seawall.runtime.layers import FAILED, OK
from seawall.runtime.policy import GateBound
from seawall.runtime.slots import SlotWaiter, live_slots
from seawall.shedding import adaptive_lifo, by_criticality, by_latency, codel
from seawall.testing import run_virtual

HOWS = ("now", "soon", "as it wakes", "closed", "closed elsewhere", "interrupted")
"""In which ways a call can be stopped at an await point."""


async def pause(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    bell = loop.create_future()
    timer = loop.call_later(seconds, lambda: bell.done() or bell.set_result(None))
    try:
        await bell
    finally:
        timer.cancel()


class Service:
    """Takes a tenth of a second in two steps; what its script does not fail, it answers."""

    def __init__(self, *script: str) -> None:
        self.script = list(script)
        self.running = 0
        self.starts: list[float] = []
        self.answered = self.failed = 0

    async def __call__(self) -> str:
        self.running += 1
        self.starts.append(asyncio.get_running_loop().time())
        try:
            await pause(0.05)
            what = self.script.pop(0) if self.script else "answer"
            await pause(10.0 if what == "hang" else 0.05)
            if what == "fail":
                self.failed += 1
                raise ConnectionError
            self.answered += 1
            return what
        finally:
            self.running -= 1

    async def items(self) -> Any:
        yield await self()
        yield await self()

    async def level(self) -> str:
        await pause(0.05)
        if self.script and self.script[0] == "no level":
            raise LookupError
        return "poor"


class Stopped(Exception):
    """Stands for the end of a coroutine that was closed or interrupted from outside."""


@types.coroutine
def stepped(coroutine: Any, on_suspend: Callable[[int, Any], None]) -> Iterator[Any]:
    """Run `coroutine`, calling `on_suspend(number, awaited)` each time it suspends."""
    number = 0
    step: Callable[[], Any] = lambda: coroutine.send(None)  # noqa: E731
    while True:
        try:
            awaited = step()
        except StopIteration as stop:
            return stop.value
        number += 1
        on_suspend(number, awaited)
        try:
            yield awaited
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as error:  # noqa: BLE001 - passed on
            step = lambda error=error: coroutine.throw(error)  # noqa: E731
        else:
            step = lambda: coroutine.send(None)  # noqa: E731


class World:
    """One guard, its policies and its surroundings; made anew for each place to stop at."""

    def __init__(self, clock: VirtualClock, *policies: Any, script: tuple[str, ...] = ()) -> None:
        self.clock = clock
        self.guard = Guard("swept", *policies)
        self.guard.close()
        self.service = Service(*script)
        self.told_after: list[Any] = []
        self.stopped = False
        self.stopped_at = 0.0
        self.subject: asyncio.Task[Any] | None = None
        self.entered = 0
        for bound in self.guard.bounds:
            if isinstance(bound, GateBound):
                self._watch(bound)

    def _watch(self, bound: Any) -> None:
        enter, leave, attempted = bound.enter, bound.leave, bound.attempted
        if leave is None:
            return
        counted = isinstance(bound.policy, (Breaker, Shed, Throttle))  # nobody waits for these

        def watched_enter(*args: Any, **kwargs: Any) -> Any:
            ticket = enter(*args, **kwargs)
            self.entered += counted
            return ticket

        def note(outcome: Any, detail: Any) -> None:
            self.entered -= counted
            by_subject = asyncio._get_running_loop() and asyncio.current_task() is self.subject
            # A timeout of ours that expired first is a verdict, whoever cancels after it.
            verdict = outcome is OK or (outcome is FAILED and not is_expiry(detail))
            if self.stopped and by_subject and verdict:
                self.told_after.append((bound.policy.kind, outcome))

        def watched_leave(ticket: Any, outcome: Any, detail: Any, now: float) -> None:
            note(outcome, detail)
            leave(ticket, outcome, detail, now)

        def watched_attempt(
            ticket: Any, outcome: Any, detail: Any, now: float, count: Any, **more: Any
        ) -> Any:
            note(outcome, detail)
            return attempted(ticket, outcome, detail, now, count, **more)

        bound.enter, bound.leave, bound.inline = watched_enter, watched_leave, None
        bound.attempted = None if attempted is None else watched_attempt

    def of(self, kind: type) -> list[Any]:
        return [policy for policy in self.guard.policies if isinstance(policy, kind)]

    def timeouts(self) -> list[AsyncTimeout]:
        found = [getattr(bound, "_layers", {}).get("async") for bound in self.guard.bounds]
        return [layer for layer in found if isinstance(layer, AsyncTimeout)]


def context() -> tuple[Any, ...]:
    return deadline_scope(), attempt_var.get(), trace_var.get(), fallback_reason()


Act = Callable[[World], Any]


async def call(world: World) -> Any:
    return await world.guard.acall(world.service)


async def attempt(world: World) -> Any:
    return (await world.guard.aattempt(world.service)).unwrap()


async def bounded(world: World) -> Any:
    with deadline(30.0):
        return await world.guard.acall(world.service)


async def enforced(world: World) -> Any:
    async with deadline(30.0):
        return await world.guard.acall(world.service)


async def hold(world: World) -> Any:
    async with world.guard.hold():
        return await world.service()


async def loop_of_attempts(world: World) -> Any:
    async for one in world.guard.attempts():
        async with one:
            return await world.service()
    raise AssertionError


async def stream(world: World) -> Any:
    items = world.guard(world.service.items)()
    try:
        return [item async for item in items]
    finally:
        await items.aclose()


async def alone(_world: World) -> list[asyncio.Task[Any]]:
    return []


async def crowd(world: World) -> list[asyncio.Task[Any]]:
    """Let others hold the slots, and fetch what the subject wants."""
    others = [asyncio.create_task(call(world)) for _ in range(2)]
    await pause(0.01)
    return others


async def half_open(world: World) -> list[asyncio.Task[Any]]:
    """Trip the breaker, and let its break pass."""
    (breaker,) = world.of(Breaker)
    for _ in range(breaker.settings.consecutive):
        with pytest.raises(ConnectionError):
            await world.guard.acall(Service("fail"))
    assert breaker.state == "open"
    await pause(5.0)
    return []


def stop_at(world: World, place: int, how: str) -> Callable[[int, Any], None]:
    """Return what stops the subject when it suspends for the time number `place`."""

    def on_suspend(number: int, awaited: Any) -> None:
        if number != place:
            return
        subject = world.subject
        assert subject is not None

        def cancel(*_: Any) -> None:
            world.stopped = True
            world.stopped_at = world.clock.now()
            subject.cancel()

        if how == "now":
            cancel()
        elif how == "soon":
            asyncio.get_running_loop().call_soon(cancel)
        elif how == "as it wakes":
            awaited.add_done_callback(cancel)
        else:
            world.stopped = True
            raise Stopped(how)

    return on_suspend


async def run_subject(world: World, act: Act, on_suspend: Callable[[int, Any], None]) -> Any:
    before = context()
    coroutine = act(world)
    try:
        return await stepped(coroutine, on_suspend)
    except Stopped as stopped:
        how = stopped.args[0]
        if how == "closed":
            coroutine.close()
        elif how == "closed elsewhere":
            Context().run(coroutine.close)
        else:
            with pytest.raises(KeyboardInterrupt):
                coroutine.throw(KeyboardInterrupt)
        if how == "closed elsewhere":
            return None  # what a foreign context cannot undo dies with this one
        raise
    finally:
        if not (world.stopped and how_is_foreign(on_suspend)):
            assert context() == before


def how_is_foreign(on_suspend: Any) -> bool:
    return "closed elsewhere" in [c.cell_contents for c in on_suspend.__closure__ or ()]


def check_slots(world: World) -> None:
    """Check that all slots are free, and that nobody waits for one."""
    for policy in world.of(Bulkhead) + world.of(AdaptiveLimit):
        assert (policy.in_flight, policy.waiting) == (0, 0)
        assert len(policy.slots.free) == policy.limit
        assert not policy.slots.attention
    for policy in world.of(AdaptiveLimit):
        places = policy.partitions
        if places is not None:
            assert (places.total, sum(places.in_flight.values())) == (0, 0)
            assert places._spoken_for == sum(places.reserved.values())


def check_tokens(world: World) -> None:
    """Check that nobody waits for a limit, and that a call took its tokens exactly if it began."""
    now = whole_microseconds(world.clock.now())
    service = world.service
    # A call that Chaos stopped had begun, whether or not the function was reached.
    struck = sum(sum(getattr(bound, "injected", {}).values()) for bound in world.guard.bounds)
    for number, policy in enumerate(world.guard.policies):
        if not isinstance(policy, RateLimit):
            continue
        assert policy.waiting == 0
        inside = world.guard.policies[number + 1 :]
        # One of these may begin the function more than once, or never, for a call that was sent.
        once = not any(isinstance(other, (Cache, Fallback, Hedge, Retry)) for other in inside)
        for meter in policy._meters.all:
            assert not meter.queues
            place = None if meter.limit.key is None else "key"
            state = meter.read(place, now)
            rate, rule = meter.limit.rate, meter.rule
            step = rate.period / rate.limit
            if step < 1000 * 1e6:
                # The limit that they waited for: each began when the one before was paid for.
                paid = 0.0
                for start in service.starts:
                    paid = max(paid, start * 1e6) + step
                if len(world.guard.policies) == 1:
                    assert rule.rest(state, now) == pytest.approx(max(0.0, paid - now), abs=2.0)
                continue
            taken = rate.limit - rule.left(state, now)
            if meter.limit.settle is None and once:
                assert len(service.starts) <= taken <= len(service.starts) + struck
            elif once:  # an estimate of 3, of which 1 is used
                assert taken == 3 * len(service.starts) - 2 * service.answered


def check_copies(world: World) -> None:
    """Check that no copy of a call is to be made any more, nor counted as under way."""
    for bound in world.guard.bounds:
        if not isinstance(bound.policy, Hedge):
            continue
        for driver in bound._drivers.values():
            assert not any(queue.pending for queue in driver._queues.values())
        state = bound.policy.budget.snapshot() if bound.policy.budget else {}
        assert (state.get("active", 0), state.get("retries", 0)) == (0, 0)


async def stopped_at(  # noqa: C901 - a list of what must hold
    build: Callable[[], list[Any]],
    act: Act,
    prepare: Act,
    script: tuple[str, ...],
    place: int,
    how: str,
    clock: VirtualClock,
) -> bool:
    """Stop `act` at one place and check what is left; False if it never came to that place."""
    world = World(clock, *build(), script=script)
    others = await prepare(world)
    loop: Any = asyncio.get_running_loop()
    subject = world.subject = asyncio.create_task(
        run_subject(world, act, stop_at(world, place, how))
    )
    (result,) = await asyncio.gather(subject, return_exceptions=True)
    if world.stopped and how in ("now", "soon", "as it wakes"):
        assert subject.cancelled(), f"swallowed: {result!r}"
        assert clock.now() == world.stopped_at, "it went on for a while"
    if not isinstance(result, (Stopped, asyncio.CancelledError, ConnectionError, TimeoutError)):
        assert not isinstance(result, BaseException), repr(result)
    await asyncio.gather(*others, return_exceptions=True)
    for _ in range(3):
        await pause(0.0)  # what a closed coroutine left to its loop, the loop has done
    assert not world.told_after
    assert world.service.running == 0
    assert world.entered == 0
    check_slots(world)
    check_tokens(world)
    check_copies(world)
    for throttle in world.of(Throttle) if len(world.guard.policies) == 1 else ():
        requests, _ = throttle._model.recent(world.clock.now())
        assert requests == world.service.answered + world.service.failed
    for retry in world.of(Retry):
        state = retry.budget.snapshot() if retry.budget else {}
        assert state.get("active", 0) == 0
        if "active" in state:
            assert state["retries"] == 0
    for cache in world.of(Cache):
        assert not cache._answers._flights
    for layer in world.timeouts():
        assert not any(lane.pending for lane in layer._lanes.values())
    for timer in loop._scheduled:
        owner = getattr(timer._callback, "__self__", None)
        assert timer.cancelled() or isinstance(owner, ExpiryQueue), timer
    if not world.stopped:
        return False
    world.stopped = False
    world.service.script.clear()
    # A cache may still hold what a slow call of somebody else brought.
    assert await world.guard.acall(world.service) in ("answer", "hang")
    for breaker in world.of(Breaker):
        assert breaker.state != "open"
    return True


def sweep(
    build: Callable[[], list[Any]],
    *,
    act: Act = call,
    prepare: Act = alone,
    script: tuple[str, ...] = (),
    hows: tuple[str, ...] = HOWS,
) -> int:
    """Stop `act` at each of its await points, in each way; return at how many."""
    places = 0
    for how in hows:
        place = 1
        while True:
            clock = VirtualClock()
            arguments = (build, act, prepare, script, place, how, clock)
            if not run_virtual(stopped_at(*arguments), clock=clock):
                break
            place += 1
        places = max(places, place - 1)
    return places


HOWS_OF = {
    # A deadline's own block closed in a foreign context has a test of its own.
    bounded: tuple(how for how in HOWS if how != "closed elsewhere"),
    enforced: tuple(how for how in HOWS if how != "closed elsewhere"),
    # Closing a coroutine does not close the async generator it waits for, before Python 3.13.
    stream: tuple(how for how in HOWS if not how.startswith("closed")),
}


@pytest.mark.parametrize("act", [bounded, enforced])
def test_a_deadline_block_can_be_closed_from_another_context(act: Act):
    """A dying coroutine closed where it was not made can still leave its `deadline` block."""
    assert sweep(lambda: [Bulkhead(1)], act=act, hows=("closed elsewhere",)) >= 1


def retry(budget: Any = None) -> Retry:
    shared = None if budget is None else RetryBudget(budget)
    return Retry(on=ConnectionError, attempts=3, backoff=constant(1.0), budget=shared)


ALONE: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "retry": (lambda: [retry()], {"script": ("fail", "fail")}),
    "retry, in-flight budget": (lambda: [retry(InFlightRatio())], {"script": ("fail", "fail")}),
    "retry, ratio budget": (lambda: [retry(RequestRatio())], {"script": ("fail", "fail")}),
    "breaker": (lambda: [Breaker(consecutive=1)], {}),
    "slow breaker": (lambda: [Breaker(slow_after=9.0, slow_ratio=0.9, min_calls=5)], {}),
    "keyed breaker": (lambda: [Breaker(consecutive=1, key=lambda: "key")], {}),
    "probe": (
        lambda: [Breaker(consecutive=1, break_for=5.0, probes=single_probe())],
        {"prepare": half_open},
    ),
    "probes": (
        lambda: [Breaker(consecutive=1, break_for=5.0, probes=n_of_m(1, 2))],
        {"prepare": half_open},
    ),
    "ramp": (
        lambda: [Breaker(consecutive=1, break_for=5.0, probes=ramp(step=10.0))],
        {"prepare": half_open},
    ),
    "bulkhead": (lambda: [Bulkhead(1)], {}),
    "queue": (lambda: [Bulkhead(1, max_wait=9.0, max_waiting=5)], {"prepare": crowd}),
    "lifo": (lambda: [Bulkhead(1, max_wait=9.0, order="lifo")], {"prepare": crowd}),
    "two queues": (
        lambda: [Bulkhead(2, max_wait=9.0), Bulkhead(1, max_wait=9.0, order="criticality")],
        {"prepare": crowd},
    ),
    "timeout": (lambda: [Timeout(5.0)], {}),
    "expiring": (lambda: [Timeout(5.0)], {"script": ("hang",)}),
    "expiring twice": (lambda: [Timeout(5.0), Timeout(5.0)], {"script": ("hang",)}),
    "adaptive timeout": (lambda: [Timeout(adaptive_timeout(floor=1.0, cap=5.0))], {}),
    "fallback": (lambda: [Fallback(Service().level)], {"script": ("fail",)}),
    "cache": (lambda: [Cache(5.0)], {}),
    "follower": (lambda: [Cache(5.0)], {"prepare": crowd}),
    "follower of a failure": (lambda: [Cache(5.0)], {"prepare": crowd, "script": ("fail",)}),
    "rate": (lambda: [RateLimit("100/week")], {}),
    "keyed rate": (lambda: [RateLimit("100/week", key=lambda: "key")], {}),
    "settled rate": (lambda: [RateLimit("100/week", cost=3, settle=lambda _: 1)], {}),
    "settled failure": (
        lambda: [RateLimit("100/week", cost=3, settle=lambda _: 1)],
        {"script": ("fail",)},
    ),
    "waiting for a rate": (
        lambda: [RateLimit("1/10s", max_wait=90.0)],
        {"prepare": crowd},
    ),
    "waiting for a key": (
        lambda: [RateLimit("1/10s", key=lambda: "key", max_wait=90.0)],
        {"prepare": crowd},
    ),
    "leaky bucket": (
        lambda: [RateLimit("1/10s", algorithm="leaky_bucket", max_wait=90.0)],
        {"prepare": crowd},
    ),
    "several limits": (
        lambda: [
            RateLimit(
                Limit("100/week"),
                Limit("1/10s", key=lambda: "key", name="slow"),
                Limit("90/week", algorithm="sliding_log"),
                Limit("80/week", key=lambda: "key"),
                max_wait=90.0,
            )
        ],
        {"prepare": crowd},
    ),
    "token given back": (
        lambda: [RateLimit("100/week"), Bulkhead(1, max_wait=9.0, max_waiting=5)],
        {"prepare": crowd},
    ),
    "adaptive limit": (lambda: [AdaptiveLimit(vegas(initial=2, maximum=5))], {}),
    "waiting for a limit": (
        lambda: [AdaptiveLimit(aimd(slow_after=9.0, initial=1), max_wait=9.0, max_waiting=5)],
        {"prepare": crowd},
    ),
    "partitions": (
        lambda: [
            AdaptiveLimit(
                aimd(slow_after=9.0, initial=2, maximum=2),
                partitions={"live": 0.5},
                partition=lambda: "other",
                max_wait=9.0,
                max_waiting=5,
            )
        ],
        {"prepare": crowd},
    ),
    "shed queue": (
        lambda: [Bulkhead(1, max_wait=9.0, max_waiting=5, shed=codel())],
        {"prepare": crowd},
    ),
    "adaptive lifo": (
        lambda: [Bulkhead(1, max_wait=9.0, max_waiting=5, shed=adaptive_lifo(5.0, patience=8.0))],
        {"prepare": crowd},
    ),
    "shed": (lambda: [Shed(by_criticality(), by_latency(5.0), load=lambda: 0.5)], {}),
    "throttle": (lambda: [Throttle()], {}),
    "refused by the server": (lambda: [Throttle()], {"script": ("fail",)}),
    "hedge": (lambda: [Hedge(0.02, cap=1.0)], {}),
    "hedge of a slow call": (lambda: [Hedge(0.02, cap=1.0)], {"script": ("hang",)}),
    "hedge, budget": (
        lambda: [Hedge(0.02, cap=1.0, budget=RetryBudget(InFlightRatio(1.0)))],
        {"script": ("hang", "fail")},
    ),
    "hedged limits": (
        lambda: [
            Hedge(0.02, cap=1.0),
            RateLimit("100/week", algorithm="sliding_log"),
            AdaptiveLimit(aimd(slow_after=99.0, initial=1), max_wait=30.0),
        ],
        {"script": ("hang",)},
    ),
    "chaotic latency": (lambda: [Chaos(1.0, latency=0.5, enabled=True)], {}),
    "chaos inside": (
        lambda: [
            RateLimit("100/week"),
            AdaptiveLimit(vegas(initial=1, maximum=1), max_wait=9.0, max_waiting=5),
            Chaos(1.0, latency=0.5, enabled=True),
        ],
        {"prepare": crowd},
    ),
    "chaotic hang": (
        lambda: [
            Fallback(answer),
            Timeout(5.0),
            Throttle(),
            Chaos(1.0, hang=True, enabled=True),
        ],
        {},
    ),
}


async def answer() -> str:
    """Stand in for what never comes."""
    await pause(0.05)
    return "answer"


@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("act", [call, attempt, bounded, enforced])
def test_each_policy_alone_leaves_nothing_behind(name: str, act: Act):
    """Wherever a call under one policy is stopped, nothing stays taken, counted or scheduled."""
    build, options = ALONE[name]
    assert sweep(build, act=act, hows=HOWS_OF.get(act, HOWS), **options) >= 1


def recommended() -> list[Any]:
    return [
        Fallback(Service().level),
        Cache(5.0),
        Timeout(60.0),
        retry(InFlightRatio()),
        Breaker(consecutive=5),
        Bulkhead(1, max_wait=30.0, max_waiting=9),
        Timeout(2.0),
    ]


@pytest.mark.parametrize("act", [call, attempt, bounded, enforced])
@pytest.mark.parametrize("prepare", [alone, crowd])
@pytest.mark.parametrize("script", [(), ("fail", "hang"), ("fail", "fail", "fail", "fail")])
def test_the_recommended_stack_leaves_nothing_behind(act: Act, prepare: Act, script: Any):
    """Wherever a call under all policies is stopped, nothing stays taken, counted or scheduled."""
    hows = HOWS_OF.get(act, HOWS)
    assert sweep(recommended, act=act, prepare=prepare, script=script, hows=hows) >= 1


def draw(chance: Random) -> Callable[[], list[Any]]:
    makers = [
        lambda: Fallback(Service().level, on=LookupError),
        lambda: Cache(5.0),
        lambda: Timeout(60.0),
        lambda: Timeout(2.0),
        lambda: Timeout(adaptive_timeout(floor=1.0, cap=40.0)),
        lambda: retry(InFlightRatio()),
        retry,
        lambda: Breaker(consecutive=50),
        lambda: Breaker(slow_after=20.0, slow_ratio=0.9, min_calls=50),
        lambda: Bulkhead(1, max_wait=30.0, max_waiting=9),
        lambda: Bulkhead(2, max_wait=30.0, order="lifo"),
        lambda: Bulkhead(1, max_wait=30.0, max_waiting=9, shed=codel()),
        lambda: RateLimit("100/week", algorithm="fixed_window"),
        lambda: RateLimit("2/s", max_wait=60.0),
        lambda: RateLimit("4/s", algorithm="leaky_bucket", key=lambda: "key", max_wait=60.0),
        lambda: AdaptiveLimit(vegas(initial=2, maximum=3), max_wait=60.0, max_waiting=9),
        lambda: AdaptiveLimit(
            aimd(slow_after=99.0, initial=2, maximum=3),
            partitions={"live": 0.5},
            max_wait=60.0,
            max_waiting=9,
        ),
        lambda: Shed(by_latency(99.0)),
        lambda: Throttle(mode="shadow"),
        lambda: Hedge(0.02, cap=1.0, burst=2),
        lambda: Chaos(0.5, latency=0.2, enabled=True, seed=7),
    ]
    chosen = chance.sample(makers, chance.randint(2, 7))
    return lambda: [make() for make in chosen]


@pytest.mark.parametrize("number", range(24))
def test_stacks_in_any_order_leave_nothing_behind(number: int, seed: int):
    """The same for stacks that nobody would write."""
    chance = Random(seed * 1000 + number)
    build = draw(chance)
    script = tuple(chance.choices(("answer", "fail", "hang"), k=4))
    assert sweep(build, prepare=chance.choice([alone, crowd]), script=script) >= 1


@pytest.mark.parametrize("prepare", [alone, crowd])
@pytest.mark.parametrize("script", [(), ("fail",), ("hang",)])
@pytest.mark.parametrize("act", [hold, stream, loop_of_attempts])
def test_blocks_and_generators_leave_nothing_behind(act: Act, prepare: Act, script: Any):
    """Wherever a `hold` block or a guarded generator is stopped, its gates are left, once."""

    def build() -> list[Any]:
        slots = Bulkhead(1, max_wait=30.0, max_waiting=9)
        return [Timeout(60.0), retry(InFlightRatio()), Breaker(consecutive=9), slots]

    hows = HOWS_OF.get(act, HOWS)
    assert sweep(build, act=act, prepare=prepare, script=script, hows=hows) >= 2


@pytest.mark.parametrize("prepare", [alone, crowd])
@pytest.mark.parametrize("script", [(), ("fail",)])
@pytest.mark.parametrize("act", [hold, stream, loop_of_attempts])
def test_scarce_blocks_and_generators_leave_nothing_behind(act: Act, prepare: Act, script: Any):
    """The same for rates that they wait for, limits that learn, and counts of the server's."""

    def build() -> list[Any]:
        rate = RateLimit("1/s", max_wait=60.0)
        limit = AdaptiveLimit(aimd(slow_after=9.0, initial=1), max_wait=30.0, max_waiting=9)
        return [Shed(by_latency(9.0)), Throttle(mode="shadow"), rate, limit]

    hows = HOWS_OF.get(act, HOWS)
    assert sweep(build, act=act, prepare=prepare, script=script, hows=hows) >= 2


@pytest.mark.parametrize("act", [hold, stream, loop_of_attempts])
def test_probes_of_blocks_and_generators_are_given_back(act: Act):
    """A half-open probe that is a block or a generator gives its permit back when stopped."""
    build, options = ALONE["probe"]
    assert sweep(build, act=act, hows=HOWS_OF.get(act, HOWS), **options) >= 2


def test_a_timeout_that_expires_as_the_call_is_cancelled_swallows_nothing():
    """A cancellation at the very instant of a timeout of ours is still a cancellation."""

    async def main(order: str) -> None:
        guard = Guard("instant", Timeout(1.0), Bulkhead(1))
        guard.close()
        loop = asyncio.get_running_loop()
        if order == "cancel first":
            loop.call_later(1.0, lambda: task.cancel())  # noqa: PLW0108 - made below
        task = asyncio.create_task(guard.acall(pause, 10.0))
        if order == "timeout first":
            await pause(0.0)
            loop.call_later(1.0, task.cancel)
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    run_virtual(main("cancel first"))
    run_virtual(main("timeout first"))


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["bulkhead", "timeout around it"])
def test_a_stopped_caller_of_a_thread_leaves_only_the_thread(how: str, kind: str):
    """Who stops waiting for a thread leaves it counted until it ends, and nothing after that."""
    release = threading.Event()
    began = threading.Event()

    def work() -> str:
        began.set()
        release.wait(5.0)
        return "answer"

    async def main(clock: VirtualClock) -> None:
        slots, pool = Bulkhead(1), ThreadBulkhead(1)
        outer = [Timeout(60.0)] if kind != "bulkhead" else []
        world = World(clock, *outer, slots, pool)
        world.service = work  # type: ignore[assignment]
        world.subject = asyncio.create_task(run_subject(world, call, stop_at(world, 1, how)))
        if how == "as it wakes":
            release.set()
        with asyncio.get_running_loop().hold_time():
            if how not in ("as it wakes", "now", "soon"):
                # Not before the thread has begun, or there would be nothing to abandon.
                pass
            await asyncio.gather(world.subject, return_exceptions=True)
        assert world.stopped
        if how != "as it wakes" and began.wait(0.2):
            assert (slots.in_flight, pool.pool.in_use) in ((1, 1), (0, 0), (0, 1))
        release.set()
        for _ in range(500):
            if not (slots.in_flight or pool.pool.in_use):
                break
            threading.Event().wait(0.01)
        assert (slots.in_flight, pool.pool.in_use, pool.pool.abandoned) == (0, 0, 0)
        assert world.guard.snapshot()["abandoned"] == 0
        with asyncio.get_running_loop().hold_time():
            assert await world.guard.acall(work) == "answer"

    clock = VirtualClock()
    run_virtual(main(clock), clock=clock)


def forget(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing, where something should be done."""


def leave_the_innermost_only(call: Call) -> None:
    if call.tickets:
        layer, ticket = call.layers[len(call.tickets) - 1], call.tickets[-1]
        if not hasattr(layer, "settle"):
            call.leave(layer, ticket, call.host.clock.now())
    call.tickets.clear()


def blind(self: Call) -> Any:
    if self.error is not None and isinstance(self.error, asyncio.CancelledError):
        return OK
    return real_outcome(self)


def strict(self: Call) -> Any:
    return OK if self.error is None else FAILED


def give_all_back(_self: RateGate, ticket: Any, *_: Any) -> None:
    if not isinstance(ticket, float):
        ticket.cancel()


real_outcome = Call.outcome

ABLATIONS: dict[str, tuple[Any, str, Any, str]] = {
    "waiters are not withdrawn": (SlotWaiter, "abandon", forget, "queue"),
    "gates are not left": (Call, "leave", forget, "bulkhead"),
    "the way up is not taken": (interpreter, "_up", forget, "queue"),
    "outer layers are not left": (interpreter, "_up", leave_the_innermost_only, "two queues"),
    "a cancelled call is a success": (Call, "outcome", blind, "probe"),
    "a cancelled call is a failure": (Call, "outcome", strict, "breaker"),
    "flights do not land": (Answers, "land", forget, "cache"),
    "context is not restored": (interpreter, "reset", forget, "retry"),
    "timers are not stopped": (AsyncTimeout, "settle", forget, "timeout"),
    "who waits for a rate is not withdrawn": (RateWaiter, "abandon", forget, "waiting for a rate"),
    "unused tokens are kept": (RateGate, "leave", forget, "token given back"),
    "tokens of begun calls are given back": (RateGate, "leave", give_all_back, "rate"),
    "tokens are never settled": (RateGate, "leave", forget, "settled rate"),
    "slots of a limit are not given back": (AdaptiveGate, "leave", forget, "adaptive limit"),
    "slots of a class are not given back": (PartitionedGate, "_give_back", forget, "partitions"),
    "a class keeps what it was granted": (_PartitionWaiter, "_give_up", forget, "partitions"),
    "cancelled calls count at the server": (_ThrottleGate, "leave", forget, "throttle"),
    "copies run on": (TaskCopies, "_cancel", forget, "hedge"),
    "late copies are still made": (TaskCopies, "stop_copying", forget, "hedge"),
}


@pytest.mark.parametrize("ablation", ABLATIONS)
def test_the_sweep_finds_what_is_taken_away(ablation: str, monkeypatch: pytest.MonkeyPatch):
    """Each safeguard has a reason: without it the sweep fails."""
    owner, attribute, instead, scenario = ABLATIONS[ablation]
    build, options = ALONE[scenario]
    monkeypatch.setattr(owner, attribute, instead)
    before = set(live_slots)
    with pytest.raises((AssertionError, RuntimeError, asyncio.CancelledError)):
        sweep(build, hows=("now", "as it wakes"), **options)
    live_slots.intersection_update(before)  # other tests look whether a slot was lost


def test_our_own_expiry_is_recognised_by_its_mark():
    """What tells a timeout of ours from a cancellation is the mark, not the type."""
    assert not is_expiry(asyncio.CancelledError())
    assert not is_expiry(asyncio.CancelledError("seawall"))
