"""What several test files need: properties that must fail without a safeguard, and time to pass."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, Final
from weakref import WeakKeyDictionary

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure

from seawall import Guard, registry
from seawall.context import Attempt, attempt_var, attempts_from, end_attempt
from seawall.events import bus
from seawall.runtime.mutex import Mutex

SEEDS = st.integers(0, 2**32 - 1)

QUICK: Final = settings.get_current_profile_name() == "quick"
"""Whether this is the quick run, in which long simulations have fewer cases."""


def examples(number: int) -> settings:
    """Return settings for that many examples; the quick run has a fifth of them."""
    return settings(max_examples=max(number // 5, 10) if QUICK else number)


_serial = count()


def quarters(most: int, least: int = 0) -> st.SearchStrategy[float]:
    """Return instants that floats hold exactly, and that coincide often: up to `most` quarters."""
    return st.integers(least, most).map(lambda n: n / 4)


def new_guard(*policies: Any, **options: Any) -> Guard:
    """Make a guard whose name no other test has."""
    return Guard(f"guard-{next(_serial)}", *policies, **options)


def received_attempt() -> int:
    """Return which attempt of its caller's the request that is served is; 0 if nobody said."""
    around = attempts_from(attempt_var.get())
    return max((one.number for one in around if one.guard is None), default=0)


@contextmanager
def receiving(number: int) -> Iterator[None]:
    """Serve a request that came as that attempt of its caller's; 0: as none."""
    token = attempt_var.set(Attempt(number, None, None) if number else None)
    try:
        yield
    finally:
        end_attempt(token)


def settled(mutex: Mutex) -> None:
    """Wait until work that came in the middle of a section of `mutex` is done."""
    while mutex._later:
        with mutex:
            pass


def without_addresses(value: object) -> str:
    """Return a test's id that is the same in every process, also where `value` has functions."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide what other tests have left, alive or dead, and their listeners."""
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())
    monkeypatch.setattr(bus, "_listeners", ())


def falsified(
    check: Callable[[Any], None], cases: st.SearchStrategy[Any], *, most: int = 3000
) -> bool:
    """Tell whether some case of `most` breaks the property: it must, without its safeguard."""

    @settings(phases=[Phase.generate], report_multiple_bugs=False, max_examples=most)
    @given(cases)
    def search(case: Any) -> None:
        check(case)

    try:
        search()
    except AssertionError:
        return True
    except FlakyFailure as error:  # with real servers a case need not fail again when repeated
        return error.subgroup(AssertionError) is not None
    return False


async def let_pass(seconds: float) -> None:
    """Let virtual time pass."""
    loop = asyncio.get_running_loop()
    over = loop.create_future()
    timer = loop.call_later(seconds, lambda: over.done() or over.set_result(None))
    try:
        await over
    finally:
        timer.cancel()
