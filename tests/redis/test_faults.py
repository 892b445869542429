"""Shared policies while their store fails in every way: what was configured, each time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from secrets import token_hex
from typing import Any

import pytest

from seawall import (
    Breaker,
    CircuitOpen,
    Guard,
    RateLimit,
    RateLimited,
    RedisStore,
    subscribe,
)
from seawall.clock import SYSTEM
from seawall.events import StoreModeChanged
from seawall.policies.breaker import n_of_m
from seawall.runtime.policy import bindings_of
from tests.redis.faults import FAULTS, NONSENSE, Lateness, Site
from tests.redis.support import eventually

TIMEOUT = 0.05
ALLOWED = TIMEOUT + 0.05
"""Seconds that a call may take while the store fails, for 99 of 100 calls."""

BLOCKED = 0.05
"""Seconds for which an event loop may stand still; so many callers take a few by themselves."""

FAILING = 0.6
"""Seconds that a fault lasts: longer than a loop that has just begun may take to connect."""

MODES = ("local", "open", "closed")
BURST = 10
PAUSE = 0.004
"""Seconds between two calls of one caller."""

_serial = count()


class Bad(Exception):
    """What a guarded function raises."""


class Subject:
    """A guard with one shared policy, what its calls came to, and the events of its guard."""

    def __init__(self, store: RedisStore, policy: Any, mode: str, what: str) -> None:
        self.store = store
        self.policy = policy
        self.mode = mode
        self.what = what
        self.guard = Guard(f"faults-{next(_serial)}", policy)
        self.modes: list[tuple[str, str]] = []
        self.fails = False
        self.begin()

    def begin(self) -> None:
        """Forget what came before."""
        self.came: list[tuple[object, bool]] = []
        self.took: list[float] = []

    def note(self, began: float, known_down: bool, came: object) -> None:  # noqa: FBT001
        """Take down how a call ended: a word, or what it raised."""
        self.took.append(SYSTEM.now() - began)
        if isinstance(came, BaseException):
            came = came.with_traceback(None)  # thousands of frames are work for the collector
        self.came.append((came, known_down))

    def work(self) -> str:
        """Be the guarded function."""
        if self.fails:
            raise Bad
        return "done"

    async def awork(self) -> str:
        """Be the guarded function, for coroutines."""
        return self.work()

    def call(self) -> None:
        """Call once."""
        began, down = SYSTEM.now(), self.told
        try:
            self.note(began, down, self.guard.call(self.work))
        except BaseException as error:  # noqa: BLE001 - what it is, is the question
            self.note(began, down, error)

    async def acall(self) -> None:
        """Call once, from a coroutine."""
        began, down = SYSTEM.now(), self.told
        try:
            self.note(began, down, await self.guard.acall(self.awork))
        except BaseException as error:  # noqa: BLE001 - what it is, is the question
            self.note(began, down, error)

    @property
    def told(self) -> bool:
        """Whether it was told that the store is away."""
        return bool(self.modes) and self.modes[-1][0] == "shared"

    @property
    def shared_now(self) -> bool:
        """Whether the store decides now."""
        return bindings_of(self.policy)[0].snapshot(SYSTEM.now())["shared"]["mode"] == "shared"

    def refusals(self) -> list[BaseException]:
        """Return what the calls raised, except for what the guarded function did."""
        errors = [came for came, _down in self.came if isinstance(came, BaseException)]
        return [error for error in errors if not isinstance(error, Bad)]

    def admitted(self) -> int:
        """Return how many calls reached the guarded function."""
        return len(self.came) - len(self.refusals())


def limits(store: RedisStore, sharing: str) -> list[Subject]:
    """Return one limit for each way to go on without the store."""
    return [
        Subject(
            store,
            RateLimit(
                "10/s",
                burst=BURST,
                shared=store,
                name=f"{sharing}-{mode}",
                sharing=sharing,
                on_store_failure=mode,
            ),
            mode,
            sharing,
        )
        for mode in MODES
    ]


def breakers(store: RedisStore, state: str, fails: bool) -> list[Subject]:  # noqa: FBT001
    """Return breakers in that state, one for each way to go on without the store."""
    made = []
    for mode in MODES:
        policy = Breaker(
            consecutive=3,
            break_for=0.02 if state == "half_open" else 30.0,
            probes=n_of_m(50, 50),
            shared=store,
            name=f"breaker-{state}-{fails}-{mode}",
            on_store_failure=mode,
        )
        made.append(Subject(store, policy, mode, state))
        made[-1].fails = fails
    return made


def bring_to(subject: Subject, state: str) -> None:
    """Let a breaker be in that state, in the store."""
    fails = subject.fails

    def there() -> bool:
        # A busy machine may be late, and the pod alone for a moment: then it begins again.
        now = subject.policy.state
        subject.fails = state != "closed" and now == "closed"
        subject.call()
        return subject.policy.state == state and subject.shared_now

    eventually(there)
    subject.fails = fails


@pytest.fixture
def pods(site: Site) -> Iterator[tuple[RedisStore, RedisStore]]:
    """Return the store of a pod behind the proxy, and that of another which is not hurt by it."""
    prefix = f"faults-{token_hex(4)}"
    one = RedisStore(site.url, prefix=prefix, timeout=TIMEOUT)
    two = RedisStore(site.server.url, prefix=prefix, timeout=2.0)
    one._core.call("probe", [one._core.key("store", "x")], [], 2.0)
    yield one, two
    site.proxy.heal()
    one.close()
    two.close()


class Field:
    """All policies of one pod, with the events of their guards."""

    def __init__(self, store: RedisStore, other: RedisStore) -> None:
        self.store = store
        self.exact = limits(store, "exact")
        self.leased = limits(store, "leased")
        self.fine = breakers(store, "closed", fails=False)
        self.failing = breakers(store, "closed", fails=True)
        self.open = breakers(store, "open", fails=False)
        self.half_open = breakers(store, "half_open", fails=False)
        self.breakers = [*self.fine, *self.failing, *self.open, *self.half_open]
        self.limits = [*self.exact, *self.leased]
        self.all = [*self.limits, *self.breakers]
        self.others = [
            Breaker(consecutive=3, shared=other, name=one.policy.name, probes=n_of_m(50, 50))
            for one in self.breakers
        ]
        guards = {subject.guard.name: subject for subject in self.all}

        def heard(event: StoreModeChanged) -> None:
            if event.guard in guards:
                assert event.store == "redis"
                guards[event.guard].modes.append((event.before, event.after))

        self.stop = subscribe(heard, StoreModeChanged)

    def prepare(self) -> None:
        """Let every policy be known to the store, and in its state; then count anew."""
        for subject in self.limits:
            subject.call()
        for subject in self.breakers:
            bring_to(subject, subject.what)
        eventually(lambda: all(subject.shared_now for subject in self.all))
        for subject in self.all:
            subject.begin()
            subject.modes.clear()

    def drive(self, kind: str, seconds: float) -> None:
        """Let everybody call, again and again."""
        over = SYSTEM.now() + seconds
        self.blocked = 0.0
        with Lateness() as machine:
            if kind == "async":
                asyncio.run(self._tasks(over))
            else:
                self._threads(over)
        self.machine = machine.worst

    def _threads(self, over: float) -> None:
        def caller(subject: Subject) -> None:
            while SYSTEM.now() < over:
                subject.call()
                SYSTEM.sleep(PAUSE)

        threads = [threading.Thread(target=caller, args=(subject,)) for subject in self.all]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "somebody hangs"

    async def _tasks(self, over: float) -> None:
        async def caller(subject: Subject) -> None:
            while SYSTEM.now() < over:
                await subject.acall()
                await asyncio.sleep(PAUSE)  # noqa: TID251 - a pause

        async def heart() -> None:
            while SYSTEM.now() < over:
                began = SYSTEM.now()
                await asyncio.sleep(PAUSE)  # noqa: TID251 - it measures
                self.blocked = max(self.blocked, SYSTEM.now() - began - PAUSE)

        async with asyncio.timeout(20):
            await asyncio.gather(heart(), *(caller(subject) for subject in self.all))

    def trouble(self) -> str | None:
        """Return what took too long, if anything did; the machine's own lateness is excused."""
        took = sorted(seconds for subject in self.all for seconds in subject.took)
        p99 = took[int(len(took) * 0.99)]
        if p99 - self.machine > ALLOWED:
            return f"99 of 100 calls took up to {p99:.3f} s"
        if self.blocked - self.machine > BLOCKED:
            return f"the event loop stood still for {self.blocked:.3f} s"
        return None

    def came_back(self) -> bool:
        """Tell whether the store decides everywhere."""
        return self.store.up and all(subject.shared_now for subject in self.all)


