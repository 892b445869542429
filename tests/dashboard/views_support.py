"""Snapshots to look at: one of everything, and junk."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import seawall
from seawall.clock import VirtualClock
from seawall.dashboard.validation import valid_view
from seawall.dashboard.watcher import Watcher
from tests.telemetry.world import World

NOW = 1_800_000_000.0


class Wall:
    """A wall clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class Pair:
    """A watcher with its clocks."""

    def __init__(self, **options: Any) -> None:
        self.wall, self.clock = Wall(), VirtualClock()
        self.watcher = Watcher(
            **{"pod": "pod-1", "wall": self.wall, "clock": self.clock, **options}
        )

    def later(self, seconds: float = 1.0) -> Any:
        """Let time pass, and look."""
        self.wall.now += seconds
        self.clock.advance(seconds)
        return self.watcher.sample()

    def look(self, snapshot: Any, seconds: float = 1.0) -> Any:
        """Let time pass, and sample an invented snapshot."""
        self.wall.now += seconds
        self.clock.advance(seconds)
        self.watcher._events.process_recorded()
        return self.watcher._view_of(snapshot)


@cache
def _lived() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        asyncio.run(world.live())
        shown = seawall.snapshot()
        world.close()
        for guard in seawall.guards():
            if guard.name.startswith("w-"):
                guard.close()
    return shown


def everything() -> dict[str, Any]:
    """Return a snapshot with one of everything in it."""
    return copy.deepcopy(_lived())


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**400, -1, 1e308, "\x1b[2J", "a" * 500, "open", "shared", "closed"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | st.sampled_from(["state", "policy"]), inner)
    ),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return where there is something in a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, one in inner:
        found.append((*path, key))
        if isinstance(one, (dict, list)):
            found += places(one, (*path, key))
    return found


def replaced(value: Any, changes: list[tuple[tuple[Any, ...], Any]]) -> Any:
    """Return a copy with something else at some places."""
    changed = copy.deepcopy(value)
    for path, junk in changes:
        inner = changed
        try:
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = copy.deepcopy(junk)
        except (KeyError, IndexError, TypeError):
            pass  # another change took that place away
    return changed


def check_view(view: Any) -> None:
    """Assert that a view is one, all of it, and can be sent."""
    sent = json.loads(json.dumps(view, allow_nan=False))
    assert valid_view(sent) == valid_view(view) == view


def many_guards(number: int, *, ill: int) -> dict[str, Any]:
    """Return a snapshot of that many guards of seven policies; one of them is unhealthy."""
    (vendor,) = (one for one in everything()["guard"] if one["name"] == "w-vendor")
    guards = []
    for place in range(number):
        one = json.loads(json.dumps(vendor)) | {"name": f"guard-{place:04}"}
        if place == ill:
            one["policies"][3] |= {"state": "open", "retry_after": 12.0}
        guards.append(one)
    return {"guard": guards}
