"""A view that is not too large to be sent each second: what is well is shown with less."""

from __future__ import annotations

from json import dumps
from typing import Any, Final

from seawall.dashboard._bounds import MOST_BYTES, WORST
from seawall.dashboard.views import GuardView, Layer, View

FEW: Final = 10
"""Troubles that are always shown: the worst come first."""


def size_of(view: Any) -> int:
    """Return how many bytes it is as JSON."""
    return len(dumps(view, allow_nan=False, separators=(",", ":")))


def fitted(view: View, most: int = MOST_BYTES) -> tuple[View, int]:
    """Return the view with as much as fits, and how many guards and rows were cut for it.

    First what is well loses its facts and settings to change, then its stack. If that is not
    enough, what is well is left out from the end, and at last whatever comes last.
    """
    if size_of(view) <= most:
        return view, 0
    guards = view["guards"]
    cut = sum(guard["tone"] == "ok" for guard in guards)
    smaller = View(**{**view, "guards": [_brief(guard) for guard in guards]})
    if size_of(smaller) <= most:
        return smaller, cut
    smaller["guards"] = [
        GuardView(**{**guard, "stack": []}) if guard["tone"] == "ok" else guard for guard in guards
    ]
    smaller["happenings"] = smaller["happenings"][-10:]
    if size_of(smaller) <= most:
        return smaller, cut
    return _halved(smaller, most)


def _brief(guard: GuardView) -> GuardView:
    if guard["tone"] != "ok":
        return guard
    stack = [Layer(**{**layer, "facts": [], "changes": []}) for layer in guard["stack"]]
    return GuardView(**{**guard, "stack": stack})


def _halved(view: View, most: int) -> tuple[View, int]:
    """Leave out half of what there is, what is well first, until it fits."""
    before, guards = _things(view), len(view["guards"])
    while size_of(view) > most and (_things(view) or len(view["troubles"]) > FEW):
        view["guards"] = _half(view["guards"])
        view["sections"] = {title: _half(rows) for title, rows in view["sections"].items()}
        view["troubles"] = view["troubles"][: max(FEW, len(view["troubles"]) // 2)]
    if len(view["guards"]) < guards:
        view.setdefault("all_guards", guards)
    return view, before - _things(view)


def _things(view: View) -> int:
    return len(view["guards"]) + sum(map(len, view["sections"].values()))


def _half(things: list[Any]) -> list[Any]:
    return most_wanted(things, len(things) // 2)


def most_wanted(things: list[Any], most: int) -> list[Any]:
    """Return at most so many of them: the worst, of the same tone the first; in their order."""
    if len(things) <= most:
        return things
    ranked = sorted(range(len(things)), key=lambda place: WORST.index(things[place]["tone"]))
    return [things[place] for place in sorted(ranked[:most])]
