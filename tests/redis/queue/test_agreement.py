"""One history, three queues: the rules, the queue in memory, and the one in the store."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from seawall import subscribe
from seawall.clock import VirtualClock
from seawall.events import DeadLetterDropped, JobDied
from seawall.jobs import LocalQueue
from seawall.jobs import queue as _steps
from seawall.jobs.records import QueueCall, QueueSteps
from seawall.jobs.wakeups import READY
from seawall.models.queue.jobs import SWEEP, NewJob, QueueRules
from seawall.models.queue.state import Queue
from seawall.redis.queue import PARTS, PriorityQueue
from seawall.redis.store import RedisStore
from tests.redis.support import FrozenClock, keys_without_expiry, mutate

SECOND = 1_000_000
SMALL: dict[str, Any] = {
    "head_start": 10.0,
    "max_attempts": 2,
    "max_size": 6,
    "max_dead": 1,
    "keep": 60.0,
    "result_ttl": 20.0,
    "dedupe_window": 0.5,
}
"""Settings under which everything happens soon."""

LINES = ("ready", "since", "delayed", "leases", "deadlines", "memory", "dead")

QUICK = settings(
    max_examples=500,
    stateful_step_count=20,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
_names = count()


def one(operation: str, *args: Any) -> QueueSteps[Any]:
    """Ask the rules for a single operation, and return the answer as it is."""
    return (yield QueueCall(operation, args))


class Three:
    """Three queues that are told the same."""

    def __init__(self, store: RedisStore, frozen: FrozenClock, **changes: Any) -> None:
        chosen = SMALL | changes
        self.frozen = frozen
        self.clock = VirtualClock(frozen.now_us / SECOND)
        self.local = LocalQueue("local", **chosen, clock=self.clock)
        self.shared = PriorityQueue(store, f"queue-{next(_names)}", **chosen)
        self.model = Queue(QueueRules(*self.local.rules))
        self.news = News(self)

    def pass_time(self, us: int) -> None:
        self.frozen.advance(us)
        self.clock.advance_to(self.frozen.now_us / SECOND)

    def ask(self, operation: str, *args: Any) -> Any:
        """Ask all three; their answers must be equal."""
        wanted = self.model.perform(self.frozen.now_us, operation, *args)
        self.news.of_the_model()
        assert self.local._sync(one(operation, *args)) == wanted
        assert self.shared._sync(one(operation, *args)) == wanted
        return wanted

    def end(self) -> None:
        """All have told and kept the same; and when all is over, nothing is left but numbers."""
        self.news.compare()
        jobs = self.model._jobs.values()
        assert self.kept() == {
            "jobs": set(self.model._jobs),
            "payloads": {job.id for job in jobs if job.payload},
            "results": {job.id for job in jobs if job.result is not None},
            "tokens": set(self.model._tokens._claims),
            "dedupe": set(self.model._by_dedupe),
            "unheard": self.model._tokens._ends._numbers,
            **{part: getattr(self.model, f"_{part}")._numbers for part in LINES},
        }
        for _ in range(3):
            self.pass_time(3 * 60 * SECOND)
            self.ask("counts")
        assert not any(self.kept().values())
        assert not self.model._jobs
        assert not self.model._by_dedupe
        assert not self.model._tokens

    def kept(self) -> dict[str, Any]:
        """Return what is in the store."""
        hashes = ("jobs", "payloads", "results", "tokens", "dedupe")
        keys = dict(zip(PARTS, self.shared._calls._keys, strict=True))
        with self.frozen._client.pipeline(transaction=False) as pipe:
            for part in hashes:
                pipe.hkeys(keys[part])
            for part in (*LINES, "unheard"):
                pipe.zrange(keys[part], 0, -1, withscores=True)
            found = pipe.execute()
        names = [{field.decode() for field in fields} for fields in found[: len(hashes)]]
        lines = [{id_.decode(): int(at) for id_, at in line} for line in found[len(hashes) :]]
        return dict(zip((*hashes, *LINES, "unheard"), [*names, *lines], strict=True))


class News:
    """What the three have told those who wait, and who listens to events."""

    def __init__(self, three: Three) -> None:
        self._model, self._calls = three.model, three.shared._calls
        self._names = {three.local.name: "local", three.shared.name: "shared"}
        self._told: dict[str, dict[str, list[Any]]] = {
            which: {"stirred": [], "ended": [], "events": []}
            for which in ("model", "local", "shared")
        }
        self._client = three.frozen._client
        self._pushed = self._client.pubsub()
        self._pushed.subscribe(self._calls.stirred, self._calls.ended)
        three.local._wakeups.ring = self._local  # type: ignore[method-assign]
        self._stop = subscribe(self._event, JobDied, DeadLetterDropped)

    def of_the_model(self) -> None:
        model, told = self._model, self._told["model"]
        told["stirred"] += [READY] * model.stirred
        told["ended"] += model.ended
        died = [("job_died", *row, "") for row in model.died]  # a text has no traceback
        told["events"] += died + [("dead_letter_dropped", id_) for id_ in model.dropped]
        model.stirred, model.ended, model.died, model.dropped = False, [], [], []

    def _local(self, topic: str) -> None:
        self._told["local"]["stirred" if topic == READY else "ended"].append(topic)

    def _event(self, event: Any) -> None:
        which = self._names.get(event.guard)
        if which is not None:
            _guard, *values = event.fields().values()
            self._told[which]["events"].append((event.name, *values))

    def compare(self) -> None:
        """Read what was pushed, up to a mark; then all must be the same."""
        self._stop()
        shared = self._told["shared"]
        self._client.publish(self._calls.ended, "the end")
        for message in self._pushed.listen():
            if message["type"] == "message":
                if message["data"] == b"the end":
                    break
                which = "stirred" if message["channel"].decode() == self._calls.stirred else "ended"
                shared[which].append(READY if which == "stirred" else message["data"].decode())
        self._pushed.close()
        assert self._told["model"] == self._told["local"] == shared


class Agreement(RuleBasedStateMachine):
    """Drives all three."""

    store: RedisStore
    frozen: FrozenClock

    @initialize()
    def begin(self) -> None:
        self.three = Three(self.store, self.frozen)
        self.ids = ["0000000000000099-no-such-job"]
        self.claims: list[tuple[str, int]] = []
        self.tokens = ["never asked"]

    def pick(self, index: int) -> str:
        return self.ids[-1 - index % len(self.ids)]

    @rule(
        jobs=st.lists(
            st.builds(
                NewJob,
                nonce=st.just("n"),
                payload=st.sampled_from([b"1", b'{"a":"\xc3\xa4"}', b"null", b'"BA"']),
                priority=st.sampled_from([0, 1, 2, 9]),
                delay=st.sampled_from([0, 0, 1, 3 * SECOND]),
                ttl=st.sampled_from([0, 0, 4 * SECOND, 30 * SECOND]),
                dedupe=st.sampled_from(["", "a", "a", "b {odd}"]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def push(self, jobs: list[NewJob]) -> None:
        self.ids += self.three.ask("push", jobs) or []

    @rule(
        most=st.integers(1, 3),
        lease=st.sampled_from([1, 2 * SECOND, 10 * SECOND]),
        how=st.sampled_from(["heard", "heard", "heard", "lost", "again"]),
    )
    def claim(self, most: int, lease: int, how: str) -> None:
        if how != "again":
            self.tokens.append(f"token-{len(self.tokens)}")
        granted, _ahead = self.three.ask("claim", most, lease, self.tokens[-1])
        self.claims += [(one.id, one.fence) for one in granted]
        if how == "heard" and granted:
            self.three.ask("heard", self.tokens[-1])

    @rule(index=st.integers(0, 2), verb=st.sampled_from(["heard", "release"]))
    def hear(self, index: int, verb: str) -> None:
        rest = (5 * SECOND,) if verb == "release" else ()
        self.three.ask(verb, self.tokens[-1 - index % len(self.tokens)], *rest)

    @rule(
        how=st.sampled_from(["ack", "failed", "failed", "returned", "fatal", "fatal"]),
        dedupe=st.sampled_from(["", "a", "a"]),
    )
    def live(self, how: str, dedupe: str) -> None:
        """Let a job come, and whichever is next go."""
        self.push([NewJob("n", b"[]", 0, 0, 0, dedupe)])
        self.claim(1, 10 * SECOND, "heard")
        if how == "ack":
            self.answer(0, 0, "ack", "failed", 0)
        else:
            self.answer(0, 0, "nack", how, 0)

    @precondition(lambda self: self.claims)
    @rule(
        index=st.integers(0, 3),
        older=st.sampled_from([0, 0, 0, 1]),
        verb=st.sampled_from(["ack", "nack", "nack", "extend"]),
        how=st.sampled_from(["failed", "failed", "returned", "fatal", "fatal"]),
        delay=st.sampled_from([0, 0, SECOND]),
    )
    def answer(self, index: int, older: int, verb: str, how: str, delay: int) -> None:
        if not self.claims:  # `live` has found nothing to claim
            return
        id_, fence = self.claims[-1 - index % len(self.claims)]
        rest = {
            "ack": (b'"done"',),
            "nack": (delay, "it broke", how),
            "extend": (3 * SECOND,),
        }[verb]
        self.three.ask(verb, id_, fence - older, *rest)

    @rule(index=st.integers(0, 5), verb=st.sampled_from(["cancel", "status", "drop"]))
    def by_id(self, index: int, verb: str) -> None:
        self.three.ask(verb, self.pick(index))

    @rule(
        state=st.sampled_from(["dead", "waiting", "delayed", "claimed"]),
        search=st.sampled_from([b"", b"a", b"a", b"broke", b"0003"]),
        most=st.integers(1, 2),
        cut=st.sampled_from([0, 3, 100]),
    )
    def browse(self, state: str, search: bytes, most: int, cut: int) -> None:
        """Go through a whole list, and open what is in it."""
        place: tuple[int, str] | None = (0, "")
        while place is not None:
            found, place = self.three.ask("browse", state, *place, search, most, cut)
            for one in found:
                self.three.ask("inspect", one.id, cut)

    @precondition(lambda self: len(self.three.model._dead))
    @rule(verb=st.sampled_from(["requeue", "requeue", "drop"]))
    def to_the_dead(self, verb: str) -> None:
        number_and_id = self.three.model._dead.first()
        assert number_and_id is not None
        self.three.ask(verb, number_and_id[1])

    @rule(us=st.sampled_from([1, SECOND - 1, 2 * SECOND, 7 * SECOND, 25 * SECOND]))
    def pass_time(self, us: int) -> None:
        self.three.pass_time(us)

    def teardown(self) -> None:
        if hasattr(self, "three"):
            self.three.ask("dead", 3)
            self.three.ask("counts")
            self.three.end()


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few ended jobs be remembered, so that they are forgotten for want of room too."""
    monkeypatch.setattr(_steps, "most_ended", lambda _max_size: 1)


