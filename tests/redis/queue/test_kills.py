"""Workers that are killed and paused at random points, and what becomes of their jobs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from seawall.clock import SYSTEM
from seawall.redis.queue import PriorityQueue
from seawall.redis.store import RedisStore

ROOT = Path(__file__).resolve().parents[3]
LEASE = 1.0
WORKERS = 3
HURTS = 16
"""How often somebody is killed or paused; each fourth is paused."""


class Note(NamedTuple):
    """A line of a worker's file."""

    what: str
    id: str
    fence: int
    age: int
    time: float


class Fleet:
    """Worker processes, each replaced when it is killed."""

    def __init__(self, url: str, queue: PriorityQueue, most: float, folder: Path, rng: Random):
        self._arguments = [url, queue.store._core.prefix, queue.name, str(LEASE), str(most)]
        self._folder = folder
        self._rng = rng
        self._begun = 0
        self._paused: list[tuple[float, subprocess.Popen[bytes]]] = []
        self.kills = self.pauses = 0
        self.processes = [self._start() for _ in range(WORKERS)]

    def _start(self) -> subprocess.Popen[bytes]:
        self._begun += 1
        script = Path(__file__).with_name("queue_worker.py")
        seed, file = str(self._rng.randrange(2**32)), str(self._folder / f"{self._begun}.log")
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
        command = [sys.executable, "-W", "error", str(script), *self._arguments, seed, file]
        return subprocess.Popen(command, env=environment)  # noqa: S603 - our own script

    def hurt(self) -> None:
        """Kill one that works, or pause it for longer than its lease."""
        paused = [process for _until, process in self._paused]
        awake = [index for index in range(WORKERS) if self.processes[index] not in paused]
        index = self._rng.choice(awake)
        victim = self.processes[index]
        if (self.kills + self.pauses) % 4 != 2 or paused:
            victim.kill()
            victim.wait()
            self.kills += 1
            self.processes[index] = self._start()
        else:
            victim.send_signal(signal.SIGSTOP)
            self._paused.append((SYSTEM.now() + LEASE + 0.3, victim))
            self.pauses += 1

    def wake(self, now: float) -> None:
        """Let those go on that were paused for long enough."""
        for entry in [entry for entry in self._paused if entry[0] <= now]:
            entry[1].send_signal(signal.SIGCONT)
            self._paused.remove(entry)

    def stop(self) -> list[int]:
        """Ask all to stop, and return how they ended."""
        self.wake(float("inf"))
        for process in self.processes:
            process.terminate()
        return [process.wait(20.0) for process in self.processes]

    def close(self) -> None:
        """Leave none behind, whatever happened."""
        for process in self.processes:
            process.kill()
            process.wait()

    def notes(self) -> list[Note]:
        """Return what all have noted; a line that a kill cut short is left out."""
        lines = [
            line.split()
            for file in self._folder.glob("*.log")
            for line in file.read_text().splitlines()
        ]
        return [
            Note(what, id_, int(fence), int(age), float(time))
            for what, id_, fence, age, time in (line for line in lines if len(line) == 5)
        ]


def kill_at_random(
    url: str, store: RedisStore, client: Any, folder: Path, *, jobs: int, most: float, seed: int
) -> None:
    """Let workers do `jobs` under fire, and check all that the queue promises."""
    queue = PriorityQueue(store, "killed", max_attempts=100, max_size=jobs)
    rng = Random(seed)
    ids: list[str] = []
    for begin in range(0, jobs, 250):
        ids += queue.push_many(range(begin, begin + 250), priority=rng.randrange(10))
    scores = _numbers(client, store._core.key("queue", "killed", "ready"))
    pushed = _numbers(client, store._core.key("queue", "killed", "since"))
    fleet = Fleet(url, queue, most, folder, rng)
    try:
        until = SYSTEM.now() + 100.0
        hurt_at = jobs / HURTS
        while (counts := queue.snapshot())["done"] < jobs:
            assert SYSTEM.now() < until, counts
            SYSTEM.sleep(rng.uniform(0.0, 0.05))
            fleet.wake(SYSTEM.now())
            if counts["done"] >= hurt_at:  # by progress: however slow the machine, some is made
                hurt_at += jobs / HURTS
                fleet.hurt()
        assert set(fleet.stop()) <= {0, -signal.SIGTERM}  # it may come before it is expected
    finally:
        fleet.close()
    notes = fleet.notes()
    begun = [note for note in notes if note.what == "begun"]
    assert fleet.kills >= 10
    assert fleet.pauses >= 1
    _check_ends(queue, ids, notes)
    _check_returns(begun)
    _check_order(begun, scores, pushed)


def _numbers(client: Any, key: str) -> dict[str, int]:
    return {id_.decode(): int(number) for id_, number in client.zrange(key, 0, -1, withscores=True)}


def _check_ends(queue: PriorityQueue, ids: list[str], notes: list[Note]) -> None:
    """None was lost; one ack of each was accepted, and that of its last claim."""
    counts = queue.snapshot()
    assert {k: counts[k] for k in ("done", "waiting", "claimed", "delayed", "dead")} == {
        "done": len(ids),
        "waiting": 0,
        "claimed": 0,
        "delayed": 0,
        "dead": 0,
    }
    fences: dict[str, list[int]] = defaultdict(list)
    for note in notes:
        if note.what == "begun":
            fences[note.id].append(note.fence)
    assert set(fences) == set(ids)
    done = {id_: queue.status(id_).result for id_ in ids if len(fences[id_]) > 1}
    for id_, accepted in done.items():
        assert accepted == max(fences[id_])
    acked = [(note.id, note.fence) for note in notes if note.what == "acked"]
    assert len({id_ for id_, _fence in acked}) == len(acked)
    assert all(done.get(id_, fence) == fence for id_, fence in acked)
    assert all(done[note.id] != note.fence for note in notes if note.what == "fenced")


def _check_returns(begun: list[Note]) -> None:
    """Each claim that came to nothing was made again within its lease and a second."""
    claims: dict[str, list[Note]] = defaultdict(list)
    for note in sorted(begun, key=lambda note: note.fence):
        claims[note.id].append(note)
    again = [pair for notes in claims.values() for pair in pairwise(notes)]
    assert again
    for first, second in again:
        # By the server's clock; one that was killed before it could note its claim counts too.
        assert second.age - first.age <= (second.fence - first.fence) * (LEASE + 1.0) * 1e6


def _check_order(begun: list[Note], scores: dict[str, int], pushed: dict[str, int]) -> None:
    """No job was claimed while one with a better place still waited for its first claim."""
    ahead = worst = float("-inf")
    latest = 0
    for note in sorted(begun, key=lambda note: pushed[note.id] + note.age):
        instant = pushed[note.id] + note.age
        if instant != latest:
            latest, ahead = instant, worst
        if note.fence == 1:
            assert scores[note.id] >= ahead
        worst = max(worst, scores[note.id])


@pytest.mark.timeout(120)
def test_no_job_is_lost_when_workers_are_killed(
    redis_url: str, store: RedisStore, client: Any, tmp_path: Path, seed: int
) -> None:
    """20 000 jobs, workers killed and paused all the time: each is done, once, in its order."""
    kill_at_random(redis_url, store, client, tmp_path, jobs=20_000, most=0.02, seed=seed)
