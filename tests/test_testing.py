from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Cache,
    Fallback,
    Guard,
    RateLimit,
    RateLimited,
    Retry,
    ThreadBulkhead,
    Timeout,
    explain,
    snapshot,
    static,
)
from seawall.backoff import constant
from seawall.clock import SystemClock, VirtualClock
from seawall.runtime.call import bypass
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    held_permits,
    no_leaked_permits,
    policies_off,
    retries,
    run_virtual,
    slow,
    virtual_time,
)
from tests.support import new_guard

# --- Time ---


def test_guards_made_inside_run_on_virtual_time():
    """A pause of an hour takes no real time, and only guards made inside are affected."""
    with virtual_time() as clock:
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=2, backoff=constant(3600.0)))
        guard.attempt(ScriptedService(fail(ConnectionError)).call)
        assert clock.now() == 3600.0
        assert guard.clock is clock
    assert isinstance(Guard("other", Timeout(1.0)).clock, SystemClock)


def test_the_clock_may_be_given():
    """virtual_time and run_virtual take the clock to use."""
    clock = VirtualClock(100.0)
    with virtual_time(clock) as current:
        assert current is clock

    async def main():
        await ScriptedService(slow(5.0)).acall()
        return asyncio.get_running_loop().time()

    assert run_virtual(main(), clock=clock) == 105.0
    assert clock.now() == 105.0


def test_virtual_time_ends_with_its_block():
    """Also when the block raises, time is real again after it."""
    with pytest.raises(ZeroDivisionError), virtual_time():
        raise ZeroDivisionError
    assert isinstance(Guard("vendor", Timeout(1.0)).clock, SystemClock)


def test_a_seed_permutes_what_is_ready():
    """The same seed gives the same order; some other seed another one."""

    def order(seed):
        async def main():
            seen = []

            async def note(number):
                await ScriptedService(answer()).acall()
                seen.append(number)

            await asyncio.gather(*(note(number) for number in range(6)))
            return tuple(seen)

        return run_virtual(main(), seed=seed)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(10)}) > 1


# --- Retries ---


def test_retries_can_be_instant():
    """Inside the block no retry waits; after it, all do again."""
    with virtual_time() as clock:
        guard = Guard("vendor", Retry(on=ConnectionError, attempts=2, backoff=constant(9.0)))
        broken = ScriptedService(fail(ConnectionError))
        with retries("instant"):
            assert guard.attempt(broken.call).attempts == 2
        assert clock.now() == 0.0
        guard.attempt(broken.call)
        assert clock.now() == 9.0


def test_retries_can_be_off():
    """Inside the block nothing is retried; nested blocks restore what was before."""
    guard = Guard("vendor", Retry(on=ConnectionError, attempts=2, backoff=0.0))
    broken = ScriptedService(fail(ConnectionError))
    with retries("off"):
        with retries("instant"):
            assert guard.attempt(broken.call).attempts == 2
        assert guard.attempt(broken.call).attempts == 1
    assert guard.attempt(broken.call).attempts == 2


# --- Scripted services ---


def test_a_script_is_followed_and_its_last_step_repeats():
    """Steps come in order, each as often as it says; the last goes on for ever."""
    service = ScriptedService(answer(1, times=2), fail(KeyError), answer(3))
    assert [service.call(), service.call()] == [1, 1]
    with pytest.raises(KeyError):
        service.call()
    assert [service.call() for _ in range(3)] == [3, 3, 3]
    assert (service.calls, service.running, service.peak) == (6, 0, 1)


def test_a_step_for_ever_hides_what_follows():
    """With times=None a step is never left."""
    service = ScriptedService(answer(1, times=None), answer(2))
    assert [service.call() for _ in range(5)] == [1] * 5


