"""What tests of leases share: a clock and jobs driven by hand, events, and histories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
from hypothesis import strategies as st

from seawall.clock import VirtualClock
from seawall.events import LeaseChanged, subscribe
from seawall.leases.store import Command, Release, Renew, Take, Withdraw
from seawall.models.lease import Busy, LeaseGranted, LeaseModel

LONG: Final = 60.0
"""A time to live that is not over while a test runs."""
SOON: Final = 30.0
"""How long to wait for what must happen."""

TTL: Final = 10
NOW: Final = 1_000_000
COMMANDS: Final = st.lists(
    st.tuples(
        st.one_of(st.integers(0, TTL), st.integers(-30, 30)),
        st.sampled_from(["take", "take", "renew", "release", "take late", "withdraw"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=10,
)
History = list[tuple[int, str, str, int]]
Answers = Callable[[int, Command], LeaseGranted | Busy]


class Hands(VirtualClock):
    """A clock that moves only when a test moves it, also while a caller waits."""

    __slots__ = ()

    def wait(self, lock: Any, seconds: float | None) -> bool:
        """Wait in real time."""
        return bool(lock.acquire(timeout=SOON))


class Idle:
    """A job that runs only when a test runs it."""

    def soon(self) -> None:
        """Do nothing."""

    stop = soon


@pytest.fixture
def events() -> Iterator[list[LeaseChanged]]:
    """Return what happened to leases, as it happens."""
    seen: list[LeaseChanged] = []
    stop = subscribe(seen.append, LeaseChanged)
    yield seen
    stop()


def check_agreement(answer: Answers, commands: History) -> None:
    """Drive the model and a store with the same history, and compare every answer."""
    model, now, attempt, tokens = LeaseModel(), NOW, 10, [1, 2, 3]
    for jump, what, holder, which in commands:
        now = max(1, now + jump)
        token = tokens[-1 - which]
        expected: LeaseGranted | Busy | bool
        command: Command
        if what.startswith("take"):
            attempt += 1
            number = attempt - 5 if what == "take late" else attempt
            expected = model.take(now, holder, number, TTL)
            command = Take(holder, number, TTL)
        elif what == "renew":
            expected, command = model.renew(now, token, TTL), Renew(token, TTL)
        elif what == "withdraw":
            expected = model.withdraw(now, holder, attempt - which)
            command = Withdraw(holder, attempt - which)
        else:
            expected, command = model.release(now, token), Release(token)
        answered = answer(now, command)
        if isinstance(expected, bool):
            assert isinstance(answered, LeaseGranted) == expected
            assert answered.token == model.token
        else:
            assert answered == expected
        if isinstance(answered, LeaseGranted):
            tokens.append(answered.token)
