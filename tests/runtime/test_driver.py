"""The driver of steps: every operation comes to its end, also where a signal handler raises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from seawall.runtime.driver import Steps, adrive, drive
from tests.runtime.interrupts import Interrupted, interrupts

pytestmark = pytest.mark.skipif(
    sys.version_info[:2] == (3, 14),
    reason="CPython 3.14 looks for signals between a lock's `with` and the block (gh-148874)",
)


class Operation:
    """Three steps that hold something."""

    def __init__(self) -> None:
        self.held = False

    def steps(self) -> Steps[str]:
        """Hold something for three requests, of which the second fails."""
        self.held = True
        try:
            for number in range(3):
                try:
                    yield number
                except ConnectionError:
                    continue
        finally:
            self.held = False
        return "done"


def answer(request: Any) -> Any:
    """Answer a request; the second one fails."""
    if request == 1:
        raise ConnectionError
    return request


async def aanswer(request: Any) -> Any:
    """Async twin of `answer`."""
    return answer(request)


def in_coroutine(steps: Steps[str]) -> str:
    """Run the async driver, which never really waits here."""
    coroutine = adrive(steps, aanswer)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return str(end.value)
    raise AssertionError("it waited")


DRIVERS: dict[str, Callable[[Steps[str]], str]] = {
    "sync": lambda steps: drive(steps, answer),
    "async": in_coroutine,
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_what_an_operation_holds_is_free_though_its_error_lives_on(driver: str) -> None:
    """A log or a debugger keeps the error of a signal handler, and so all frames it passed."""
    kept: list[Interrupted] = []

    def scenario() -> tuple[Callable[[], Any], Callable[[], Any]]:
        operation = Operation()

        def work() -> None:
            steps = operation.steps()
            try:
                assert DRIVERS[driver](steps) == "done"
            except Interrupted as error:
                kept.append(error)
                raise

        return work, lambda: operation.held

    places = list(interrupts(scenario))
    assert len(kept) > len(places) > 3
    assert [place for place, held in places if held()] == []