def test_errors_are_made_anew_or_given():
    """A type makes a new error each time, an instance is raised itself."""
    error = KeyError()
    service = ScriptedService(fail(error, times=2), fail(KeyError), fail(lambda: KeyError("made")))
    raised = []
    for _ in range(4):
        try:
            service.call()
        except KeyError as caught:
            raised.append(caught)
    assert raised[0] is raised[1] is error
    assert raised[2] is not error
    assert raised[3].args == ("made",)


def test_a_slow_plain_call_moves_its_clock():
    """A plain slow call takes its time on the clock given; without one it says so."""
    clock = VirtualClock()
    assert ScriptedService(slow(2.0, "late"), clock=clock).call() == "late"
    assert clock.now() == 2.0
    for step in (slow(2.0), hang()):
        with pytest.raises(RuntimeError, match="give ScriptedService a VirtualClock"):
            ScriptedService(step).call()


def test_the_most_at_once_is_counted():
    """`peak` is how many calls ran at once; a cancelled one is no longer running."""

    async def main():
        service = ScriptedService(hang())
        tasks = [asyncio.ensure_future(service.acall(1, key=2)) for _ in range(3)]
        await asyncio.wait(tasks, timeout=1.0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return service.calls, service.running, service.peak

    assert run_virtual(main()) == (3, 0, 3)


def test_a_service_may_be_called_by_many_threads():
    """Threads that call at once each get a step, and all are counted."""
    service = ScriptedService(answer("first", times=4000), answer("rest"))
    start, answers = threading.Barrier(4), []

    def call():
        start.wait()
        answers.append([service.call() for _ in range(2000)])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert (service.calls, service.running) == (8000, 0)
    assert sum(own.count("first") for own in answers) == 4000


# --- Leaks ---


def test_held_slots_are_listed_by_guard():
    """Guards with slots taken are listed with how many."""
    first, second = Guard("first", Bulkhead(3)), Guard("second", Bulkhead(3))
    with first.hold(), first.hold(), second.hold():
        held = held_permits()
        assert (held["first"], held["second"]) == (2, 1)
    assert not {"first", "second"} & set(held_permits())


def test_a_leak_is_told():
    """A slot that was free before the block and is taken after it fails the block."""
    guard = Guard("vendor", Bulkhead(3))
    with guard.hold():
        with no_leaked_permits():
            guard.call(lambda: 1)
        leak = guard.hold()
        with pytest.raises(AssertionError, match="vendor 1"), no_leaked_permits():
            leak.__enter__()
        leak.__exit__(None, None, None)


def test_an_error_in_the_block_is_not_hidden():
    """What the block raises comes out itself, leak or not."""
    leak = Guard("vendor", Bulkhead(1)).hold()

    def break_down():
        leak.__enter__()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), no_leaked_permits():
        break_down()
    leak.__exit__(None, None, None)


