from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading

import pytest

from seawall import (
    Bulkhead,
    Guard,
    Retry,
    SystemClock,
    Timeout,
    VirtualClock,
    constant,
)
from seawall.testing import (
    ScriptedService,
    answer,
    fail,
    hang,
    held_permits,
    no_leaked_permits,
    retries,
    run_virtual,
    slow,
    virtual_time,
)

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


def test_the_fixture_fails_a_test_that_leaks(tmp_path):
    """With the plugin, a test that leaves a slot taken fails, and one that does not passes."""
    (tmp_path / "test_sample.py").write_text(
        textwrap.dedent("""
            from seawall import Bulkhead, Guard

            guard = Guard("vendor", Bulkhead(2))

            def test_clean(no_leaked_permits):
                with guard.hold():
                    pass

            def test_leaking(no_leaked_permits):
                guard.hold().__enter__()
        """)
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "seawall.pytest_plugin"]
    command += ["-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    done = subprocess.run(  # noqa: S603 - this project's own code
        [*command, str(tmp_path)], capture_output=True, text=True, timeout=50, check=False
    )
    assert "slots still taken at the end: vendor 1" in done.stdout
    assert "2 passed, 1 error" in done.stdout
    assert "at teardown of test_leaking" in done.stdout
