"""The short path through the edge, for the majority of requests, which need no special handling.

Such a request has no header that the edge reads, is not for a probe or a route with its own limit,
is within limits that are counted in this process, and finds a free slot. All of that is checked in
one frame, with the same effect as on the full path (`request_flow`), which serves all other
requests. This code runs once between two system calls, with cold processor caches: each saved
frame, object and lookup counts, some 20 ns for every step of the interpreter.
"""

from __future__ import annotations

from collections.abc import Container
from contextvars import copy_context
from math import inf
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import current_tasks
from seawall.context import deadline_scope, deadline_var, reserve_of
from seawall.models.rate.rates import ROUND
from seawall.runtime.layers import Wait
from seawall.web.edge.inbound import CLEAN, KNOWN
from seawall.web.edge.sending import PASSAGE, Passage, to_nobody
from seawall.web.request import INCOMING

if TYPE_CHECKING:
    from seawall.web.asgi_types import App, Receive, Scope, Send
    from seawall.web.edge.edge import Edge


class Otherwise(Exception):
    """Signal that a request must take the full path after all."""


class Absent:
    """Placeholder for a missing lifecycle or missing turns: checking for None would cost time."""

    def __init__(self) -> None:
        self.calm, self.strict = True, False
        self.in_flight = self.served = 0
        self.unwatched = inf

    def end(self) -> None:
        """Do nothing: nothing was counted in, and threads may have miscounted."""


_MOST_PATHS: Final = 1000
_LONGEST_PATH: Final = 200
"""Maximum length of a cached path. Longer paths are checked each time, so that clients cannot fill
the memory with them."""


def plain_entry(  # noqa: C901, PLR0915 - one frame, see the module
    way: Edge, probes: Container[str], outer: App | None = None
) -> App | None:
    """Return an app that serves requests by the short path, and passes others to `way._unusual`.

    With `outer`, the returned app replaces it, and also passes it the other requests and
    exceptions. Return None if the parts of the edge do not permit the short path at all.
    """
    inbound, limits = way._inbound, None
    lifecycle: Any = way._lifecycle or Absent()
    turns: Any = way._turns or Absent()
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
    place_enter, free = (None, [None])
    if place is not None:
        place_enter, free = place.enter, place.policy.slots.free
    get_deadline, set_deadline = deadline_var.get, deadline_var.set
    unknown, clean = KNOWN.isdisjoint, CLEAN.isdisjoint
    clock_now, clock, cutting, usual = way._now, way._clock, way._cutting, inbound.usual
    reserve = reserve_of(usual, inbound.reserve)
    find_task, own = current_tasks.get, way._own
    gates = way._routes
    paths: set[Any] = set()
    """Paths known to belong to no probe and no route with a limit.

    With their methods, where the app's router is used for the lookup.
    """
    shapes: frozenset[str] | None = None
    """Route shapes for which `paths` is valid."""

    def is_plain(path: str, scope: Scope) -> bool:
        nonlocal shapes
        if path in probes:
            return False
        key: Any = path
        dispatch = own.dispatch
        if gates is not None:
            if dispatch is not None:
                now = dispatch.shapes()
                if now is not shapes:
                    shapes = now
                    paths.clear()
                key = path, scope["method"]
                if key in paths:
                    return True
            if gates.of(scope, dispatch) is not None:
                return False
            if dispatch is not None and not dispatch.by_path:
                return True
        if len(path) + len(scope["method"]) <= _LONGEST_PATH:
            if len(paths) >= _MOST_PATHS:  # callers can invent paths
                paths.clear()
            paths.add(key)
        return True

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:  # noqa: C901, PLR0912, PLR0915 - one frame
        if scope["type"] != "http":
            await (outer or way._unusual)(scope, receive, send)
            return
        passage = Passage(scope, receive, send, own)
        entered = False
        taken = None
        try:
            path = scope["path"]
            if (
                not scope.get("root_path")
                and (path in paths or is_plain(path, scope))
                and INCOMING not in scope
                and unknown(passage.named)
                and clean(copy_context())
                and (get_deadline() is None or deadline_scope() is None)
                and lifecycle.calm
                and free
                and (not turns.strict or turns.full())
            ):
                passage.began = now = clock_now()
                if turns.strict:
                    turns.turned_away("shed")
                thread, lane = cutting.known
                task = find_task(lane.loop) if thread == get_ident() else None
                if task is None:
                    try:
                        lane, task = cutting.find()
                    except RuntimeError:  # no running task: the full path reports it
                        raise Otherwise from None
                at = now + usual
                passage._deadline = held = [at - reserve, clock, None, True]
                set_deadline(held)
                if shed is not None and shed.sheds(now):
                    shed.shed_by(0)
                us = now * 1e6 + ROUND - ROUND
                if take is None or (taken := take(us, passage)) is not None:
                    if now < turns.unwatched:
                        turns.served += 1
                    elif not turns.begins(now):
                        raise Otherwise  # noqa: TRY301 - a function would cost a frame
                    if place_enter is not None:
                        passage.gates = ((place, place_enter(now)),)
                    # From here on nothing can fail until the app has started.
                    entered = True
                    if fields is not None:
                        passage.told = fields(us, taken[1])  # type: ignore[index]
                    lifecycle.in_flight += 1
                    cutting.last = at  # in the order of arrival, which is that of expiry
                    pending = lane.pending
                    pending[task] = at
                    if lane.timer is None:
                        lane.arm(at)
                    passage.task = task
                    passage.cut = pending, task, task.cancelling()
                    scope[INCOMING] = passage
                    app = way.app  # called from a variable: see `Passage.send`
                    await app(scope, passage.receive, passage.send)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure: BaseException | None = error
        else:
            if entered and passage.left and passage.cut is None:
                # Inlined copy of `_end_plainly()`.
                passage.task = None
                if INCOMING in scope:
                    del scope[INCOMING]
                if lifecycle.calm and lifecycle.in_flight > 0:
                    lifecycle.in_flight -= 1
                else:
                    lifecycle.end()
                held[3] = None  # inlined copy of `end_scope()`
                return
            failure = None
        try:  # outside of the handler, so that later exceptions are not chained to this one
            if not entered and taken is not None:
                limits.give_back(us, taken)  # type: ignore[union-attr]
            if entered or not (failure is None or isinstance(failure, (Otherwise, Wait))):
                failure = await way._end_plainly(passage, failure, send, entered)
                if failure is None:
                    return
                if outer is None:
                    raise failure
                scope[PASSAGE] = failure, passage.status
                failure = None
                await outer(scope, receive, to_nobody if passage.status else send)
                return
        finally:
            failure = None  # Break the cycle between the exception and this frame.
        if passage._deadline is not None:
            held[3] = passage._deadline = None
            passage.sifted = True
        scope[PASSAGE] = passage
        await (outer or way._unusual)(scope, receive, send)

    return serve
