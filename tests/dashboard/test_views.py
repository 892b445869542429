from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seawall import (
    AdaptiveLimit,
    Breaker,
    Bulkhead,
    Cache,
    Fallback,
    Guard,
    Hedge,
    RateLimit,
    RedisStore,
    Retry,
    RetryBudget,
    Shed,
    ThreadBulkhead,
    Throttle,
    Timeout,
    events,
    static,
)
from seawall.dashboard.bounds import shown
from seawall.dashboard.counters import Counters
from seawall.dashboard.presenters.sections import SECTIONS
from seawall.dashboard.presenters.settings import settings_of
from seawall.dashboard.wording import address
from seawall.events.bus import emit
from seawall.limits import Limit
from seawall.policies.timeout import adaptive_timeout
from seawall.shedding import by_criticality
from tests.dashboard.views_support import JUNK, Pair, check_view, everything, places, replaced

pytestmark = pytest.mark.usefixtures("nobody_else")
QUICK = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


# Anything may be in a snapshot


def test_everything_is_shown() -> None:
    """One of everything gives a view with all of it, each in its section."""
    pair = Pair()
    pair.look(everything())
    view = pair.look(everything())
    check_view(view)
    assert [guard["name"] for guard in view["guards"]] == [
        guard["name"] for guard in everything()["guard"]
    ]
    kinds = {row["kind"] for section in view["sections"].values() for row in section}
    shown_kinds = {kind for kinds in SECTIONS.values() for kind in kinds}
    absent = {"jobs_api", "fifo_sender", "pipeline", "collect", "dead_letters"}
    assert shown_kinds - kinds <= absent, "not in that world"
    assert set(everything()) - {"guard", "edge"} <= kinds
    assert [guard["name"] for guard in view["guards"] if guard["edge"]] == ["w-edge"]


PLACES = st.deferred(lambda: st.sampled_from(places(everything())))


@settings(QUICK, max_examples=30)
@given(st.lists(st.tuples(PLACES, JUNK), min_size=1, max_size=12))
def test_a_snapshot_with_junk_in_it_gives_a_view(changes: list[Any]) -> None:
    """Whatever stands at any place of a snapshot: nothing raises, and the view is one."""
    pair = Pair()
    pair.look(everything())
    check_view(pair.look(replaced(everything(), changes)))
    check_view(pair.look(everything()))


@QUICK
@given(
    st.dictionaries(
        st.sampled_from(["guard", "edge", "pool", "queue", "jobs", "store", "whatever"]),
        st.lists(JUNK, max_size=3) | JUNK,
    )
)
def test_junk_instead_of_a_snapshot_gives_a_view(junk: dict[str, Any]) -> None:
    """So it is where all of it is junk."""
    pair = Pair()
    pair.look(junk)
    check_view(pair.look(junk))


class _Own:
    kind = "own"

    def __repr__(self) -> str:
        return "Own(password='hunter2')"


def test_a_policy_that_nobody_knows() -> None:
    """It is shown by its kind and its plain numbers; neither its texts nor its repr."""
    told = {"policy": "own", "calls": 3, "ratio": 0.5, "secret": "hunter2", "deep": {"a": 1}}
    view = Pair().look({"guard": [{"name": "g", "policies": [told]}]})
    (layer,) = view["guards"][0]["stack"]
    assert layer["policy"] == "own"
    assert layer["facts"] == [("calls", "3"), ("ratio", "0.5")]
    assert settings_of("own", _Own()) == ("_Own", "", [])
    assert "hunter2" not in json.dumps(view)


