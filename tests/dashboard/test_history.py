from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard import history as history_module
from seawall.dashboard.bounds import MOST_GUARDS, MOST_TRACKS
from seawall.dashboard.history import CoarseHistory, HistoryStep, PodHistory
from tests.dashboard.views_support import Pair, everything
from tests.support import falsified

pytestmark = pytest.mark.usefixtures("nobody_else")


def _view(at: float, guards: dict[str, int], rows: dict[str, int | None]) -> Any:
    """Return what of a view is followed."""
    return {
        "at": at,
        "guards": [
            {
                "name": name,
                "rates": dict.fromkeys(("succeeded", "degraded", "failed", "rejected"), number),
                "p50": number,
                "p99": number,
                "breaker": "closed",
            }
            for name, number in guards.items()
        ],
        "sections": {"All": [{"kind": "k", "name": n, "track": v} for n, v in rows.items()]},
    }


NAMES = st.sampled_from("abcde")
STEPS = st.lists(
    st.tuples(
        st.dictionaries(NAMES, st.integers(1, 9)),
        st.dictionaries(NAMES, st.none() | st.integers(1, 9)),
    ),
    max_size=20,
)


@given(STEPS, st.integers(1, 6))
def test_the_past_is_what_was_seen(steps: list[Any], keep: int) -> None:
    """Each list has a point for each of the last views: what was there, or that nothing was."""
    tracks = PodHistory(keep)
    for at, (guards, rows) in enumerate(steps):
        assert tracks.add(_view(float(at), guards, rows)) == 0
        history = tracks.history
        past = steps[max(0, at + 1 - keep) : at + 1]
        assert history["at"] == [float(n) for n in range(max(0, at + 1 - keep), at + 1)]
        for name, track in history["guards"].items():
            assert track["failed"] == [seen.get(name, 0.0) for seen, _ in past]
            assert track["p99"] == [seen.get(name) for seen, _ in past]
            assert track["breaker"] == ["closed" if name in seen else None for seen, _ in past]
        for name, track in history["rows"].items():
            assert track == [seen.get(name.removeprefix("k/")) for _, seen in past]
        assert {name for seen, _ in past for name in seen} <= set(history["guards"])
        gone = set(history["guards"]) - {name for seen, _ in past for name in seen}
        assert not gone, "what was not there in all of the past is forgotten"


def _bounded(steps: list[Any]) -> None:
    tracks = PodHistory(3)
    for at, (guards, rows) in enumerate(steps):
        left_out = tracks.add(_view(float(at), guards, rows))
        history = tracks.history
        assert len(history["guards"]) <= 2
        assert len(history["rows"]) <= 2
        assert left_out == max(0, len(guards) - 2) + max(0, len(rows) - 2)
        assert {len(track) for track in history["rows"].values()} <= {len(history["at"])}


def test_as_many_as_are_shown_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are counted; what is gone makes room for what is there."""
    assert (MOST_GUARDS, MOST_TRACKS) == (200, 580)
    monkeypatch.setattr(history_module, "MOST_GUARDS", 2)
    monkeypatch.setattr(history_module, "MOST_TRACKS", 2)
    given(STEPS)(_bounded)()


def test_without_making_room_something_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by forgetting what is gone that all that is there is followed."""
    monkeypatch.setattr(history_module, "MOST_GUARDS", 2)
    monkeypatch.setattr(history_module, "MOST_TRACKS", 2)
    monkeypatch.setattr(history_module, "_make_room", lambda *_given: False)
    assert falsified(_bounded, STEPS)


@given(st.floats(1e-9, 1e12) | st.just(0.0))
def test_numbers_of_the_past_have_four_digits(value: float) -> None:
    """They are as near as four digits can be, and short when they are written."""
    tracks = PodHistory(2)
    tracks.add(_view(1_800_000_000.25, {"a": value}, {"r": value}))  # type: ignore[dict-item]
    history = tracks.history
    assert history["at"] == [1_800_000_000.25]
    for (told,) in (history["guards"]["a"]["p99"], history["rows"]["k/r"]):
        assert told == pytest.approx(value, rel=0.0005)
        assert len(f"{told:e}".partition("e")[0].rstrip("0")) <= len("1.234")


def test_two_of_one_name_are_one_point() -> None:
    """Names that are alike once they are cut do not make a list longer than the others."""
    tracks = PodHistory(5)
    view = _view(0.0, {"a": 1}, {"r": 1})
    view["guards"] *= 2
    for _ in range(3):
        tracks.add(view)
    history = tracks.history
    assert len(history["guards"]["a"]["failed"]) == len(history["at"]) == 3


# Hours