def _run_with_plugin(folder: Path, tests: str) -> str:
    """Run `tests` by pytest, with the plugin, in a process of its own; return what it prints."""
    (folder / "test_sample.py").write_text(textwrap.dedent(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "seawall.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(folder)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(  # noqa: S603 - this project's own code
        [*command, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    return done.stdout


def test_the_fixture_fails_a_test_that_leaks(tmp_path):
    """With the plugin, a test that leaves a slot taken fails, and one that does not passes."""
    printed = _run_with_plugin(
        tmp_path,
        """
            from seawall import Bulkhead, Guard

            guard = Guard("vendor", Bulkhead(2))

            def test_clean(no_leaked_permits):
                with guard.hold():
                    pass

            blocks = []

            def test_leaking(no_leaked_permits):
                blocks.append(guard.hold())
                blocks[0].__enter__()
        """,
    )
    assert "slots still taken at the end: vendor 1" in printed
    assert "2 passed, 1 error" in printed
    assert "at teardown of test_leaking" in printed


def test_the_fixtures_do_what_their_page_says(tmp_path):
    """The tests on the page pass, and each has one that fails without its fixture."""
    page = (Path(__file__).parents[1] / "docs" / "operate" / "testing.md").read_text()
    section = page.split("## Fixtures for pytest")[1]
    tests = section.split("```python\n")[1].split("```")[0]
    assert "5 passed" in _run_with_plugin(tmp_path, tests)
    for fixture in ("empty_registry", "policies_off"):
        without = tests.replace(f"({fixture})", "()")
        assert without != tests
        assert "1 failed, 4 passed" in _run_with_plugin(tmp_path, without)


def test_fixtures_end_with_their_test(tmp_path):
    """The next test has the machine's clock, its pauses, its policies and its guards again."""
    printed = _run_with_plugin(
        tmp_path,
        """
            from seawall import Guard, Breaker, guards
            from seawall.clock import SystemClock, VirtualClock

            before = Guard("before", Breaker())

            def test_inside(empty_registry, policies_off, instant_retries, virtual_time):
                guard = Guard("inside", Breaker())
                assert guard.clock is virtual_time
                assert [one.name for one in guards()] == ["inside"]
                assert guard.snapshot()["switches"] == {"policies": "off", "retries": "instant"}

            def test_after():
                assert [one.name for one in guards()] == ["before"]
                assert before.snapshot()["switches"] == {}
                assert isinstance(Guard("after", Breaker()).clock, SystemClock)
        """,
    )
    assert "2 passed" in printed


# --- All policies off ---


def _stack(function: Any) -> Any:
    """Return `function` behind a guard that refuses it, and one that would run it elsewhere."""
    refuses = new_guard(RateLimit("1/day"), Bulkhead(1))
    refuses.call(len, "")
    return refuses(function)


def test_no_policy_acts_while_they_are_off():
    """Functions decorated before the block are called straight in it, and guarded after it."""
    guarded = _stack(lambda: "called")
    with pytest.raises(RateLimited):
        guarded()
    with policies_off():
        assert [guarded(), guarded()] == ["called", "called"]
    with pytest.raises(RateLimited):
        guarded()


def test_all_ways_to_call_are_without_policies():
    """call, acall, attempt, hold, attempts, generators, and what is made inside the block."""
    refuses = new_guard(RateLimit("1/day"), Timeout(1.0, sync="cooperative"))
    refuses.call(len, "")

    async def work() -> str:
        return "awaited"

    @refuses
    def numbers() -> Iterator[int]:
        yield 1

    async def main() -> None:
        assert await refuses.acall(work) == "awaited"
        assert (await refuses.aattempt(work)).value == "awaited"
        async with refuses.hold():
            pass
        async for attempt in refuses.attempts():
            async with attempt:
                pass

    with policies_off():
        assert refuses.call(len, "") == 0
        assert refuses.attempt(len, "").value == 0
        assert list(numbers()) == [1]
        with refuses.hold():
            pass
        isolated = Breaker()
        isolated.isolate()
        assert isolated(lambda: "made inside")() == "made inside"
        run_virtual(main())
    assert refuses.snapshot()["policies"][0]["rejected"] == 0
    with pytest.raises(RateLimited):
        list(numbers())


def test_drivers_are_without_effect_too():
    """Nothing comes from a cache, or is done in a thread, while policies are off."""
    cached = new_guard(Cache(60.0), ThreadBulkhead(1))
    calls: list[int] = []

    def work() -> int:
        calls.append(threading.get_ident())
        return len(calls)

    guarded = cached(work)
    assert [guarded(), guarded()] == [1, 1]
    with policies_off():
        assert [guarded(), guarded(), cached.attempt(work).value] == [2, 3, 4]
        assert run_virtual(cached.acall(work)) == 5
    assert calls[0] != threading.get_ident()
    assert set(calls[1:]) == {threading.get_ident()}
    assert guarded() == 1


def test_a_call_under_way_keeps_its_policies():
    """What was entered before the block is left in it: no slot is lost."""
    guard = new_guard(Retry(on=ConnectionError, attempts=2, backoff=0), Bulkhead(1))
    outcomes = iter([ConnectionError(), None])

    def work() -> str:
        error = next(outcomes)
        if error is not None:
            stack.enter_context(policies_off())
            raise error
        return "second attempt"

    with ExitStack() as stack, no_leaked_permits():
        assert guard.call(work) == "second attempt"
    with policies_off(), policies_off():
        pass
    assert not bypass.on


def test_errors_pass_while_policies_are_off():
    """The function's own error is raised, as it is, and counted."""
    guard = new_guard(Fallback(static("lesser")))
    with policies_off(), pytest.raises(ConnectionError) as raised:
        guard.call(ScriptedService(fail(ConnectionError)).call)
    assert raised.value.__context__ is None
    assert guard.snapshot()["failed"] == 1


SWITCHES = """
from seawall import Guard, Retry
from seawall.backoff import constant
from seawall.testing import ScriptedService, fail
guard = Guard("vendor", Retry(on=ConnectionError, backoff=constant(3600.0)))
service = ScriptedService(fail(ConnectionError))
guard.attempt(service.call)
print(service.calls)
"""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("SEAWALL_RETRIES", "instant", "3"),
        ("SEAWALL_RETRIES", "off", "1"),
        ("SEAWALL_POLICIES", "off", "1"),
        ("SEAWALL_RETRIES", "never", "write one of 'instant', 'off'"),
        ("SEAWALL_POLICIES", "no", "write one of 'off'"),
    ],
)
def test_the_environment_switches_policies_and_retries(name: str, value: str, told: str):
    """For tests of programs that start others; a value that means nothing is told."""
    ended = subprocess.run(  # noqa: S603 - a program of our own
        [sys.executable, "-c", SWITCHES],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, name: value},
        timeout=300,
    )
    assert told in (ended.stdout or ended.stderr)
    assert (ended.returncode == 0) == told.isdigit()
    warned = "no guard protects anything" in ended.stderr
    assert warned == ((name, value) == ("SEAWALL_POLICIES", "off"))


