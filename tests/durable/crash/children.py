"""A test's side of the nursery: it starts children, sees their steps, and kills them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from tests.durable.crash.nursery import PLACES, RECORD

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 60.0
DEADLY = ("committed", "committing", "inside", "asking")


class Nursery:
    """Children that can be killed, and the steps that they take."""

    def __init__(self) -> None:
        self._steps, self._own = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.durable.crash.nursery"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[self._own], cwd=ROOT,
            text=True, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )  # fmt: skip
        self.children: dict[int, dict[str, Any]] = {}
        self._died: list[int] = []
        self.seen: Counter[str] = Counter()
        """Steps by their place."""
        self.struck: Counter[str] = Counter()
        """Where those were that died at a step of their own."""
        self.killed = 0
        """How many were killed by SIGKILL while they lived, by themselves or from outside."""

    def start(self, told: dict[str, Any]) -> int:
        """Start a child; return its process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**told, "steps": self._own}) + "\n")
        self._process.stdin.flush()
        pid = int(self._process.stdout.readline())
        self.children[pid] = told
        return pid

    def wait_for_steps(self, number: int) -> int | None:
        """Wait until so many steps have been taken; or return who died of its own before that."""
        while number > 0 and not self._died:
            ready, _, _ = select.select([self._steps], [], [], PATIENCE)
            assert ready, "nobody does anything any more"
            # All that there are, if more: a pipe that is full would hold everybody up.
            for pid, place, dies in RECORD.iter_unpack(os.read(self._steps, RECORD.size * 1000)):
                number -= 1
                self.seen[PLACES[place]] += 1
                if dies and pid in self.children:
                    self.struck[PLACES[place]] += 1
                    self.killed += 1
                    self._died.append(pid)
        return self._died.pop(0) if self._died else None

    def kill(self, pid: int) -> None:
        """Kill a child where it stands."""
        self.children.pop(pid)
        try:
            os.kill(pid, signal.SIGKILL)
            self.killed += 1
        except ProcessLookupError:
            pass  # it had done all there was to do

    def kill_now_and_then(self, told: list[dict[str, Any]], kills: int, rng: Random) -> None:
        """Have these at work and one of them killed again and again, `kills` times.

        First the first one dies at each of the places, by itself. Then one of all is killed from
        outside after a random number of steps, wherever it is then; or it dies at a step of its
        own meanwhile, as every other one has to.
        """
        for place in DEADLY:
            self.start_dying(told[0], place, rng.randint(1, 3))
        for each in told:
            self.start(each)
        for number in range(kills - len(DEADLY)):
            pid = self.wait_for_steps(rng.randint(1, 40))
            if pid is None:
                lasting = [one for one, how in self.children.items() if "dies" not in how]
                pid = rng.choice(sorted(lasting or self.children))
                again = self.children[pid]
                self.kill(pid)
            else:
                again = self.children.pop(pid)
            again = {key: value for key, value in again.items() if key != "dies"}
            if number % 2 == 0:
                again["dies"] = (DEADLY[number // 2 % len(DEADLY)], rng.randint(1, 5))
            if "seed" in again:
                again["seed"] = number
            self.start(again)

    def start_dying(self, told: dict[str, Any], place: str, number: int) -> None:
        """Start a child that dies at that step of that place, and wait until it is dead."""
        pid = self.start({**told, "dies": (place, number)})
        while self.wait_for_steps(1) != pid:
            pass
        self.children.pop(pid)

    def kill_all(self) -> None:
        """Kill all that are there."""
        for pid in list(self.children):
            self.kill(pid)

    def close(self) -> None:
        """Kill all of them, and end."""
        self.kill_all()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        os.close(self._steps)
        os.close(self._own)
