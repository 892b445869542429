"""Wire format of a pod's view for other pods, and how they read it. Pure.

Data from the store is untrusted.

Promises:
- Whatever a pod writes, it costs the reader a bounded number of bytes and at most its own place on
  the page.
- Names of pods are distinct.
- A silent pod is reported as gone, and none of its data is shown as current.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, count
from math import ceil
from typing import Any, Final, NamedTuple

from seawall.dashboard.bounds import LONGEST_NAME, shown
from seawall.dashboard.validation import parse_json, valid_view
from seawall.dashboard.view_writer import fit_view
from seawall.dashboard.views import FORMAT, Pod, PodTrouble, Rates, View
from seawall.errors import StoreUnavailable
from seawall.registry import plain

LARGEST: Final = 256 * 1024
"""Maximum size of a view in bytes, compressed or not."""
WORTH: Final = 1024
"""Size in bytes from which a view is compressed."""
MISSED: Final = 2.5
"""Number of missed updates after which a pod counts as gone."""
GRACE: Final = 0.5
"""Additional seconds that an update may be late."""
SLOWEST: Final = 30.0
"""Maximum number of seconds between two views of a pod; larger claims are reduced to it."""
EXACT: Final = 2**53
PLAIN: Final = b"j"
PACKED: Final = b"z"
"""Formats of a view; uppercase after a rare event, so that it is read immediately."""
LONGEST_VIEW: Final = 64 * 1024
"""Maximum size of a view in bytes, before compression, that other pods get in full: each of them
reads it each second. Of larger ones, healthy parts are sent in less detail.
"""

OTHERS: Final = "other pods"
"""Name under which pods that are not shown are reported."""


def pack(view: View, every: float, *, urgent: bool = False) -> bytes:
    """Serialize `view`; the next one follows after `every` seconds.

    A view that is `urgent` is read before others.
    """
    data = _json({**view, "every": every})
    if len(data) > LONGEST_VIEW:
        data = _json(fit_view(json.loads(data), LONGEST_VIEW)[0])
    plain, packed = (PLAIN.upper(), PACKED.upper()) if urgent else (PLAIN, PACKED)
    small = packed + zlib.compress(data, 1) if len(data) >= WORTH else data
    return small if len(small) < len(data) else plain + data


def is_urgent(data: bytes) -> bool:
    """Return whether the pod that wrote this reports a rare event."""
    return data[:1].isupper()


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError):  # a number that JSON cannot represent, or no plain data at all
        return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def unpack(data: bytes) -> View:
    """Parse and validate a view; raise ValueError, and nothing else, if it is invalid."""
    if not data or len(data) > LARGEST:
        raise ValueError(f"it is larger than {LARGEST // 1024} KiB")
    kind, body = data[:1].lower(), data[1:]
    if kind == PACKED:
        body = _inflated(body)
    elif kind != PLAIN:
        raise ValueError("it is neither JSON nor packed")
    try:
        value = parse_json(body)
    except ValueError:
        raise ValueError("it is no JSON that can be read") from None
    view = valid_view(value)
    view.pop("age", None)  # its age, and whether it is gone, are not for the pod to decide
    view.pop("gone", None)
    return view


def _inflated(data: bytes) -> bytes:
    inflating = zlib.decompressobj()
    try:
        whole = inflating.decompress(data, LARGEST)
    except zlib.error:
        raise ValueError("it is not packed as it should be") from None
    if not inflating.eof or inflating.unused_data:
        raise ValueError(f"unpacked it is larger than {LARGEST // 1024} KiB, or cut off")
    return whole


class PodData(NamedTuple):
    """The data of one pod, and its time in microseconds of the store's clock."""

    pod: str
    at: int
    data: bytes


class PodsReply(NamedTuple):
    """A reply of the store: its time, the number of other pods, and the data of those shown."""

    now: int
    others: int
    pods: list[PodData]


