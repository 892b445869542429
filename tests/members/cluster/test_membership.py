"""A cluster on virtual time: joining, leaving, crashes, pauses, metadata, subscribers."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import AsyncExitStack

import pytest

from seawall import events, registry
from seawall.members import Cluster, MemberChanged, MemberState, OwnPause, SwimSettings, local
from seawall.testing import run_virtual
from tests.members.cluster.network import Hub, MemoryWire
from tests.support import let_pass

SEED = "10.0.0.0:7946"


async def group(stack: AsyncExitStack, hub: Hub, size: int) -> list[Cluster]:
    """Return `size` members that have found each other."""
    members = [hub.cluster(f"m{n}", seeds=(SEED,)) for n in range(size)]
    for member in members:
        await stack.enter_async_context(member)
    await let_pass(5.0)
    return members


def test_members_join_by_a_seed_and_see_each_other():
    """With address, metadata and state; a seed that is oneself is skipped."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0", seeds=(SEED,), metadata=b"zone=a") as first:
            await let_pass(1.0)
            assert hub.sent == []
            async with hub.cluster("m1", seeds=(SEED,)) as second:
                await let_pass(1.0)
                assert first.alive == second.alive == ["m0", "m1"]
                view = second.get("m0")
                assert view is not None
                assert (view.state, view.address, view.metadata) == ("alive", SEED, b"zone=a")
                assert set(second.members) == {"m0", "m1"}
                assert second.get("nobody") is None

    run_virtual(main())


def test_members_beyond_the_most_are_refused_and_counted():
    """So that an operator sees why a member is not known."""

    async def main() -> None:
        hub = Hub()
        preset = SwimSettings(max_members=2)
        async with hub.cluster("m0", preset=preset) as first, hub.cluster("m1", seeds=(SEED,)):
            await let_pass(5.0)
            assert "full" not in first.snapshot()["refused"]
            async with hub.cluster("m2", seeds=(SEED,)):
                await let_pass(5.0)
                assert first.alive == ["m0", "m1"]
                assert first.snapshot()["refused"]["full"] > 0

    run_virtual(main())


def test_a_member_that_is_alone_asks_its_seeds_again_and_again():
    """Less and less often, until one answers."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m1", seeds=(SEED,)) as late:
            await let_pass(60.0)
            tries = len(hub.sent)
            assert 5 <= tries <= 20
            async with hub.cluster("m0"):
                await let_pass(31.0)
                assert late.alive == ["m0", "m1"]

    run_virtual(main())


def test_the_name_of_a_seed_is_resolved_at_each_try(monkeypatch):
    """All addresses that it has are asked; without one it is tried again, and logged once."""
    answers = [[], ["10.0.0.7"], ["10.0.0.8", "10.0.0.0"]]
    asked = []

    async def getaddrinfo(_loop, host, port, **_options):
        asked.append(host)
        found = answers.pop(0) if answers else []
        if not found:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0"), hub.cluster("m1", seeds=("members.internal",)) as member:
            await let_pass(3.0)
            assert member.alive == ["m0", "m1"]
            assert len(asked) >= 3
            targets = {there for here, there, _message in hub.sent if here != SEED}
            assert {"10.0.0.7:7946", "10.0.0.8:7946", SEED} <= targets

    run_virtual(main())


def test_groups_that_formed_apart_become_one_by_their_seeds():
    """Each has members of its own, and only the seeds lead from one to the other."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            for n, seed in ((0, 1), (1, 0), (2, 3), (3, 2)):
                seeds = (f"10.0.0.{seed}:7946",)
                await stack.enter_async_context(hub.cluster(f"m{n}", seeds=seeds))
            await let_pass(5.0)
            bridge = hub.cluster("m4", seeds=("10.0.0.0:7946", "10.0.0.2:7946"))
            hub_two = hub.wires.pop("10.0.0.2:7946")
            await stack.enter_async_context(bridge)
            await let_pass(1.0)
            assert "m2" not in bridge.alive
            hub.wires["10.0.0.2:7946"] = hub_two
            await let_pass(120.0)
            assert bridge.alive == ["m0", "m1", "m2", "m3", "m4"]

    run_virtual(main())


async def fail_inside(cluster: Cluster) -> None:
    async with cluster:
        await let_pass(1.0)
        raise LookupError


