from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.dashboard.presenters import troubles as troubles_module
from seawall.dashboard.presenters.troubles import FORGET_AFTER, FoundTrouble, TroubleStarts
from seawall.events import BreakerChanged, HostEjected, LifecycleChanged, StoreModeChanged
from seawall.events.bus import emit
from tests.dashboard.views_support import NOW, Pair
from tests.support import falsified

pytestmark = pytest.mark.usefixtures("nobody_else")


def _guard(*policies: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"guard": [{"name": "vendor", **told, "policies": list(policies)}]}


def _breaker(**told: Any) -> dict[str, Any]:
    return {"policy": "breaker", "mode": "enforce", "state": "open", **told}


def _since(view: Any) -> dict[str, float]:
    return {one["id"]: one["since"] - NOW for one in view["troubles"]}


def test_a_trouble_began_with_its_event() -> None:
    """If the event that began it was heard, that is when; it stays so while the trouble lasts."""
    pair = Pair()
    open_ = _guard(_breaker())
    emit(BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None)
    assert _since(pair.look(open_, 0.75)) == {"breaker:vendor:0": 0.0}
    emit(BreakerChanged, "vendor", before="open", after="half_open", cause="time", key=None)
    pair.look(_guard(_breaker(state="half_open")))
    emit(BreakerChanged, "vendor", before="half_open", after="open", cause="probe", key=None)
    assert _since(pair.look(open_)) == {"breaker:vendor:0": 0.0}


def test_a_trouble_that_ended_begins_anew() -> None:
    """An event of a trouble that is over does not make the next one older."""
    pair = Pair()
    emit(BreakerChanged, "vendor", before="closed", after="open", cause="failures", key=None)
    emit(BreakerChanged, "vendor", before="open", after="closed", cause="close()", key=None)
    pair.look({})
    assert _since(pair.look(_guard(_breaker()), 2.0)) == {"breaker:vendor:0": 3.0}


def test_other_events_begin_troubles() -> None:
    """So do the loss of a store, a drain and a host that is ejected."""
    pair = Pair()
    modes = {"before": "shared", "after": "local", "cause": "away"}
    emit(StoreModeChanged, "vendor", policy="breaker", store="s", **modes)
    emit(LifecycleChanged, "app", before="ready", after="draining", in_flight=2)
    emit(HostEjected, "u", host="http://a", cause="errors", seconds=5.0)
    snapshot = {
        **_guard(_breaker(state="closed", shared={"mode": "local"})),
        "store": [{"name": "s", "up": False}],
        "lifecycle": [{"name": "app", "state": "draining"}],
        "upstreams": [{"name": "u", "hosts": {"http://a": {"state": "ejected"}}}],
    }
    assert _since(pair.look(snapshot, 3.0)) == {
        "store_mode:vendor:0": 0.0,
        "store:s": 0.0,
        "lifecycle:app": 0.0,
        "upstreams:u": 0.0,
    }


def _lasts(seen: list[bool]) -> None:
    """Compare with a model: a trouble begins if it was not there in the last samples."""
    since = TroubleStarts()
    for at, there in enumerate(seen):
        found = [FoundTrouble("t", "bad", "w", "what")] if there else []
        told = since.date(found, float(at), {})
        assert len(told) == there
        if there:
            begin = at
            for before in range(at - 1, -1, -1):
                if seen[before]:
                    begin = before
                elif begin - before >= 3 and not any(seen[max(0, begin - 3) : begin]):
                    break
            assert told[0]["since"] == float(begin)


@given(st.lists(st.booleans(), max_size=30))
def test_a_flicker_is_no_end(seen: list[bool]) -> None:
    """A trouble that was gone for fewer than three samples has lasted since it began."""
    assert FORGET_AFTER == 3
    _lasts(seen)


def test_without_patience_a_flicker_would_be_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the patience that makes it so."""
    monkeypatch.setattr(troubles_module, "FORGET_AFTER", 1)
    assert falsified(_lasts, st.lists(st.booleans(), max_size=30))


def test_a_clock_that_was_set_back() -> None:
    """A wall clock that goes back makes no trouble begin in the future."""
    since = TroubleStarts()
    (one,) = since.date([FoundTrouble("t", "bad", "w", "what", began="b")], 50.0, {"b": 90.0})
    assert one["since"] == 50.0
