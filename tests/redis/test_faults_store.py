"""What a store does when its server fails in every way: no policy is involved here."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest

from seawall import RedisStore
from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.redis import connections
from seawall.redis import store as store_module
from seawall.runtime.background import run_in
from seawall.runtime.driver import wait_async, wait_sync
from tests.redis.faults import FAULTS, NONSENSE, Site, black_hole
from tests.redis.support import eventually, lua

TIMEOUT = 0.05
PATIENT = 0.3
ALLOWED = TIMEOUT + 0.05
"""Seconds that a call may take while the store fails."""


@pytest.fixture
def store(site: Site) -> Iterator[RedisStore]:
    """Return a store with the default timeout, in good health."""
    made = RedisStore(site.url, timeout=TIMEOUT)
    made._core.call("probe", [made._core.key("store", "x")], [], 2.0)
    yield made
    site.proxy.heal()
    made.close()


@pytest.fixture
def patient(site: Site) -> Iterator[RedisStore]:
    """Return a store for tests in which answers are expected: a busy machine has time for them."""
    made = RedisStore(site.url, timeout=PATIENT)
    made._core.call("probe", [made._core.key("store", "x")], [], 2.0)
    yield made
    site.proxy.heal()
    made.close()


class Tenfold:
    """Questions whose answers are ten times what was asked."""

    script = "tenfold"
    most = 100

    def __init__(self, store: RedisStore) -> None:
        self.key = store._core.key("store", "x")
        self.late: list[Any] = []

    def pack(self, items):
        return [self.key], list(items)

    def unpack(self, reply, items):
        if not isinstance(reply, list) or not all(type(answer) is int for answer in reply):
            raise StoreUnavailable("the store's answer makes no sense")
        if len(reply) == len(items):
            assert reply == [item * 10 for item in items], "another call's reply"
        return reply

    def unwanted(self, item, answer):
        assert answer == item * 10
        self.late.append(item)


@pytest.fixture
def tenfold(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> Tenfold:
    """Return questions with answers that show whose they are."""
    text = """
    redis.call('SET', KEYS[1], '1', 'PX', 1000)
    local answers = {}
    for place = 1, #ARGV do answers[place] = ARGV[place] * 10 end
    return answers
    """
    monkeypatch.setattr(store_module, "lua", lambda name: text if name == "tenfold" else lua(name))
    return Tenfold(store)


# --- Every fault ---


class Heartbeat:
    """A task that beats; `late` is the longest time that its loop was kept from it."""

    def __init__(self) -> None:
        self.late = 0.0

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._beat())
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(0.002)  # noqa: TID251 - it measures
            self.late = max(self.late, loop.time() - began - 0.002)


async def a_while(store: RedisStore, tenfold: Tenfold, seconds: float) -> tuple[set[type], float]:
    """Ask and call again and again; return what came of it, and the longest time that one took."""
    loop = asyncio.get_running_loop()
    over = loop.time() + seconds
    came: set[type] = set()
    longest = 0.0

    async def caller(call: Callable[[], Any]) -> None:
        nonlocal longest
        while loop.time() < over:
            began = loop.time()
            try:
                await call()
                came.add(int)
            except Exception as error:  # noqa: BLE001 - what it is, is the question
                came.add(type(error))
            longest = max(longest, loop.time() - began)
            await asyncio.sleep(0.001)  # noqa: TID251 - a pause

    async def probe() -> None:
        if await store._core.acall("probe", [store._core.key("store", "x")], []) != 1:
            raise StoreUnavailable("the store's answer makes no sense")

    await asyncio.gather(
        caller(probe),
        caller(lambda: wait_async(store._core.ask("async", tenfold, 7, SYSTEM), SYSTEM)),
        caller(lambda: wait_async(store._core.ask("async", tenfold, 8, SYSTEM), SYSTEM)),
    )
    return came, longest


def twice(measure: Callable[[], float], allowed: float) -> None:
    """Check a measured time; a busy machine has a second chance."""
    first = measure()
    if first > allowed:
        assert measure() <= allowed, f"{first:.3f} s before"


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_an_unavailable_store_in_time(
    site: Site, store: RedisStore, tenfold: Tenfold, name: str
):
    """Whatever fails: one type of error, soon, a loop that goes on, and healing by itself."""
    told: list[bool] = []
    store._core.watch(lambda up, _cause: told.append(up))

    async def during() -> float:
        async with Heartbeat() as heart:
            with FAULTS[name](site):
                came, longest = await a_while(store, tenfold, 0.3)
                patience = asyncio.get_running_loop().time() + 5.0
                while not told and asyncio.get_running_loop().time() < patience:
                    more, took = await a_while(store, tenfold, 0.05)  # the machine is busy
                    came, longest = came | more, max(longest, took)
                assert told == [False]
            assert came == {StoreUnavailable}
            return max(longest, heart.late)

    async def one_round() -> float:
        took = await during()
        await healed(store)
        assert told[:2] == [False, True]
        while (await a_while(store, tenfold, 0.02))[0] != {int}:
            pass  # a busy machine may be late by itself
        told.clear()
        return took

    twice(lambda: asyncio.run(one_round()), ALLOWED)


def test_a_thread_is_served_as_a_coroutine_is(site: Site, store: RedisStore, tenfold: Tenfold):
    """Without a loop of its own, too, a caller waits no longer than that."""
    key = store._core.key("store", "x")

    def longest() -> float:
        eventually(lambda: store.up)
        took = 0.0
        with black_hole(site):
            for call in [lambda: store._core.call("probe", [key], [])] * 2 + [
                lambda: wait_sync(store._core.ask("sync", tenfold, 7, SYSTEM), SYSTEM)
            ] * 20:
                began = SYSTEM.now()
                with pytest.raises(StoreUnavailable):
                    call()
                took = max(took, SYSTEM.now() - began)
        return took

    twice(longest, ALLOWED)
    eventually(lambda: store.up)
    store._core.timeout = store._core._connections._timeout = 5.0  # on a busy machine
    assert wait_sync(store._core.ask("sync", tenfold, 7, SYSTEM), SYSTEM) == 70


@pytest.mark.parametrize("safe", [True, False])
def test_a_slow_store_is_a_failed_one(site: Site, store: RedisStore, monkeypatch, *, safe: bool):
    """Answers that take 80 ms cost the timeout a few times, and not each time."""
    if not safe:
        monkeypatch.setattr(store._core.health, "late", lambda *_args: None)
    key = store._core.key("store", "x")
    store._core.call("probe", [key], [], 2.0)  # connected
    with FAULTS["slow"](site):
        took = []
        for _ in range(20):
            began = SYSTEM.now()
            with pytest.raises(StoreUnavailable):
                store._core.call("probe", [key], [])
            took.append(SYSTEM.now() - began)
    dear = sum(seconds > TIMEOUT / 2 for seconds in took)
    assert (dear <= 5) == safe


def test_reading_is_no_sign_of_health(site: Site, store: RedisStore, monkeypatch):
    """A server that says it cannot be written to is down, however well it answers otherwise."""
    monkeypatch.setattr(
        store_module, "lua", lambda name: "return 1" if name == "read" else lua(name)
    )
    key = store._core.key("store", "x")
    with FAULTS["read_only"](site):
        assert store._core.call("read", [key], [], 5.0) == 1
        with pytest.raises(StoreUnavailable, match="ReadOnlyError"):
            store._core.call("probe", [key], [], 5.0)
        assert not store.up
    eventually(lambda: store.up)


# --- One bad connection, many callers, a busy loop ---


async def healed(store: RedisStore, *, up: bool = True) -> None:
    """Wait until the store is up again; or until it is found to be down."""
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()
    stop = store._core.watch(lambda _up, _cause: loop.call_soon_threadsafe(changed.set))
    while store.up != up:
        await asyncio.wait_for(changed.wait(), 10)
        changed.clear()
    stop()


async def warm(store: RedisStore, connections: int) -> None:
    """Let the running loop have so many connections."""
    key = store._core.key("store", "x")
    await asyncio.gather(
        *(store._core.acall("probe", [key], [], 2.0) for _ in range(connections)),
        return_exceptions=True,
    )


def test_a_dead_connection_holds_up_only_those_who_met_it(
    site: Site, patient: RedisStore, tenfold: Tenfold, monkeypatch
):
    """A call that is late is passed by: the next one has another connection, and its answer."""

    async def main() -> list[object]:
        await wait_async(patient._core.ask("async", tenfold, 1, SYSTEM), SYSTEM)
        site.proxy.deafen()
        asked = [wait_async(patient._core.ask("async", tenfold, n, SYSTEM), SYSTEM) for n in (2, 3)]
        first = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(error) for error in first] == [StoreUnavailable] * 2
        return [await wait_async(patient._core.ask("async", tenfold, 4, SYSTEM), SYSTEM)]

    assert asyncio.run(main()) == [40]
    monkeypatch.setattr(connections._QuestionQueue, "_give_up", never_pass)  # the safeguard away
    with pytest.raises(StoreUnavailable):
        asyncio.run(main())


def never_pass(lane: Any) -> None:
    """Give up as a lane does, and let nobody pass by."""
    asked, lane._asked = lane._asked, []
    lane._waiting.extendleft(asked)
    now = lane._loop.time()
    for asking in [one for one in lane._waiting if not one.over]:
        if asking.due <= now:
            asking.fail(StoreUnavailable("late"))
    lane._timer = lane._loop.call_later(0.01, lane._look_again)


def test_connections_from_before_an_outage_are_not_used_again(
    site: Site, patient: RedisStore, monkeypatch
):
    """Half-dead ones would fail one call each, long after the store is back."""

    async def calls(number: int, wait: float) -> Counter[object]:
        key = patient._core.key("store", "x")
        came = await asyncio.gather(
            *(patient._core.acall("probe", [key], [], wait) for _ in range(number)),
            return_exceptions=True,
        )
        return Counter(one if one == 1 else type(one) for one in came)

    async def main() -> Counter[object]:
        await warm(patient, 20)
        site.proxy.deafen()
        for _ in range(3):  # one after another: what is late at the same time counts once
            assert await calls(2, PATIENT) == {StoreUnavailable: 2}
        await healed(patient, up=False)
        await healed(patient)
        return await calls(20, 5.0)

    assert asyncio.run(main()) == {1: 20}
    eventually(lambda: patient.up)

    def same_for_ever(links: Any, loop: asyncio.AbstractEventLoop) -> Any:
        if loop not in links._connections:
            links._connections[loop] = links.apart()
            links._end_with(loop)
        return links._connections[loop]

    monkeypatch.setattr(connections.Connections, "_find", same_for_ever)
    assert asyncio.run(main())[StoreUnavailable] > 0


@pytest.mark.parametrize("safe", [True, False])
def test_many_callers_at_once_are_no_failure(store: RedisStore, monkeypatch, *, safe: bool):
    """More calls than connections wait for their turn; nobody blames the store for it."""
    if not safe:
        monkeypatch.setattr(connections, "MOST_CONCURRENT", 10_000)

    async def main() -> Counter[type]:
        key = store._core.key("store", "x")
        came = await asyncio.gather(
            *(store._core.acall("probe", [key], [], 5.0) for _ in range(500)),
            return_exceptions=True,
        )
        return Counter(type(one) for one in came)

    assert (asyncio.run(main()) == {int: 500}) == safe
    assert (store._core.health.outages == 0) == safe


@pytest.mark.parametrize("safe", [True, False])
def test_a_loop_that_was_busy_does_not_blame_the_store(
    site: Site, patient: RedisStore, tenfold: Tenfold, monkeypatch, *, safe: bool
):
    """What arrived in time is taken, even if the loop had no time to look."""
    if not safe:
        monkeypatch.setattr(
            connections._QuestionQueue, "_look_again", connections._QuestionQueue._give_up
        )
        monkeypatch.setattr(connections._CallTimer, "_look_again", connections._CallTimer._give_up)

    async def main() -> list[object]:
        await warm(patient, 4)
        site.proxy.delay = 0.05  # no answer comes before it is busy
        calls = [
            patient._core.acall("probe", [patient._core.key("store", "x")], []) for _ in range(3)
        ]
        asked = [wait_async(patient._core.ask("async", tenfold, n, SYSTEM), SYSTEM) for n in (1, 2)]
        tasks = [asyncio.ensure_future(one) for one in (*calls, *asked)]
        for _ in range(4):
            await asyncio.sleep(0)  # noqa: TID251 - all is sent
        SYSTEM.sleep(2 * PATIENT)  # somebody computes
        return await asyncio.gather(*tasks, return_exceptions=True)

    came = asyncio.run(main())
    assert (came == [1, 1, 1, 10, 20] and patient.up) == safe


def test_a_probe_that_was_late_itself_is_repeated(store: RedisStore, monkeypatch):
    """A thread that got no turn may not keep a good store down."""
    exchange = connections.LoopConnection.exchange
    slow = [True]

    async def late(link: Any, *args: Any) -> Any:
        if slow and slow.pop():
            await asyncio.sleep(2 * TIMEOUT)  # noqa: TID251 - as if it had no turn
        return await exchange(link, *args)

    monkeypatch.setattr(connections.LoopConnection, "exchange", late)
    link = store._core._connections.apart

    async def tried() -> str | None:
        one = link()
        try:
            return await store._core._try(one)
        finally:
            await one.close()

    assert asyncio.run(tried()) is None
    slow[:] = [True]
    monkeypatch.setattr(store_module, "TRIES", 1)
    assert asyncio.run(tried()) == "slow to answer"


# --- Closing, posting, pushing ---


def test_who_waits_while_the_store_is_closed_is_not_cancelled(site: Site, store: RedisStore):
    """Closing is an unavailable store to others: a cancellation would be nobody's."""
    key = store._core.key("store", "x")
    caught: list[BaseException] = []

    async def main() -> None:
        await store._core.acall("probe", [key], [], 5.0)
        with black_hole(site):
            task = asyncio.ensure_future(store._core.acall("probe", [key], [], 5.0))
            await asyncio.sleep(0.01)  # noqa: TID251 - it is under way
            await store.aclose()
            caught.extend(await asyncio.gather(task, return_exceptions=True))

    asyncio.run(main())
    assert [type(error) for error in caught] == [StoreUnavailable]


