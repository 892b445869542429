from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from itertools import pairwise, takewhile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import deadline, subscribe
from seawall.context import deadline_scope
from seawall.events import HealthChanged
from seawall.testing import ScriptedService, answer, fail, hang, run_virtual, slow
from seawall.web.health import Degraded, Health, Healthy, Unhealthy
from seawall.web.health import watch as _health_watch
from seawall.web.health.watch import RANKS, Damping
from seawall.web.lifecycle import Lifecycle
from tests.support import examples, falsified, let_pass
from tests.web.health.support import Server, plain_app, probe

WALL = 1_700_000_000.0


def new_health(**options: Any) -> Health:
    return Health(wall=lambda: WALL, **options)


async def status_of(health: Health, level: str) -> int:
    return (await probe(health, f"/health/{level}")).status


# --- Levels and answers ---


def test_a_dead_dependency_takes_readiness_and_not_life():
    """The process of a service whose database is gone must not be restarted for it."""

    async def main() -> None:
        health = new_health()
        health.add("db", ScriptedService(fail(ConnectionError)).acall)
        assert await status_of(health, "live") == 200
        assert await status_of(health, "ready") == 503
        assert await status_of(health, "deep") == 503

    run_virtual(main())


def test_each_level_holds_those_below():
    """A check counts for its own level and the ones above it."""

    async def main() -> None:
        health = new_health()
        services = {level: ScriptedService(answer()) for level in ("live", "ready", "deep")}
        for level, service in services.items():
            health.add(f"{level} check", service.acall, level=level)  # type: ignore[call-overload]
        for level in services:
            await health.state_of(level)  # type: ignore[arg-type]
            await let_pass(60.0)
        assert {level: service.calls for level, service in services.items()} == {
            "live": 3,
            "ready": 2,
            "deep": 1,
        }

    run_virtual(main())


@pytest.mark.parametrize(
    ("step", "status", "word", "output"),
    [
        (answer(None), 200, "pass", None),
        (answer(value=True), 200, "pass", None),
        (answer(Healthy("fine")), 200, "pass", "fine"),
        (answer("slow today"), 200, "warn", "slow today"),
        (answer(Degraded("old")), 200, "warn", "old"),
        (answer(Unhealthy("gone")), 503, "fail", "gone"),
        (answer(value=False), 503, "fail", "it returned False"),
        (answer(3), 503, "fail", "it returned int: return None, text or a finding"),
        (fail(OSError("postgres://me:secret@db")), 503, "fail", "OSError"),
        (hang(), 503, "fail", "no answer within 5 s"),
    ],
)
def test_what_a_check_says_is_what_the_answer_says(
    step: Any, status: int, word: str, output: str | None
):
    """Each way to end a check has its status, and no error's text is ever shown."""

    async def main() -> None:
        health = new_health(details="always", name="orders", version="1.2")
        health.add("db", ScriptedService(step).acall)
        answered = await probe(health, "/health/ready")
        assert answered.status == status
        document = answered.document
        assert document["status"] == word
        assert (document["serviceId"], document["version"]) == ("orders", "1.2")
        (told,) = document["checks"]["db:responseTime"]
        assert told["status"] == word
        assert told.get("output") == output
        assert told["time"] == "2023-11-14T22:13:20.000+00:00"
        assert (told["componentId"], told["observedUnit"]) == ("db", "ms")
        assert b"secret" not in answered.body
        assert "secret" not in json.dumps(document)

    run_virtual(main())


def test_the_answer_is_health_json_that_nobody_stores():
    """Type, length and caching are right for GET; HEAD has the same headers and no body."""

    async def main() -> None:
        health = new_health()
        got = await probe(health, "/health/live")
        head = await probe(health, "/health/live", "HEAD")
        assert got.body == b'{"status":"pass"}'
        assert (
            got.headers
            == head.headers
            == {
                "content-type": "application/health+json",
                "content-length": "17",
                "cache-control": "no-store",
            }
        )
        assert head.body == b""
        refused = await probe(health, "/health/live", "POST")
        assert (refused.status, refused.headers["allow"]) == (405, "GET, HEAD")
        assert (await probe(health, "/health/else")).status == 404

    run_virtual(main())


