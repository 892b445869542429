"""The heartbeats of a group of pods, on Redis or Valkey: `BeatShare`.

Promises:
- The server's clock dates them all, so pods may disagree about time.
- What is kept is bounded, and expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seawall.errors import StoreUnavailable
from seawall.models.rate.rates import EXACT
from seawall.runtime.member_share import MEMORY, Beat, Sighting

if TYPE_CHECKING:
    from seawall.redis._store import RedisStore


class SharedHeartbeats:
    """The heartbeats of one group."""

    def __init__(self, store: RedisStore, group: str) -> None:
        """Prepare the keys; nothing is written yet."""
        self._store = store
        self._keys = [store.key("members", group), store.key("members", group, "left")]

    async def beat(self, member: str, most: int, patience: float) -> Sighting:
        """Write a heartbeat of `member`, and return those of at most `most` members."""
        return _read(await self._call("beat", member, most, patience))

    async def leave(self, member: str, patience: float) -> None:
        """Record that `member` leaves."""
        await self._call("leave", member, 1, patience)

    async def _call(self, what: str, member: str, most: int, patience: float) -> Any:
        args: list[str | int] = [what, member, round(MEMORY * 1e6), most]
        return await self._store.acall("beats", self._keys, args, patience)


def _read(reply: Any) -> Sighting:
    """Return the script's reply, or raise: a store may answer anything."""
    try:
        now, flat, left = int(reply[0]), reply[1], reply[2]
        names, stamps = flat[::2], [float(stamp) for stamp in flat[1::2]]
        beats = [
            Beat(name.decode("utf-8", "replace"), stamp, max(0.0, (now - stamp) / 1e6))
            for name, stamp in zip(names, stamps, strict=True)
        ]
        sighting = Sighting(beats, [name.decode("utf-8", "replace") for name in left])
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise StoreUnavailable("the store's answer makes no sense") from None
    if not all(0 <= stamp < EXACT for stamp in (now, *stamps)):
        raise StoreUnavailable("the store's answer makes no sense")
    return sighting
