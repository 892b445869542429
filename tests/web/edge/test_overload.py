"""A pod that is asked for more than it can do: most of it is refused, the rest is served in time.

Time is virtual. A handler that computes moves the clock, and so does a refusal.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from math import inf
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from fastapi import FastAPI

from seawall import Criticality, Overloaded, subscribe
from seawall.clock import current_clock
from seawall.context import criticality, current_criticality
from seawall.events import OverloadChanged
from seawall.testing import run_virtual
from seawall.web import Inbound, RequestLimit, RequestLimits
from seawall.web.edge import Edge, loop_admission
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.fastapi import protect
from tests.support import let_pass
from tests.web.support import ask, text_app

BURN = 0.01
REFUSAL = 0.0002
CAPACITY = 1 / BURN
WARM_UP = 1.0


class Pod:
    """An app that computes for 10 ms, in one piece or in ten, behind an edge."""

    def __init__(
        self,
        *,
        pieces: int = 1,
        burn: float = BURN,
        loop_admission: LoopAdmission | None = None,
        inbound: Inbound | None = None,
    ) -> None:
        self.clock: Any = current_clock()
        self.pieces = pieces
        self.burn = burn
        self.cpu = 0.0
        self.served: list[tuple[float, float, Criticality]] = []
        self.refused: list[tuple[float, float, Criticality]] = []
        self.edge = Edge(self.app, name="pod", loop_admission=loop_admission, inbound=inbound)

    def compute(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.cpu += seconds

    async def app(self, _scope: Any, _receive: Any, send: Any) -> None:
        for piece in range(self.pieces):
            if piece:
                await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no time
            self.compute(self.burn / self.pieces)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def client(self, at: float, level: Criticality = Criticality.CRITICAL) -> None:
        await let_pass(at - self.clock.now())
        with criticality(level):
            answer = await ask(self.edge)
        if answer.status == 200:
            self.served.append((at, self.clock.now() - at, level))
        else:
            self.compute(REFUSAL)
            self.refused.append((at, self.clock.now() - at, level))


class Seen(NamedTuple):
    """How a pod did, without the first moments."""

    goodput: float
    p99: float
    refused: int


def under(
    times: float,
    *,
    seconds: float = 4.0,
    seed: int = 1,
    evenly: bool = False,
    pause: float = 0.0,
    **settings: Any,
) -> Seen:
    """Send a pod a multiple of the load it can serve, evenly or by chance (Poisson).

    Clients that would come within a `pause` after two seconds all come at its end.
    """

    async def main() -> Pod:
        pod = Pod(**settings, inbound=Inbound())
        admission_cpu[0] = lambda: pod.cpu
        rng = Random(seed)
        at, clients = 0.0, []
        while at < seconds:
            at += (1.0 if evenly else rng.expovariate(1.0)) * pod.burn / times
            clients.append(pod.client(2.0 + pause if 2.0 <= at < 2.0 + pause else at))
        await asyncio.gather(*clients)
        pod.edge.close()
        return pod

    pod = run_virtual(main())
    waits = sorted(wait for at, wait, _ in pod.served if at > WARM_UP)
    goodput = len([1 for wait in waits if wait <= 1.0]) / (seconds - WARM_UP)
    return Seen(goodput, waits[int(0.99 * len(waits))], len(pod.refused))


admission_cpu: list[Any] = [lambda: 0.0]


@pytest.fixture(autouse=True)
def _cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_admission, "thread_time", lambda: admission_cpu[0]())  # noqa: PLW0108 - it changes


@pytest.mark.parametrize("pieces", [1, 10], ids=["in one piece", "in ten pieces"])
def test_goodput_and_latency_hold_at_ten_times_capacity(pieces: int) -> None:
    """At 2, 5 and 10 times capacity, by chance: goodput above 80 % of it, p99 of three services."""
    seen = {
        times: under(times, pieces=pieces, loop_admission=LoopAdmission()) for times in (2, 5, 10)
    }
    for times, each in seen.items():
        assert each.goodput > 0.78 * CAPACITY, (times, seen)
        # Requests that compute in pieces share the loop with the others between them.
        assert each.p99 < (7.0 if pieces > 1 else 3.3) * BURN, (times, seen)


def test_evenly_spaced_requests_wait_for_one_other_during_overload() -> None:
    """The p99 is that of the service, the rest of the one before, and the refusals meanwhile."""
    for times in (2, 5, 10):
        seen = under(times, evenly=True, loop_admission=LoopAdmission())
        assert seen.goodput > 0.8 * CAPACITY, (times, seen)
        assert seen.p99 < 2 * BURN + 2.5 * times * REFUSAL, (times, seen)


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_poisson_arrivals_at_capacity_get_nine_tenths_of_the_bare_goodput(seed: int) -> None:
    """And nine out of ten below it, where a queue forms by chance and drains again."""
    bare = under(1, seconds=8.0, seed=seed, loop_admission=None)
    seen = under(1, seconds=8.0, seed=seed, loop_admission=LoopAdmission())
    assert seen.goodput >= 0.9 * bare.goodput, (seen, bare)
    assert seen.p99 <= 0.15, seen
    below = under(0.8, seconds=8.0, seed=seed, loop_admission=LoopAdmission())
    assert below.refused <= 0.02 * 0.8 * CAPACITY * 8.0, below


@pytest.mark.parametrize("times", [1.1, 1.25, 1.5, 1.75])
def test_latency_is_bounded_between_capacity_and_overload(times: float) -> None:
    """Where it is a matter of chance whether a window counts as overload."""
    seen = under(times, seconds=6.0, loop_admission=LoopAdmission())
    assert seen.goodput >= 0.9 * CAPACITY, seen
    assert seen.p99 <= 0.15, seen


PAUSES = [(5, 0.3, 2), (5, 0.5, 1), (10, 0.3, 3), (10, 0.7, 3)]


def _check_pause(times: float, pause: float, seed: int) -> None:
    seen = under(times, seconds=5.0, seed=seed, pause=pause, loop_admission=LoopAdmission())
    assert seen.goodput > 0.75 * CAPACITY * (1 - pause / 4), seen
    assert seen.p99 < 4 * BURN, seen


@pytest.mark.parametrize(("times", "pause", "seed"), PAUSES)
def test_clients_that_pause_for_a_moment_do_not_end_an_overload(
    times: float, pause: float, seed: int
) -> None:
    """A client that was stopped comes back with all that it had to ask: no queue may form then."""
    _check_pause(times, pause, seed)


def test_without_a_second_of_calm_a_queue_forms_after_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """End an overload with the first calm window, and it takes three to know it again."""
    monkeypatch.setattr(loop_admission, "CALM_TIME", 0.0)
    for case in ((5, 0.3, 2), (10, 0.3, 3)):
        with pytest.raises(AssertionError, match="p99"):
            _check_pause(*case)


def test_without_the_rule_for_overload_everybody_waits_for_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The queue is full all the time: p99 is `target` and not that of two services."""
    monkeypatch.setattr(loop_admission, "OVERLOAD", inf)
    seen = under(2, evenly=True, loop_admission=LoopAdmission())
    assert seen.p99 > LoopAdmission().target


