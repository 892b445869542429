"""What a Pool always keeps to, under random programs and orders; and that its safeguards matter."""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import DeadlineExceeded, TimedOut, deadline
from seawall.errors import PoolExhausted
from seawall.resources.pool.borrowed import Borrowed
from seawall.resources.pool.closing import Closing
from seawall.resources.pool.lending import Lending, _ClosingWaiter
from seawall.resources.pool.pool import Pool
from seawall.resources.pool.stock import Stock
from seawall.runtime.slots import SlotWaiter
from seawall.testing import run_virtual
from tests.support import SEEDS, examples, falsified, let_pass, quarters

QUARTERS = quarters(8)
FOR_EVER = 1e9
CONNECT_TIMEOUT = 1.0


class Server:
    """The other end of all connections: counts them, and notes what must not happen."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.open = 0
        self.broken: list[str] = []

    def opened(self) -> None:
        self.open += 1
        if self.open > self.limit:
            self.broken.append(f"{self.open} connections, {self.limit} allowed")


class Wire:
    """A connection that answers in order: a reply that nobody read is read by the next."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.replies: deque[int] = deque()
        self.users = 0
        self.closed = False

    async def ask(self, question: int, seconds: float) -> None:
        """Send a question, wait for its reply, and read the first reply there is."""
        if self.closed:
            self.server.broken.append("a closed connection was lent")
        self.users += 1
        if self.users > 1:
            self.server.broken.append("two borrowers have the same connection")
        try:
            self.replies.append(question)
            await let_pass(seconds)
            reply = self.replies.popleft()
            if reply != question:
                self.server.broken.append(f"asked {question}, and read the reply to {reply}")
        finally:
            self.users -= 1


class Visit(NamedTuple):
    """One borrower: when it comes, how long it takes, and how it is disturbed."""

    at: float
    duration: float
    cancel: tuple[float, int] | None
    within: float | None
    how: str


class Day(NamedTuple):
    """A pool, how slow everything around it is, and its borrowers."""

    max_size: int
    when_exhausted: str
    checkout_timeout: float
    read_timeout: float | None
    idle_timeout: float
    max_lifetime: float
    connect_takes: float
    close_takes: float
    validate_takes: float | None
    visits: list[Visit]
    resizes: list[tuple[float, int]]
    seed: int


VISITS = st.builds(
    Visit,
    at=QUARTERS,
    duration=QUARTERS,
    cancel=st.none() | st.tuples(QUARTERS, st.integers(0, 4)),
    within=st.none() | QUARTERS,
    how=st.sampled_from(["ask", "ask", "fail", "discard", "swallow", "ask twice"]),
)
DAYS = st.builds(
    Day,
    max_size=st.integers(1, 3),
    when_exhausted=st.sampled_from(["wait", "wait", "wait", "fail"]),
    checkout_timeout=st.sampled_from([0.25, 1.0, 30.0]),
    read_timeout=st.sampled_from([None, 0.5]),
    idle_timeout=st.sampled_from([0.5, 99.0]),
    max_lifetime=st.sampled_from([1.0, 99.0]),
    connect_takes=st.sampled_from([0.0, 0.25, FOR_EVER]),
    close_takes=st.sampled_from([0.0, 0.25, 1.0, FOR_EVER]),
    validate_takes=st.sampled_from([None, 0.0, 0.25, FOR_EVER]),
    visits=st.lists(VISITS, min_size=1, max_size=12),
    resizes=st.lists(st.tuples(QUARTERS, st.integers(1, 3)), max_size=2),
    seed=SEEDS,
)


