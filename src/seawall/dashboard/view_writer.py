"""Size limit of views, which are sent each second: healthy parts are shown in less detail."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from seawall.dashboard.bounds import MOST_BYTES
from seawall.dashboard.responses import to_json
from seawall.dashboard.views import WORST, GuardView, LayerView, View


class ViewWriter:
    """Writes views as JSON; reuses the JSON of objects that are the same as last time.

    Most of an update is unchanged: guards that were not sampled, pods that were not read. Written
    objects must not be changed in place. Not safe for concurrent use.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._next: dict[tuple[str, int], tuple[Any, Any]] = {}

    def begin(self) -> None:
        """Start an update: forget what the last one did not use."""
        self._last, self._next = self._next, {}

    def write(self, view: Mapping[str, Any], *, whole: bool = False) -> bytes:
        """Return a view as JSON; raise what `to_json` raises.

        Guards and rows are cached one by one, unless the view is always a `whole` new one.
        """
        rest = {name: value for name, value in view.items() if name not in _LARGE}
        guards = self._made("list", view["guards"], to_json if whole else self._list)
        make = to_json if whole else self._sections
        sections = self._made("sections", view["sections"], make)
        parts = [to_json(rest)[:-1], b',"guards":', guards, b',"sections":', sections, b"}"]
        return b"".join(parts)

    def reduced(self, guard: GuardView, reduce: Callable[[GuardView], GuardView]) -> GuardView:
        """Return a guard in less detail, if it is healthy."""
        if guard["tone"] != "ok":
            return guard
        made: GuardView = self._made(reduce.__name__, guard, reduce)
        return made

    def _sections(self, sections: Mapping[str, list[Any]]) -> bytes:
        members = [to_json(title) + b":" + self._list(rows) for title, rows in sections.items()]
        return b"{%b}" % b",".join(members)

    def _list(self, things: list[Any]) -> bytes:
        return b"[%b]" % b",".join([self._made("json", thing, to_json) for thing in things])

    def _made(self, what: str, value: Any, make: Callable[[Any], Any]) -> Any:
        key = what, id(value)
        known = self._next.get(key) or self._last.get(key)
        if known is None or known[0] is not value:
            known = value, make(value)
        self._next[key] = known
        return known[1]


_LARGE: Final = frozenset({"guards", "sections"})
FEW: Final = 10
"""Number of problems that are always shown: the worst come first."""


def size_of(view: Any, writer: ViewWriter | None = None) -> int:
    """Return the size of the view as JSON in bytes."""
    return len((writer or ViewWriter()).write(view))


def fit_view(
    view: View, most: int = MOST_BYTES, writer: ViewWriter | None = None
) -> tuple[View, int]:
    """Return the view with as much as fits, and the number of guards and rows cut.

    First, healthy guards lose their facts and changeable settings, then their stacks. If that is
    not enough, healthy parts are removed from the end, and finally others from the end. A `writer`
    caches from one call to the next.
    """
    writer = writer or ViewWriter()
    if size_of(view, writer) <= most:
        return view, 0
    guards = view["guards"]
    cut = sum(guard["tone"] == "ok" for guard in guards)
    smaller = View(
        **{**view, "guards": [writer.reduced(guard, _without_facts) for guard in guards]}
    )
    if size_of(smaller, writer) <= most:
        return smaller, cut
    smaller["guards"] = [writer.reduced(guard, _without_stack) for guard in guards]
    smaller["happenings"] = smaller["happenings"][-10:]
    if size_of(smaller, writer) <= most:
        return smaller, cut
    return _halved(smaller, most)


def _without_facts(guard: GuardView) -> GuardView:
    stack = [LayerView(**{**layer, "facts": [], "changes": []}) for layer in guard["stack"]]
    return GuardView(**{**guard, "stack": stack})


def _without_stack(guard: GuardView) -> GuardView:
    return GuardView(**{**guard, "stack": []})


def _halved(view: View, most: int) -> tuple[View, int]:
    """Remove half of the parts, healthy ones first, until the view fits."""
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
    return keep_worst(things, len(things) // 2)


def keep_worst(things: list[Any], most: int) -> list[Any]:
    """Return at most `most` of the things: the worst, then the first ones; in their order."""
    if len(things) <= most:
        return things
    ranked = sorted(range(len(things)), key=lambda place: WORST.index(things[place]["tone"]))
    return [things[place] for place in sorted(ranked[:most])]
