"""NATS JetStream as a source of pipelines, shared by any number of processes.

Promises:
- A message is acknowledged after its item has ended. The acknowledgement is repeated until the
  server confirms it.
- While an item is at work, its message is not delivered to another process, however long it takes.
  If this process cannot keep it (its event loop stood still, or the server was away for longer than
  `lost_after`), the item is lost: no further function is called with it here.
- A message that is given back is delivered again at once.
- A message that was delivered more than twice without an end is handed out alone, so that only the
  item that kills a process is charged with its death. After `most_deliveries` it is a dead letter.
- With `partitions`, messages of one partition are worked at one after the other, in their order,
  whichever processes join, leave or are killed.
- While the server is away the source waits. Nothing that has arrived is lost by a cancellation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil
from random import Random
from typing import Any, Final, Generic, TypeVar

from seawall import _checks as check
from seawall._failures import described
from seawall.models.backoff import full_jitter
from seawall.pipeline.source import FaultyItem, TooManyDeliveries, checked_name, wait_within
from seawall.pipeline.streams.jetstream.connection import (
    MOST_PARTITIONS,
    JetStreamConnection,
    JetStreamMessage,
)
from seawall.runtime.abandon import end
from seawall.runtime.driver import sleep_async

T = TypeVar("T")

ALONE_AFTER: Final = 2
"""A message that was delivered more often than this is handed out alone."""
CONSUMERS_AT_ONCE: Final = 8
"""Partitions that are asked for a message at once, if there is room for fewer."""
REQUEST_SECONDS: Final = 5.0
"""How long the server keeps a request for messages."""
LOST_AFTER: Final = 1.0
"""Seconds after which a request whose time is over without an answer is made again."""
LOOK_EVERY: Final = 0.5
"""Seconds between two looks whether the connection was lost and made again."""
CONFIRM_WITHIN: Final = 2.0
"""Seconds for the server to confirm an acknowledgement."""
MOST_REPEATS: Final = 20
"""Acknowledgements of one message that go without an answer."""

UNREADY: Final = full_jitter(0.1, cap=2.0)
"""Pauses while a server, a stream or a consumer is not ready."""

_ACK: Final = b""
_NAK: Final = b"-NAK"
_AT_WORK: Final = b"+WPI"
_REQUEST_IS_OVER: Final = frozenset({"404", "408"})
"""Answers to a request for which there were no messages in time."""
_ONE_AT_WORK: Final = "Exceeded MaxAckPending"
"""The answer to a request for a partition of which a message is at work."""
_NAME: Final = re.compile(r"[^\s.*>/\\]+")

_random: Final = Random().random  # noqa: S311 - jitter is no secret
_log = logging.getLogger("seawall")


@dataclass(eq=False, repr=False, slots=True)
class Delivery:
    """A message that was delivered to this process; the handle of its item."""

    consumer: PullConsumer
    sequence: int
    deliveries: int
    """How often it was delivered, to any process, with this time."""
    message: JetStreamMessage
    reply: str
    """Where the server wants to hear how it ended."""
    kept_until: float
    """Until when the server delivers it to no other process."""
    answer: bytes = _ACK
    """The final answer to the server about one message."""
    unanswered: int = 0

    def __str__(self) -> str:
        return self.message.id


@dataclass(eq=False, slots=True)
class PullConsumer:
    """A durable consumer on the server, and the request for its messages that is under way."""

    name: str
    subject: str | None
    is_made: bool = False
    """Whether the consumer is known to be on the server."""
    expected: int = 0
    """How many messages may still come by the request under way."""
    until: float = 0.0
    """When the request is lost, if it was not answered."""
    request: int = 0
    """Its number."""
    not_before: float = 0.0
    """When the next request may be made."""
    pauses: Iterator[float] = field(default_factory=lambda: UNREADY.delays(_random))
    pending: int = 0
    """How many messages wait on the server, as of the last delivery."""


def _pull_consumers(name: str, subject: str | None, partitions: int | None) -> list[PullConsumer]:
    """Return one consumer, or one for each partition; raise if `subject` does not fit."""
    if subject is not None and (not isinstance(subject, str) or not subject.strip()):
        raise TypeError(f"subject={subject!r}: write a subject, such as 'orders.>'")
    if partitions is None:
        if subject is not None and "{partition}" in subject:
            raise ValueError(f"subject={subject!r}: write partitions=, their number")
        return [PullConsumer(name, subject)]
    check.count("partitions", partitions, maximum=MOST_PARTITIONS)
    if subject is None or "{partition}" not in subject:
        raise ValueError(
            f"subject={subject!r}: with partitions= write where the number of the partition"
            " stands, such as 'orders.{partition}'"
        )
    return [
        PullConsumer(f"{name}-{number}", subject.replace("{partition}", str(number)))
        for number in range(partitions)
    ]


class JetStreamSource(Generic[T]):
    """The messages of a stream, by a durable consumer that any number of processes share."""

    def __init__(
        self,
        server: Any,
        stream: str,
        *,
        consumer: str,
        subject: str | None = None,
        partitions: int | None = None,
        decode: Callable[[JetStreamMessage], T] | None = None,
        lost_after: float = 30.0,
        most_deliveries: int = 10,
        name: str | None = None,
    ) -> None:
        """Read `stream`, with those of its subjects that match `subject`.

        `server` is a URL, a list of them, a client of nats-py, or an async function that connects
        one. The stream must exist; the durable consumer is made, or brought up to date.

        Without `partitions` messages go to any process, many at once. With `partitions=16` and
        `subject="orders.{partition}"` there is a consumer for each of the subjects orders.0 to
        orders.15, of which one message is at work at a time: they stay in order.

        `decode(message)` makes the value of an item; without it, it is the `JetStreamMessage`. One
        that cannot be decoded is a dead letter.

        A process that is silent for `lost_after` seconds, the consumer's ack_wait, loses its
        messages to others. A message that was delivered `most_deliveries` times without an end is a
        dead letter.
        """
        for what, value in (("stream", stream), ("consumer", consumer)):
            if not isinstance(value, str) or not _NAME.fullmatch(value):
                raise ValueError(f"{what}={value!r}: write a name without spaces, dots, * and >")
        self.stream = stream
        self.consumer = consumer
        self.name = checked_name(stream if name is None else name)
        self.keeps_ids = True
        self.lost_after = check.seconds("lost_after", lost_after)
        self.most_deliveries = check.count("most_deliveries", most_deliveries)
        self._decode = None if decode is None else check.plain_function("decode", decode)
        self.partitions = partitions
        self._consumers = _pull_consumers(consumer, subject, partitions)
        self._by_name = {one.name: one for one in self._consumers}
        self._connection = JetStreamConnection(server, "JetStreamSource")
        self._client: Any = None
        self._context: Any = None
        self._inbox = ""
        self._subscription: Any = None
        self._keeper: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._reconnects = 0
        self._responsive_since = 0.0
        """What arrives now was sent after this: the event loop has not stood still since."""
        self._waits_for = ""
        self._ready: deque[Delivery] = deque()
        """Messages to hand out, with others."""
        self._alone: deque[Delivery] = deque()
        """Messages to hand out alone."""
        self._alone_sequence = -1
        """The sequence of the last message that was handed out alone."""
        self._exhausted: deque[Delivery] = deque()
        """Messages that were delivered too often."""
        self._unfinished: dict[int, Delivery] = {}
        """Messages that were delivered and have not ended, by sequence: also those above."""
        self._unconfirmed: dict[int, Delivery] = {}
        """Messages that have ended, which the server has not confirmed."""

    def __repr__(self) -> str:
        return f"<JetStreamSource {self.stream!r}, consumer {self.consumer!r}>"

    async def pull(self, most: int) -> Sequence[tuple[T | FaultyItem, Delivery]]:
        """Wait for messages and return up to `most`; it never ends."""
        if self._subscription is None:
            await self._open()
        has_asked = False
        while True:
            found = self._next_items(most, is_enough=has_asked)
            if found:
                return found
            if self._alone_sequence in self._unfinished or (self._alone and not self._ready):
                await self._wait()
            elif has_asked or (self.partitions is None and not self._ready):
                await self._ask_and_wait()
            else:
                has_asked = True
                await self._ask_for_more(most)

    def _next_items(self, most: int, *, is_enough: bool) -> list[tuple[Any, Delivery]]:
        """Take out what can be handed out now; fewer than `most` only if that `is_enough`."""
        if self._exhausted:
            exhausted = self._exhausted.popleft()
            times = exhausted.deliveries - 1
            return [(FaultyItem(exhausted.message, TooManyDeliveries(times), times), exhausted)]
        if self._alone_sequence in self._unfinished:
            return []
        if len(self._ready) >= most or (self._ready and is_enough):
            taken = [self._ready.popleft() for _ in range(min(most, len(self._ready)))]
            return [(self._value(delivery), delivery) for delivery in taken]
        if self._alone and not self._ready and not self._at_work():
            delivery = self._alone.popleft()
            self._alone_sequence = delivery.sequence
            return [(self._value(delivery), delivery)]
        return []

    def _value(self, delivery: Delivery) -> Any:
        if self._decode is None:
            return delivery.message
        try:
            return self._decode(delivery.message)
        except Exception as error:  # noqa: BLE001 - of the user's function
            return FaultyItem(delivery.message, error, delivery.deliveries)

    def _at_work(self) -> int:
        """Return how many messages were handed out and have not ended."""
        return len(self._unfinished) - len(self._ready) - len(self._alone) - len(self._exhausted)

    async def acknowledge(self, handles: Sequence[Delivery]) -> None:
        """Report to the server that these messages have ended."""
        await self._end(handles, _ACK)

    async def give_back(self, handles: Sequence[Delivery]) -> None:
        """Have the server deliver these messages again at once, unless they are lost already."""
        held = [handle for handle in handles if self.holds(handle)]
        for handle in handles:
            self._unfinished.pop(handle.sequence, None)
        await self._end(held, _NAK)

    def holds(self, handle: Delivery) -> bool:
        """Return whether no other process can have been given the message."""
        return _now() < handle.kept_until

    async def close(self) -> None:
        """Give back what was not handed out, and close the connection if it was made here."""
        if self._subscription is None:
            await self._connection.close()
            return
        if self._keeper is not None:
            await end([self._keeper])
        try:
            async with asyncio.timeout(CONFIRM_WITHIN):
                await self._subscription.drain()  # what is on its way arrives; then no more
        except Exception as error:  # noqa: BLE001 - of a connection that is lost
            _log.debug("source %r: %s", self.name, described(error))
        left = [*self._ready, *self._alone, *self._exhausted]
        for queue in (self._ready, self._alone, self._exhausted):
            queue.clear()
        try:
            await self._end(left, _NAK)
            await self._confirm(list(self._unconfirmed.values()))
        finally:
            self._unfinished.clear()
            self._unconfirmed.clear()
            self._subscription = None
            await self._connection.close()

    def snapshot(self) -> dict[str, Any]:
        """Return what is known of the stream; from any thread."""
        return {
            "kind": "jetstream",
            "stream": self.stream,
            "consumer": self.consumer,
            "partitions": self.partitions,
            "pending": sum(consumer.pending for consumer in self._consumers),
            "at_work": self._at_work(),
            "unconfirmed": len(self._unconfirmed),
            "waits_for": self._waits_for,
        }

    # Asking for messages

    async def _open(self) -> None:
        client = None
        while client is None:
            try:
                async with asyncio.timeout(CONFIRM_WITHIN):
                    client = await self._connection.client()
            except TimeoutError:
                self._note_wait(TimeoutError("no connection yet"))
        self._client = client
        self._context = client.jetstream(timeout=CONFIRM_WITHIN)
        self._arrived = asyncio.Event()
        self._reconnects = client.stats["reconnects"]
        for consumer in self._consumers:
            consumer.expected = 0
            consumer.is_made = False
            while not consumer.is_made:
                await self._make(consumer, is_first=True)
                if not consumer.is_made:
                    await sleep_async(next(consumer.pauses))
        inbox = client.new_inbox()
        subscription = await client.subscribe(f"{inbox}.*.*", cb=self._take)
        self._inbox, self._subscription = inbox, subscription
        self._responsive_since = _now()
        self._keeper = asyncio.create_task(self._keep(), name=f"acknowledgements of {self.name}")

    async def _make(self, consumer: PullConsumer, *, is_first: bool = False) -> None:
        """Make a consumer on the server, or bring it up to date."""
        from nats.js.api import ConsumerConfig
        from nats.js.errors import APIError, ServiceUnavailableError

        config = ConsumerConfig(
            name=consumer.name,
            durable_name=consumer.name,
            filter_subject=consumer.subject,
            ack_wait=self.lost_after,
            max_deliver=-1,
            max_ack_pending=None if self.partitions is None else 1,
        )
        try:
            await self._context.add_consumer(self.stream, config)
        except Exception as error:
            is_refused = isinstance(error, APIError)
            if is_first and is_refused and not isinstance(error, ServiceUnavailableError):
                error.add_note(
                    f"source {self.name!r} reads stream {self.stream!r} by consumer"
                    f" {consumer.name!r}: create the stream before, and take another consumer for"
                    " another subject"
                )
                raise
            self._note_wait(error)
        else:
            consumer.is_made = True
            self._note_wait(None)

    async def _ask_and_wait(self) -> None:
        """Have a request under way for each consumer that may have one, and wait for an answer."""
        now = _now()
        for consumer in self._consumers:
            if (consumer.expected and now < consumer.until) or now < consumer.not_before:
                continue
            if not consumer.is_made:
                await self._make(consumer)
                if not consumer.is_made:
                    consumer.not_before = now + next(consumer.pauses)
                    continue
            await self._ask(consumer, 1, waits=True)
        await self._wait()

    async def _ask_for_more(self, most: int) -> None:
        """Get what there is already, besides what has arrived."""
        if self.partitions is not None:
            await self._ask_idle_consumers(most)
        # Redelivered messages come first, and one of them may have to be handed out alone: as long
        # as there are some they are asked for one by one.
        elif self._ready[-1].deliveries == 1:
            await self._ask_now(self._consumers, most - len(self._ready))

    async def _ask_idle_consumers(self, most: int) -> None:
        """Ask consumers for what they have, a few at a time, until there are `most` messages.

        So not much waits here that other processes could have.
        """
        now = _now()
        busy = {delivery.consumer for delivery in self._unfinished.values()}
        self._consumers.append(self._consumers.pop(0))  # each is the first one at times
        idle = deque(
            consumer
            for consumer in self._consumers
            if consumer not in busy
            and consumer.is_made
            and not consumer.expected
            and now >= consumer.not_before
        )
        while idle and len(self._ready) < most:
            number = min(len(idle), max(most - len(self._ready), CONSUMERS_AT_ONCE))
            await self._ask_now([idle.popleft() for _ in range(number)], 1)

    async def _ask_now(self, consumers: Sequence[PullConsumer], most: int) -> None:
        """Get what there is already from each of these consumers."""
        for consumer in consumers:
            await self._ask(consumer, most, waits=False)
        while any(consumer.expected and _now() < consumer.until for consumer in consumers):
            await self._wait()

    async def _ask(self, consumer: PullConsumer, most: int, *, waits: bool) -> None:
        seconds = REQUEST_SECONDS if waits else 0.0
        duration = {"expires": int(seconds * 1e9)} if waits else {"no_wait": True}
        consumer.request += 1
        consumer.expected = most
        consumer.until = _now() + seconds + LOST_AFTER
        try:
            await self._client.publish(
                f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{consumer.name}",
                json.dumps({"batch": most, **duration}).encode(),
                reply=f"{self._inbox}.{consumer.name}.{consumer.request}",
            )
        except Exception as error:
            if self._client.is_closed:
                raise
            self._note_wait(error)
            consumer.expected = 0
            consumer.not_before = _now() + next(consumer.pauses)

    async def _wait(self) -> None:
        """Wait for something to arrive or to end, not for long: the connection may be lost."""
        if not await wait_within(self._arrived, LOOK_EVERY) and self._client.is_closed:
            raise ConnectionError(
                f"source {self.name!r}: the connection to NATS was closed; connect it with"
                " max_reconnect_attempts=-1"
            )
        self._arrived.clear()
        reconnects = self._client.stats["reconnects"]
        if reconnects != self._reconnects:
            self._reconnects = reconnects
            for consumer in self._consumers:
                consumer.expected = 0  # the server has forgotten the requests

    # What the server sends

    async def _take(self, answer: Any) -> None:
        """Take a message, or the end of a request."""
        if answer.subject.startswith(self._inbox):
            self._take_status(answer)
        else:
            facts = answer.metadata
            consumer = self._by_name[facts.consumer]
            consumer.expected = max(0, consumer.expected - 1)
            consumer.pending = facts.num_pending
            consumer.pauses = UNREADY.delays(_random)
            self._note_wait(None)
            await self._take_message(answer, facts)
        self._arrived.set()

    async def _take_message(self, answer: Any, facts: Any) -> None:
        sequence = facts.sequence.stream
        ended = self._unconfirmed.get(sequence)
        if ended is not None:  # the acknowledgement was lost
            ended.reply = answer.reply
            await self._client.publish(ended.reply, ended.answer)
            return
        kept_until = self._responsive_since + self.lost_after
        known = self._unfinished.get(sequence)
        if known is not None:
            known.reply, known.kept_until = answer.reply, kept_until
            return
        headers = dict(answer.headers or {})
        stored_at = int(facts.timestamp.timestamp() * 1e6)
        name = headers.get("Nats-Msg-Id") or f"{self.stream}/{sequence}/{stored_at}"
        message = JetStreamMessage(name, answer.data, answer.subject, headers)
        deliveries, consumer = facts.num_delivered, self._by_name[facts.consumer]
        delivery = Delivery(consumer, sequence, deliveries, message, answer.reply, kept_until)
        self._unfinished[sequence] = delivery
        if deliveries > self.most_deliveries:
            self._exhausted.append(delivery)
        elif deliveries > ALONE_AFTER:
            self._alone.append(delivery)
        else:
            self._ready.append(delivery)

    def _take_status(self, answer: Any) -> None:
        name, number = answer.subject.removeprefix(f"{self._inbox}.").split(".")
        consumer = self._by_name[name]
        if consumer.request != int(number):
            return  # of a request that was given up
        consumer.expected = 0
        headers = answer.headers or {}
        status, what = headers.get("Status", ""), headers.get("Description", "")
        if status not in _REQUEST_IS_OVER and what != _ONE_AT_WORK:
            self._note_wait(ConnectionError(f"{status} {what or 'the consumer does not answer'}"))
            consumer.is_made = False
            consumer.not_before = _now() + next(consumer.pauses)

    def _note_wait(self, error: Exception | None) -> None:
        """Log once that the source waits for the server, and once that it goes on."""
        reason = "" if error is None else described(error)
        fields = {"seawall_source": self.name}
        if reason and not self._waits_for:
            _log.warning("source %r waits for the server: %s", self.name, reason, extra=fields)
        elif self._waits_for and not reason:
            _log.warning("source %r: the server is back", self.name, extra=fields)
        self._waits_for = reason

    # Messages to the server

    async def _end(self, deliveries: Sequence[Delivery], answer: bytes) -> None:
        for delivery in deliveries:
            delivery.answer = answer
            self._unfinished.pop(delivery.sequence, None)
            self._unconfirmed[delivery.sequence] = delivery
        self._arrived.set()  # one may wait to be handed out alone
        await self._confirm(deliveries)

    async def _confirm(self, deliveries: Sequence[Delivery]) -> None:
        """Report ends to the server, and forget those that it confirms; others are repeated."""
        within = min(CONFIRM_WITHIN, self.lost_after / 4)
        answers = await asyncio.gather(
            *(self._client.request(one.reply, one.answer, timeout=within) for one in deliveries),
            return_exceptions=True,
        )
        for delivery, answer in zip(deliveries, answers, strict=True):
            if not isinstance(answer, BaseException):
                self._unconfirmed.pop(delivery.sequence, None)
                continue
            delivery.unanswered += 1
            if delivery.unanswered >= MOST_REPEATS:
                self._unconfirmed.pop(delivery.sequence, None)
                _log.error(
                    "source %r: the server does not confirm the end of message %d, and may deliver"
                    " it again: %s",
                    self.name,
                    delivery.sequence,
                    described(answer) if isinstance(answer, Exception) else "cancelled",
                    extra={"seawall_source": self.name, "seawall_item": f"{self.name}:{delivery}"},
                )

    async def _keep(self) -> None:
        """Keep the messages that are here from being delivered again; repeat acknowledgements."""
        pause = self.lost_after / 4
        while True:
            began = _now()
            await sleep_async(pause)
            if _now() < began + 2 * pause:
                self._responsive_since = began
            try:
                await self._prolong(list(self._unfinished.values()))
                if self._unconfirmed:
                    await self._confirm(list(self._unconfirmed.values()))
            except Exception as error:  # noqa: BLE001 - of the connection, which comes back
                self._note_wait(error)

    async def _prolong(self, deliveries: list[Delivery]) -> None:
        """Report to the server that these messages are at work; extend them once it has heard."""
        client, connection = self._client, self._client.stats["reconnects"]
        held = [delivery for delivery in deliveries if self.holds(delivery)]
        if not held or not client.is_connected:
            return
        kept_until = _now() + self.lost_after
        for delivery in held:
            await client.publish(delivery.reply, _AT_WORK)
        await client.flush(max(1, ceil(self.lost_after / 4)))
        if client.is_connected and client.stats["reconnects"] == connection:
            for delivery in held:
                delivery.kept_until = kept_until


def _now() -> float:
    return asyncio.get_running_loop().time()
