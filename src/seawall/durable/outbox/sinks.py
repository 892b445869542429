"""Sinks of a dispatcher: a webhook, a Redis stream, NATS JetStream; any function works, too.

Promises:

- Each sink sends the event's id, by which a receiver recognises duplicates: a webhook as
  webhook-id and Idempotency-Key, a stream as a field, JetStream as Nats-Msg-Id.
- A webhook is signed as Standard Webhooks says (`seawall.durable.webhooks`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from time import time  # noqa: TID251 - a Retry-After may be a date
from typing import Any, Final

from seawall import _checks as check
from seawall import registry
from seawall._redaction import redacted
from seawall.durable.outbox.events import OutboxEvent
from seawall.durable.webhooks import secret_keys, sign_webhook
from seawall.errors import NotDelivered, Overloaded, StoreUnavailable
from seawall.guard import Guard
from seawall.redis.streams import StorePlace, append, partition_name, partition_of
from seawall.wire.idempotency import REPLAYED_HEADER, is_replayed
from seawall.wire.retries import read_retry_after

LONGEST_PAUSE: Final = 300.0
LARGEST_ANSWER: Final = 64 * 1024
"""Maximum bytes of a receiver's response that are read."""
_HEADER_NAME: Final = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_OWN_HEADERS: Final = frozenset(
    {
        "content-type",
        "content-length",
        "host",
        "idempotency-key",
        "connection",
        "transfer-encoding",
        "authorization",
        "cookie",
    }
)
_BYTES: Final = "application/octet-stream"
_JSON: Final = (b"{", b"[", b'"')
"""How a payload of JSON may start."""
_PAUSE_STATUSES: Final = frozenset({429, 503})
_RECEIVER_STATUSES: Final = frozenset({408, 425, 429})
"""Statuses that, like 5xx, describe the receiver's state; other errors concern the event."""


