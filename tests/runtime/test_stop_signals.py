"""SIGINT and SIGTERM stop what runs until then; real processes are in tests/cli/test_worker.py."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from seawall.runtime.stop_signals import STOP_SIGNALS, run_until_signal

SOURCE = Path(__file__).resolve().parents[2] / "src"
signals = pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)


class Runner:
    """Runs until it is stopped; sends itself signals before."""

    def __init__(self, *numbers: signal.Signals) -> None:
        self.numbers = numbers
        self.graces: list[float] = []
        self._over: asyncio.Event | None = None

    async def run(self) -> None:
        self._over = asyncio.Event()
        for number in self.numbers:
            signal.raise_signal(number)
        if len(self.graces) < len(self.numbers):
            await self._over.wait()

    def stop(self, grace: float) -> None:
        self.graces.append(grace)
        if self._over is not None:
            self._over.set()


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Begin with the handlers of a plain program, and put back those of the tests."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    for number, handler in before.items():
        signal.signal(number, handler)


@signals
def test_the_first_signal_drains_and_the_second_does_not(number: signal.Signals):
    """Whichever comes first; the handlers of before are back afterwards."""
    for other in STOP_SIGNALS:
        runner = Runner(number, other)
        run_until_signal(runner.run, runner.stop, 20.0)
        assert runner.graces == [20.0, 0.0]


def test_a_signal_before_the_run_has_begun_stops_it():
    """Nobody waits for a worker that was stopped before its event loop turned."""
    runner = Runner()

    def run() -> Coroutine[Any, Any, None]:
        signal.raise_signal(signal.SIGTERM)
        return runner.run()

    run_until_signal(run, runner.stop, 20.0)
    assert runner.graces == [20.0]


@signals
def test_a_signal_that_the_program_handles_is_left_to_it(number: signal.Signals):
    """Its handler is called, and decides by itself."""
    handled: list[int] = []
    before = signal.signal(number, lambda got, _: handled.append(got))
    runner = Runner()

    async def run() -> None:
        signal.raise_signal(number)

    run_until_signal(run, runner.stop, 20.0)
    assert handled == [number]
    assert runner.graces == []
    signal.signal(number, before)


def test_outside_of_the_main_thread_it_runs_without_signals():
    """Python handles signals in the main thread alone."""
    runner = Runner()
    thread = Thread(target=run_until_signal, args=(runner.run, runner.stop, 20.0))
    thread.start()
    thread.join()
    assert runner.graces == []


STUBBORN = """
import asyncio, os
from seawall.runtime.stop_signals import run_until_signal

def show(text):  # a signal may arrive inside of print(), which must not be entered again
    os.write(1, f"{text}\\n".encode())

async def run():
    show("up")
    await asyncio.Event().wait()

run_until_signal(run, show, 7.0)
"""


@signals
def test_a_third_signal_ends_the_process(number: signal.Signals):
    """Whatever does not stop can still be ended without SIGKILL."""
    with subprocess.Popen(  # noqa: S603 - the program above
        [sys.executable, "-c", STUBBORN],
        env=os.environ | {"PYTHONPATH": str(SOURCE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            for grace in ("7.0\n", "0.0\n"):
                process.send_signal(number)
                assert process.stdout.readline() == grace
            process.send_signal(number)
            process.communicate(timeout=60)
            assert process.returncode == -number
        finally:
            process.kill()
