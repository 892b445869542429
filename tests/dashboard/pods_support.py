"""Valid views and scripted watchers, for tests of pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from seawall import RedisStore
from seawall.dashboard.pods.store_pods import StorePods
from seawall.dashboard.views import FORMAT, View
from seawall.runtime.background import run_in
from tests.redis.support import eventually

RATES = {
    "succeeded": 5.0,
    "degraded": 0.0,
    "failed": 1.0,
    "rejected": 0.0,
    "cancelled": 0.0,
    "retries": 0.5,
}
LAYER = {
    "policy": "breaker",
    "title": "Breaker",
    "settings": "opens at 50 % of 20 calls",
    "tone": "ok",
    "state": "closed",
    "facts": [["calls", "20"]],
    "sharing": "shared",
    "acts": ["isolate"],
    "changes": [{"name": "failure_ratio", "value": 0.5, "kind": "number"}],
}


def guard(name: str = "vendor", **more: Any) -> dict[str, Any]:
    """Return a guard as it is shown."""
    return {
        "name": name,
        "tone": "ok",
        "state": "well",
        "edge": False,
        "breaker": "closed",
        "rates": RATES,
        "error_ratio": 0.1,
        "p50": 0.01,
        "p95": 0.05,
        "p99": None,
        "stack": [LAYER],
        **more,
    }


def view(name: str = "pod", pid: int = 1, **more: Any) -> View:
    """Return what a pod of that name may show."""
    made: Any = {
        "format": FORMAT,
        "pod": {"name": name, "host": "here", "pid": pid, "version": "1", "up_seconds": 3.0},
        "at": 1000.0,
        "every": 1.0,
        "load": 0.25,
        "operable": True,
        "troubles": [],
        "guards": [guard()],
        "sections": {"Limits": []},
        "happenings": [
            {
                "at": 1.0,
                "began": 1.0,
                "tone": "bad",
                "where": "vendor",
                "what": "It opened.",
                "about": "It",
                "counts": {"opened": 1},
            }
        ],
        **more,
    }
    return made


class Shows:
    """A watcher that sees the same each time, and counts how often it was asked to look."""

    def __init__(self, name: str = "pod", **more: Any) -> None:
        self.view = view(name, **more)
        self.samples = 0

    def sample(self) -> View:
        self.samples += 1
        return self.view


ROOT = Path(__file__).resolve().parents[2]

NEVER = 3600.0
"""Seconds between two views where a test tells each of them itself."""

NewPod = Callable[..., StorePods]


@pytest.fixture
def new_pod(new_store: Callable[..., RedisStore]) -> Iterator[NewPod]:
    """Return a function that makes pods, each with its own store, that publish on demand."""
    stores: list[RedisStore] = []

    def make(name: str = "pod", *, every: float = NEVER, clock: Any = None, **more: Any) -> Any:
        store = new_store()
        stores.append(store)
        if clock is not None:
            clock.rule(store)
        made = StorePods(store, Shows(name, **more), every=every)
        eventually(lambda: made._published and made._request is not None and made._request.done())
        return made

    yield make
    for one in stores:
        one.close()


def tell(pod: StorePods) -> None:
    """Let it tell its view now."""
    run_in(pod._store._background, pod._publish, 5.0)


def read(pod: StorePods) -> list[View]:
    """Return what it sees of the others."""
    return asyncio.run(pod.views())


def names(pod: StorePods) -> list[str]:
    """Return the names of the others, as it sees them; of one that is gone in brackets."""
    return [f"({one['pod']['name']})" if "gone" in one else one["pod"]["name"] for one in read(pod)]


def put(client: redis.Redis, pod: StorePods, name: str, data: bytes, ago: float = 0.0) -> None:
    """Write into the store what another pod might have published, or might not."""
    index, told, _mark = pod._keys
    client.zadd(index, {name: int((client.time()[0] - ago) * 1e6)})
    client.hset(told, name, data)


class Process:
    """A pod in a process of its own."""

    def __init__(self, name: str, url: str, prefix: str) -> None:
        told = json.dumps({"name": name, "url": url, "prefix": prefix})
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, sys.path)])
        self._popen = subprocess.Popen(  # noqa: S603 - our own program
            [sys.executable, "-W", "error", "-m", "tests.dashboard.pod_process", told],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
        )
        assert self._popen.stdin is not None
        self.input = self._popen.stdin

    def kill(self) -> None:
        self._popen.send_signal(signal.SIGKILL)
        self.end()

    def end(self) -> int:
        self.input.close()
        try:
            return self._popen.wait(10)
        finally:
            self._popen.kill()
