"""The edge of a service: everything that a request passes before the app sees it, in one class.

Promises: health probes are always answered; a request that is refused, at whichever part, costs no
more than the refusal, and takes nothing with it; what was entered is left exactly once (see
`seawall.web.sending`); an error of Seawall that escapes from the app becomes problem+json with the
right status and Retry-After, as long as the response has not started. The order:

    health > lifecycle > inbound > shed > limits > turns > concurrency > the app, with a deadline

One class and not one for each part: every middleware around an app costs a frame for each request
and one for each message of its response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from seawall._expiry import running_task
from seawall.clock import Clock
from seawall.context import deadline_var
from seawall.errors import Rejected, TimedOut
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.runtime.layers import Wait
from seawall.runtime.mutex import survives_fork
from seawall.runtime.policy import GateBound, Policy
from seawall.runtime.runners import wait_async
from seawall.web.admission import Turns
from seawall.web.inbound import Inbound
from seawall.web.problems import Problem, problem_of
from seawall.web.request import Incoming
from seawall.web.sending import Headers, Passage, Send, SocketPassage
from seawall.web.trust import Trust

if TYPE_CHECKING:
    import asyncio

    from seawall.policies._async_timeout import Lane
    from seawall.web.health import Health
    from seawall.web.lifecycle import Lifecycle
    from seawall.web.limits import RequestLimits

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Any, Any, Any], Awaitable[None]]

TRY_AGAIN_LATER: Final = 1013
"""The code with which a websocket is closed that was refused."""

_GOING_AWAY: Final = Problem(
    503, "Service unavailable", "The service is going away.", retry_after=1.0
)


class Edge:
    """Put these parts around an ASGI app; each of them may be left out."""

    def __init__(
        self,
        app: App,
        *,
        name: str = "edge",
        inbound: Inbound | None = None,
        shed: Shed | None = None,
        limits: RequestLimits | None = None,
        turns: Turns | None = None,
        concurrency: AdaptiveLimit | Bulkhead | None = None,
        routes: Mapping[str, AdaptiveLimit | Bulkhead] | None = None,
        websockets: Bulkhead | None = None,
        health: Health | None = None,
        lifecycle: Lifecycle | None = None,
        trust: Trust | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Stand around `app`; `name` is that of the guard which `shed`, `turns`... belong to.

        `routes` gives routes of a Starlette app a limit of their own, by their templates; the same
        one for several shares it among them.
        `websockets` bounds how many are open at once: their handshakes pass all the rest as
        requests do, and hold it no longer than that. `trust` is that of `inbound`, unless given.
        """
        self.app = app
        given: list[Policy] = [
            _checked(part, policy, kinds)
            for part, policy, kinds in (
                ("shed", shed, (Shed,)),
                ("turns", turns, (Turns,)),
                ("concurrency", concurrency, (AdaptiveLimit, Bulkhead)),
                ("websockets", websockets, (Bulkhead,)),
            )
            if policy is not None
        ]
        # A guard has at least one policy, and this one does nothing.
        self.guard = Guard(name, *(given or [Turns(mode="off")]), clock=clock)
        bounds: dict[int, Any] = {id(bound.policy): bound for bound in self.guard.bounds}
        self._shed: GateBound | None = bounds.get(id(shed))
        self._turns: GateBound | None = bounds.get(id(turns))
        self._concurrency: GateBound | None = bounds.get(id(concurrency))
        self._websockets: GateBound | None = bounds.get(id(websockets))
        self._shed_is_told = self._shed is not None and self._shed.takes_arguments
        self._place_is_told = self._concurrency is not None and self._concurrency.takes_arguments
        self._clock = self.guard.clock
        self._now = self.guard.clock.now
        self._stats = self.guard.stats
        self._inbound = inbound
        self._limits = limits
        self._health = health
        self._lifecycle = lifecycle
        self._trust = trust or (inbound.trust if inbound is not None else Trust())
        self._cutting = _Cutting(self._clock)
        self._routes: Mapping[str, AdaptiveLimit | Bulkhead] = dict(routes or {})
        """Those that are not found yet: they are looked for when the app is first called."""
        for path, limit in self._routes.items():
            _checked(f"routes[{path!r}]", limit, (AdaptiveLimit, Bulkhead))

    def __repr__(self) -> str:
        return f"<Edge {self.guard.name!r}>"

    def snapshot(self) -> dict[str, Any]:
        """Return what there is to see of the edge: its guard's counts, and those of its parts."""
        parts: dict[str, Any] = {
            "inbound": self._inbound,
            "limits": self._limits,
            "lifecycle": self._lifecycle,
            "health": self._health,
        }
        told = {name: part.snapshot() for name, part in parts.items() if hasattr(part, "snapshot")}
        return {**self.guard.snapshot(), **told}

    def close(self) -> None:
        """Free the name for another edge."""
        self.guard.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a websocket, or the life of the app."""
        kind = scope["type"]
        if self._routes:
            self._gate_routes(scope)
        if kind == "http":
            health = self._health
            if health is not None and health.handles(scope["path"]):
                await health(scope, receive, send)
            elif self._lifecycle is None:
                await self._serve(scope, receive, Passage(send, self._now, self._stats), send)
            elif self._lifecycle.begin():
                try:
                    await self._serve(scope, receive, Passage(send, self._now, self._stats), send)
                finally:
                    self._lifecycle.end()
            else:
                await _answer(send, _GOING_AWAY, [(b"connection", b"close")])
        elif kind == "websocket":
            await self._connect(scope, receive, send)
        elif kind == "lifespan" and self._lifecycle is not None:
            await self._lifecycle.lifespan(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, passage: Passage, send: Send) -> None:
        """Let the request in, run the app, and see to it that everything is left."""
        inbound = self._inbound
        tokens = None
        failure: BaseException | None = None
        try:
            incoming = Incoming(scope, self._trust)
            if inbound is not None:
                tokens = inbound.read(incoming, self._clock)
            await self._enter(incoming, passage)
            await self.app(scope, receive, passage.send)
            passage.end(None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure = error
        try:
            if passage.was_cut(failure):
                cut = TimedOut("the deadline passed before the response began")
                cut.__cause__ = failure
                failure = cut
            if failure is not None:
                passage.end(failure)
                await self._fail(passage, failure, send)
        finally:
            del failure  # or it would lead to itself
            if tokens is not None and inbound is not None:
                inbound.undo(tokens)

    async def _enter(self, incoming: Incoming, passage: Passage) -> None:  # noqa: C901 - one frame for all gates
        """Pass the gates, outermost first; whoever refuses, all is given back."""
        passage.began = now = self._now()
        granted = None
        try:
            shed = self._shed
            if shed is not None:
                enter: Any = shed.enter
                ticket = enter(now, incoming) if self._shed_is_told else enter(now)
                if shed.leave is not None:
                    passage.hold(shed, ticket)
            limits = self._limits
            if limits is not None:
                granted = await limits.aadmit(incoming) if limits.waits else limits.admit(incoming)
                passage.headers = granted.headers
            turns = self._turns
            if turns is not None:
                try:
                    turns.enter(now)  # type: ignore[misc]
                except Wait as wait:
                    await wait_async(wait.waiter, self._clock)
                    now = self._now()
                passage.hold(turns, None)
            place = self._concurrency
            if place is not None:
                enter = place.enter
                try:
                    ticket = enter(now, incoming) if self._place_is_told else enter(now)
                except Wait as wait:
                    ticket = await wait_async(wait.waiter, self._clock)
                passage.hold(place, ticket)
            held = deadline_var.get()
            if held is not None:
                self._cutting.arm(passage, *held)
        except BaseException as error:
            passage.headers = None
            passage.give_back(error)
            if granted is not None:
                granted.cancel()
            raise

    async def _fail(self, passage: Passage, error: BaseException, send: Send) -> None:
        """Answer with the problem, if there is one and it is not too late; else raise."""
        problem = None if passage.status else problem_of(error)
        if problem is None:
            try:
                raise error
            finally:
                del error
        await _answer(send, problem, self._more(passage, error))

    def _more(self, passage: Passage, error: BaseException) -> Headers:
        """Return the headers that a refusal has beyond those of every problem."""
        if passage.headers is not None:
            return passage.headers()
        if self._limits is not None and getattr(error, "own_limit", False) is True:
            return self._limits.refusal_headers(error)
        return []

    def _gate_routes(self, scope: Scope) -> None:
        """Put the limits of routes around them, now that the app has all its routes."""
        wanted, self._routes = self._routes, {}
        found = _routes_of(getattr(scope.get("app"), "routes", ()))
        for path, limit in wanted.items():
            if path not in found:
                known = ", ".join(sorted(found)[:20]) or "none: is this a Starlette app?"
                raise ValueError(
                    f"routes={{{path!r}: ...}}: there is no such route; known: {known}"
                )
            for number, route in enumerate(found[path]):
                name = f"{self.guard.name} {path}" + (f" ({number + 1})" if number else "")
                route.app = RouteGate(route.app, limit, name=name, clock=self._clock)

    # Websockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a websocket in as a request; from then on it holds only its place among them."""
        lifecycle = self._lifecycle
        if lifecycle is not None and not lifecycle.begin():
            await _refuse_socket(scope, send, _GOING_AWAY, [])
            return
        passage = SocketPassage(send, self._now, self._stats)
        answering = _SocketAnswer(scope, send)
        failure: BaseException | None = None
        try:
            if self._websockets is not None:
                await self._keep(passage, self._websockets, answering)
                if answering.done:
                    return
            await self._serve(scope, receive, passage, answering)
        except BaseException as error:
            failure = error
            raise
        finally:
            passage.close(failure)
            del failure
            if lifecycle is not None:
                lifecycle.end()

    async def _keep(self, passage: SocketPassage, gate: GateBound, send: Send) -> None:
        enter: Any = gate.enter
        try:
            try:
                ticket = enter(self._now())
            except Wait as wait:
                ticket = await wait_async(wait.waiter, self._clock)
        except Rejected as error:
            await self._fail(passage, error, send)
        else:
            passage.keep(gate, ticket)


