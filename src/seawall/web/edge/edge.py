"""The edge of a service: everything that a request passes before it reaches the app, in one class.

Promises:

- Health probes are always answered.
- A refused request, whichever part refuses it, costs no more than the refusal and consumes nothing.
- Every gate that was entered is left exactly once (see `passage`).
- An exception of Seawall that escapes from the app becomes problem+json with the right status and
  Retry-After, as long as the response has not started. So does the failure of an upstream, which is
  logged too (see `upstream_log`).

The order:

    health > lifecycle > inbound > shed > limits > route > loop admission
        > concurrency > the app, with a deadline

This is one class and not one per part, because every middleware around an app costs a frame for
each request and one for each message of its response.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall._expiry import current_task
from seawall.clock import Clock
from seawall.context import deadline_scope, reserve_scope
from seawall.errors import RateLimited, Rejected, SeawallError, TimedOut
from seawall.guard import Guard
from seawall.models.concurrency.algorithms import vegas
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.policies.slots import SlotGate
from seawall.runtime.call import STREAMED
from seawall.runtime.driver import wait_async
from seawall.runtime.layers import CANCELLED, OK, Wait
from seawall.runtime.policy import GateBound, Policy
from seawall.web.asgi_types import App, Headers, Receive, Scope, Send
from seawall.web.edge.degradation_report import DegradationReport, header_name
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.edge.passage import EdgeState, Passage
from seawall.web.edge.timers import RequestTimers
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.edge.websockets import AddressShare, SocketAnswer, SocketPassage
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimits
from seawall.web.problems import FAILURE, Problem, problem_of, send_problem
from seawall.web.request import INCOMING, path_below_root
from seawall.web.routes import RouteGates, dispatch_of
from seawall.web.trust import Trust

GOING_AWAY: Final = Problem(
    503, "Service unavailable", "The service is going away.", retry_after=1.0
)

LATE_BODY: Final = Problem(
    408, "Request timeout", "The body of the request did not arrive in time."
)


class Edge:
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
        loop_admission: LoopAdmission | None = None,
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
        """Wrap `app`; `name` is the name of the guard which `shed`, `loop_admission`... belong to.

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
        slots = (AdaptiveLimit, Bulkhead)
        _check_part("inbound", inbound, Inbound)
        _check_part("limits", limits, RequestLimits)
        _check_part("routes", routes, Mapping)
        _check_part("health", health, Health)
        _check_part("lifecycle", lifecycle, Lifecycle)
        _check_part("trust", trust, Trust)
        _check_part("shed", shed, Shed)
        _check_part("loop_admission", loop_admission, LoopAdmission)
        _check_part("concurrency", concurrency, *slots)
        _check_part("websockets", websockets, Bulkhead)
        for path, limit in (routes or {}).items():
            _check_part(f"routes[{path!r}]", limit, *slots, required=True)
        if websockets_per_address is not None and websockets is None:
            raise TypeError("websockets_per_address=...: write websockets=Bulkhead(...) too")
        given = (shed, loop_admission, concurrency, websockets)
        policies: list[Policy] = [policy for policy in given if policy is not None]
        # A guard needs at least one policy, and this one does nothing.
        self.guard = registry.release(
            Guard(name, *(policies or [LoopAdmission(mode="off")]), clock=clock)
        )
        bounds: dict[int, Any] = {id(bound.policy): bound for bound in self.guard.bounds}
        self._shed = bounds.get(id(shed))
        self._loop_admission = bounds.get(id(loop_admission))
        self._concurrency = bounds.get(id(concurrency))
        self._websockets = bounds.get(id(websockets))
        self._gates = tuple(
            gate for gate in (self._loop_admission, self._concurrency) if gate is not None
        )
        """The gates that every request enters after its limits, in this order."""
        self._share = (
            None
            if websockets_per_address is None
            else AddressShare(check.count("websockets_per_address", websockets_per_address))
        )
        self._clock = self.guard.clock
        self._now = self.guard.clock.now
        self._routes = RouteGates(name, routes, self._gates, self._clock) if routes else None
        self._inbound = inbound
        self._limits = limits
        self._health = health
        self._lifecycle = lifecycle
        trust = trust or (inbound.trust if inbound is not None else Trust())
        stall = None if stall is None else check.seconds("stall", stall)
        self._state = EdgeState(
            self._now,
            self.guard.stats,
            trust,
            self._loop_admission,
            stall,
            self._settle,
            dispatch_of(app),
        )
        self._timers = RequestTimers(self._clock)
        self._upstreams = UpstreamLog(name, self._now)
        self._probes = frozenset() if health is None else frozenset(health.paths)
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
        shown = {name: part.snapshot() for name, part in parts.items() if part is not None}
        return {**self.guard.snapshot(), "stalled": self._state.stalled, **shown}

    def dangers(self) -> list[str]:
        """Return the warnings of `seawall.explain()` for this edge."""
        return [] if self._inbound is None else self._inbound.dangers()

    def close(self) -> None:
        """Free the names of the edge and its routes."""
        self.guard.close()
        if self._routes is not None:
            self._routes.close()

    # Requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, a websocket or the lifespan of the app."""
        if scope["type"] != "http":
            await self._serve_other(scope, receive, send)
            return
        path = path_below_root(scope) if scope.get("root_path") else scope["path"]
        if path in self._probes:
            await self._health(scope, receive, send)  # type: ignore[misc]
            return
        lifecycle = self._lifecycle
        if lifecycle is not None:
            begun = lifecycle.begin()
            if not begun or lifecycle.draining:
                send = lifecycle.answering(scope, send)
            if not begun:
                await send_problem(send, GOING_AWAY, [], method=scope["method"])
                return
        try:
            await self._serve(Passage(scope, receive, send, self._state), send)
        finally:
            if lifecycle is not None:
                lifecycle.end()

    async def _serve_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a websocket or the lifespan."""
        lifecycle = self._lifecycle
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        elif scope["type"] == "lifespan" and lifecycle is not None:
            await lifecycle.lifespan(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, passage: Passage, send: Send) -> None:
        """Admit the request, run the app, and leave every gate that was entered."""
        scope, inbound = passage.scope, self._inbound
        around = scope.get(INCOMING)  # set by an edge around this one
        tokens = failure = None
        try:
            if inbound is not None:
                tokens = inbound.read(passage, self._clock)
            scope[INCOMING] = passage
            await self._admit(passage)
            if passage._deadline is not None:
                self._timers.start(passage, passage._deadline, inbound.reserve)  # type: ignore[union-attr]
            else:
                self._inherit_deadline(passage)
            await self.app(scope, passage.receive, passage.send)
            if not passage.left:
                passage.end(None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure = error
        try:  # outside of the handler, so that later exceptions are not chained to this one
            if failure is not None or passage.cut is not None:
                await self._fail(passage, failure, send)
        finally:
            del failure  # Break the cycle between the exception and this frame.
            if around is None:
                scope.pop(INCOMING, None)
            else:
                scope[INCOMING] = around
            passage.task = None
            if tokens is not None:
                inbound.undo(passage, tokens)  # type: ignore[union-attr]

    async def _admit(self, passage: Passage) -> None:  # noqa: C901 - all gates in their order
        """Enter all gates in order, or raise the refusal of one of them."""
        passage.began = now = self._now()
        admission, shed, limits = self._loop_admission, self._shed, self._limits
        if admission is not None and admission.strict and admission.full():
            admission.turned_away("shed")
        if shed is not None:
            ticket = shed.enter(now, passage) if shed.takes_arguments else shed.enter(now)
            if shed.leave is not None:
                passage.gates = ((shed, ticket),)
        routes = self._routes
        gates = self._gates if routes is None else routes.of(passage.scope, self._state.dispatch)
        for gate in gates:
            if not gate.free:  # before the limits, which would have to be given back
                gate.refuse_if_full(now)
        if limits is not None:
            granted = await limits.aadmit(passage) if limits.waits else limits.admit(passage)
            passage.granted = granted
            passage.more_headers = granted.headers
        for gate in gates:
            try:
                ticket = gate.enter(now, passage) if gate.takes_arguments else gate.enter(now)
            except Wait as wait:
                ticket = await self._wait(gate, wait, passage)
                now = self._now()
            if gate.leave is not None:
                passage.gates = ((gate, ticket), *passage.gates)
        passage.entered = True
        if passage.granted is not None and passage.granted.accounted:
            passage.granted.enters()

    async def _wait(self, gate: GateBound, wait: Wait, passage: Passage) -> Any:
        """Wait for a gate; make the grant of the limits exactly refundable first."""
        if passage.granted is not None:
            passage.granted.waits()
        began = self._now()
        ticket = await wait_async(wait.waiter, self._clock)
        gate.host.stats.waits.add(self._now() - began)
        return ticket

    def _inherit_deadline(self, passage: Passage) -> None:
        """Cancel the app at the deadline of an edge or program around this one, if there is one."""
        held = deadline_scope()
        if held is None:
            passage.task = current_task()
            return
        self._timers.arm(passage, held[0], held[1])
        if self._inbound is not None:
            passage._deadline = reserve_scope(self._inbound.reserve)

    async def _fail(self, passage: Passage, error: BaseException | None, send: Send) -> None:
        """End a request that was refused or cut, or whose app failed: with a problem, or raise."""
        children = passage.children
        try:
            if children is None or not children.is_cut:
                settled = self._settle(passage, error)
                if settled is not None:
                    await send_problem(send, *settled, method=passage.method)
            else:
                await children.end(self._now())
                if error is not None:
                    raise error
        finally:
            del error  # Break the cycle between the exception and this frame.

    def _settle(
        self, passage: Passage, error: BaseException | None
    ) -> tuple[Problem, Headers] | None:
        """Leave the held gates. Return the response if none has started; else raise."""
        if not passage.entered:
            passage.give_back(error)
        if passage.was_cut(error):
            waits = passage.waits
            if waits is not None and (waits.stalled or waits.late):
                passage.leave(CANCELLED, None)
                # Otherwise in mid-response: the server closes the connection.
                return (LATE_BODY, _closing(passage.scope)) if waits.late else None
            error = _reason_of_cut(passage, error)
        if error is None:
            return None
        problem = None if passage.status else problem_of(error)
        if problem is None or problem.status >= FAILURE:
            passage.end(error)
        else:
            passage.leave(OK, STREAMED)  # as if the app had sent this response itself
        if problem is None:
            try:
                raise error
            finally:
                del error
        more = [] if passage.more_headers is None else passage.more_headers()
        if isinstance(error, RateLimited):
            more = [*more, *error.headers]
        elif not isinstance(error, SeawallError):
            self._upstreams.note(passage, problem, error)
        return problem, more

    # Websockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a websocket like a request; after the handshake it holds only its own slot."""
        lifecycle = self._lifecycle
        answer = SocketAnswer(scope, send)
        if lifecycle is not None and not lifecycle.begin_socket():
            await send_problem(answer, GOING_AWAY, [])
            return
        passage = SocketPassage(scope, receive, send, self._state)
        failure: BaseException | None = None
        try:
            if self._websockets is not None:
                await self._keep(passage, self._websockets, answer)
                if answer.done:
                    return
            await self._serve(passage, answer)
        except BaseException as error:
            failure = error
            raise
        finally:
            passage.close(failure)
            del failure
            if lifecycle is not None:
                lifecycle.end_socket()

    async def _keep(self, passage: SocketPassage, gate: SlotGate, send: Send) -> None:
        """Enter the gate that a websocket holds until it is closed, or send the refusal."""
        enter: Any = gate.enter
        share = self._share
        try:
            if share is not None:
                if share.enter(passage.client):
                    passage.keep(share, passage.client)
                else:
                    gate.refuse(gate.full(f"one address has {share.most} open"))
            try:
                ticket = enter(self._now())
            except Wait as wait:
                ticket = await wait_async(wait.waiter, self._clock)
            passage.keep(gate, ticket)
        except Rejected as error:
            await self._fail(passage, error, send)


