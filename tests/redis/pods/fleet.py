"""A vendor and some pods as processes, for tests: started, told, stopped, killed, listened to.

None outlives the fleet: all are killed at its end, whatever state they are in; and all end by
themselves when their standard input does, which is when the test's own process is gone.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, Self

from seawall.clock import SYSTEM
from tests.redis.pods.logs import Entry

ROOT: Final = Path(__file__).resolve().parents[3]
PATIENCE: Final = 15.0
"""Seconds for what must happen sooner or later, on a busy machine."""


class Process:
    """One of the programs in this folder, and what it has printed: JSON, line by line."""

    def __init__(self, program: str, argument: str) -> None:
        self.reports: list[dict[str, Any]] = []
        self._rest = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process is
        self._popen = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-W", "error", "-m", f"tests.redis.pods.{program}", argument],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.id = self._popen.pid
        assert self._popen.stdout is not None
        self.output = self._popen.stdout

    def read(self) -> bool:
        """Take in what it has printed; False at the end."""
        data = os.read(self.output.fileno(), 65536)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.reports += [json.loads(line) for line in lines]
        return bool(data)

    @property
    def errors(self) -> str:
        """What it had to complain of."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def send(self, sign: signal.Signals) -> None:
        """Send it a signal."""
        self._popen.send_signal(sign)

    def end(self, seconds: float = PATIENCE) -> int:
        """Let it end by itself, and return its status."""
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        while self.read():
            pass
        status = self._popen.wait(seconds)
        self.kill()
        return status

    def kill(self) -> None:
        """Kill it, if it runs, and leave nothing of it."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._errors):
            if pipe is not None:
                pipe.close()


class Pod(Process):
    """A pod, and what it was told to be."""

    def __init__(self, name: str, **settings: Any) -> None:
        super().__init__("pod", json.dumps({"pod": name, **settings}))
        self.name = name

    @property
    def ready(self) -> bool:
        """Whether it calls already."""
        return any("ready" in report for report in self.reports)

    def changes(self, account: str) -> list[dict[str, Any]]:
        """Return how the breaker of that account has changed, as this pod saw it."""
        return [r for r in self.reports if r.get("account") == account and "after" in r]

    def when(self, account: str, state: str, since: float) -> float | None:
        """Return when that breaker was in `state` for the first time since then; None: not yet."""
        instants = (r["at"] for r in self.changes(account) if r["after"] == state)
        return next((at for at in instants if at >= since), None)

    def state(self, account: str) -> str:
        """Return the state of that breaker."""
        changes = self.changes(account)
        return str(changes[-1]["after"]) if changes else "closed"


class Fleet:
    """One vendor, and pods that call it for `accounts`; every pod in turn is of another style."""

    def __init__(
        self,
        redis: str,
        accounts: Sequence[str],
        *,
        styles: Sequence[str] = ("sync", "async", "both"),
        pause: float,
        latency: float = 0.0,
    ) -> None:
        self.accounts = accounts
        self.pods: list[Pod] = []
        self.past: list[Pod] = []
        self.prefix = f"pods-{token_hex(4)}"
        self._styles = styles
        self._settings = {"redis": redis, "prefix": self.prefix, "pause": pause}
        self._started = 0
        self._selector = selectors.DefaultSelector()
        self.vendor = Process("vendor", str(latency))
        self._talk: socket.socket | None = None
        try:
            while not self.vendor.reports:
                assert self.vendor.read(), self.vendor.errors
            self._settings["vendor"] = port = self.vendor.reports[0]["port"]
            self._talk = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            self._answers = self._talk.makefile("rb")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs."""
        for process in (*self.pods, self.vendor):
            process.kill()
        self.past += self.pods
        self.pods = []
        self._selector.close()
        if self._talk is not None:
            self._answers.close()
            self._talk.close()

    # The vendor

    def tell(self, word: str, account: str) -> str:
        """Tell the vendor something, and return its answer."""
        assert self._talk is not None
        self._talk.sendall(f"{word} {account}\n".encode())
        return self._answers.readline().decode()

    def log(self, account: str) -> list[Entry]:
        """Return what has reached the vendor so far."""
        return [Entry(*entry) for entry in json.loads(self.tell("log", account))]

    # The pods

    def start(self, count: int = 1) -> None:
        """Start so many pods more."""
        for _ in range(count):
            style = self._styles[self._started % len(self._styles)]
            name = f"{style}-{self._started}"
            self._started += 1
            settings = {**self._settings, "accounts": list(self.accounts), "style": style}
            pod = Pod(name, **settings)
            self.pods.append(pod)
            self._selector.register(pod.output, selectors.EVENT_READ, pod)

    def remove(self, pod: Pod) -> None:
        """Listen to it no longer."""
        self._selector.unregister(pod.output)
        self.pods.remove(pod)
        self.past.append(pod)

    def kill(self, pod: Pod) -> None:
        """Kill a pod without warning."""
        self.remove(pod)
        pod.kill()

    def end(self) -> list[int]:
        """Let all pods end by themselves; return their statuses."""
        pods = list(self.pods)
        for pod in pods:
            self.remove(pod)
        return [pod.end() for pod in pods]

    def listen(self, seconds: float, until: Callable[[], object] = lambda: False) -> bool:
        """Take in what pods print for so long, or until it is true; return whether it is."""
        end = SYSTEM.now() + seconds
        while not until():
            left = end - SYSTEM.now()
            if left <= 0:
                return False
            for key, _ in self._selector.select(left):
                assert key.data.read(), f"{key.data.name} has ended: {key.data.errors}"
        return True

    def wait(self, what: str, until: Callable[[], object]) -> None:
        """Listen until it is true, and fail if that takes too long."""
        assert self.listen(PATIENCE, until), f"waited in vain: {what}"

    def wait_ready(self) -> None:
        """Wait until all pods call."""
        self.wait("all pods are ready", lambda: all(pod.ready for pod in self.pods))

    def reports(self, key: str) -> list[dict[str, Any]]:
        """Return what pods of now and then have reported with that key in it."""
        return [r for pod in (*self.past, *self.pods) for r in pod.reports if key in r]
