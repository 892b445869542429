"""Slots of requests that wait for their client: slots are for work, so a wait releases them.

A client that sends its body byte by byte, or does not read its response, costs a connection and
some memory. It must not cost what other requests need.

Promises:

- While the app is blocked in `receive` (the body has not arrived) or in `send` (the server's buffer
  is full), the slots of the request are free for other requests. The request releases them after
  `GRACE_TURNS` loop iterations and takes them again, through the queue of their gate, before the
  app continues.
- The work begins when the body is complete. At that point the request is admitted as on arrival, by
  loop admission and the rules of each gate, or refused: the app is cancelled and the client
  gets the refusal. (Frameworks answer 400 to exceptions of `receive`.) In mid-body, and once the
  response has started, the request is not refused: it waits for its slot.
- A blocked `send` ends the request after `stall` seconds plus the time that a client reading
  `SLOWEST` bytes per second needs for the data ahead of it.
- An app that sends while another of its tasks waits in `receive` only listens there for a
  disconnect, and works meanwhile: it keeps its slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import coroutine
from typing import TYPE_CHECKING, Any, Final

from seawall.errors import Rejected
from seawall.policies.slots import SlotGate
from seawall.runtime.driver import wait_async
from seawall.runtime.layers import UNUSED, Wait

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message
    from seawall.web.edge.asgi_request import AsgiRequest

GRACE_TURNS: Final = 4
"""Number of loop iterations for which a blocked request keeps its slots.