@pytest.fixture
def field(pods: tuple[RedisStore, RedisStore]) -> Iterator[Field]:
    """Return all policies, ready."""
    made = Field(*pods)
    made.prepare()
    yield made
    made.stop()


# --- Every fault, every policy ---


def check_limit(subject: Subject, seconds: float) -> None:
    """Check a limit without its store: what was configured, every time."""
    refusals = subject.refusals()
    assert {type(error) for error in refusals} <= {RateLimited}
    away = [error for error in refusals if error.reason == "store_unavailable"]
    down = [came for came, known in subject.came if known]
    assert down
    if subject.mode == "open":
        assert all(came == "done" for came in down)
        assert not away
    elif subject.mode == "closed":
        assert all(isinstance(came, RateLimited) for came in down)
        assert all("the store 'redis' is away" in str(error) for error in away)
        # What had been granted before, and what was answered at the very beginning.
        assert subject.admitted() <= BURST
    else:
        assert not away
        assert 1 <= subject.admitted() <= 2 * BURST + 10 * seconds + 1
        assert refusals, "it does not limit any more"


def check_breaker(subject: Subject) -> None:
    """Check a breaker without its store: what was configured, every time."""
    refusals = subject.refusals()
    assert {type(error) for error in refusals} <= {CircuitOpen}
    down = [came for came, known in subject.came if known]
    assert down
    if subject.mode == "open":
        assert not any(isinstance(came, CircuitOpen) for came in down)
    elif subject.mode == "closed":
        assert all(isinstance(came, CircuitOpen) for came in down)
        assert all("'redis'" in str(came) for came in down[1:])
    elif subject.fails:
        assert refusals, "it does not break any more"
        assert subject.policy.state == "open"
    elif subject.what == "open":
        assert subject.admitted() == 0
    elif subject.what == "closed":
        assert not refusals
    else:
        assert subject.admitted() > 0


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("name", FAULTS)
def test_what_was_configured_is_done_every_time(site: Site, field: Field, name: str, kind: str):
    """Whatever fails, however it is called: as configured, in time, told once, and healed."""
    for chance in (1, 2):
        with FAULTS[name](site):
            began = SYSTEM.now()
            for _ in range(10):  # until all have called a store that is known to be down
                field.drive(kind, FAILING)
                known = all(any(down for _, down in one.came) for one in field.limits)
                # On a busy machine few calls come in a round: then a limit has room for all.
                if known and all(one.refusals() for one in field.limits if one.mode == "local"):
                    break
            seconds = SYSTEM.now() - began
            if chance == 1:
                for subject in field.limits:
                    check_limit(subject, seconds)
                for subject in field.breakers:
                    check_breaker(subject)
                for subject in field.all:
                    assert subject.modes == [("shared", subject.mode)], subject.what
        eventually(field.came_back)
        trouble = field.trouble()
        if trouble is None:
            break
        assert chance == 1, trouble  # a busy machine has a second chance
        for subject in field.all:
            subject.begin()
    check_sharing(field)


