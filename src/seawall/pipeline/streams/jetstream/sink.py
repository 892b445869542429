"""NATS JetStream as a sink of pipelines."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, TypeVar

from seawall import _checks as check
from seawall.pipeline.stage import BatchFailed, NotBefore
from seawall.pipeline.streams.jetstream.connection import (
    MOST_PARTITIONS,
    JetStreamConnection,
    JetStreamMessage,
)
from seawall.redis.streams import partition_of

T = TypeVar("T")

PUBLISH_WITHIN: Final = 5.0
"""Seconds for the server to store a message."""
AWAY_PAUSE: Final = 0.5
"""Seconds after which values are published again that the server did not take."""


class JetStreamSink(Generic[T]):
    """Publishes values to a stream, many at once; a sink for `batch=`.

    A value that the server does not take because it is away waits. One that it refuses has failed.
    """

    def __init__(
        self,
        server: Any,
        subject: str,
        *,
        key: Callable[[T], Hashable] | None = None,
        partitions: int | None = None,
        identity: Callable[[T], str] | None = None,
        encode: Callable[[T], bytes] | None = None,
    ) -> None:
        """Publish to `subject` by `server`, which is what `JetStreamSource` takes.

        With `partitions=16` and `subject="orders.{partition}"`, the partition is that of
        `key(value)`. Values with the same key are published one after the other, in their order.

        The server drops a message whose `identity(value)` it has seen within the stream's
        `duplicate_window`. `encode(value)` makes the bytes: without it bytes and texts are sent as
        they are, other values as JSON.
        """
        if not isinstance(subject, str) or not subject or re.search(r"[\s*>]", subject):
            raise ValueError(f"subject={subject!r}: write a subject, such as 'orders.made'")
        if (partitions is not None) != ("{partition}" in subject):
            raise ValueError(
                f"subject={subject!r}, partitions={partitions!r}: write both, such as"
                " 'orders.{partition}' and 16, or neither"
            )
        if partitions is not None:
            check.count("partitions", partitions, maximum=MOST_PARTITIONS)
            if key is None:
                raise ValueError(f"partitions={partitions!r}: write key=, a function of a value")
        for name, function in (("key", key), ("identity", identity), ("encode", encode)):
            if function is not None:
                check.plain_function(name, function)
        self.subject = subject
        self.partitions = partitions
        self._key = key
        self._identity = identity
        self._encode = as_bytes if encode is None else encode
        self._connection = JetStreamConnection(server, "JetStreamSink")

    def __repr__(self) -> str:
        return f"<JetStreamSink {self.subject!r}>"

    async def __call__(self, values: list[T]) -> None:
        """Publish all values, or raise `BatchFailed` with those that are not stored."""
        if not isinstance(values, list):
            raise TypeError("JetStreamSink takes a list: write .sink(..., batch=(100, 0.1))")
        try:
            async with asyncio.timeout(PUBLISH_WITHIN):
                client = await self._connection.client()
        except TimeoutError as error:
            raise NotBefore(AWAY_PAUSE) from error
        context = client.jetstream(timeout=PUBLISH_WITHIN)
        failures: dict[int, Exception] = {}
        groups: dict[Hashable, list[int]] = {}
        for place, value in enumerate(values):
            try:
                group = (place,) if self._key is None else self._key(value)
                groups.setdefault(group, []).append(place)
            except Exception as error:  # noqa: BLE001 - of the user's function
                failures[place] = error
        refusals = await asyncio.gather(
            *(self._publish(context, values, places, failures) for places in groups.values())
        )
        refusal = next((refusal for refusal in refusals if refusal is not None), None)
        if refusal is not None:  # the batch waits: all that is not stored is tried again then
            raise BatchFailed(dict.fromkeys(failures, refusal))
        if failures:
            raise BatchFailed(failures)

    async def _publish(
        self, context: Any, values: list[T], places: list[int], failures: dict[int, Exception]
    ) -> NotBefore | None:
        """Publish values of one key, each after the one before it is stored.

        Return why those that are left have to wait, if they have.
        """
        for turn, place in enumerate(places):
            try:
                subject, data, headers = self._message(values[place])
                await context.publish(subject, data, headers=headers)
            except Exception as error:  # noqa: BLE001 - of the user's functions, or of the server
                failures[place] = error
                if _is_away(error):
                    refusal = NotBefore(AWAY_PAUSE)
                    refusal.__cause__ = error
                    failures.update(dict.fromkeys(places[turn:], refusal))
                    return refusal
        return None

    def _message(self, value: T) -> tuple[str, bytes, dict[str, str] | None]:
        subject = self.subject
        if self._key is not None and self.partitions is not None:
            number = partition_of(self._key(value), self.partitions)
            subject = subject.replace("{partition}", str(number))
        headers = None if self._identity is None else {"Nats-Msg-Id": self._identity(value)}
        return subject, self._encode(value), headers

    async def close(self) -> None:
        """Close the connection, unless it is the user's."""
        await self._connection.close()


def as_bytes(value: Any) -> bytes:
    """Return bytes and texts as they are, the data of a message, and other values as JSON."""
    if isinstance(value, JetStreamMessage):
        value = value.data
    if isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else json.dumps(value)).encode()


def _is_away(error: Exception) -> bool:
    """Return whether the server did not answer, or not yet; else it has refused the message."""
    from nats.errors import BadSubjectError, Error, MaxPayloadError
    from nats.js.errors import APIError

    if isinstance(error, APIError):
        return (error.code or 0) >= 500  # noqa: PLR2004 - as in HTTP
    if isinstance(error, BadSubjectError | MaxPayloadError):
        return False
    return isinstance(error, Error | TimeoutError | OSError)
