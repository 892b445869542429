"""Members on the dashboard: rows, troubles and happenings, of one pod and of several."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seawall.dashboard.bounds import MOST_KEYS
from seawall.dashboard.presenters.members import MOST_MEMBERS, member_of
from seawall.dashboard.summary import service_events, service_troubles
from seawall.members import MemberState, MemberView
from tests.dashboard.views_support import NOW, Pair, check_view
from tests.telemetry.world import Members

pytestmark = pytest.mark.usefixtures("nobody_else")

ALIVE, SUSPECTED, CONFIRMED = MemberState.ALIVE, MemberState.SUSPECTED, MemberState.CONFIRMED


def _view(name: str, state: MemberState = ALIVE, **fields: Any) -> MemberView:
    """Return a member that has been in its state for eight seconds."""
    return MemberView(name, state, 2.0, threshold=8.0, **fields)


def _suspected(name: str, reason: str = "no answer") -> MemberView:
    return _view(name, SUSPECTED, level=9.0, reason=reason, by="pod-2")


def _snapshot(*views: MemberView, **told: Any) -> dict[str, Any]:
    return {"members": [{**Members("pods", *views).snapshot(), "name": "pods", **told}]}


def _look(pod: str, *views: MemberView) -> Any:
    view = Pair(pod=pod).look(_snapshot(*views))
    check_view(view)
    return view


def _rows(view: Any) -> dict[str, Any]:
    return {row["name"]: row for row in view["sections"]["Members"]}


def test_each_member_has_its_row():
    """State, since when, level and threshold, round trip, reason and by whom."""
    rows = _rows(_look("pod-1", _suspected("pod-3"), _view("pod-4", round_trip=0.012, level=2.0)))
    assert list(rows) == ["pods", "pods: pod-3", "pods: pod-4"]
    assert rows["pods"]["state"] == "1 suspected, 1 alive"
    assert rows["pods"]["tone"] == "warn"
    bad, well = rows["pods: pod-3"], rows["pods: pod-4"]
    assert (bad["state"], bad["tone"], bad["track"]) == ("suspected", "warn", 1.125)
    assert dict(bad["facts"]) == {
        "for": "8 s",
        "level": "9 of 8",
        "reason": "no answer",
        "by": "pod-2",
    }
    assert (well["state"], well["tone"], well["track"]) == ("alive", "ok", 0.25)
    assert dict(well["facts"]) == {"for": "8 s", "level": "2 of 8", "round trip": "12 ms"}
    assert member_of(bad, "pods") == "pod-3"
    assert member_of(bad, "others") is None
    assert member_of(rows["pods"], "pods") is None


def test_a_group_says_what_this_process_did():
    """Suspicions and how many were wrong, own pauses, health score, round trips and messages."""
    members = Members("pods", _view("pod-3"))
    for after in ("alive", "confirmed"):
        members.change("pod-3", "alive", "suspected")
        members.change("pod-3", "suspected", after)
    members.group.note_own_pause(6.0)
    members.group.round_trips.add(0.004)
    members.health_score = 3
    pair = Pair()
    for sent in (0, 20):
        members.messages["sent"] = sent
        view = pair.look({"members": [{**members.snapshot(), "name": "pods"}]})
    facts = dict(_rows(view)["pods"]["facts"])
    assert facts["suspected so far"] == "2 times, 50 % wrong"
    assert facts["own pauses"] == "1, 6 s"
    assert facts["health score"] == "3 of 8"
    assert facts["messages"] == "20/s sent"
    assert facts["round trip"].endswith("(p99)")


def test_a_group_without_messages_says_nothing_of_them():
    """Heartbeats through a store have no messages, and no health score."""
    told = {"messages": {"sent": 0, "received": 0, "refused": 0}, "health_score": None}
    view = Pair().look(_snapshot(_view("pod-3"), **told))
    assert dict(_rows(view)["pods"]["facts"]) == {"this pod": "pod-0"}


@pytest.mark.parametrize(
    ("level", "threshold", "text"),
    [
        (9.75e-15, 8.0, "0 of 8"),
        (7.9512, 8.0, "8 of 8"),
        (12.3456, 8.0, "12.3 of 8"),
        (9280.0, 8.0, "over 100 of 8"),
        (150.0, 200.0, "150 of 200"),
        (1.0, 1.0, "1 of 1"),
    ],
)
def test_a_level_is_a_number_that_a_person_reads(level, threshold, text):
    """The level of a silent member grows without end, and that of a punctual one is nearly 0."""
    view = MemberView("pod-3", SUSPECTED, 2.0, level=level, threshold=threshold)
    row = _rows(_look("pod-1", view))["pods: pod-3"]
    assert dict(row["facts"])["level"] == text
    assert row["figures"]["level"] == pytest.approx(level, abs=1e-6)


def test_the_past_of_a_member_is_its_level_as_a_share_of_the_threshold():
    """So curves of members with different thresholds can be compared."""
    pair = Pair()
    for level in (0.0, 4.0, 16.0):
        pair.look(_snapshot(_view("pod-3", level=level)))
    assert pair.watcher.history["rows"]["member/pods: pod-3"] == [0.0, 0.5, 2.0]


def test_a_thousand_members_are_shown_as_far_as_there_is_room():
    """The first ones, which are the worst; the group says how many are not shown."""
    views = [_suspected("ill"), *(_view(f"pod-{number}") for number in range(999))]
    view = _look("pod-1", *views)
    rows = _rows(view)
    assert len(rows) == MOST_MEMBERS + 1
    assert "pods: ill" in rows
    assert dict(rows["pods"]["facts"])["not shown"] == "800"
    assert view["happenings"] == []


# Troubles


def test_a_suspicion_is_a_trouble_since_it_began():
    """The snapshot says for how long it has lasted."""
    (trouble,) = _look("pod-1", _suspected("pod-3"), _view("pod-4"))["troubles"]
    assert trouble["id"] == "suspected:pods:pod-3"
    assert (trouble["tone"], trouble["where"]) == ("warn", "pods")
    assert trouble["what"] == "pod-3 is suspected: no answer"
    assert trouble["since"] == NOW + 1.0 - 8.0


def test_a_confirmed_member_is_bad():
    """It is a trouble for as long as the group knows of it."""
    (trouble,) = _look("pod-1", _view("pod-3", CONFIRMED))["troubles"]
    assert (trouble["tone"], trouble["what"]) == ("bad", "pod-3 is confirmed as failed")


@pytest.mark.parametrize(
    ("kind", "seconds", "tone"),
    [
        ("cluster", 600.0, "bad"),
        ("cluster", 601.0, "off"),
        ("heartbeats", 86400.0, "bad"),
    ],
)
def test_a_member_of_a_cluster_is_gone_for_good_after_a_while(kind: str, seconds: float, tone: str):
    """Another pod is in its place by then; a peer that is watched on purpose stays a trouble."""
    snapshot = _snapshot(_view("pod-3", CONFIRMED), _view("pod-4"), kind=kind)
    snapshot["members"][0]["members"][0]["seconds"] = seconds
    view = Pair().look(snapshot)
    rows = _rows(view)
    assert rows["pods: pod-3"]["tone"] == tone
    assert rows["pods"]["tone"] == ("bad" if tone == "bad" else "ok")
    assert rows["pods"]["state"] == "1 confirmed, 1 alive"
    assert [one["tone"] for one in view["troubles"]] == (["bad"] if tone == "bad" else [])


def test_many_suspected_members_are_one_trouble():
    """A pod that is cut off suspects everybody: that is one trouble, not a hundred."""
    views = [_suspected(f"pod-{number}") for number in range(MOST_KEYS + 1)]
    (trouble,) = _look("pod-1", *views, _view("well"))["troubles"]
    assert trouble["what"].startswith("6 of 7 members are suspected: pod-0, pod-1,")
    assert trouble["what"].endswith("and 1 more")


def test_pods_that_disagree_are_counted():
    """A member that two of four pods suspect is one problem, which says so."""
    views = [_look(f"pod-{n}", _suspected("pod-9")) for n in (1, 2)]
    views += [_look(f"pod-{n}", _view("pod-9")) for n in (3, 4)]
    (problem,) = service_troubles(views, NOW + 1.0)
    assert problem["what"] == "pod-9 is suspected by 2 of 4 pods: no answer"
    assert problem["pods"] == ["pod-1", "pod-2"]
    assert problem["since"] == NOW + 1.0 - 8.0


def test_only_pods_that_watch_the_group_are_counted():
    """A pod without the group has no say; of a single one nothing is counted."""
    views = [_look("pod-1", _suspected("pod-9")), Pair(pod="pod-2").look({})]
    (problem,) = service_troubles(views, NOW + 1.0)
    assert problem["what"] == "pod-9 is suspected: no answer"


def test_what_some_suspect_and_others_have_confirmed_is_one_problem():
    """The confirmation explains the suspicion."""
    views = [_look("pod-1", _suspected("pod-9")), _look("pod-2", _view("pod-9", CONFIRMED))]
    (problem,) = service_troubles(views, NOW + 1.0)
    assert problem["what"] == "pod-9 is confirmed as failed by 1 of 2 pods"
    assert [one["id"] for one in problem["consequences"]] == ["suspected:pods:pod-9"]


@pytest.mark.parametrize(("score", "found"), [(3, False), (4, True), (None, False)])
def test_a_pod_that_doubts_itself_says_so(score: int | None, found: bool):  # noqa: FBT001
    """From half of the worst health score on."""
    troubles = Pair().look(_snapshot(_view("pod-3"), health_score=score))["troubles"]
    assert [one["id"] for one in troubles] == ["member_health:pods"] * found


def test_messages_that_are_refused_are_a_trouble():
    """Messages signed with another key are reported."""
    pair = Pair()
    for refused in (0, 10):
        told = {"messages": {"sent": 1, "received": 0, "refused": refused}}
        view = pair.look(_snapshot(_view("pod-3"), **told))
    (trouble,) = view["troubles"]
    assert trouble["what"] == "Messages of members are refused, 10/s"


# Happenings


def test_what_pods_see_of_a_member_is_one_sentence():
    """A pause that three pods noticed is reported once."""
    members = Members("pods")
    pairs = [Pair(pod=f"pod-{number}") for number in range(3)]
    members.change("pod-9", "alive", "suspected")
    for pair in pairs:
        pair.later(4.0)
    members.change("pod-9", "suspected", "alive")
    views = [pair.later(4.0) for pair in pairs]
    (told,) = service_events(views)
    assert told["where"] == "pods"
    assert told["what"] == "pod-9 was suspected and was cleared in 4 s on 3 pods"
    assert told["tone"] == "ok"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("unknown", "alive", "joined 2 times"),
        ("confirmed", "alive", "came back 2 times"),
        ("alive", "left", "left 2 times"),
        ("suspected", "confirmed", "was confirmed as failed 2 times"),
    ],
)
def test_each_change_has_its_verb(before: str, after: str, told: str):
    """What a member did twice, with something between, is counted."""
    members, pair = Members("pods"), Pair()
    for change in ((before, after), ("alive", "suspected"), (before, after)):
        members.change("pod-9", *change)
    (found,) = service_events([pair.later()])
    assert found["what"] == f"pod-9 was suspected and {told}"


# Anything may be in a snapshot

LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
SHOWN = st.dictionaries(
    st.sampled_from(
        ["name", "state", "seconds", "level", "threshold", "round_trip", "reason", "by"]
    ),
    LEAVES | st.sampled_from(["alive", "suspected", "confirmed", 5e-324]),
)
GROUPS = st.fixed_dictionaries(
    {},
    optional={
        "name": LEAVES,
        "own": LEAVES,
        "members": st.lists(SHOWN | LEAVES, max_size=8) | LEAVES,
        "counts": st.dictionaries(
            st.sampled_from(["suspicions", "false_suspect_rate", "own_pauses"]), LEAVES
        ),
        "health_score": LEAVES,
        "round_trip": st.dictionaries(st.sampled_from(["p50", "p99"]), LEAVES) | LEAVES,
        "messages": st.dictionaries(st.sampled_from(["sent", "refused"]), LEAVES) | LEAVES,
    },
)


@settings(deadline=None)
@given(st.lists(GROUPS, max_size=3))
def test_any_shape_gives_a_view(groups: list[Any]):
    """Nothing raises, and the view is one."""
    pair = Pair()
    pair.look({"members": groups})
    view = pair.look({"members": groups})
    check_view(view)
    service_troubles([view, view], NOW)
