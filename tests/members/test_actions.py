"""Actions on what a failure detector says: what is done, what the bound holds back, what is undone.

The group is a real `Group` whose members are moved by hand.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import AsyncExitStack, closing
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import RateLimit, subscribe
from seawall.clients.upstreams import Outliers, Upstreams
from seawall.clock import VirtualClock
from seawall.durable import Database, Sqlite, migrate
from seawall.events import HostEjected, HostRestored
from seawall.leases import Lease
from seawall.members import (
    Heartbeats,
    Leader,
    MembersPresent,
    MemberState,
    MemberView,
    eject_suspected,
    fixed_timeout,
    hand_over,
    split_limit,
)
from seawall.models import outliers
from seawall.testing import run_virtual, virtual_time
from seawall.web import Health
from tests.members.cluster.network import Hub
from tests.members.support import Candidate, Watchers
from tests.support import falsified, let_pass, new_guard

UNKNOWN, ALIVE = MemberState.UNKNOWN, MemberState.ALIVE
SUSPECTED, CONFIRMED, LEFT = MemberState.SUSPECTED, MemberState.CONFIRMED, MemberState.LEFT

URLS = [f"http://host-{number}" for number in range(9)]


def new_upstreams(hosts=URLS, **settings) -> Upstreams:
    return Upstreams("vendor", hosts, rng=Random(7), **settings)


def aside(upstreams: Upstreams) -> set[str]:
    """Return the hosts that are set aside."""
    hosts = upstreams.snapshot()["hosts"]
    return {url for url, host in hosts.items() if host["state"] == "suspected"}


def picked(upstreams: Upstreams, requests: int = 100) -> set[str]:
    """Return the hosts that are asked."""
    asked = set()
    for _ in range(requests):
        with upstreams.pick() as host:
            asked.add(host.url)
    return asked


# --- Hosts ---


def test_a_suspected_host_gets_no_requests_until_it_is_cleared():
    """It is set aside at the change, and back at the next one."""
    # No time passes, so all hosts are equally fast, and each of them is asked.
    members, upstreams = Watchers(*URLS), new_upstreams(clock=VirtualClock())
    action = eject_suspected(members, upstreams)
    members.move(URLS[0], SUSPECTED)
    assert aside(upstreams) == {URLS[0]}
    assert URLS[0] not in picked(upstreams)
    assert action.snapshot()["acted_on"] == [URLS[0]]
    members.move(URLS[0], ALIVE)
    assert aside(upstreams) == set()
    assert picked(upstreams) == set(URLS)


def test_a_host_that_is_suspected_already_is_set_aside_at_once():
    """An action that starts late begins with the group as it is."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    members.move(URLS[3], CONFIRMED)
    eject_suspected(members, upstreams)
    assert aside(upstreams) == {URLS[3]}


@pytest.mark.parametrize("state", [SUSPECTED, CONFIRMED, LEFT])
def test_a_member_that_is_forgotten_is_forgotten_by_the_action(state):
    """Nothing is held against a host of which nothing is known."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    eject_suspected(members, upstreams)
    members.move(URLS[0], state)
    assert aside(upstreams) == {URLS[0]}
    members.forget(URLS[0])
    assert aside(upstreams) == set()


def test_a_closed_action_has_given_all_hosts_back_and_hears_of_no_change():
    """Closing undoes; closing again does nothing; `with` closes."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    with eject_suspected(members, upstreams) as action:
        members.move(URLS[0], SUSPECTED)
    assert aside(upstreams) == set()
    members.move(URLS[1], SUSPECTED)
    action.close()
    assert aside(upstreams) == set()
    assert (repr(action), action.snapshot()["acted_on"]) == (
        "<eject_suspected of 'pods': closed>",
        [],
    )