class RouteGate:
    """An app behind a limit of its own on requests at once: that of one route.

    It refuses by raising: the edge, or `problem_handler`, answers.
    """

    def __init__(
        self,
        app: App,
        concurrency: AdaptiveLimit | Bulkhead,
        *,
        name: str,
        clock: Clock | None = None,
    ) -> None:
        """Stand around `app`; `name` is that of a guard, such as "edge GET /reports/{id}"."""
        self.app = app
        _checked("concurrency", concurrency, (AdaptiveLimit, Bulkhead))
        self.guard = Guard(name, concurrency, clock=clock)
        self._gate: Any = self.guard.bounds[0]
        self._clock = self.guard.clock

    def __repr__(self) -> str:
        return f"<RouteGate {self.guard.name!r}>"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request within the limit; anything else passes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        gate = self._gate
        passage = Passage(send, self._clock.now, self.guard.stats)
        passage.began = now = self._clock.now()
        arguments = (Incoming(scope, Trust()),) if gate.takes_arguments else ()
        try:
            ticket = gate.enter(now, *arguments)
        except Wait as wait:
            ticket = await wait_async(wait.waiter, self._clock)
        passage.hold(gate, ticket)
        failure: BaseException | None = None
        try:
            await self.app(scope, receive, passage.send)
        except BaseException as error:
            failure = error
            raise
        finally:
            passage.end(failure)
            del failure


