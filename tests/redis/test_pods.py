"""Which pods live: what each hears of the others, on a real server."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall.clock import SYSTEM
from seawall.errors import StoreUnavailable
from seawall.models.rate.split import BEAT, LIFE, SETTLED, SplitMembers
from seawall.redis import pods as pods_module
from seawall.redis.pods import LivePods
from seawall.redis.store import RedisStore
from tests.redis.support import FrozenClock, keys_without_expiry, mutate
from tests.support import examples, falsified


def beat(*pods: LivePods) -> None:
    """Let each of `pods` say that it lives, in an event loop of this test's own."""

    async def all_of_them() -> None:
        for one in pods:
            await one.beat()

    asyncio.run(all_of_them())


def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until something is so."""
    end = SYSTEM.now() + seconds
    while not condition():
        assert SYSTEM.now() < end, "it never came to be so"
        SYSTEM.sleep(0.005)


def test_pods_hear_of_each_other(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore, client: Any
) -> None:
    """Each beat tells how many live; before the first, nothing is known, and one is assumed."""
    other = new_store()
    frozen.rule(other)
    assert (store._core.pods.count, store._core.pods.known) == (1, False)
    beat(store._core.pods)
    assert (store._core.pods.count, store._core.pods.known) == (1, True)
    beat(other._core.pods, store._core.pods)
    assert (store._core.pods.count, other._core.pods.count) == (2, 2)
    assert "2" in repr(store._core.pods)
    assert not keys_without_expiry(client, store._core.prefix)


def test_a_pod_that_is_not_heard_of_is_gone_after_three_beats(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """The others go on counting it for as long as they remember the larger number."""
    other = new_store()
    frozen.rule(other)
    beat(store._core.pods, other._core.pods, store._core.pods)
    counts = []
    for _ in range(8):
        frozen.advance(BEAT)
        beat(store._core.pods)
        counts.append(store._core.pods.count)
    assert counts == [2, 2, 2, 2, 1, 1, 1, 1]


def test_a_pod_that_leaves_is_not_live_any_more(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """Leaving takes effect in the store at once; a newcomer does not count it, but knows of it."""
    first = new_store()
    frozen.rule(first)

    async def come_and_go() -> None:
        await first._core.pods.beat()
        await first._core.pods.leave()

    asyncio.run(come_and_go())
    beat(store._core.pods)
    assert store._core.pods.count == 1
    assert store._core.pods.members.quiet == 0.0
    assert not store._core.pods.settled


def test_a_newcomer_waits_until_others_have_heard_of_it(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """It is settled after two beats; the first of all is settled at once."""
    beat(store._core.pods)
    assert store._core.pods.settled
    assert store._core.pods.members.quiet is None
    late = new_store()
    frozen.rule(late)
    for step in range(SETTLED // BEAT + 1):
        beat(store._core.pods, late._core.pods)
        assert late._core.pods.settled == (step * BEAT >= SETTLED)
        frozen.advance(BEAT)


def test_a_store_that_forgets_makes_nobody_grow(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore, client: Any
) -> None:
    """After FLUSHALL the first to beat is alone in the store, and still counts all others."""
    others = [new_store() for _ in range(3)]
    for other in others:
        frozen.rule(other)
    pods = [store._core.pods, *(other._core.pods for other in others)]
    beat(*pods, *pods)
    for key in client.scan_iter(match=f"{store._core.prefix}:*"):
        client.delete(key)
    for _ in range(4):
        frozen.advance(BEAT)
        for one in pods:
            beat(one)
            assert one.count == 4


def test_who_was_silent_while_others_were_not_is_a_new_one(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """Others may have grown into its part; after an outage, when all were silent, nobody has."""
    other = new_store()
    frozen.rule(other)
    for _ in range(4):
        beat(store._core.pods, other._core.pods)
        frozen.advance(BEAT)
    assert other._core.pods.settled
    frozen.advance(10 * BEAT)  # nobody could beat
    beat(store._core.pods)
    assert (store._core.pods.settled, store._core.pods.count) == (True, 2)
    beat(other._core.pods)
    assert (other._core.pods.settled, other._core.pods.count) == (True, 2)
    for _ in range(5):
        frozen.advance(BEAT)
        beat(store._core.pods)
    assert store._core.pods.count == 1
    beat(other._core.pods)
    assert not other._core.pods.settled
    assert other._core.pods.count == 2
    beat(store._core.pods)
    assert store._core.pods.count == 2
    assert store._core.pods.settled


def after_the_clock_was_set_back(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> tuple[list[int], bool]:
    """Return what a pod counts, beat by beat, and whether one that had just come has settled.

    There was a third, which was killed when the server's clock was set back by an hour.
    """
    killed, late = new_store(), new_store()
    for other in (killed, late):
        frozen.rule(other)
    for _ in range(4):
        frozen.advance(BEAT)
        beat(store._core.pods, killed._core.pods)
    beat(late._core.pods)
    frozen.advance(-3600 * 1_000_000)
    counts = []
    for _ in range(9):
        frozen.advance(BEAT)
        beat(store._core.pods, late._core.pods)
        counts.append(store._core.pods.count)
    return counts, late._core.pods.settled


def test_a_clock_that_is_set_back_changes_little(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """The killed are gone a little later, the new settle, and nobody has to settle anew."""
    beat(store._core.pods)
    counts, settled = after_the_clock_was_set_back(new_store, frozen, store)
    assert counts[0] == 3
    assert counts[-1] == 2
    assert settled
    assert store._core.pods.settled


def test_who_was_silent_when_the_clock_was_set_back_is_a_new_one(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore
) -> None:
    """By that clock it cannot be told for how long: others may have grown into its part."""
    other = new_store()
    frozen.rule(other)
    for _ in range(4):
        beat(store._core.pods, other._core.pods)
        frozen.advance(BEAT)
    assert other._core.pods.settled
    other._core.pods._valid_until = 0.0
    frozen.advance(-3600 * 1_000_000)
    beat(store._core.pods, other._core.pods)
    assert store._core.pods.settled
    assert not other._core.pods.settled


def test_a_script_that_believes_the_future_counts_the_dead(
    new_store: Callable[..., RedisStore],
    frozen: FrozenClock,
    store: RedisStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: who was heard of later than now lives until then."""
    mutate(monkeypatch, "pods", "for _, other in ipairs(ahead) do", "for _, other in ipairs({}) do")
    counts, _settled = after_the_clock_was_set_back(new_store, frozen, store)
    assert counts[-1] == 3


