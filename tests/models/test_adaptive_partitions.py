"""Partitions: what is reserved for whom, and what always holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.models.concurrency.partitions import OTHERS, Partitions, reserve
from tests.support import falsified


@pytest.mark.parametrize(
    ("shares", "limit", "reserved"),
    [
        ({"a": 0.7, "b": 0.3}, 10, [7, 3]),
        ({"a": 0.7, "b": 0.3}, 9, [6, 3]),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, 20, [7, 7, 6]),
        ({"a": 0.5}, 3, [1]),
        ({"a": 0.9, "b": 0.05, "c": 0.05}, 10, [8, 1, 1]),
        ({"a": 0.5, "b": 0.5}, 2, [1, 1]),
        ({"a": 0.5, "b": 0.5}, 1, [0, 0]),
        ({"a": 0.5, "b": 0.4}, 3, [1, 1]),
        ({"a": 0.5, "b": 0.4}, 2, [0, 0]),
        ({"a": 1.0}, 4, [4]),
    ],
)
def test_what_is_reserved(shares: dict[str, float], limit: int, reserved: list[int]) -> None:
    """Whole slots, at least one each and one for all, or nothing; all, if the shares make up 1."""
    assert list(reserve(shares, limit).values()) == [*reserved, 0]


def test_who_may_have_what() -> None:
    """A class has its own, and what is reserved for nobody; others have only that."""
    places = Partitions({"live": 0.5, "batch": 0.3}, 10)
    for _ in range(5):
        assert places.admits("batch")
        places.take("batch")
    assert not places.admits("batch")
    assert not places.admits(OTHERS)
    for _ in range(5):
        assert places.admits("live")
        places.take("live")
    assert not places.admits("live")
    places.give_back("batch")
    assert places.admits("live")
    assert places.admits(OTHERS)


def test_names_that_nobody_has_reserved_for_are_one_class() -> None:
    """So their number is bounded, whatever calls say they are."""
    places = Partitions({"live": 0.5}, 10)
    assert [places.name(name) for name in ("live", "else", None, 7)] == ["live", *[OTHERS] * 3]


class Program(NamedTuple):
    shares: dict[str, float]
    limit: int
    steps: list[tuple[str, str | int]]


CLASSES = ["a", "b", "c", OTHERS]
PROGRAMS = st.builds(
    Program,
    shares=st.dictionaries(
        st.sampled_from(CLASSES[:3]), st.sampled_from([0.05, 0.1, 0.25, 0.33]), min_size=1
    ),
    limit=st.integers(1, 20),
    steps=st.lists(
        st.tuples(st.sampled_from(["enter", "leave"]), st.sampled_from(CLASSES))
        | st.tuples(st.just("resize"), st.integers(1, 20)),
        max_size=60,
    ),
)


def _check(case: Program) -> None:
    places = Partitions(case.shares, case.limit)
    inside = dict.fromkeys((*case.shares, OTHERS), 0)
    shrunk = False
    for what, value in case.steps:
        if what == "resize":
            places.resize(int(value))
        name = places.name(value)
        if what == "leave" and inside[name]:
            places.give_back(name)
            inside[name] -= 1
        if what == "enter" and places.admits(name):
            places.take(name)
            inside[name] += 1
            assert sum(inside.values()) <= places.limit
        assert places.in_flight == inside
        assert sum(places.reserved.values()) <= places.limit
        assert places.total == sum(inside.values())
        # After the limit was lowered it takes until enough has come back.
        spoken_for = sum(max(inside[name], places.reserved[name]) for name in inside)
        shrunk = spoken_for > places.limit and (shrunk or what == "resize")
        for name in inside:
            if not shrunk and inside[name] < places.reserved[name]:
                assert places.admits(name)


@given(PROGRAMS)
def test_what_is_reserved_is_there_at_once(case: Program) -> None:
    """In flight <= limit; who has less than is reserved for it is admitted, at any moment."""
    _check(case)


def _check_nobody_shut_out(case: Program) -> None:
    places = Partitions(case.shares, case.limit)
    assert all(places.admits(name) for name in case.shares)
    assert places.admits(OTHERS) or sum(case.shares.values()) > 0.999


@given(PROGRAMS)
def test_no_class_is_shut_out(case: Program) -> None:
    """With nothing in flight each class is admitted, and others if the shares leave something."""
    _check_nobody_shut_out(case)


def _reserve_all_there_is(shares: dict[str, float], limit: int) -> dict[str, int]:
    reserved = dict.fromkeys((*shares, OTHERS), 0)
    for name in list(shares)[:limit]:
        reserved[name] = 1
    return reserved


def test_if_all_is_reserved_some_are_shut_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve even where there is not enough for each, and the property is falsified."""
    monkeypatch.setattr("seawall.models.concurrency.partitions.reserve", _reserve_all_there_is)
    assert falsified(_check_nobody_shut_out, PROGRAMS)


def _first_come(places: Partitions, _name: str) -> bool:
    return places.total < places.limit


def _own_only(places: Partitions, name: str) -> bool:
    return places.in_flight[name] <= places.reserved[name]


def _reserve_too_much(shares: dict[str, float], limit: int) -> dict[str, int]:
    return {name: max(1, round(share * limit)) for name, share in shares.items()} | {OTHERS: 0}


@pytest.mark.parametrize("broken", [_first_come, _own_only])
def test_without_the_rule_a_class_takes_what_is_reserved_for_another(
    broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve who comes first, or let each class have one more, and the property is falsified."""
    monkeypatch.setattr(Partitions, "admits", broken)
    assert falsified(_check, PROGRAMS)


def test_without_the_bound_more_is_reserved_than_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Round up, and somebody finds taken what was reserved for it."""
    monkeypatch.setattr("seawall.models.concurrency.partitions.reserve", _reserve_too_much)
    assert falsified(_check, PROGRAMS)


@given(PROGRAMS)
def test_a_child_process_begins_with_nothing_in_flight(case: Program) -> None:
    """And a call that came along by the fork may give back what nobody counts any more."""
    places = Partitions(case.shares, case.limit)
    for what, value in case.steps:
        if what == "enter" and places.admits(places.name(value)):
            places.take(places.name(value))
    places.forget_in_flight()
    for name in places.in_flight:
        places.give_back(name)
        assert places.in_flight[name] == 0
    assert (places.total, places._spoken_for) == (0, sum(places.reserved.values()))


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({}, "write the share of each class"),
        ([("a", 0.5)], "write the share of each class"),
        ({"a": 0.7, "b": 0.4}, "at most 1"),
        ({"a": 0}, "above 0"),
        ({"a": "half"}, "a share between 0 and 1"),
        ({7: 0.5}, "write a string"),
        ({OTHERS: 0.5}, "no name of a class"),
    ],
)
def test_bad_shares_raise_at_once(shares: Any, message: str) -> None:
    """And the message tells what to write."""
    with pytest.raises((TypeError, ValueError), match=message):
        Partitions(shares, 10)