def test_a_measured_value_is_told_with_its_unit():
    """A finding with a value is an observed value; nonsense is left out."""

    async def main() -> None:
        health = new_health(details="always")
        health.add("disk", ScriptedService(answer(Healthy(value=12.5, unit="%"))).acall)
        health.add("bad", ScriptedService(answer(Healthy(value=float("nan")))).acall)
        checks = (await probe(health, "/health/ready")).document["checks"]
        assert checks["disk:value"][0]["observedValue"] == 12.5
        assert checks["disk:value"][0]["observedUnit"] == "%"
        assert checks["bad:responseTime"][0]["observedValue"] == 0

    run_virtual(main())


@pytest.mark.parametrize(
    ("details", "shown"),
    [
        ("never", []),
        ("deep", ["deep"]),
        ("always", ["live", "ready", "deep"]),
        (lambda scope: scope["client"] == ("10.0.0.1", 1), ["live", "ready", "deep"]),
        (lambda scope: scope["no such"], []),
        (lambda _scope: "yes", []),
    ],
)
def test_details_are_shown_only_where_they_may_be(details: Any, shown: list[str]):
    """Names and outputs of checks are in the answer only if `details` says so."""

    async def main() -> None:
        health = new_health(details=details)
        health.add("db", ScriptedService(answer("slow")).acall, level="live")
        found = []
        for level in ("live", "ready", "deep"):
            answered = await probe(health, f"/health/{level}", client=("10.0.0.1", 1))
            assert answered.document["status"] == "warn"
            if "checks" in answered.document:
                found.append(level)
            else:
                assert answered.body == b'{"status":"warn"}'
        assert found == shown

    run_virtual(main())


def test_paths_follow_the_prefix_and_the_root():
    """The prefix can be chosen, and a mount's or server's root path is no part of it."""

    async def main() -> None:
        health = new_health(prefix="/internal")
        assert list(health.paths) == ["/internal/live", "/internal/ready", "/internal/deep"]
        assert (await probe(health, "/api/internal/live", root_path="/api")).status == 200
        assert (await probe(health, "/internal/live", root_path="/internal")).status == 200
        assert (await probe(health, "/a/internal/live", root_path="/a/internal")).status == 200
        assert (await probe(health, "/live", root_path="/a")).status == 404
        mounted = new_health(prefix="")
        assert (await probe(mounted, "/health/ready", root_path="/health")).status == 200

    run_virtual(main())


class Unspeakable(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]  # and it is no text


def test_nothing_that_fails_in_telling_keeps_a_probe_waiting():
    """As much of an error is shown as can be."""

    async def main() -> None:
        health = Health()
        health.add("odd", ScriptedService(fail(Unspeakable({}), times=9)).acall, ttl=0.0)
        for _ in range(2):
            answer = await probe(health, "/health/deep")
        told = answer.document["checks"]["odd:responseTime"][0]
        assert told["output"] == "Unspeakable"
        assert health.snapshot()["checks"]["odd"]["runs"] == 2
        assert health.snapshot()["checks"]["odd"]["output"] == "Unspeakable"

    run_virtual(main())


@pytest.mark.parametrize("wall", [lambda: 1 / 0, lambda: 1e20], ids=["raises", "far"])
def test_a_clock_that_fails_makes_no_service_ill(wall: Callable[[], float]):
    """Only the time of the check is not known."""

    async def main() -> None:
        health = Health(wall=wall)
        health.add("fine", ScriptedService(answer("fine")).acall)
        answered = await probe(health, "/health/deep")
        assert answered.status == 200
        assert answered.document["checks"]["fine:responseTime"][0]["time"][:4] == "1970"

    run_virtual(main())


