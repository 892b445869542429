"""Clusters over real sockets of the loopback interface, in event loops, threads and children."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import threading
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from seawall import subscribe
from seawall.events import MemberChanged
from seawall.members import Cluster, Keyring, SwimSettings, local
from tests.members.cluster.network import PATIENCE, until, wait_until

GROUP = f"sockets {os.getpid()}"
"""Other processes that run these tests may get ports that were used here: they are strangers."""

KEY = "a secret of the tests, 32 bytes.."


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", *(["[::1]"] if _has_ipv6() else [])]


def quick() -> SwimSettings:
    """Return settings by which a small group finds out soon, also on a busy machine."""
    return SwimSettings(interval=0.5, timeout=0.2, gossip_interval=0.05, exchange_interval=2.0)


def cluster_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "seawall-cluster"}


def made(member: str, *seeds: str, host: str = "127.0.0.1", **options: Any) -> Cluster:
    options.setdefault("preset", quick())
    return Cluster(GROUP, member=member, bind=f"{host}:0", seeds=seeds, **options)


@pytest.mark.parametrize("kind", ["asyncio", "uvloop"])
def test_a_timer_that_is_due_is_compared_with_the_next_one(kind):
    """The handles that uvloop makes of what is due have no `when`."""

    async def main() -> None:
        async with made("a") as alone:
            due: Any = SimpleNamespace(wake_at=0.0)
            for _ in range(2):
                alone._set_timer(due)
            assert alone._timer is not None

    run = asyncio.run if kind == "asyncio" else pytest.importorskip("uvloop").run
    run(main())


@pytest.mark.parametrize("tcp_only", [False, True])
@pytest.mark.parametrize(
    ("host", "kind"), [*((host, "asyncio") for host in HOSTS), (HOSTS[0], "uvloop")]
)
def test_members_find_each_other_and_hear_who_leaves(host, kind, tcp_only):
    """By datagrams and connections, or by connections alone; on asyncio's loop and on uvloop."""

    async def main() -> None:
        options = {"host": host, "tcp_only": tcp_only, "keyring": Keyring(KEY)}
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(made("a", **options))
            second = await stack.enter_async_context(made("b", first.address, **options))
            async with made("c", first.address, **options) as third:
                everybody = ["a", "b", "c"]
                members = first, second, third
                await until(lambda: all(one.alive == everybody for one in members), *members)
                await until(lambda: first.snapshot()["round_trip"], *members)
            await until(lambda: first.alive == second.alive == ["a", "b"], first, second)
            for one in (first, second):
                view = one.get("c")
                assert view is not None
                assert view.state == "left"
                shown = one.snapshot()
                assert shown["counts"]["confirmed"] == 0
                assert shown["messages"]["refused"] == 0
                assert shown["messages"]["sent"] > 0
                assert shown["bytes"]["received"] > 0
                assert shown["reliable_only"] == 0 or not tcp_only

    run = asyncio.run if kind == "asyncio" else pytest.importorskip("uvloop").run
    run(main())


def test_a_seed_may_be_a_name_and_a_port():
    """It is resolved without blocking the loop."""

    async def main() -> None:
        async with made("a") as first:
            port = first.address.rpartition(":")[2]
            async with made("b", f"localhost:{port}", "nobody.invalid:1") as second:
                await until(lambda: first.alive == second.alive == ["a", "b"], first, second)

    asyncio.run(main())


def test_a_member_with_another_key_stays_outside(caplog):
    """Its messages are refused, counted and logged, and change no member's state."""

    async def main() -> None:
        async with (
            made("a", keyring=Keyring(KEY)) as first,
            made("b", first.address, keyring=Keyring(KEY)) as second,
            made("x", first.address, keyring=Keyring("another secret, of 32 bytes too.")) as other,
        ):
            await until(lambda: first.alive == second.alive == ["a", "b"], first, second)
            await until(lambda: first.snapshot()["refused"].get("key"))
            assert other.alive == ["x"]
            assert first.alive == ["a", "b"]
            assert set(first.snapshot()["refused"]) == {"key"}

    with caplog.at_level(logging.WARNING, "seawall"):
        asyncio.run(main())
    assert caplog.text.count("messages such as from 127.0.0.1:") == 1
    assert "are refused: they have another key, or are of another group" in caplog.text