def check_sharing(field: Field) -> None:
    """All is as it was: events came in pairs, and pods share again."""
    for subject in field.all:
        away, back = ("shared", subject.mode), (subject.mode, "shared")
        assert subject.modes == [away, back] * (len(subject.modes) // 2)
    # Another pod stops all calls by hand, and lets them through again.
    for other in field.others:
        other.isolate()
    eventually(lambda: all(subject.policy.state == "isolated" for subject in field.breakers))
    for other in field.others:
        other.close()
    eventually(lambda: all(subject.policy.state == "closed" for subject in field.breakers))
    for subject in field.limits:
        subject.begin()
        eventually(lambda subject=subject: subject.call() or subject.came[-1][0] == "done")
        with suppress(RateLimited):
            for _ in range(5 * BURST):
                subject.guard.call(subject.work)
            raise AssertionError("nobody limits any more")


# --- A store that answers, and makes no sense ---


def _sane(subject: Subject) -> bool:
    """Tell whether the last call ended as it may where the store says nothing of use."""
    came = subject.came[-1][0]
    if subject.mode == "open":
        return came == "done"
    refused = isinstance(came, RateLimited if subject.what in ("exact", "leased") else CircuitOpen)
    return refused or (subject.mode == "local" and came == "done")


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("place", range(len(NONSENSE)))
def test_an_answer_that_makes_no_sense_is_none(
    site: Site, pods: tuple[RedisStore, RedisStore], place: int, kind: str
):
    """Whatever is wrong with it, what was configured is done; the store need not be down."""
    store, _other = pods
    breakers_ = breakers(store, "half_open", fails=False)
    for subject in breakers_:
        bring_to(subject, "half_open")
    subjects = [*limits(store, "exact"), *limits(store, "leased"), *breakers_]
    site.proxy.mangle = lambda _data: NONSENSE[place]

    async def main() -> None:
        for _ in range(5):
            for subject in subjects:
                await subject.acall()

    if kind == "async":
        asyncio.run(main())
    else:
        for _ in range(5):
            for subject in subjects:
                subject.call()
    for subject in subjects:
        assert _sane(subject), (subject.what, subject.mode, subject.came)
    site.proxy.sever()
    site.proxy.heal()
    eventually(lambda: store.up and all(subject.shared_now for subject in subjects))


def test_nonsense_that_is_pushed_changes_nothing(site: Site, pods: tuple[RedisStore, RedisStore]):
    """A breaker asks the store about what it does not understand, and stays as it is."""
    store, _other = pods
    (subject, *_rest) = breakers(store, "closed", fails=False)
    bring_to(subject, "closed")
    subject.begin()
    channel = store._core.channel("breaker", subject.policy.name)
    with site.admin() as admin:
        eventually(lambda: admin.pubsub_numsub(channel)[0][1])
        for message in (
            b"",
            b"x",
            b"[]",
            b"{}",
            b'["","l","1","open"]',
            b"\xff" * 100,
            b"9" * 5000,
        ):
            admin.publish(channel, message)
        for _ in range(20):
            subject.call()
            SYSTEM.sleep(0.005)
    assert {came for came, _told in subject.came} == {"done"}
    assert subject.policy.state == "closed"
