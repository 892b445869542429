"""The page of the demo: all pods, the control strip, and both sides next to each other.

The views of the pods are fetched over HTTP from their own dashboards, not through the store, so the
page keeps working when that is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar, Final

import httpx

from seawall.clock import SYSTEM
from seawall.dashboard import Dashboard
from seawall.dashboard.responses import Asset, assets
from seawall.dashboard.sampler import Sampler
from seawall.dashboard.views import View
from seawall_demo._children import Child
from seawall_demo._serving import listening, server_for
from seawall_demo._settings import EVERY, HOST, pause
from seawall_demo._supervisor import Supervisor
from seawall_demo.pod import MOUNTED

WITHIN: Final = 3.0
"""Seconds after which a view is stale, and a silent pod is contacted again."""
AGAIN_AFTER: Final = 0.25
MORE_PORTS: Final = 20
"""Number of further ports that are tried if the wanted one is taken."""
ALL_WELL: Final = "well"


class PodsByHttp:
    """The pods of the demo, seen through their own dashboards, which push their views."""

    def __init__(self, pods: list[Child]) -> None:
        """Follow these pods, at whatever port they have at the time."""
        self._pods = pods
        self._client: httpx.AsyncClient | None = None
        self._following: dict[str, asyncio.Task[None]] = {}
        self._views: dict[str, tuple[float, View]] = {}
        self.changed: Callable[[], None] = lambda: None
        """Called when a breaker or a member changed on some pod, to update the page immediately."""

    async def views(self) -> list[View]:
        """Return the last view of each live pod, unless it is stale."""
        for pod in self._pods:
            known = self._following.get(pod.name)
            if pod.alive and (known is None or known.done()):
                self._following[pod.name] = asyncio.create_task(self._follow(pod))
        fresh = SYSTEM.now() - WITHIN
        results = [self._views.get(pod.name) for pod in self._pods if pod.alive]
        return [one[1] for one in results if one is not None and one[0] > fresh]

    async def _follow(self, pod: Child) -> None:
        """Store the views that a pod sends until the connection breaks."""
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=WITHIN, trust_env=False)
        place = f"http://{HOST}:{pod.port}{MOUNTED}/events"
        try:
            async with self._client.stream("GET", place) as events:
                async for line in events.aiter_lines():
                    if line.startswith("data:"):
                        self._take(pod.name, json.loads(line.removeprefix("data:")))
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            await pause(AGAIN_AFTER)

    def _take(self, name: str, message: Any) -> None:
        # A pod reports the other pods too, but each pod is the source of its own view.
        for view in message["views"]:
            if view["pod"]["name"] == name:
                before = self._views.get(name)
                self._views[name] = SYSTEM.now(), view
                if before is None or _states(before[1]) != _states(view):
                    self.changed()

    async def act(self, pod: str, act: dict[str, Any]) -> str:
        """Act on that pod, as its own page would; raise if that is not possible."""
        port = next((one.port for one in self._pods if one.name == pod and one.alive), None)
        if port is None:
            raise LookupError(f"there is no pod {pod!r} just now")
        origin = f"http://{HOST}:{port}"
        async with httpx.AsyncClient(base_url=origin, trust_env=False) as client:
            session = (await client.get(f"{MOUNTED}/session")).json()
            headers = {"origin": origin, "x-seawall-token": session["token"]}
            answer = await client.post(f"{MOUNTED}/act", json=act, headers=headers)
        results = answer.json()
        if answer.is_error:
            raise ValueError(str(results.get("detail", answer.status_code)))
        return str(results["done"])

    async def close(self) -> None:
        """Stop following the pods."""
        tasks = list(self._following.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()
            self._client = None


def _states(view: View) -> list[tuple[str, str | None]]:
    """Return the states of breakers and members."""
    breakers = [(guard["name"], guard["breaker"]) for guard in view["guards"]]
    members = [(row["name"], row["state"]) for row in view["sections"].get("Members", ())]
    return [*breakers, *members]


class DemoDashboard(Dashboard):
    """A dashboard of other processes, with a control strip for everything that can be broken."""

    _scripts: ClassVar[tuple[str, ...]] = ("demo.css", "demo.js")
    _posts: ClassVar[tuple[str, ...]] = ("control",)
    _shows_itself: ClassVar[bool] = False

    def __init__(self, demo: Supervisor) -> None:
        """Show the pods of `demo`, to this machine only, which may also act."""
        self._demo = demo
        self._by_http = PodsByHttp(demo.pods)
        super().__init__(
            local=True,
            operate=lambda _visit: "demo",
            pods=self._by_http,
            pod="supervisor",
            title="Seawall demo",
            every=EVERY,
        )

    def _asset(self, name: str) -> Asset | None:
        if name in self._scripts:
            return assets("seawall_demo", "page").get(name)
        return super()._asset(name)

    def _new_sampler(self) -> Sampler:
        sampler = super()._new_sampler()
        self._by_http.changed = sampler.sample_soon
        return sampler

    async def aclose(self) -> None:
        """End the streams, and stop following the pods."""
        await super().aclose()
        await self._by_http.close()

    async def _extra(self) -> dict[str, Any]:
        demo = self._demo
        switches = [
            {**switch._asdict(), "on": demo.on[switch.name], "able": demo.able(switch.name)}
            for switch in demo.switches
        ]
        return {"first": list(demo.first), "switches": switches, **demo.shown()}

    async def _post(self, name: str, body: Any, operator: str) -> dict[str, Any]:
        if not isinstance(body, dict):
            raise ValueError("write an object, such as {'switch': 'broken', 'on': true}")  # noqa: TRY004 - reported to the client
        which, on = body.get("switch"), body.get("on", True)
        if which == ALL_WELL:
            await self._demo.all_well()
            return {"done": "All is mended."}
        does = {switch.name: switch.does for switch in self._demo.switches}
        if not isinstance(which, str) or which not in does or not isinstance(on, bool):
            raise ValueError(f"switch: write one of {', '.join((*does, ALL_WELL))}; on: a boolean")
        if not self._demo.able(which):
            raise ValueError("there is no Valkey in this run, so there is no way to cut")
        await self._demo.switch(which, on)
        return {"done": does[which] if on else "Mended."}


@asynccontextmanager
async def shown(demo: Supervisor, port: int) -> AsyncIterator[str]:
    """Serve the page at `port` or the next free one; yield its address."""
    own = _first_free(port)
    dashboard = DemoDashboard(demo)
    server = server_for(dashboard, lifespan="on")
    with own:
        serving = asyncio.create_task(server.serve(sockets=[own]))
        try:
            while not server.started:
                if serving.done():
                    serving.result()
                    raise RuntimeError("the page could not be served")
                await pause(0.01)
            yield f"http://{HOST}:{own.getsockname()[1]}/"
        finally:
            await dashboard.aclose()  # otherwise the server would wait for open pages
            server.should_exit = True
            await serving


def _first_free(port: int) -> Any:
    for candidate in range(port, min(port + MORE_PORTS, 65_536)):
        try:
            return listening(candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise OSError(f"the ports from {port} on are all taken: write another --port")
