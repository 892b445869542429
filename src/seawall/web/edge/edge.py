"""The edge of a service: everything that a request passes before it reaches the app, in one class.

Promises:

- Health probes are always answered.
- A refused request, whichever part refuses it, costs no more than the refusal and consumes nothing.
- Every gate that was entered is left exactly once (see `sending`).
- An exception of Seawall that escapes from the app becomes problem+json with the right status and
  Retry-After, as long as the response has not started. So does the failure of an upstream, which is
  logged too (see `upstream_log`).

The order:

    health > lifecycle > inbound > shed > limits > route > turns > concurrency
        > the app, with a deadline

This is one class and not one per part, because every middleware around an app costs a frame for
each request and one for each message of its response.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.context import end_scope
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.runtime.policy import Policy
from seawall.web.asgi_types import App, Message, Receive, Scope, Send
from seawall.web.edge.admission import Turns
from seawall.web.edge.answers import send_problem
from seawall.web.edge.degradation_report import DegradationReport, header_name
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.request_flow import GOING_AWAY, AddressShare, Way
from seawall.web.edge.routes import RouteGates
from seawall.web.edge.sending import PASSAGE, Own, Passage
from seawall.web.edge.short_path import plain_entry
from seawall.web.edge.timer import Cutting
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimits
from seawall.web.request import INCOMING, path_below_root
from seawall.web.routes import dispatch_of
from seawall.web.trust import Trust


class Edge(Way):
    """ASGI middleware that puts these parts around an app; each part is optional."""

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
        websockets_per_address: int | None = None,
        stall: float | None = 30.0,
        health: Health | None = None,
        lifecycle: Lifecycle | None = None,
        trust: Trust | None = None,
        report_degraded: bool | str = False,
        clock: Clock | None = None,
    ) -> None:
        """Wrap `app`; `name` is the name of the guard which `shed`, `turns`... belong to.

        `routes` gives routes their own limit on concurrent requests, by path template, as in
        `{"/reports/{id}": AdaptiveLimit()}`. Several routes may share one limit. Around a Starlette
        router, the router determines the route of a request; otherwise the first matching template
        counts. `websockets` limits the number of open websockets: their handshakes pass all other
        parts as requests do, and hold them only during the handshake. `websockets_per_address`
        limits the open websockets of one address. The edge ends a response of which the client
        reads nothing for `stall` seconds. `trust` defaults to that of `inbound`. With
        `report_degraded`, a response names its degraded parts, by source and level, in the header
        `Seawall-Degraded`, or in a header of the given name.
        """
        self._degraded_header = header_name(report_degraded)
        self.app = self._reporting(check.function("app", app))
        if hasattr(app, "build_middleware_stack"):
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
        # A guard needs at least one policy, and this one does nothing.
        self.guard = registry.release(Guard(name, *(given or [Turns(mode="off")]), clock=clock))
        bounds: dict[int, Any] = {id(bound.policy): bound for bound in self.guard.bounds}
        self._shed = bounds.get(id(shed))
        self._turns = bounds.get(id(turns))
        self._concurrency = bounds.get(id(concurrency))
        self._websockets = bounds.get(id(websockets))
        if websockets_per_address is not None and websockets is None:
            raise TypeError("websockets_per_address=...: write websockets=Bulkhead(...) too")
        self._share = (
            None
            if websockets_per_address is None
            else AddressShare(check.count("websockets_per_address", websockets_per_address))
        )
        self._shed_is_told = self._shed is not None and self._shed.takes_arguments
        self._place_is_told = self._concurrency is not None and self._concurrency.takes_arguments
        self._clock = self.guard.clock
        self._now = self.guard.clock.now
        self._routes = RouteGates(name, routes, self._clock) if routes else None
        self._inbound = inbound
        self._limits = limits
        self._health = health
        self._lifecycle = lifecycle
        trust = trust or (inbound.trust if inbound is not None else Trust())
        stall = None if stall is None else check.seconds("stall", stall)
        self._own = Own(self._now, self.guard.stats, trust, self._turns, stall, dispatch_of(app))
        self._cutting = Cutting(self._clock)
        self._upstreams = UpstreamLog(name, self._now)
        self._probes = frozenset() if health is None else frozenset(health.paths)
        self._unusual: App = self._serve_unusual
        """Serves all requests that the short path does not."""
        self._serving: App = plain_entry(self, self._probes) or self._serve_unusual
        """Serves everything, without the extra frame of `__call__`."""
        registry.enter(self, "edge", name)

    def __repr__(self) -> str:
        return f"<Edge {self.guard.name!r}>"

    def _reporting(self, app: App) -> App:
        """Return `app`, wrapped in the report of degraded responses if that is enabled."""
        header = self._degraded_header
        return app if header is None else DegradationReport(app, header)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the edge: the counts of its guard and of its parts."""
        parts: dict[str, Any] = {
            "inbound": self._inbound,
            "limits": self._limits,
            "routes": self._routes,
            "lifecycle": self._lifecycle,
            "health": self._health,
        }
        told = {name: part.snapshot() for name, part in parts.items() if part is not None}
        return {**self.guard.snapshot(), "stalled": self._own.stalled, **told}

    def dangers(self) -> list[str]:
        """Return the warnings of `seawall.explain()` for this edge."""
        return [] if self._inbound is None else self._inbound.dangers()

    def close(self) -> None:
        """Free the names of the edge and its routes."""
        self.guard.close()
        if self._routes is not None:
            self._routes.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a websocket or the lifespan of the app."""
        await self._serving(scope, receive, send)

    async def _serve_unusual(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve what the short path does not, or raise the exception of a request it served."""
        kept: Any = scope.pop(PASSAGE, None)
        if isinstance(kept, tuple):
            error, status = kept
            del kept
            try:
                if status:  # so that middlewares see that a response has started
                    await send({"type": "http.response.start", "status": status, "headers": []})
                raise error
            finally:
                del error  # Break the cycle between the exception and this frame.
        kind = scope["type"]
        if kind == "http":
            passage: Passage = Passage(scope, receive, send, self._own) if kept is None else kept
            passage.source, passage.to = receive, send
            await self._serve_request(scope, receive, passage, send)
        elif kind == "websocket":
            await self._connect(scope, receive, send)
        elif kind == "lifespan" and self._lifecycle is not None:
            await self._lifecycle.lifespan(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _end_plainly(
        self,
        passage: Passage,
        error: BaseException | None,
        send: Send,
        entered: bool,  # noqa: FBT001 - a fact about the request
    ) -> BaseException | None:
        """End a request of the short path that failed or still holds something.

        Return the exception to raise, or None.
        """

        def answer(message: Message) -> Awaitable[None]:
            passage.status = message.get("status", passage.status)  # the response has started
            return send(message)

        lifecycle = self._lifecycle
        if not entered and lifecycle is not None:
            lifecycle.in_flight += 1  # it counts until its refusal is sent
        try:
            if error is None and not passage.left:
                passage.end(None)
            if error is not None or passage.cut is not None:
                await self._fail(passage, error, answer, None, entered)
            error = None
        except BaseException as failure:  # noqa: BLE001 - returned
            error = failure
        passage.scope.pop(INCOMING, None)
        passage.task = None
        if lifecycle is not None:
            lifecycle.end()
        if passage._deadline is not None:
            end_scope(passage._deadline)
        try:
            return error
        finally:
            del error  # Break the cycle between the exception and this frame.

    async def _serve_request(
        self, scope: Scope, receive: Receive, passage: Passage, send: Send
    ) -> None:
        """Serve a health probe, or a request that the short path does not serve."""
        health, lifecycle = self._health, self._lifecycle
        if health is not None and path_below_root(scope) in health.paths:
            await health(scope, receive, send)
        elif lifecycle is None:
            await self._serve(scope, receive, passage, send)
        elif lifecycle.begin():
            if lifecycle.draining:
                passage.to = send = lifecycle.answering(scope, send)
            try:
                await self._serve(scope, receive, passage, send)
            finally:
                lifecycle.end()
        else:
            answering = lifecycle.answering(scope, send)
            await send_problem(answering, GOING_AWAY, [], method=scope["method"])


def _checked(part: str, given: Any, kinds: tuple[type, ...]) -> Any:
    """Return `given` if it is an instance of `kinds`, else raise and say what to write."""
    if not isinstance(given, kinds):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={given!r}: write {wanted}")
    return given