def test_who_believes_the_past_never_settles(
    new_store: Callable[..., RedisStore],
    frozen: FrozenClock,
    store: RedisStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: times of before the clock was set back are no times any more."""
    monkeypatch.setattr(SplitMembers, "_set_back", lambda _self, _by: None)
    assert not after_the_clock_was_set_back(new_store, frozen, store)[1]


def test_watchers_of_two_threads_are_both_kept(store: RedisStore) -> None:
    """Who begins to listen while another does so waits for it."""
    pods, told = store._core.pods, []
    watchers = pods.watchers
    thread = threading.Thread(target=lambda: watchers.add(lambda: told.append(1)))
    with watchers._mutex:
        known = watchers._all
        thread.start()
        thread.join(0.05)  # it cannot go on yet
        watchers._all = (*known, lambda: told.append(2))
    thread.join()
    pods._changed(news=True)
    assert sorted(told) == [1, 2]


def test_watchers_hear_of_changes_and_one_that_fails_does_no_harm(
    new_store: Callable[..., RedisStore], frozen: FrozenClock, store: RedisStore, caplog: Any
) -> None:
    """Each change of the number is told, once; the same number again is not."""
    other = new_store()
    frozen.rule(other)
    told: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    store._core.pods.watchers.add(fail)
    stop = store._core.pods.watchers.add(lambda: told.append(store._core.pods.count))
    beat(store._core.pods, store._core.pods, other._core.pods, store._core.pods, store._core.pods)
    assert told == [1, 2]
    assert "watcher" in caplog.text
    stop()
    frozen.advance(3 * LIFE)
    beat(store._core.pods)
    assert told == [1, 2]


def test_the_background_beats_by_itself_and_closing_leaves(
    new_store: Callable[..., RedisStore],
) -> None:
    """Started once, it goes on; when the store is closed the pod is not live any more."""
    one, two = new_store(), new_store()
    one._core.pods.start()
    one._core.pods.start()
    two._core.pods.start()
    until(lambda: one._core.pods.count == two._core.pods.count == 2)
    one.close()
    third = new_store()
    beat(third._core.pods)
    assert third._core.pods.count == 2  # the second and the third


def test_the_last_known_number_survives_an_outage(server: Any) -> None:
    """While the store is away nobody is forgotten."""
    stores = [RedisStore(server.url, timeout=2.0) for _ in range(2)]
    try:
        beat(stores[0]._core.pods, stores[1]._core.pods, stores[0]._core.pods)
        server.kill()
        with pytest.raises(StoreUnavailable):
            beat(stores[0]._core.pods)
        assert stores[0]._core.pods.count == 2
    finally:
        for store in stores:
            store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("frozen")
def test_a_child_process_is_another_pod(store: RedisStore) -> None:
    """After a fork the child knows nothing yet, and then counts itself and its parent."""
    beat(store._core.pods)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        before = store._core.pods.known
        beat(store._core.pods)
        os.write(writing, f"{before} {store._core.pods.count}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "False 2"


@pytest.mark.parametrize(
    "reply", [None, b"x", [], [b"1", b"2"], [b"1", b"0", b"-1", b"0"], [1, 2, "x", 0]]
)
def test_an_answer_that_makes_no_sense_changes_nothing(reply: Any) -> None:
    """What comes from a store is not trusted."""
    with pytest.raises(StoreUnavailable):
        pods_module._read_pods(reply)


# The rule, over random histories: nobody counts fewer than live, once they have settled.

Step = tuple[int, str]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 4), st.sampled_from(["tick", "tick", "tick", "join", "kill", "flush"])
    ),
    max_size=40,
).map(lambda steps: [*((who, "join") for who in range(3)), *[(0, "tick")] * 12, *steps])


def never_too_few(steps: list[Step]) -> None:
    """Each settled pod counts all that are settled, whatever came, went or was forgotten."""
    now = 0.0
    seen: dict[int, float] = {}
    pods: dict[int, SplitMembers] = {}
    for number, (who, what) in enumerate(steps):
        if what == "join" and who not in pods:
            pods[who] = SplitMembers()
            others = [at for other, at in seen.items() if other != who]
            _tell(pods[who], who, seen, now, max(others) if others else None)
        elif what == "kill":
            pods.pop(who, None)
        elif what == "flush" and number:
            seen.clear()
        now += BEAT / 5
        for one, members in pods.items():
            if number % 5 == one:  # each in its turn, once in a beat
                _tell(members, one, seen, now, None)
        settled = [members for members in pods.values() if members.settled]
        assert all(members.count >= len(settled) for members in settled)


def _tell(
    members: SplitMembers, who: int, seen: dict[int, float], now: float, last: float | None
) -> None:
    seen[who] = now
    live = sum(at > now - LIFE for at in seen.values())
    members.record(now, live, None if last is None else now - last)


@examples(300)
@given(STEPS)
def test_nobody_counts_fewer_than_are_settled(steps: list[Step]) -> None:
    """Joining, dying and a store that forgets: the number is never too small."""
    never_too_few(_forgetting_rarely(steps))


def _forgetting_rarely(steps: list[Step]) -> list[Step]:
    """Let the store forget once in two lives at most, and nobody join within a beat of it.

    Who joins then finds nobody, and the rest is not known for a moment: that is not promised.
    """
    kept: list[Step] = []
    since = 100
    for who, what in steps:
        since += 1
        early = (what == "flush" and since <= 30) or (what == "join" and since <= 5)
        kept.append((who, "tick" if early else what))
        since = 0 if kept[-1][1] == "flush" else since
    return kept


def test_without_settling_the_number_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a newcomer that counts at once meets others who do not know of it."""
    monkeypatch.setattr("seawall.models.rate.split.SETTLED", 0)
    assert falsified(never_too_few, STEPS.map(_forgetting_rarely))


def test_without_a_memory_of_larger_numbers_a_flush_makes_them_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: who believes the latest number alone grows when the store forgets."""

    def believe(self: SplitMembers, now: float, live: int, quiet: float | None) -> None:
        self._reports.clear()
        hear(self, now, live, quiet)

    hear = SplitMembers.record
    monkeypatch.setattr(SplitMembers, "record", believe)
    assert falsified(never_too_few, STEPS.map(_forgetting_rarely))


def test_without_expiry_the_dead_count_for_ever(
    new_store: Callable[..., RedisStore],
    frozen: FrozenClock,
    store: RedisStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ablation: a script that forgets to look at when a pod was last heard of."""
    mutate(monkeypatch, "pods", "'(' .. text(now - life)", "'-inf'")
    other = new_store()
    frozen.rule(other)
    beat(store._core.pods, other._core.pods)
    for _ in range(8):
        frozen.advance(BEAT)
        beat(store._core.pods)
    assert store._core.pods.count == 2