def test_two_loops_at_once_each_run_a_check_once():
    """What one loop runs does not stop, nor take the place of, what the other does."""
    health, inside, go_on = Health(), threading.Barrier(2), threading.Event()
    both = threading.Barrier(3)

    @health.add("async")
    async def slow() -> None:
        loop = asyncio.get_running_loop()
        inside.wait(10)  # both loops are in it now: neither has made the other forget
        await loop.run_in_executor(None, go_on.wait, 10)

    @health.add("plain")
    def plain() -> None:
        go_on.wait(10)

    async def ask() -> list[Any]:
        asked = [asyncio.create_task(health.state_of("ready")) for _ in range(5)]
        await let_pass(0.0)
        await asyncio.get_running_loop().run_in_executor(None, both.wait, 10)
        more = [asyncio.create_task(health.state_of("ready")) for _ in range(5)]
        await let_pass(0.0)
        go_on.set()
        return await asyncio.gather(*asked, *more)

    states: list[Any] = []
    threads = [threading.Thread(target=lambda: states.extend(asyncio.run(ask()))) for _ in "ab"]
    for thread in threads:
        thread.start()
    both.wait(10)
    for thread in threads:
        thread.join(10)
    assert states == ["healthy"] * 20
    assert {seen["runs"] for seen in health.snapshot()["checks"].values()} == {2}


def test_what_is_not_critical_only_degrades():
    """The failure of something the service can do without is a warning."""

    async def main() -> None:
        health = new_health()
        health.add("mail", ScriptedService(fail(OSError)).acall, critical=False)
        assert (await probe(health, "/health/ready")).document == {"status": "warn"}
        assert await health.state_of("ready") == "degraded"
        assert health.snapshot()["checks"]["mail"]["state"] == "unhealthy"
        answered = await probe(health, "/health/deep")
        assert (answered.status, answered.document["status"]) == (200, "warn")
        (mail,) = answered.document["checks"]["mail:responseTime"]
        assert mail["status"] == "fail"

    run_virtual(main())


def test_readiness_follows_the_lifecycle():
    """Before it has started and while it drains it is not ready, though every check passes."""

    async def main() -> None:
        lifecycle = Lifecycle()
        health = new_health(lifecycle=lifecycle)
        lifecycle.warm_up(ScriptedService(slow(2.0)).acall)
        server = Server(lifecycle, plain_app)
        await server.startup()
        for expected in (503, 200):
            answered = await probe(health, "/health/ready")
            assert answered.status == expected
            assert answered.document.get("output") == ("starting" if expected == 503 else None)
            assert await status_of(health, "live") == 200
            await let_pass(2.5)
        assert lifecycle.begin()
        drain = asyncio.create_task(lifecycle.drain())
        await let_pass(0)
        assert (await probe(health, "/health/ready")).document["output"] == "draining"
        lifecycle.end()
        await drain
        await server.shutdown()

    run_virtual(main())


# --- Time, and how often a check runs ---


