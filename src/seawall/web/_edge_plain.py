"""The short way through the edge, for a request with nothing unusual about it: which most are.

It brings no header that the edge reads, is for no probe and no route with a limit of its own, is
within limits that are counted in this process, and finds a place free. All of that is looked at in
one frame, and taken with the same effect as on the long way (`_edge_way`), which is there for
everything else. Once between two calls of the kernel's, nothing of this is warm in the processor:
each frame, object and look that is saved counts.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import current_tasks
from seawall.context import deadline_var
from seawall.models.rates import ROUND
from seawall.runtime.layers import Wait
from seawall.web.inbound import CLEAN, KNOWN
from seawall.web.request import INCOMING
from seawall.web.sending import Passage

if TYPE_CHECKING:
    from seawall.web._edge_way import Way

Begin = Callable[[Passage], bool]
"""Lets a request in; or returns False, having taken nothing. What refuses it raises."""

_MOST_PATHS: Final = 1000
_LONGEST_PATH: Final = 200
"""Longer ones are looked at each time: nobody fills the memory with them."""


def plain_entry(way: Way, probes: Container[str]) -> Begin | None:  # noqa: C901, PLR0915 - see above
    """Return what lets plain requests into an edge; None if its parts are such that none is."""
    inbound, lifecycle, turns, limits = way._inbound, way._lifecycle, way._turns, None
    shed: Any = way._shed
    place: Any = way._concurrency
    if inbound is None or inbound.usual is None:
        return None
    if shed is not None and (shed.leave is not None or shed.sheds is None):
        return None
    if place is not None and place.inline is None:
        return None
    if way._limits is not None:
        limits = way._limits.plain
        if limits is None or way._limits._clock is not way._clock:
            return None
    take, fields = (None, None) if limits is None else (limits.quick, limits.fields)
    place_enter, free = (None, None) if place is None else (place.enter, place.policy.slots.free)
    set_deadline, unset_deadline = deadline_var.set, deadline_var.reset
    unknown, clean = KNOWN.isdisjoint, CLEAN.isdisjoint
    clock_now, clock, cutting, usual = way._now, way._clock, way._cutting, inbound.usual
    find_task = current_tasks.get
    of_no_route = None if way._routes is None else way._routes.of_none
    paths: set[str] = set()
    """Some that are known to be those of no probe and no route with a limit."""

    def is_plain(path: str) -> bool:
        if path in probes or not (of_no_route is None or of_no_route(path)):
            return False
        if len(path) <= _LONGEST_PATH:
            if len(paths) >= _MOST_PATHS:  # callers make them up
                paths.clear()
            paths.add(path)
        return True

    def forget(passage: Passage) -> None:
        unset_deadline(passage.token)  # type: ignore[arg-type]
        passage.told = passage.token = None

    def begin(passage: Passage) -> bool:  # noqa: C901, PLR0912 - one frame: see above
        scope = passage.scope
        path = scope["path"]
        if (
            not (path in paths or is_plain(path))
            or scope.get("root_path")
            or INCOMING in scope
            or not unknown(passage.named)
            or not clean(copy_context())
            or (lifecycle is not None and not lifecycle.calm)
            or (free is not None and not free)
        ):
            return False
        passage.began = now = clock_now()
        if turns is not None and now >= turns.unwatched:
            return False
        thread, lane = cutting.known
        task = find_task(lane.loop) if thread == get_ident() else None
        if task is None:
            try:
                lane, task = cutting.find()
            except RuntimeError:  # there is none: the long way says so
                return False
        at = now + usual
        passage.token = set_deadline((at, clock))
        if shed is not None:
            passage.sifted = True
            if shed.sheds(now):
                shed.shed_by(0)
        if take is not None:
            us = now * 1e6 + ROUND - ROUND
            taken = take(us, passage)
            if taken is None:
                forget(passage)
                return False
            if fields is not None:
                passage.told = partial(fields, us, taken[1])
        if place_enter is not None:
            try:
                passage.gates = ((place, place_enter(now)),)
            except BaseException as error:  # another thread was quicker
                if limits is not None:
                    limits.give_back(us, taken)  # type: ignore[arg-type]
                if isinstance(error, Wait):
                    forget(passage)
                    return False
                raise
        # From here on nothing can fail.
        if turns is not None:
            turns.served += 1
        if lifecycle is not None:
            lifecycle.in_flight += 1
        cutting.last = at  # in the order of arrival, so of expiry
        pending = lane.pending
        pending[task] = at
        if lane.timer is None:
            lane.arm(at)
        passage.cut = pending, task, task.cancelling()
        scope[INCOMING] = passage
        return True

    return begin