def test_a_detector_that_is_wrong_about_everybody_ejects_a_third(caplog):
    """The others are asked; what is held back is counted, and logged once."""
    members, upstreams = Watchers(*URLS), new_upstreams(clock=VirtualClock())
    action = eject_suspected(members, upstreams)
    with caplog.at_level(logging.WARNING, "seawall"):
        for url in URLS:
            members.move(url, SUSPECTED)
        assert aside(upstreams) == set(URLS[:3])
        assert picked(upstreams) == set(URLS[3:])
        seen = action.snapshot()
        assert (seen["held_back"], seen["times_held_back"]) == (URLS[3:], 6)
        members.move(URLS[0], ALIVE)
    assert aside(upstreams) == set(URLS[1:4])  # the first that was held back takes its place
    said = [r.getMessage() for r in caplog.records if "would be acted on" in r.getMessage()]
    assert len(said) == 1
    assert "most=0.333 allows no more" in said[0]


def test_the_worst_are_set_aside_first():
    """A confirmed member is more surely gone than one that is only suspected."""
    members, upstreams = Watchers(*URLS[:3]), new_upstreams(URLS[:3])
    eject_suspected(members, upstreams)
    members.move(URLS[0], SUSPECTED)
    members.move(URLS[1], SUSPECTED)
    assert aside(upstreams) == {URLS[0]}
    members.move(URLS[1], CONFIRMED)
    assert aside(upstreams) == {URLS[1]}


def test_the_last_host_is_never_set_aside():
    """Not even if all may be."""
    members, upstreams = Watchers(*URLS[:2]), new_upstreams(URLS[:2])
    eject_suspected(members, upstreams, most=1.0)
    for url in URLS[:2]:
        members.move(url, CONFIRMED)
    assert len(aside(upstreams)) == 1


def test_suspicions_and_ejections_share_the_bound_of_the_set():
    """A detector causes no panic: beside a host that was ejected for failures there is no room."""
    with virtual_time() as clock:
        members = Watchers(*URLS[:3])
        upstreams = new_upstreams(URLS[:3], outliers=Outliers(consecutive=1, eject_for=10.0))
        action = eject_suspected(members, upstreams)
        for _ in range(20):
            with upstreams.pick() as host:
                if host.url == URLS[0]:
                    host.failed()
        members.move(URLS[1], SUSPECTED)
        seen = upstreams.snapshot()
        states = [host["state"] for host in seen["hosts"].values()]
        assert (states, seen["panic"]) == (["ejected", "serving", "serving"], False)
        assert action.snapshot()["held_back"] == [URLS[1]]
        clock.advance(11.0)  # the ejection is over, so there is room
        assert aside(upstreams) == {URLS[1]}


def test_hosts_are_found_by_name_address_metadata_or_function():
    """Whichever of a member's texts is a host; or what the user's function returns."""
    members = Watchers()
    upstreams = new_upstreams(URLS[:8])
    eject_suspected(members, upstreams, most=0.5)
    members.move(URLS[0], SUSPECTED)
    members.move("b", SUSPECTED, address=URLS[1])
    members.move("c", SUSPECTED, metadata=URLS[2].encode())
    members.move("d", SUSPECTED, metadata=b"\xff")
    assert aside(upstreams) == set(URLS[:3])
    other = new_upstreams()
    eject_suspected(members, other, host=lambda member: f"http://host-{'abcd'.find(member.name)}")
    assert aside(other) == set(URLS[1:4])


def test_names_that_fit_no_host_are_logged_once(caplog):
    """A mapping that matches no host would otherwise eject none, silently."""
    members, upstreams = Watchers("a", "b"), new_upstreams()
    with caplog.at_level(logging.WARNING, "seawall"):
        eject_suspected(members, upstreams)
        assert not caplog.records
        members.move("a", SUSPECTED)
        members.move("b", SUSPECTED)
    assert [r.getMessage()[:60] for r in caplog.records if "no member" in r.getMessage()] == [
        "eject_suspected: no member of 'pods' is one of the hosts of "
    ]


