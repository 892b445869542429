from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from math import inf

import pytest

import seawall
from seawall import Bulkhead, Fallback, Guard, Retry, Timeout, static
from seawall.sim import Latency, ServiceFailed, World, ramp, simulate, zipf
from seawall.sim.services import pause
from tests.support import QUICK

OUTAGE = """
import json
from seawall import Guard
from seawall.sim import Latency, World
with World(seed=3) as world:
    vendor = world.service("vendor", workers=10, latency=Latency.exponential(0.05))
    guard = Guard.standard("vendor", on=ConnectionError, timeout=0.3, limit=40)
    world.clients("users", guard(vendor.acall), rate=60, patience=1.0, comes_back=0.5)
    world.at(10, vendor.down(), lasts=20)
    world.at(35, vendor.crash(), lasts=1)
    result = world.run(minutes=1)
print(json.dumps([result.summary(), result.series()]))
"""


def replay(hash_seed: int) -> bytes:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", OUTAGE]
    # Runs this project's own code.
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout  # noqa: S603


def test_a_seed_replays_to_the_byte():
    """Two processes with different hash seeds write the same bytes."""
    first = replay(1)
    assert first == replay(2)
    assert json.loads(first)[0]["came"] > 3000


def test_another_seed_gives_another_run():
    """What replays is the seed, not a constant."""
    assert mm1(0.5, seed=1, seconds=60).came() != mm1(0.5, seed=2, seconds=60).came()


def mm1(load: float, *, workers: int = 1, seed: int = 1, seconds: float = 600):
    def build(world: World) -> None:
        mean = workers * 0.01
        service = world.service("server", workers=workers, latency=Latency.exponential(mean))
        world.clients("clients", service.acall, rate=100 * load)

    return simulate(build, seed=seed, seconds=seconds)


@pytest.mark.parametrize("load", [0.5] if QUICK else [0.3, 0.5, 0.7])
def test_one_worker_is_the_mm1_queue(load: float):
    """The mean time in the system is 1 / (mu - lambda), within 5 %."""
    result = mm1(load)
    took = [one for step in result.clients["clients"].latencies for one in step]
    assert sum(took) / len(took) == pytest.approx(1 / (100 - 100 * load), rel=0.05)


def test_several_workers_are_the_mmc_queue():
    """With four workers at 80 % the mean is that of Erlang's formula, within 5 %."""
    result = mm1(0.8, workers=4)
    took = [one for step in result.clients["clients"].latencies for one in step]
    # Erlang C for c = 4, a = 3.2: P(wait) = 0.5964; mean = 1/mu + P(wait) / (c mu - lambda).
    assert sum(took) / len(took) == pytest.approx(0.04 + 0.5964 / (100 - 80), rel=0.05)