def test_a_member_that_closes_has_left_and_is_not_suspected():
    """Also one that ends with an error."""

    async def main() -> None:
        hub = Hub()
        seen: list[MemberChanged] = []
        async with hub.cluster("m0") as first:
            first.subscribe(seen.append)
            second = hub.cluster("m1", seeds=(SEED,))
            with pytest.raises(LookupError):
                await fail_inside(second)
            assert second.alive == []
            assert not second.is_running
            await let_pass(60.0)
            assert [change.after for change in seen] == ["alive", "left"]
            assert first.alive == ["m0"]
            assert first.snapshot()["counts"]["left"] == 1

    run_virtual(main())


def test_a_member_that_closes_while_it_joins_has_left():
    """The seed knows it already, though its answer never arrives."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0") as first:
            hub.wires[SEED].send = lambda *_message, **_options: None
            joined = asyncio.Event()
            first.subscribe(lambda _change: joined.set())
            async with hub.cluster("m1", seeds=(SEED,)) as second:
                await joined.wait()
                assert second.alive == ["m1"]
            view = first.get("m1")
            assert view is not None
            assert view.state == "left"

    run_virtual(main())


def test_a_member_comes_back_after_it_has_left():
    """Under the same name, by the same object."""

    async def main() -> None:
        hub = Hub()
        second = hub.cluster("m1", seeds=(SEED,))
        async with hub.cluster("m0") as first:
            for _ in range(2):
                async with second:
                    await let_pass(2.0)
                    assert first.alive == second.alive == ["m0", "m1"]

    run_virtual(main())


def test_a_crash_is_suspected_then_confirmed_and_published():
    """As events with reason, level and duration, and in the counts of the snapshot."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 5)
            seen: list[MemberChanged] = []
            first.subscribe(seen.append)
            hub.wires["10.0.0.4:7946"].vanish()
            await let_pass(60.0)
            suspected, confirmed = seen
            assert (suspected.member, suspected.before, suspected.after) == (
                "m4",
                "alive",
                "suspected",
            )
            assert (suspected.level, confirmed.level) == (1.0, 2.0)
            assert confirmed.after == "confirmed"
            assert confirmed.duration > 0
            view = first.get("m4")
            assert view is not None
            assert (view.state, view.reason) == (MemberState.CONFIRMED, confirmed.reason)
            assert first.alive == ["m0", "m1", "m2", "m3"]
            shown = first.snapshot()
            assert shown["counts"]["confirmed"] == 1
            assert sum(shown["counts"]["detection_times"]["counts"]) == 1
            assert shown["members"][0]["name"] == "m4"

    run_virtual(main())


def test_the_level_of_a_suspected_member_rises():
    """From 1 to 2, while its time runs out."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 2)
            hub.wires["10.0.0.1:7946"].vanish()
            suspected = asyncio.Event()
            first.subscribe(lambda _change: suspected.set())
            await suspected.wait()
            levels = []
            for _ in range(4):
                view = first.get("m1")
                assert view is not None
                levels.append(view.level)
                await let_pass(0.9)
            assert levels == sorted(set(levels))
            assert all(1.0 <= level < 2.0 for level in levels)

    run_virtual(main())


def test_a_snapshot_has_what_others_show():
    """The keys are those of all groups, and it is listed in the process."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 3)
            shown = first.snapshot()
            assert shown["kind"] == "cluster"
            assert shown["own"] == "m0"
            assert [one["name"] for one in shown["members"]] == ["m0", "m1", "m2"]
            assert shown["health_score"] == 0
            assert shown["round_trip"]["p50"] == pytest.approx(0.002, rel=0.2)
            assert set(shown["messages"]) == {"sent", "received", "refused"}
            assert set(shown["bytes"]) == {"sent", "received"}
            listed = registry.snapshot()["members"]
            assert {one["own"] for one in listed} >= {"m0", "m1", "m2"}

    run_virtual(main())


def test_metadata_is_changed_for_all():
    """Before the start and while it runs; a later start has the last."""

    async def main() -> None:
        hub = Hub()
        second = hub.cluster("m1", seeds=(SEED,))
        second.set_metadata(b"first")
        async with hub.cluster("m0") as first:

            def seen() -> bytes:
                view = first.get("m1")
                assert view is not None
                return view.metadata

            async with second:
                await let_pass(1.0)
                assert seen() == b"first"
                second.set_metadata(b"second")
                await let_pass(1.0)
                assert seen() == b"second"
            async with second:
                await let_pass(1.0)
                assert seen() == b"second"

    run_virtual(main())