@pytest.mark.parametrize(("level", "seconds"), [("live", 1.0), ("ready", 5.0), ("deep", 30.0)])
def test_timeouts_are_those_of_the_level(level: Any, seconds: float):
    """A check that hangs is unhealthy after 1, 5 or 30 seconds, or its own timeout."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        health = new_health()
        service = ScriptedService(hang())
        health.add("a", service.acall, level=level)
        health.add("b", ScriptedService(hang()).acall, level=level, timeout=0.5)
        health.add("c", ScriptedService(slow(0.4)).acall, level=level)
        began = loop.time()
        assert await status_of(health, level) == 503
        assert loop.time() - began == seconds  # at once, not one after the other
        await let_pass(0)
        assert service.running == 0
        states = {name: seen["state"] for name, seen in health.snapshot()["checks"].items()}
        assert states == {"a": "unhealthy", "b": "unhealthy", "c": "healthy"}

    run_virtual(main())


def test_a_thousand_probes_run_each_check_once():
    """Results are shared while they are made and for their time to live afterwards."""

    async def main() -> None:
        health = new_health()
        service = ScriptedService(slow(1.0))
        health.add("db", service.acall)
        assert set(await asyncio.gather(*(status_of(health, "ready") for _ in range(1000)))) == {
            200
        }
        assert (service.calls, service.peak) == (1, 1)
        await let_pass(4.9)
        await status_of(health, "ready")
        assert service.calls == 1
        await let_pass(0.2)
        await status_of(health, "ready")
        assert service.calls == 2

    run_virtual(main())


def test_a_probe_that_goes_away_stops_no_check():
    """Cancelled probes leave the check to those who still wait for it."""

    async def main() -> None:
        health = new_health()
        service = ScriptedService(slow(2.0))
        health.add("db", service.acall)
        gone = [asyncio.create_task(status_of(health, "ready")) for _ in range(3)]
        stays = asyncio.create_task(status_of(health, "ready"))
        await let_pass(1.0)
        for task in gone:
            task.cancel()
        assert await stays == 200
        assert service.calls == 1

    run_virtual(main())


def test_a_check_that_cannot_be_stopped_is_not_started_again():
    """One that swallows its cancellation is reported for as long as it runs, and stays alone."""

    async def main() -> None:
        health = new_health(details="always")
        running = asyncio.Event()

        async def stubborn() -> None:
            while not running.is_set():
                try:
                    await running.wait()
                except asyncio.CancelledError:
                    continue

        health.add("stubborn", stubborn, timeout=1.0, ttl=2.0)
        for _ in range(5):
            answered = await probe(health, "/health/ready")
            assert answered.status == 503
            await let_pass(3.0)
        (told,) = answered.document["checks"]["stubborn:responseTime"]
        assert told["output"] == "it has been running for 13.0 s and does not stop"
        assert health.snapshot()["checks"]["stubborn"]["runs"] == 1
        running.set()
        await let_pass(3.0)
        assert await status_of(health, "ready") == 200

    run_virtual(main())


def test_a_thread_that_hangs_is_abandoned_counted_and_left_alone():
    """A plain check never blocks the loop; while its thread hangs, none is started beside it."""
    gate = threading.Event()
    starts: list[int] = []

    def blocking() -> None:
        starts.append(threading.get_ident())
        gate.wait(10)

    async def main() -> None:
        health = new_health(details="always")
        health.add("disk", blocking, timeout=0.05, ttl=0.0)
        assert await status_of(health, "ready") == 503
        await let_pass(0)
        assert health.snapshot()["checks"]["disk"]["abandoned"] == 1
        answered = await probe(health, "/health/ready")
        (told,) = answered.document["checks"]["disk:responseTime"]
        assert told["output"] == "its last run still hangs in a thread"
        gate.set()
        while health.snapshot()["checks"]["disk"]["abandoned"]:
            await let_pass(0.01)
        assert await status_of(health, "ready") == 200

    asyncio.run(main())
    assert len(starts) == 2
    assert threading.get_ident() not in starts


def test_a_plain_check_may_hand_over_something_to_await():
    """What a plain function returns and can be awaited is awaited in the loop."""
    threads: list[int] = []

    async def rest() -> str:
        threads.append(threading.get_ident())
        return "from the loop"

    def begin() -> Any:
        threads.append(threading.get_ident())
        return rest()

    async def main() -> None:
        health = new_health()
        health.add("both", begin)
        assert await health.state_of("ready") == "degraded"
        assert health.snapshot()["checks"]["both"]["output"] == "from the loop"

    run_virtual(main())
    assert threads[0] != threads[1] == threading.get_ident()


def test_a_check_does_not_inherit_the_probes_deadline():
    """Who asks and how long they can wait is no business of what is shared by all who ask."""
    seen: list[object] = []

    async def look() -> None:
        seen.append(deadline_scope())

    async def main() -> None:
        health = new_health()
        health.add("db", look)
        with deadline(0.5):
            await health.state_of("ready")

    run_virtual(main())
    assert seen == [None]


def test_it_serves_one_loop_after_another():
    """A check that was under way when its loop ended does not count as running for the next."""
    health = new_health()
    service = ScriptedService(hang(), answer())
    health.add("db", service.acall, ttl=0.0)

    async def first() -> None:
        task = asyncio.create_task(health.state_of("ready"))
        await let_pass(0.1)
        task.cancel()

    async def second() -> None:
        assert await health.state_of("ready") == "healthy"

    run_virtual(first())
    run_virtual(second())


# --- Changes ---


def test_each_change_is_told_once():
    """A check and its level tell when they turn bad and when they turn good, and not between."""
    events: list[HealthChanged] = []

    async def main() -> None:
        health = new_health(name="orders")
        error = OSError("down\tfor good " + "x" * 500 + "\nand more")
        service = ScriptedService(answer(), fail(error, times=2), answer())
        health.add("db", service.acall, ttl=1.0)
        for _ in range(5):
            await status_of(health, "ready")
            await let_pass(1.5)

    unsubscribe = subscribe(events.append, HealthChanged)
    run_virtual(main())
    unsubscribe()
    assert [(event.check, event.before, event.after) for event in events] == [
        ("db", "healthy", "unhealthy"),
        ("ready", "healthy", "unhealthy"),
        ("db", "unhealthy", "healthy"),
        ("ready", "unhealthy", "healthy"),
    ]
    assert events[0].guard == "orders"
    assert events[0].output.startswith("OSError: down\\tfor good xxx")
    assert len(events[0].output) == 200


def test_thresholds_keep_a_flapping_check_calm():
    """With failures=3 one bad result changes nothing; with successes=2 one good one neither."""

    async def main() -> None:
        health = new_health()
        service = ScriptedService(
            answer(), fail(OSError, times=2), answer(), fail(OSError, times=3), answer(times=2)
        )
        health.add("db", service.acall, ttl=1.0, failures=3, successes=2)
        seen = []
        for _ in range(9):
            seen.append(await status_of(health, "ready"))
            await let_pass(1.5)
        assert seen == [200] * 6 + [503, 503, 200]

    run_virtual(main())


# --- What always holds ---

STATES = st.sampled_from(["healthy", "degraded", "unhealthy"])
SEEN = st.tuples(st.lists(STATES, max_size=30), st.integers(1, 4), st.integers(1, 4))


def changes_need_a_row(case: tuple[list[Any], int, int]) -> None:
    """Leave a state exactly after enough results in a row that are all worse, or all better."""
    seen, failures, successes = case
    damping = Damping(failures, successes)
    history: list[Any] = []
    for state in seen:
        before = damping.state
        after = damping.update(state)
        history.append(state)
        if before is None:
            assert after == state
        else:
            sides = [_sign(RANKS[past] - RANKS[before]) for past in reversed(history)]
            row = len(list(takewhile(sides[0].__eq__, sides)))
            needed = {1: failures, -1: successes, 0: 1}[sides[0]]
            assert after == (state if row >= needed else before)
        if after != before:
            history = []


def _sign(number: int) -> int:
    return (number > 0) - (number < 0)


@given(SEEN)
def test_a_change_takes_its_number_of_results_in_a_row(case: Any):
    """Damping believes a change exactly when enough results in a row say so."""
    changes_need_a_row(case)


def test_without_damping_one_result_would_do(monkeypatch: pytest.MonkeyPatch):
    """The property fails if every result is believed at once."""

    def believes(self: Damping, seen: Any) -> Any:
        self.state = seen
        return seen

    monkeypatch.setattr(Damping, "update", believes)
    assert falsified(changes_need_a_row, SEEN)


PROBES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=40
).flatmap(lambda probes: st.tuples(st.just(probes), st.integers(0, 30)))


def probes_are_no_load(case: tuple[list[tuple[int, int]], int]) -> None:
    """However many probes come and go, a check runs alone, and at most once in its ttl."""
    probes, takes = case

    async def main() -> None:
        loop = asyncio.get_running_loop()
        health = new_health()
        begins: list[float] = []
        running = [0]

        async def look() -> None:
            begins.append(loop.time())
            running[0] += 1
            assert running[0] == 1
            try:
                await let_pass(takes / 10)
            finally:
                running[0] -= 1

        health.add("db", look, timeout=2.0, ttl=1.0)

        async def ask(at: float, patience: float) -> None:
            await let_pass(at)
            try:
                async with asyncio.timeout(patience):
                    await health.state_of("ready")
            except TimeoutError:
                pass
            except asyncio.CancelledError:
                raise AssertionError("it was cancelled with another probe") from None

        await asyncio.gather(*(ask(at / 10, patience / 10) for at, patience in probes))
        await let_pass(5.0)
        assert (
            health.snapshot()["checks"]["db"]["state"] == ("healthy" if takes < 20 else "unhealthy")
            or takes == 20
        )
        assert all(later - sooner >= 1.0 for sooner, later in pairwise(begins))
        assert 1 <= len(begins) <= len(probes)

    run_virtual(main())


@examples(50)
@given(PROBES)
def test_probes_cannot_become_load(case: Any):
    """Single flight and the time to live hold for any pattern of probes that come and give up."""
    probes_are_no_load(case)


def test_without_sharing_probes_would_be_load(monkeypatch: pytest.MonkeyPatch):
    """The property fails if a probe does not join the run that is under way."""

    def refresh(self: Any) -> Any:
        self.run_count += 1
        self._run = _health_watch._Run(self, asyncio.get_running_loop(), self.clock.now())
        return self._run.future

    monkeypatch.setattr(_health_watch.Watch, "refresh", refresh)
    assert falsified(probes_are_no_load, PROBES)


async def _cancels_what_it_waits_for(futures: Any) -> None:
    await asyncio.gather(*futures)


def test_without_standing_apart_a_probe_that_goes_away_would_take_the_check_with_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """The property fails if a probe waits in a way that cancels what all wait for."""
    monkeypatch.setattr("seawall.web.health.health.wait", _cancels_what_it_waits_for)
    assert falsified(probes_are_no_load, PROBES)


@given(st.text(min_size=1, max_size=400))
def test_whatever_an_error_says_only_its_type_is_shown(text: str):
    """An answer does not depend on an error's text; events and snapshots hold one clean line."""

    async def main() -> None:
        health = new_health(details="always")
        health.add("db", ScriptedService(fail(OSError(f"secret{text}"))).acall)
        answered = await probe(health, "/health/ready")
        (told,) = answered.document["checks"]["db:responseTime"]
        assert told["output"] == "OSError"
        assert b"secret" not in answered.body
        logged = health.snapshot()["checks"]["db"]["output"]
        assert logged.isprintable()
        assert len(logged) <= 200

    run_virtual(main())


