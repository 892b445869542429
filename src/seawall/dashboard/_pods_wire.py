"""How a pod's view is told to the others, and what they make of it: pure.

What comes out of the store is hostile. Promises: whatever a pod told, it costs the reader a bounded
number of bytes and at most its own place on the page; names of pods are distinct; a pod that is not
heard of is told to be gone, and nothing of it is shown as if it were so now.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count
from math import ceil
from typing import Any, Final, NamedTuple, NoReturn

from seawall.dashboard._bounds import LONGEST_NAME, shown
from seawall.dashboard._fitting import fitted
from seawall.dashboard._validate import valid_view
from seawall.dashboard.views import FORMAT, Pod, Trouble, View
from seawall.errors import StoreUnavailable
from seawall.registry import plain

LARGEST: Final = 256 * 1024
"""Bytes of a view, packed or not."""

WORTH: Final = 1024
"""From so many bytes on a view is compressed."""

MISSED: Final = 2.5
"""So many times that a pod should have told its view by now, and it counts as gone."""

GRACE: Final = 0.5
"""Seconds that it may be late beside."""

SLOWEST: Final = 30.0
"""Seconds between two views of a pod; who says more is not believed."""

EXACT: Final = 2**53

PLAIN: Final = b"j"
PACKED: Final = b"z"
"""How a view is written; in capitals if something rare has happened, which is read at once."""

TOLD: Final = 64 * 1024
"""Bytes of a view, before it is packed, up to which other pods are sent all of it: each of them
reads it each second. Of more, what is well is sent with less."""

OTHERS: Final = "other pods"
"""Where it is told what is not shown of them."""


# One view


def pack(view: View, every: float, *, rushed: bool = False) -> bytes:
    """Return the bytes of `view`, the next of which follows after `every` seconds.

    One that is `rushed` is read before others.
    """
    data = _json({**view, "every": every})
    if len(data) > TOLD:
        data = _json(fitted(json.loads(data), TOLD)[0])
    plain, packed = (PLAIN.upper(), PACKED.upper()) if rushed else (PLAIN, PACKED)
    small = packed + zlib.compress(data, 1) if len(data) >= WORTH else data
    return small if len(small) < len(data) else plain + data


def is_rushed(data: bytes) -> bool:
    """Tell whether the pod that wrote this has something rare to tell."""
    return data[:1].isupper()


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError):  # a number that JSON has no word for, or no plain data at all
        return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def unpack(data: bytes) -> View:
    """Return the view that `data` tells; raise ValueError, and nothing else, if it tells none."""
    if not data or len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST // 1024} KiB")
    kind, told = data[:1].lower(), data[1:]
    if kind == PACKED:
        told = _inflated(told)
    elif kind != PLAIN:
        raise ValueError("it is neither JSON nor packed")
    try:
        value = json.loads(told, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ValueError("it is no JSON that can be read") from None
    view = valid_view(value)
    view.pop("age", None)  # how old it is, and whether it is gone, is not for it to say
    view.pop("gone", None)
    return view


def _inflated(data: bytes) -> bytes:
    """Return what `data` is packed from, and never more than `LARGEST` bytes of it."""
    inflating = zlib.decompressobj()
    try:
        whole = inflating.decompress(data, LARGEST)
    except zlib.error:
        raise ValueError("it is not packed as it should be") from None
    if not inflating.eof or inflating.unused_data:
        raise ValueError(f"unpacked it is larger than {LARGEST // 1024} KiB, or cut off")
    return whole


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number")


# What the store says of all


class Told(NamedTuple):
    """What one pod told, and when: microseconds of the store's clock."""

    pod: str
    at: int
    data: bytes


class Reply(NamedTuple):
    """What the store says: when, how many other pods there are, and what those shown told."""

    now: int
    others: int
    told: list[Told]


def read_reply(reply: Any) -> Reply:
    """Return what the script said, or raise `StoreUnavailable`: a store may say anything."""
    if not isinstance(reply, list) or len(reply) < 2 or (len(reply) - 2) % 3:  # noqa: PLR2004
        raise StoreUnavailable("the store's answer makes no sense")
    now, others = _whole(reply[0]), _whole(reply[1])
    told = []
    for place in range(2, len(reply), 3):
        pod, at, data = reply[place : place + 3]
        if not isinstance(pod, bytes) or not isinstance(data, bytes):
            raise StoreUnavailable("the store's answer makes no sense")
        told.append(Told(shown(pod[:64].decode("utf-8", "replace"), 64), _whole(at), data))
    return Reply(now, others, told)


