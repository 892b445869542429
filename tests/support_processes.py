"""What tests of executors share: functions for worker processes, where they must be importable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn

from seawall import current_deadline
from seawall.context import (
    current_attempt,
    current_criticality,
    current_idempotency_key,
    current_tenant,
    current_tier,
)
from seawall.resources import CpuPool

REQUEST: ContextVar[str] = ContextVar("request")
HIDDEN: ContextVar[str] = ContextVar("hidden", default="unset")


def hang(fifo: str) -> None:
    """Write this process's id into `fifo`, keep that open, and never return."""
    with Path(fifo).open("w") as begun:
        begun.write(f"{os.getpid()}\n")
        begun.flush()
        threading.Event().wait()


def leave_a_child(fifo: str) -> None:
    """Die, and leave a child that waits until somebody writes into `fifo`."""
    if os.fork() == 0:
        Path(fifo).read_text()
        os._exit(0)
    os._exit(5)


def wait_for(fifo: str, value: Any) -> Any:
    """Return `value` when somebody has written into `fifo`."""
    Path(fifo).read_text()
    return value


def die_at_start(_connection: Any) -> None:
    """Be a worker that never comes up."""
    os._exit(7)


def fail(message: str) -> NoReturn:
    """Raise, with a note."""
    error = LookupError(message)
    error.add_note("looked everywhere")
    raise error


class Picky(Exception):
    """Can be written, but not read: its __init__ wants two arguments."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_pickily() -> NoReturn:
    """Raise an error that does not survive the journey."""
    raise Picky(1, 2)


class Unreadable:
    """Can be written, but not read."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> NoReturn:
    raise ValueError("not today")


def unreadable() -> Unreadable:
    """Return what the caller cannot read."""
    return Unreadable()


def lock() -> Any:
    """Return what cannot be sent."""
    return threading.Lock()


def context() -> dict[str, Any]:
    """Return what a call sees of its caller's context, and leave a trace in it."""
    deadline = current_deadline()
    seen = {
        "deadline": None if deadline is None else deadline.remaining(),
        "criticality": current_criticality().name,
        "attempt": current_attempt(),
        "idempotency_key": current_idempotency_key(),
        "tenant": current_tenant(),
        "tier": current_tier(),
        "request": REQUEST.get("unset"),
        "hidden": HIDDEN.get(),
    }
    REQUEST.set("left behind")
    return seen


def echo(number: int) -> int:
    """Return `number`."""
    return number


def die(number: int) -> int:
    """Mean the death of the process, to a fake one."""
    return number


def last(number: int) -> int:
    """Mean to go on until the process is killed, to a fake one."""
    return number


def nested() -> Any:
    """Ask for workers inside a worker."""
    return CpuPool("inner", workers=1).run(os.getpid)


# --- Here ---


def in_thread(function: Callable[..., Any], *args: Any) -> tuple[threading.Thread, list[Any]]:
    """Call it in a thread; return that, and where its value or error will be."""
    results: list[Any] = []

    def call() -> None:
        try:
            results.append(function(*args))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            results.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread, results


def until(condition: Callable[[], Any]) -> None:
    """Let other threads run until it is true."""
    while not condition():
        os.sched_yield()
