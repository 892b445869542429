"""The edge of a service: everything that a request passes before it reaches the app, in one class.

Promises:

- Health probes are always answered.
- A refused request, whichever part refuses it, costs no more than the refusal and consumes nothing.
- Every gate that was entered is left exactly once (see `asgi_request`).
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

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypedDict, Unpack

from seawall import _checks as check
from seawall import registry
from seawall._expiry import current_task
from seawall.clock import Clock
from seawall.context import deadline_scope, reserve_scope
from seawall.errors import Rejected, SeawallError, TimedOut
from seawall.models.concurrency.algorithms import vegas
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.policies.slots import SlotGate
from seawall.runtime.driver import wait_async
from seawall.runtime.layers import CANCELLED, Wait
from seawall.web.asgi_types import App, Headers, Receive, Scope, Send
from seawall.web.edge.asgi_request import AsgiRequest
from seawall.web.edge.core import DEFAULT, EdgeCore, check_part, limits_of
from seawall.web.edge.inbound import Classify, Inbound
from seawall.web.edge.loop_admission import LoopAdmission
from seawall.web.edge.timers import RequestTimers
from seawall.web.edge.websockets import AddressShare, WebsocketHandshake, WebsocketResponse
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.problems import Problem, send_problem
from seawall.web.request import INCOMING, path_below_root
from seawall.web.routes import dispatch_of
from seawall.web.trust import Trust

GOING_AWAY: Final = Problem(
    503, "Service unavailable", "The service is going away.", retry_after=1.0
)

LATE_BODY: Final = Problem(
    408, "Request timeout", "The body of the request did not arrive in time."
)


MOST_WEBSOCKETS: Final = 2000
"""Default maximum number of open websockets; one address may open half of them."""


class Edge(EdgeCore):
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
        if hasattr(app, "build_middleware_stack"):
            raise TypeError(
                f"Edge({app!r}): a Starlette or FastAPI app answers its errors itself, before the"
                " edge could; write protect(app), from seawall.web.fastapi"
            )
        check_part("loop_admission", loop_admission, LoopAdmission)
        check_part("concurrency", concurrency, AdaptiveLimit, Bulkhead)
        check_part("websockets", websockets, Bulkhead)
        check.function("app", app)
        if websockets_per_address is not None and websockets is None:
            raise TypeError("websockets_per_address=...: write websockets=Bulkhead(...) too")
        super().__init__(
            name,
            (loop_admission, concurrency, websockets),
            common=(loop_admission, concurrency),
            idle=LoopAdmission(mode="off"),
            inbound=inbound,
            shed=shed,
            limits=limits,
            routes=routes,
            health=health,
            lifecycle=lifecycle,
            trust=trust,
            report_degraded=report_degraded,
            clock=clock,
        )
        self.app = app
        self._loop_admission = self._bounds.get(id(loop_admission))
        self._websockets = self._bounds.get(id(websockets))
        self._address_share = (
            None
            if websockets_per_address is None
            else AddressShare(check.count("websockets_per_address", websockets_per_address))
        )
        self._stall_timeout = None if stall is None else check.seconds("stall", stall)
        self._stalled = 0
        """Number of requests that were ended as their client read nothing for `stall` seconds."""
        self._sends_at_once = True
        """Whether a response reaches the client before the app's call has ended."""
        self._dispatch = dispatch_of(app)
        self._timers = RequestTimers(self._clock)
        registry.enter(self, "edge", name)

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the edge: the counts of its guard and of its parts."""
        return {**super().snapshot(), "stalled": self._stalled}

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
                send = lifecycle.closing_send(scope, send)
            if not begun:
                await send_problem(send, GOING_AWAY, [], method=scope["method"])
                return
        try:
            await self._serve(AsgiRequest(scope, receive, send, self), send)
        finally:
            if lifecycle is not None:
                lifecycle.end()

    async def _serve_other(self, scope: Scope, receive: Receive, send: Send) -> None:
        lifecycle = self._lifecycle
        if scope["type"] == "websocket":
            await self._connect(scope, receive, send)
        elif scope["type"] == "lifespan" and lifecycle is not None:
            await lifecycle.lifespan(self.app, scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, request: AsgiRequest, send: Send) -> None:  # noqa: PLR0912 - one frame
        """Admit the request, run the app, and leave every gate that was entered."""
        scope, inbound = request.scope, self._inbound
        outer = scope.get(INCOMING)  # set by an edge around this one
        tokens = failure = None
        try:
            if inbound is not None:
                tokens = inbound.read(request, self._clock)
            scope[INCOMING] = request
            for step in self._admission(request):
                await step.wait_async()
            if request._deadline is not None:
                self._timers.start(request, request._deadline, inbound.reserve)  # type: ignore[union-attr]
            else:
                self._inherit_deadline(request)
            if self._degraded_header is None or scope["type"] != "http":
                await self.app(scope, request.receive, request.send)
            else:
                with request.report_degradations(self._degraded_header):
                    await self.app(scope, request.receive, request.send)
            if not request.has_left:
                request.end(None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure = error
        try:  # outside of the handler, so that later exceptions are not chained to this one
            if failure is not None or request.timer is not None:
                await self._fail(request, failure, send)
        finally:
            del failure  # Break the cycle between the exception and this frame.
            if outer is None:
                scope.pop(INCOMING, None)
            else:
                scope[INCOMING] = outer
            request.task = None
            if tokens is not None:
                inbound.undo(request, tokens)  # type: ignore[union-attr]

    def _inherit_deadline(self, request: AsgiRequest) -> None:
        """Cancel the app at the deadline of an edge or program around this one, if there is one."""
        held = deadline_scope()
        if held is None:
            request.task = current_task()
            return
        self._timers.start_own(request, held[0], held[1])
        if self._inbound is not None:
            request._deadline = reserve_scope(self._inbound.reserve)

    async def _fail(self, request: AsgiRequest, error: BaseException | None, send: Send) -> None:
        """End a request that was refused, expired, or failed: send a problem, or raise."""
        handlers = request.running_handlers
        try:
            if handlers is None or not handlers.is_expired:
                settled = self._settle(request, error)
                if settled is not None:
                    await send_problem(send, *settled, method=request.method)
            elif await handlers.end(self._now(), error) or error is None:
                return
            elif self._upstream_log.answer(request, error) is None:  # the client has its response
                raise error
        finally:
            del error  # Break the cycle between the exception and this frame.

    def _settle(
        self, request: AsgiRequest, error: BaseException | None
    ) -> tuple[Problem, Headers] | None:
        """Leave the held gates. Return the response if none has started; else raise."""
        if not request.admitted:
            request.give_back(error)
        if request.disarm(error):
            waits = request.client_waits
            if waits is not None and (waits.stalled or waits.is_body_late):
                request.leave(CANCELLED, None)
                # Otherwise in mid-response: the server closes the connection.
                return (LATE_BODY, _close_header(request.scope)) if waits.is_body_late else None
            error = _error_of_expiry(request, error)
        try:
            return None if error is None else self._response_to(request, error)
        finally:
            del error  # Break the cycle between the exception and this frame.

    # Websockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a websocket like a request; after the handshake it holds only its own slot."""
        lifecycle = self._lifecycle
        response = WebsocketResponse(scope, send)
        if lifecycle is not None and not lifecycle.begin_socket():
            await send_problem(response, GOING_AWAY, [])
            return
        request = WebsocketHandshake(scope, receive, send, self)
        failure: BaseException | None = None
        try:
            if self._websockets is not None:
                await self._enter_connection_gate(request, self._websockets, response)
                if response.has_started:
                    return
            await self._serve(request, response)
        except BaseException as error:
            failure = error
            raise
        finally:
            request.close(failure)
            del failure
            if lifecycle is not None:
                lifecycle.end_socket()

    async def _enter_connection_gate(
        self, request: WebsocketHandshake, gate: SlotGate, send: Send
    ) -> None:
        """Enter the gate that a websocket holds until it is closed, or send the refusal."""
        enter: Any = gate.enter
        share = self._address_share
        try:
            if share is not None:
                if share.enter(request.client):
                    request.hold_until_closed(share, request.client)
                else:
                    gate.refuse(gate.full(f"one address has {share.limit} open"))
            try:
                ticket = enter(self._now())
            except Wait as wait:
                ticket = await wait_async(wait.waiter, self._clock)
            request.hold_until_closed(gate, ticket)
        except Rejected as error:
            await self._fail(request, error, send)


