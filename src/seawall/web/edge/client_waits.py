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
    from seawall.web.edge.passage import Passage

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

    def __init__(self, passage: Passage) -> None:
        self._passage = passage
        self._edge = passage._edge
        self._lock = asyncio.Lock()
        self._gates: tuple[tuple[Any, Any], ...] = ()  # released during a wait, with tickets
        self._receiving = self._sending = 0  # number of blocked calls
        self._since = 0.0  # when the slots were released
        self._beside = False  # whether the app has sent while it waited for the body
        self.away = False  # whether the request has released its slots and must take them again
        self.judged = False  # whether the outcome of the request was reported to the gates
        self.late = False  # whether the deadline passed before the body arrived
        self.stalled = False  # whether the client stopped reading its response
        self.refusal: Rejected | None = None  # the refusal of the slots on return

    async def finish_receive(self, steps: Any, awaited: Any) -> Message:
        """Finish a `receive` of the server that blocked at its first step."""
        self._receiving += 1
        try:
            message: Message = await self._finish(steps, awaited)
        except BaseException:
            passage = self._passage
            self.late = self.late or (passage.is_cut and not (passage.status or self.refusal))
            raise
        finally:
            self._receiving -= 1
        return message

    async def finish_send(self, steps: Any, awaited: Any, unread: int) -> None:
        """Finish a `send` of the server that blocked at its first step.

        The client may have to read up to `unread` bytes first.
        """
        self._sending += 1
        stall = self._edge._stall
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
        await self.come_back()

    async def _finish(self, steps: Any, awaited: Any) -> Any:
        """Finish an operation of the server; release the slots if it takes some iterations."""
        timer: list[asyncio.Handle] = []
        self._hop(timer, GRACE_TURNS)
        try:
            return await _rest(steps, awaited)
        finally:
            timer.pop().cancel()

    def _hop(self, timer: list[asyncio.Handle], left: int) -> None:
        """Release the slots after this many loop iterations."""
        if left:
            loop = asyncio.get_running_loop()
            timer[:] = [loop.call_soon(self._hop, timer, left - 1)]
        else:
            self._leave()

    def note_cut(self) -> None:
        """Note that the request is cut while the app runs on."""
        passage = self._passage
        self.late = bool(self._receiving) and not (passage.status or self.refusal)

    def is_away_from_work(self) -> bool:
        """Return whether the app, which is about to send, has to take its slots again first."""
        if self._receiving:
            self._beside = True
        return self.away and not self._passage.left

    async def send(self, message: Message) -> None:
        """Take the slots again, then send `message`."""
        await self.come_back()
        await self._passage.send(message)

    def _end_stalled(self) -> None:
        self.stalled = True
        self._edge._stalled += 1
        self._passage.cut_now()

    # Slots

    def _leave(self) -> None:
        """Release the slots, unless the app works during the wait."""
        passage = self._passage
        if self.away or passage.left or (self._beside and not self._sending):
            return
        self.away = True
        self._gates = tuple(held for held in passage.gates if isinstance(held[0], SlotGate))
        passage.gates = tuple(held for held in passage.gates if held not in self._gates)
        self._since = now = self._edge._now()
        outcome, detail = UNUSED, None
        if passage.status and not self.judged:
            # The response has started, so its latency is known. The rest is not a latency sample.
            self.judged = True
            now = passage.answered_at or now
            outcome, detail = passage.verdict()
        for gate, ticket in self._gates:
            gate.leave(ticket, outcome, detail, now)

    async def come_back(self, *, begins: bool = False) -> None:
        """Take the slots again; where the work `begins`, as for a request that has just arrived."""
        if not self.away:
            return
        passage = self._passage
        async with self._lock:  # one of several tasks takes them for all
            if not self.away or passage.left:
                return
            now = self._edge._now()
            if not passage.answered_at:
                passage.began += now - self._since  # time spent on the client does not count
                self._since = now
            try:
                await self._enter(begins and not passage.status)
            except Rejected as error:
                self.refusal = error
        refusal = self.refusal
        if refusal is None:
            return
        app = passage.task
        try:
            if passage.cut_now() and app is not None:
                # Wait for the cancellation. A task that outlives the app gets the refusal.
                await asyncio.wait({app})
            raise refusal
        finally:
            del refusal  # Break the cycle between the exception and this frame.

    async def _enter(self, begins: bool) -> None:  # noqa: FBT001 - as in `come_back`
        passage, edge = self._passage, self._edge
        entered: list[tuple[Any, Any]] = []
        try:
            admission = edge._loop_admission
            if begins and admission is not None:
                try:
                    admission.enter(edge._now())
                except Wait as wait:
                    await wait_async(wait.waiter, admission.host.clock)
            for gate, ticket in reversed(self._gates):
                given = await self._enter_gate(gate, ticket, begins)
                entered.insert(0, (gate, given))
        except BaseException as error:
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, error, edge._now())
            raise
        if passage.left:  # the request ended meanwhile, in another task
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, None, edge._now())
            return
        passage.gates = (*entered, *passage.gates)
        self._gates = ()
        self.away = False

    async def _enter_gate(self, gate: SlotGate, ticket: Any, begins: bool) -> Any:  # noqa: FBT001
        now = self._edge._now()
        try:
            if not begins:
                return gate.readmit(ticket, now)
            enter: Any = gate.enter
            return enter(now, self._passage) if gate.takes_arguments else enter(now)
        except Wait as wait:
            waiter: Any = wait.waiter
            if self._passage.status and waiter.readmitted:
                waiter.until = None  # the deadline applied to the start of the response
            return await wait_async(waiter, gate.host.clock)


@coroutine
def _rest(steps: Any, awaited: Any) -> Generator[Any, Any, Any]:
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
