"""What all pods together show: problems by cause, happenings by subject, a verdict."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Fallback, Guard, Retry, RetryBudget, static
from seawall.clock import VirtualClock
from seawall.dashboard import summary
from seawall.dashboard.presenters import guards
from seawall.dashboard.summary import (
    PageLinks,
    service_events,
    service_troubles,
    service_verdict,
    tone_of,
)
from tests.dashboard.app_support import view_of
from tests.dashboard.views_support import NOW, Pair

pytestmark = pytest.mark.usefixtures("nobody_else")


def _trouble(name: str, cause: str = "", **more: Any) -> dict[str, Any]:
    told = {"id": name, "tone": "warn", "where": "w", "what": name, "advice": "", "since": NOW}
    return told | ({"cause": cause} if cause else {}) | more


def _pod(name: str, *troubles: dict[str, Any], **more: Any) -> Any:
    view: Any = view_of(name, at=NOW)
    return view | {"troubles": list(troubles), "happenings": [], "age": 0.0} | more


def _tree(problems: Any) -> dict[str, list[str]]:
    return {one["id"]: sorted(c["id"] for c in one["consequences"]) for one in problems}


# By cause


def _cut_off(pod: str) -> Any:
    """Return the view of a pod whose store is cut, as a watcher makes it."""
    shared = {"mode": "local", "store": "redis"}
    policies = [
        {"policy": "breaker", "state": "closed", "shared": shared},
        {"policy": "rate_limit", "shared": shared},
    ]
    snapshot = {
        "store": [{"name": "redis", "at": "redis://h", "up": False}],
        "guard": [{"name": name, "policies": policies} for name in ("vendor", "search")],
        "request_limits": [{"name": "users", "limits": {}, "shared": shared}],
    }
    return Pair(pod=pod).look(snapshot)


def test_one_lost_store_is_one_problem() -> None:
    """Whatever shares it on whatever pods is a consequence of it."""
    views = [_cut_off(f"pod-{n}") for n in range(3)]
    (problem,) = service_troubles(views, NOW + 1)
    assert problem["id"] == "store:redis"
    assert problem["pods"] == ["pod-0", "pod-1", "pod-2"]
    assert len(problem["consequences"]) == 5
    assert all(one["pods"] == problem["pods"] for one in problem["consequences"])
    words = {"tone": "bad", "words": "1 thing is wrong"}
    assert service_verdict(views, service_troubles(views, NOW + 1)) == words


def test_without_causes_each_consequence_would_be_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the cause in each trouble that makes one problem of them."""
    monkeypatch.setattr(guards, "lost_store", lambda _shared: "")
    assert len(service_troubles([_cut_off("pod-0")], NOW + 1)) == 6


def _outage(pod: str) -> Any:
    """Return the view of a pod whose dependency fails."""
    pair = Pair(pod=pod)
    vendor = Guard(
        "vendor",
        Fallback(static(0)),
        Retry(on=OSError, backoff=0, attempts=2, budget=RetryBudget()),
        Breaker(consecutive=30),
        clock=VirtualClock(),
    )
    pair.later()

    def fails() -> None:
        raise ConnectionRefusedError

    for _ in range(40):
        vendor.attempt(fails)
    view = pair.later()
    vendor.close()
    return view


def test_an_outage_is_one_problem() -> None:
    """The open breaker is it; failed attempts, the spent budget and fallbacks follow from it."""
    view = _outage("pod-0")
    problems = service_troubles([view], NOW + 2)
    follows = ["budget:vendor:1", "degraded:vendor", "errors:vendor"]
    assert _tree(problems) == {"breaker:vendor:2": follows}
    words = "The service is degraded: 1 thing is wrong"
    assert service_verdict([view], problems) == {"tone": "bad", "words": words}


def test_without_the_order_of_explanations_an_outage_is_four_problems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the order in which a guard's troubles explain each other that makes it one."""
    monkeypatch.setattr(guards, "_explains", lambda _cause, _one: False)
    assert len(service_troubles([_outage("pod-0")], NOW + 2)) == 4


def test_a_limit_explains_fallbacks_and_nothing_else() -> None:
    """A rate limit that refuses is a problem of its own beside an open breaker."""
    found = [
        guards.FoundTrouble(f"{kind}:g", "warn", "g", kind)
        for kind in ("breaker", "rate_limit", "budget", "degraded", "differ")
    ]
    causes = {one.id: one.cause for one in guards._with_causes(found)}
    expected = {"budget:g": "breaker:g", "degraded:g": "breaker:g"}
    assert {one: cause for one, cause in causes.items() if cause} == expected
    causes = {one.id: one.cause for one in guards._with_causes(found[1:])}
    assert {one: cause for one, cause in causes.items() if cause} == {"degraded:g": "rate_limit:g"}