def test_events_say_which_host_is_out_and_why():
    """One event for each change of a host."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    events = []
    stop = subscribe(events.append, HostEjected, HostRestored)
    eject_suspected(members, upstreams)
    members.move(URLS[0], SUSPECTED)
    members.move(URLS[0], CONFIRMED)
    members.move(URLS[0], ALIVE)
    stop()
    assert [(type(event), event.host, event.cause) for event in events] == [
        (HostEjected, URLS[0], "suspected in the group 'pods'"),
        (HostRestored, URLS[0], "no longer suspected in the group 'pods'"),
    ]


def test_two_groups_set_aside_the_hosts_of_one_set_apart():
    """What one action undoes, the other may still want."""
    first, second, upstreams = Watchers(*URLS), Watchers(*URLS), new_upstreams()
    one, _two = eject_suspected(first, upstreams), eject_suspected(second, upstreams)
    first.move(URLS[0], SUSPECTED)
    second.move(URLS[0], SUSPECTED)
    second.move(URLS[1], SUSPECTED)
    assert aside(upstreams) == set(URLS[:2])
    one.close()
    assert aside(upstreams) == set(URLS[:2])


def test_a_listener_may_close_the_action_that_it_hears_of():
    """Closing takes no lock of the caller, and undoes the effect."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    action = eject_suspected(members, upstreams)
    stop = subscribe(lambda _event: action.close(), HostEjected)
    members.move(URLS[0], SUSPECTED)
    stop()
    assert aside(upstreams) == set()


def test_a_function_of_the_user_that_fails_leaves_no_subscriber_behind():
    """The error comes out, and later changes call nothing."""
    members = Watchers(*URLS)
    calls = []

    def host(member: MemberView) -> str:
        calls.append(member.name)
        raise KeyError(member.name)

    with pytest.raises(KeyError):
        eject_suspected(members, new_upstreams(), host=host)
    calls.clear()
    members.move(URLS[0], SUSPECTED)
    assert calls == []