def machine(store: RedisStore, frozen: FrozenClock) -> type[RuleBasedStateMachine]:
    """Return the machine for these."""
    return type("OnThisServer", (Agreement,), {"store": store, "frozen": frozen})


@pytest.mark.timeout(600)
def test_rules_memory_and_store_agree(store: RedisStore, frozen: FrozenClock, client: Any) -> None:
    """Whatever the history, all three give the same verdicts; and no key stays for ever."""
    run_state_machine_as_test(machine(store, frozen), settings=QUICK)
    assert keys_without_expiry(client, store._core.prefix) == []


MISTAKES = {
    "no head start": ("of_line() + delay - priority * rules.head_start, fence", "ready, fence"),
    "no fence": ("and job.fence == tonumber(fence) then", "then"),
    "zombie": ("if job.state == 'claimed' and job.at <= now then", "if false then"),
    "one attempt more": ("counted and job.attempts >= rules", "counted and job.attempts > rules"),
    "place lost": ("place(job, now + delay)", "job.score = now; place(job, now + delay)"),
    "no window": ("(alive or job.at + rules.dedupe > now)", "alive"),
    "no stir by a delayed one": ("stirred = stirred or not head or ready < head", ""),
    "no stir": ("stirred = stirred or redis.call('ZCARD', READY) == 0", ""),
    "no end is told": ("redis.call('PUBLISH', ENDED, job.id)", ""),
    "no death is told": ("died[#died + 1] = value", ""),
    "payload kept": (
        "count(state, 1)\n    redis.call('HDEL', PAYLOADS, job.id)",
        "count(state, 1)",
    ),
    "result kept": ("  redis.call('HDEL', RESULTS, job.id)\n", ""),
    "token kept": ("    redis.call('HDEL', TOKENS, token)\n", ""),
    "too many dead": ("make_room(DEAD, rules.max_dead)", "{}"),
    "too many ended": ("make_room(MEMORY, rules.max_ended)", ""),
    "pages overlap": ("other >= id) or (not back and other <= id)", "false)"),
    "capitals count": ("string.find(string.lower(value),", "string.find(value,"),
    "payloads are searched": ("cut ~= '0' and redis.call('HGET'", "redis.call('HGET'"),
    "too many on a page": ("found == tonumber(most)", "found > tonumber(most)"),
    "granted after its release": ("remember(token, {}, lease)", ""),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_script_is_noticed(
    store: RedisStore, frozen: FrozenClock, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """With a rule broken in the script, some history makes the verdicts differ."""
    mutate(monkeypatch, "queue", *MISTAKES[mistake])
    if mistake == "zombie":
        mutate_too(monkeypatch)
    quick = settings(QUICK, max_examples=500, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine(store, frozen), settings=quick)


def mutate_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the sweep of leases away as well: either of the two is enough to catch a zombie."""
    from seawall.redis import store as store_module

    text = store_module.lua("queue").replace("sweep(LEASES, lose)", "")
    clock = store_module.lua("clock")
    monkeypatch.setattr(store_module, "lua", lambda name: {"queue": text}.get(name, clock))


def test_they_agree_when_more_is_due_than_is_swept_at_once(
    store: RedisStore, frozen: FrozenClock
) -> None:
    """What is asked for by id is right though the sweep has not come to it; later all is swept."""
    three = Three(store, frozen, max_size=1000, max_dead=1000, keep=600.0)
    many = SWEEP + 30
    for kind in range(3):  # claimed, delayed, and with a deadline
        ttl, delay = (3 * SECOND if kind == 2 else 0), (2 * SECOND if kind == 1 else 0)
        jobs = [NewJob(f"{n}", b"1", 0, delay, ttl, "") for n in range(many)]
        ids = three.ask("push", jobs)
        if kind == 0:
            three.ask("claim", many, 2 * SECOND, "first")
    three.pass_time(4 * SECOND)
    for id_ in ids[-3:]:
        three.ask("status", id_)
    granted, _ahead = three.ask("claim", 3, SECOND, "second")
    assert len(granted) == 3
    for _ in range(4):
        counts = three.ask("counts")
    assert (sum(counts.waiting), counts.delayed, counts.claimed) == (2 * many - 3, 0, 3)
    three.pass_time(30 * SECOND)
    for _ in range(8):
        three.ask("counts")
    assert three.ask("status", ids[0]) is None
    three.news.compare()
