"""What an ASGI and a WSGI edge have in common: their parts, the order of the gates, the responses.

The admission of a request is a generator: it yields a step for whatever takes time, and its caller
runs the step by awaiting or by blocking. Nearly all requests need none.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.guard import Guard
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.runtime.call import STREAMED
from seawall.runtime.driver import wait_async, wait_sync
from seawall.runtime.layers import OK, Wait
from seawall.runtime.policy import Policy
from seawall.web.asgi_types import Headers
from seawall.web.edge.edge_request import EdgeRequest
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.problems import FAILURE, Problem
from seawall.web.routes import RouteGates
from seawall.web.trust import Trust

if TYPE_CHECKING:
    from seawall.web.edge.dispatch import Dispatch


class _Default:
    def __repr__(self) -> str:
        return "DEFAULT"


DEGRADED_HEADER: Final = "Seawall-Degraded"
_HEADER: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

DEFAULT: Final[Any] = _Default()
"""Marker for the default of a part; None leaves a part out."""


class AdmissionStep:
    """An operation of the admission that takes time, in a blocking and in an async form."""

    def __init__(self, blocking: Callable[[], Any], awaiting: Callable[[], Awaitable[Any]]) -> None:
        self._blocking = blocking
        self._awaiting = awaiting
        self.result: Any = None

    def wait_sync(self) -> None:
        """Block this thread until the result is known."""
        self.result = self._blocking()

    async def wait_async(self) -> None:
        """Await the result in this task."""
        self.result = await self._awaiting()


class EdgeCore:
    """The parts of an edge, the admission of a request, and the response to an error."""

    def __init__(
        self,
        name: str,
        policies: Sequence[Policy | None],
        *,
        common: Sequence[Policy | None],
        idle: Policy,
        inbound: Inbound | None,
        shed: Shed | None,
        limits: RequestLimits | None,
        routes: Mapping[str, AdaptiveLimit | Bulkhead] | None,
        health: Health | None,
        lifecycle: Lifecycle | None,
        trust: Trust | None,
        report_degraded: bool | str,
        clock: Clock | None,
    ) -> None:
        """Check the parts, and make a guard of `shed` and `policies`, in this order.

        Every request enters the gates of `common` after its limits. `idle` is a policy that does
        nothing, for an edge without any other.
        """
        slots = (AdaptiveLimit, Bulkhead)
        check_part("inbound", inbound, Inbound)
        check_part("limits", limits, RequestLimits)
        check_part("routes", routes, Mapping)
        check_part("health", health, Health)
        check_part("lifecycle", lifecycle, Lifecycle)
        check_part("trust", trust, Trust)
        check_part("shed", shed, Shed)
        for path, limit in (routes or {}).items():
            check_part(f"routes[{path!r}]", limit, *slots, required=True)
        self._degraded_header = _header_name(report_degraded)
        given = [policy for policy in (shed, *policies) if policy is not None]
        self.guard = registry.release(Guard(name, *(given or [idle]), clock=clock))
        self._bounds: dict[int, Any] = {id(bound.policy): bound for bound in self.guard.bounds}
        self._shed = self._bounds.get(id(shed))
        self._gates = tuple(self._bounds[id(policy)] for policy in common if policy is not None)
        """The gates that every request enters after its limits, in this order."""
        self._stats = self.guard.stats
        self._clock = self.guard.clock
        self._now = self.guard.clock.now
        self._inbound = inbound
        self._limits = limits
        self._health = health
        self._lifecycle = lifecycle
        self._trust = trust or (inbound.trust if inbound is not None else Trust())
        self._upstream_log = UpstreamLog(name, self._now)
        self._probes = frozenset() if health is None else frozenset(health.paths)
        self._routes = RouteGates(name, routes, self._gates, self._clock) if routes else None
        self._dispatch: Dispatch | None = None
        """Lookup of routes in the app's router, if it has one that can be asked."""

    def __repr__(self) -> str:
        return f"<Edge {self.guard.name!r}>"

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
        return {**self.guard.snapshot(), **shown}

    def dangers(self) -> list[str]:
        """Return the warnings of `seawall.explain()` for this edge."""
        return [] if self._inbound is None else self._inbound.dangers()

    def close(self) -> None:
        """Free the names of the edge and its routes."""
        self.guard.close()
        if self._routes is not None:
            self._routes.close()

    def _admission(self, request: EdgeRequest) -> Iterator[AdmissionStep]:  # noqa: C901 - all gates in order
        """Enter all gates in order, or raise the refusal of one of them."""
        request.started_at = now = self._now()
        shed, limits, routes = self._shed, self._limits, self._routes
        if shed is not None:
            ticket = shed.enter(now, request) if shed.takes_arguments else shed.enter(now)
            if shed.leave is not None:
                request.gates = ((shed, ticket),)
        gates = self._gates if routes is None else routes.of(request.scope, request._dispatch)
        for gate in gates:
            if not gate.free:  # before the limits, which would have to be given back
                gate.refuse_if_full(now)
        if limits is not None:
            if limits.uses_store:
                step = AdmissionStep(
                    partial(limits.admit, request), partial(limits.aadmit, request)
                )
                yield step
                granted = step.result
            else:
                granted = limits.admit(request)
            request.granted = granted
            request.extra_headers = granted.headers
        for gate in gates:
            try:
                ticket = gate.enter(now, request) if gate.takes_arguments else gate.enter(now)
            except Wait as wait:
                if request.granted is not None:
                    request.granted.open_accounts()  # so that it can be given back exactly
                waiting = wait.waiter, self._clock
                step = AdmissionStep(partial(wait_sync, *waiting), partial(wait_async, *waiting))
                began = self._now()
                yield step
                ticket, now = step.result, self._now()
                gate.host.stats.waits.add(now - began)
            if gate.leave is not None:
                request.gates = ((gate, ticket), *request.gates)
        request.admitted = True
        if request.granted is not None and request.granted.has_accounts:
            request.granted.close_accounts()

    def _response_to(self, request: EdgeRequest, error: BaseException) -> tuple[Problem, Headers]:
        """Leave the held gates. Return the response to `error` if none has started; else raise."""
        answer = None if request.has_response_started else self._upstream_log.answer(request, error)
        if answer is None or answer[0].status >= FAILURE:
            request.end(error)
        else:
            request.leave(OK, STREAMED)  # as if the app had sent this response itself
        if answer is None:
            try:
                raise error
            finally:
                del error
        problem, more = answer
        extra = request.extra_headers
        return problem, more if extra is None else [*extra(), *more]


def limits_of(
    limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None,
) -> RequestLimits | None:
    """Return the argument `limits=` as one object."""
    if isinstance(limits, RequestLimit):
        limits = [limits]
    if limits is None or isinstance(limits, RequestLimits):
        return limits
    listed = check.listed("limits", limits, "RequestLimit('600/min', by='address')")
    return RequestLimits(*listed) if listed else None


def check_part(part: str, given: Any, *kinds: type, required: bool = False) -> None:
    """Raise and say what to write, unless `given` is an instance of `kinds`, or None."""
    if not isinstance(given, kinds) and (required or given is not None):
        wanted = " or ".join(f"{kind.__name__}(...)" for kind in kinds)
        raise TypeError(f"{part}={given!r}: write {wanted}")


def _header_name(report_degraded: object) -> str | None:
    """Return the header for the option: the default name for True, None for False."""
    if isinstance(report_degraded, bool):
        return DEGRADED_HEADER if report_degraded else None
    if not isinstance(report_degraded, str) or not _HEADER.fullmatch(report_degraded):
        raise TypeError(
            f"report_degraded={report_degraded!r}: write True, or the name of a header, such as"
            " 'X-Degraded'"
        )
    return report_degraded