def test_a_fallback_that_answers_everything_degrades_the_service() -> None:
    """The guard is degraded though each of its layers is well, and so is the service."""
    pair = Pair()
    inner = Guard("inner", Breaker(consecutive=100), clock=VirtualClock())
    outer = Guard("outer", Fallback(static(0)), clock=VirtualClock())
    pair.later()

    def fails() -> None:
        raise ConnectionRefusedError

    for _ in range(20):
        outer.attempt(lambda: inner.call(fails))
    view = pair.later()
    outer_view = next(one for one in view["guards"] if one["name"] == "outer")
    layers = {layer["tone"] for layer in outer_view["stack"]}
    assert (outer_view["tone"], layers) != ("ok", {"ok"})
    degraded = next(one for one in view["troubles"] if one["id"] == "degraded:outer")
    assert degraded["what"] == "All answers of the last 1 s are lesser ones: 20 fallbacks"
    assert degraded["degrades"]
    words = service_verdict([view], service_troubles([view], NOW + 2))["words"]
    assert words.startswith("The service is degraded: ")


@pytest.mark.parametrize(
    ("succeeded", "degraded", "state", "degrades"),
    [(0, 9, "degraded", True), (5, 5, "degraded", True), (99, 1, "well", False)],
)
def test_a_few_fallbacks_do_not_degrade_the_service(
    succeeded: int, degraded: int, state: str, *, degrades: bool
) -> None:
    """From half of the answers on it is degraded; below, the fallbacks are worth a look."""
    pair = Pair()
    pair.look({"guard": [{"name": "g"}]})
    view = pair.look({"guard": [{"name": "g", "succeeded": succeeded, "degraded": degraded}]})
    assert view["guards"][0]["state"] == state
    (trouble,) = view["troubles"]
    assert trouble.get("degrades", False) is degrades


def test_what_is_worst_comes_first_with_all_that_follows_from_it() -> None:
    """A problem is as bad as its worst consequence; of the same tone the oldest is first."""
    first = _pod(
        "a",
        _trouble("old", since=NOW - 50),
        _trouble("cause", since=NOW - 5),
        _trouble("follows", "cause", tone="bad"),
        _trouble("new"),
    )
    problems = service_troubles([first], NOW)
    assert [one["id"] for one in problems] == ["cause", "old", "new"]
    assert [tone_of(one) for one in problems] == ["bad", "warn", "warn"]
    assert service_verdict([first], problems)["words"] == "1 thing is wrong, 2 to look at"


def test_a_trouble_of_several_pods_is_the_worst_and_oldest_of_them() -> None:
    """Its sentence is that of the pod where it is worst."""
    views = [
        _pod("b", _trouble("x", tone="bad", what="worse", since=NOW - 1)),
        _pod("a", _trouble("x", since=NOW - 9, degrades=True)),
    ]
    (problem,) = service_troubles(views, NOW)
    assert problem["pods"] == ["a", "b"]
    assert (problem["what"], problem["since"], problem["degrades"]) == ("worse", NOW - 9, True)


def test_consequences_of_a_cause_that_is_not_shown_are_one_problem() -> None:
    """The first of them stands for it, also for those of other pods."""
    views = [_pod(pod, _trouble(f"{pod}1", "c"), _trouble(f"{pod}2", "c")) for pod in "ab"]
    assert _tree(service_troubles(views, NOW)) == {"a1": ["a2", "b1", "b2"]}


def test_pods_that_are_not_heard_of_follow_from_the_lost_store() -> None:
    """Such a pod is marked as stale; its problems may be over."""
    own = _pod("a", _trouble("store:s", tone="bad"), _trouble("dashboard/pods", "store:s"))
    late = _pod("b", _trouble("breaker:vendor:0"), age=10.0)
    gone = _pod("c", _trouble("pod-gone/c"), age=10.0, gone=NOW - 10)
    tree = _tree(service_troubles([own, late, gone], NOW))
    assert tree == {"store:s": ["dashboard/pods", "stale/b"], "pod-gone/c": []}


IDS = st.sampled_from("abcdef")


@given(st.lists(st.lists(st.tuples(IDS, st.sampled_from("abcdefxy") | st.just("")))))
def test_no_circle_of_causes_goes_on_for_ever(pods: list[list[tuple[str, str]]]) -> None:
    """Each trouble is there once, as a problem or below one, whatever pods say of causes."""
    views = [
        _pod(f"p{place}", *(_trouble(name, cause) for name, cause in told))
        for place, told in enumerate(pods)
    ]
    problems = service_troubles(views, NOW)
    json.dumps(problems)
    seen = [one["id"] for root in problems for one in (root, *root["consequences"])]
    assert sorted(seen) == sorted({name for told in pods for name, _ in told})
    assert not [one for root in problems for one in root["consequences"] if one["consequences"]]


def test_problems_are_bounded() -> None:
    """Of twenty pods with a hundred different troubles each, the worst are shown."""
    views = [
        _pod(f"p{pod}", *(_trouble(f"{pod}-{n}", "c" if n % 2 else "") for n in range(100)))
        for pod in range(20)
    ]
    problems = service_troubles(views, NOW)
    assert len(problems) == 100
    assert max(len(one["consequences"]) for one in problems) <= summary.MOST_CONSEQUENCES


