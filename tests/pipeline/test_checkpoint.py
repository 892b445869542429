"""Checkpoints: what a crash repeats, what it leaves, and how much may be read ahead."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from seawall.pipeline import IterableSource, Page, Pipeline, lines, pages
from seawall.pipeline.checkpoint import FileCheckpoint
from seawall.testing import run_virtual


async def pause(seconds: float) -> None:
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def test_a_crash_while_it_is_saved_leaves_the_old_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written file is never the checkpoint."""

    async def main() -> None:
        checkpoint = FileCheckpoint(tmp_path / "place")
        assert await checkpoint.load() is None
        await checkpoint.save({"offset": 1})

        def crash(_number: int) -> None:
            raise OSError("no space left")

        with monkeypatch.context() as broken:
            broken.setattr(os, "fsync", crash)
            with pytest.raises(OSError, match="no space"):
                await checkpoint.save({"offset": 2})
        assert await checkpoint.load() == {"offset": 1}
        await checkpoint.save({"offset": 3})
        assert await checkpoint.load() == {"offset": 3}

    run_virtual(main())


@pytest.mark.parametrize("kind", ["iterable", "pages"])
def test_a_crash_repeats_at_most_one_interval(tmp_path: Path, kind: str) -> None:
    """Ten items a second, saved every second: those of the last second come again, and no more."""

    async def page(cursor: int) -> Page[int]:
        return Page([cursor], cursor + 1, more=True)

    def open_() -> Any:
        place = tmp_path / "place"
        if kind == "iterable":
            return IterableSource(range(1000), checkpoint=place)
        return pages(page, start=0, checkpoint=place)

    async def main() -> None:
        source, done = open_(), 0
        for done in range(57):
            ((value, handle),) = await source.pull(1)
            await pause(0.1)
            await source.acknowledge([handle])
            assert value == done
        again = open_()  # the first one was never closed
        ((value, _),) = await again.pull(1)
        assert done - 10 <= value <= done + 1

    run_virtual(main())


@pytest.mark.parametrize("kind", ["iterable", "pages", "lines"])
def test_an_item_that_does_not_end_holds_up_the_source_in_the_end(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or what has ended behind it would fill the memory; when it ends, everything goes on."""
    monkeypatch.setattr("seawall.pipeline.checkpoint.MOST_AHEAD", 300)
    stored: list[int] = []

    async def page(cursor: int) -> Page[int] | None:
        return Page([cursor], cursor + 1, more=True) if cursor < 1000 else None

    def open_() -> Any:
        place = tmp_path / "place"
        if kind == "iterable":
            return IterableSource(range(1000), checkpoint=place)
        if kind == "pages":
            return pages(page, start=0, checkpoint=place)
        (tmp_path / "numbers").write_text("".join(f"{number}\n" for number in range(1000)))
        return lines(tmp_path / "numbers", checkpoint=place)

    async def main() -> None:
        free = asyncio.Event()

        async def store(value: Any) -> None:
            if int(value) == 0:
                await free.wait()
            stored.append(int(value))

        pipeline = Pipeline("p")
        pipeline.read(open_()).sink(store, workers=4)
        running = asyncio.create_task(pipeline.run())
        await pause(60.0)
        assert 200 < len(stored) < 500
        free.set()
        await pause(60.0)
        pipeline.stop(1.0)
        await running
        assert sorted(stored) == list(range(1000))

    run_virtual(main())
    assert "waits: " in caplog.text
