"""What Throttle always keeps to: the books balance, and what is sent follows what is accepted."""

from __future__ import annotations

import asyncio
import threading
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Overloaded, Throttle
from seawall.clock import VirtualClock
from seawall.models.throttle import ThrottleModel
from seawall.policies import throttle as module
from seawall.policies.throttle import _ThrottleGate
from seawall.runtime.call import Call
from seawall.runtime.interpreter import run_sync
from seawall.testing import run_virtual, virtual_time
from tests.support import SEEDS, examples, falsified, let_pass, new_guard, quarters


class Visit(NamedTuple):
    """One call: when, for how long, how it ends, and whether it is cancelled before."""

    at: float
    duration: float
    end: str
    cancel: float | None


VISITS = st.builds(
    Visit,
    at=quarters(12),
    duration=quarters(8),
    end=st.sampled_from(["ok", "refused", "failed"]),
    cancel=st.none() | quarters(16),
)
DAYS = st.tuples(st.lists(VISITS, min_size=1, max_size=15), SEEDS)


def check_books(day: tuple[list[Visit], int]) -> None:
    """Check, after all calls, that the window holds what the callers saw."""
    visits, seed = day
    ends: list[str] = []

    async def main() -> Any:
        throttle = Throttle(window=1000.0, probe_every=None)
        guard = new_guard(throttle, rng=Random(seed))

        async def work(visit: Visit) -> None:
            await let_pass(visit.duration)
            if visit.end != "ok":
                raise ConnectionError if visit.end == "refused" else KeyError

        async def call(visit: Visit) -> None:
            await let_pass(visit.at)
            try:
                await guard.acall(work, visit)
            except Overloaded:
                ends.append("rejected")
            except (ConnectionError, KeyError):
                ends.append(visit.end)
            else:
                ends.append("ok")

        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(call(visit)) for visit in visits]
        for task, visit in zip(tasks, visits, strict=True):
            if visit.cancel is not None:
                loop.call_later(visit.cancel, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        return throttle._model.recent(loop.time())

    recent = run_virtual(main(), seed=seed)
    assert recent.requests == len(ends)
    assert recent.accepts == ends.count("ok") + ends.count("failed")


@given(DAYS)
@examples(60)
def test_the_books_balance(day):
    """Every call is counted once, by its end; cancelled ones not at all."""
    check_books(day)


def test_without_giving_back_the_books_do_not_balance(monkeypatch):
    """Ablation: if cancelled calls stay counted, the same check fails."""
    monkeypatch.setattr(ThrottleModel, "give_back", lambda _self, _ticket: None)
    assert falsified(check_books, DAYS)


def overload(k: float, offered: int, taken: int, seed: int, window: float = 10.0):
    """Offer so many calls a second to a server that takes so many; return what is sent and taken.

    The first windows, in which the share settles, are left out.
    """
    clock = VirtualClock()
    with virtual_time(clock):
        guard = new_guard(Throttle(k=k, window=window), rng=Random(seed))
        sent = accepted = 0
        room = 0.0

        def serve() -> None:
            nonlocal sent, accepted, room
            sent += 1
            if room < 1:
                raise ConnectionError
            room -= 1
            accepted += 1

        for second in range(int(8 * window)):
            if second == 4 * window:
                sent = accepted = 0
            for _ in range(offered):
                clock.advance(1 / offered)
                room = min(room + taken / offered, 10.0)  # a short queue
                guard.attempt(serve)
        return sent, accepted


@pytest.mark.parametrize(("k", "offered"), [(2.0, 100), (2.0, 40), (1.5, 100), (3.0, 100)])
def test_about_k_times_as_much_is_sent_as_gets_accepted(k, offered, seed):
    """However much is offered, the server sees k times what it takes."""
    sent, accepted = overload(k, offered, taken=10, seed=seed)
    assert sent / accepted == pytest.approx(k, rel=0.1)
    # What the server can take, it gets: throttling costs no goodput.
    assert accepted >= 0.9 * 10 * 40


def test_a_server_that_takes_enough_sees_everything(seed):
    """Up to k times its capacity nothing is rejected here."""
    sent, _ = overload(2.0, 18, taken=10, seed=seed)
    assert sent == pytest.approx(18 * 40, rel=0.02)


def test_without_counting_what_is_rejected_here_too_much_is_sent(monkeypatch, seed):
    """Ablation: if only what is sent counts as a request, the share settles too low."""
    ask = _ThrottleGate.enter

    def forgetful(self: _ThrottleGate, now: float) -> Any:
        try:
            return ask(self, now)
        except Overloaded:
            bucket = self._model.bucket
            bucket.calls -= 1
            bucket.failures -= 1
            raise

    monkeypatch.setattr(_ThrottleGate, "enter", forgetful)
    sent, accepted = overload(2.0, 100, taken=10, seed=seed)
    assert sent / accepted > 2.5


def dead_then_alive(seed: int, **options: Any) -> float:
    """Return how long after its recovery a server that was dead for long is noticed."""
    clock = VirtualClock()
    with virtual_time(clock):
        guard = new_guard(Throttle(window=60.0, **options), rng=Random(seed))
        alive = False
        reached = 0

        def serve() -> None:
            nonlocal reached
            if not alive:
                raise ConnectionError
            reached += 1

        for second in range(600):
            alive = second >= 300
            for _ in range(50):
                guard.attempt(serve)
                clock.advance(1 / 50)
                if reached:
                    return clock.now() - 300
        return 300.0


def test_a_recovery_is_noticed_within_the_interval_of_probes(seed):
    """Also with so much traffic that chance alone would take a window to try again."""
    assert max(dead_then_alive(seed + n, probe_every=5.0) for n in range(3)) <= 5.1


def test_without_probes_it_is_left_to_chance(seed):
    """Ablation: without them the same recovery goes unnoticed for longer."""
    assert max(dead_then_alive(seed + n, probe_every=None) for n in range(3)) > 5.1


# The written-out success path does what the methods do


def play(history: list[tuple[float, str]], *, fast: bool, seed: int) -> list[Any]:
    with virtual_time() as clock:
        guard = new_guard(Throttle(window=5.0, probe_every=2.0), rng=Random(seed))
        seen: list[Any] = []

        def function(what: str) -> str:
            if what == "refused":
                raise ConnectionError
            return what

        guarded = guard(function)
        layers = [bound.layer("sync") for bound in guard.bounds]
        for after, what in history:
            clock.advance(after)
            try:
                if fast:
                    seen.append(guarded(what))
                else:
                    call = Call(guard, layers, function, (what,), {}, clock.now())
                    seen.append(run_sync(call))
            except (Overloaded, ConnectionError) as error:
                seen.append(type(error))
            seen.append(guard.snapshot()["policies"][0])
        return seen


HISTORIES = st.lists(
    st.tuples(quarters(10), st.sampled_from(["ok", "refused"])), min_size=1, max_size=30
)


@given(HISTORIES, SEEDS)
@examples(60)
def test_the_success_path_agrees_with_the_rule(history, seed):
    """Calls, counts and draws are the same with and without the generated text."""
    assert play(history, fast=True, seed=seed) == play(history, fast=False, seed=seed)


@pytest.mark.parametrize("lock_free", [True, False])
def test_threads_lose_no_count(monkeypatch, lock_free):
    """Eight threads on one throttle: every request is counted, also where counters need a lock."""
    monkeypatch.setattr(module, "LOCK_FREE", lock_free)
    throttle = Throttle()
    guard = new_guard(throttle)
    guarded = guard(lambda: None)
    start = threading.Barrier(8)

    def work() -> None:
        start.wait()
        for _ in range(2000):
            guarded()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert throttle._model.recent(guard.clock.now()).requests == 16000
