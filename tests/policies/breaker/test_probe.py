"""An open breaker that nobody calls, and that probes by itself."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable
from threading import Event, current_thread
from typing import Any
from weakref import ref

import pytest

from seawall import Breaker, Guard, subscribe
from seawall.clock import VirtualClock, current_clock
from seawall.events import BreakerChanged
from seawall.policies.breaker import probe as _breaker_probe
from seawall.policies.breaker import single_probe
from seawall.testing import run_virtual
from tests.support import let_pass, new_guard

LONG = 30.0
"""Seconds that a test waits for a thread, if it has to."""


def _fail(*_key: object) -> None:
    raise ConnectionError


class Asked:
    """A probe that answers as it is told, and remembers what it was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.keys: list[tuple[Any, ...]] = []

    async def ask(self, *key: Any) -> Any:
        """Answer, in a coroutine: virtual time waits for no thread."""
        return self.answer(*key)

    def answer(self, *key: Any) -> Any:
        """Answer the next question."""
        self.keys.append(key)
        told = self.answers.pop(0)
        if isinstance(told, Exception):
            raise told
        return told == "up" if told else None


def _probed(breaker: Breaker, *waits: float, fail: tuple[Any, ...] = ()) -> list[str]:
    """Open the breaker in virtual time; return its state after each wait and round of probes."""
    states = []

    async def main() -> None:
        clock = current_clock()
        assert isinstance(clock, VirtualClock)
        guard = new_guard(breaker)
        guard.attempt(_fail, *fail)
        prober: Any = breaker._prober
        for wait in waits:
            await let_pass(wait)
            await prober.probe_all()
            states.append(breaker.state)
        guard.close()

    run_virtual(main())
    return states


async def _apasses() -> None:
    await let_pass(0.1)


@pytest.mark.parametrize("probe", [_apasses, Asked("up").ask, Asked("").ask])
def test_a_probe_that_passes_closes_the_breaker(probe: Callable[[], Any]):
    """No call is needed: it is closed when traffic returns. None is a pass too."""
    assert _probed(
        Breaker(consecutive=1, probes=single_probe(), break_for=5.0, probe=probe), 5.0
    ) == ["closed"]


def test_nothing_is_asked_before_the_break_is_over():
    """Its own probes are probes like any other."""
    ping = Asked("up")
    breaker = Breaker(consecutive=1, probes=single_probe(), break_for=5.0, probe=ping.ask)
    assert _probed(breaker, 4.75, 0.25) == ["open", "closed"]
    assert ping.keys == [()]


@pytest.mark.parametrize("answer", ["down", ConnectionError("still down")])
def test_a_probe_that_fails_opens_the_breaker_again(answer: Any):
    """By False or by raising; what it raised is the last failure."""
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=5.0, probe=Asked(answer, "up").ask
    )
    assert _probed(breaker, 5.0, 4.0, 1.0) == ["open", "open", "closed"]


def test_the_failure_of_a_probe_is_told():
    """A refusal then says how the probe failed."""
    breaker = Breaker(
        consecutive=1,
        probes=single_probe(),
        break_for=5.0,
        probe=Asked(ConnectionError("still down")).ask,
    )
    _probed(breaker, 5.0)
    assert breaker.model.failure == "ConnectionError: still down"


def test_a_probe_that_takes_too_long_has_failed():
    """It may take `probe_every` seconds, and `probe_timeout` at the most."""
    for options in ({"probe_every": 2.0}, {"probe_every": 9.0, "probe_timeout": 2.0}):
        began = []

        async def hangs(began: list[float] = began) -> None:
            began.append(asyncio.get_running_loop().time())
            try:
                await let_pass(60.0)
            finally:
                began.append(asyncio.get_running_loop().time())

        breaker = Breaker(
            consecutive=1, probes=single_probe(), break_for=5.0, probe=hangs, **options
        )  # type: ignore[arg-type]
        assert _probed(breaker, 5.0) == ["open"]
        assert began == [5.0, 7.0]


def test_a_keyed_breaker_probes_the_keys_that_are_open():
    """Each is asked for by itself."""
    ping = Asked("up")
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=5.0, key=lambda host: host, probe=ping.ask
    )
    assert _probed(breaker, 5.0, fail=("b",)) == ["closed"]
    assert ping.keys == [("b",)]


