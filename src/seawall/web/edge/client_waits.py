"""A request that waits for its client holds no place: places are for work.

A client that sends its body byte by byte, or does not read its response, costs a connection and
some memory. It must not cost what others need. Promises:

- While the app is blocked in `receive` (the body is not there) or in `send` (the server's buffer is
  full), the places of the request are free for others. They are left after `GRACE_TURNS` turns of
  the loop and taken again, by the queue of their gate, before the app goes on.
- The work begins with the end of the body. There the request is admitted as when it arrived, by
  the turns of the loop and the rules of each gate, or refused: the app is cancelled and the client
  gets the refusal. (Frameworks answer 400 to errors of `receive`.) In mid-body, and once the
  response has started, nothing is refused: the request waits for its place.
- A `send` that is blocked for `stall` seconds, and for those that a client of `SLOWEST` bytes a
  second needs for what it has to read first, ends the request.
- An app that sends while another of its tasks waits in `receive` only listens there for the end of
  the connection, and works meanwhile: it keeps its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from types import coroutine
from typing import TYPE_CHECKING, Any, Final

from seawall.errors import Rejected
from seawall.policies.slots import SlotGate
from seawall.runtime.layers import UNUSED, Wait
from seawall.runtime.runners import wait_async

if TYPE_CHECKING:
    from seawall.web.asgi_types import Message
    from seawall.web.edge.sending import Own, Passage

GRACE_TURNS: Final = 4
"""Turns of the loop for which a blocked request keeps its places.