# What is said of settings


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Breaker(), "opens at 50 % of 20 calls in 30 s, for 15 s"),
        (
            Breaker(consecutive=5, break_for=15.0, key=str),
            "opens at 5 failures in a row, for 15 s, by key",
        ),
        (Retry(on=OSError, budget=RetryBudget()), "3 attempts, backoff from 0.1 s, budget 10 %"),
        (Retry(on=OSError, attempts=1, backoff=lambda _n: 1.0), "1 attempt"),
        (Timeout(2.0), "2 s"),
        (Timeout(adaptive_timeout(floor=0.5, cap=5.0)), "from 0.5 s to 5 s, by what calls take"),
        (Bulkhead(20, max_wait=0.5), "20 at once, waits up to 0.5 s"),
        (RateLimit("60/s", burst=10), "60/s, burst 10"),
        (RateLimit(Limit("5/min", key=str)), "5/min for each key"),
        (AdaptiveLimit(), "1 to 1000 at once, as vegas learns, nobody waits"),
        (Shed(by_criticality(0.1), load=lambda: 0.0), "by criticality"),
        (Cache(60.0, key=str, stale_if_error=300), "for 60 s, 5 min more if the call fails"),
        (Fallback(static("a secret")), "static"),
        (Hedge(0.5), "a second call after 0.5 s, for at most 5 %"),
        (Throttle(), "sends 2 times what was accepted in 120 s".replace("120 s", "2 min")),
        (ThreadBulkhead(2), "2 threads, 2 may wait"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_settings_in_a_few_words(policy: Any, words: str) -> None:
    """The settings of each kind are said in a few words, and what may be changed is as it is."""
    told = settings_of(policy.kind, policy)
    assert (told.title, told.words) == (type(policy).__name__, words)
    for change in told.changes:
        policy.update(**{change["name"]: change["value"]})
    assert settings_of(policy.kind, policy) == told


def test_a_change_is_shown_at_once() -> None:
    """Whether or not an event tells of it."""
    pair = Pair()
    slots, own = Bulkhead(20), Retry(on=OSError)
    guard = Guard("changed", slots, own)
    pair.later()
    slots.update(limit=7)
    (first, _) = pair.later()["guards"][0]["stack"]
    assert first["settings"] == "7 at once, nobody waits"
    own.attempts = 9  # without an event
    view = pair.later()
    assert view["guards"][0]["stack"][1]["settings"].startswith("9 attempts")
    view["guards"][0]["stack"][0]["changes"].clear()
    assert pair.later()["guards"][0]["stack"][0]["changes"], "a view is nobody else's"
    del guard


def test_several_limits_are_not_one_text() -> None:
    """A rate limit of several, or with functions of their own, is no text to be typed."""
    for policy in (RateLimit("5/s", "100/min"), RateLimit(Limit("5/s", key=str))):
        names = [change["name"] for change in settings_of("rate_limit", policy).changes]
        assert names == ["max_wait", "max_waiting", "mode"]
    (first, *_) = settings_of("rate_limit", RateLimit("5/s")).changes
    assert first == {"name": "limits", "value": "5/s", "kind": "text"}


# Secrets


def test_no_password_is_shown() -> None:
    """Neither that of a store nor of a host; nor the values that fallbacks answer with."""
    store = RedisStore("redis://me:hunter2@127.0.0.1:1/0", name="with-password")
    guard = Guard("guarded", Fallback(static("hunter2")), Breaker(shared=store, name="b"))
    hosts = {"https://me:hunter2@host/?key=hunter2": {"state": "ejected"}}
    pair = Pair()
    pair.later()
    emit(events.StoreModeChanged, "guarded", policy="breaker", store=store.name,
         before="shared", after="local", cause="hunter2")  # fmt: skip
    view = pair.later()
    other = Pair().look({"upstreams": [{"name": "u", "hosts": hosts}]})
    assert "https://host/" in json.dumps(other)
    assert "127.0.0.1" in json.dumps(view)
    assert "hunter2" not in json.dumps([view, other])
    del guard
    store.close()


@given(st.text(max_size=60), st.text(max_size=20))
def test_an_address_tells_no_login(text: str, host: str) -> None:
    """Whatever stands before the last @ of an address is not shown."""
    assert "hunter2" not in address(f"redis://{text}:hunter2@{host.replace('hunter2', '')}")
    assert "hunter2" not in address(f"{text}:hunter2@{host}")
    word = "".join(text.split())
    assert "hunter2" not in address(f"http://vendor/{word}?k={word}@hunter2")


def test_keys_are_few_and_short() -> None:
    """Of the keys of a keyed breaker five are shown, none of them long."""
    keys = {f"user-{number}-" + "x" * 90: {"state": "open"} for number in range(9)}
    told = {"policy": "breaker", "state": "open", "keys": keys, "open_keys": 9}
    view = Pair().look({"guard": [{"name": "g", "policies": [told]}]})
    (layer,) = view["guards"][0]["stack"]
    said = dict(layer["facts"])["broken keys"]
    assert said.count("user-") <= 5
    assert "x" * 41 not in json.dumps(view)
    assert layer["acts"] == ["isolate", "close"]


@given(st.text(max_size=300), st.integers(1, 200))
def test_text_is_printable_and_short(text: str, longest: int) -> None:
    """Whatever a name holds, what is shown of it is short and steers no terminal."""
    told = shown(text, longest)
    assert len(told) <= longest
    assert told.isprintable()
    assert told.encode().decode() == told, "no half of a character"
    if text.isprintable() and len(text) <= longest:
        assert told == text


# Rates


@given(
    st.lists(st.tuples(st.integers(1, 8), st.lists(st.integers(0, 50), min_size=1)), max_size=20)
)
def test_rates_add_up(instants: list[tuple[int, list[int]]]) -> None:
    """The last rate of each instant, by the time since the one before, is what was counted."""
    counters, now, total = Counters(), 0.0, 7
    counters.begin(now)
    assert counters.rate("calls", total) == 0.0
    for quarters, looks in instants:
        now += quarters / 4
        for more in looks:  # several looks at one instant: none divides by 0
            total += more
            counters.begin(now)
            rate = counters.rate("calls", total)
        assert rate * quarters / 4 == pytest.approx(sum(looks))


@given(st.integers(1, 100), st.integers(0, 99))
def test_a_counter_that_fell_counts_from_0(before: int, after: int) -> None:
    """A counter that restarted is not taken to count backwards."""
    counters = Counters()
    for now, value in enumerate((before, after)):
        counters.begin(float(now))
        rate = counters.rate("calls", value)
    assert rate == (after - before if after >= before else after)
    assert counters.recent("calls") == rate


def test_rates_of_calls() -> None:
    """A view has the rates of calls by outcome since the previous one."""
    pair = Pair()
    guard = Guard("rated", Fallback(static(0)))
    pair.later()
    for _ in range(8):
        guard.call(int)
    for _ in range(4):
        guard.call(lambda: 1 / 0)
    first, second = pair.later(2.0), pair.later()
    (shown_guard,) = first["guards"]
    told = shown_guard["rates"]
    assert (told["succeeded"], told["failed"], told["degraded"]) == (4.0, 2.0, 2.0)
    assert second["guards"][0]["rates"]["succeeded"] == 0.0