class _Cutting:
    """Cuts requests off at their deadlines; most of them in one lane with one timer.

    Where all have the same time, the order of arrival is that of expiry; who has less than the one
    before has a timer of its own.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin_afresh()
        survives_fork(self)

    def _begin_afresh(self) -> None:
        self._lane: Lane | None = None
        self._last = 0.0

    def arm(self, passage: Passage, at: float, clock: Clock) -> None:
        """Cut `passage` off at the instant `at` of `clock`."""
        task = running_task()
        lane = self._lane
        if lane is None or lane.loop is not task.get_loop():
            lane = self._change_lane(task.get_loop())
        pending = lane.pending
        if clock is not self._clock or (at < self._last and pending) or task in pending:
            passage.cut_after(at - clock.now(), task)
            return
        self._last = at
        pending[task] = at
        if lane.timer is None:
            lane.arm(at)
        passage.cut_in_lane(lane, task)

    def _change_lane(self, loop: asyncio.AbstractEventLoop) -> Lane:
        from seawall.policies._async_timeout import Lane

        lane = self._lane = Lane(loop, self._clock, 0.0)
        return lane

    def _after_fork(self) -> None:
        """Forget the loop of the parent process."""
        self._begin_afresh()


async def _answer(send: Send, problem: Problem, more: Headers) -> None:
    body = problem.body()
    length = (b"content-length", str(len(body)).encode())
    headers = [*problem.headers(), length, *more]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _SocketAnswer:
    """Sends what is sent as an HTTP response to who asked for a websocket."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._offered = "websocket.http.response" in (scope.get("extensions") or {})
        self._send = send
        self.done = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.done = True
        if self._offered:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})


async def _refuse_socket(scope: Scope, send: Send, problem: Problem, more: Headers) -> None:
    await _answer(_SocketAnswer(scope, send), problem, more)


def _routes_of(routes: Any, prefix: str = "") -> dict[str, list[Any]]:
    """Return the routes of a Starlette app by their templates, those of mounted ones too."""
    found: dict[str, list[Any]] = {}
    for route in routes:
        path = prefix + getattr(route, "path", "")
        inner = getattr(route, "routes", None)
        if inner:
            for deeper, known in _routes_of(inner, path).items():
                found.setdefault(deeper, []).extend(known)
        elif hasattr(route, "app"):
            found.setdefault(path, []).append(route)
    return found


def _checked(part: str, policy: Any, kinds: tuple[type[Policy], ...]) -> Policy:
    if not isinstance(policy, kinds):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={policy!r}: write {wanted}")
    return policy