def test_a_subscriber_that_fails_or_looks_at_the_cluster_harms_nobody(caplog):
    """None runs under the lock, and the others are called."""

    async def main() -> None:
        hub = Hub()
        seen = []
        async with hub.cluster("m0") as first:

            def fail(_change: MemberChanged) -> None:
                raise LookupError("of the subscriber")

            def look(change: MemberChanged) -> None:
                assert not first._mutex._is_owned()
                seen.append((change.member, first.alive))

            first.subscribe(fail)
            end = first.subscribe(look)
            async with hub.cluster("m1", seeds=(SEED,)):
                await let_pass(1.0)
                assert seen == [("m1", ["m0", "m1"])]
                end()
            await let_pass(1.0)
            assert len(seen) == 1

    with caplog.at_level(logging.ERROR, "seawall"):
        run_virtual(main())
    assert "of the subscriber" in caplog.text


def test_a_pause_of_the_process_is_counted_and_accuses_nobody():
    """What has arrived meanwhile is read before anybody is judged."""

    async def main() -> None:
        hub = Hub()
        pauses: list[OwnPause] = []
        end = events.subscribe(pauses.append, OwnPause)
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 3)
            asyncio.get_running_loop().clock.advance(6.0)
            await let_pass(0.01)
            counts = first.snapshot()["counts"]
            assert counts["own_pauses"] == 1
            assert counts["paused_seconds"] == pytest.approx(6.0, abs=0.5)
            await let_pass(30.0)
            assert first.snapshot()["counts"]["suspicions"] == 0
        end()
        assert pauses
        assert pauses[0].guard == "group"
        assert pauses[0].seconds == pytest.approx(6.0, abs=0.5)

    run_virtual(main())


def test_heavy_work_that_holds_the_loop_accuses_nobody():
    """Shorter than what counts as a pause, but longer than a probe; also nested."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 3)
            wire = hub.wires[SEED]
            receive = wire.receive
            for _ in range(10):
                with first.pause_suspicion(), first.pause_suspicion():
                    wire.receive = lambda *_message: None  # even if the answers are lost
                    await let_pass(3.0)
                    wire.receive = receive
                await let_pass(2.5)
            assert first.snapshot()["counts"]["suspicions"] == 0
            hub.wires["10.0.0.2:7946"].vanish()
            await let_pass(60.0)
            assert first.alive == ["m0", "m1"]

    run_virtual(main())


def test_answers_that_have_arrived_count_before_the_timer():
    """A busy loop processes answers before timeouts, and suspects no member."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 2)
            wire = hub.wires[SEED]
            wire.is_stalled = True  # only the timer reads
            await let_pass(20.0)
            assert first.snapshot()["counts"]["suspicions"] == 0

    run_virtual(main())