def _rated(at: float, rate: float, p99: float | None = None, breaker: str | None = None) -> Any:
    view = _view(at, {"a": 0}, {})
    view["guards"][0] |= {"p50": p99, "p99": p99, "breaker": breaker}
    view["guards"][0]["rates"] = dict.fromkeys(view["guards"][0]["rates"], rate)
    return view


def test_a_coarse_point_is_the_mean_of_its_rates_and_the_worst_of_the_rest() -> None:
    """Ten seconds are one point: a breaker that was open for a moment was open in it."""
    tracks = PodHistory()
    points = [(float(n), 0.5, "closed") for n in range(9)] + [(9.0, 2.5, "open")]
    for at, (rate, p99, state) in enumerate(points):
        tracks.add(_rated(1000.0 + at, rate, p99, state))
    assert tracks.hours(3600.0, "a") is None
    tracks.add(_rated(1010.0, 100.0, None))
    at, track = tracks.hours(3600.0, "a")  # type: ignore[misc]
    assert at == [1000.0]
    assert track["failed"] == [4.5]
    assert track["p50"] == [pytest.approx(0.7)]
    assert (track["p99"], track["breaker"]) == ([2.5], ["open"])
    assert tracks.hours(43200.0, "a") is None
    assert tracks.hours(60.0, "a") is tracks.hours(3600.0, "b") is None


@given(
    st.lists(st.tuples(st.floats(0.5, 90.0), st.sets(NAMES, max_size=3)), max_size=60),
    st.integers(1, 5),
)
def test_hours_are_what_was_seen_within_each_step(
    samples: list[tuple[float, set[str]]], most: int
) -> None:
    """Each step of the clock in which there was a sample is a point, and none is kept too long."""
    hours = CoarseHistory(HistoryStep(10.0, most))
    at, seen = 0.0, {}
    for passed, names in samples:
        at += passed
        begun = at - at % 10.0
        seen.setdefault(begun, []).append(names)
        hours.add(
            at, {name: history_module._guard_point(_rated(at, 2.0)["guards"][0]) for name in names}
        )
    closed = sorted(seen)[:-1][-most:]
    for name in "abcde":
        told = hours.track(name)
        there = [any(name in names for names in seen[begun]) for begun in closed]
        if told is None:
            assert not any(there)
            continue
        assert told[0] == closed
        assert told[1]["failed"] == [2.0 if one else 0.0 for one in there]
        assert {len(values) for values in told[1].values()} == {len(closed)}  # type: ignore[arg-type]


def test_hours_go_on_when_the_clock_is_set_back() -> None:
    """After the clock was set back, new samples become new points at the new time."""
    hours = CoarseHistory(HistoryStep(10.0, 9))
    point = history_module._guard_point(_rated(0.0, 1.0)["guards"][0])
    for at in (105.0, 15.0, 25.0):
        hours.add(at, {"a": point})
    assert hours.track("a")[0] == [100.0, 10.0]  # type: ignore[index]


def test_twelve_hours_of_a_guard_take_27_kilobytes() -> None:
    """The past is bounded, however long a pod lives and however many names come and go."""
    hours = [CoarseHistory(step) for step in history_module.STEPS]
    point = history_module._guard_point(_rated(0.0, 1.0)["guards"][0])
    for one in hours:
        for turn in range(2 * one.step.points):
            one.add(turn * one.step.seconds, {"a": point, f"b{turn % 400}": point})
    kept = [track for one in hours for track in one._guards.values()]
    assert [len(one._guards) for one in hours] == [MOST_GUARDS, MOST_GUARDS]
    assert {len(numbers) for track in kept[:1] for numbers in track.numbers} == {360}
    first = [one._guards["a"] for one in hours]
    size = sum(len(n) * n.itemsize for t in first for n in t.numbers)
    assert size + sum(len(track.breaker) for track in first) == 25 * (360 + 720)


@pytest.mark.parametrize("keep", [0, -1, 10**6, 1.5])
def test_how_much_is_kept_is_checked(keep: Any) -> None:
    """A number of points that makes no sense is refused at once."""
    with pytest.raises((TypeError, ValueError), match="keep"):
        PodHistory(keep)


def test_the_past_of_a_watcher() -> None:
    """A watcher's past has a point for each of its last samples, for all that was ever there."""
    pair = Pair(keep=4)
    for _ in range(3):
        pair.look(everything())
    for _ in range(2):
        pair.look({})
    history = pair.watcher.history
    assert len(history["at"]) == 4
    assert history["guards"]["w-keyed"]["breaker"] == ["open", "open", None, None]
    assert history["rows"]["queue/w-queue"] == [1.0, 1.0, None, None]
    for _ in range(3):
        pair.look({})
    assert pair.watcher.history["guards"] == {}
