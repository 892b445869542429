"""What the control strip does, on real processes under a supervisor in this one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable

import pytest

from seawall.clock import SYSTEM
from seawall.demo import _supervisor
from seawall.demo._children import Child, NotStarted
from seawall.demo._supervisor import Demo

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


def test_what_does_not_start_is_told_with_its_log(monkeypatch: pytest.MonkeyPatch):
    """A process that fails is named, with the end of what it wrote, and the rest is ended."""
    started: list[Child] = []
    start = Child.start

    async def noted(child: Child):
        started.append(child)
        if child.name == "pod-1":
            child._command[-2] = "no url at all"
            child._command[3] = "seawall.demo.missing"
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
        assert "seawall.demo.missing" in str(error)
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