def read_reply(reply: Any) -> PodsReply:
    """Parse the reply of the script, or raise `StoreUnavailable`: a store may return anything."""
    if not isinstance(reply, list) or len(reply) < 2 or (len(reply) - 2) % 3:  # noqa: PLR2004
        raise StoreUnavailable("the store's answer makes no sense")
    now, others = _whole(reply[0]), _whole(reply[1])
    pods = []
    for place in range(2, len(reply), 3):
        pod, at, data = reply[place : place + 3]
        if not isinstance(pod, bytes) or not isinstance(data, bytes):
            raise StoreUnavailable("the store's answer makes no sense")
        pods.append(PodData(shown(pod[:64].decode("utf-8", "replace"), 64), _whole(at), data))
    return PodsReply(now, others, pods)


def _whole(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if not 0 <= number < EXACT:
        raise StoreUnavailable("the store's answer makes no sense")
    return number


class PodReading(NamedTuple):
    """A pod whose view could be read."""

    pod: str
    at: int
    view: View

    def late(self, now: int) -> bool:
        """Return whether its next update is overdue."""
        every = min(SLOWEST, self.view["every"])
        return now - self.at > (MISSED * every + GRACE) * 1e6


def arrange_views(
    seen: Iterable[PodReading], now: int, own: str | None, *, is_settling: bool = False
) -> list[View]:
    """Return the views of other pods, by name, for display in a pod called `own`.

    With `is_settling`, no pod counts as gone, since the store itself was away.
    """
    live: list[PodReading] = []
    late: dict[str, PodReading] = {}
    for one in sorted(seen, key=lambda one: (one.at, one.pod)):
        if is_settling or not one.late(now):
            live.append(one)
        else:
            late[one.view["pod"]["name"]] = one
    names = Counter(one.view["pod"]["name"] for one in live)
    names.update([OTHERS] if own is None else [OTHERS, own])
    # A pod that was restarted under the same name replaces the one that is gone.
    gone = [_gone(one, now) for name, one in late.items() if name not in names]
    taken = {*names, *late}
    in_order = sorted(live, key=lambda one: one.pod)  # the same names each time
    views = [*(_distinct(one, names, taken, now) for one in in_order), *gone]
    return sorted(views, key=lambda view: view["pod"]["name"])


def _distinct(one: PodReading, names: Counter[str], taken: set[str], now: int) -> View:
    """Return a view with a unique name, made so by its process id or its pod id."""
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


def _gone(one: PodReading, now: int) -> View:
    """Return the last view of a pod that is gone: its guards, without their old state."""
    view, age, since = one.view, (now - one.at) / 1e6, one.at / 1e6
    name = view["pod"]["name"]
    trouble = _trouble(
        f"pod-gone/{name}",
        name,
        f"This pod has not been heard of for {ceil(age)} s.",
        "It was killed, it hangs, or it cannot reach the store.",
        since,
    )
    nothing: Any = dict.fromkeys(Rates.__annotations__, 0.0)
    guards: list[Any] = [
        {
            **guard,
            "tone": "off",
            "state": "not heard of",
            "breaker": None,
            "rates": nothing,
            "error_ratio": 0.0,
            "last_error": "",
            **dict.fromkeys(("p50", "p95", "p99"), None),
            "stack": [],
        }
        for guard in view["guards"]
    ]
    bare = _bare(view["pod"], view["at"], view["every"], [trouble])
    return {**bare, "guards": guards, "happenings": view["happenings"], "age": age, "gone": since}


def left_out(now: float, unread: Sequence[str], more: int, since: tuple[float, float]) -> View:
    """Return a view that reports pods that are not shown: `unread` has the reason for each.

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


def _bare(pod: Pod, at: float, every: float, troubles: list[PodTrouble]) -> View:
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


def _trouble(name: str, where: str, what: str, advice: str, since: float) -> PodTrouble:
    tone: Any = "bad" if name.startswith("pod-gone") else "warn"
    return {
        "id": shown(name),
        "tone": tone,
        "where": where,
        "what": shown(what),
        "advice": advice,
        "since": since,
    }
