"""Optimistic updates, and stripes that divide keys among a fixed number of parts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar
from zlib import crc32

from seawall import _checks as check
from seawall.errors import Contended, DeadlineExceeded, add_note
from seawall.models.backoff import Backoff, Rng, full_jitter

T = TypeVar("T")

QUICK: Final = full_jitter(0.005, cap=0.5)  # for conflicts that last as long as a write
DECIMAL_BITS: Final = 2048  # maximum bits of a number as a decimal: Python refuses more


def drop(awaitable: Any) -> None:
    """Close an awaitable that cannot be awaited, so that Python does not warn about it."""
    if hasattr(awaitable, "close"):
        awaitable.close()


class Lost:
    """The result of a read or a write that lost against a concurrent update."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


class OptimisticUpdate(NamedTuple):
    """The functions and settings of an optimistic update."""

    read: Callable[[], Any]
    change: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    attempts: int
    backoff: Backoff


def optimistic_steps(
    update: OptimisticUpdate, rng: Rng, now: Callable[[], float], left: Callable[[], float]
) -> Generator[float | Callable[[], Any], Any, Any]:
    """Yield pauses and functions to call; return the value written. `left()` is the time left."""
    began = now()
    if left() <= 0:
        raise DeadlineExceeded("the deadline passed before the update began")
    pauses = update.backoff.delays(rng)
    for attempt in range(1, update.attempts + 1):
        found = yield update.read
        if isinstance(found, Lost):
            lost = found
        else:
            value, version = _pair(found)
            new = update.change(value)
            if hasattr(new, "__await__"):
                drop(new)
                raise TypeError("change() returned an awaitable: make it a plain function")
            verdict = _verdict((yield partial(update.write, new, version)))
            if verdict is None:
                return new
            lost = verdict
        late = False
        if attempt == update.attempts:
            break
        pause = next(pauses)
        late = pause >= left()
        if not late:
            yield pause
            late = left() <= 0  # the pause may have taken longer than planned
        if late:
            break
    why = "the deadline leaves no time to try again" if late else "others were faster each time"
    error = Contended(f"nothing was changed: {why}")
    times = "1 attempt" if attempt == 1 else f"{attempt} attempts"
    add_note(error, f"{times} in {now() - began:.3g} s", "attempt")
    try:
        raise error from lost.error
    finally:
        del error, lost  # Break the reference cycle between the exception and this frame.


def _pair(found: Any) -> tuple[Any, Any]:
    try:
        value, version = found
    except (TypeError, ValueError):
        raise TypeError(f"read() returned {found!r}: return (value, version)") from None
    return value, version


def _verdict(written: Any) -> Lost | None:
    """Return None if the value was written, else the conflict."""
    if isinstance(written, Lost):
        return written
    if not isinstance(written, int) or written < 0:
        raise TypeError(
            f"write() returned {written!r}: return whether it was written, or how many rows were"
        )
    return None if written else Lost()


class Stripes(Generic[T]):
    """A fixed number of parts, created once, among which any number of keys is divided.

    A key maps to the same part in every process and every version: `hash` is not used. Two keys may
    share a part; with n parts, two given keys do so with a probability of 1/n.
    """

    def __init__(self, n: int, make: Callable[[], T]) -> None:
        check.plain_function("make", make)
        self._parts = tuple(make() for _ in range(check.count("n", n)))

    def __getitem__(self, key: Hashable) -> T:
        return self._parts[self.index(key)]

    def __iter__(self) -> Iterator[T]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __repr__(self) -> str:
        return f"<Stripes {len(self)} of {type(self._parts[0]).__name__}>"

    def index(self, key: Hashable) -> int:
        """Return the index of the part of `key`: a str, bytes, int, None, or a tuple of these."""
        return stripe_of(key, len(self._parts))


def stripe_of(key: Hashable, n: int) -> int:
    """Return a number from 0 to n - 1 that depends only on `key` and `n`."""
    return crc32(_encoded(key)) % n


def _encoded(key: Hashable) -> bytes:
    """Return bytes that are equal exactly for equal keys."""
    if isinstance(key, str):
        return b"s" + key.encode("utf-8", "surrogatepass")
    if isinstance(key, bytes):
        return b"b" + key
    if isinstance(key, int):
        if key.bit_length() <= DECIMAL_BITS:
            return b"i%d" % key
        return b"I" + key.to_bytes(key.bit_length() // 8 + 1, "big", signed=True)
    if key is None:
        return b"n"
    if isinstance(key, tuple):
        parts = [_encoded(part) for part in key]
        return b"t" + b"".join(b"%d:%s" % (len(part), part) for part in parts)
    raise TypeError(
        f"key={key!r}: write a str, bytes, int, None or a tuple of these, such as str(key)"
    )
