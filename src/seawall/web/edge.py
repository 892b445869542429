"""The edge of a service: everything that a request passes before the app sees it, in one class.

Promises: health probes are always answered; a request that is refused, at whichever part, costs no
more than the refusal, and takes nothing with it; what was entered is left exactly once (see
`seawall.web.sending`); an error of Seawall that escapes from the app becomes problem+json with the
right status and Retry-After, as long as the response has not started. The order:

    health > lifecycle > inbound > shed > limits > route > turns > concurrency
        > the app, with a deadline

One class and not one for each part: every middleware around an app costs a frame for each request
and one for each message of its response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from seawall import _checks as check
from seawall.clock import Clock
from seawall.context import deadline_var
from seawall.errors import RateLimited, Rejected, TimedOut
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.runtime.layers import Wait
from seawall.runtime.policy import GateBound, Policy
from seawall.runtime.runners import wait_async
from seawall.web._edge_answers import SocketAnswer, send_problem
from seawall.web._edge_routes import RouteGates
from seawall.web._edge_time import Cutting
from seawall.web.admission import Turns
from seawall.web.health import Health
from seawall.web.inbound import Inbound
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import Granted, RequestLimits
from seawall.web.problems import Problem, problem_of
from seawall.web.request import INCOMING, Incoming, path_below_root
from seawall.web.sending import Headers, Passage, Send, SocketPassage
from seawall.web.trust import Trust

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Any, Any, Any], Awaitable[None]]

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
        routes: Mapping[str, AdaptiveLimit | Bulkhead] | None = None,
        turns: Turns | None = None,
        concurrency: AdaptiveLimit | Bulkhead | None = None,
        websockets: Bulkhead | None = None,
        health: Health | None = None,
        lifecycle: Lifecycle | None = None,
        trust: Trust | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Stand around `app`; `name` is that of the guard which `shed`, `turns`... belong to.

        `routes` gives routes a limit of their own on requests at once, by their templates, as in
        `{"/reports/{id}": AdaptiveLimit()}`; one limit for several routes is shared by them.
        `websockets` bounds how many are open at once: their handshakes pass all the rest as
        requests do, and hold it no longer than that. `trust` is that of `inbound`, unless given.
        """
        self.app = check.function("app", app)
        if hasattr(app, "middleware_stack"):
            raise TypeError(
                f"Edge({app!r}): a Starlette or FastAPI app answers its errors itself, before the"
                " edge could; write protect(app), from seawall.web.fastapi"
            )
        for part, given_part, kind in (
            ("inbound", inbound, Inbound),
            ("limits", limits, RequestLimits),
            ("routes", routes, Mapping),
            ("health", health, Health),
            ("lifecycle", lifecycle, Lifecycle),
            ("trust", trust, Trust),
        ):
            if given_part is not None:
                _checked(part, given_part, (kind,))
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
        for path, limit in (routes or {}).items():
            _checked(f"routes[{path!r}]", limit, (AdaptiveLimit, Bulkhead))
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
        self._routes = RouteGates(name, routes, self._clock) if routes else None
        self._inbound = inbound
        self._limits = limits
        self._health = health
        self._lifecycle = lifecycle
        self._trust = trust or (inbound.trust if inbound is not None else Trust())
        self._cutting = Cutting(self._clock)

    def __repr__(self) -> str:
        return f"<Edge {self.guard.name!r}>"

    def snapshot(self) -> dict[str, Any]:
        """Return what there is to see of the edge: its guard's counts, and those of its parts."""
        parts: dict[str, Any] = {
            "inbound": self._inbound,
            "limits": self._limits,
            "routes": self._routes,
            "lifecycle": self._lifecycle,
            "health": self._health,
        }
        told = {name: part.snapshot() for name, part in parts.items() if part is not None}
        return {**self.guard.snapshot(), **told}

    def close(self) -> None:
        """Free the name for another edge."""
        self.guard.close()
        if self._routes is not None:
            self._routes.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a websocket, or the life of the app."""
        kind = scope["type"]
        lifecycle = self._lifecycle
        if kind == "http":
            health = self._health
            path = path_below_root(scope) if scope.get("root_path") else scope["path"]
            if health is not None and path in health.paths:
                await health(scope, receive, send)
            elif lifecycle is None:
                await self._serve(scope, receive, Passage(send, self._now, self._stats), send)
            elif lifecycle.begin():
                if lifecycle.draining:
                    send = lifecycle.answering(scope, send)
                try:
                    await self._serve(scope, receive, Passage(send, self._now, self._stats), send)
                finally:
                    lifecycle.end()
            else:
                await send_problem(lifecycle.answering(scope, send), _GOING_AWAY, [])
        elif kind == "websocket":
            await self._connect(scope, receive, send)
        elif kind == "lifespan" and lifecycle is not None:
            await lifecycle.lifespan(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(  # noqa: C901, PLR0912, PLR0915 - one frame for all gates: each more costs
        self, scope: Scope, receive: Receive, passage: Passage, send: Send
    ) -> None:
        """Let the request in, run the app, and see to it that everything is left."""
        inbound, limits = self._inbound, self._limits
        tokens = granted = outer = None
        entered = False
        failure: BaseException | None = None
        try:
            outer = scope.get(INCOMING)
            incoming = Incoming(scope, self._trust)
            incoming.passage = passage
            if inbound is not None:
                tokens = inbound.read(incoming, self._clock)
            scope[INCOMING] = incoming
            passage.began = now = self._now()
            gate = self._shed
            if gate is not None:
                enter: Any = gate.enter
                ticket = enter(now, incoming) if self._shed_is_told else enter(now)
                if gate.leave is not None:
                    passage.gates.append((gate, ticket))
            if limits is not None:
                granted = await limits.aadmit(incoming) if limits.waits else limits.admit(incoming)
                passage.headers = granted.headers
            if self._routes is not None:
                gate = self._routes.of(incoming)
                if gate is not None:
                    await self._enter(gate, incoming, passage, granted)
                    now = self._now()
            gate = self._turns
            if gate is not None:
                try:
                    gate.enter(now)  # type: ignore[misc]
                except Wait as wait:
                    await self._wait(wait, granted)
                    now = self._now()
            gate = self._concurrency
            if gate is not None:
                enter = gate.enter
                try:
                    ticket = enter(now, incoming) if self._place_is_told else enter(now)
                except Wait as wait:
                    ticket = await self._wait(wait, granted)
                passage.gates.append((gate, ticket))
            entered = True
            if granted is not None and granted.accounted:
                granted.enters()
            held = deadline_var.get()
            if held is not None:
                self._cutting.arm(passage, held[0], held[1])
            await self.app(scope, receive, passage.send)
            if not passage.left:
                passage.end(None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure = error
        try:
            if failure is not None or passage.timed:
                await self._fail(passage, failure, send, None if entered else granted, entered)
        finally:
            del failure  # or it would lead to itself
            if outer is None:
                scope.pop(INCOMING, None)
            else:
                scope[INCOMING] = outer
            if tokens:
                inbound.undo(tokens)  # type: ignore[union-attr]

    async def _enter(
        self, gate: GateBound, incoming: Incoming, passage: Passage, granted: Granted | None
    ) -> None:
        """Enter a gate of one route."""
        enter: Any = gate.enter
        now = self._now()
        try:
            ticket = enter(now, incoming) if gate.takes_arguments else enter(now)
        except Wait as wait:
            ticket = await self._wait(wait, granted)
        passage.gates.append((gate, ticket))

    async def _wait(self, wait: Wait, granted: Granted | None) -> Any:
        """Wait for a gate; what was taken from limits can be given back exactly after that."""
        if granted is not None:
            granted.waits()
        return await wait_async(wait.waiter, self._clock)

    async def _fail(
        self,
        passage: Passage,
        error: BaseException | None,
        send: Send,
        granted: Granted | None,
        entered: bool,  # noqa: FBT001 - as the request was
    ) -> None:
        """Leave what is held. Answer with the problem, if there is one in time; else raise."""
        if not entered:
            passage.headers = None
            passage.give_back(error)
            if granted is not None:
                granted.cancel()
        if passage.was_cut(error):
            cut = TimedOut("the deadline passed before the response began")
            cut.__cause__ = error
            error = cut
        if error is None:
            return
        passage.end(error)
        problem = None if passage.status else problem_of(error)
        if problem is None:
            try:
                raise error
            finally:
                del error
        await send_problem(send, problem, _more(passage, error))

    # Websockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a websocket in as a request; from then on it holds only its place among them."""
        lifecycle = self._lifecycle
        if lifecycle is not None and not lifecycle.begin_socket():
            await send_problem(SocketAnswer(scope, send), _GOING_AWAY, [])
            return
        passage = SocketPassage(send, self._now, self._stats)
        answering = SocketAnswer(scope, send)
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
                lifecycle.end_socket()

    async def _keep(self, passage: SocketPassage, gate: GateBound, send: Send) -> None:
        enter: Any = gate.enter
        try:
            try:
                ticket = enter(self._now())
            except Wait as wait:
                ticket = await wait_async(wait.waiter, self._clock)
        except Rejected as error:
            await self._fail(passage, error, send, None, entered=False)
        else:
            passage.keep(gate, ticket)


def _more(passage: Passage, error: BaseException) -> Headers:
    """Return the headers that a refusal has beyond those of every problem."""
    told = [] if passage.headers is None else passage.headers()
    return [*told, *error.headers] if isinstance(error, RateLimited) else told


def _checked(part: str, given: Any, kinds: tuple[type, ...]) -> Any:
    """Return `given` if it is of one of these kinds, or raise and say what to write."""
    if not isinstance(given, kinds):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={given!r}: write {wanted}")
    return given