def default_concurrency() -> AdaptiveLimit:
    """Return the default limit on concurrent requests.

    `LoopAdmission` protects the event loop; this limit protects what the app waits for. It adapts
    to the latency of requests. It starts high, so that the first burst at an idle pod is not
    refused before anything was measured, and falls when latency shows a queue. Routes with
    different latencies look like a queue, so the limit stays above 50. Give a route that computes
    in threads (`def`) a limit of its own with `Edge(routes=...)`.
    """
    return AdaptiveLimit(vegas(initial=500, minimum=50, maximum=2000), max_wait=0.25)


def _reason_of_cut(passage: Passage, error: BaseException | None) -> SeawallError:
    """Return why the edge itself cancelled the app: a refusal in mid-request, or the deadline."""
    waits = passage.waits
    if waits is not None and waits.refusal is not None:
        refusal, waits.refusal = waits.refusal, None
        passage.give_back(refusal)
        return refusal
    late = TimedOut("the deadline passed before the response began")
    late.__cause__ = error
    return late


def _closing(scope: Scope) -> Headers:
    """Return the header that closes the connection of a request whose body was not fully read."""
    one = str(scope.get("http_version", "1.1")).startswith("1")  # forbidden from HTTP/2 on
    return [(b"connection", b"close")] if one else []


def _check_part(part: str, given: Any, *kinds: type, required: bool = False) -> None:
    """Raise and say what to write, unless `given` is an instance of `kinds`, or None."""
    if not isinstance(given, kinds) and (required or given is not None):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={given!r}: write {wanted}")