Middlewares that pass a message from task to task block for a few iterations, and so does a check
whether the client is still connected: neither waits for the client. A client that exploits this to
hold a slot has to send something every few iterations, which costs the server less than a client
that sends as many requests.
"""


SLOWEST: Final = 10_000
"""Bytes per second that the slowest client reads. Servers do not report whether it reads at all."""


class ClientWaits:
    """Waits of one request for its client. Created by the first wait: most requests have none."""

    def __init__(self, request: AsgiRequest) -> None:
        self._request = request
        self._edge = request._edge
        self._lock = asyncio.Lock()
        self._gates: tuple[tuple[Any, Any], ...] = ()  # released during a wait, with tickets
        self._receiving = self._sending = 0  # number of blocked calls
        self._released_at = 0.0  # when the slots were released
        self._sent_while_receiving = False  # whether the app sent while it waited for the body
        self.has_released = False  # whether the request has to take its slots again
        self.is_outcome_known = False  # whether its outcome was reported to the gates
        self.is_body_late = False  # whether the deadline passed before the body arrived
        self.stalled = False  # whether the client stopped reading its response
        self.refusal: Rejected | None = None  # the refusal of the slots on return

    async def finish_receive(self, steps: Any, awaited: Any) -> Message:
        """Finish a `receive` of the server that blocked at its first step."""
        self._receiving += 1
        try:
            message: Message = await self._finish(steps, awaited)
        except BaseException:
            request = self._request
            if request.is_expired and not (request.status or self.refusal):
                self.is_body_late = True
            raise
        finally:
            self._receiving -= 1
        return message

    async def finish_send(self, steps: Any, awaited: Any, unread: int) -> None:
        """Finish a `send` of the server that blocked at its first step.

        The client may have to read up to `unread` bytes first.
        """
        self._sending += 1
        stall = self._edge._stall_timeout
        timer = None
        if stall is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(stall + unread / SLOWEST, self._end_stalled)
        try:
            await self._finish(steps, awaited)
        finally:
            if timer is not None:
                timer.cancel()
            self._sending -= 1
        await self.retake_slots()

    async def _finish(self, steps: Any, awaited: Any) -> Any:
        """Finish an operation of the server; release the slots if it takes some iterations."""
        timer: list[asyncio.Handle] = []
        self._release_after(GRACE_TURNS, timer)
        try:
            return await _await_rest(steps, awaited)
        finally:
            timer.pop().cancel()

    def _release_after(self, iterations: int, timer: list[asyncio.Handle]) -> None:
        """Release the slots after this many loop iterations; `timer` holds the next one."""
        if iterations:
            loop = asyncio.get_running_loop()
            timer[:] = [loop.call_soon(self._release_after, iterations - 1, timer)]
        else:
            self._release()

    def note_expiry(self) -> None:
        """Note that the deadline has passed while the app runs on."""
        request = self._request
        self.is_body_late = bool(self._receiving) and not (request.status or self.refusal)

    def must_retake_slots(self) -> bool:
        """Return whether the app, which is about to send, has to take its slots again first."""
        if self._receiving:
            self._sent_while_receiving = True
        return self.has_released and not self._request.has_left

    async def send(self, message: Message) -> None:
        """Take the slots again, then send `message`."""
        await self.retake_slots()
        await self._request.send(message)

    def _end_stalled(self) -> None:
        self.stalled = True
        self._edge._stalled += 1
        self._request.expire_now()

    # Slots

    def _release(self) -> None:
        """Release the slots, unless the app works during the wait."""
        request = self._request
        works = self._sent_while_receiving and not self._sending
        if self.has_released or request.has_left or works:
            return
        self.has_released = True
        self._gates = tuple(held for held in request.gates if isinstance(held[0], SlotGate))
        request.gates = tuple(held for held in request.gates if held not in self._gates)
        self._released_at = now = self._edge._now()
        outcome, detail = UNUSED, None
        if request.status and not self.is_outcome_known:
            # The response has started, so its latency is known. The rest is not a latency sample.
            self.is_outcome_known = True
            now = request.body_started_at or now
            outcome, detail = request.verdict()
        for gate, ticket in self._gates:
            gate.leave(ticket, outcome, detail, now)

    async def retake_slots(self, *, work_begins: bool = False) -> None:
        """Take the slots again; where the `work_begins`, as for a request that has just arrived."""
        if not self.has_released:
            return
        request = self._request
        async with self._lock:  # one of several tasks takes them for all
            if not self.has_released or request.has_left:
                return
            now = self._edge._now()
            if not request.body_started_at:
                # Time spent on the client does not count.
                request.started_at += now - self._released_at
                self._released_at = now
            try:
                await self._enter(work_begins=work_begins and not request.status)
            except Rejected as error:
                self.refusal = error
        refusal = self.refusal
        if refusal is None:
            return
        app = request.task
        try:
            if request.expire_now() and app is not None:
                # Wait for the cancellation. A task that outlives the app gets the refusal.
                await asyncio.wait({app})
            raise refusal
        finally:
            del refusal  # Break the cycle between the exception and this frame.

    async def _enter(self, *, work_begins: bool) -> None:
        request, edge = self._request, self._edge
        entered: list[tuple[Any, Any]] = []
        try:
            admission = edge._loop_admission
            if work_begins and admission is not None:
                try:
                    admission.enter(edge._now())
                except Wait as wait:
                    await wait_async(wait.waiter, admission.host.clock)
            for gate, ticket in reversed(self._gates):
                given = await self._enter_gate(gate, ticket, work_begins=work_begins)
                entered.insert(0, (gate, given))
        except BaseException as error:
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, error, edge._now())
            raise
        if request.has_left:  # the request ended meanwhile, in another task
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, None, edge._now())
            return
        request.gates = (*entered, *request.gates)
        self._gates = ()
        self.has_released = False

    async def _enter_gate(self, gate: SlotGate, ticket: Any, *, work_begins: bool) -> Any:
        now = self._edge._now()
        try:
            if not work_begins:
                return gate.readmit(ticket, now)
            enter: Any = gate.enter
            return enter(now, self._request) if gate.takes_arguments else enter(now)
        except Wait as wait:
            waiter: Any = wait.waiter
            if self._request.status and waiter.readmitted:
                waiter.until = None  # the deadline applied to the start of the response
            return await wait_async(waiter, gate.host.clock)


@coroutine
def _await_rest(steps: Any, awaited: Any) -> Generator[Any, Any, Any]:
    """Await the rest of `steps`, whose first step was run and waits for `awaited`."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 - passed on to the server's coroutine
            try:
                awaited = steps.throw(error)
            except StopIteration as end:
                return end.value
        else:
            return (yield from steps)
