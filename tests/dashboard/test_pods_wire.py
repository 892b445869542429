"""The format of the views that pods exchange, and how a reader treats bad ones."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
import zlib
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard.pods import store_pods as pods
from seawall.dashboard.pods import wire
from seawall.dashboard.pods.store_pods import StorePods
from seawall.dashboard.pods.wire import (
    LARGEST,
    LONGEST_VIEW,
    PodReading,
    arrange_views,
    is_urgent,
    left_out,
    pack,
    read_reply,
    unpack,
)
from seawall.dashboard.validation import valid_view
from seawall.dashboard.views import View
from seawall.errors import StoreUnavailable
from tests.dashboard.pods_support import guard, view
from tests.support import examples, falsified

SECOND = 1_000_000
NOW = 2_000 * SECOND

NAMES = st.sampled_from(["web", "web (1)", "web (1, aa)", "api", wire.OTHERS])
PODS = st.lists(
    st.builds(
        lambda name, pid, age, every: (name, pid, age, every),
        NAMES,
        st.sampled_from([1, 2]),
        st.integers(0, 80 * SECOND),
        st.sampled_from([0.0, 1.0, 5.0, 1e15]),
    ),
    max_size=8,
).map(
    lambda pods: [
        PodReading(
            f"{'ab'[place % 2] * 2}{place}", NOW - age, valid_view(view(name, pid, every=every))
        )
        for place, (name, pid, age, every) in enumerate(pods)
    ]
)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def plain(told: View) -> Any:
    return json.loads(json.dumps(told))


# One view


@given(st.integers(0, 20), st.floats(0.1, 30.0), st.text(max_size=30))
def test_what_is_packed_is_what_is_unpacked(guards: int, every: float, text: str) -> None:
    """Small views are plain, larger ones compressed; each says when the next follows."""
    told = view(guards=[guard(f"{text}-{place}") for place in range(guards)])
    data = pack(told, every)
    assert plain(unpack(data)) == plain(valid_view({**told, "every": every}))
    assert data[:1] == (wire.PACKED if len(json.dumps(told)) > 2 * wire.WORTH else data[:1])


def test_compressing_pays() -> None:
    """A view of fifty guards takes less than a tenth of its JSON."""
    told = view(guards=[guard(f"guard-{place}") for place in range(50)])
    assert len(pack(told, 1.0)) < len(json.dumps(told)) / 10


def test_a_large_view_is_told_with_less() -> None:
    """Guards in trouble are sent whole; healthy ones are sent without their stack."""
    crowd = [guard(f"guard-{place}", p50=float("nan")) for place in range(200)]
    crowd[150] |= {"tone": "bad"}
    seen = unpack(pack(view("big", guards=crowd), 1.0))
    assert len(json.dumps(seen)) < 2 * LONGEST_VIEW
    assert len(seen["guards"]) == 200
    assert seen["guards"][150]["stack"]
    assert seen["guards"][149]["stack"] == []


def test_a_rushed_view_is_one_like_any_other() -> None:
    """It says that it is to be read before others, packed or not."""
    for told in (view("a"), view("b", guards=[guard(f"g{n}") for n in range(50)])):
        plainly, urgent = pack(told, 1.0), pack(told, 1.0, urgent=True)
        assert (is_urgent(plainly), is_urgent(urgent)) == (False, True)
        assert unpack(plainly) == unpack(urgent)


def test_what_json_has_no_word_for_does_not_keep_a_view_from_being_told() -> None:
    """NaN and infinity are sent as null."""
    seen = unpack(pack(view(guards=[guard(p50=float("nan"))]), 1.0))
    assert seen["guards"][0]["p50"] is None


def refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpack(data)


@given(st.binary(max_size=200), st.sampled_from([b"", b"j", b"z"]))
def test_bytes_of_all_kinds_are_refused(data: bytes, kind: bytes) -> None:
    """With a ValueError, and nothing else."""
    refused(kind + data)
    refused(b"z" + zlib.compress(data))


@given(JSON)
def test_json_of_all_kinds_is_refused(value: Any) -> None:
    """What is no view is none."""
    refused(b"j" + json.dumps(value).encode())


@given(st.data())
def test_a_view_with_something_else_in_it_is_refused_or_still_a_view(data: st.DataObject) -> None:
    """Anything in the place of anything: what comes out can be shown."""
    told: Any = plain(view())
    key = data.draw(st.sampled_from(sorted(told)))
    told[key] = data.draw(JSON)
    try:
        seen = unpack(b"j" + json.dumps(told).encode())
    except ValueError:
        return
    assert plain(valid_view(seen)) == plain(seen)


@pytest.mark.parametrize(
    "data",
    [
        b"j" + b"[" * 200_000,
        b"j" + b'{"a":' * 40_000,
        b"j" + b"9" * 200_000,
        b"j" + json.dumps(view(format=2)).encode(),
        b"j" + json.dumps({**view(), "load": float("inf")}).encode(),
        b"j" + json.dumps(view()).encode().ljust(LARGEST + 1),
        b"z" + zlib.compress(json.dumps(view()).encode())[:-3],
        b"z" + zlib.compress(json.dumps(view()).encode()) + b"more",
    ],
    ids=["deep list", "deep object", "digits", "format", "infinite", "large", "cut", "more"],
)
def test_tricks_are_refused(data: bytes) -> None:
    """Depth, digits, another format, numbers that are none, size, and what is cut or too long."""
    refused(data)


BOMB = b"z" + zlib.compress(b"[" + b" " * 50_000_000 + b"]", 9)


def peak_of_bomb() -> int:
    tracemalloc.start()
    try:
        refused(BOMB)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_bomb_takes_no_more_room_than_a_view() -> None:
    """50 kB that would be 50 MB are given up at the bound."""
    assert len(BOMB) < LARGEST
    assert peak_of_bomb() < 4 * LARGEST


def test_without_the_bound_a_bomb_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: who unpacks all of it has all of it."""
    monkeypatch.setattr(wire, "_inflated", zlib.decompress)
    assert peak_of_bomb() > 50_000_000


