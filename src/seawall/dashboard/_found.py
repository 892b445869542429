"""What a rule finds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from seawall.dashboard.views import Tone


class Found(NamedTuple):
    """A trouble, without its time; `began` is the key of the event that begins it."""

    id: str
    tone: Tone
    where: str
    what: str
    advice: str = ""
    began: str = ""


def kept_of(rule: Iterator[Found]) -> list[Found]:
    """Return what a rule finds before it stumbles over something of another shape."""
    found: list[Found] = []
    try:
        for one in rule:
            found.append(one)  # noqa: PERF402 - what came before a fault is kept
    except (AttributeError, KeyError, TypeError, ValueError, IndexError):
        pass  # a policy of the user's own may show anything
    return found