def _whole(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < EXACT:
        raise StoreUnavailable("the store's answer makes no sense")
    return number


# All views, side by side


class Seen(NamedTuple):
    """A pod whose view could be read."""

    pod: str
    at: int
    view: View

    def late(self, now: int) -> bool:
        """Tell whether it should have been heard of again by now."""
        every = min(SLOWEST, self.view["every"])
        return now - self.at > (MISSED * every + GRACE) * 1e6


def arranged(
    seen: Iterable[Seen], now: int, own: str | None, *, believing: bool = False
) -> list[View]:
    """Return the views of other pods, by name, as they are to be shown in a pod called `own`.

    `believing`: nobody is taken for gone, since the store was away itself.
    """
    live: list[Seen] = []
    late: dict[str, Seen] = {}
    for one in sorted(seen, key=lambda one: (one.at, one.pod)):
        if believing or not one.late(now):
            live.append(one)
        else:
            late[one.view["pod"]["name"]] = one
    names = Counter(one.view["pod"]["name"] for one in live)
    names.update([OTHERS] if own is None else [OTHERS, own])
    # A pod that was started again under the same name stands for the one that is gone.
    gone = [_gone(one, now) for name, one in late.items() if name not in names]
    taken = {*names, *late}
    in_order = sorted(live, key=lambda one: one.pod)  # the same names each time
    views = [*(_distinct(one, names, taken, now) for one in in_order), *gone]
    return sorted(views, key=lambda view: view["pod"]["name"])


def _distinct(one: Seen, names: Counter[str], taken: set[str], now: int) -> View:
    """Return a view whose name no other has: by its process, or where that does not do its pod."""
    pod = one.view["pod"]
    name = pod["name"]
    if names[name] > 1:
        more = (f" ({pod['pid']})", f" ({pod['pid']}, {one.pod[:8]})")
        further = (f" ({pod['pid']}, {one.pod[:8]}, {number})" for number in count(2))
        tries = (name[: LONGEST_NAME - len(end)] + end for end in chain(more, further))
        name = next(made for made in tries if made not in taken)
        taken.add(name)
    age = max(0.0, (now - one.at) / 1e6)
    return {**one.view, "pod": {**pod, "name": name}, "operable": False, "age": age}


def _gone(one: Seen, now: int) -> View:
    """Return the last view of a pod that is gone: which guards it had, and nothing as it was."""
    view, age, since = one.view, (now - one.at) / 1e6, one.at / 1e6
    name = view["pod"]["name"]
    trouble = _trouble(
        f"pod-gone/{name}",
        name,
        f"This pod has not been heard of for {ceil(age)} s.",
        "It was killed, it hangs, or it cannot reach the store.",
        since,
    )
    nothing: Any = dict.fromkeys(
        ("succeeded", "degraded", "failed", "rejected", "cancelled", "retries"), 0.0
    )
    guards: list[Any] = [
        {
            **guard,
            "tone": "off",
            "state": "not heard of",
            "breaker": None,
            "rates": nothing,
            "error_ratio": 0.0,
            "last_error": "",
            "p50": None,
            "p95": None,
            "p99": None,
            "stack": [],
        }
        for guard in view["guards"]
    ]
    bare = _bare(view["pod"], view["at"], view["every"], [trouble])
    return {
        **bare,
        "guards": guards,
        "happenings": view["happenings"],
        "age": age,
        "gone": since,
    }


def left_out(now: float, unread: Sequence[str], more: int, since: tuple[float, float]) -> View:
    """Return a view that tells why pods are not shown: `unread` says what is wrong with each.

    `since`: when the first could not be read, and when the first had no place.
    """
    troubles = []
    if unread:
        troubles.append(
            _trouble(
                "pods-unread",
                OTHERS,
                f"{len(unread)} pods tell what cannot be read: {unread[0]}.",
                "Do all run the same version of seawall? Does anybody else write to the store?",
                since[0],
            )
        )
    if more:
        troubles.append(
            _trouble(
                "pods-not-shown",
                OTHERS,
                f"{more} more pods share the store than can be shown here.",
                "Their metrics tell of all of them.",
                since[1],
            )
        )
    pod: Pod = {"name": OTHERS, "host": "", "pid": 0, "version": "", "up_seconds": 0.0}
    return _bare(pod, now, 1.0, troubles)


def _bare(pod: Pod, at: float, every: float, troubles: list[Trouble]) -> View:
    return {
        "format": FORMAT,
        "pod": pod,
        "at": at,
        "every": every,
        "load": 0.0,
        "operable": False,
        "troubles": troubles,
        "guards": [],
        "sections": {},
        "happenings": [],
    }


def _trouble(name: str, where: str, what: str, advice: str, since: float) -> Trouble:
    tone: Any = "bad" if name.startswith("pod-gone") else "warn"
    return {
        "id": shown(name),
        "tone": tone,
        "where": where,
        "what": shown(what),
        "advice": advice,
        "since": since,
    }
