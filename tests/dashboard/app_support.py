"""Support for tests of the dashboard's app: a scripted watcher and a browser."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from seawall import guards
from seawall.dashboard import Dashboard
from seawall.dashboard.views import FORMAT
from seawall.runtime.policy import Policy
from tests.web.support import Answer, answer_of, ask, http_scope

HOME = ("host", "localhost:8000")
ORIGIN = ("origin", "http://localhost:8000")
JSON = ("content-type", "application/json")

ACTS = {"breaker": ["isolate", "close"]}
CHANGES = {
    "bulkhead": lambda policy: [{"name": "limit", "value": policy.limit, "kind": "number"}],
    "timeout": lambda _: [{"name": "seconds", "value": 2.0, "kind": "number"}],
}


def layer(policy: Policy) -> dict[str, Any]:
    """Return a policy as it is shown."""
    changes = CHANGES.get(policy.kind)
    return {
        "policy": policy.kind,
        "title": type(policy).__name__,
        "settings": "",
        "tone": "ok",
        "state": "",
        "facts": [],
        "sharing": "",
        "acts": ACTS.get(policy.kind, []),
        "changes": [] if changes is None else changes(policy),
    }


def view_of(name: str, at: float = 1000.0, **more: Any) -> dict[str, Any]:
    """Return the view of a pod that has the guards of this process."""
    shown = [
        {"name": guard.name, "tone": "ok", "stack": [layer(policy) for policy in guard.policies]}
        for guard in guards()
    ]
    return {
        "format": FORMAT,
        "pod": {"name": name, "host": "h", "pid": 1, "version": "0", "up_seconds": 1.0},
        "at": at,
        "every": 1.0,
        "load": 0.0,
        "operable": False,
        "troubles": [],
        "guards": shown,
        "sections": {},
        "happenings": [],
        **more,
    }


class FakeWatcher:
    """Shows the guards there are; counts its samples."""

    def __init__(self, pod: str = "here") -> None:
        self.pod = pod
        self.samples = 0
        self.closed = 0
        self.view: dict[str, Any] | None = None
        self.fails: Exception | None = None

    def sample(self) -> dict[str, Any]:
        self.samples += 1
        if self.fails is not None:
            raise self.fails
        self.view = view_of(self.pod, 1000.0 + self.samples)
        return self.view

    @property
    def history(self) -> dict[str, Any]:
        return {"at": [1000.0 + self.samples], "guards": {}, "rows": {}}

    def close(self) -> None:
        self.closed += 1


class Shown(Dashboard):
    """A dashboard with such a watcher."""

    def __init__(self, **options: Any) -> None:
        self.watchers: list[FakeWatcher] = []
        super().__init__(**({"local": True} | options))

    def _new_watcher(self) -> Any:
        self.watchers.append(FakeWatcher())
        return self.watchers[-1]


async def get(app: Any, path: str, *headers: tuple[str, str], **more: Any) -> Answer:
    """Ask for something as a browser on this machine does."""
    sent = headers if any(name == "host" for name, _ in headers) else (HOME, *headers)
    return await ask(app, path, headers=sent, **more)


async def post(
    app: Any, path: str, body: Any, headers: Iterable[tuple[str, str]], **more: Any
) -> Answer:
    """Post something with exactly these headers."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await ask(app, path, method="POST", headers=headers, body=sent, **more)


class Browser:
    """One who has loaded the page: has a session and its token."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.cookie = ""
        self.token = ""

    async def open(self, **more: Any) -> Answer:
        answer = await get(self.app, "/session", **more)
        self.token = answer.json()["token"]
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        return answer

    @property
    def headers(self) -> dict[str, str]:
        return dict((HOME, ORIGIN, JSON, ("cookie", self.cookie), ("x-seawall-token", self.token)))

    async def act(self, body: Any, path: str = "/act", **more: Any) -> Answer:
        return await post(self.app, path, body, self.headers.items(), **more)


class Viewer:
    """A client that reads the event stream, as slowly as the test wants."""

    def __init__(self, app: Any, *headers: tuple[str, str], **more: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.gone = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        sent = headers if any(name == "host" for name, _ in headers) else (HOME, *headers)
        scope = http_scope("/events", headers=sent, **more)
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        await self.takes.wait()
        self.messages.append(message)

    @property
    def answer(self) -> Answer:
        return answer_of(self.messages)

    @property
    def events(self) -> list[Any]:
        """Return the messages that came, each as what its JSON says."""
        lines = self.answer.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]

    async def leave(self) -> None:
        self.gone.set()
        await self.task


class Others:
    """A scripted source of pods."""

    def __init__(self, *views: Any) -> None:
        self.views_told: Any = list(views)
        self.hangs = False
        self.asked = 0
        self.cost = 0.0

    async def views(self) -> Any:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if isinstance(self.views_told, Exception):
            raise self.views_told
        return self.views_told


def asked_of(
    *headers: tuple[str, str], client: Any = ("127.0.0.1", 5), server: Any = ("127.0.0.1", 80)
) -> int:
    """Return with which status this machine's own dashboard answers such a request."""

    async def main() -> int:
        answer = await ask(Shown(), "/session", headers=headers, client=client, server=server)
        assert answer.status in (200, 403)
        assert answer.status == 200 or "machine itself alone" in answer.json()["detail"]
        return answer.status

    return asyncio.run(main())