def test_a_program_without_a_loop_is_a_member_too():
    """A background thread does the work; each thread may look and close."""
    before = cluster_threads()
    with made("a") as first, made("b", first.address) as second:
        wait_until(lambda: first.alive == second.alive == ["a", "b"], first, second)
        second.set_metadata(b"ready")
        with second.pause_suspicion():
            assert second.member == "b"
        closing = threading.Thread(target=second.close)
        closing.start()
        wait_until(lambda: first.alive == ["a"], first)
        closing.join()
        assert not second.is_running
        second.close()
        second.start()
        wait_until(lambda: first.alive == second.alive == ["a", "b"], first, second)
    assert cluster_threads() <= before


def test_of_threads_that_start_a_cluster_at_once_one_does():
    """The others are refused, and none is left with sockets of its own."""
    before = cluster_threads()
    cluster = made("a")
    gate = threading.Barrier(4)
    refused: list[RuntimeError] = []

    def start() -> None:
        gate.wait()
        try:
            cluster.start()
        except RuntimeError as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert cluster.is_running
    cluster.close()
    assert cluster_threads() <= before


def test_a_subscriber_may_close_its_cluster():
    """It runs in the thread that is to end."""
    ended = threading.Event()
    with made("a") as first:
        second = made("b", first.address)

        def close(_change: object) -> None:
            second.close()
            ended.set()

        second.subscribe(close)
        second.start()
        assert ended.wait(PATIENCE)
        wait_until(lambda: first.members.get("b") and first.alive == ["a"], first)


def test_a_port_that_is_taken_is_refused_and_leaves_nothing_behind():
    """The error says what to write; a later start works."""
    before = cluster_threads()
    host = "127.83.71.5"  # no other test takes a port of it meanwhile
    with socket.socket() as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = Cluster(GROUP, bind=f"{host}:{port}", preset=local())
        with pytest.raises(OSError, match="port 0 for one that the system chooses"):
            cluster.start()
        assert not cluster.is_running
        assert cluster_threads() <= before
    with cluster:
        assert cluster.address == f"{host}:{port}"


def _in_child(check: Any) -> None:
    """Fork, and fail if `check` raises in the child."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException as error:  # noqa: BLE001 - it is written to the parent
            os.write(writing, repr(error).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as report:
        ready, _, _ = select.select([report], [], [], PATIENCE)
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = report.read().decode()
    _, status = os.waitpid(child, 0)
    assert status == 0, text or "the child hangs"


def test_a_child_process_is_not_a_member():
    """Its copies of the sockets are closed; the parent goes on; it may start as another one."""
    with made("a") as first, made("b", first.address) as second:
        wait_until(lambda: first.alive == second.alive == ["a", "b"], first, second)
        transport = first._transport
        sockets = [transport._listener, transport._datagrams]
        numbers = [one.fileno() for one in sockets]

        def look() -> None:
            assert not first.is_running
            assert first.alive == []
            assert [one.fileno() for one in sockets] == [-1, -1]
            first.close()
            child = made("child", f"127.0.0.1:{port}")
            child.start()
            wait_until(lambda: child.alive == ["a", "b", "child"], child)
            child.close()

        port = first.address.rpartition(":")[2]
        lost: list[str] = []
        end = subscribe(
            lambda change: lost.append(change.member) if change.after == "confirmed" else None,
            MemberChanged,
        )
        _in_child(look)
        assert [one.fileno() for one in sockets] == numbers
        wait_until(lambda: first.get("child") and first.alive == ["a", "b"], first)
        end()
        assert not {"a", "b"} & set(lost)  # the child may be, if it was too slow to leave
