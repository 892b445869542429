"""Websockets at the edge: their handshakes, how many one address has open, and their refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, MutableMapping
from typing import TYPE_CHECKING, Any, Final

from seawall._forks import survives_fork
from seawall.context import end_scope
from seawall.runtime.call import STREAMED
from seawall.runtime.layers import CANCELLED, OK, UNUSED
from seawall.runtime.mutex import Mutex
from seawall.web.asgi_types import Message, Receive, Send
from seawall.web.edge.asgi_request import AsgiRequest, mark_as_coroutine_functions

if TYPE_CHECKING:
    from seawall.runtime.policy import GateBound
    from seawall.web.edge.edge import Edge

TRY_AGAIN_LATER: Final = 1013
"""Close code of a refused websocket."""

CLOSING_TURNS: Final = 4
"""Number of loop iterations in which a server closes the connection of a refused websocket.

One of uvicorn's implementations treats the handshake as complete only then, and logs an error if
the app returns earlier.
"""

_HANDSHAKE_OVER: Final = frozenset(
    {"websocket.accept", "websocket.close", "websocket.http.response.start"}
)


class WebsocketHandshake(AsgiRequest):
    """Handshake of a websocket: ends when it is accepted or refused, whatever follows."""

    __slots__ = ("_connection_gates",)

    def __init__(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send, edge: Edge
    ) -> None:
        super().__init__(scope, receive, send, edge)
        self._connection_gates: list[tuple[Any, Any]] = []

    def hold_until_closed(self, gate: GateBound | AddressShare, ticket: Any) -> None:
        """Leave `gate` when the connection is closed."""
        self._connection_gates.append((gate, ticket))

    def receive(self) -> Awaitable[Message]:
        """Receive a message from the server."""
        if self.has_left:
            return self.server_receive()
        return self._receive_in_task(self.server_receive)

    def _problem_sender(self) -> Send:
        return WebsocketResponse(self.scope, self.server_send)

    def send(self, message: Message) -> Awaitable[None]:
        """Pass a message to the server."""
        kind = message["type"]
        if not self.has_left and kind in _HANDSHAKE_OVER:
            self.status = message.get("status", 101)
            self._stop_timer()
            if self._deadline is not None:
                end_scope(self._deadline)  # an open connection has no deadline
            if self.extra_headers is not None and kind == "websocket.accept":
                more = self.extra_headers()
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            self.leave(*self.verdict())
        return self.server_send(message)

    def close(self, error: BaseException | None) -> None:
        """Leave the gates that are held until the connection closes; later calls do nothing."""
        gates, self._connection_gates = self._connection_gates, []
        if gates:
            now = self._edge._now()
            outcome = UNUSED if not self.status else OK if error is None else CANCELLED
            for gate, ticket in gates:
                if gate.leave is not None:
                    gate.leave(ticket, outcome, STREAMED, now)


mark_as_coroutine_functions(WebsocketHandshake.receive, WebsocketHandshake.send)


class AddressShare:
    """Number of open websockets of each address, at most `limit`. Used like a gate."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[str, int] = {}
        self._mutex = Mutex()
        survives_fork(self)

    def enter(self, address: str) -> bool:
        """Count one more for `address`; return False if it has too many."""
        with self._mutex:
            count = self._open.get(address, 0)
            if count >= self.limit:
                return False
            self._open[address] = count + 1
            return True

    def leave(self, address: str, *_: object) -> None:
        """Count one less for `address`."""

        def count_out() -> None:
            self._open[address] = count = self._open.get(address, 1) - 1
            if not count:
                del self._open[address]

        self._mutex.do(count_out)

    def _after_fork(self) -> None:
        self._mutex = Mutex()
        self._open = {}


class WebsocketResponse:
    """Adapter that sends the messages of an HTTP response to a websocket client."""

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        """Send with `send`, as a full response if the server supports it, else as a close code."""
        self._supports_responses = "websocket.http.response" in (scope.get("extensions") or {})
        self._send = send
        self.has_started = False

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send a message of an HTTP response."""
        self.has_started = True
        if self._supports_responses:
            await self._send({**message, "type": f"websocket.{message['type']}"})
            if message["type"] == "http.response.body" and not message.get("more_body"):
                for _ in range(CLOSING_TURNS):
                    await asyncio.sleep(0)  # noqa: TID251 - one loop iteration, no delay
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close", "code": TRY_AGAIN_LATER})