class EdgeParts(TypedDict, total=False):
    """The settings of `protect(app, ...)`: see `seawall.web.fastapi.protect`."""

    name: str | None
    timeout: float | None
    reserve: float | None
    trust: Trust | None
    classify: Classify | None
    limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None
    shed: Shed | None
    loop_admission: LoopAdmission | None
    concurrency: AdaptiveLimit | Bulkhead | None
    routes: Mapping[str, AdaptiveLimit | Bulkhead] | None
    websockets: Bulkhead | None
    websockets_per_address: int | None
    stall: float | None
    health: Health | None
    lifecycle: Lifecycle | None
    report_degraded: bool | str


INBOUND_SETTINGS: Final = ("trust", "timeout", "reserve", "classify")


def default_edge(app: App, **settings: Unpack[EdgeParts]) -> Edge:
    """Return an edge around `app`, for `protect`; parts that are not given have their defaults."""
    parts: dict[str, Any] = {
        part: given for part, given in settings.items() if given is not DEFAULT
    }
    unknown = parts.keys() - EdgeParts.__annotations__.keys()
    if unknown:
        raise TypeError(f"protect() got an unexpected keyword argument {min(unknown)!r}")
    if parts.get("name") is None:
        parts["name"] = registry.free_name("edge")
    name = parts["name"]
    if "loop_admission" not in parts:
        parts["loop_admission"] = LoopAdmission()
    if "concurrency" not in parts:
        parts["concurrency"] = default_concurrency()
    if "websockets" not in parts:
        parts["websockets"] = Bulkhead(MOST_WEBSOCKETS)
        parts.setdefault("websockets_per_address", MOST_WEBSOCKETS // 2)
    if "lifecycle" not in parts:
        parts["lifecycle"] = Lifecycle(name=name)
    if "health" not in parts:
        parts["health"] = Health(name=name, lifecycle=parts["lifecycle"])
    parts["limits"] = limits_of(parts.get("limits"))
    ranking = {part: parts.pop(part) for part in INBOUND_SETTINGS if part in parts}
    return Edge(app, inbound=Inbound(**ranking), **parts)


def default_concurrency() -> AdaptiveLimit:
    """Return the default limit on concurrent requests.

    `LoopAdmission` protects the event loop; this limit protects what the app waits for. It adapts
    to the latency of requests. It starts high, so that the first burst at an idle pod is not
    refused before anything was measured, and falls when latency shows a queue. Routes with
    different latencies look like a queue, so the limit stays above 50. Give a route that computes
    in threads (`def`) a limit of its own with `Edge(routes=...)`.
    """
    return AdaptiveLimit(vegas(initial=500, minimum=50, maximum=2000), max_wait=0.25)


def _error_of_expiry(request: AsgiRequest, error: BaseException | None) -> SeawallError:
    """Return why the edge itself cancelled the app: a refusal in mid-request, or the deadline."""
    waits = request.client_waits
    if waits is not None and waits.refusal is not None:
        refusal, waits.refusal = waits.refusal, None
        request.give_back(refusal)
        return refusal
    late = TimedOut("the deadline passed before the response began")
    late.__cause__ = error
    return late


def _close_header(scope: Scope) -> Headers:
    """Return the header that closes the connection of a request whose body was not fully read."""
    one = str(scope.get("http_version", "1.1")).startswith("1")  # forbidden from HTTP/2 on
    return [(b"connection", b"close")] if one else []