# --- Arguments ---


def test_arguments_are_checked():
    """What cannot be meant says what to write instead."""
    health = new_health()

    async def fine() -> None: ...

    async def items() -> Any:
        yield 1

    health.add("db", fine)
    for name in ("db", "live", "a:b", "", "a\nb", 3):
        with pytest.raises(ValueError, match="name="):
            health.add(name, fine)  # type: ignore[call-overload]
    for bad in (items, 3, Health):
        with pytest.raises(TypeError, match="pass a function without arguments"):
            health.add("other", bad)  # type: ignore[call-overload]
    for options in ({"level": "all"}, {"timeout": 0}, {"ttl": -1}, {"failures": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))}"):
            health.add("other", fine, **options)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="details"):
        Health(details="sometimes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefix"):
        Health(prefix="health")
    health.remove("db")
    with pytest.raises(KeyError):
        health.remove("db")
    for number in range(100):
        health.add(f"check {number}", fine)
    with pytest.raises(ValueError, match="at most 100"):
        health.add("one more", fine)


def test_a_check_can_be_decorated():
    """`@health.add(name)` registers the function and leaves it as it is."""

    async def main() -> None:
        health = new_health()

        @health.add("db", level="deep")
        async def database() -> str:
            return "slow"

        assert await database() == "slow"
        assert await health.state_of("ready") == "healthy"
        assert await health.state_of("deep") == "degraded"
        assert repr(health) == "<Health 'service': 1 checks>"

    run_virtual(main())
