"""What answers tell of limits, read by an independent parser of structured fields."""

from __future__ import annotations

from typing import Any

import http_sfv
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seawall import RateLimited
from seawall.models.rate.rates import whole_microseconds
from seawall.testing import virtual_time
from seawall.web.limits import LimitGrant, RequestLimit, RequestLimits
from seawall.web.limits import groups as _limit_groups
from seawall.web.limits.groups import ROUNDING
from seawall.web.principals import user
from seawall.web.request import Incoming
from seawall.web.trust import Trust
from tests.support import falsified
from tests.web.support import http_scope

Told = dict[str, list[tuple[str, dict[str, int]]]]


def request(who: str = "ann") -> Incoming:
    return Incoming(http_scope(client=("10.0.0.1", 1), user_id=who), Trust())


def by_user(incoming: Incoming) -> str:
    return str(incoming.scope["user_id"])


def read(headers: list[tuple[bytes, bytes]]) -> Told:
    """Return what the fields say, each as a structured list; anything else raises."""
    told: Told = {}
    for name, value in headers:
        parsed = http_sfv.List()
        parsed.parse(value)
        told[name.decode()] = [(item.value, dict(item.params)) for item in parsed]
    return told


def refusal(limits: RequestLimits, incoming: Incoming) -> RateLimited:
    """Return the first refusal of such requests."""
    for _ in range(10_000):
        try:
            limits.admit(incoming)
        except RateLimited as error:
            return error
    raise AssertionError("nobody was refused")


def test_an_answer_tells_the_limits_and_what_is_left_of_the_one_that_binds() -> None:
    """The policies are the same for all; the state is that with least left."""
    with virtual_time() as clock:
        limits = RequestLimits(
            RequestLimit("100/min", by=user(by_user), name="burst"),
            RequestLimit("1000/day", by="address", name="daily"),
            RequestLimit("9k/s", by=None),
        )
        told = read(limits.admit(request()).headers())
        assert told == {
            "ratelimit-policy": [
                ("burst", {"q": 100, "w": 60}),
                ("daily", {"q": 1000, "w": 86400}),
            ],
            "ratelimit": [("burst", {"r": 99, "t": 1})],
        }
        for _ in range(9):
            granted = limits.admit(request())
        assert read(granted.headers())["ratelimit"] == [("burst", {"r": 90, "t": 1})]
        clock.advance(6)
        told = read(limits.admit(request()).headers())
        assert told["ratelimit"] == [("burst", {"r": 99, "t": 1})]


def test_a_refusal_tells_that_nothing_is_left_and_until_when() -> None:
    """Of each limit that was exceeded, and of no other."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("2/min", by=user(by_user)), RequestLimit("2/h", by="address")
        )
        error = refusal(limits, request())
        assert read(list(error.headers)) == {
            "ratelimit-policy": [("user", {"q": 2, "w": 60}), ("address", {"q": 2, "w": 3600})],
            "ratelimit": [("user", {"r": 0, "t": 1800}), ("address", {"r": 0, "t": 1800})],
        }


def test_callers_are_told_of_their_own_limits_only() -> None:
    """Not of what all share, nor of what is only watched; and of nothing if so set."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("2/min", by=None), RequestLimit("5/min", by="address", soft=True)
        )
        assert limits.admit(request()).headers() == []
        error = refusal(limits, request())
        assert not error.own_limit
        assert error.headers == ()
        limits = RequestLimits(RequestLimit("2/min", by="address"), headers=False)
        assert limits.admit(request()).headers() == []
        assert refusal(limits, request()).headers == ()


def test_each_tier_is_told_its_own_rate() -> None:
    """The field's value is made once for each tier."""
    with virtual_time():
        limits = RequestLimits(
            RequestLimit("1/s", by=user(by_user), tiers={"free": "60/min", "premium": "600/min"}),
            tier=by_user,
        )
        told = {who: read(limits.admit(request(who)).headers()) for who in ("free", "premium", "x")}
        assert {who: fields["ratelimit-policy"][0][1] for who, fields in told.items()} == {
            "free": {"q": 60, "w": 60},
            "premium": {"q": 600, "w": 60},
            "x": {"q": 1, "w": 1},
        }
        assert told["premium"]["ratelimit"] == [("user", {"r": 599, "t": 1})]