class World:
    """Carries out a day."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self.rng = Random(day.seed)
        self.failing = 0.1
        self.server = Server(max([day.max_size, *(size for _, size in day.resizes)]))
        self.tasks: list[asyncio.Task[None]] = []
        self.pool: Pool[Wire] = Pool(
            self.connect,
            name="wires",
            max_size=day.max_size,
            close=self.close,
            validate=None if day.validate_takes is None else self.validate,
            connect_timeout=CONNECT_TIMEOUT,
            read_timeout=day.read_timeout,
            idle_timeout=day.idle_timeout,
            checkout_timeout=day.checkout_timeout,
            close_timeout=2.0,
            max_lifetime=day.max_lifetime,
            when_exhausted=day.when_exhausted,  # type: ignore[arg-type]
            max_waiting=6,
            rng=self.rng,
        )

    async def connect(self) -> Wire:
        self.server.opened()
        try:
            await let_pass(self.day.connect_takes)
            if self.rng.random() < self.failing:
                raise ConnectionError  # noqa: TRY301 - the wire is half open then
        except BaseException:
            self.server.open -= 1
            raise
        return Wire(self.server)

    async def close(self, wire: Wire) -> None:
        if wire.closed:
            self.server.broken.append("closed twice")
        wire.closed = True
        try:
            await let_pass(self.day.close_takes)
        finally:
            self.server.open -= 1

    async def validate(self, wire: Wire) -> bool:
        await wire.ask(-1, self.day.validate_takes or 0.0)
        return self.rng.random() < 0.5

    def begin(self, number: int, visit: Visit) -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(self.visit(number, visit))
        self.tasks.append(task)
        if visit.cancel is not None:
            loop.call_later(visit.cancel[0], self.cancel, task, visit.cancel[1])

    def cancel(self, task: asyncio.Task[None], turns: int) -> None:
        if turns:
            asyncio.get_running_loop().call_soon(self.cancel, task, turns - 1)
        else:
            task.cancel()

    async def visit(self, number: int, visit: Visit) -> None:
        with deadline(99.0 if visit.within is None else visit.within):
            try:
                await self.use(number, visit)
            except (PoolExhausted, DeadlineExceeded, TimedOut, ConnectionError, KeyError):
                pass

    async def use(self, number: int, visit: Visit) -> None:
        lease = self.pool.borrow()
        loop = asyncio.get_running_loop()
        came = loop.time()
        async with lease as wire:
            if loop.time() - came > self.day.checkout_timeout + 2 * CONNECT_TIMEOUT:
                self.server.broken.append(f"it took {loop.time() - came} s to borrow")
            try:
                await wire.ask(number, visit.duration)
            except asyncio.CancelledError:
                if visit.how != "swallow":
                    raise
            if visit.how == "ask twice":
                await wire.ask(number + 100, visit.duration)
            if visit.how == "discard":
                lease.discard()
                wire.replies.append(-2)
            if visit.how == "fail":
                wire.replies.append(-3)
                raise KeyError(number)

    async def live(self) -> None:
        loop = asyncio.get_running_loop()
        for number, visit in enumerate(self.day.visits):
            loop.call_later(visit.at, self.begin, number, visit)
        for at, size in self.day.resizes:
            loop.call_later(at, lambda size=size: self.pool.update(max_size=size))
        await let_pass(60.0)
        pool, server = self.pool, self.server
        assert not server.broken
        assert all(task.done() for task in self.tasks)
        assert all(task.cancelled() or task.exception() is None for task in self.tasks)
        assert (pool.in_use, pool.slots.waiting) == (0, 0)
        assert len(pool.slots.free) == pool.settings.max_size
        assert server.open == pool._stock.idle == pool._stock.size <= pool.settings.max_size
        assert await pool.aclose()
        assert server.open == 0
        assert pool._stock.empty


def _check_day(day: Day) -> None:
    async def main() -> None:
        await World(day).live()

    run_virtual(main(), seed=day.seed)


@given(DAYS)
@examples(400)
def test_no_reply_goes_astray_and_nothing_leaks(day: Day) -> None:
    """No borrower reads another's reply; connections <= max_size; in the end all are free."""
    _check_day(day)


def _do_nothing(*_: Any, **__: Any) -> None:
    pass


def _keep_all(lending: Lending, resource: Any, *_: Any, **__: Any) -> None:
    lending.put_idle(resource, lending.clock.now())


def _free_at_once(stock: Stock, resource: Any, *_: Any, **__: Any) -> None:
    """Close, but let the next one connect meanwhile."""
    if resource.alive:
        resource.alive = False
        stock.live.discard(resource)
        Closing(stock, resource, slot=False, owned=False).begin()
        stock.slots.give_back()


ABLATIONS: dict[str, tuple[type, str, Any]] = {
    "what comes back is kept, whatever happened": (Lending, "take_back", _keep_all),
    "a slot is forgotten when its resource is closed": (Closing, "_slot_back", _do_nothing),
    "a cancelled borrower stays in the queue": (SlotWaiter, "abandon", _do_nothing),
    "a closing needs no slot": (Stock, "retire", _free_at_once),
    "what failed to connect is not forgotten": (Stock, "forget", _do_nothing),
    "a hung closing is waited for": (Closing, "_expire", _do_nothing),
}