class Webhook:
    """Posts each event to a URL, signed, through a guard."""

    batched = False

    def __init__(
        self,
        url: str,
        *,
        client: Any,
        secret: str | Sequence[str] | None,
        guard: Guard | None = None,
    ) -> None:
        """Post to `url` with `client`, an httpx.AsyncClient; `secret=None` does not sign.

        A secret is `whsec_` and the base64 of 24 to 64 random bytes; while it is replaced, give the
        new one and the old one.

        `guard` protects each post (default: a standard guard with a breaker and a timeout of 10
        seconds). A refusal by it costs an event no attempt, and pauses the dispatcher.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url!r}: write an address, such as 'https://example.com/events'")
        if not hasattr(client, "stream"):
            raise TypeError(f"client={client!r}: pass an httpx.AsyncClient")
        if guard is not None and not isinstance(guard, Guard):
            raise TypeError(f"guard={guard!r}: pass a Guard")
        self.url = url
        self._client = client
        if secret is not None:
            secret_keys(secret)  # raises
        self._secret = secret
        where = f"webhook {url.partition('?')[0]}"
        self._own_guard = guard is None
        self.guard = guard or registry.release(
            Guard.standard(where, on=Exception, timeout=10.0, attempts=1)
        )

    def __repr__(self) -> str:
        return f"<Webhook {redacted(self.url)!r}>"

    def close(self) -> None:
        """Unregister the default guard; the client and a given guard are not closed."""
        if self._own_guard:
            self.guard.close()

    async def __call__(self, event: OutboxEvent) -> None:
        """Post one event, or raise."""
        status = await self.guard.acall(self._post, event)
        if not 200 <= status < 300:  # noqa: PLR2004
            # Outside the guard: an event that is rejected must not open the breaker for others.
            raise NotDelivered(f"the receiver answered {status}")

    async def _post(self, event: OutboxEvent) -> int:
        headers = self._headers(event)
        async with self._client.stream(
            "POST", self.url, content=event.payload, headers=headers, follow_redirects=False
        ) as response:
            status, retry_after = int(response.status_code), response.headers.get("retry-after")
            replayed = is_replayed(response.headers.get(REPLAYED_HEADER))
            await _read(response)
        if replayed:  # the stored response to an earlier delivery: the receiver is healthy now
            return status
        pause = None if retry_after is None else read_retry_after(retry_after, time())
        if status in _PAUSE_STATUSES and pause is not None:
            raise Overloaded(
                f"the receiver answered {status}", retry_after=min(pause, LONGEST_PAUSE)
            )
        if status >= 500 or status in _RECEIVER_STATUSES:  # noqa: PLR2004
            raise NotDelivered(f"the receiver answered {status}")
        return status

    def _headers(self, event: OutboxEvent) -> dict[str, str]:
        own = {
            "Content-Type": "application/json" if event.payload.startswith(_JSON) else _BYTES,
            "Idempotency-Key": f'"{event.id}"',
            **_event_headers(event),
        }
        if self._secret is not None:
            own |= sign_webhook(self._secret, event.payload, message_id=event.id)
        return {**_forwarded_headers(event.headers), **own}


class RedisStream:
    """Appends events to a Redis or Valkey stream, one batch per script call."""

    batched = True

    def __init__(
        self,
        target: Any,
        stream: str,
        *,
        partitions: int | None = None,
        max_length: int = 1_000_000,
    ) -> None:
        """Append to `stream`, and keep about `max_length` events in it, whether read or not.

        `target` is a `RedisStore`, a URL, or a redis-py client. With `partitions`, an aggregate
        goes to one of `stream.0`, `stream.1` and so on, as `RedisStreamSource` reads them.
        """
        if not isinstance(stream, str) or not stream:
            raise ValueError(f"stream={stream!r}: write the stream's key, such as 'orders'")
        self.stream = stream
        self.partitions = None if partitions is None else check.count("partitions", partitions)
        self.max_length = check.count("max_length", max_length)
        self._place = StorePlace(target, stream)

    def __repr__(self) -> str:
        return f"<RedisStream {self.stream!r}>"

    async def close(self) -> None:
        """Close the connections, unless they belong to a given store."""
        await self._place.close()

    async def __call__(self, events: list[OutboxEvent]) -> list[str]:
        """Append the events; return the ids of those that failed, or raise if all did."""
        batches: dict[int | None, list[OutboxEvent]] = {}
        for event in events:
            batches.setdefault(self._partition_of(event), []).append(event)
        failed: list[str] = []
        failure: StoreUnavailable | None = None
        for partition, batch in batches.items():
            try:
                # All or none: an event must not overtake a failed one of its aggregate.
                await append(
                    self._place.store,
                    partition_name(self.stream, partition),
                    map(_fields, batch),
                    self.max_length,
                    trims=True,
                )
            except StoreUnavailable as error:
                failure = error
                failed += [event.id for event in batch]
        if failure is not None and len(failed) == len(events):
            raise failure
        return failed

    def _partition_of(self, event: OutboxEvent) -> int | None:
        if self.partitions is None:
            return None
        return partition_of((event.aggregate, event.aggregate_id), self.partitions)


class JetStream:
    """Publishes each event to NATS JetStream, which drops duplicates by their Nats-Msg-Id.

    It does so within the stream's `duplicate_window`, by default two minutes.
    """

    batched = False

    def __init__(self, context: Any, subject: str = "{aggregate}.{type}") -> None:
        """Publish with `context`, the result of `.jetstream()` of a NATS connection.

        In `subject`, {aggregate}, {aggregate_id} and {type} are replaced by those of the event,
        with an underscore for each character that has a meaning in a subject.
        """
        if not hasattr(context, "publish"):
            raise TypeError(f"context={context!r}: pass a JetStream context of nats-py")
        if not isinstance(subject, str) or not subject or re.search(r"[\s*>]", subject):
            raise ValueError(f"subject={subject!r}: write a subject, such as 'orders.{{type}}'")
        self._context = context
        self.subject = subject

    def __repr__(self) -> str:
        return f"<JetStream {self.subject!r}>"

    async def __call__(self, event: OutboxEvent) -> None:
        """Publish one event, and wait until it is stored."""
        names = {"aggregate": event.aggregate, "aggregate_id": event.aggregate_id}
        names["type"] = event.type
        subject = self.subject
        for name, value in names.items():
            subject = subject.replace(f"{{{name}}}", re.sub(r"[^\w-]", "_", value))
        headers = {
            **_forwarded_headers(event.headers),
            **_event_headers(event),
            "Nats-Msg-Id": event.id,
        }
        await self._context.publish(subject, event.payload, headers=headers)


async def _read(response: Any) -> None:
    """Read a response to its end, so that the connection can be reused.

    Stop if it is larger than `LARGEST_ANSWER`: it may have any size.
    """
    if response.is_stream_consumed:
        return
    size = 0
    async for part in response.aiter_raw():
        size += len(part)
        if size > LARGEST_ANSWER:
            return


def _fields(event: OutboxEvent) -> dict[str, str | bytes | int]:
    return {
        "id": event.id,
        "aggregate": event.aggregate,
        "aggregate_id": event.aggregate_id,
        "sequence": event.sequence,
        "type": event.type,
        "payload": event.payload,
        "headers": json.dumps(event.headers),
    }


def _event_headers(event: OutboxEvent) -> dict[str, str]:
    return {
        "Seawall-Event": _ascii(event.type),
        "Seawall-Aggregate": _ascii(f"{event.aggregate}/{event.aggregate_id}"),
        "Seawall-Sequence": str(event.sequence),
    }


def _forwarded_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the event headers that may be forwarded, without those that sinks set themselves."""
    return {
        name: _ascii(value)
        for name, value in headers.items()
        if _HEADER_NAME.fullmatch(name)
        and name.lower() not in _OWN_HEADERS
        and not name.lower().startswith(("seawall-", "nats-", "webhook-"))
    }


def _ascii(value: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in value).strip()