def test_a_window_that_is_no_whole_number_of_seconds_is_not_told() -> None:
    """The field knows whole seconds only; the quota is told all the same."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("5/500ms", by="address"))
        told = read(limits.admit(request()).headers())
        assert told["ratelimit-policy"] == [("address", {"q": 5})]


def test_no_more_is_said_to_be_left_than_the_quota() -> None:
    """Though a burst may be larger than the rate's own number."""
    with virtual_time():
        limits = RequestLimits(RequestLimit("5/s", by="address", burst=50))
        assert read(limits.admit(request()).headers())["ratelimit"][0][1]["r"] == 5


def left_of(limits: RequestLimits) -> int:
    """Return what is left of the one limit, for the one caller."""
    group = limits._local
    assert group is not None
    (meter,) = group.policy._meters.all
    (place,) = meter.states
    return int(meter.standing(place, whole_microseconds(group._now()))[0])


RUNS = st.tuples(
    st.integers(1, 20),
    st.sampled_from(["10s", "7s", "min", "h"]),
    st.sampled_from(
        ["token_bucket", "leaky_bucket", "fixed_window", "sliding_counter", "sliding_log"]
    ),
    st.lists(st.sampled_from([0.0, 0.0, 0.3, 1.0, 4.7]), min_size=1, max_size=25),
    st.booleans(),
)


@given(RUNS)
@example((1, "10s", "token_bucket", [0.3, 0.3, 0.3, 0.3, 4.7, 4.7, 0.0], False))
def test_after_t_seconds_there_is_more_and_not_before(
    run: tuple[int, str, Any, list[float], bool],
) -> None:
    """`t` is the time until additional quota is there, whichever way is counted and taken."""
    number, period, algorithm, pauses, slowly = run
    with virtual_time() as clock:
        clock.advance(12345.678)
        limits = RequestLimits(
            RequestLimit(f"{number}/{period}", by="address", algorithm=algorithm)
        )
        part = limits._plans[None].local
        assert part is not None
        if slowly:
            part.quick = None
        headers: list[tuple[bytes, bytes]] = []
        for pause in pauses:
            clock.advance(pause)
            try:
                headers = limits.admit(request()).headers()
            except RateLimited as error:
                headers = list(error.headers)
        told = dict(read(headers)["ratelimit"])["address"]
        assert told["r"] == left_of(limits)
        clock.advance(max(0.0, told["t"] - 1 - ROUNDING))  # it is rounded up
        assert left_of(limits) == told["r"]
        clock.advance(1 + 2 * ROUNDING)
        assert left_of(limits) > told["r"]


NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=126, exclude_characters='"\\'),
    min_size=1,
    max_size=64,
)
RATES = st.tuples(
    st.integers(1, 10**4), st.sampled_from(["s", "min", "h", "day", "15min", "1500ms"])
).map(lambda pair: f"{pair[0]}/{pair[1]}")
ALGORITHMS = st.sampled_from(["token_bucket", "leaky_bucket", "sliding_counter", "fixed_window"])
CASES = st.tuples(NAMES, RATES, ALGORITHMS, st.integers(1, 4))


def check_fields(case: tuple[str, str, str, int]) -> None:
    """Check that both parsers read the same, and that it is true."""
    name, rate, algorithm, calls = case
    with virtual_time() as clock:
        clock.advance(12345.678)
        options: dict[str, Any] = {"algorithm": algorithm}
        limits = RequestLimits(RequestLimit(rate, by="address", name=name, **options))
        fields: list[tuple[bytes, bytes]] = []
        after = 0.0
        for _ in range(calls):
            try:
                granted: LimitGrant = limits.admit(request())
                fields = granted.headers()
            except RateLimited as error:
                fields, after = list(error.headers), error.retry_after or 0.0
        told = read(fields)
        ((policy, parameters),) = told["ratelimit-policy"]
        ((state, left),) = told["ratelimit"]
        assert policy == state == name
        assert 0 <= left["r"] <= parameters["q"]
        assert left["t"] >= after


@given(CASES)
def test_what_is_told_parses_and_is_true(case: tuple[str, str, str, int]) -> None:
    """Whatever the limit is called, and however it counts."""
    check_fields(case)


def test_seconds_rounded_down_would_be_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who believed such a field would come back a moment before its time."""
    monkeypatch.setattr(_limit_groups, "ceil", int)
    assert falsified(check_fields, CASES)
