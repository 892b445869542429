"""The edge of a service under WSGI: what a request passes before it reaches the app, in one class.

The promises, the parts and the order are those of the ASGI edge (`seawall.web.edge`):

    health > lifecycle > inbound > queue admission > shed > limits > route > concurrency > the app

What differs:

- A thread cannot be cancelled. The deadline is in the context of the app, so that every guard and
  client in it obeys; the error that they raise at the deadline is answered with 504. An app that
  calls neither runs on, and its response is sent late.
- Overload shows as the time that requests have waited for a thread (`QueueAdmission`).
- While it drains, whatever the server has accepted is served (see `lifecycle.server_threads`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from seawall import _checks as check
from seawall import registry
from seawall.clock import Clock
from seawall.context import reserve_of, reserve_scope
from seawall.policies.adaptive_limit import AdaptiveLimit
from seawall.policies.bulkhead import Bulkhead
from seawall.policies.shed import Shed
from seawall.web.edge.core import DEFAULT, EdgeCore, check_part, limits_of
from seawall.web.edge.inbound import Classify, Inbound
from seawall.web.health import Health
from seawall.web.lifecycle import Lifecycle
from seawall.web.lifecycle.server_threads import ServerThreads
from seawall.web.limits import RequestLimit, RequestLimits
from seawall.web.request import INCOMING
from seawall.web.trust import Trust
from seawall.web.wsgi.queue_admission import QueueAdmission
from seawall.web.wsgi.wsgi_request import (
    INBOUND_KEYS,
    Environ,
    StartResponse,
    WsgiRequest,
    incoming_of,
    start_own_response,
)

App: TypeAlias = Callable[[Environ, StartResponse], Iterable[bytes]]


class Edge(EdgeCore):
    """WSGI middleware that puts the edge around an app; the arguments are those of `protect`."""

    def __init__(
        self,
        app: App,
        *,
        name: str | None = None,
        timeout: float | None = 30.0,
        reserve: float | None = None,
        trust: Trust | None = None,
        classify: Classify | None = None,
        limits: RequestLimits | RequestLimit | Sequence[RequestLimit] | None = None,
        shed: Shed | None = None,
        queue_admission: QueueAdmission | None = DEFAULT,
        concurrency: AdaptiveLimit | Bulkhead | None = None,
        routes: Mapping[str, AdaptiveLimit | Bulkhead] | None = None,
        health: Health | None = DEFAULT,
        lifecycle: Lifecycle | None = DEFAULT,
        report_degraded: bool | str = False,
        clock: Clock | None = None,
    ) -> None:
        """Wrap `app`; each part can be replaced, or left out with None.

        The defaults: 30 s for each request, refusal of requests that have waited too long for a
        thread, `/health/live`, `/health/ready` and `/health/deep`, draining with gunicorn,
        problem+json for every exception of Seawall, no trusted callers, no rate limits. The
        server's threads limit how many requests run at once, so `concurrency` is None: give a
        `Bulkhead` with fewer places than threads to keep some of them free.

        A request withholds `reserve` seconds of its time from the calls of its handler (by default
        a tenth, 10 ms to 0.5 s), so that the handler can still answer when one of them times out.
        `classify(incoming)` gives a request its criticality, its tier (as text) or both (`Rank`).
        `routes` gives routes their own limit on concurrent requests, by path template, as in
        `{"/reports/{id}": Bulkhead(2)}`. `report_degraded=True` names degraded results, by source
        and level, in a response header. `name` is the name of the guard: by default "edge", or
        "edge 2" and so on if that is taken.
        """
        self.app = check.function("app", app)
        name = registry.free_name("edge") if name is None else name
        if queue_admission is DEFAULT:
            queue_admission = QueueAdmission()
        if lifecycle is DEFAULT:
            lifecycle = Lifecycle(name=name)
        check_part("queue_admission", queue_admission, QueueAdmission)
        check_part("concurrency", concurrency, AdaptiveLimit, Bulkhead)
        super().__init__(
            name,
            (queue_admission, concurrency),
            common=(concurrency,),
            idle=QueueAdmission(mode="off"),
            inbound=Inbound(trust=trust, timeout=timeout, reserve=reserve, classify=classify),
            shed=shed,
            limits=limits_of(limits),
            routes=routes,
            health=Health(name=name, lifecycle=lifecycle) if health is DEFAULT else health,
            lifecycle=lifecycle,
            trust=trust,
            report_degraded=report_degraded,
            clock=clock,
        )
        self._queue_admission = self._bounds.get(id(queue_admission))
        self._threads = ServerThreads(name, lifecycle)
        if self._queue_admission is not None:
            self._queue_admission.threads = self._threads
        registry.enter(self, "edge", name)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Serve a request."""
        if environ.get("PATH_INFO") in self._probes:
            return self._probe(environ, start_response)
        self._threads.begin()
        try:
            request = WsgiRequest(environ, start_response, self)
        except BaseException:
            self._threads.end()
            raise
        try:
            parts = request.context.run(self._serve, request)
            if type(parts) is not list and type(parts) is not tuple:
                wrapper = environ.get("wsgi.file_wrapper")
                if not isinstance(wrapper, type) or not isinstance(parts, wrapper):
                    return request.read_from(parts)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            try:
                return [self._fail(request, error)]
            finally:
                self._release(request)
        request.leave(*request.verdict())  # the body is complete
        self._release(request)
        return parts

    def _probe(self, environ: Environ, start_response: StartResponse) -> list[bytes]:
        health = self._health
        assert health is not None  # noqa: S101 - otherwise there are no probes
        self._threads.follow_server()
        scope = incoming_of(environ).scope
        status, headers, body = self._threads.run(lambda: health.answer(scope))
        start_own_response(start_response, status, headers)
        return [body]

    def _serve(self, request: WsgiRequest) -> Iterable[bytes]:
        """Admit the request and call the app, in the context of the request."""
        inbound, clock, environ = self._inbound, self._clock, request.environ
        assert inbound is not None  # noqa: S101 - a WSGI edge always has one
        no_headers = environ.keys().isdisjoint(INBOUND_KEYS)
        request.context_tokens = inbound.read(request, clock, no_headers=no_headers)
        environ[INCOMING] = request
        queue = self._queue_admission
        if queue is not None and (queue.has_queue or request.waited >= queue.shortest):
            queue.enter(self._now(), request)
        for step in self._admission(request):
            step.wait_sync()
        held = request._deadline
        if held is not None:
            held[0] -= reserve_of(held[0] - request.started_at, inbound.reserve)
        else:
            request._deadline = reserve_scope(inbound.reserve)
        header = self._degraded_header
        if header is None:
            return self.app(environ, request.start_response)
        with request.report_degradations(header):
            return self.app(environ, request.start_response)

    # Called by the body of a response

    def _fail(self, request: WsgiRequest, error: BaseException) -> bytes:
        """Leave the held gates; answer `error` and return the body, or raise it.

        Must be called while `error` is handled, as the response may have to replace another one.
        """
        if not request.admitted:
            request.give_back(error)
        problem, more = self._response_to(request, error)
        headers, body = problem.response(more, request.method)
        start, again = request.server_start_response, request.status > 0
        start_own_response(start, problem.status, headers, again=again)
        request.body_started = True
        return body

    def _release(self, request: WsgiRequest) -> None:
        """End the request, and its context; later calls do nothing.

        Gates that are still held are those of a response that its client did not wait for.
        """
        if request.is_over:
            return
        request.is_over = True
        try:
            if not request.has_left:
                request.end(None)
            tokens, held = request.context_tokens, request._deadline
            if tokens and len(tokens) > 1:  # more than the deadline
                request.context.run(self._inbound.undo, request, tokens)  # type: ignore[union-attr]
            elif held is not None:
                held[3] = None  # inlined copy of `end_scope()`
            if request.outer is None:
                request.environ.pop(INCOMING, None)
            else:
                request.environ[INCOMING] = request.outer
        finally:
            self._threads.end()