@pytest.mark.parametrize(("views", "words"), [((), "No pod has reported yet")])
def test_a_verdict_without_pods(views: Any, words: str) -> None:
    """Where nothing is known, nothing is said to be well."""
    assert service_verdict(views, []) == {"tone": "off", "words": words}
    assert service_verdict([_pod("a")], []) == {"tone": "ok", "words": "All is well"}


# By subject


def _happening(
    about: str, counts: dict[str, int], at: float = 0.0, began: float | None = None, **more: Any
) -> dict[str, Any]:
    began = at if began is None else began
    told = {"at": NOW + at, "began": NOW + began, "tone": "bad", "where": "vendor"}
    return told | {"what": "the last one", "about": about, "counts": counts} | more


BREAKER = "the breaker"
FLAPS = {"tried again": 6, "closed": 6, "opened": 7}


@pytest.mark.parametrize(
    ("pods", "expected"),
    [
        ([[_happening(BREAKER, {"opened": 1})]], "the last one"),
        ([[_happening(BREAKER, {"opened": 1})]] * 3, "the breaker opened on 3 pods"),
        (
            [[_happening(BREAKER, FLAPS, 120, 0)]] * 3,
            "the breaker closed 6 times and opened 7 times in 2 min on 3 pods",
        ),
        ([[_happening(BREAKER, {"tried again": 1})]], "the last one"),
        (
            [[_happening("the store", {"was lost": 1, "came back": 1}, 3, 0)]] * 2,
            "the store was lost and came back in 3 s on 2 pods",
        ),
        ([[_happening("a job died", {"": 1}, what="a job died")]], "a job died"),
        ([[_happening("a job", {"": 1})]] * 2, "the last one (on 2 pods)"),
        ([[_happening("a job", {"": 4}, 9, 0)]], "the last one (4 times in 9 s)"),
        ([[_happening("a job", {"": 4}, 9, 0)]] * 2, "the last one (8 times in 9 s on 2 pods)"),
        (
            [[_happening(BREAKER, {"opened": 2}, 9, 0), _happening(BREAKER, {"opened": 1}, 90)]],
            "the breaker opened 3 times in 90 s",
        ),
    ],
)
def test_what_happened_is_one_sentence(pods: list[list[Any]], expected: str) -> None:
    """Flaps and pods are counted in it; what happened once on one pod is said as it is."""
    views = [_pod(f"pod-{n}", happenings=told) for n, told in enumerate(pods)]
    (one,) = service_events(views)
    assert one["what"] == expected
    assert one["pods"] == [view["pod"]["name"] for view in views]


def test_what_is_far_apart_or_of_another_subject_is_another_occurrence() -> None:
    """The latest is first; each has the tone of its last event."""
    views = [
        _pod(
            "pod-1",
            happenings=[
                _happening(BREAKER, {"opened": 1}, 0),
                _happening(BREAKER, {"closed": 1}, 500, tone="ok"),
                _happening("the store", {"was lost": 1}, 500.5),
            ],
        ),
        _pod("pod-2", happenings=[_happening(BREAKER, {"opened": 1}, 1)]),
    ]
    told = [(one["at"] - NOW, one["tone"], one["pods"]) for one in service_events(views)]
    assert told == [
        (500.5, "bad", ["pod-1"]),
        (500.0, "ok", ["pod-1"]),
        (1.0, "bad", ["pod-1", "pod-2"]),
    ]


def test_occurrences_are_bounded() -> None:
    """Of more than are shown, the latest are."""
    told = [_happening(f"s{n}", {"": 1}, n) for n in range(100)]
    shown = service_events([_pod("a", happenings=told)])
    assert [one["at"] - NOW for one in shown] == [float(n) for n in range(99, 39, -1)]


# Links


def test_links_are_made_from_templates() -> None:
    """A trouble leads to the runbook of its kind, and it and a happening to their trace."""
    links = PageLinks("https://wiki/{kind}#x", "http://traces/{trace_id}")
    view = _pod(
        "a",
        _trouble("breaker:vendor:0", trace="ab"),
        _trouble("dashboard/pods"),
        happenings=[_happening(BREAKER, {"opened": 1}, trace='"><script>')],
    )
    first, second = service_troubles([view], NOW, links)
    assert (first["runbook"], first["trace_link"]) == ("https://wiki/breaker#x", "http://traces/ab")
    assert second["runbook"] == "https://wiki/dashboard#x"
    assert "trace_link" not in second
    (one,) = service_events([view], links)
    assert one["trace_link"] == "http://traces/%22%3E%3Cscript%3E"
    assert "runbook" not in service_troubles([view], NOW)[0]


@pytest.mark.parametrize("name", ["runbook", "trace"])
@pytest.mark.parametrize(
    "value", ["", "javascript:{kind}{trace_id}", "//wiki/{kind}{trace_id}", "https://wiki/", 3]
)
def test_a_template_is_an_address_with_its_field(name: str, value: Any) -> None:
    """Anything else is refused at once, with what to write."""
    with pytest.raises((TypeError, ValueError), match=f"{name}='https://"):
        PageLinks(**{name: value})