# What the store says


@given(JSON | st.lists(st.binary(max_size=5) | st.integers() | st.none(), max_size=8))
def test_an_answer_that_makes_no_sense_is_no_answer(reply: Any) -> None:
    """Either it is one, or the store counts as unavailable."""
    try:
        read = read_reply(reply)
    except StoreUnavailable:
        return
    assert read.now >= 0
    assert all(isinstance(told.data, bytes) for told in read.pods)


# All views side by side


def names_are_distinct(pods: list[PodReading]) -> None:
    names = [one["pod"]["name"] for one in arrange_views(pods, NOW, "web")]
    assert len({*names, "web", wire.OTHERS}) == len(names) + 2


@given(PODS)
def test_names_are_distinct(pods: list[PodReading]) -> None:
    """From each other, from this pod's own, and from what is said of those that are not shown."""
    names_are_distinct(pods)


def test_without_the_process_names_are_not_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a view under the name that its pod gave itself."""
    monkeypatch.setattr(wire, "_distinct", lambda one, *_rest: one.view)
    assert falsified(names_are_distinct, PODS)


@given(PODS, st.booleans())
@examples(200)
def test_all_that_live_are_shown_and_nothing_of_the_gone_as_if_it_were_so_now(
    pods: list[PodReading],
    is_settling: bool,  # noqa: FBT001 - chosen by Hypothesis
) -> None:
    """Pods that published in time are shown; the others with the time they went."""
    views = arrange_views(pods, NOW, "web", is_settling=is_settling)
    live = [one for one in pods if is_settling or not one.late(NOW)]
    assert sum("gone" not in one for one in views) == len(live)
    for one in views:
        assert not one["operable"]
        assert one["age"] >= 0
        assert plain(valid_view(one)) == plain(one)
        if "gone" in one:
            assert one["gone"] == pytest.approx(NOW / 1e6 - one["age"])
            assert "not been heard of" in one["troubles"][0]["what"]
            assert one["guards"][0]["breaker"] is None
            assert not any(one["guards"][0]["rates"].values())
            assert one["guards"][0]["stack"] == []


@pytest.mark.parametrize(("every", "seconds"), [(0.0, 0.5), (1.0, 3.0), (5.0, 13.0), (1e15, 75.5)])
def test_a_pod_is_gone_when_it_should_have_told_twice(every: float, seconds: float) -> None:
    """By its own announced pace, which is bounded."""
    told = valid_view(view(every=every))
    at = NOW - int(seconds * SECOND)
    assert not PodReading("a", at, told).late(NOW)
    assert PodReading("a", at - 1, told).late(NOW)


def test_a_pod_that_was_started_again_stands_for_the_one_that_is_gone() -> None:
    """Under the same name there is one; of two that are gone, the later."""
    old = PodReading("a", NOW - 20 * SECOND, view("web", 1))
    older = PodReading("b", NOW - 30 * SECOND, view("web", 2))
    new = PodReading("c", NOW, view("web", 3))
    (shown,) = arrange_views([old, older, new], NOW, "me")
    assert (shown["pod"]["pid"], "gone" in shown) == (3, False)
    (shown,) = arrange_views([old, older], NOW, "me")
    assert shown["pod"]["pid"] == 1
    assert arrange_views([old, older], NOW, "web") == []


def test_what_is_left_out_is_told() -> None:
    """How many cannot be read, what is wrong with the first, and how many have no place."""
    shown = left_out(5.0, ["it is no JSON", "it is cut"], 36, (1.0, 2.0))
    one, two = valid_view(shown)["troubles"]
    assert one["what"] == "2 pods tell what cannot be read: it is no JSON."
    assert two["what"].startswith("36 more pods")
    assert (one["since"], two["since"]) == (1.0, 2.0)


# Many pods


class _Reader(StorePods):
    """Reads replies that no store gave; each view takes three milliseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._known = {}
        self.cost = 0.0
        self.read: list[str] = []
        now = count()
        monkeypatch.setattr(pods, "thread_time", lambda: next(now) * 0.003)
        monkeypatch.setattr(pods, "_view_or_reason", self._note)

    def __repr__(self) -> str:
        return "<_Reader>"

    def _note(self, data: bytes) -> View | str:
        seen = unpack(data)
        self.read.append(seen["pod"]["name"])
        return seen

    def turn(self, at: int, urgent: str = "") -> list[str]:
        told = [
            wire.PodData(name, at, pack(view(name, at=float(at)), 1.0, urgent=name == urgent))
            for name in "abcde"
        ]
        self.read = []
        seen, unread = asyncio.run(self._read(wire.PodsReply(at, 5, told)))
        assert [(one.pod, one.at) for one in seen] == [(name, at) for name in "abcde"]
        assert unread == []
        return self.read


def test_many_pods_are_read_in_turn_and_the_urgent_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """New ones are all read; then as many as there is time for, and each has its turn."""
    reader = _Reader(monkeypatch)
    assert reader.turn(1) == list("abcde")
    assert [reader.turn(2), reader.turn(3), reader.turn(4)] == [["a", "b"], ["c", "d"], ["e", "a"]]
    assert reader.turn(5, urgent="a") == ["a", "b"]
    assert reader.turn(6, urgent="d")[0] == "d"


def test_without_a_bound_all_pods_are_read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the bound that makes them take turns."""
    monkeypatch.setattr(pods, "READ_FOR", 1.0)
    reader = _Reader(monkeypatch)
    reader.turn(1)
    assert reader.turn(2) == list("abcde")
