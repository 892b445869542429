"""What happens to a world during a run: a service is down, a network is cut, clients surge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One change: `begin` makes it, `end` undoes it (None: it cannot be undone).

    Services, networks, stores and clients make them; `World.at` says when and for how long.
    """

    text: str
    begin: Callable[[], Any]
    end: Callable[[], Any] | None = None
    is_load: bool = False
    """Whether clients come more often, and nothing is broken."""


class Disturbance(NamedTuple):
    """A change in the history of a run; `until` is infinite if it was never undone."""

    at: float
    until: float
    text: str
    is_load: bool = False
