"""What the control strip does, on real processes under a supervisor in this one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from seawall.clock import SYSTEM
from seawall_demo import _supervisor
from seawall_demo._children import Child, NotStarted
from seawall_demo._supervisor import Demo

pytestmark = pytest.mark.alone


def quiet(_text: str) -> None:
    pass


async def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that happens in another process."""
    end = SYSTEM.now() + seconds
    while not true():
        assert SYSTEM.now() < end, "it has not happened"
        await asyncio.sleep(0.02)  # noqa: TID251 - real processes


async def errors_over(demo: Demo, seconds: float, during: Callable[[], Awaitable[None]]) -> dict:
    """Break something, and return how the users fared from then on."""
    demo.phase("now")
    await during()
    await asyncio.sleep(seconds)  # noqa: TID251 - real processes
    demo.phase(None)
    return await demo.finish({"now": ["now"]})


def test_without_redis_and_with_a_dead_pod_the_users_are_served(monkeypatch: pytest.MonkeyPatch):
    """A cut store and a killed pod cost hardly an error, and the pod comes back."""
    monkeypatch.setattr(_supervisor, "RESTART_AFTER", 0.5)
    said: list[str] = []

    async def run() -> None:
        async with Demo(rate=20.0, say=said.append, detail=quiet) as demo:
            await until(lambda: demo.recent)
            before = {pod.name: pod.pid for pod in demo.pods}

            async def hurt() -> None:
                await demo.switch("cut", on=True)
                await demo.switch("kill", on=True)
                assert demo.on["cut"]
                assert demo.on["kill"]
                await until(lambda: not demo.on["kill"])

            fared = (await errors_over(demo, 1.0, hurt))["now"]["protected"]
            assert fared["requests"] > 50
            assert fared["error"] < 0.05
            after = {pod.name: pod.pid for pod in demo.pods}
            assert all(pod.alive for pod in demo.pods)
            assert len([name for name in before if before[name] != after[name]]) == 1
            await demo.all_well()
            assert not any(demo.on.values())
            assert said == []  # what was broken on purpose is no news
            os.kill(demo.pods[0].pid or 0, signal.SIGKILL)
            await until(lambda: said)
            assert said[0].startswith("pod-1 died; it is started again")
            await until(
                lambda: demo.pods[0].pid not in {after["pod-1"], None} and demo.pods[0].alive
            )

    asyncio.run(run())


def _state(pod: Child) -> str:
    """Return the letter that the system has for how a process is: T is stopped."""
    stat = Path(f"/proc/{pod.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


async def _until_all_saw(pods: list[Child], change: str) -> None:
    """Wait until each of `pods` has logged that change of a member."""
    seen = re.compile(rf"member_changed in 'pods': member={change} ")
    await until(lambda: all(seen.search(pod.tail()) for pod in pods), 60.0)


def test_a_paused_pod_is_suspected_by_the_others_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    """It stands still, is suspected by both others, and is present again when it goes on."""
    monkeypatch.setattr(_supervisor, "PAUSED_FOR", 60.0)

    async def run() -> None:
        async with Demo(rate=5.0, say=quiet, detail=quiet) as demo:
            first, *others = demo.pods
            await _until_all_saw(others, "pod-1 unknown -> alive")
            await demo.switch("pause", on=True)
            assert demo.on["pause"]
            await until(lambda: _state(first) == "T")
            await demo.switch("pause", on=True)  # it is on already: no second one is paused
            assert "T" not in {_state(pod) for pod in others}
            await _until_all_saw(others, "pod-1 alive -> suspected")
            await demo.switch("pause", on=False)
            assert not demo.on["pause"]
            await _until_all_saw(others, r"pod-1 (suspected|confirmed) -> alive")
            assert _state(first) != "T"

    asyncio.run(run())


def test_a_paused_pod_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch):
    """After a while, and also if it is killed meanwhile."""
    monkeypatch.setattr(_supervisor, "PAUSED_FOR", 0.2)
    monkeypatch.setattr(_supervisor, "RESTART_AFTER", 0.2)

    async def run() -> None:
        async with Demo(rate=5.0, say=quiet, detail=quiet, memory=True) as demo:
            (pod,) = demo.pods
            await demo.switch("pause", on=True)
            await until(lambda: not demo.on["pause"])
            await until(lambda: _state(pod) != "T")
            await demo.switch("pause", on=True)
            before = pod.pid
            await demo.switch("kill", on=True)
            await until(lambda: pod.pid != before and pod.alive and not demo.on["kill"], 30.0)
            assert not demo.on["pause"]

    asyncio.run(run())


def test_what_does_not_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch):
    """A process that fails is named, with the end of what it wrote, and the rest is ended."""
    started: list[Child] = []
    start = Child.start

    async def noted(child: Child):
        started.append(child)
        if child.name == "pod-1":
            child._command[-2] = "no url at all"
            child._command[3] = "seawall_demo.missing"
        return await start(child)

    monkeypatch.setattr(Child, "start", noted)

    async def run() -> None:
        demo = Demo(rate=20.0, say=quiet, detail=quiet, memory=True)
        with pytest.raises(ExceptionGroup) as caught:
            async with demo:
                pass
        (error,) = caught.value.exceptions
        assert isinstance(error, NotStarted)
        assert "pod-1 ended with 1" in str(error)
        assert "seawall_demo.missing" in str(error)
        assert not demo.folder.exists()
        assert not any(child.alive for child in started)

    asyncio.run(run())


def test_a_vendor_that_dies_ends_the_demo():
    """What the demo cannot do without is not done without: it is told which died."""

    async def run() -> None:
        async with Demo(rate=20.0, say=quiet, detail=quiet, memory=True) as demo:
            demo._vendor.kill()
            with pytest.raises(NotStarted, match="vendor died"):
                await asyncio.wait_for(demo.failed, 5)

    asyncio.run(run())