def first_burst(pod: Pod, number: int) -> list[Any]:
    """Return so many clients that ask at this very moment."""
    return [pod.client(pod.clock.now()) for _ in range(number)]


@pytest.mark.parametrize("burn", [0.0003, 0.001, 0.005, 0.010])
@pytest.mark.parametrize("first", [0.0, 0.3], ids=["warm", "slow first request"])
def test_the_first_burst_of_an_idle_loop_is_served_whole(burn: float, first: float) -> None:
    """Also if the very first request imports and connects for a third of a second."""

    async def main() -> Pod:
        pod = Pod(burn=burn, loop_admission=LoopAdmission(), inbound=Inbound())
        admission_cpu[0] = lambda: pod.cpu
        inner = pod.edge.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            if first and not pod.served and pod.cpu < first:
                pod.compute(first)
            await inner(scope, receive, send)

        pod.edge.app = app
        await asyncio.gather(*first_burst(pod, 64))
        pod.edge.close()
        return pod

    pod = run_virtual(main())
    assert not pod.refused
    assert len(pod.served) == 64


def test_of_a_burst_that_takes_longer_than_patience_the_rest_is_refused_then() -> None:
    """One second of work is served, and nobody waits for longer than that."""

    async def main() -> Pod:
        pod = Pod(loop_admission=LoopAdmission(patience=1.0), inbound=Inbound())
        admission_cpu[0] = lambda: pod.cpu
        await asyncio.gather(*first_burst(pod, 300))
        pod.edge.close()
        return pod

    pod = run_virtual(main())
    assert 98 <= len(pod.served) <= 102
    assert max(wait for _, wait, _ in pod.served) < 1.0 + 2 * BURN
    assert min(wait for _, wait, _ in pod.refused) >= 1.0


