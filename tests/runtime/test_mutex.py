"""Sections: left whatever a signal handler raises, and not entered by the garbage collector."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from seawall.runtime.mutex import Mutex
from tests.runtime.interrupts import interrupts
from tests.support import settled

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="CPython 3.14 looks for signals between a lock's `with` and the block (gh-148874)",
)


def is_free(mutex: Mutex) -> bool:
    """Tell whether another thread can enter."""
    got: list[bool] = []
    thread = threading.Thread(target=lambda: got.append(mutex.acquire(blocking=False)))
    thread.start()
    thread.join()
    return got == [True]


class Naive:
    """A lock whose section is left by a Python function: what `Mutex` must not be."""

    def __init__(self) -> None:
        """Begin unlocked."""
        self._lock = threading.RLock()
        self.acquire = self._lock.acquire

    def __enter__(self) -> None:
        """Enter."""
        self._lock.acquire()

    def __exit__(self, *_exc: object) -> None:
        """Leave."""
        self._lock.release()

    def do(self, work: Callable[[], Any]) -> None:
        """Work in a section."""
        with self:
            work()


def left_locked(make: Callable[[], Any]) -> list[str]:
    """Return where a signal leaves the lock locked for ever."""

    def scenario() -> tuple[Callable[[], Any], Callable[[], Any]]:
        mutex = make()

        def work() -> None:
            mutex.do(lambda: mutex.do(int))

        return work, lambda: is_free(mutex)

    return [place for place, check in interrupts(scenario) if not check()]


def test_no_signal_leaves_a_section_locked() -> None:
    """Wherever the handler raises, another thread can enter afterwards."""
    assert left_locked(Mutex) == []


def test_a_section_left_by_python_code_stays_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave it by a function of ours, and a signal that comes as that begins locks it for ever."""
    monkeypatch.setattr("tests.runtime.interrupts.SOURCE", __file__)
    assert left_locked(Naive) != []


def test_work_that_comes_in_a_section_of_its_own_thread_is_done_after_it() -> None:
    """As the collector's does: neither does it block, nor see a change half done."""
    mutex = Mutex()
    done: list[str] = []
    with mutex:
        mutex.do(lambda: done.append("late"))
        assert done == []
    settled(mutex)
    assert done == ["late"]


def test_work_that_comes_while_work_is_done_is_done_by_the_same_thread() -> None:
    """It needs no other."""
    mutex = Mutex()
    by: list[int] = []
    mutex.do(lambda: mutex.do(lambda: by.append(threading.get_ident())))
    assert by == [threading.get_ident()]


def test_without_another_thread_the_next_who_comes_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that has no more threads to give loses nothing."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("seawall.runtime.mutex.start_new_thread", refuse)
    mutex = Mutex()
    done: list[str] = []
    with mutex:
        mutex.do(lambda: done.append("late"))
    assert done == []
    mutex.do(lambda: done.append("next"))
    assert done == ["next", "late"]


def test_an_error_of_work_is_raised_and_leaves_the_mutex_in_order() -> None:
    """What came meanwhile is done all the same."""
    mutex = Mutex()
    done: list[str] = []

    def fail() -> None:
        mutex.do(lambda: done.append("late"))
        raise KeyError

    with pytest.raises(KeyError):
        mutex.do(fail)
    assert done == ["late"]
    assert is_free(mutex)
