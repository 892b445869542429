"""The pipelines of the dashboard, in a real browser: a Collect of five sensors, and what breaks.

`SEAWALL_SCREENSHOT=1 ./dev test tests/browser/test_pipelines.py` makes its picture anew.
"""

from __future__ import annotations

import asyncio
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from seawall import Breaker, Guard, Timeout
from seawall.dashboard.watcher import Watcher
from seawall.pipeline import Collect, Pipeline
from tests.browser.service import (
    HOSTILE,
    ROOT,
    as_operator,
    focused,
    running,
    running_demo,
    sideways,
    until_live,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opening = Callable[..., "Page"]
PICTURE: Final = ROOT / "docs" / "operate" / "pipeline.png"
KEEP: Final = os.environ.get("SEAWALL_SCREENSHOT") == "1"
LONG: Final = 60_000.0
"""Milliseconds for what takes one or two seconds on a machine that has nothing else to do."""


class Plant:
    """Five sensors, a directory that may be down, and a pipeline that runs in a thread."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.down = False
        self.poisoned = 0
        """How many samples to come fail."""
        self.directory = Guard("directory", Breaker(consecutive=3, break_for=600.0), Timeout(5.0))
        self.pipeline = self._made()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.pipeline.run()))

    def _made(self) -> Pipeline:
        names = [f"S{number}" for number in range(1, 6)]
        sensors = Collect(
            {name: self._sensor(name) for name in names}, minimum=3, within=5.0, name="sensors"
        )
        pipeline = Pipeline("analytics")
        hot, cold = (
            pipeline.read(sensors.every(0.05))
            .stage(self.check)
            .stage(self.enrich, guard=self.directory, workers=4, capacity=40)
            .stage(self.features, workers=4, capacity=20)
            .branch(lambda batch: max(batch.values.values()) > 24, name="is hot")
        )
        hot.sink(self.alarm, workers=1)
        cold.sink(self.store, name=HOSTILE, batch=(10, 0.2))
        return pipeline

    def _sensor(self, name: str) -> Callable[[], Any]:
        read = iter(range(10**9))

        async def sensor() -> float:
            if name in self.broken:
                raise ConnectionError("no signal")
            return 20 + next(read) % 6

        return sensor

    def check(self, batch: Any) -> Any:
        if self.poisoned:
            self.poisoned -= 1
            raise ValueError(f"out of range: {HOSTILE}")
        return batch

    async def enrich(self, batch: Any) -> Any:
        await asyncio.sleep(0.03)  # noqa: TID251 - a directory takes its time
        if self.down:
            raise TimeoutError("the directory does not answer")
        return batch

    async def features(self, batch: Any) -> Any:
        await asyncio.sleep(0.05)  # noqa: TID251 - as above
        return batch

    async def alarm(self, _batch: Any) -> None:
        """Ring."""

    async def store(self, _batches: list[Any]) -> None:
        """Keep them."""

    @contextmanager
    def running(self) -> Iterator[Plant]:
        self._thread.start()
        try:
            yield self
        finally:
            self.pipeline.stop(0.0)
            self._thread.join(30)
            self.directory.close()
            assert not self._thread.is_alive(), "the pipeline did not stop"


def _node(page: Page, name: str) -> Any:
    return page.locator(".pipe-item").filter(has=page.locator(".pipe-name", has_text=name))


def _note(page: Page, text: str) -> Any:
    return page.locator(".pipe-note").filter(has_text=text)


def test_a_sensor_that_breaks_is_named_on_the_page(open_page: Opening):
    """With its cause and since when; the pipe goes on, and all is well when it is back."""
    with Plant().running() as plant, running() as service:
        page = open_page(service.url, color_scheme="dark")
        until_live(page)
        _node(page, "enrich").wait_for()
        taps = page.locator(".tap")
        assert taps.all_inner_texts() == ["S1", "S2", "S3", "S4", "S5"]
        assert page.locator(".pipe[data-small=yes]").count() == 5
        assert _note(page, "missing").count() == 0
        plant.broken.add("S3")
        said = _note(page, "source S3 has been missing for")
        said.wait_for(timeout=LONG)
        assert "ConnectionError: no signal" in said.inner_text()
        assert page.locator(".tap[data-tone=bad]").inner_text() == "S3"
        trouble = page.locator("#troubles li").filter(has_text="Source S3 is missing").first
        assert "ConnectionError: no signal" in trouble.inner_text()
        assert "degraded" in page.locator("#verdict-title").inner_text()
        plant.broken.clear()
        said.wait_for(state="detached", timeout=LONG)
        trouble.wait_for(state="detached", timeout=LONG)
        page.locator(".tap[data-tone=bad]").wait_for(state="detached", timeout=LONG)
        assert page.evaluate("window.hacked") is None


def test_a_stage_that_waits_is_opened_and_shows_what_each_worker_does(open_page: Opening):
    """By keyboard: workers and what they wait for, failures by cause, quantiles, the rate."""
    with Plant().running() as plant, running() as service:
        page = open_page(service.url)
        until_live(page)
        plant.down = True
        enrich = _node(page, "enrich")
        enrich.filter(has_text="waits: CircuitOpen").wait_for(timeout=LONG)
        assert _note(page, "stage enrich waits").count() == 1
        root = page.locator("#troubles > li").filter(has_text="The breaker is").first
        root.locator(".consequence").filter(has_text="Stage enrich waits").wait_for(timeout=LONG)
        button = enrich.locator("button")
        label = button.get_attribute("aria-label")
        assert label.startswith("stage enrich, waits: CircuitOpen")
        assert label.endswith("then features")
        button.focus()
        page.keyboard.press("Enter")
        detail = page.locator(".pipe-detail")
        detail.locator(".pipe-worker").nth(3).wait_for(timeout=LONG)
        assert button.get_attribute("aria-expanded") == "true"
        told = detail.inner_text()
        assert "sensors:" in detail.locator(".work-item").first.inner_text()
        assert "waits: CircuitOpen" in told
        assert "TimeoutError" in detail.locator(".cause").inner_text()
        assert "p99" in told
        assert "4 of 4 busy" in told
        assert detail.locator(".chart path.line").get_attribute("d").startswith("M")
        page.keyboard.press("Tab")
        detail.get_by_role("button", name="Close").focus()
        page.keyboard.press("Escape")
        detail.wait_for(state="hidden")
        assert "enrich" in focused(page)["name"]


def test_a_dead_letter_is_opened_and_replayed(open_page: Opening):
    """An operator comes from the stage that set it aside, reads its cause and replays it."""
    with Plant().running() as plant, running() as service:
        plant.poisoned = 3
        page = open_page(service.url)
        until_live(page)
        as_operator(page)
        until_live(page)
        check = _node(page, "check")
        check.locator(".pipe-dead", has_text="3 dead").wait_for(timeout=LONG)
        told = "3 dead letters wait for somebody"
        page.locator("#troubles li").filter(has_text=told).first.wait_for(timeout=LONG)
        check.locator("button").click()
        page.get_by_role("button", name="Show its dead letters").click(timeout=LONG)
        assert page.locator("#work-text").input_value() == "check"
        rows = page.locator("#work-rows tr")
        rows.nth(2).wait_for()
        rows.first.locator(".work-open").click()
        detail = page.locator("#work-detail")
        detail.wait_for()
        cause = detail.locator("#work-error").inner_text()
        assert cause == f"ValueError: out of range: {HOSTILE}"
        assert "check" in detail.locator("#work-facts").inner_text()
        assert '"S1"' in detail.locator("#work-payload").inner_text()
        detail.get_by_role("button", name="Replay").click()
        dialog = page.locator("#confirm")
        dialog.get_by_text("Replay this dead letter?").wait_for()
        dialog.get_by_role("button", name="Replay").click()
        page.locator("#result", has_text="Marked to be replayed:").wait_for()
        rows.nth(2).wait_for(state="detached")
        assert rows.count() == 2
        page.get_by_role("button", name="Replay all that match").click()
        dialog.get_by_role("button", name="Replay all").click()
        page.locator("#work-none", has_text="No dead letters").wait_for(timeout=LONG)
        # They go through the stage again, which is well now: nothing is left of them.
        page.locator("#work-lists .work-count", has_text="0").wait_for(timeout=LONG)
        page.wait_for_function(
            "() => !document.getElementById('troubles').textContent.includes('dead letter')",
            timeout=LONG,
        )
        assert service.posted
        assert page.evaluate("window.hacked") is None


def test_five_sources_and_eight_stages_fit_a_screen_and_a_phone(open_page: Opening):
    """In columns by the longest path from the sources; on a phone below each other."""
    pipeline = Pipeline("orders")
    flows = [pipeline.read([1], name=f"region-{number}") for number in range(5)]
    flow = flows[0].merge(*flows[1:])
    for number in range(7):
        flow = flow.stage(lambda value: value, name=f"stage-{number}")
    flow.sink(lambda value: value, name="warehouse")
    with running() as service:
        page = open_page(service.url)
        until_live(page)
        _node(page, "warehouse").wait_for()
        boxes = {
            item.locator(".pipe-name").inner_text(): item.bounding_box()
            for item in page.locator(".pipe-item").all()
        }
        columns = sorted({round(box["x"]) for box in boxes.values()})
        assert len(columns) == 9
        assert {round(boxes[f"region-{number}"]["x"]) for number in range(5)} == {columns[0]}
        assert round(boxes["warehouse"]["x"]) == columns[-1]
        assert boxes["warehouse"]["x"] + boxes["warehouse"]["width"] <= 1440
        assert page.locator(".pipe").count() == 12
        _apart(list(boxes.values()))
        page.set_viewport_size({"width": 390, "height": 800})
        page.locator(".pipeline[data-way=down]").wait_for()
        _apart([item.bounding_box() for item in page.locator(".pipe-item").all()])
        assert sideways(page) == []
    assert pipeline


def _apart(boxes: list[Any]) -> None:
    """Assert that none covers another."""
    for place, one in enumerate(boxes):
        for other in boxes[place + 1 :]:
            beside = (
                one["x"] + one["width"] <= other["x"] or other["x"] + other["width"] <= one["x"]
            )
            below = (
                one["y"] + one["height"] <= other["y"] or other["y"] + other["height"] <= one["y"]
            )
            assert beside or below, (one, other)


def test_a_service_without_pipelines_has_no_part_for_them(open_page: Opening):
    """It is there when the first pipeline is."""
    with running() as service:
        page = open_page(service.url)
        until_live(page)
        assert page.locator("#pipelines").is_hidden()
        pipeline = Pipeline("late")
        pipeline.read([1]).sink(print, name="out")
        page.locator("#pipelines").wait_for()
        page.locator(".pipeline-state", has_text="not running").wait_for()
        assert pipeline


class _Others:
    """Another pod that runs the same pipeline, in which a sensor is missing and a stage waits."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        source, *_ = snapshot["sources"]
        missing = {"source": "S5", "state": "unavailable", "since": 65.0, "cause": HOSTILE}
        source = {**source, "missing": [missing], "rate": 7.0}
        work = {"item": "other:1", "items": 3, "since": 2.0, "waits_for": "RateLimited: x"}
        stages = [
            {**one, "waits_for": "RateLimited: x", "busy": 1, "at_work": [work], "rate": 1.5}
            if one["name"] == "enrich"
            else one
            for one in snapshot["stages"]
        ]
        told = {**snapshot, "running": True, "sources": [source], "stages": stages}
        with closing(Watcher(pod="pod-2")) as watcher:
            seen: Any = watcher._view_of({"pipeline": [told]})
        self.told = [{**seen, "age": 0.1}]

    async def views(self) -> list[Any]:
        return self.told


def test_pods_that_run_the_same_pipeline_are_drawn_as_one(open_page: Opening):
    """Their numbers are added up, of states the worst is shown, and each pod has a line."""
    plant = Plant()  # it does not run here
    with running(pods=_Others(plant.pipeline.snapshot())) as service:
        page = open_page(service.url)
        until_live(page)
        _note(page, "source S5 has been missing for 1 min 5 s").wait_for(timeout=LONG)
        assert page.locator(".pipeline").count() == 1
        assert _node(page, "sensors").locator(".pipe-rate").inner_text() == "7/s"
        enrich = _node(page, "enrich")
        assert "waits: RateLimited" in enrich.inner_text()
        assert "0 of 80" in enrich.inner_text(), "the queues of both pods"
        enrich.locator("button").click()
        worker = page.locator(".pipe-worker")
        worker.wait_for(timeout=LONG)
        assert "other:1 and 2 more" in worker.inner_text()
        assert "pod-2" in worker.inner_text()
        assert "1 of 8 busy" in page.locator(".pipe-detail").inner_text()
        page.locator(".group-pods summary", has_text="2 pods have it, 1 running").click()
        assert page.locator(".group-pods li.line").count() == 2
        assert page.evaluate("window.hacked") is None
    plant.directory.close()


@pytest.fixture
def demo() -> Iterator[str]:
    """Run the demo of a pipeline; return where its page is."""
    with running_demo("pipeline") as url:
        yield url


if KEEP:

    @pytest.mark.timeout(180)
    def test_the_pipeline_of_the_demo_is_photographed(demo: str, open_page: Opening):
        """With a sensor that is missing, and a database that fails over."""
        page = open_page(demo, color_scheme="dark", viewport={"width": 1440, "height": 1500})
        store = _node(page, "store")
        store.wait_for(timeout=LONG)
        page.wait_for_timeout(20_000)
        page.locator("[data-switch=S2]").click()
        _note(page, "source S2 has been missing for").wait_for(timeout=LONG)
        page.locator("[data-switch=failover]").click()
        store.filter(has_text="waits: ").wait_for(timeout=LONG)
        store.locator("button").click()
        page.locator(".pipe-worker").wait_for(timeout=LONG)
        page.wait_for_timeout(12_000)
        page.locator("h1").hover()
        page.locator("#pipelines").screenshot(path=PICTURE, animations="disabled")


def test_the_picture_in_the_documentation_is_one():
    """It is not too large, and as wide as the page."""
    content = PICTURE.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width > 1000
    assert 300 < height < 1500
    assert 20_000 < len(content) < 500_000