def test_a_burst_after_a_rest_is_served_whole_whatever_was_before() -> None:
    """What was measured during the overload of a minute ago says nothing about now."""

    async def main() -> Pod:
        pod = Pod(loop_admission=LoopAdmission(), inbound=Inbound())
        admission_cpu[0] = lambda: pod.cpu
        await asyncio.gather(*(pod.client(number * BURN / 5) for number in range(1000)))
        assert len(pod.refused) > 500
        pod.refused.clear()
        await let_pass(60.0)
        await asyncio.gather(*first_burst(pod, 64))
        pod.edge.close()
        return pod

    assert not run_virtual(main()).refused


def test_a_burst_that_arrives_over_a_tenth_of_a_second_is_served_whole() -> None:
    """On top of a third of the load, wherever the windows of the measurement begin."""
    for shift in range(10):

        async def main(shift: int = shift) -> Pod:
            pod = Pod(burn=0.005, loop_admission=LoopAdmission(), inbound=Inbound())
            admission_cpu[0] = lambda: pod.cpu
            clients = [pod.client(number * 0.015) for number in range(100)]
            begin = 0.5 + shift * loop_admission.WINDOW / 10
            clients += [pod.client(begin + number * 0.1 / 64) for number in range(64)]
            await asyncio.gather(*clients)
            pod.edge.close()
            return pod

        assert not run_virtual(main()).refused, shift


def test_an_overload_that_is_over_refuses_nobody_any_more() -> None:
    """Half a second after five times the load has become half of it."""

    async def main() -> Pod:
        pod = Pod(loop_admission=LoopAdmission(), inbound=Inbound())
        admission_cpu[0] = lambda: pod.cpu
        clients = [pod.client(number * BURN / 5) for number in range(1000)]
        clients += [pod.client(2.0 + number * BURN * 2) for number in range(100)]
        await asyncio.gather(*clients)
        pod.edge.close()
        return pod

    told: list[OverloadChanged] = []
    stop = subscribe(told.append, OverloadChanged)
    try:
        pod = run_virtual(main())
    finally:
        stop()
    assert max(at for at, _, _ in pod.refused) < 2.5
    assert [event.overloaded for event in told] == [True, False]
    assert told[0].load > loop_admission.OVERLOAD


