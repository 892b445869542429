"""The full path of a request through the edge, for every kind of request and outcome.

The parts are checked in the order that `seawall.web.edge.edge` gives. `short_path` serves requests
that need none of the special cases.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from seawall._expiry import current_task
from seawall._forks import survives_fork
from seawall.clock import Clock
from seawall.context import deadline_scope, end_scope, reserve_scope
from seawall.errors import RateLimited, Rejected, SeawallError, TimedOut
from seawall.policies.slots import SlotGate
from seawall.runtime.call import STREAMED
from seawall.runtime.driver import wait_async
from seawall.runtime.layers import CANCELLED, OK, Wait
from seawall.runtime.mutex import Mutex
from seawall.runtime.policy import GateBound
from seawall.web.asgi_types import App, Receive, Scope, Send
from seawall.web.edge.answers import SocketAnswer, send_problem
from seawall.web.edge.inbound import Inbound
from seawall.web.edge.loop_queue import TurnsGate
from seawall.web.edge.routes import RouteGates
from seawall.web.edge.sending import FAILURE, Headers, Own, Passage, SocketPassage
from seawall.web.edge.timer import Cutting
from seawall.web.edge.upstream_log import UpstreamLog
from seawall.web.lifecycle import Lifecycle
from seawall.web.limits import Granted, RequestLimits
from seawall.web.problems import Problem, problem_of
from seawall.web.request import INCOMING

GOING_AWAY: Final = Problem(
    503, "Service unavailable", "The service is going away.", retry_after=1.0
)


LATE_BODY: Final = Problem(
    408, "Request timeout", "The body of the request did not arrive in time."
)


def _closing(scope: Scope) -> Headers:
    """Return the header that closes the connection of a request whose body was not fully read."""
    one = str(scope.get("http_version", "1.1")).startswith("1")  # forbidden from HTTP/2 on
    return [(b"connection", b"close")] if one else []


class AddressShare:
    """Number of open websockets of each address, at most `most`. Used like a gate."""

    def __init__(self, most: int) -> None:
        """Start with no open websockets."""
        self.most = most
        self._open: dict[str, int] = {}
        self._mutex = Mutex()
        survives_fork(self)

    def enter(self, address: str) -> bool:
        """Count one more for `address`; return False if it has too many."""
        with self._mutex:
            count = self._open.get(address, 0)
            if count >= self.most:
                return False
            self._open[address] = count + 1
            return True

    def leave(self, address: str, *_: object) -> None:
        """Count one less for `address`."""
        self._mutex.do(lambda: self._count_out(address))

    def _count_out(self, address: str) -> None:
        self._open[address] = count = self._open.get(address, 1) - 1
        if not count:
            del self._open[address]

    def _after_fork(self) -> None:
        self._mutex = Mutex()
        self._open = {}


class Way:
    """The handling of requests by an edge; `Edge` sets the parts."""

    app: App
    _clock: Clock
    _now: Callable[[], float]
    _inbound: Inbound | None
    _shed: GateBound | None
    _shed_is_told: bool
    _limits: RequestLimits | None
    _routes: RouteGates | None
    _turns: TurnsGate | None
    _concurrency: GateBound | None
    _place_is_told: bool
    _websockets: SlotGate | None
    _share: AddressShare | None
    _lifecycle: Lifecycle | None
    _cutting: Cutting
    _own: Own
    _upstreams: UpstreamLog

    async def _serve(  # noqa: C901, PLR0912, PLR0915 - one frame for all gates
        self, scope: Scope, receive: Receive, passage: Passage, send: Send
    ) -> None:
        """Admit the request, run the app, and leave every gate that was entered."""
        inbound, limits = self._inbound, self._limits
        tokens = granted = outer = kept = None
        entered = False
        failure: BaseException | None = None
        try:
            outer = scope.get(INCOMING)
            if inbound is not None:
                tokens = inbound.read(passage, self._clock)
            scope[INCOMING] = passage
            passage.began = now = self._now()
            gate = self._shed
            if gate is not None and not passage.sifted:
                enter: Any = gate.enter
                ticket = enter(now, passage) if self._shed_is_told else enter(now)
                if gate.leave is not None:
                    passage.gates = ((gate, ticket),)
            if limits is not None:
                granted = await limits.aadmit(passage) if limits.waits else limits.admit(passage)
                passage.told = granted.headers
            if self._routes is not None:
                gate = self._routes.of(scope, self._own.dispatch)
                if gate is not None:
                    await self._enter(gate, passage, granted)
                    now = self._now()
            turns = self._turns
            if turns is not None:
                try:
                    turns.enter(now)
                except Wait as wait:
                    await self._wait(turns, wait, granted)
                    now = self._now()
            gate = self._concurrency
            if gate is not None:
                enter = gate.enter
                try:
                    ticket = enter(now, passage) if self._place_is_told else enter(now)
                except Wait as wait:
                    ticket = await self._wait(gate, wait, granted)
                passage.gates = ((gate, ticket), *passage.gates)
            entered = True
            if granted is not None and granted.accounted:
                granted.enters()
            held = deadline_scope()
            if held is not None:
                self._cutting.arm(passage, held[0], held[1])
                if inbound is not None:
                    kept = reserve_scope(inbound.reserve)
            else:
                passage.task = current_task()
            await self.app(scope, passage.receive, passage.send)
            if not passage.left:
                passage.end(None)
        except BaseException as error:  # noqa: BLE001 - raised again, unless it is answered
            failure = error
        try:
            if failure is not None or passage.cut is not None:
                await self._fail(passage, failure, send, None if entered else granted, entered)
        finally:
            del failure  # Break the cycle between the exception and this frame.
            if outer is None:
                scope.pop(INCOMING, None)
            else:
                scope[INCOMING] = outer
            passage.task = None
            if kept is not None:
                end_scope(kept)
            if tokens:
                inbound.undo(tokens)  # type: ignore[union-attr]

    async def _enter(self, gate: GateBound, passage: Passage, granted: Granted | None) -> None:
        """Enter the gate of one route."""
        enter: Any = gate.enter
        now = self._now()
        try:
            ticket = enter(now, passage) if gate.takes_arguments else enter(now)
        except Wait as wait:
            ticket = await self._wait(gate, wait, granted)
        passage.gates = ((gate, ticket), *passage.gates)

    async def _wait(self, gate: GateBound, wait: Wait, granted: Granted | None) -> Any:
        """Wait for a gate; make the grant of the limits exactly refundable first."""
        if granted is not None:
            granted.waits()
        began = self._now()
        ticket = await wait_async(wait.waiter, self._clock)
        gate.host.stats.waits.add(self._now() - began)
        return ticket

    async def _fail(  # noqa: C901, PLR0912 - all outcomes of a request, in one place
        self,
        passage: Passage,
        error: BaseException | None,
        send: Send,
        granted: Granted | None,
        entered: bool,  # noqa: FBT001 - a fact about the request
    ) -> None:
        """Leave the held gates. Answer with a problem if no response has started; else raise."""
        if not entered:
            passage.told = None
            passage.give_back(error)
            if granted is not None:
                granted.cancel()
        if passage.was_cut(error):
            waits = passage.waits
            if waits is not None and (waits.stalled or waits.late):
                passage.leave(CANCELLED, None)
                if waits.late:  # otherwise in mid-response: the server closes the connection
                    await send_problem(send, LATE_BODY, _closing(passage.scope))
                return
            cut: SeawallError
            if waits is not None and waits.refusal is not None:
                cut, waits.refusal = waits.refusal, None
                passage.give_back(cut)
            else:
                cut = TimedOut("the deadline passed before the response began")
                cut.__cause__ = error
            error = cut
            del cut  # Break the cycle between the exception and this frame.
        if error is None:
            return
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
        more = passage.more_headers()
        if isinstance(error, RateLimited):
            more = [*more, *error.headers]
        elif not isinstance(error, SeawallError):
            self._upstreams.note(passage, problem, error)
        await send_problem(send, problem, more, method=passage.method)

    # Websockets

    async def _connect(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Admit a websocket like a request; after the handshake it holds only its own slot."""
        lifecycle = self._lifecycle
        if lifecycle is not None and not lifecycle.begin_socket():
            await send_problem(SocketAnswer(scope, send), GOING_AWAY, [])
            return
        passage = SocketPassage(scope, receive, send, self._own)
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

    async def _keep(self, passage: SocketPassage, gate: SlotGate, send: Send) -> None:
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
            await self._fail(passage, error, send, None, entered=False)
