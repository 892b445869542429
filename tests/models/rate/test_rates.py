"""Rates as people write them, and time in whole microseconds."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seawall.models.rate.rates import Rate, whole_microseconds

SECOND = 1_000_000


@pytest.mark.parametrize(
    ("text", "limit", "seconds"),
    [
        ("60/s", 60, 1),
        ("60/sec", 60, 1),
        ("5 per second", 5, 1),
        ("1000/min", 1000, 60),
        ("1_000 / minute", 1000, 60),
        ("60/m", 60, 60),
        ("10k/day", 10_000, 86_400),
        ("1.5K/h", 1500, 3600),
        ("2M/week", 2_000_000, 604_800),
        ("100/15min", 100, 900),
        ("1/2 hours", 1, 7200),
        ("20/250ms", 20, 0.25),
        ("1/0.5s", 1, 0.5),
        (" 7/Day ", 7, 86_400),
    ],
)
def test_rates_read_as_people_write_them(text: str, limit: int, seconds: float) -> None:
    """A number, a slash or "per", and a unit with or without a number of its own."""
    assert Rate.parse(text) == Rate(limit, int(seconds * SECOND))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "60",
        "60/",
        "\u0663/s",
        "1/\u0662s",
        "/s",
        "s/60",
        "-1/s",
        "60/fortnight",
        "60//s",
        "10m/day",
        "1e3/s",
        "60/s/s",
    ],
)
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    """The message shows what to write."""
    with pytest.raises(ValueError, match="such as '60/s'"):
        Rate.parse(text)


@pytest.mark.parametrize("text", ["0/s", "0.5/s", "1/0s", "1.00055k/ms", "9999999999M/s"])
def test_numbers_must_be_whole_and_countable(text: str) -> None:
    """Half a call in a second is one in two."""
    with pytest.raises(ValueError, match="'1/2s'"):
        Rate.parse(text)


@pytest.mark.parametrize("text", ["1" * 65_536, b"x" * 65_536, "1/" + "s" * 65_536])
def test_a_long_mistake_is_not_repeated_whole(text: object) -> None:
    """The message shows its beginning."""
    with pytest.raises((TypeError, ValueError), match=r"^rate .{50,60}\.\.\.: write") as caught:
        Rate.parse(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("value", [60, None, 1.5, b"60/s"])
def test_only_text_is_a_rate(value: object) -> None:
    """A bare number says nothing of time."""
    with pytest.raises(TypeError, match="write text, such as '60/s'"):
        Rate.parse(value)


@given(st.text(max_size=40) | st.from_regex(r"[0-9_. kM/persminhdaw]{0,60}", fullmatch=True))
@example("9" * 10_000 + "/s")
def test_any_text_is_a_rate_or_a_value_error(text: str) -> None:
    """Nothing else is raised, whatever is written."""
    try:
        rate = Rate.parse(text)
    except ValueError:
        return
    assert rate.limit >= 1
    assert rate.period >= 1


@given(st.floats(0, 2e9))
def test_an_instant_is_rounded_to_the_nearest_microsecond(seconds: float) -> None:
    """The result is a whole number, at most half a microsecond away."""
    whole = whole_microseconds(seconds)
    assert whole == int(whole)
    assert abs(whole - seconds * 1e6) <= 0.5


@given(st.integers(0, 2 * 10**15))
def test_whole_microseconds_survive_the_way_to_seconds_and_back(whole: int) -> None:
    """Converting microseconds to seconds and back gives the same microseconds."""
    assert whole_microseconds(whole / 1e6) == whole


def test_without_end_stays_without_end() -> None:
    """`max_wait=inf` is an instant too."""
    assert whole_microseconds(float("inf")) == float("inf")