async def _burst(app: FastAPI, path: str) -> list[int]:
    """Protect `app`, send it 250 requests at once, and return their statuses."""
    edge = protect(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        answers = await asyncio.gather(*(client.get(path) for _ in range(250)))
    edge.close()
    return [answer.status_code for answer in answers]


def test_250_requests_at_once_in_one_process_are_all_served() -> None:
    """As a test of an app makes them: client and app share the loop, and nobody comes later."""

    async def main() -> list[int]:
        app = FastAPI()
        clock: Any = current_clock()
        admission_cpu[0] = clock.now
        starting = [0.02]

        @app.get("/hello")
        async def hello() -> str:
            clock.advance(starting.pop() if starting else 0.001)
            return "hello"

        return await _burst(app, "/hello")

    assert run_virtual(main()) == [200] * 250


@pytest.mark.parametrize("pause", [0.05, 0.3, 1.0])
def test_a_first_burst_that_waits_for_a_dependency_is_not_refused(pause: float) -> None:
    """Nothing is known of the dependency yet, and the loop is idle: nothing speaks for refusing."""

    async def main() -> list[int]:
        app = FastAPI()

        @app.get("/order")
        async def order() -> str:
            await asyncio.sleep(pause)  # noqa: TID251 - virtual time
            return "order"

        return await _burst(app, "/order")

    assert run_virtual(main()) == [200] * 250


def test_a_forked_child_serves_its_first_burst_whole() -> None:
    """Its queue is a new one, and the gate looks at that one."""
    edges = []

    async def before() -> None:
        pod = Pod(loop_admission=LoopAdmission(), inbound=Inbound())
        await asyncio.gather(*first_burst(pod, 8))
        edges.append(pod)

    async def after() -> int:
        pod = edges[0]
        pod.clock = pod.edge._clock = pod.edge.guard.clock
        answers = await asyncio.gather(*(ask(pod.edge) for _ in range(8)))
        return sum(answer.status != 200 for answer in answers)

    run_virtual(before())
    clock = edges[0].edge.guard.clock
    child = os.fork()
    if not child:
        refused = 99
        try:
            refused = run_virtual(after(), clock=clock)
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    edges[0].edge.close()


@pytest.mark.parametrize("pieces", [1, 10], ids=["in one piece", "in ten pieces"])
def test_without_turns_nothing_is_good_any_more(pieces: int) -> None:
    """The same load on the same app without them: everybody waits, hardly anybody is in time."""
    seen = under(5, pieces=pieces, loop_admission=None)
    assert seen.refused == 0
    assert seen.p99 > 100 * BURN
    assert seen.goodput < 0.3 * CAPACITY


def test_without_hops_who_is_served_has_waited_for_a_whole_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That the sockets are read before the next one is chosen is what keeps latency low."""
    good = under(10, loop_admission=LoopAdmission()).p99
    monkeypatch.setattr(loop_admission, "ITERATIONS_BETWEEN_TURNS", 0)
    assert under(10, loop_admission=LoopAdmission()).p99 > good + BURN / 4


def test_a_third_of_capacity_is_served_whole() -> None:
    """Nobody is refused by a pod that keeps up."""
    assert under(0.33, loop_admission=LoopAdmission()).refused == 0


def test_cheap_requests_are_not_refused_however_many_come_at_once() -> None:
    """Two hundred clients that ask again as soon as they are answered: they wait for each other."""

    async def main() -> Pod:
        pod = Pod(burn=0.00012, loop_admission=LoopAdmission())
        admission_cpu[0] = lambda: pod.cpu

        async def client() -> None:
            for _ in range(30):
                await pod.client(pod.clock.now())

        await asyncio.gather(*(client() for _ in range(200)))
        pod.edge.close()
        return pod

    pod = run_virtual(main())
    assert len(pod.served) == 6000
    assert max(wait for _, wait, _ in pod.served[400:]) < 0.1


def test_many_who_only_wait_are_all_let_in() -> None:
    """Five hundred requests that await a slow vendor: they cost no processor, and all are in."""

    async def main() -> None:
        admission_cpu[0] = lambda: 0.0
        inside, most = 0, 0

        async def waiting(_scope: Any, _receive: Any, send: Any) -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            await let_pass(5.0)
            inside -= 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        edge = Edge(waiting, name="vendor-bound", loop_admission=LoopAdmission())
        answers = await asyncio.gather(*(ask(edge) for _ in range(500)))
        assert {answer.status for answer in answers} == {200}
        assert most == 500
        edge.close()

    run_virtual(main())


def test_one_long_stop_of_the_loop_refuses_nobody() -> None:
    """A loop that is busy for a third of its time and then stops for 100 ms catches up."""

    async def main() -> Pod:
        pod = Pod(burn=0.002, loop_admission=LoopAdmission())
        admission_cpu[0] = lambda: pod.cpu
        clients = [pod.client(number * 0.006) for number in range(300)]
        loop = asyncio.get_running_loop()
        loop.call_later(1.0, lambda: pod.compute(0.1))
        await asyncio.gather(*clients)
        pod.edge.close()
        return pod

    assert not run_virtual(main()).refused


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_who_matters_less_is_refused_first(seed: int) -> None:
    """At three times capacity, some of it critical: few of those are refused, most of the rest."""

    async def main() -> Pod:
        pod = Pod(loop_admission=LoopAdmission())
        admission_cpu[0] = lambda: pod.cpu
        rng = Random(seed)
        at, clients = 0.0, []
        while at < 2.5:
            at += rng.expovariate(3 * CAPACITY)
            critical = rng.random() < 0.15
            level = Criticality.CRITICAL_PLUS if critical else Criticality.SHEDDABLE
            clients.append(pod.client(at, level))
        await asyncio.gather(*clients)
        pod.edge.close()
        return pod

    pod = run_virtual(main())
    assert current_criticality() is Criticality.CRITICAL

    def share(level: Criticality) -> float:
        served = len([1 for at, _, own in pod.served if own is level and at > WARM_UP])
        refused = len([1 for at, _, own in pod.refused if own is level and at > WARM_UP])
        return refused / (served + refused)

    assert share(Criticality.CRITICAL_PLUS) < 0.2
    assert share(Criticality.SHEDDABLE) > 0.6


def test_a_refusal_says_why_and_when() -> None:
    """It is `Overloaded`, counted by the guard, and in shadow mode nobody is refused."""
    assert under(5, seconds=1.5, loop_admission=LoopAdmission(mode="shadow")).refused == 0

    async def main() -> None:
        edge = Edge(lambda *_: None, name="told", loop_admission=LoopAdmission())  # type: ignore[arg-type,return-value]
        gate: Any = edge.guard.bounds[0]
        with pytest.raises(Overloaded, match="more to do than it gets done") as caught:
            gate.refuse_request("shed")
        assert caught.value.reason == "shed_by_loop_admission"
        assert caught.value.policy == "loop_admission"
        assert gate.snapshot(0.0)["rejected"] == 1
        edge.close()

    run_virtual(main())


def test_turns_are_changed_at_run_time_and_checked() -> None:
    """A bad value raises and says what to write."""
    turns = LoopAdmission()
    turns.update(slice=0.01, mode="off")
    assert repr(turns) == "LoopAdmission(slice=0.01, target=0.1, cheap=0.001, patience=1)"
    for wrong in ({"slice": 0}, {"target": -1}, {"patience": -1}, {"cheap": "x"}):
        with pytest.raises((TypeError, ValueError)):
            LoopAdmission(**wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="it takes slice"):
        turns.update(speed=1)


async def mixed(pod: Pod, *, computing: float, waiting: int, seconds: float = 3.0) -> None:
    """Ask for so many computations a second, beside so many requests that only wait."""

    async def waits() -> None:
        await ask(pod.edge, "/wait", on_send=lambda _message: None)

    inner = pod.edge.app

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/wait":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await let_pass(seconds)
            await send({"type": "http.response.body", "body": b""})
        else:
            await inner(scope, receive, send)

    pod.edge.app = app
    idle = [asyncio.ensure_future(waits()) for _ in range(waiting)]
    clients = [pod.client(number / computing) for number in range(int(seconds * computing))]
    await asyncio.gather(*clients, *idle)
    pod.edge.close()


@pytest.mark.parametrize("waiting", [0, 60])
def test_requests_that_wait_and_streams_take_nobodys_turn(waiting: int) -> None:
    """However many are open: half the load is served whole, and at twice the load what can be."""

    async def main(computing: float) -> Pod:
        pod = Pod(loop_admission=LoopAdmission())
        admission_cpu[0] = lambda: pod.cpu
        await mixed(pod, computing=computing, waiting=waiting)
        return pod

    assert not run_virtual(main(0.5 * CAPACITY)).refused
    busy = run_virtual(main(2.0 * CAPACITY))
    assert len(busy.served) > 0.8 * 3.0 * CAPACITY


def test_a_loop_that_ends_in_the_middle_of_a_turn_locks_nobody_out() -> None:
    """What was to come in that loop never does: the next one is looked after from the beginning."""
    edge = Edge(text_app(), name="loops", loop_admission=LoopAdmission())
    gate: Any = edge.guard.bounds[0]

    async def main() -> int:
        return (await ask(edge)).status

    assert run_virtual(main()) == 200
    gate._in_turn = gate._turn_scheduled = True
    gate.unwatched = float("-inf")
    assert run_virtual(main()) == 200
    assert not gate._turn_scheduled
    edge.close()


@pytest.mark.parametrize(
    ("waiting", "mode", "at_once"),
    [
        ([Criticality.CRITICAL] * 2, "enforce", True),
        ([Criticality.CRITICAL_PLUS, Criticality.CRITICAL], "enforce", True),
        ([Criticality.CRITICAL], "enforce", False),
        ([Criticality.CRITICAL, Criticality.SHEDDABLE], "enforce", False),
        ([Criticality.SHEDDABLE] * 5, "enforce", False),
        ([Criticality.CRITICAL] * 2, "shadow", False),
        ([Criticality.CRITICAL] * 2, "off", False),
    ],
)
def test_one_too_many_is_refused_at_once_if_enough_who_matter_as_much_wait(
    waiting: list[Criticality], mode: Any, at_once: Any
) -> None:
    """While the queue does not drain; to let all wait in order to refuse most costs too much."""

    async def main() -> None:
        edge = Edge(text_app(), name="full", loop_admission=LoopAdmission())
        gate: Any = edge.guard.bounds[0]
        await ask(edge)
        for level in waiting:
            with criticality(level):
                gate.slots.join(
                    loop_admission._TurnWaiter(gate.slots, gate.host.clock, 0.0, 9.0, max)
                )
        gate.strict, gate.cost = True, BURN
        gate.policy.mode = mode
        with pytest.raises(Overloaded) if at_once else nullcontext():
            gate.refuse_if_full(0.0)
        other = Criticality.CRITICAL_PLUS
        if waiting.count(other) < 2:
            with criticality(other):
                gate.refuse_if_full(0.0)
        edge.close()

    run_virtual(main())


def test_who_is_refused_at_once_never_waited_and_took_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is answered in the turn in which it came, counted, and its limits are untouched."""

    async def main() -> None:
        limits = RequestLimits(RequestLimit("5/s", by="address"), name="untouched")
        edge = Edge(
            text_app(),
            name="full",
            loop_admission=LoopAdmission(),
            limits=limits,
            inbound=Inbound(),
        )
        gate: Any = edge.guard.bounds[0]
        await ask(edge)
        monkeypatch.setattr(gate.__class__, "_batch", lambda _gate: 0)
        await let_pass(1.0)
        gate.strict, gate.free, gate.unwatched = True, False, float("-inf")
        gate._in_turn = True  # so that whoever is not refused at once waits
        before = limits.snapshot()
        task = asyncio.ensure_future(ask(edge))
        await asyncio.sleep(0)  # noqa: TID251 - a turn of the loop, no time
        answer = task.result()
        assert answer.status == 503
        assert b"shed_by_loop_admission" in answer.body
        assert gate.snapshot(0.0)["rejected"] == 1
        assert limits.snapshot() == before
        edge.close()

    run_virtual(main())
