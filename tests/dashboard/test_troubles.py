from __future__ import annotations

from typing import Any

import pytest

from seawall import (
    Breaker,
    Bulkhead,
    Fallback,
    Guard,
    RateLimit,
    Retry,
    RetryBudget,
    events,
    static,
)
from seawall.clock import VirtualClock
from seawall.dashboard.bounds import MOST_TROUBLES
from seawall.events.bus import emit
from tests.dashboard.views_support import Pair, check_view, everything

pytestmark = pytest.mark.usefixtures("nobody_else")

BY_ZERO = "ZeroDivisionError: division by zero"


def _troubles_at(*snapshots: Any) -> dict[str, Any]:
    pair = Pair()
    for snapshot in snapshots:
        view = pair.look(snapshot)
    check_view(view)
    return {one["id"]: (one["tone"], one["what"]) for one in view["troubles"]}


def _guard(*policies: dict[str, Any], **told: Any) -> dict[str, Any]:
    return {"guard": [{"name": "vendor", **told, "policies": list(policies)}]}


def _breaker(**told: Any) -> dict[str, Any]:
    return {"policy": "breaker", "mode": "enforce", "state": "open", **told}


SLOTS = {"policy": "bulkhead", "limit": 3, "in_flight": 3, "waiting": 2, "queue_wait": 0.25}

CASES: list[tuple[dict[str, Any], str, str, str]] = [
    (
        _guard(_breaker(retry_after=12.0)),
        "breaker:vendor:0",
        "bad",
        "The breaker is open, calls are refused for 12 s more",
    ),
    *(
        (
            _guard(_breaker(retry_after=seconds)),
            "breaker:vendor:0",
            "bad",
            "The breaker is open, the next call probes",
        )
        for seconds in (0.0, 0.04, -1.0)
    ),
    (
        _guard(_breaker(state="half_open")),
        "breaker:vendor:0",
        "warn",
        "The breaker is half open: a few calls try whether it works again",
    ),
    (
        _guard(_breaker(state="isolated")),
        "breaker:vendor:0",
        "bad",
        "The breaker is isolated: all calls are refused until somebody closes it",
    ),
    (
        _guard(_breaker(mode="shadow")),
        "breaker:vendor:0",
        "warn",
        "The breaker is open, in shadow: no call is refused",
    ),
    (
        _guard(_breaker(keys={"a": {"state": "open"}, "b": {"state": "closed"}})),
        "breaker:vendor:0",
        "bad",
        "The breaker is open for 1 key: a",
    ),
    (
        _guard(_breaker(state="closed", shared={"mode": "local", "store": "s"})),
        "store_mode:vendor:0",
        "warn",
        "The breaker goes without its store, by what this pod knows",
    ),
    (
        _guard({"policy": "rate_limit", "shared": {"mode": "closed"}}),
        "store_mode:vendor:0",
        "bad",
        "The rate limit goes without its store, and refuses everything",
    ),
    (
        _guard({"policy": "retry", "budget": {"tokens": 5.0, "maximum": 10.0}}),
        "budget:vendor:0",
        "warn",
        "The retry budget is not refilled yet: a call that fails now is not retried",
    ),
    (
        _guard(SLOTS),
        "bulkhead:vendor:0",
        "warn",
        "No slot of 3 is free, 2 calls wait, the first for 0.25 s",
    ),
    (_guard(abandoned=11), "abandoned:vendor", "warn", "11 threads run on without a caller"),
    (
        {"store": [{"name": "s", "at": "redis://me:pw@host:1/0", "up": False}]},
        "store:s",
        "bad",
        "The store at redis://host:1/... does not answer",
    ),
    (
        {"outbox": [{"name": "o", "stored": {"pending": 7, "oldest_age": 90.0, "blocked": 0}}]},
        "age:outbox:o",
        "bad",
        "The oldest of the outbox has waited for 90 s, 7 wait",
    ),
    (
        {"outbox": [{"name": "o", "stored": {"pending": 7, "oldest_age": 1.0, "blocked": 2}}]},
        "blocked:o",
        "bad",
        "Events of 2 aggregates wait behind one that failed",
    ),
    (
        {"jobs": [{"name": "j", "stored": {"queued": [4, 300.0]}, "stored_age": 1.0}]},
        "age:jobs:j",
        "bad",
        "The oldest of the jobs has waited for 5 min, 4 wait",
    ),
    (
        {"jobs": [{"name": "j", "stored": {"failed": [4, 300.0]}, "stored_age": 1.0}]},
        "dead:jobs:j",
        "warn",
        "Given up: 4 of the jobs",
    ),
    (
        {"queue": [{"name": "q", "waiting": 0, "dead": 2}]},
        "dead:queue:q",
        "warn",
        "Given up: 2 of the queue",
    ),
    (
        {"pool": [{"name": "p", "limit": 2, "in_flight": 2, "waiting": 3}]},
        "pool:p",
        "warn",
        "3 borrowers wait, there are 2 in all",
    ),
    (
        {"pool": [{"name": "p", "leaked": 1, "borrowers": [{"seconds": 90.0}]}]},
        "leak:p",
        "warn",
        "1 resource was not given back in time, the oldest is out for 90 s",
    ),
    (
        {"executor": [{"name": "e", "workers": 2, "in_flight": 2, "waiting": 1}]},
        "executor:e",
        "warn",
        "No worker of 2 is free, 1 call waits",
    ),
    (
        {
            "health": [
                {
                    "name": "h",
                    "levels": {"live": "healthy", "ready": "unhealthy"},
                    "checks": {"db": {"state": "unhealthy", "output": "password=hunter2"}},
                }
            ]
        },
        "health:h",
        "bad",
        "The service is unhealthy: db",
    ),
    (
        {"lifecycle": [{"name": "l", "state": "draining", "in_flight": 3}]},
        "lifecycle:l",
        "warn",
        "The service is draining, 3 requests in flight",
    ),
    (
        {"service_levels": [{"name": "l", "level": "cached"}]},
        "service_levels:l",
        "warn",
        "The level of service is cached",
    ),
    (
        {
            "upstreams": [
                {
                    "name": "u",
                    "hosts": {"http://a": {"state": "ejected"}, "http://b": {"state": "serving"}},
                }
            ]
        },
        "upstreams:u",
        "warn",
        "Out of service are 1 of 2 hosts: http://a",
    ),
    (
        {"watchdog": [{"name": "w", "lag": 0.4}]},
        "watchdog:w",
        "bad",
        "The event loop is 0.4 s late, and so are all its requests",
    ),
    (
        {"pool": [{"name": "p", "snapshot_error": "OSError: hunter2"}]},
        "unreadable:pool:p",
        "warn",
        "The pool cannot be read",
    ),
    (
        {"jobs": [{"name": "j", "stored": None, "stored_error": "OSError: hunter2"}]},
        "unreadable:jobs:j",
        "warn",
        "The jobs cannot be asked",
    ),
    (
        {"queue": [{"name": "q", "waiting": 0, "stored_age": 600.0}]},
        "old:queue:q",
        "warn",
        "What is known of the queue is 10 min old",
    ),
    (
        {"executor": [{"name": "e", "workers": 2, "in_flight": 2, "waiting": 0}]},
        "load",
        "bad",
        "This process is full to 100 %",
    ),
]


