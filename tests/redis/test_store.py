from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from seawall import RedisStore
from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.redis import connections
from seawall.redis.health import StoreHealth
from seawall.redis.keys import key_part, make_key, name_part
from seawall.runtime.driver import wait_async, wait_sync
from tests.redis.support import Server, eventually, keys_without_expiry, lua, mutate
from tests.support import settled

ROOT = Path(__file__).resolve().parents[2]
NewStore = Callable[..., RedisStore]


class Echo:
    """Asks the store for a key's length, through a script that answers each question."""

    script = "echo"
    most = 100

    def __init__(self, key: str) -> None:
        self.key = key
        self.calls: list[int] = []
        self.late: list[Any] = []

    def pack(self, items):
        self.calls.append(len(items))
        return [self.key], list(items)

    def unpack(self, reply, items):
        return [int(answer) for answer in reply]

    def unwanted(self, item, answer):
        self.late.append((item, answer))


@pytest.fixture
def echo(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> Echo:
    """Return questions whose answers are ten times what was asked."""
    from seawall.redis import store as store_module

    text = """
    local answers = {}
    for place = 1, #ARGV do answers[place] = ARGV[place] * 10 end
    return answers
    """
    monkeypatch.setattr(store_module, "lua", lambda name: text if name == "echo" else lua(name))
    return Echo(store._core.key("echo", "x"))


# --- Calls ---


def test_a_script_is_run_with_and_without_a_loop(store: RedisStore):
    """The same call works in a coroutine and in a plain thread."""
    key = store._core.key("store", "x")
    assert store._core.call("probe", [key], []) == 1
    assert asyncio.run(store._core.acall("probe", [key], [])) == 1


def test_several_loops_one_after_another_use_one_store(store: RedisStore):
    """Each event loop has connections of its own, which are closed with it."""
    key = store._core.key("store", "x")
    for _ in range(3):
        assert asyncio.run(store._core.acall("probe", [key], [])) == 1
    assert not store._core._connections


def test_a_script_that_the_server_forgot_is_sent_again_in_the_same_call(
    store: RedisStore, client: redis.Redis
):
    """After SCRIPT FLUSH nobody notices anything."""
    key = store._core.key("store", "x")
    assert store._core.call("probe", [key], []) == 1
    client.script_flush()
    assert store._core.call("probe", [key], []) == 1
    assert store.up


def test_a_mistake_in_a_script_is_an_unavailable_store(store: RedisStore, monkeypatch):
    """An error that the server reports never reaches a caller as anything else."""
    mutate(monkeypatch, "probe", "redis.call('SET'", "redis.call('NONSENSE'")
    for _ in range(5):
        with pytest.raises(StoreUnavailable, match="the store failed"):
            store._core.call("probe", [store._core.key("store", "x")], [])
    assert store.up  # it answers: only these calls are wrong


@pytest.mark.parametrize("bad", ["text", "type"])
def test_what_is_wrong_with_one_call_takes_the_store_from_nobody(
    store: RedisStore, client: redis.Redis, caplog, bad: str
):
    """A key of another kind, or text that cannot be sent, fails for its caller alone; told once."""
    key = store._core.key("store", "x")
    client.lpush(key, "a list")
    client.expire(key, 60)
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            store._core.call("settings", [key], ["x" if bad == "type" else "\ud800", 1000])
    assert store.up
    assert store._core.call("probe", [store._core.key("store", "y")], []) == 1
    assert caplog.text.count("a question to the store failed") == 1


def test_a_call_from_the_stores_own_thread_is_refused(store: RedisStore, echo: Echo):
    """Blocking the background thread for an answer that it would have to bring is a mistake."""
    caught: list[BaseException] = []

    async def job() -> None:
        for block in (
            lambda: store._core.call("probe", [store._core.key("store", "x")], []),
            lambda: wait_sync(store._core.ask("sync", echo, 1, SYSTEM), SYSTEM),
        ):
            try:
                block()
            except RuntimeError as error:
                caught.append(error)

    store._core.every(60.0, job)
    store._core.start()
    eventually(lambda: len(caught) == 2)
    assert all("the store's own thread" in str(error) for error in caught)


# --- Questions that go together ---


async def ask_many(store: RedisStore, echo: Echo, count: int) -> list[int]:
    async def one(item: int) -> int:
        return await wait_async(store._core.ask("async", echo, item, SYSTEM), SYSTEM)

    return await asyncio.gather(*(one(item) for item in range(count)))


def test_questions_of_one_loop_go_together(store: RedisStore, echo: Echo):
    """Fifty tasks that ask at the same moment make one script call, and each has its answer."""
    assert asyncio.run(ask_many(store, echo, 50)) == [item * 10 for item in range(50)]
    assert echo.calls == [50]


def test_no_call_is_larger_than_its_most(store: RedisStore, echo: Echo):
    """More questions than fit into one call are several."""
    assert asyncio.run(ask_many(store, echo, 250)) == [item * 10 for item in range(250)]
    assert sum(echo.calls) == 250
    assert max(echo.calls) <= 100


def test_questions_of_threads_go_together(store: RedisStore, echo: Echo):
    """Threads are served by the background thread, which gathers what they ask."""
    answers: dict[int, int] = {}
    together = threading.Barrier(20)

    def one(item: int) -> None:
        together.wait()
        for _ in range(10):
            answers[item] = wait_sync(store._core.ask("sync", echo, item, SYSTEM), SYSTEM)

    threads = [threading.Thread(target=one, args=(item,)) for item in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {item: item * 10 for item in range(20)}
    assert sum(echo.calls) == 200
    assert len(echo.calls) < 200


def test_a_cancelled_question_is_unwanted_and_nobody_else_gets_its_answer(
    store: RedisStore, echo: Echo
):
    """Who is cancelled while the store works has its answer handed to `unwanted`."""

    async def main() -> list[int]:
        await ask_many(store, echo, 1)
        tasks = [
            asyncio.ensure_future(wait_async(store._core.ask("async", echo, item, SYSTEM), SYSTEM))
            for item in range(20)
        ]
        for _ in range(3):  # the question is packed by then, and on its way
            await asyncio.sleep(0)  # noqa: TID251 - lets others run
        assert len(echo.calls) == 2
        for task in tasks[::2]:
            task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
        return answers[1::2]

    assert asyncio.run(main()) == [item * 10 for item in range(1, 20, 2)]
    assert echo.late == [(item, item * 10) for item in range(0, 20, 2)]


def test_nonsense_from_the_store_is_an_unavailable_store(store: RedisStore, echo: Echo):
    """A reply with too few answers is nobody's answer."""
    echo.unpack = lambda _reply, _items: [1]  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable, match="1 answers to 3 questions"):
        asyncio.run(ask_many(store, echo, 3))


def test_queues_that_nobody_uses_are_forgotten(store: RedisStore, echo: Echo, monkeypatch):
    """Policies come and go; the link does not keep all that ever asked."""
    monkeypatch.setattr(connections, "MOST_QUEUES", 4)

    async def main() -> int:
        for _ in range(20):
            await ask_many(store, Echo(echo.key), 1)
        return len(store._core._connection()._queues)

    assert asyncio.run(main()) <= 5


def test_what_nobody_waits_for_any_more_is_not_sent(
    store: RedisStore, client: redis.Redis, monkeypatch
):
    """Calls that were given up before their turn came have no effect later."""
    monkeypatch.setattr(connections, "MOST_CONCURRENT", 1)
    keys = [store._core.key("store", str(number)) for number in range(200)]

    async def main() -> None:
        tasks = [asyncio.ensure_future(store._core.acall("probe", [key], [])) for key in keys]
        await asyncio.sleep(0)  # noqa: TID251 - lets them begin
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store._core.acall("settings", [store._core.key("store", "last")], ["sent", 1000])

    asyncio.run(main())
    assert client.exists(*keys) <= 2


# --- Time ---


def test_a_caller_waits_no_longer_than_the_timeout(new_store: NewStore, server: Server):
    """A server that stands still costs the timeout; a few times, then nothing."""
    store = new_store(url=server.url, timeout=0.05)
    key = store._core.key("store", "x")
    store._core.call("probe", [key], [], 2.0)
    server.freeze()
    for _ in range(3):
        began = SYSTEM.now()
        with pytest.raises(StoreUnavailable):
            store._core.call("probe", [key], [])
        assert SYSTEM.now() - began < 1.0  # far from PATIENCE: nobody waits for the connection
    eventually(lambda: not store.up)
    began = SYSTEM.now()
    with pytest.raises(StoreUnavailable, match="down"):
        store._core.call("probe", [key], [])
    assert SYSTEM.now() - began < 0.5
    server.thaw()
    eventually(lambda: store.up)
    eventually(lambda: _answers(store, key))


def _answers(store: RedisStore, key: str) -> bool:
    try:
        return store._core.call("probe", [key], []) == 1
    except StoreUnavailable:
        return False


def test_a_slow_answer_does_not_cost_the_connection(new_store: NewStore, server: Server):
    """Who gives up leaves the connection to whoever comes next, and it has no stale answer."""
    store = new_store(url=server.url, timeout=0.05)
    key = store._core.key("store", "x")

    async def main() -> None:
        await store._core.acall("probe", [key], [], 2.0)
        before = server.client().info("clients")["connected_clients"]
        server.freeze()
        with pytest.raises(StoreUnavailable):
            await store._core.acall("settings", [key], ["late", 1000])
        server.thaw()
        assert await store._core.acall("probe", [key + "2"], [], 2.0) == 1
        assert await store._core.acall("settings", [key + "3"], ["own", 1000], 2.0) == b"own"
        # The first connection is still there; the second call needed one more at most.
        assert server.client().info("clients")["connected_clients"] <= before + 2

    asyncio.run(main())


def test_a_cancelled_call_never_yields_anothers_reply(store: RedisStore):
    """Cancelled at any moment, a call leaves no connection with an unread reply."""

    async def one(number: int) -> None:
        reply = await store._core.acall(
            "settings", [store._core.key("s", str(number))], [f"v{number}", 9999]
        )
        assert reply == f"v{number}".encode()

    async def main() -> None:
        for number in range(300):
            task = asyncio.ensure_future(one(number))
            for _ in range(number % 12):
                await asyncio.sleep(0)  # noqa: TID251 - lets others run
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await one(number + 1000)

    asyncio.run(main())


# --- StoreHealth ---


def test_a_killed_server_is_noticed_and_so_is_its_return(new_store: NewStore, server: Server):
    """Three failures in a row open the store's own breaker; the background closes it."""
    store = new_store(url=server.url, timeout=0.5)
    told: list[tuple[bool, str]] = []
    store._core.watch(lambda up, cause: told.append((up, cause)))
    key = store._core.key("store", "x")
    store._core.call("probe", [key], [])
    server.kill()
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            store._core.call("probe", [key], [])
    assert [up for up, _cause in told] == [False]
    assert "ConnectionError" in told[0][1]
    server.start()
    eventually(lambda: store.up)
    assert [up for up, _cause in told] == [False, True]
    assert store._core.call("probe", [key], []) == 1


@pytest.mark.parametrize("trouble", ["read only", "full"])
def test_a_server_that_cannot_be_written_to_is_down(
    new_store: NewStore, server: Server, trouble: str
):
    """A replica, or a server without memory, answers a ping and is of no use all the same."""
    store = new_store(url=server.url, timeout=0.5)
    key = store._core.key("store", "x")
    store._core.call("probe", [key], [])
    admin = server.client()
    if trouble == "read only":
        admin.replicaof("127.0.0.1", 1)
    else:
        admin.config_set("maxmemory", 1)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            store._core.call("probe", [key], [])
    assert not store.up
    attempts = store._core.health._model
    eventually(lambda: attempts.snapshot(SYSTEM.now())["consecutive_opens"] >= 2)
    assert not store.up  # it was tried again, and found wanting
    if trouble == "read only":
        admin.replicaof("NO", "ONE")
    else:
        admin.config_set("maxmemory", 0)
    eventually(lambda: store.up)
    assert store._core.call("probe", [key], []) == 1


def test_a_failure_in_between_is_no_reason_to_give_up(store: RedisStore):
    """Failures count in a row: an answer in between ends the row."""
    key = store._core.key("store", "x")
    for _ in range(3):
        for _ in range(2):
            store._core.health.failed("a test")
        assert store._core.call("probe", [key], []) == 1
    assert store.up


# --- The background ---


def test_nothing_runs_before_it_is_needed(store: RedisStore):
    """Making a store, and registering jobs, starts no thread and opens no connection."""
    store._core.every(1.0, lambda: None)  # type: ignore[arg-type,return-value]
    assert store._core._background.thread is None
    assert not store._core._connections


def test_closing_ends_the_thread_and_waits_for_what_is_to_be_flushed(
    store: RedisStore, client: redis.Redis
):
    """`close` runs the closers in the background loop, then the thread ends."""
    flushed: list[int] = []

    async def flush() -> None:
        flushed.append(await store._core.acall("probe", [store._core.key("store", "x")], []))

    store._core.at_close(flush)
    store._core.call("probe", [store._core.key("store", "x")], [])
    thread = store._core._background.thread
    assert thread is not None
    for number in range(50):
        store._core.post("probe", [store._core.key("store", str(number))], [])
    store.close()
    assert not thread.is_alive()
    assert flushed == [1]
    assert client.exists(*(store._core.key("store", str(number)) for number in range(50))) == 50
    with pytest.raises(StoreUnavailable, match="closed"):
        store._core.call("probe", [store._core.key("store", "x")], [])


def test_closing_in_a_loop_closes_its_connections_too(new_store: NewStore):
    """`async with store:` leaves nothing behind."""

    async def main() -> RedisStore:
        async with new_store() as store:
            await store._core.acall("probe", [store._core.key("store", "x")], [])
            store._core.start()
        return store

    store = asyncio.run(main())
    assert not store._core._connections
    thread = store._core._background.thread
    assert thread is not None
    assert not thread.is_alive()


def test_posts_are_sent_in_order(store: RedisStore, client: redis.Redis):
    """What is posted is done in the order in which it was posted, without waiting."""
    key = store._core.key("store", "x")
    for number in range(100):
        store._core.post("settings", [key], [f"{number}", 60_000])
    store._core.post("probe", [store._core.key("store", "done")], [])
    eventually(lambda: client.exists(store._core.key("store", "done")))
    assert client.get(key) == b"0"
    assert store._core._send_queue.dropped == 0


def test_posts_to_a_dead_store_are_dropped_and_counted(new_store: NewStore, server: Server):
    """Nothing gathers without bound while the store is gone."""
    store = new_store(url=server.url)
    store._core.call("probe", [store._core.key("store", "x")], [])
    server.kill()
    for _ in range(100):
        store._core.post("probe", [store._core.key("store", "x")], [])
    eventually(lambda: store._core._send_queue.dropped == 100)
    assert not store._core._send_queue


def test_a_job_runs_when_asked_for_and_survives_its_own_failures(store: RedisStore, caplog):
    """`soon` runs it at once; an error is logged and the next run comes all the same."""
    ran: list[int] = []

    async def job() -> None:
        ran.append(len(ran))
        if len(ran) == 1:
            raise ValueError("a mistake")

    handle = store._core.every(60.0, job)
    store._core.start()
    eventually(lambda: len(ran) == 1)
    handle.soon()
    eventually(lambda: len(ran) == 2)
    assert "a background job of the store failed" in caplog.text
    handle.stop()
    handle.soon()
    store._core.call("probe", [store._core.key("store", "x")], [])
    assert len(ran) == 2


def test_pushed_messages_arrive_also_after_a_restart(new_store: NewStore, server: Server):
    """A listener hears b"" at each connection, and every message in between."""
    store = new_store(url=server.url, timeout=0.5)
    heard: list[bytes] = []
    channel = store._core.channel("store", "x")
    stop = store._core.listen(channel, heard.append)
    store._core.start()
    eventually(lambda: heard == [b""])
    server.client().publish(channel, "one")
    eventually(lambda: heard == [b"", b"one"])
    server.kill()
    server.start()
    eventually(lambda: heard == [b"", b"one", b""])
    server.client().publish(channel, "two")
    eventually(lambda: heard[-1] == b"two")
    late: list[bytes] = []
    store._core.listen(store._core.channel("store", "y"), late.append)
    eventually(lambda: late == [b""])
    again: list[bytes] = []
    store._core.listen(store._core.channel("store", "y"), again.append)  # subscribed to already
    eventually(lambda: again == [b""])
    stop()
    eventually(lambda: not server.client().pubsub_numsub(channel)[0][1])


def test_settings_that_differ_are_told_once(new_store: NewStore):
    """Two pods that disagree on what a name means hear of it."""
    one, two = new_store(), new_store()
    told: list[str] = []
    one._core.announce("limit", "x", "10/s", told.append)
    one._core.start()
    eventually(lambda: _kept(one) == b"10/s")
    handle = two._core.announce("limit", "x", "20/s", told.append)
    two._core.start()
    eventually(lambda: told == ["10/s"])
    handle.soon()
    two._core.call("probe", [two._core.key("store", "x")], [])
    assert told == ["10/s"]


def _kept(store: RedisStore) -> bytes:
    return store._core.call(
        "settings", [store._core.key("limit", "x", "settings")], ["10/s", 60_000]
    )


def test_everything_that_is_kept_expires(store: RedisStore, client: redis.Redis):
    """No key of the store's own stays for ever."""
    store._core.announce("limit", "x", "10/s", print)
    store._core.call("probe", [store._core.key("store", "x")], [])
    eventually(lambda: client.exists(store._core.key("limit", "x", "settings")))
    assert keys_without_expiry(client, store._core.prefix) == []


def test_the_collector_may_end_jobs_and_listeners_at_any_moment(new_store: NewStore):
    """What ends with a policy that is gone never waits for a lock of its own thread."""
    store = new_store()

    async def job() -> None:
        pass

    handle = store._core.every(60.0, job)
    stop = store._core.listen(store._core.channel("store", "x"), print)
    inside: list[str] = []
    for part in (store._core._background, store._core._subscriptions):
        with part._mutex:  # as if the collector came in the middle of a section
            handle.stop()
            stop()
            inside.append("alive")
        settled(part._mutex)
    assert inside == ["alive", "alive"]
    assert handle not in store._core._background._handles
    assert store._core._subscriptions._listeners == {}


def test_a_closed_store_wakes_who_listens_and_takes_no_more(new_store: NewStore):
    """Nobody waits for a message that cannot come, and no job runs beside the closing."""
    store = new_store()
    heard: list[bytes] = []
    ran: list[str] = []

    async def job() -> None:
        ran.append("job")

    async def closer() -> None:
        ran.append("closing")
        await asyncio.sleep(0.05)  # noqa: TID251 - time for a job to run, if it could

    store._core.every(0.001, job)
    store._core.listen(store._core.channel("store", "x"), heard.append)
    store._core.at_close(closer)
    store._core.start()
    eventually(lambda: heard == [b""])
    store.close()
    assert heard == [b"", b""]
    assert ran[-1] == "closing"
    with pytest.raises(StoreUnavailable, match="closed"):
        store._core.start()


def test_what_is_gone_has_nothing_to_flush(store: RedisStore):
    """Closers of policies that nobody holds any more are forgotten."""

    class Policy:
        async def flush(self) -> None:
            pass

    for _ in range(50):
        store._core.at_close(Policy().flush)
    assert len(store._core._closers) <= 1


def test_a_store_that_comes_and_goes_is_left_alone_for_longer_each_time():
    """Breaks go on growing until the store has stayed up for a while."""
    health = StoreHealth()
    pauses = []
    for _ in range(3):
        health.failed("a test", certain=True)
        pauses.append(health.left())
        health._model.close(SYSTEM.now())
        health._publish("it answers again")
    assert pauses[0] < pauses[1] < pauses[2]
    health._back_since -= 60
    health.failed("a test", certain=True)
    assert health.left() <= 0.1


def test_a_full_store_that_does_not_even_answer_is_asked_by_nobody():
    """Queues go on with a full server until it fails three times in a row, or a look says why."""
    health = StoreHealth()
    health.failed("OOM", full=True)
    assert (health.up, health.full) == (False, True)
    for cause_is_full in (False, False, True, False, False):
        health.failed("a test", full=cause_is_full)
    assert health.full
    health.ok()  # an answer, too, ends the row
    health.failed("late")
    health.failed("late")
    assert health.full
    health.failed("late")
    assert not health.full
    health.tried("OOM", full=True)
    assert (health.up, health.full) == (False, True)
    health.tried("gone")
    assert (health.up, health.full) == (False, False)


FORK = """
import asyncio, os, sys, threading
from seawall import RedisStore

store = RedisStore(sys.argv[1], prefix="fork", timeout=2.0)
ran = []
async def job():
    ran.append(os.getpid())
store._core.every(60.0, job)
key = store._core.key("store", "x")
assert store._core.call("probe", [key], []) == 1
asyncio.run(store._core.acall("probe", [key], []))
pod = store._core.pod
pid = os.fork()
if pid == 0:
    try:
        assert store._core.pod != pod
        assert store._core._background.thread is None
        assert store._core.call("probe", [key], []) == 1
        assert asyncio.run(store._core.acall("probe", [key], [])) == 1
        for _ in range(1000):
            if os.getpid() in ran:
                break
            threading.Event().wait(0.01)
        assert os.getpid() in ran, ran
        store.close()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
for _ in range(50):
    assert store._core.call("probe", [key], []) == 1
assert store._core.pod == pod
store.close()
print("done")
"""


def test_a_child_process_has_its_own_thread_and_connections(redis_url: str):
    """After a fork both processes go on, each with connections of its own, and another pod id."""
    ran = subprocess.run(  # noqa: S603 - this project's own code
        [sys.executable, "-c", FORK, redis_url],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stdout + ran.stderr


# --- Names ---


@given(st.lists(st.tuples(st.text(), st.text()), min_size=2, max_size=6, unique=True))
def test_no_two_things_share_a_key(names):
    """Whatever users call things: another kind or name is another key."""
    keys = {make_key("p", "kind", name, key_part(part)) for name, part in names}
    assert len(keys) == len(names)


@given(st.text(), st.text())
def test_no_text_chooses_the_slot(name, part):
    """What is between the first braces is ours, whatever braces the user writes."""
    key = make_key("p", "limit", name, key_part(part))
    tag = key[key.index("{") + 1 : key.index("}")]
    assert tag == f"limit:{name_part(name)}"


class Tenant(StrEnum):
    ACME = "acme"


@pytest.mark.parametrize(
    ("one", "same"),
    [
        (Tenant.ACME, "acme"),
        ((Tenant.ACME,), ("acme",)),
        (1, True),
        (1, 1.0),
        (("a", 1), ("a", 1.0)),
        ("x", "x"),
        (None, None),
    ],
)
def test_equal_keys_are_the_same(one, same):
    """What Python takes for the same key is the same in the store."""
    assert key_part(one) == key_part(same)


def test_different_kinds_of_keys_differ():
    """A number is not its text, and a tuple not what it is made of."""
    keys = ["1", 1, 1.5, b"1", ("1",), (1,), ("1", "2"), ("1,2",), None, "n", "i1", ""]
    assert len({key_part(key) for key in keys}) == len(keys)


def test_a_key_without_a_common_text_is_refused():
    """An object that every process shows differently is no key."""
    with pytest.raises(TypeError, match="return text, a number"):
        key_part(object())


# --- Bad input ---


@pytest.mark.parametrize("options", [{"name": ""}, {"prefix": 3}, {"name": None}])
def test_bad_names_are_refused(options):
    """A store needs a name and a prefix that are text."""
    with pytest.raises(TypeError, match="write text"):
        RedisStore("redis://127.0.0.1:1", **options)


def test_a_store_is_not_pickled(store: RedisStore):
    """Another process makes its own."""
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(store)


def test_the_store_tells_of_itself(store: RedisStore):
    """Its repr and snapshot say where it is and whether it answers."""
    assert repr(store).endswith(": up>")
    assert store.snapshot()["up"] is True
    store.close()
    assert repr(store).endswith(": closed>")
    assert store.up is False


def test_without_redis_the_package_still_imports():
    """`import seawall` needs no client library; only making a store does."""
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "import seawall\n"
        "try:\n    seawall.RedisStore('redis://127.0.0.1:1')\n"
        "except ImportError as error:\n    print(error)\n"
    )
    ran = subprocess.run(  # noqa: S603 - this project's own code
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "seawall[redis]" in ran.stdout
