"""The page of the demo: what it is sent, what it may do, and whom it asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from seawall_demo._dashboard import DemoDashboard, PodsByHttp, shown
from seawall_demo._supervisor import Demo
from seawall_demo._switches import SERVICE

ORIGIN = "http://127.0.0.1:8800"


NAMES = [switch.name for switch in SERVICE]


class FakeDemo:
    """Notes what it is told."""

    switches = SERVICE
    first = Demo.first
    shown = Demo.shown

    def __init__(self, *, shared: bool = True) -> None:
        self.pods: list[Any] = []
        self.on = dict.fromkeys(NAMES, False)
        self.recent = {"protected": {"requests": 1}}
        self.past = [self.recent]
        self.shared = shared
        self.why = "because"
        self.told: list[tuple[str, bool]] = []

    def able(self, name: str) -> bool:
        return name != "cut" or self.shared

    async def switch(self, name: str, on: bool) -> None:  # noqa: FBT001 - as the real one
        self.told.append((name, on))

    async def all_well(self) -> None:
        self.told.append(("all", False))


@asynccontextmanager
async def visited(demo: Any) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, str]]]:
    """Yield a client of the page, and the headers with which it may act."""
    dashboard = DemoDashboard(demo)
    transport = httpx.ASGITransport(dashboard, client=("127.0.0.1", 1234))
    async with dashboard, httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        token = (await client.get("/session")).json()["token"]
        yield client, {"origin": ORIGIN, "x-seawall-token": token}


def test_the_page_has_the_strip_and_the_comparison():
    """Its script and style are in the page and served, and each message has what they show."""

    async def run() -> None:
        async with visited(FakeDemo()) as (client, _):
            page = (await client.get("/")).text
            for name in ("demo.js", "demo.css"):
                assert f"page/{name}" in page
                assert (await client.get(f"/page/{name}")).status_code == 200
            message = (await client.get("/state")).json()
        assert message["views"] == []  # its own process has nothing to guard
        assert message["history"] == {}
        assert message["extra"]["first"] == ["vendor"]
        assert [one["name"] for one in message["extra"]["switches"]] == NAMES
        assert message["extra"]["now"] == {"protected": {"requests": 1}}

    asyncio.run(run())


def test_the_files_of_the_page_write_no_markup():
    """Whatever a message says becomes text: no script makes markup, no style is inline."""
    from importlib.resources import files

    script = files("seawall_demo").joinpath("page/demo.js").read_text("utf-8")
    for word in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", ".style"):
        assert word not in script


def test_switches_are_for_the_page_alone():
    """With the token a switch is thrown; without it, or from another origin, nothing happens."""

    async def run() -> None:
        demo = FakeDemo()
        asked = {"switch": "broken", "on": True}
        async with visited(demo) as (client, may):
            for headers in ({}, {**may, "origin": "http://evil.example"}, {"origin": ORIGIN}):
                answer = await client.post("/control", json=asked, headers=headers)
                assert answer.status_code == 403
            assert demo.told == []
            answer = await client.post("/control", json=asked, headers=may)
            assert answer.json()["done"].startswith("It refuses half")
            await client.post("/control", json={"switch": "well"}, headers=may)
            assert demo.told == [("broken", True), ("all", False)]

    asyncio.run(run())


words = st.text(max_size=8) | st.sampled_from([*NAMES, "switch", "on", "well"])
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)
@given(anything)
@example({"switch": []})
def test_only_what_is_a_switch_is_thrown(body: Any):
    """Whatever is posted, it is done or refused with words, and nothing unknown is passed on."""

    async def run() -> None:
        demo = FakeDemo(shared=False)
        dashboard = DemoDashboard(demo)  # type: ignore[arg-type]
        try:
            done = await dashboard._post("control", body, "demo")
        except ValueError:
            assert demo.told == []
        else:
            assert isinstance(done["done"], str)
            ((name, on),) = demo.told
            assert name == "all" or (name in NAMES and name != "cut" and isinstance(on, bool))

    asyncio.run(run())


class FakePod:
    def __init__(self, name: str, port: int, *, alive: bool = True) -> None:
        self.name, self.port, self.alive = name, port, alive


def test_of_each_pod_only_its_own_view_is_taken():
    """A pod that is dead, hangs up or talks nonsense is left out; no pod speaks for another."""
    views = [{"pod": {"name": name}, "guards": [], "sections": {}} for name in ("pod-2", "pod-1")]
    good = json.dumps({"views": views}).encode()

    async def answer(body: bytes, reader: asyncio.StreamReader, writer: Any) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nevent: message\ndata: %b\n\n" % body)
        await writer.drain()
        await reader.read()
        writer.close()

    async def run() -> None:
        ports, servers = [], []
        for body in (good, b"{nonsense"):
            server = await asyncio.start_server(
                lambda r, w, body=body: answer(body, r, w), "127.0.0.1", 0
            )
            servers.append(server)
            ports.append(server.sockets[0].getsockname()[1])
        pods = PodsByHttp(
            [FakePod("pod-1", ports[0]), FakePod("pod-2", ports[1]), FakePod("p", 1, alive=False)]  # type: ignore[list-item]
        )
        async with asyncio.timeout(10):
            while not (found := await pods.views()):  # noqa: ASYNC110 - of a server
                await asyncio.sleep(0.01)  # noqa: TID251 - a real one
        assert found == [views[1]]
        with pytest.raises(LookupError, match="no pod 'p'"):
            await pods.act("p", {})
        await pods.close()
        assert not any(not task.done() for task in pods._following.values())
        for server in servers:
            server.close()
        await asyncio.sleep(0.05)  # noqa: TID251 - the transports close

    asyncio.run(run())


def test_a_breaker_that_changes_is_shown_at_once():
    """The page does not wait for its next turn: it is told when a state is another one."""
    pods = PodsByHttp([])
    told: list[str] = []
    states = ["closed", "closed", "open", "open", "closed"]
    for state in states:
        pods.changed = lambda state=state: told.append(state)
        guard = {"name": "vendor", "breaker": state}
        pods._take(
            "pod-1", {"views": [{"pod": {"name": "pod-1"}, "guards": [guard], "sections": {}}]}
        )
    assert told == ["closed", "open", "closed"]


def test_a_member_that_changes_is_shown_at_once():
    """So is a pod that is suspected."""
    pods = PodsByHttp([])
    told: list[str] = []
    for state in ("alive", "alive", "suspected", "suspected", "alive"):
        pods.changed = lambda state=state: told.append(state)
        sections = {"Members": [{"name": "pods: pod-2", "state": state}]}
        view = {"pod": {"name": "pod-1"}, "guards": [], "sections": sections}
        pods._take("pod-1", {"views": [view]})
    assert told == ["alive", "suspected", "alive"]


@pytest.mark.alone
def test_an_operator_of_the_page_acts_on_a_pod():
    """The page of the supervisor shows a real pod, and isolates and closes its breaker."""

    async def run() -> None:
        quiet = lambda _text: None  # noqa: E731
        demo = Demo(rate=20.0, say=quiet, detail=quiet, memory=True)
        async with demo, shown(demo, 18830) as address, httpx.AsyncClient() as client:
            origin = address.rstrip("/")
            token = (await client.get(f"{origin}/session")).json()["token"]
            may = {"origin": origin, "x-seawall-token": token}

            async def breaker() -> tuple[int, str]:
                message = (await client.get(f"{origin}/state")).json()
                if not message["views"]:
                    return 0, "not seen yet"
                (view,) = message["views"]
                assert view["pod"]["name"] == "pod-1"
                (guard,) = [one for one in view["guards"] if one["name"] == "vendor"]
                kinds = [layer["policy"] for layer in guard["stack"]]
                return kinds.index("breaker"), guard["breaker"]

            async def becomes(state: str) -> int:
                async with asyncio.timeout(10):
                    while (seen := await breaker())[1] != state:  # noqa: ASYNC110 - of a process
                        await asyncio.sleep(0.05)  # noqa: TID251 - a real one
                return seen[0]

            layer = await becomes("closed")
            body = {"pod": "pod-1", "guard": "vendor", "layer": layer, "key": None, "changes": {}}
            for act, state in (("isolate", "isolated"), ("close", "closed")):
                done = await client.post(f"{origin}/act", json={**body, "act": act}, headers=may)
                assert done.status_code == 200, done.text
                await becomes(state)
            wrong = {**body, "act": "isolate", "guard": "no such guard"}
            assert (await client.post(f"{origin}/act", json=wrong, headers=may)).status_code == 409

    asyncio.run(run())
