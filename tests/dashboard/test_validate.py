from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seawall.dashboard import validation
from seawall.dashboard.validation import valid_view
from seawall.events import BreakerChanged
from seawall.events.bus import emit
from tests.dashboard.views_support import (
    JUNK,
    Pair,
    everything,
    many_guards,
    places,
    replaced,
)
from tests.support import falsified

pytestmark = pytest.mark.usefixtures("nobody_else")
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def _a_view() -> Any:
    pair = Pair()
    emit(BreakerChanged, "w-vendor", before="closed", after="open", cause="failures", key=None)
    pair.look(everything())
    return json.loads(
        json.dumps(pair.look(many_guards(2, ill=1) | {"store": everything()["store"]}))
    )


VIEW_PLACES = st.deferred(lambda: st.sampled_from(places(_VIEW)))
_VIEW: Any = {}


@pytest.fixture(scope="module", autouse=True)
def _made() -> None:
    _VIEW.update(_a_view())


def _is_harmless(changes: list[Any]) -> None:
    try:
        cleaned = valid_view(replaced(_VIEW, changes))
    except ValueError:
        return
    assert valid_view(cleaned) == cleaned
    text = json.dumps(cleaned, allow_nan=False)
    assert set(cleaned) == set(_VIEW)
    assert all(one.isprintable() for one in _texts(json.loads(text)))
    assert all(len(one) <= 200 for one in _texts(cleaned))


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    return (
        [one for part in inner for one in _texts(part)] if isinstance(inner, (list, tuple)) else []
    )


CHANGES = st.lists(st.tuples(VIEW_PLACES, JUNK), min_size=1, max_size=3)


@QUICK
@given(CHANGES)
def test_what_others_sent_is_cleaned_or_refused(changes: list[Any]) -> None:
    """A view with anything at any place is refused, or has nothing in it that does harm."""
    _is_harmless(changes)


def test_without_cleaning_it_would_do_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the cleaning of texts that makes it so."""
    monkeypatch.setattr(validation, "shown", lambda value, _longest: value)
    names = st.tuples(st.just(("guards", 0, "name")), st.text(min_size=1))
    assert falsified(_is_harmless, st.lists(names, min_size=1, max_size=1))


@given(JUNK)
def test_junk_is_no_view(junk: Any) -> None:
    """What is no view at all is refused with a ValueError, and nothing else is raised."""
    with pytest.raises(ValueError, match=r"wanted|format"):
        valid_view(junk)


def test_a_view_of_another_format_is_refused() -> None:
    """A view of another format is not guessed at."""
    for other in (2, True, "1", None):
        with pytest.raises(ValueError, match="format"):
            valid_view(_VIEW | {"format": other})


def test_what_is_too_much_is_refused() -> None:
    """More guards, rows or sections than a view has is not one."""
    guard, row = _VIEW["guards"][0], next(iter(_VIEW["sections"].values()))[0]
    for much in (
        {"guards": [guard] * 201},
        {"sections": {str(number): [row] * 51 for number in range(10)}},
        {"sections": {str(number): [] for number in range(21)}},
    ):
        with pytest.raises(ValueError, match="at most"):
            valid_view(_VIEW | much)


@pytest.mark.parametrize(
    ("more", "known"),
    [
        ({"age": 3}, {"age": 3}),
        ({"age": 0.5, "gone": 1000.0}, {"age": 0.5, "gone": 1000.0}),
        ({"extra": 1}, {}),
        ({"age": -1}, None),
        ({"age": True}, None),
        ({"age": None}, None),
        ({"age": float("nan")}, None),
        ({"gone": "yes"}, None),
    ],
)
def test_how_old_a_view_is_may_be_told(more: dict[str, Any], known: dict[str, Any] | None):
    """The age is optional; if given, it is kept and must be a number."""
    if known is None:
        with pytest.raises(ValueError, match="number"):
            valid_view({**_VIEW, **more})
    else:
        assert valid_view({**_VIEW, **more}) == {**valid_view(_VIEW), **known}