def test_answers_by_connection_alone_are_logged_once(caplog):
    """It is a firewall, most probably."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, second = await group(stack, hub, 2)
            wire = hub.wires["10.0.0.1:7946"]
            deliver = wire.receive
            wire.receive = lambda *message: deliver(*message) if message[2] else None
            await let_pass(30.0)
            assert first.alive == ["m0", "m1"]
            assert first.snapshot()["reliable_only"] > 3
            assert second.snapshot()["reliable_only"] > 3

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    assert caplog.text.count("by TCP but not by UDP") == 2  # one for each of them


def test_two_members_of_one_name_are_logged_once_by_each(caplog):
    """They would refute each other for ever, so they ignore each other. Only one has a seed."""

    async def main() -> None:
        hub = Hub()
        other = Cluster("group", member="m0", seeds=(SEED,))
        other._make_transport = lambda receive: MemoryWire(hub, "10.0.0.9:7946", receive)
        async with hub.cluster("m0") as first, other:
            await let_pass(60.0)
            assert first.alive == other.alive == ["m0"]

    with caplog.at_level(logging.ERROR, "seawall"):
        run_virtual(main())
    assert caplog.text.count("10.0.0.9:7946 is called 'm0' as this one is") == 1
    assert caplog.text.count(f"{SEED} is called 'm0' as this one is") == 1


def test_refused_messages_are_logged_once_in_ten_minutes_for_each_reason(caplog):
    """With what to do; reasons that no person can mend are only counted."""

    async def main() -> None:
        async with Hub().cluster("m0") as cluster:
            for _ in range(3):
                for reason in ("key", "stale", "replay"):
                    cluster._note_refused(reason, "10.0.0.9:7946")
                await let_pass(301.0)

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    first, second, third, last = (record.getMessage() for record in caplog.records)
    assert first == (
        "cluster 'group': messages such as from 10.0.0.9:7946 are refused: they have another key,"
        " or are of another group: write the same name and the same keys on all members"
    )
    assert "the clock there is more than 60 s away" in second
    assert (third, last) == (first, second)


def test_a_member_that_no_seed_answers_says_so_after_ten_seconds(caplog):
    """At most once in ten minutes; one that is its own seed is not lonely."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0", seeds=(SEED,)):
            await let_pass(60.0)
        assert not caplog.records
        async with hub.cluster("m1", seeds=(SEED,)):
            await let_pass(9.0)
            assert not caplog.records
            await let_pass(400.0)
            assert len(caplog.records) == 1
            await let_pass(400.0)

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"cluster 'group': no seed answers ({SEED}): check that they run")
    assert second == first


def test_a_member_that_was_answered_is_not_lonely(caplog):
    """Not even while one of its seeds is gone."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0"), hub.cluster("m1", seeds=(SEED, "10.0.0.9:7946")):
            await let_pass(300.0)

    with caplog.at_level(logging.WARNING, "seawall"):
        run_virtual(main())
    assert "no seed answers" not in caplog.text


def test_a_change_to_alive_has_the_level_of_the_suspicion_that_it_ends():
    """1 if it was suspected, 2 if it was confirmed, 0 if it is new; `Heartbeats` does the same."""

    async def main() -> None:
        hub = Hub()
        async with AsyncExitStack() as stack:
            first, *_others = await group(stack, hub, 3)
            seen: list[MemberChanged] = []
            first.subscribe(seen.append)
            gone = hub.wires["10.0.0.2:7946"]
            gone.vanish()
            await let_pass(3.5)  # it is suspected
            gone.open()
            await let_pass(60.0)
            gone.vanish()
            await let_pass(90.0)
            gone.open()
            await let_pass(120.0)
            async with hub.cluster("m3", seeds=(SEED,)):
                await let_pass(5.0)
        levels = {(one.before, one.after): one.level for one in seen}
        assert levels["alive", "suspected"] == levels["suspected", "alive"] == 1.0
        assert levels["suspected", "confirmed"] == levels["confirmed", "alive"] == 2.0
        assert levels["unknown", "alive"] == levels["alive", "left"] == 0.0

    run_virtual(main())


def test_the_count_in_its_repr_has_the_right_number():
    """One member, two members."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0") as first:
            assert repr(first) == "<Cluster 'group': 1 member>"
            async with hub.cluster("m1", seeds=(SEED,)):
                await let_pass(5.0)
                assert repr(first) == "<Cluster 'group': 2 members>"

    run_virtual(main())


def test_it_is_started_once_at_a_time():
    """The second start says so."""

    async def main() -> None:
        hub = Hub()
        async with hub.cluster("m0") as cluster:
            with pytest.raises(RuntimeError, match="runs already"):
                await cluster.__aenter__()
            with pytest.raises(RuntimeError, match="runs already"):
                cluster.start()

    run_virtual(main())


def test_the_default_name_is_the_address_or_that_of_the_pod(monkeypatch):
    """With the port: several processes of one pod have different names."""

    async def named() -> str:
        async with Cluster("group", bind="127.0.0.1:0", preset=local()) as cluster:
            assert cluster.get(cluster.member) is not None
            assert cluster.address.startswith("127.0.0.1:")
            return cluster.member.replace(cluster.address.rpartition(":")[2], "PORT")

    monkeypatch.delenv("POD_NAME", raising=False)
    assert asyncio.run(named()) == "127.0.0.1:PORT"
    monkeypatch.setenv("POD_NAME", "web-3")
    assert asyncio.run(named()) == "web-3:PORT"
