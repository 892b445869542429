"""Repair of objects in the child process after a fork."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class Forkable(Protocol):
    """An object that must be repaired in a child process."""

    def _after_fork(self) -> None:
        """Forget the threads that did not survive the fork, and the locks they held."""


_forkable: WeakSet[Forkable] = WeakSet()


def survives_fork(thing: Forkable) -> None:
    """Call `thing._after_fork()` in child processes, for as long as it lives."""
    _forkable.add(thing)


_of_parent: list[object] = []


def leave_to_parent(*things: object) -> None:
    """Keep `things`, untouched, in a child process: closing them would disturb the parent."""
    _of_parent.extend(things)


def _after_fork() -> None:
    for thing in list(_forkable):
        thing._after_fork()  # noqa: SLF001 - not for users


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