@pytest.mark.parametrize("missing", ABLATIONS)
def test_without_its_safeguards_the_pool_leaks_or_mixes_replies(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Take one safeguard away, and the property is falsified."""
    monkeypatch.setattr(*ABLATIONS[missing])
    assert falsified(_check_day, DAYS)


INVALID = st.builds(
    Day,
    max_size=st.just(1),
    when_exhausted=st.just("wait"),
    checkout_timeout=st.sampled_from([0.25, 30.0]),
    read_timeout=st.none(),
    idle_timeout=st.just(99.0),
    max_lifetime=st.just(99.0),
    connect_takes=st.just(0.0),
    close_takes=st.sampled_from([0.5, 1.0]),
    validate_takes=st.just(0.0),
    visits=st.lists(VISITS, min_size=4, max_size=12),
    resizes=st.just([]),
    seed=SEEDS,
)
"""Days on which borrowers often wait for a closing."""


@given(INVALID)
def test_who_gives_up_on_a_closing_leaves_its_slot_behind(day: Day) -> None:
    """A borrower that waits until an unfit connection is closed may be cancelled, or late."""
    _check_day(day)


@pytest.mark.parametrize("method", ["abandon", "claim"])
def test_without_leaving_the_slot_it_is_lost(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Go away without a word, or go on before the connection is closed: the property fails."""
    monkeypatch.setattr(_ClosingWaiter, method, _do_nothing)
    assert falsified(_check_day, INVALID)


# A pool that shrinks and grows


def _most_connections_after_a_resize() -> int:
    """Shrink a pool, whose connections close slowly, and let it grow again at once."""

    async def main() -> int:
        day = Day(3, "wait", 30.0, None, 99.0, 99.0, 0.0, 1.0, None, [], [], 1)
        world = World(day)
        world.failing = 0.0
        server = world.server
        await asyncio.gather(*(world.use(n, Visit(0, 0.5, None, None, "ask")) for n in range(3)))
        assert server.open == 3
        world.pool.update(max_size=1)
        world.pool.update(max_size=3)
        server.limit = 0
        await asyncio.gather(*(world.use(n, Visit(0, 0.5, None, None, "ask")) for n in range(3)))
        assert await world.pool.aclose()
        assert server.open == 0
        return max((int(note.split()[0]) for note in server.broken), default=3)

    return run_virtual(main())


def test_what_a_smaller_pool_closes_counts_until_it_is_closed() -> None:
    """A pool that grows again meanwhile waits for it before it connects."""
    assert _most_connections_after_a_resize() <= 3


def test_without_waiting_for_it_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlook what is being closed without a slot, and a new connection comes on top."""
    monkeypatch.setattr(Stock, "_without_slot", lambda _stock: [])
    assert _most_connections_after_a_resize() > 3


# A swallowed cancellation


def _reply_after_a_swallowed_cancellation() -> list[str]:
    async def main() -> list[str]:
        day = Day(1, "wait", 1.0, None, 99.0, 99.0, 0.0, 0.0, None, [], [], 1)
        world = World(day)
        world.failing = 0.0
        first = asyncio.create_task(world.use(1, Visit(0, 1.0, None, None, "swallow")))
        await let_pass(0.5)
        first.cancel()
        await first
        await world.use(2, Visit(0, 1.0, None, None, "ask"))
        return world.server.broken

    return run_virtual(main())


def test_a_block_that_swallows_its_cancellation_spoils_the_resource() -> None:
    """The block ends as if all were well, and the resource is closed all the same."""
    assert _reply_after_a_swallowed_cancellation() == []


def test_without_a_look_at_the_task_the_next_borrower_reads_a_stale_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Believe that a block which ends without error was not cancelled, and replies are mixed up."""
    aexit = Borrowed.__aexit__

    async def trusting(lease: Any, *error: Any) -> None:
        lease._cancelling = 99
        await aexit(lease, *error)

    monkeypatch.setattr(Borrowed, "__aexit__", trusting)
    assert _reply_after_a_swallowed_cancellation() == ["asked 2, and read the reply to 1"]


# Many cycles


def _cycles(count: int, seed: int) -> World:
    day = Day(4, "wait", 30.0, None, 99.0, 9.0, 0.0, 0.0, 0.0, [], [], seed)
    world = World(day)

    async def borrower(number: int) -> None:
        rng = Random(seed + number)
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        for cycle in range(count // 8):
            timer = None
            if rng.random() < 0.3:
                timer = loop.call_later(rng.random() / 100, task.cancel)
            try:
                await world.use(cycle * 8 + number, Visit(0, rng.random() / 100, None, None, "ask"))
            except ConnectionError:
                pass
            except asyncio.CancelledError:
                task.uncancel()
            if timer is not None:
                timer.cancel()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(8):
                group.create_task(borrower(number))

    run_virtual(main(), seed=seed)
    return world


def test_ten_thousand_cycles_leak_nothing(seed: int) -> None:
    """After 10**4 borrows, a third of them cancelled, all slots are free and all else is idle."""
    world = _cycles(10_000, seed)
    stock = world.pool._stock
    assert not world.server.broken
    assert stock.causes["cancelled"] > 1000
    assert len(world.pool.slots.free) == 4
    assert stock.size == stock.idle == world.server.open <= 4
    assert not stock.closing