def test_a_probe_that_somebody_makes_is_not_made_twice():
    """Half-open, no more probes run than configured, its own included."""
    ping = Asked()

    async def main() -> None:
        breaker = Breaker(consecutive=1, probes=single_probe(), break_for=5.0, probe=ping.ask)
        guard = new_guard(breaker)
        guard.attempt(_fail)
        await let_pass(5.0)
        async with guard.hold():
            prober: Any = breaker._prober
            await prober.probe_all()
        assert breaker.state == "closed"

    run_virtual(main())
    assert ping.keys == []


def test_a_probe_that_is_cancelled_gives_its_permit_back():
    """As a call does that is cancelled: the next one probes."""

    async def main() -> None:
        breaker = Breaker(consecutive=1, probes=single_probe(), break_for=5.0, probe=_hang)
        guard = new_guard(breaker)
        guard.attempt(_fail)
        await let_pass(5.0)
        prober: Any = breaker._prober
        task = asyncio.ensure_future(prober.probe_all())
        await let_pass(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert breaker.state == "half_open"
        assert guard.call(str) == ""
        assert breaker.state == "closed"

    run_virtual(main())


async def _hang() -> None:
    await let_pass(3600.0)


# In real time


def _closed_by_itself(**options: Any) -> None:
    """Open a breaker, make no call, and wait until it is closed."""
    closed = Event()
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=0.01, probe_every=0.01, **options
    )
    guard = new_guard(breaker)

    def note(event: BreakerChanged) -> None:
        if event.guard == guard.name and event.after == "closed":
            closed.set()

    stop = subscribe(note, BreakerChanged)
    try:
        guard.attempt(_fail)
        assert closed.wait(LONG)
        assert breaker.state == "closed"
    finally:
        stop()
        guard.close()


def test_the_background_probes_with_plain_functions():
    """In a daemon thread, which nobody has to wait for."""
    threads = []

    def ping() -> None:
        threads.append(current_thread())

    _closed_by_itself(probe=ping)
    assert threads[0].daemon
    assert threads[0].name.startswith("seawall-probes")


def test_the_background_probes_with_async_functions():
    """In a loop of its own."""

    async def ping() -> None:
        assert asyncio.get_running_loop().is_running()

    _closed_by_itself(probe=ping)


def test_the_background_awaits_what_a_plain_function_returns():
    """As where a lambda is around an async function."""

    async def ping(_name: str) -> None:
        assert asyncio.get_running_loop().is_running()

    _closed_by_itself(probe=lambda: ping("vendor"))


def test_the_background_goes_on_after_probes_that_fail():
    """A probe that raises is a failed one, and no more than that."""
    _closed_by_itself(probe=Asked(OSError(), "down", "up").answer)


def test_nobody_is_asked_once_the_guard_is_closed():
    """A guard that is closed needs no answer; what is left stops by itself."""
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=0.01, probe=lambda: False, probe_every=0.01
    )
    guard = new_guard(breaker)
    guard.attempt(_fail)
    prober: Any = breaker._prober
    assert prober._handle is not None
    guard.close()
    stopped = Event()
    for _ in range(3000):
        if prober._handle is None:
            break
        stopped.wait(0.01)
    assert prober._handle is None


def test_a_breaker_that_is_gone_is_not_kept_by_its_probes():
    """The background knows it weakly."""
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=60.0, probe=lambda: False, probe_every=0.01
    )
    guard: Guard | None = new_guard(breaker)
    assert guard is not None
    guard.attempt(_fail)
    guard.close()
    kept = ref(breaker)
    del breaker, guard
    for _ in range(3000):
        gc.collect()
        if kept() is None:
            break
        Event().wait(0.01)
    assert kept() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no child processes of this kind")
def test_a_child_process_probes_by_itself():
    """Threads do not survive a fork: the first refused call begins them anew."""
    breaker = Breaker(
        consecutive=1, probes=single_probe(), break_for=0.01, probe=lambda: False, probe_every=0.01
    )
    guard = new_guard(breaker)
    guard.attempt(_fail)
    assert _breaker_probe._thread.background.loop is not None
    child = os.fork()
    if not child:
        code = 1
        try:
            begun = _breaker_probe._thread.background.loop is None
            breaker.trip()
            guard.attempt(str)
            code = 0 if begun and _breaker_probe._thread.background.loop is not None else 2
        finally:
            os._exit(code)
    guard.close()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