def test_changes_of_many_threads_leave_the_state_of_the_group():
    """Whichever thread is last, the action matches the group."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    eject_suspected(members, upstreams)
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        rng = Random(number)
        begin.wait()
        for _ in range(50):
            members.move(rng.choice(URLS[number::4]), rng.choice([ALIVE, SUSPECTED]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ill = {url for url, view in members.views.items() if view.state is SUSPECTED}
    assert len(aside(upstreams)) == min(3, len(ill))
    assert aside(upstreams) <= ill


STEPS = st.lists(
    st.tuples(
        st.sampled_from(URLS),
        st.sampled_from([ALIVE, SUSPECTED, CONFIRMED, LEFT, "forgotten", "other hosts"]),
    ),
    max_size=30,
)


def at_most_a_third(steps) -> None:
    """Assert that of any hosts at most a third is set aside, only ill ones, and all come back."""
    members, upstreams = Watchers(*URLS), new_upstreams()
    action = eject_suspected(members, upstreams)
    for url, step in steps:
        if step == "other hosts":
            upstreams.update(hosts=URLS[: URLS.index(url) + 1])
        elif step == "forgotten":
            if url in members.views:
                members.forget(url)
        else:
            members.move(url, step)
        out = aside(upstreams)
        assert len(out) <= len(upstreams.hosts) / 3
        ill = {name for name, view in members.views.items() if view.state not in (ALIVE, UNKNOWN)}
        assert out <= ill
        room = outliers.share_of(1 / 3, len(upstreams.hosts))
        assert len(out) == min(room, len(ill.intersection(upstreams.hosts)))
        assert set(action.snapshot()["acted_on"]) == out
    action.close()
    assert aside(upstreams) == set()


@given(STEPS)
def test_under_any_history_at_most_the_share_is_acted_on_and_all_is_undone(steps):
    """Members come, go and are forgotten, and the hosts of the set change."""
    at_most_a_third(steps)


def test_the_share_needs_the_bound(monkeypatch):
    """Without it, a detector that is wrong about all would take more than a third out."""
    monkeypatch.setattr(outliers, "share_of", lambda _share, hosts: hosts)
    assert falsified(at_most_a_third, STEPS)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_asks_all_hosts_until_its_own_detector_speaks():
    """No detector runs in a child process, so a suspicion would never end there."""
    members, upstreams = Watchers(*URLS), new_upstreams(clock=VirtualClock())
    eject_suspected(members, upstreams)
    members.move(URLS[0], SUSPECTED)
    child = os.fork()
    if not child:
        try:
            is_well = aside(upstreams) == set() and picked(upstreams) == set(URLS)
            members.move(URLS[1], SUSPECTED)
            is_well = is_well and aside(upstreams) == set(URLS[:2])
        except BaseException:  # noqa: BLE001 - the parent asserts
            is_well = False
        os._exit(0 if is_well else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert aside(upstreams) == {URLS[0]}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_can_subscribe_though_a_thread_held_the_lock():
    """The lock of a thread that does not exist in the child is free."""
    members = Watchers(*URLS)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with members.group._mutex:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(60)  # or it would wait for ever
        members.subscribe(print)()
        os._exit(0)
    release.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


# --- Split limits ---


def test_a_limit_is_divided_among_the_members_that_are_not_confirmed():
    """Suspected ones and this process count; confirmed and left ones do not."""
    with virtual_time():
        members = Watchers("a", "b", "c", "d", "e", kind="cluster")
        limit = RateLimit("60/s")
        new_guard(limit)
        with split_limit(members, limit) as action:
            assert limit.pods == 5
            members.move("b", SUSPECTED)
            assert limit.pods == 5
            members.move("b", CONFIRMED)
            assert (limit.pods, limit.peek().left) == (4, 12)  # what it gains counts as taken
            members.move("f", ALIVE)
            assert limit.pods == 5
            members.move("c", LEFT)
            assert limit.pods == 4
            members.forget("b")
            assert limit.pods == 4
            members.move("d", CONFIRMED)
            assert action.snapshot()["acted_on"] == ["d"]
        assert limit.pods == 4  # closed: nobody is taken for dead


def test_who_watches_others_counts_itself():
    """Heartbeats watch other processes, so this one is one more."""
    limit = RateLimit("60/s")
    split_limit(Watchers("a", "b"), limit)
    assert limit.pods == 3


def test_alone_there_are_as_many_pods_as_expected():
    """A pod that has not found the others yet does not take the whole limit."""
    members, limit = Watchers(kind="cluster"), RateLimit("60/s")
    split_limit(members, limit, expected_pods=3)
    assert limit.pods == 3
    for name in "abcde":
        members.move(name, ALIVE)
    assert limit.pods == 5


def test_a_partition_costs_at_most_half_of_the_limit_more(caplog):
    """Each side confirms all of the other; all together admit at most 1 / (1 - most)."""
    with caplog.at_level(logging.WARNING, "seawall"):
        limits = []
        for own in range(10):
            members, limit = Watchers(*map(str, range(10)), kind="cluster"), RateLimit("600/s")
            new_guard(limit)
            action = split_limit(members, limit)
            for name in range(10):
                if (name < 5) is not (own < 5):
                    members.move(str(name), CONFIRMED)
            assert len(action.snapshot()["held_back"]) == 2
            limits.append(600 / limit.pods)
    assert sum(limits) <= 600 * 1.5
    assert len([r for r in caplog.records if "would be acted on" in r.getMessage()]) == 10


GROUPS = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([ALIVE, SUSPECTED, CONFIRMED, LEFT])), max_size=30
)


@given(GROUPS, st.sampled_from([0.0, 0.2, 1 / 3, 0.5, 1.0]))
def test_under_any_history_a_limit_has_as_many_parts_as_the_bound_demands(steps, most):
    """All that are known but the share of them that may be taken for dead, and at least one."""
    members = Watchers(*map(str, range(9)), kind="cluster")
    limit = RateLimit("60/s")
    action = split_limit(members, limit, most=most)
    for name, state in steps:
        members.move(str(name), state if name else ALIVE)
        known = [view for view in members.views.values() if view.state is not LEFT]
        dead = sum(view.state is CONFIRMED for view in known)
        assert limit.pods == max(1, len(known) - min(dead, outliers.share_of(most, len(known))))
        assert limit.pods >= len(known) * (1 - most) - 1e-6
    action.close()
    assert limit.pods == sum(view.state is not LEFT for view in members.views.values())


# --- Leaders ---


def test_a_leader_that_misses_most_members_steps_down_once():
    """Half of them is not most; and it does so once in one bad time, however long that is."""
    with virtual_time() as clock:
        members, leader = Watchers(*"abcde", kind="cluster"), Candidate()
        action = hand_over(members, leader)
        members.move("b", SUSPECTED)
        members.move("c", CONFIRMED)
        assert leader.times == 0
        members.move("d", SUSPECTED)
        assert leader.times == 1
        leader.is_leader = True  # nobody else could lead
        clock.advance(1000.0)
        members.move("e", SUSPECTED)
        assert (leader.times, action.snapshot()["times"]) == (1, 1)
        for name in "bcde":
            members.move(name, ALIVE)
        for name in "bcd":
            members.move(name, SUSPECTED)
        assert leader.times == 2
        action.close()
        assert leader.times == 2


def test_leaders_step_down_at_most_once_in_a_while(caplog):
    """A detector that is wrong again and again does not send the lease around all the time."""
    with virtual_time() as clock, caplog.at_level(logging.WARNING, "seawall"):
        members, leader = Watchers(*"abc"), Candidate()
        action = hand_over(members, leader, every=60.0)
        for _ in range(10):
            leader.is_leader = True
            for state in (SUSPECTED, ALIVE):
                for name in "abc":
                    members.move(name, state)
            clock.advance(20.0)
        assert leader.times == 4  # at 0, 60, 120 and 180 s
        seen = action.snapshot()
        assert (seen["times"], seen["times_held_back"]) == (4, 6)
    assert len([r for r in caplog.records if "every=60 allows no more" in r.getMessage()]) == 1


@pytest.mark.parametrize(("score", "times"), [(None, 0), (3, 0), (4, 1), (8, 1)])
def test_a_leader_whose_own_health_is_bad_steps_down(score, times):
    """A process that the others accuse, and whose probes fail, is the slow one."""
    members, leader = Watchers(*"abcde", kind="cluster"), Candidate()
    hand_over(members, leader)
    members.health_score = score
    members.move("b", SUSPECTED)
    assert leader.times == times


def test_a_leader_does_not_step_down_because_the_action_is_closed():
    """Its health may have become bad since the last change."""
    members, leader = Watchers(*"abcde", kind="cluster"), Candidate()
    action = hand_over(members, leader)
    members.health_score = 8
    action.close()
    assert leader.times == 0


def test_a_leader_does_not_step_down_for_its_only_peer():
    """With two members, neither knows which is cut off; a follower does nothing."""
    members, leader = Watchers("a", "b", kind="cluster"), Candidate()
    hand_over(members, leader)
    members.move("b", CONFIRMED)
    assert leader.times == 0
    others, idle = Watchers("a", "b"), Candidate()
    idle.is_leader = False
    hand_over(others, idle)
    for name in "ab":
        others.move(name, CONFIRMED)
    assert idle.times == 0


def test_a_real_leader_ends_its_term_and_another_leads(tmp_path):
    """Its work is asked to stop, the lease is released when it has, and the other one gets it."""
    with closing(Sqlite(tmp_path / "leases.db")) as file, closing(Database(file)) as database:
        migrate(database)
        first, second = (Leader(Lease(database, "reports", ttl=60.0)) for _ in range(2))
        members = Watchers(*"abc")
        terms = []

        def work(term) -> None:
            terms.append(term)
            for name in "abc":
                members.move(name, SUSPECTED)
            assert (first.is_leader, term.stop.is_set()) == (False, True)
            first.close()  # so that it does not lead again

        with hand_over(members, first):
            assert first.run(work) is None
        with second.lead(timeout=60.0) as later:
            assert (terms[0].reason, later.token > terms[0].token) == ("it stepped down", True)


# --- Health ---


def test_health_is_degraded_while_too_many_members_are_missing():
    """A third is too many, fewer are not; it is never unhealthy."""

    async def main():
        members = Watchers("a", "b", "c", "d")
        health = Health()
        health.add("members", MembersPresent(members), ttl=0.0)
        seen = []
        for name in "abcd":
            seen.append(await health.state_of("ready"))
            members.move(name, SUSPECTED)
        seen.append(await health.state_of("ready"))
        for name in "abcd":
            members.move(name, ALIVE)
        seen.append(await health.state_of("ready"))
        return seen

    assert run_virtual(main()) == [
        "healthy", "healthy", "degraded", "degraded", "degraded", "healthy",
    ]  # fmt: skip


def test_the_finding_counts_members_that_have_not_left():
    """A member that left is not missing, and an empty group is healthy."""

    async def main():
        members = Watchers("a", "b", "c")
        present = MembersPresent(members, degraded=0.5)
        members.move("a", LEFT)
        members.move("b", CONFIRMED)
        return [await present(), await MembersPresent(Watchers())()]

    found, alone = run_virtual(main())
    assert found.output == "1 of 2 members are suspected or confirmed as failed"
    assert (found.state, found.value, alone.state) == ("degraded", 1, "healthy")


# --- With real detectors ---


def test_actions_follow_heartbeats():
    """A silent peer is ejected, confirmed, counted out, and all is undone when it is heard."""
    with virtual_time() as clock:
        peers = Heartbeats("shop", detector=fixed_timeout(3.0), confirm_after=4.0)
        for url in URLS[:3]:
            peers.watch(url)
        upstreams, limit = new_upstreams(URLS[:3]), RateLimit("60/s")
        new_guard(limit)
        eject_suspected(peers, upstreams)
        split_limit(peers, limit)

        def pass_seconds(seconds: int, *speaking: str) -> None:
            for _ in range(seconds):
                clock.advance(1.0)
                for url in speaking:
                    peers.heartbeat(url)
                peers.evaluate()

        pass_seconds(3, *URLS[:3])
        assert (aside(upstreams), limit.pods) == (set(), 4)
        pass_seconds(3, *URLS[:2])
        assert (aside(upstreams), limit.pods) == ({URLS[2]}, 4)
        pass_seconds(4, *URLS[:2])
        assert (aside(upstreams), limit.pods) == ({URLS[2]}, 3)
        pass_seconds(1, *URLS[:3])
        assert (aside(upstreams), limit.pods) == (set(), 4)
        pass_seconds(3, *URLS[:2])
        assert aside(upstreams) == {URLS[2]}
        peers.forget(URLS[2])
        assert (aside(upstreams), limit.pods) == (set(), 3)


def test_actions_follow_a_cluster():
    """A member that is killed is ejected and counted out; one that comes back is neither.

    A leader that is cut off from all others hands over.
    """

    async def main():
        hub = Hub()
        names = [f"m{number}" for number in range(1, 6)]
        clusters = {
            name: hub.cluster(name, seeds=("10.0.0.1:7946",), metadata=f"http://{name}".encode())
            for name in names
        }
        first, last = clusters["m1"], clusters["m5"]
        upstreams = new_upstreams([f"http://{name}" for name in names[1:]], outliers=None)
        limit, leader = RateLimit("60/s"), Candidate()
        new_guard(limit)
        actions = [
            eject_suspected(first, upstreams),
            split_limit(first, limit),
            hand_over(first, leader),
        ]
        present = MembersPresent(first, degraded=0.2)
        async with AsyncExitStack() as stack:
            for cluster in clusters.values():
                await stack.enter_async_context(cluster)
            await let_pass(5.0)
            assert (aside(upstreams), limit.pods) == (set(), 5)
            assert (await present()).state == "healthy"

            wire = hub.wires.pop(last.address)  # killed
            await let_pass(30.0)
            assert (aside(upstreams), limit.pods) == ({"http://m5"}, 4)
            assert (await present()).state == "degraded"
            assert leader.times == 0

            hub.wires[last.address] = wire
            await let_pass(60.0)
            assert (aside(upstreams), limit.pods) == (set(), 5)

            del hub.wires[first.address]  # cut off from all
            await let_pass(60.0)
            assert len(aside(upstreams)) == 1  # a third of four
            assert limit.pods == 4  # a third of five is taken for dead
            assert leader.times == 1
            for action in actions:
                action.close()
            assert (aside(upstreams), limit.pods) == (set(), 5)

    run_virtual(main(), seed=1)


# --- What there is to see ---


def test_actions_show_themselves():
    """What they act on, and how much they may."""
    members = Watchers(*URLS)
    members.move(URLS[0], SUSPECTED)
    action = eject_suspected(members, new_upstreams())
    assert repr(action) == (
        "<eject_suspected of 'pods': ActionBound(0.333333): 1 acted on, 0 held back>"
    )
    assert repr(hand_over(members, Candidate())) == "<hand_over of 'pods': 0 times, every=60>"
    assert repr(MembersPresent(members)) == "MembersPresent('pods', degraded=0.333333)"
