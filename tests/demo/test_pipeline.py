"""The demo of a pipeline, on real processes."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from seawall.telemetry.thresholds import ERROR_RATIO_WARN
from seawall.testing import run_virtual
from seawall_demo._dashboard import shown
from seawall_demo._supervisor import PipelineDemo
from seawall_demo._switches import PIPELINE
from seawall_demo.sensors import FLAKY, LOOSE_WIRE, SENSORS, Plant
from tests.demo.support import Program, gone
from tests.demo.test_supervisor import quiet, until

pytestmark = pytest.mark.alone

ROW = re.compile(r"^ *(?P<title>[A-Z][\w ]*?) +(\d+) +(\d+) +(\d+) +(\d+)$", re.MULTILINE)


def test_a_run_without_a_page_breaks_everything_and_loses_nothing(tmp_path: Path):
    """It exits 0 with a row for each switch, says that nothing is lost, and leaves no process."""
    with Program(tmp_path / "said", "pipeline", "--headless", "--seconds", "16") as demo:
        status = demo.ends(120)
    assert status == 0, demo.said
    titles = [match["title"] for match in ROW.finditer(demo.said)]
    assert titles == [switch.title for switch in PIPELINE], demo.said
    assert ", 0 are lost." in demo.said
    assert set(demo.pids) == {"keeper", "plant"}
    assert gone(demo.pids, 2.0) == []
    assert not demo.folder.exists()


def test_ctrl_c_ends_it(tmp_path: Path):
    """Nothing is left."""
    with Program(tmp_path / "said", "pipeline", "--port", "18840") as demo:
        demo.says("Ctrl-C ends it")
        demo.process.send_signal(signal.SIGINT)
        assert demo.ends(10) == 0, demo.said
    assert gone(demo.pids, 2.0) == []
    assert not demo.folder.exists()


def test_the_page_has_a_switch_for_each_failure():
    """They are shown with the pipeline's snapshot, thrown by a request, and mended together."""

    async def main() -> None:
        async with PipelineDemo(say=quiet, detail=quiet) as demo, shown(demo, 18870) as url:
            await until(lambda: demo.account.get("sink", 0) > 0, 60.0)
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as client:
                token = (await client.get("/session")).json()["token"]
                headers = {"origin": url.rstrip("/"), "x-seawall-token": token}

                async def control(**body: Any) -> httpx.Response:
                    return await client.post("/control", json=body, headers=headers)

                for switch in PIPELINE:
                    answer = await control(switch=switch.name, on=True)
                    assert answer.json() == {"done": switch.does}
                assert all(demo.on.values())
                wrong = await control(switch="vendor", on=True)
                assert "write one of S1, S2" in wrong.text
                assert (await control(switch="well")).json() == {"done": "All is mended."}
                assert not any(demo.on.values())
            stored = demo.account["sink"]
            await until(lambda: demo.account["sink"] > stored + 20, 60.0)
            account = await demo.finish()
            ends = ("sink", "dead_letter", "dropped", "returned")
            assert account["read"] == sum(account[name] for name in ends)

    asyncio.run(main())


async def _no_answer(plant: Plant) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(5.0):
            await plant.measure("S1")


async def _refused_place(plant: Plant) -> None:
    with pytest.raises(ConnectionRefusedError):
        await plant.place_of("S1")


async def _slow_place(plant: Plant) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await plant.place_of("S1")


async def _poison(plant: Plant) -> None:
    assert await plant.measure("S5") == LOOSE_WIRE  # at once, and then now and then
    found = [await plant.measure("S5") for _ in range(1000)]
    assert 1 <= found.count(LOOSE_WIRE) <= 100


async def _refused_database(plant: Plant) -> None:
    with pytest.raises(ConnectionRefusedError):
        await plant.reach_database()


async def _slow_database(plant: Plant) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(3.0):
            await plant.reach_database()


@pytest.mark.parametrize(
    ("switch", "check"),
    [
        ("S1", _no_answer),
        ("down", _refused_place),
        ("slow", _slow_place),
        ("poison", _poison),
        ("failover", _refused_database),
        ("sink", _slow_database),
    ],
)
def test_each_switch_breaks_what_it_says(
    switch: str, check: Callable[[Plant], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
):
    """And nothing but that is wrong when it is mended."""
    monkeypatch.setattr("seawall_demo.sensors.FLAKY", {})

    async def main() -> None:
        plant = Plant(Random(1))
        plant.switch(switch, on=True)
        await check(plant)
        plant.switch(switch, on=False)
        assert plant.broken == set()
        assert LOOSE_WIRE not in [await plant.measure("S5") for _ in range(100)]
        assert await plant.place_of("S1") == "hall 1"
        await plant.reach_database()

    run_virtual(main())


def test_flaky_sensors_are_no_trouble_on_the_page():
    """Their share of failed attempts is well below the one from which the page warns."""
    assert sum(FLAKY.values()) / len(SENSORS) <= ERROR_RATIO_WARN / 2


def test_an_unknown_switch_is_refused():
    """The error says which there are."""
    with pytest.raises(ValueError, match="S1"):
        Plant().switch("vendor", on=True)
