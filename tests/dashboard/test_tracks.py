from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard import _tracks
from seawall.dashboard._bounds import MOST_GUARDS, MOST_ROWS
from seawall.dashboard._tracks import Tracks
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
    tracks = Tracks(keep)
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
    tracks = Tracks(3)
    for at, (guards, rows) in enumerate(steps):
        left_out = tracks.add(_view(float(at), guards, rows))
        history = tracks.history
        assert len(history["guards"]) <= 2
        assert len(history["rows"]) <= 2
        assert left_out == max(0, len(guards) - 2) + max(0, len(rows) - 2)
        assert {len(track) for track in history["rows"].values()} <= {len(history["at"])}


def test_as_many_as_are_shown_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those beyond are counted; what is gone makes room for what is there."""
    assert (MOST_GUARDS, MOST_ROWS) == (200, 500)
    monkeypatch.setattr(_tracks, "MOST_GUARDS", 2)
    monkeypatch.setattr(_tracks, "MOST_ROWS", 2)
    given(STEPS)(_bounded)()


def test_without_making_room_something_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is by forgetting what is gone that all that is there is followed."""
    monkeypatch.setattr(_tracks, "MOST_GUARDS", 2)
    monkeypatch.setattr(_tracks, "MOST_ROWS", 2)
    monkeypatch.setattr(_tracks, "_make_room", lambda *_given: False)
    assert falsified(_bounded, STEPS)


@given(st.floats(1e-9, 1e12) | st.just(0.0))
def test_numbers_of_the_past_have_four_digits(value: float) -> None:
    """They are as near as four digits can be, and short when they are written."""
    tracks = Tracks(2)
    tracks.add(_view(1_800_000_000.25, {"a": value}, {"r": value}))  # type: ignore[dict-item]
    history = tracks.history
    assert history["at"] == [1_800_000_000.25]
    for (told,) in (history["guards"]["a"]["p99"], history["rows"]["k/r"]):
        assert told == pytest.approx(value, rel=0.0005)
        assert len(f"{told:e}".partition("e")[0].rstrip("0")) <= len("1.234")


def test_two_of_one_name_are_one_point() -> None:
    """Names that are alike once they are cut do not make a list longer than the others."""
    tracks = Tracks(5)
    view = _view(0.0, {"a": 1}, {"r": 1})
    view["guards"] *= 2
    for _ in range(3):
        tracks.add(view)
    history = tracks.history
    assert len(history["guards"]["a"]["failed"]) == len(history["at"]) == 3


@pytest.mark.parametrize("keep", [0, -1, 10**6, 1.5])
def test_how_much_is_kept_is_checked(keep: Any) -> None:
    """A number of points that makes no sense is refused at once."""
    with pytest.raises((TypeError, ValueError), match="keep"):
        Tracks(keep)


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
    assert repr(pair.watcher).endswith("4 of 4 points>>")
    for _ in range(3):
        pair.look({})
    assert pair.watcher.history["guards"] == {}