def test_blocks_without_policies_may_overlap():
    """The last of them that ends switches policies on again."""
    first, second = policies_off(), policies_off()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert bypass.on
    second.__exit__(None, None, None)
    assert not bypass.on


# What switches show


@pytest.mark.parametrize(
    ("block", "switches", "danger"),
    [
        (lambda: retries("instant"), {"retries": "instant"}, "SEAWALL_RETRIES=instant"),
        (lambda: retries("off"), {"retries": "off"}, "SEAWALL_RETRIES=off"),
        (policies_off, {"policies": "off"}, "SEAWALL_POLICIES=off"),
    ],
)
def test_a_switch_that_is_on_is_seen(block: Any, switches: dict[str, str], danger: str) -> None:
    """In the snapshot and the text of every guard and family, while it is on."""
    guard = Guard("switched", Bulkhead(1))
    keys = Guard.family("switched keys", lambda _key: [Bulkhead(1)])
    keys["a"].call(int)
    for one in (guard, keys, keys["a"]):
        assert one.snapshot()["switches"] == {}
        with block():
            assert one.snapshot()["switches"] == switches
            assert danger in one.explain()
        assert danger not in one.explain()
    with block():
        assert danger in explain()
        shown = {one["name"]: one["switches"] for one in snapshot()["guard"]}
    assert shown == {"switched": switches, "switched keys": switches}


def test_switches_of_the_environment_are_seen() -> None:
    """A service that was started with them by mistake says so."""
    code = (
        "import seawall; guard = seawall.Guard('a', seawall.Bulkhead(1));"
        "print(guard.snapshot()['switches']); print(guard.explain())"
    )
    environment = {**os.environ, "SEAWALL_RETRIES": "off", "SEAWALL_POLICIES": "off"}
    done = subprocess.run(  # noqa: S603 - its own interpreter
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "{'policies': 'off', 'retries': 'off'}" in done.stdout
    assert "policies are switched off" in done.stdout
    assert "retries are switched to 'off'" in done.stdout