def test_a_thread_that_waits_while_the_store_is_closed_is_told(site: Site, store: RedisStore):
    """The same for callers without a loop."""
    caught: list[BaseException] = []

    def call() -> None:
        try:
            store._core.call("probe", [store._core.key("store", "x")], [], 5.0)
        except BaseException as error:  # noqa: BLE001 - what it is, is the question
            caught.append(error)

    with black_hole(site):
        thread = threading.Thread(target=call)
        thread.start()
        SYSTEM.sleep(0.02)
        store.close()
        thread.join(10)
    assert [type(error) for error in caught] == [StoreUnavailable]
    with pytest.raises(StoreUnavailable):
        run_in(store._core._background, lambda: store._core.acall("probe", [], []), 1.0)


def test_threads_that_post_at_once_keep_their_order(store: RedisStore, monkeypatch):
    """What one thread posts is done in its order, whoever posts besides."""
    text = "return redis.call('RPUSH', KEYS[1], ARGV[1]), redis.call('PEXPIRE', KEYS[1], 10000)"
    monkeypatch.setattr(store_module, "lua", lambda name: text if name == "note" else lua(name))
    key = store._core.key("store", "posts")

    def post(number: int) -> None:
        for turn in range(100):
            store._core.post("note", [key], [f"{number}:{turn}"])

    threads = [threading.Thread(target=post, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store.close()
    with store_client(store) as client:
        noted = [line.decode().split(":") for line in client.lrange(key, 0, -1)]
    assert store._core._send_queue.dropped == 0
    for number in range(8):
        turns = [int(turn) for one, turn in noted if int(one) == number]
        assert turns == list(range(100))


def store_client(store: RedisStore) -> Any:
    """Return a plain client where the store leads."""
    import redis

    return redis.Redis.from_url(repr(store._core._clients.place), socket_timeout=5)


def test_nonsense_does_not_end_the_pushes(site: Site, store: RedisStore):
    """Whatever comes instead of a message, the channel is heard again afterwards."""
    heard: list[bytes] = []
    channel = store._core.channel("store", "x")
    site.proxy.mangle_pushes = lambda _data: NONSENSE[4]
    store._core.listen(channel, heard.append)
    SYSTEM.sleep(0.3)
    assert heard == []
    site.proxy.heal()
    eventually(lambda: heard)
    with site.admin() as admin:
        admin.publish(channel, "one")
        eventually(lambda: heard[-1] == b"one")
        admin.publish(channel, b"x" * 100_000)
        admin.publish(channel, "two")
    eventually(lambda: heard[-1] == b"two")
    assert max(len(message) for message in heard) == 3


@pytest.mark.parametrize("safe", [True, False])
def test_channels_that_are_added_while_it_connects_are_all_heard(
    site: Site, store: RedisStore, monkeypatch, *, safe: bool
):
    """Two that subscribe at once share one connection: what comes over another is not heard."""

    class Nothing:
        async def __aenter__(self) -> None: ...

        async def __aexit__(self, *_exc: object) -> None: ...

    if not safe:
        monkeypatch.setattr(store._core._subscriptions, "_turn", Nothing())
    heard: list[bytes] = []
    channels = [store._core.channel("store", f"x{number}") for number in range(4)]
    site.proxy.delay = 0.03  # it takes a while to connect
    for channel in channels:
        store._core.listen(channel, heard.append)
        SYSTEM.sleep(0.005)
    with site.admin() as admin:
        eventually(lambda: all(admin.pubsub_numsub(one)[0][1] for one in channels))
        site.proxy.delay = 0.0
        for _ in range(20):
            for channel in channels:
                admin.publish(channel, channel)
            SYSTEM.sleep(0.005)
    all_heard = all(heard.count(channel.encode()) >= 10 for channel in channels)
    assert all_heard == safe


def test_an_answer_that_cannot_be_given_back_keeps_nobody_else_waiting(
    store: RedisStore, tenfold: Tenfold, caplog
):
    """Whoever asked together with one who gave up has its answer."""

    def broken(_item: Any, _answer: Any) -> None:
        raise ValueError("a mistake")

    tenfold.unwanted = broken  # type: ignore[method-assign]
    store._core.timeout = store._core._connections._timeout = 5.0  # on a busy machine

    async def main() -> list[object]:
        await wait_async(store._core.ask("async", tenfold, 1, SYSTEM), SYSTEM)
        tasks = [
            asyncio.ensure_future(wait_async(store._core.ask("async", tenfold, n, SYSTEM), SYSTEM))
            for n in range(4)
        ]
        for _ in range(3):
            await asyncio.sleep(0)  # noqa: TID251 - they are asked
        tasks[0].cancel()
        return (await asyncio.gather(*tasks, return_exceptions=True))[1:]

    assert asyncio.run(main()) == [10, 20, 30]
    assert "not given back" in caplog.text


# --- Cancelled callers ---


@pytest.mark.parametrize("seed", range(3))
def test_a_cancelled_caller_never_leaves_a_reply_to_others(
    site: Site, store: RedisStore, tenfold: Tenfold, monkeypatch, seed: int
):
    """Cancelled at random moments, with replies in pieces: every answer is the asker's own."""
    text = "redis.call('SET', KEYS[1], ARGV[1], 'PX', 1000) return ARGV[1]"
    base = store_module.lua
    monkeypatch.setattr(store_module, "lua", lambda name: text if name == "same" else base(name))
    site.proxy.dribble = 3
    store._core.timeout = store._core._connections._timeout = (
        5.0  # a busy machine takes long over so many pieces
    )
    rng = random.Random(seed)
    key = store._core.key("store", "x")
    answered = 0

    async def call(number: int) -> None:
        nonlocal answered
        reply = await store._core.acall("same", [key], [f"v{number}"], 5.0)
        assert reply == f"v{number}".encode()
        answered += 1

    async def ask(number: int) -> None:
        nonlocal answered
        assert (
            await wait_async(store._core.ask("async", tenfold, number, SYSTEM), SYSTEM)
            == number * 10
        )
        answered += 1

    async def one(number: int) -> None:
        work = call if rng.random() < 0.5 else ask
        task = asyncio.ensure_future(work(number))
        if rng.random() < 0.7:
            if rng.random() < 0.5:
                for _ in range(rng.randrange(12)):
                    await asyncio.sleep(0)  # noqa: TID251 - lets others run
            else:
                await asyncio.sleep(rng.random() * 0.01)  # noqa: TID251 - into the reply
            task.cancel()
        (came,) = await asyncio.gather(task, return_exceptions=True)
        assert came is None or isinstance(came, asyncio.CancelledError), came

    async def caller(first: int) -> None:
        for number in range(first, first + 50):
            await one(number)

    async def main() -> None:
        await asyncio.gather(*(caller(1000 * place) for place in range(20)))

    asyncio.run(main())
    assert answered > 200
