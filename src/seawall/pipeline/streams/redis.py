"""Redis or Valkey streams as sources and sinks: several processes read one stream together.

Without partitions the processes share the entries, in no order. With partitions the sink writes
the entries of a key to one of several streams. Each of these is read by one process at a time,
which holds a lease for it: so the order of each key is kept, also when processes join, leave or
die.

Promises:
- At least once: an entry is acknowledged after its item has ended. Until then it belongs to one
  process; one that is silent for `lost_after` seconds loses its entries to others.
- What is given back is available to other processes at once.
- With partitions: entries are handed out in their order, beginning with the first that is not
  acknowledged. A process that has lost a partition calls no further function with its items, and
  the store accepts nothing from it. A call that is under way may end late: with an `Inbox` its
  effect happens once and in order; else let the resource refuse a `token` lower than it has seen.
- An item of which processes die is handed out alone, and is a dead letter after `most_deliveries`.
- While the store is away nothing is handed out; every question may be asked again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from socket import gethostname
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

from seawall import _checks as check
from seawall._failures import described
from seawall.errors import StoreUnavailable
from seawall.leases.lease import Lease
from seawall.pipeline.source import FaultyItem, TooManyDeliveries, checked_name, wait_within
from seawall.pipeline.stage import BatchFailed, NotBefore
from seawall.redis.pods import SharedHeartbeats
from seawall.redis.store import core_of
from seawall.redis.streams import (
    PATIENCE,
    Fields,
    HeldByAnother,
    StorePlace,
    StreamConsumer,
    append,
    partition_name,
    partition_of,
)
from seawall.runtime.driver import sleep_async

if TYPE_CHECKING:
    from seawall.redis.streams import StreamEntry
    from seawall.runtime.store import BeatShare

POLL: Final = 0.05
"""Seconds between two looks at a stream that has nothing new."""
RETRY: Final = 0.2
"""Seconds until a store is asked again that is away, or a stream that is full."""
CLOSE_WITHIN: Final = 2.0
"""Seconds for leaving the group when the source is closed."""
ALONE_FROM: Final = 3
"""From this delivery on an item is handed out while no other item of the source is in flight.