def test_an_outage_is_seen_and_its_end_too():
    """No call is served while the vendor is down, and nearly all are two seconds later."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=0.05)
        guard = Guard.standard("vendor", on=ConnectionError, timeout=0.5)
        world.clients("users", guard(vendor.acall), rate=50)
        world.at(20, vendor.down(), lasts=30)
        result = world.run(minutes=2)
    assert result.share(0, 20) == 1.0
    assert result.share(20, 50) == 0.0
    assert result.recovery() <= 2
    assert result.verdict.kind == "recovers"
    assert "open" in result.guards["vendor"].breaker
    assert result.guards["vendor"].breaker[-1] == "closed"
    assert result.load("vendor", 40, 50) < 10  # the breaker is open
    assert set(result.clients["users"].errors) == {"ServiceFailed", "CircuitOpen"}


def faulty(change, **service):
    """Run a service that `change(service)` happens to, from second 10 to 20 of 30."""
    with World(seed=1) as world:
        vendor = world.service("vendor", **{"latency": 0.01, **service})
        world.clients("users", vendor.acall, rate=40, patience=1.0, keys=zipf(10, 0.0))
        world.at(10, change(vendor), lasts=10)
        return world.run(seconds=30)


@pytest.mark.parametrize(
    ("change", "share"),
    [
        (lambda vendor: vendor.down(), 0.0),
        (lambda vendor: vendor.down(hangs=True), 0.0),
        (lambda vendor: vendor.slow(200), 0.0),
        (lambda vendor: vendor.slow(20), 1.0),
        (lambda vendor: vendor.slow(200, share=0.5), 0.5),
        (lambda vendor: vendor.errors(0.3), 0.7),
        (lambda vendor: vendor.errors(when=lambda key: key == 3), 0.9),
        (lambda vendor: vendor.crash(), 0.0),
    ],
)
def test_failure_modes_hurt_as_much_as_they_say(change, share):
    """The share of good answers during the change is what it leaves, and 1 before and after."""
    result = faulty(change)
    assert result.share(0, 9) == 1.0
    assert result.share(10, 20) == pytest.approx(share, abs=0.07)
    assert result.share(21) == 1.0


def test_who_waits_for_a_service_that_hangs_gives_up():
    """Hanging is felt as lost patience, refusing as an error."""
    assert faulty(lambda vendor: vendor.down(hangs=True)).ended("gave_up", 10, 20) > 300
    assert faulty(lambda vendor: vendor.down()).ended("failed", 10, 20) > 300


def test_a_crash_loses_the_calls_in_progress():
    """All four calls inside fail at once, one second before the first would have been answered."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=5.0, workers=2)
        clients = world.clients("users", vendor.acall, rate=0)
        world.at(1, clients.burst(4))
        world.at(5, vendor.crash(), lasts=1)
        result = world.run(seconds=10)
    assert result.ended("failed") == 4
    assert result.services["vendor"].in_flight[4:] == [0] * 6


def test_a_stall_fills_the_queue_and_its_end_empties_it():
    """Nothing is begun for ten seconds; the age of the queue's head says for how long."""
    result = faulty(lambda vendor: vendor.stall(), workers=4)
    record = result.services["vendor"]
    assert record.queued[18] > 300
    assert record.queue_age[18] == pytest.approx(9, abs=0.3)
    assert record.queued[-1] == 0


def test_fewer_workers_serve_less():
    """One of four workers serves a quarter; the rest of the users lose patience."""
    result = faulty(lambda vendor: vendor.resize(1), workers=4, latency=0.09)
    assert result.share(13, 20) < 0.5
    assert result.share(0, 9) == 1.0


def test_capacity_is_exact_whatever_the_latency_is():
    """20 calls a second of 32 ms each: one worker, which rests between two calls."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=0.032, capacity=20)
        world.clients("users", vendor.acall, rate=40, patience=2.0)
        result = world.run(seconds=60)
    assert result.services["vendor"].capacity == pytest.approx(20)
    begun = result.came() - result.services["vendor"].queued[-1]
    assert begun == pytest.approx(60 * 20, rel=0.02)


def test_a_full_queue_refuses():
    """Ten at once find one worker and a queue of four: five are refused."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=0.1, workers=1, max_queue=4)
        clients = world.clients("users", vendor.acall, rate=0)
        world.at(1, clients.burst(10))
        result = world.run(seconds=5)
    assert (result.ended("ok"), result.ended("failed")) == (5, 5)