Middlewares that hand a message from task to task block for a few turns, and so does a look whether
the client is still there: neither waits for the client. A client that wants to hold a place by this
has to send something every few turns, and costs more as the sender of so many requests.
"""


SLOWEST: Final = 10_000
"""Bytes a second that the slowest client reads. Servers do not tell whether it reads at all."""


class ClientWaits:
    """The waits of one request for its client. Made by the first one: most requests have none."""

    __slots__ = (
        "_beside",  # whether the app was seen to send while it waited for the body
        "_gates",  # what was left for the time of a wait, with tickets
        "_lock",
        "_own",
        "_passage",
        "_receiving",  # how many calls of `receive` are blocked
        "_sending",  # how many calls of `send` are blocked
        "_since",  # when the places were left
        "away",  # whether the request has left its places, and is to take them again
        "judged",  # whether the gates were told how the request went
        "late",  # whether the deadline passed while the body did not come
        "refusal",  # why there was no place again
        "stalled",  # whether the client did not take its response
    )

    def __init__(self, passage: Passage, own: Own) -> None:
        """Hold what `passage` holds."""
        self._passage = passage
        self._own = own
        self._lock = asyncio.Lock()
        self._gates: tuple[tuple[Any, Any], ...] = ()
        self._receiving = self._sending = 0
        self._since = 0.0
        self._beside = self.away = self.judged = self.late = self.stalled = False
        self.refusal: Rejected | None = None

    async def finish_receive(self, steps: Any, awaited: Any) -> Message:
        """Finish a `receive` of the server's that was blocked at its first step."""
        self._receiving += 1
        grace = _Grace(self._leave)
        try:
            message: Message = await _rest(steps, awaited)
        except BaseException:
            passage = self._passage
            self.late = self.late or (passage.is_cut and not (passage.status or self.refusal))
            raise
        finally:
            grace.cancel()
            self._receiving -= 1
        return message

    async def finish_send(self, steps: Any, awaited: Any, unread: int) -> None:
        """Finish a `send` of the server's that was blocked at its first step.

        The client has to take up to `unread` bytes before.
        """
        self._sending += 1
        grace = _Grace(self._leave)
        stall = self._own.stall
        loop = asyncio.get_running_loop()
        timer = None
        if stall is not None:
            timer = loop.call_later(stall + unread / SLOWEST, self._end_stalled)
        try:
            await _rest(steps, awaited)
        finally:
            grace.cancel()
            if timer is not None:
                timer.cancel()
            self._sending -= 1
        await self.come_back()

    def is_away_from_work(self) -> bool:
        """Tell whether the app, which is about to send, has to take its places again first."""
        if self._receiving:
            self._beside = True
        return self.away and not self._passage.left

    async def send(self, message: Message) -> None:
        """Send for an app that works although its places were left."""
        await self.come_back()
        await self._passage.send(message)

    def _end_stalled(self) -> None:
        self.stalled = True
        self._own.stalled += 1
        self._passage.cut_now()

    # Places

    def _leave(self) -> None:
        """Leave the places, unless the app works beside the wait."""
        passage = self._passage
        if self.away or passage.left or (self._beside and not self._sending):
            return
        self.away = True
        self._gates = tuple(held for held in passage.gates if isinstance(held[0], SlotGate))
        passage.gates = tuple(held for held in passage.gates if held not in self._gates)
        self._since = now = self._own.clock()
        outcome, detail = UNUSED, None
        if passage.status and not self.judged:
            # The response has started, so its latency is known. What follows is no sample.
            self.judged = True
            now = passage.answered_at or now
            outcome, detail = passage.verdict()
        for gate, ticket in self._gates:
            gate.leave(ticket, outcome, detail, now)

    async def come_back(self, *, begins: bool = False) -> None:
        """Take the places again; where the work `begins`, as a request that has just arrived."""
        if not self.away:
            return
        passage = self._passage
        async with self._lock:  # of several tasks one takes them for all
            if not self.away or passage.left:
                return
            now = self._own.clock()
            if not passage.answered_at:
                passage.began += now - self._since  # the client's time is not the request's
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
                # Until the cancellation comes. A task that outlives the app gets the refusal.
                await asyncio.wait({app})
            raise refusal
        finally:
            del refusal  # Break the cycle between the exception and this frame.

    async def _enter(self, begins: bool) -> None:  # noqa: FBT001 - as `come_back` was told
        passage, own = self._passage, self._own
        entered: list[tuple[Any, Any]] = []
        try:
            if begins and own.turns is not None:
                try:
                    own.turns.enter(own.clock())
                except Wait as wait:
                    await wait_async(wait.waiter, own.turns.host.clock)
            for gate, ticket in reversed(self._gates):
                given = await self._enter_gate(gate, ticket, begins)
                entered.insert(0, (gate, given))
        except BaseException as error:
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, error, own.clock())
            raise
        if passage.left:  # it ended meanwhile, in another task
            for gate, ticket in entered:
                gate.leave(ticket, UNUSED, None, own.clock())
            return
        passage.gates = (*entered, *passage.gates)
        self._gates = ()
        self.away = False

    async def _enter_gate(self, gate: SlotGate, ticket: Any, begins: bool) -> Any:  # noqa: FBT001
        now = self._own.clock()
        try:
            if not begins:
                return gate.readmit(ticket, now)
            enter: Any = gate.enter
            return enter(now, self._passage) if gate.takes_arguments else enter(now)
        except Wait as wait:
            waiter: Any = wait.waiter
            if self._passage.status and waiter.readmitted:
                waiter.until = None  # the deadline was for the response to begin
            return await wait_async(waiter, gate.host.clock)


class _Grace:
    """Calls a function after some turns of the loop, unless it is cancelled before."""

    __slots__ = ("_handle", "_left", "_then")

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._left = GRACE_TURNS
        self._hop()

    def _hop(self) -> None:
        if self._left:
            self._left -= 1
            self._handle = asyncio.get_running_loop().call_soon(self._hop)
        else:
            self._then()

    def cancel(self) -> None:
        self._handle.cancel()


@coroutine
def _rest(steps: Any, awaited: Any) -> Generator[Any, Any, Any]:
    """Await the rest of `steps`, whose first step was taken and waits for `awaited`."""
    while True:
        try:
            yield awaited
        except BaseException as error:  # noqa: BLE001 - the server has a say in it
            try:
                awaited = steps.throw(error)
            except StopIteration as end:
                return end.value
        else:
            return (yield from steps)