@pytest.mark.parametrize(
    ("snapshot", "id_", "tone", "what"), CASES, ids=[f"{case[1]}-{case[2]}" for case in CASES]
)
def test_what_is_wrong_is_said_plainly(snapshot: Any, id_: str, tone: str, what: str) -> None:
    """Each trouble is one plain sentence, with its number in it and without users' data."""
    told = _troubles_at(snapshot)
    assert told[id_] == (tone, what)
    assert "hunter2" not in repr(told)


def test_where_nothing_is_wrong_nothing_is_said() -> None:
    """A world that is well but for a breaker, a sensor and a dead letter has these troubles."""
    assert set(_troubles_at(everything(), everything())) == {
        "breaker:w-keyed:0",
        "dead:w-pipeline",
        "missing:w-sites:S2",
    }
    off = _guard(_breaker(mode="off"), {**SLOTS, "mode": "off"})
    assert _troubles_at(off, off) == {}


def test_what_happens_now_is_told() -> None:
    """Refusals, shedding, failures and fallbacks are shown while they happen, not later."""
    clock = VirtualClock()
    pair = Pair()
    breaker = Breaker(consecutive=100, mode="off")
    vendor = Guard("vendor", Fallback(static(0)), breaker, RateLimit("10/s"), clock=clock)
    full = Guard("full", Bulkhead(1), clock=clock)
    pair.later()
    for _ in range(20):
        vendor.attempt(lambda: 1 / 0)
    with full.hold():
        for _ in range(3):
            full.attempt(int)
    told = {one["id"]: one["what"] for one in pair.later()["troubles"]}
    assert told == {
        "degraded:vendor": "All answers of the last 1 s are lesser ones: 20 fallbacks",
        "errors:vendor": f"100 % of recent attempts failed; the last: {BY_ZERO}",
        "rate_limit:vendor:2": "The rate limit refuses 50 % of calls, 10/s",
        "bulkhead:full:0": "The bulkhead refuses 75 % of calls, 3/s",
    }
    (_, shown) = pair.watcher.view["guards"]
    assert (shown["tone"], shown["state"]) == ("bad", "failing")
    clock.advance(60)
    for _ in range(7):
        last = pair.later()
    assert last["troubles"] == []
    assert {guard["state"] for guard in last["guards"]} == {"well"}


