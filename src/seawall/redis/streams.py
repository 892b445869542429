"""Streams on Redis or Valkey: writing to one, and one consumer of a group that reads it.

The stream is an ordinary one: other programs may write to it and read it, too. A consumer is either
one of several that share the entries, or holds the stream alone, with a fencing token: then the
store accepts nothing from a holder with a lower token.

Promises:
- Every command may be repeated: a lost answer costs only a repetition. Only appended entries may be
  there twice.
- An entry is pending at one consumer until it is acknowledged. Its deliveries are counted; a
  returned entry's last delivery is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from seawall.redis.connections import valid_reply
from seawall.redis.keys import key_part
from seawall.redis.store import RedisStore, core_of

if TYPE_CHECKING:
    from collections.abc import Hashable

    from seawall.redis.connections import Argument

PATIENCE: Final = 3.0
"""Seconds for an answer: no caller is in a hurry for it."""
AT_ONCE: Final = 500
"""Maximum entries in one call: a script must not block the server for long."""
MOST_TAKEN_OVER: Final = 100
"""Maximum entries of silent consumers that one consumer takes over, so that others get some too."""

_ABOUT: Final = " about a stream"

Fields = Mapping[str, str | bytes | int]


class StreamEntry(NamedTuple):
    """An entry of a stream."""

    id: str
    fields: dict[str, bytes]


class HeldByAnother(Exception):
    """Another consumer with a higher token holds the stream."""


def partition_of(key: Hashable, partitions: int) -> int:
    """Return which of `partitions` partitions a key belongs to: the same in every process."""
    digest = blake2b(key_part(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % partitions


def partition_name(stream: str, partition: int | None) -> str:
    """Return the key of a partition of `stream`; None for a stream without partitions."""
    return stream if partition is None else f"{stream}.{partition}"


async def append(
    store: RedisStore, stream: str, entries: Iterable[Fields], most: int, *, trims: bool
) -> bool:
    """Write all `entries`, or none and return False if the stream has `most` entries already.

    With `trims` it is never full: the oldest entries are removed, whether they were read or not.
    """
    args: list[Argument] = ["append", most, int(trims)]
    for fields in entries:
        args += [2 * len(fields), *chain.from_iterable(fields.items())]
    reply = await core_of(store).acall("streams", [stream], args, PATIENCE)
    return bool(_status(reply))


class StorePlace:
    """The store of a stream: a given one, or its own, made on demand."""

    def __init__(self, target: Any, stream: str) -> None:
        """Use `target`: a `RedisStore`, a URL, or a client of redis-py."""
        self._target = target
        self._name = f"stream {stream}"
        self._is_given = isinstance(target, RedisStore)
        self._store: RedisStore | None = target if self._is_given else self._made()

    def _made(self) -> RedisStore:
        return RedisStore(self._target, name=self._name, timeout=PATIENCE)

    @property
    def store(self) -> RedisStore:
        """The store; its own one is made again after it was closed."""
        if self._store is None:
            self._store = self._made()
        return self._store

    async def close(self) -> None:
        """Close its own store; leave a given one open."""
        if self._store is not None and not self._is_given:
            own, self._store = self._store, None
            await own.aclose()


class StreamConsumer:
    """One consumer of a group; with a `token` it is the only one, and fenced."""

    def __init__(
        self, store: RedisStore, stream: str, group: str, name: str, token: int | None = None
    ) -> None:
        """Send nothing yet; with a token, call `hold` first."""
        self.stream = stream
        self.token = token
        self.name = name if token is None else f"{token}-{name}"
        self._core = core_of(store)
        self._group = group

    async def hold(self) -> None:
        """Take over all pending entries, and shut out every consumer with a lower token."""
        await self._call("hold")

    async def read(self, most: int) -> list[StreamEntry]:
        """Return up to `most` entries that the group has not delivered before."""
        return _entries(await self._call("read", most))

    async def pending(self, lost_after: float) -> list[tuple[str, int]]:
        """Return the id and the number of deliveries of every entry that is pending here.

        Entries of consumers that were silent for `lost_after` seconds are taken over first.
        """
        reply = await self._call("list", round(lost_after * 1000), MOST_TAKEN_OVER)
        with valid_reply(_ABOUT):
            return [(str(id_, "ascii"), int(number)) for id_, number in reply]

    async def take(self, wanted: Sequence[tuple[str, int]]) -> list[StreamEntry]:
        """Return the entries with these ids, and record the number of deliveries of each.

        Entries that are no longer pending here are missing; those that were removed from the stream
        have no fields.
        """
        args: list[Argument] = []
        for id_, delivery in wanted:
            args += [id_, delivery]
        return _entries(await self._call("take", *args))

    async def acknowledge(self, ids: Sequence[str]) -> None:
        """Acknowledge these entries: they are never delivered again."""
        for first in range(0, len(ids), AT_ONCE):
            await self._call("ack", *ids[first : first + AT_ONCE])

    async def give_back(self, ids: Sequence[str]) -> None:
        """Release these entries to other consumers immediately."""
        for first in range(0, len(ids), AT_ONCE):
            await self._call("return", *ids[first : first + AT_ONCE])

    async def renew(self, lost_after: float) -> int | None:
        """Keep pending entries; remove dead consumers, and entries that all groups acknowledged.

        Return how many entries the group has not read, None if the server does not know.
        """
        unread = await self._call("renew", round(lost_after * 1000))
        return unread if isinstance(unread, int) and unread >= 0 else None

    async def leave(self) -> None:
        """Give back all pending entries and leave the group."""
        await self._call("leave")

    async def _call(self, command: str, *args: Argument) -> Any:
        fenced = int(self.token is not None)
        given: list[Argument] = [command, self._group, self.name, fenced, *args]
        reply = await self._core.acall("streams", [self.stream], given, PATIENCE)
        if _status(reply) < 0:
            raise HeldByAnother(f"another process holds the stream {self.stream!r}")
        return reply[1] if len(reply) > 1 else None


@valid_reply(_ABOUT)
def _status(reply: Any) -> int:
    return int(reply[0])


@valid_reply(_ABOUT)
def _entries(reply: Any) -> list[StreamEntry]:
    return [StreamEntry(str(id_, "ascii"), _fields(flat)) for id_, flat in reply]


def _fields(flat: list[bytes]) -> dict[str, bytes]:
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode("utf-8", "replace"): value for name, value in pairs}