Twice another item may have killed the process; from then on, this one did.
"""
MOST_MEMBERS: Final = 1000
"""Processes that read one stream."""
VALUE: Final = "value"
"""The field in which a sink writes its value."""
IDENTITY: Final = "id"
"""The field by which duplicates of an item are recognised, also in streams of an outbox."""

T = TypeVar("T")

_log = logging.getLogger("seawall")


class StreamHandle(NamedTuple):
    """What a stream knows an item by; `current_item().handle` in a stage."""

    stream: str
    """The stream, or the partition of it."""
    id: str
    """The id of the entry."""
    identity: str
    """What the writer calls the item, if it says so: the same for duplicates."""
    deliveries: int
    """How often the item was handed out, this time included."""
    token: int
    """Rises each time the partition gets another process; 0 without partitions."""
    partition: int = 0

    def __str__(self) -> str:
        return self.identity or f"{self.stream}/{self.id}"


@dataclass(eq=False, slots=True)
class _Holding:
    """A stream, or a partition of one, while this process reads it."""

    number: int
    consumer: StreamConsumer
    lease: Lease | None
    in_flight: set[str] = field(default_factory=set)
    """Ids of entries that were handed out, and whose end the store has not accepted yet."""
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    """Pending entries that are to be handed out, and how often they were delivered before."""
    delivery_numbers: dict[str, int] = field(default_factory=dict)
    """The number of this delivery, for entries of `waiting` that the store was asked for.

    If its answer was lost the next attempt is the same delivery.
    """
    is_unsure: bool = True
    """Whether the store may have given this process entries that it does not know of."""
    leave_by: float | None = None
    """When to give up what is in flight, since another process is to have the partition."""

    @property
    def token(self) -> int:
        return self.consumer.token or 0

    @property
    def is_held(self) -> bool:
        return self.lease is None or self.lease.held


class RedisStreamSource(Generic[T]):
    """The entries of a Redis or Valkey stream, as items of a pipeline; see the module."""

    def __init__(
        self,
        target: Any,
        stream: str,
        *,
        group: str,
        partitions: int | None = None,
        name: str | None = None,
        decode: Callable[[dict[str, bytes]], T] | None = None,
        lost_after: float = 10.0,
        most_deliveries: int = 5,
    ) -> None:
        """Read `stream` together with all processes that have the same `group`.

        `target` is a `RedisStore`, a URL, or a client of redis-py. With `partitions` the streams
        are `stream.0`, `stream.1` and so on, as `RedisStreamSink` writes them. `decode` makes a
        value of the fields of an entry; without it, it is what `RedisStreamSink` has written. One
        that cannot be decoded is a dead letter, and so is one that was delivered
        `most_deliveries` times and not finished. A process that is silent for `lost_after` seconds
        loses its entries to the others.
        """
        self.stream = checked_name(stream, "stream")
        self.group = checked_name(group, "group")
        self.name = stream if name is None else checked_name(name)
        self.keeps_ids = True
        self.partitions = None if partitions is None else check.count("partitions", partitions)
        self.lost_after = check.seconds("lost_after", lost_after)
        self.most_deliveries = check.count("most_deliveries", most_deliveries)
        self._decode: Callable[[dict[str, bytes]], Any]
        self._decode = _value if decode is None else check.plain_function("decode", decode)
        self._place = StorePlace(target, stream)
        self._member = f"{gethostname()}-{os.getpid()}-{token_hex(4)}"
        self._holdings: dict[int, _Holding] = {}
        self._leases: dict[int, Lease] = {}
        self._beats: BeatShare | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._changed: asyncio.Event
        """Set when there may be something to read."""
        self._due: asyncio.Event
        """Set when the keeper has something to do."""
        self._turn = 0
        self._alone: StreamHandle | None = None
        """The item that is handed out without others, until it has ended."""
        self._suspect: _Holding | None = None
        """Whose next item is to be handed out so; until then nothing else is read."""
        self._members = 0
        self._unread: dict[int, int | None] = {}
        self._error = ""

    def __repr__(self) -> str:
        return f"<RedisStreamSource {self.stream!r}, group {self.group!r}>"

    # A source

    async def pull(self, most: int) -> Sequence[tuple[T, StreamHandle]]:
        """Wait for entries, and return up to `most`; a stream is never over."""
        if self._keeper is None:
            self._begin()
        while True:
            self._changed.clear()
            pulled = await self._read_next(most)
            if pulled:
                return pulled
            await wait_within(self._changed, POLL)

    async def acknowledge(self, handles: Sequence[StreamHandle]) -> None:
        """Never hand these out again; raise if the store is away for `lost_after` seconds."""
        await self._end(handles, StreamConsumer.acknowledge)

    async def give_back(self, handles: Sequence[StreamHandle]) -> None:
        """Let other processes have these at once; raise if the store is away for too long."""
        await self._end(handles, StreamConsumer.give_back)

    def holds(self, handle: StreamHandle) -> bool:
        """Return whether this process still has the item."""
        holding = self._holdings.get(handle.partition)
        if holding is None or holding.token != handle.token or not holding.is_held:
            return False
        return holding.leave_by is None or _now() < holding.leave_by

    async def close(self) -> None:
        """Report the last ends, let others read, and leave the group."""
        if self._keeper is None:
            await self._place.close()
            return
        self._keeper.cancel()
        await asyncio.wait([self._keeper])
        self._keeper = None
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._leave()
        except (TimeoutError, StoreUnavailable) as error:
            _log.warning(
                "%r is closed without the store (%s): others have its entries after %g s",
                self,
                described(error),
                self.lost_after,
                extra={"seawall_source": self.name},
            )
        finally:
            self._holdings.clear()
            self._leases.clear()
            self._alone = self._suspect = None
            await self._place.close()

    def snapshot(self) -> dict[str, Any]:
        """Return what is held and unread, and the last error of the store."""
        held = sorted(list(self._holdings))  # noqa: C414 - a copy first: another thread may ask
        known = [number for number in list(self._unread.values()) if number is not None]
        return {
            "kind": "redis-stream",
            "stream": self.stream,
            "group": self.group,
            "partitions": self.partitions,
            "held": held if self.partitions is not None else None,
            "processes": self._members if self.partitions is not None else None,
            "unread": sum(known) if known else None,
            "error": self._error,
        }

    # Reading

    def _begin(self) -> None:
        store = self._place.store
        self._changed, self._due = asyncio.Event(), asyncio.Event()
        if self.partitions is None:
            consumer = StreamConsumer(store, self.stream, self.group, self._member)
            self._holdings[0] = _Holding(0, consumer, None)
        else:
            self._beats = SharedHeartbeats(core_of(store), f"stream/{self.stream}/{self.group}")
        self._keeper = asyncio.create_task(self._maintain(), name=f"{self!r}: keeper")

    async def _read_next(self, most: int) -> list[tuple[Any, StreamHandle]]:
        """Return the next entries of one partition, if any has some."""
        held = [one for one in self._holdings.values() if one.leave_by is None]
        if self._suspect in held:
            held = [self._suspect]
        for place in range(len(held)):
            if self._alone is not None:
                return []
            holding = held[(self._turn + place) % len(held)]
            try:
                pulled = await self._read(holding, most)
            except HeldByAnother:
                self._lose(holding)
            except StoreUnavailable as error:
                self._error = str(error)
            else:
                self._error = ""
                if pulled:
                    self._turn += place + 1
                    return pulled
        return []

    async def _read(self, holding: _Holding, most: int) -> list[tuple[Any, StreamHandle]]:
        consumer = holding.consumer
        if holding.is_unsure:
            listed = await consumer.pending(self.lost_after)
            holding.waiting = deque(one for one in listed if one[0] not in holding.in_flight)
            delivery_numbers = holding.delivery_numbers
            holding.delivery_numbers = {
                id_: delivery_numbers[id_] for id_, _ in holding.waiting if id_ in delivery_numbers
            }
            holding.is_unsure = False
        if not holding.is_held:
            return []
        if holding.waiting:
            return await self._take(holding, most)
        holding.is_unsure = True  # until the answer is here: it may be lost, or this cancelled
        entries = await consumer.read(most)
        # What others have given back is found by the next look, if there is nothing new.
        holding.is_unsure = not entries and holding.lease is None
        return [self._item_of(holding, entry, 1) for entry in entries]

    async def _take(self, holding: _Holding, most: int) -> list[tuple[Any, StreamHandle]]:
        """Hand out entries that were delivered before."""
        wanted: dict[str, int] = {}
        is_alone = False
        for id_, before in list(holding.waiting)[:most]:
            delivery = holding.delivery_numbers.setdefault(id_, before + 1)
            if ALONE_FROM <= delivery <= self.most_deliveries:
                if not wanted:
                    self._suspect = holding
                    is_alone = not any(one.in_flight for one in self._holdings.values())
                    if is_alone:
                        wanted[id_] = delivery
                break
            wanted[id_] = delivery
        if not wanted:
            return []
        holding.is_unsure = True
        entries = await holding.consumer.take(list(wanted.items()))
        holding.is_unsure = False
        for id_ in wanted:
            holding.waiting.popleft()
            del holding.delivery_numbers[id_]
        pulled = [self._item_of(holding, entry, wanted[entry.id]) for entry in entries]
        self._suspect = None
        if is_alone and pulled and not isinstance(pulled[0][0], FaultyItem):
            self._alone = pulled[0][1]
        return pulled

    def _item_of(
        self, holding: _Holding, entry: StreamEntry, delivery: int
    ) -> tuple[Any, StreamHandle]:
        holding.in_flight.add(entry.id)
        identity = entry.fields.get(IDENTITY, b"").decode("utf-8", "replace")
        stream, number = holding.consumer.stream, holding.number
        handle = StreamHandle(stream, entry.id, identity, delivery, holding.token, number)
        before = delivery - 1
        if not entry.fields:
            gone = LookupError("it was removed from the stream before it was done")
            return FaultyItem({}, gone, before), handle
        if before >= self.most_deliveries:
            many = TooManyDeliveries(before)
            return FaultyItem(entry.fields, many, before), handle
        try:
            return self._decode(entry.fields), handle
        except Exception as error:  # noqa: BLE001 - of the user's function
            return FaultyItem(entry.fields, error), handle

    async def _end(
        self,
        handles: Sequence[StreamHandle],
        report: Callable[[StreamConsumer, Sequence[str]], Awaitable[None]],
    ) -> None:
        ids: dict[_Holding, list[str]] = {}
        for handle in handles:
            if handle == self._alone:
                self._alone = None
                self._changed.set()
            holding = self._holdings.get(handle.partition)
            if holding is not None and holding.token == handle.token:
                ids.setdefault(holding, []).append(handle.id)
        for holding, ended in ids.items():
            try:
                await self._report(report, holding.consumer, ended)
            except HeldByAnother:
                self._lose(holding)
            else:
                holding.in_flight.difference_update(ended)
                if holding.leave_by is not None and not holding.in_flight:
                    self._due.set()

    async def _report(
        self,
        report: Callable[[StreamConsumer, Sequence[str]], Awaitable[None]],
        consumer: StreamConsumer,
        ids: Sequence[str],
    ) -> None:
        """Report ends to the store; repeatedly while it is away, but not after `lost_after`.

        After that time another process may have the entries.
        """
        until = _now() + self.lost_after
        while True:
            try:
                return await report(consumer, ids)
            except StoreUnavailable as error:
                self._error = str(error)
                if _now() >= until:
                    raise
                await sleep_async(RETRY)

    def _lose(self, holding: _Holding) -> None:
        """Give up a partition that another process has."""
        if self._holdings.get(holding.number) is holding:
            self._forget(holding)
        self._due.set()

    def _forget(self, holding: _Holding) -> None:
        del self._holdings[holding.number]
        self._unread.pop(holding.number, None)
        if self._alone is not None and self._alone.partition == holding.number:
            self._alone = None

    # Renewals, and the shares of partitions

    async def _maintain(self) -> None:
        while True:
            self._due.clear()
            pause = self.lost_after / 3
            try:
                if self._beats is None:
                    await self._renew()
                else:
                    await self._balance(self._beats)
            except StoreUnavailable as error:
                self._error = str(error)
                pause = min(RETRY, pause)
            except Exception:  # noqa: BLE001 - logged, with its traceback
                _log.exception(
                    "%r cannot look after what it reads; it tries again",
                    self,
                    extra={"seawall_source": self.name},
                )
            await wait_within(self._due, pause)

    async def _renew(self) -> None:
        for holding in list(self._holdings.values()):
            try:
                unread = await holding.consumer.renew(self.lost_after)
            except HeldByAnother:
                self._lose(holding)
            else:
                self._unread[holding.number] = unread
                holding.is_unsure = holding.is_unsure or holding.lease is None

    async def _balance(self, beats: BeatShare) -> None:
        """Hold a fair share of the partitions."""
        assert self.partitions is not None  # noqa: S101 - looked at by the caller
        sighting = await beats.beat(self._member, MOST_MEMBERS, PATIENCE)
        live = {beat.member for beat in sighting.beats if beat.age < self.lost_after} | {
            self._member
        }
        self._members = len(live)
        rank = sorted(live).index(self._member)
        share = self.partitions // len(live) + (rank < self.partitions % len(live))
        for number, lease in self._leases.items():
            if number in self._holdings and not lease.held:
                self._lose(self._holdings[number])
            if number not in self._holdings:
                await lease.arelease()  # what was lost is asked for anew
        staying = [one for one in self._holdings.values() if one.leave_by is None]
        for holding in staying[share:]:
            holding.leave_by = _now() + self.lost_after
        for holding in list(self._holdings.values()):
            if holding.leave_by is not None and not holding.in_flight:
                await self._hand_over(holding)
        missing = share - len(staying)
        for place in range(self.partitions):
            number = (rank * self.partitions // len(live) + place) % self.partitions
            if missing > 0 and number not in self._holdings and await self._acquire(number):
                missing -= 1
        await self._renew()

    async def _acquire(self, number: int) -> bool:
        """Take a partition if no other process has it."""
        store, stream = self._place.store, partition_name(self.stream, number)
        lease = self._leases.get(number)
        if lease is None:
            lease_name = f"{stream}/{self.group}"
            lease = self._leases[number] = Lease(store, lease_name, ttl=self.lost_after)
        if not await lease.atry_acquire():
            return False
        consumer = StreamConsumer(store, stream, self.group, self._member, lease.token)
        try:
            await consumer.hold()
        except BaseException as error:
            await lease.arelease()
            if isinstance(error, HeldByAnother):
                return False
            raise
        self._holdings[number] = _Holding(number, consumer, lease)
        self._changed.set()
        return True

    async def _hand_over(self, holding: _Holding) -> None:
        """Let another process have the partition."""
        self._forget(holding)
        try:
            await holding.consumer.leave()
        except HeldByAnother:
            pass
        finally:
            if holding.lease is not None:
                await holding.lease.arelease()

    async def _leave(self) -> None:
        """Let others have everything."""
        for holding in list(self._holdings.values()):
            await self._hand_over(holding)
        if self._beats is not None:
            await self._beats.leave(self._member, PATIENCE)


class RedisStreamSink(Generic[T]):
    """Writes items to a Redis or Valkey stream, in batches: `.sink(stream, batch=(100, 0.1))`.

    While the store is away, or the stream is full, the pipeline waits.
    """

    def __init__(
        self,
        target: Any,
        stream: str,
        *,
        key: Callable[[T], Hashable] | None = None,
        partitions: int | None = None,
        identity: Callable[[T], str] | None = None,
        encode: Callable[[T], str | bytes] | None = None,
        max_length: int = 1_000_000,
    ) -> None:
        """Write to `stream`, or with `partitions` by `key(value)` to one of several streams.

        `target` is a `RedisStore`, a URL, or a client of redis-py. `identity(value)` is the text by
        which a reader recognises a value that was written twice, since an answer was lost. `encode`
        makes text or bytes of a value; without it, it is JSON. A stream of `max_length` entries is
        full: processes that read it remove what all groups have acknowledged.
        """
        self.stream = checked_name(stream, "stream")
        if (key is None) != (partitions is None):
            raise ValueError("key= and partitions= belong together: write both, or none")
        self.partitions = None if partitions is None else check.count("partitions", partitions)
        self.max_length = check.count("max_length", max_length)
        self._key = None if key is None else check.plain_function("key", key)
        self._identity = None if identity is None else check.plain_function("identity", identity)
        self._encode: Callable[[Any], str | bytes]
        self._encode = json.dumps if encode is None else check.plain_function("encode", encode)
        self._place = StorePlace(target, stream)

    def __repr__(self) -> str:
        return f"<RedisStreamSink {self.stream!r}>"

    async def __call__(self, values: Sequence[T]) -> None:
        """Write them; raise `BatchFailed` with those that are not written."""
        failures: dict[int, Exception] = {}
        batches: dict[int | None, dict[int, Fields]] = {}
        for place, value in enumerate(values):
            try:
                partition, fields = self._entry(value)
            except Exception as error:  # noqa: BLE001 - of the user's functions
                failures[place] = error
            else:
                batches.setdefault(partition, {})[place] = fields
        written = await asyncio.gather(*(self._write(*batch) for batch in batches.items()))
        refusal = None
        for batch, refused in zip(batches.values(), written, strict=True):
            if refused is not None:
                refusal = refused
                failures.update(dict.fromkeys(batch, refused))
        if refusal is not None:  # the batch waits: all that is not written is tried again then
            raise BatchFailed(dict.fromkeys(failures, refusal))
        if failures:
            raise BatchFailed(failures)

    async def close(self) -> None:
        """Close the connections, unless they are those of a given store."""
        await self._place.close()

    def _entry(self, value: T) -> tuple[int | None, Fields]:
        fields: dict[str, str | bytes | int] = {VALUE: self._encode(value)}
        if self._identity is not None:
            fields[IDENTITY] = self._identity(value)
        if self._key is None or self.partitions is None:
            return None, fields
        return partition_of(self._key(value), self.partitions), fields

    async def _write(self, partition: int | None, batch: dict[int, Fields]) -> NotBefore | None:
        """Write all to one stream, or return why none was written."""
        stream, store = partition_name(self.stream, partition), self._place.store
        try:
            if await append(store, stream, batch.values(), self.max_length, trims=False):
                return None
        except StoreUnavailable as error:
            return NotBefore(RETRY, str(error))
        return NotBefore(RETRY, f"the stream {stream!r} has {self.max_length} entries")


def _value(fields: dict[str, bytes]) -> Any:
    if VALUE not in fields:
        raise ValueError(f"no field {VALUE!r} among {sorted(fields)}: pass decode= for this stream")
    return json.loads(fields[VALUE])


def _now() -> float:
    return asyncio.get_running_loop().time()