def test_a_service_works_on_for_callers_who_left():
    """Impatient users leave after 0.1 s; each of their calls still takes its second of a worker."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=1.0, workers=1)
        clients = world.clients("users", vendor.acall, rate=0, patience=0.1)
        world.at(0.5, clients.burst(5))
        result = world.run(seconds=10)
    assert result.ended("gave_up") == 5
    assert result.services["vendor"].in_flight[:8] == [1, 1, 1, 1, 1, 0, 0, 0]


def test_a_service_with_a_guard_of_its_own_drops_expired_work():
    """The caller's deadline travels; the server's bulkhead refuses what is too late."""
    with World(seed=1) as world:
        server = Guard("server", Bulkhead(1, max_wait=inf))
        vendor = world.service("vendor", latency=0.4, workers=1, guard=server, deadlines=True)
        client = Guard("client", Timeout(1.0))
        clients = world.clients("users", client(vendor.acall), rate=0)
        world.at(1, clients.burst(10))
        result = world.run(seconds=10)
    assert result.ended("ok") == 2
    assert result.services["vendor"].in_flight[2:5] == [0] * 3


def test_a_handler_calls_further_services():
    """A service in front of a slow one takes the time of both, and fails with it."""
    with World(seed=1) as world:
        back = world.service("back", latency=0.2)

        async def handle(key: object) -> None:
            await back.acall(key)

        front = world.service("front", latency=0.1, handler=handle)
        world.clients("users", front.acall, rate=10, even=True)
        world.at(10, back.down(), lasts=10)
        result = world.run(seconds=30)
    assert result.quantile(0.5) == pytest.approx(0.3)
    assert result.share(10, 19.0) == 0.0
    assert result.load("back") == pytest.approx(result.load("front"), rel=0.02)


def test_a_mistake_in_a_handler_is_an_error_with_its_name():
    """It is counted as such, and does not hang its caller."""

    async def handle(key: object) -> None:
        raise KeyError(key)

    with World(seed=1) as world:
        front = world.service("front", handler=handle)
        world.clients("users", front.acall, rate=10)
        result = world.run(seconds=10)
    assert result.clients["users"].errors["KeyError"] == result.came() > 50


def test_a_network_delays_and_can_be_cut():
    """Two ways of 50 ms each; a cut one answers nobody."""
    with World(seed=1) as world:
        network = world.network(delay=0.05)
        vendor = world.service("vendor", latency=0.01, network=network)
        world.clients("users", vendor.acall, rate=20, patience=1.0)
        world.at(10, network.partition(), lasts=5)
        world.at(20, network.partition(refuses=True), lasts=5)
        world.at(30, network.loss(0.5), lasts=5)
        result = world.run(seconds=40)
    assert result.quantile(0.5) == pytest.approx(0.11)
    assert result.ended("gave_up", 10, 15) > 80
    assert result.ended("failed", 20, 25) > 80
    assert result.share(30, 35) == pytest.approx(0.25, abs=0.1)  # both ways have to succeed


def test_users_who_come_back_are_more_load():
    """Nobody is served for ten seconds: three returns make up to four times the calls."""

    def offered(comes_back: float) -> int:
        with World(seed=1) as world:
            vendor = world.service("vendor", latency=0.01)
            world.clients("users", vendor.acall, rate=20, comes_back=comes_back, return_after=0.1)
            world.at(10, vendor.down(), lasts=10)
            return world.run(seconds=20).came(10, 20)

    assert offered(1.0) == pytest.approx(4 * offered(0.0), rel=0.1)


def test_closed_users_wait_for_their_answers():
    """Ten users who think for 1 s and wait 1 s make 5 calls a second, however slow it gets."""
    with World(seed=1) as world:
        vendor = world.service("vendor", latency=1.0)
        world.users("clerks", vendor.acall, count=10, think=1.0)
        result = world.run(seconds=60)
    assert result.goodput() == pytest.approx(5, rel=0.05)


def test_rates_follow_a_ramp():
    """From 40 to 80 and back to 40 calls a second, in straight lines."""
    with World(seed=1) as world:
        vendor = world.service("vendor")
        world.clients("users", vendor.acall, rate=ramp((0, 40), (30, 80), (60, 40)), even=True)
        result = world.run(seconds=60)
    assert result.came(0, 5) / 5 == pytest.approx(43, rel=0.05)
    assert result.came(27, 33) / 6 == pytest.approx(78, rel=0.05)
    assert result.came() == pytest.approx(3600, rel=0.02)


def test_degraded_answers_are_told_from_real_ones():
    """A fallback answers while the vendor is down: degraded, not ok and not failed."""
    with World(seed=1) as world:
        vendor = world.service("vendor")
        guard = Guard("vendor", Fallback(static("later")))
        world.clients("users", guard(vendor.acall), rate=20)
        world.at(10, vendor.down(), lasts=10)
        result = world.run(seconds=30)
    assert result.share(10, 20) == 0.0
    assert result.answered(10, 20) == 1.0
    assert result.ended("degraded") == result.came(10, 20)


def test_a_lost_store_leaves_policies_to_themselves():
    """A shared limit of 10 a second holds with the store; without it all calls pass, as set."""
    with World(seed=1) as world:
        store = world.store()
        limit = seawall.RateLimit(
            "10/s", shared=store, name="vendor", on_store_failure="open", max_wait=0.0
        )
        vendor = world.service("vendor")
        world.clients("users", Guard("vendor", limit)(vendor.acall), rate=40)
        world.at(20, store.lost(), lasts=10)
        result = world.run(seconds=60)
    assert result.load("vendor", 5, 20) == pytest.approx(10, rel=0.1)
    assert result.load("vendor", 21, 29) > 30
    assert result.load("vendor", 35) == pytest.approx(10, rel=0.1)


def test_background_work_runs_beside_the_clients():
    """A loop of its own changes the world while clients come."""
    seen = []

    async def watch() -> None:
        while True:
            await pause(10)
            seen.append(world.clock.now())

    with World(seed=1) as world:
        world.background(watch)
        world.run(seconds=35)
    assert seen[:3] == [10, 20, 30]


def test_an_error_of_background_work_is_raised():
    """It would be lost otherwise."""

    async def fail() -> None:
        raise RuntimeError("of the work")

    with World(seed=1) as world:
        world.background(fail)
        with pytest.raises(RuntimeError, match="of the work"):
            world.run(seconds=5)


def test_guards_outside_are_untouched_and_guards_inside_end(caplog: pytest.LogCaptureFixture):
    """A world has its own names, closes its guards, and logs nothing."""
    outer = Guard("vendor-of-the-world", Timeout(1.0))
    try:
        with caplog.at_level(logging.DEBUG), World(seed=1) as world:
            vendor = world.service("vendor")
            inner = Guard.standard("vendor-of-the-world", on=ServiceFailed, timeout=1.0)
            world.clients("users", inner(vendor.acall), rate=50)
            world.at(5, vendor.down())
            result = world.run(seconds=60)
            logging.getLogger("seawall.dashboard").error("of a dashboard in the world")
        assert "open" in result.guards["vendor-of-the-world"].breaker
        assert inner.closed
        assert seawall.get_guard("vendor-of-the-world") is outer
        assert not [one for one in caplog.records if one.name.startswith("seawall")]
    finally:
        outer.close()


def test_mistakes_are_refused_with_what_to_write():
    """A guard with the wrong clock, a second run, a second name, a change that is none."""
    outside = Guard("outside-of-the-world", Retry(on=ServiceFailed))
    with World(seed=1) as world:
        vendor = world.service("vendor")
        with pytest.raises(ValueError, match="make it inside"):
            world.clients("users", outside(vendor.acall), rate=1)
        with pytest.raises(ValueError, match="choose another name"):
            world.service("vendor")
        with pytest.raises(TypeError, match=r"vendor\.down"):
            world.at(1, vendor.down)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="leave lasts= out"):
            world.at(1, world.clients("users", vendor.acall, rate=1).burst(3), lasts=2)
        world.run(seconds=1)
        with pytest.raises(RuntimeError, match="make another one"):
            world.run(seconds=1)
    with pytest.raises(RuntimeError, match="with World"):
        world.run()
    outside.close()
