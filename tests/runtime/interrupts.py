"""Interrupt a piece of work by a signal wherever CPython lets one into code of Seawall's.

A signal handler runs, and may raise, when the interpreter looks for signals: as a Python function
begins, at a jump backwards, after a call of a C function. So the signal is made pending just before
some instruction, by means that do not look themselves, and CPython decides where it takes effect.
"""

from __future__ import annotations

import signal
import sys
from _thread import interrupt_main
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from types import FrameType
from typing import Any

import seawall
from seawall import Guard, guards

SOURCE = str(Path(seawall.__file__).parent)
GENERATED = "seawall fast path"
NAME = "interrupted"

_numbers = count()

_arm = map(interrupt_main, repeat(signal.SIGUSR1))
"""Each step makes the signal pending; taken by a `for`, which does not look for signals."""

Scenario = Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]
"""Makes something to do, and what to do after it was interrupted."""


class Interrupted(Exception):
    """What the handler raises, as the soft limit of a task queue does."""


class Interrupt:
    """One signal, pending before the instruction `number` of Seawall's."""

    def __init__(self, number: int) -> None:
        """Count from 1."""
        self._left = number
        self.place: str | None = None
        """Where it took effect; None where the work ended before."""

    def run(self, work: Callable[[], Any]) -> bool:
        """Do `work` with the signal in it; tell whether it came to that instruction."""
        before = signal.signal(signal.SIGUSR1, self._handle)
        tracing = sys.gettrace()
        try:
            sys.settrace(self._trace)
            try:
                work()
            finally:
                sys.settrace(tracing)
        except Interrupted:
            pass
        finally:
            signal.signal(signal.SIGUSR1, before)
        return self._left <= 0

    def _handle(self, _number: int, frame: FrameType | None) -> None:
        if frame is not None and frame.f_code.co_filename.startswith((SOURCE, GENERATED)):
            code = frame.f_code
            self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname}"
        raise Interrupted

    def _trace(self, frame: FrameType, event: str, _arg: object) -> Callable[..., Any] | None:
        if self._left <= 0 or not frame.f_code.co_filename.startswith((SOURCE, GENERATED)):
            return None
        frame.f_trace = self._trace  # first: from 3.13 on the next line needs it
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        if event == "opcode":
            self._left -= 1
            if self._left == 0:
                # Look at no more instructions: the signal would take effect as this is called.
                running: FrameType | None = frame
                while running is not None:
                    del running.f_trace
                    running = running.f_back
                for _ in _arm:
                    break
                return None
        return self._trace


def interrupts(scenario: Scenario) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Interrupt the work of fresh scenarios at one place after another; tell where, and its check.

    Instructions before the same place have the same effect: they count once.
    """
    last = None
    # Python 3.12 traces the instructions of a function from its second call on.
    Interrupt(sys.maxsize).run(scenario()[0])
    for number in count(1):
        work, check = scenario()
        interrupt = Interrupt(number)
        if not interrupt.run(work):
            return
        if interrupt.place is not None and interrupt.place != last:
            yield interrupt.place, check
        last = interrupt.place
        for guard in guards():
            if guard.name.startswith(NAME):
                guard.close()


def interrupted_guard(*policies: Any, **options: Any) -> Guard:
    """Make a guard for one scenario; it is closed after it."""
    return Guard(f"{NAME} {next(_numbers)}", *policies, **options)