def _down() -> None:
    raise ConnectionRefusedError


def test_a_spent_budget_is_wrong_only_while_it_refuses() -> None:
    """A budget that refills after an outage is a warning; afterwards nothing is shown."""
    pair = Pair()
    retry = Retry(on=OSError, backoff=0, budget=RetryBudget())
    vendor = Guard("vendor", retry, clock=VirtualClock())
    pair.later()
    for _ in range(14):
        vendor.attempt(_down)
    told = {one["id"]: (one["tone"], one["what"]) for one in pair.later()["troubles"]}
    refused = "The retry budget is spent: 13 failed calls in 1 s not retried"
    assert told["budget:vendor:0"] == ("bad", refused)
    for successes, tone, state in ((40, "warn", "budget not refilled"), (11, "ok", "well")):
        for _ in range(successes):
            vendor.call(str)
        for _ in range(25):  # seconds, after which the share of errors is not told any more
            view = pair.later()
        (guard,) = view["guards"]
        assert (guard["tone"], guard["state"]) == (tone, state)
        assert [one["tone"] for one in view["troubles"]] == [tone] * (tone != "ok")


@pytest.mark.parametrize("made", [2, 0])
@pytest.mark.parametrize(
    "budget", [{"tokens": 5.5, "maximum": 10.0}, {"requests": 9, "retries": 9, "allowed": 10.0}]
)
def test_a_low_budget_is_told_while_retries_spend_it(budget: dict[str, float], made: int) -> None:
    """One that is nearly spent is worth a look while calls are retried, and not in a calm."""
    then = {"policy": "retry", "retries": 5, "budget": budget}
    found = ("warn", "90 % of the retry budget are spent")
    expected = {"budget:vendor:0": found} if made else {}
    assert _troubles_at(_guard(then), _guard({**then, "retries": 5 + made})) == expected


def test_a_ratio_that_nobody_asks_any_more_is_not_told() -> None:
    """Such a budget is full again after its window; its snapshot is of the last call."""
    budget = {"requests": 9, "retries": 10, "allowed": 10.0}
    quiet = _guard({"policy": "retry", "retries": 10, "budget": budget})
    assert _troubles_at(quiet, quiet) == {}


def test_one_failure_is_no_share() -> None:
    """A single call that fails in a quiet guard is not "100 % of attempts"."""
    pair = Pair()
    quiet = Guard("quiet", Breaker())
    pair.later()
    quiet.attempt(lambda: 1 / 0)
    assert pair.later()["troubles"] == []


def test_calls_that_come_seldom_and_fail() -> None:
    """A guard whose calls every three seconds all fail is reported."""
    clock = VirtualClock()
    pair = Pair()
    seldom = Guard("seldom", Breaker(mode="off"), clock=clock)
    for second in range(20):
        if second % 3 == 0:
            seldom.attempt(lambda: 1 / 0)
        clock.advance(1)
        view = pair.later()
    assert [one["what"] for one in view["troubles"]] == [
        f"100 % of recent attempts failed; the last: {BY_ZERO}"
    ]


def test_settings_that_differ() -> None:
    """Different settings of pods are reported for a while, or until they change."""
    pair = Pair()
    fields = {"policy": "breaker", "shared_name": "s", "own": "a", "other": "b"}
    emit(events.SettingsDiffer, "vendor", **fields)
    (one,) = pair.later()["troubles"]
    assert one["what"] == "Pods do not agree on the settings of the breaker"
    emit(events.SettingsChanged, "vendor", policy="breaker", changes={})
    assert pair.later()["troubles"] == []
    emit(events.SettingsDiffer, "vendor", **fields)
    assert pair.later()["troubles"]
    assert pair.later(700.0)["troubles"] == []


def test_the_worst_comes_first_and_the_rest_is_counted() -> None:
    """Of more troubles than are shown, the worst are, and how many there are beside."""
    snapshot = {
        "queue": [
            {"name": f"q{n:03}", "waiting": 1, "dead": 1, "oldest": 99.0 * (n % 2)}
            for n in range(200)
        ]
    }
    view = Pair().look(snapshot)
    check_view(view)
    assert len(view["troubles"]) == MOST_TROUBLES
    assert {one["tone"] for one in view["troubles"]} == {"bad"}
    assert view["troubles"][-1]["what"] == "201 more troubles"
