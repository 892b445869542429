"""Files as sources: what is read, what a resumed run repeats, and rotation."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from seawall.models.fifo import Positions
from seawall.pipeline import FileSource, Pipeline, csv_rows, lines
from seawall.testing import run_virtual


async def pause(seconds: float) -> None:
    """Let virtual time pass."""
    await asyncio.sleep(seconds)  # noqa: TID251 - virtual time


def run_all(source: FileSource[Any], stored: list[Any]) -> None:
    """Read everything there is."""
    pipeline = Pipeline("p")
    pipeline.read(source).sink(stored.append, name="store")
    run_virtual(pipeline.run())


def test_lines_and_json_lines(tmp_path: Path) -> None:
    """The last line needs no end; what is no JSON is a dead letter."""
    path = tmp_path / "orders.jsonl"
    path.write_bytes(b'{"id": 1}\r\nnonsense\n{"id": 2}')
    stored: list[Any] = []
    pipeline = Pipeline("p")
    pipeline.read(lines(path)).stage(json.loads).sink(stored.append, name="store")
    run_virtual(pipeline.run())
    assert stored == [{"id": 1}, {"id": 2}]
    assert pipeline.snapshot()["dead_letter"] == 1


def test_csv_records_may_span_lines(tmp_path: Path) -> None:
    """Quotes, commas and line ends inside quotes are data."""
    path = tmp_path / "orders.csv"
    path.write_text('id,text\n1,"two\nlines, ""quoted"""\n2,plain\n')
    stored: list[Any] = []
    run_all(csv_rows(path), stored)
    assert stored == [["id", "text"], ["1", 'two\nlines, "quoted"'], ["2", "plain"]]


def test_a_quote_that_is_never_closed_takes_time_in_proportion_to_the_file(tmp_path: Path) -> None:
    """A million lines are one record, which is none; they are not copied at each line."""
    path = tmp_path / "orders.csv"
    path.write_bytes(b'"' + b"x\n" * 2**20)
    stored: list[Any] = []
    began = time.process_time()
    run_all(csv_rows(path), stored)
    assert time.process_time() - began < 8.0
    assert [len(row) for row in stored] == [1]


def test_a_missing_file_is_an_error_at_once(tmp_path: Path) -> None:
    """Not an empty source."""
    with pytest.raises(FileNotFoundError, match="no such file"):
        run_all(lines(tmp_path / "none"), [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    number=st.integers(0, 60),
    crashes=st.lists(st.integers(1, 40), max_size=3),
    every=st.sampled_from([0.0, 0.5]),
    workers=st.integers(1, 4),
    seed=st.integers(0, 2**16),
)
def test_a_resumed_run_leaves_nothing_out(
    tmp_path: Path, number: int, crashes: list[int], every: float, workers: int, seed: int
) -> None:
    """Stopped without a chance to save, again and again: each line is stored at least once."""
    path, place = tmp_path / f"{seed}.txt", tmp_path / f"{seed}.place"
    path.write_text("".join(f"{n}\n" for n in range(number)))
    place.unlink(missing_ok=True)
    stored: list[int] = []
    chance = Random(seed)

    class Crash(BaseException):
        """The process is gone."""

    for crash in [*crashes, None]:
        source = lines(path, checkpoint=place, every=every)
        seen = 0

        async def store(
            line: str, crash: int | None = crash, source: FileSource[str] = source
        ) -> None:
            nonlocal seen
            await pause(chance.random() / 10)
            seen += 1
            if crash is not None and seen > crash:
                source._place.save = _nothing  # type: ignore[method-assign]
                raise Crash
            stored.append(int(line))

        pipeline = Pipeline("p")
        pipeline.read(source).sink(store, workers=workers)
        try:
            run_virtual(pipeline.run())
        except Crash:
            pass
    assert set(stored) == set(range(number))
    saved = json.loads(place.read_text()) if number else None
    assert saved is None or saved["offset"] == path.stat().st_size


async def _nothing(_place: Any) -> None:
    """Save nothing, as a process that is gone."""


def test_a_resumed_run_repeats_at_most_one_interval(tmp_path: Path) -> None:
    """Saved every second, ten items a second: at most those of the last second come again."""
    path, place = tmp_path / "lines.txt", tmp_path / "place"
    path.write_text("".join(f"{n}\n" for n in range(100)))
    stored: list[int] = []

    async def main() -> None:
        source = lines(path, checkpoint=place, every=1.0)

        async def store(line: str) -> None:
            await pause(0.1)
            stored.append(int(line))

        pipeline = Pipeline("p")
        pipeline.read(source).sink(store)
        running = asyncio.create_task(pipeline.run())
        await pause(5.05)
        source._place.save = _nothing  # type: ignore[method-assign]
        running.cancel()
        await asyncio.wait([running])

    run_virtual(main())
    first = len(stored)
    again: list[str] = []
    run_all(lines(path, checkpoint=place), again)
    assert [int(line) for line in again] == list(range(int(again[0]), 100))
    assert first - 11 <= int(again[0]) <= first


def test_a_rotated_file_is_read_to_its_end_and_then_the_new_one(tmp_path: Path) -> None:
    """Also what was written to the old one after it was renamed; and after a restart."""
    path, place = tmp_path / "app.log", tmp_path / "place"
    path.write_text("1\n2\n")
    stored: list[str] = []

    async def follow(steps: Any) -> None:
        pipeline = Pipeline("p")
        source = lines(path, checkpoint=place, every=0.0, follow=True)
        pipeline.read(source).sink(stored.append, name="store")
        running = asyncio.create_task(pipeline.run())
        await pause(1.0)
        await steps()
        await pause(1.0)
        pipeline.stop(1.0)
        await running

    async def rotate() -> None:
        path.rename(tmp_path / "app.log.1")
        with (tmp_path / "app.log.1").open("a") as old:
            old.write("3\n")
        path.write_text("4\n5")
        await pause(1.0)
        with path.open("a") as new:
            new.write(" and a half\n")

    run_virtual(follow(rotate))
    assert stored == ["1", "2", "3", "4", "5 and a half"]
    with path.open("a") as new:
        new.write("6\n")
    path.rename(tmp_path / "app.log.2")
    path.write_text("7\n")

    async def wait() -> None:
        await pause(0.0)

    run_virtual(follow(wait))
    assert stored[5:] == ["6", "7"]


def test_a_broken_checkpoint_is_an_error(tmp_path: Path) -> None:
    """With what to do: reading from the beginning would repeat everything in silence."""
    path, place = tmp_path / "lines.txt", tmp_path / "place"
    path.write_text("1\n")
    place.write_text("{")
    with pytest.raises(ValueError, match="remove it to begin anew"):
        run_all(lines(path, checkpoint=place), [])


def test_an_end_that_is_reported_twice_is_remembered_once() -> None:
    """A source hears of an end again after an error; it must not keep it for ever."""
    positions = Positions(0)
    for end in (1, 2, 3):
        positions.begin(end)
    assert positions.finish(1)
    assert not positions.finish(1)
    assert not positions.finish(3)
    assert not positions.finish(3)
    assert positions.finish(2)
    assert (positions.checkpoint, len(positions)) == (3, 0)
    assert not positions.finish(2)
    assert not positions._done


@given(st.permutations(range(1, 12)))
def test_the_checkpoint_is_before_everything_that_is_not_done(order: list[int]) -> None:
    """Whatever the order in which items end."""
    positions = Positions(0)
    for end in range(1, 12):
        positions.begin(end)
    done: set[int] = set()
    for end in order:
        positions.finish(end)
        done.add(end)
        left = set(range(1, 12)) - done
        assert positions.checkpoint == (min(left) - 1 if left else 11)
        assert positions.finish(end) is False  # said again
    assert len(positions) == 0
    assert not positions._done
    with pytest.raises(ValueError, match="not behind"):
        positions.begin(11)


def test_a_rotated_file_may_lack_its_last_newline(tmp_path: Path) -> None:
    """Its last line is waited for once more, then taken as it is; the loop is not blocked."""
    path = tmp_path / "app.log"
    path.write_bytes(b"1\n2")
    source = lines(path, follow=True)

    async def main() -> list[str]:
        seen = [value for value, _ in await source.pull(10)]
        path.rename(tmp_path / "app.log.1")
        path.write_bytes(b"3\n")
        async with asyncio.timeout(60):
            while len(seen) < 3:
                seen += [value for value, _ in await source.pull(10)]
        await source.close()
        return seen

    assert run_virtual(main()) == ["1", "2", "3"]


def test_a_last_line_that_is_finished_after_the_rotation_is_whole(tmp_path: Path) -> None:
    """Whoever writes may notice the rotation a moment later."""
    path = tmp_path / "app.log"
    path.write_bytes(b"1\nha")
    source = lines(path, follow=True)

    async def main() -> list[str]:
        seen = [value for value, _ in await source.pull(10)]
        old = path.rename(tmp_path / "app.log.1")
        path.write_bytes(b"3\n")

        async def finish() -> None:
            await pause(0.1)
            with old.open("ab") as file:
                file.write(b"lf\n")

        finishing = asyncio.create_task(finish())
        while len(seen) < 3:
            seen += [value for value, _ in await source.pull(10)]
        await finishing
        await source.close()
        return seen

    assert run_virtual(main()) == ["1", "half", "3"]


def test_a_followed_record_is_not_read_before_its_quotes_are_closed(tmp_path: Path) -> None:
    """Its lines may be written one by one."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b'1,"one\n')
    source = csv_rows(path, follow=True)

    async def main() -> list[list[str]]:
        async def finish() -> None:
            await pause(1)
            with path.open("ab") as file:
                file.write(b'two"\n2,x\n')

        finishing = asyncio.create_task(finish())
        rows = [value for value, _ in await source.pull(10)]
        await finishing
        await source.close()
        return rows

    assert run_virtual(main()) == [["1", "one\ntwo"], ["2", "x"]]


def test_no_csv_record_is_cut_short(tmp_path: Path) -> None:
    """Not by quotes inside of a text, nor by characters that only str.splitlines takes for ends."""
    path = tmp_path / "rows.csv"
    large = "x" * 200_000
    path.write_text(
        f'1,a\u2028b,c\n5" pipe,x\n6,y\n7,"q\n\nr ""s"""\n{large},8\n9,"open\n', encoding="utf-8"
    )
    stored: list[list[str]] = []
    run_all(csv_rows(path), stored)
    assert stored == [
        ["1", "a\u2028b", "c"],
        ['5" pipe', "x"],
        ["6", "y"],
        ["7", 'q\n\nr "s"'],
        [f"{large},8"],
        ["9", "open\n"],
    ]


async def _pulled(source: FileSource[str], number: int) -> list[tuple[str, Any]]:
    """Return the next `number` records, all of them acknowledged."""
    items: list[tuple[str, Any]] = []
    async with asyncio.timeout(60):
        while len(items) < number:
            items += await source.pull(number - len(items))
    await source.acknowledge([handle for _, handle in items])
    return items


@pytest.mark.parametrize("names", [("app.log.2", "app.log.1"), ("app.log-1104", "app.log-1105")])
def test_files_that_were_rotated_while_the_reader_stood_still_are_read_in_order(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    """Two rotations between two looks; what was rotated before the first run is not read."""
    path, oldest = tmp_path / "app.log", tmp_path / "app.log.9"
    oldest.write_text("long ago\n")
    path.write_text("1\n2\n")
    source = lines(path, follow=True)

    async def main() -> list[str]:
        seen = await _pulled(source, 1)
        for name, text in zip(names, ("3\n4\n", "5\n"), strict=True):
            path.rename(tmp_path / name)
            path.write_text(text)
        (tmp_path / "app.log.1.gz").write_bytes(b"compressed\n")
        seen += await _pulled(source, 4)
        path.rename(tmp_path / "app.log.0")
        path.write_text("6\n")
        seen += await _pulled(source, 1)
        await source.close()
        return [value for value, _ in seen]

    assert run_virtual(main()) == ["1", "2", "3", "4", "5", "6"]


def test_what_is_written_before_the_writer_opens_the_new_file_is_read(tmp_path: Path) -> None:
    """Rotation makes an empty file first, and whoever writes goes on with the old one."""
    path = tmp_path / "app.log"
    path.write_text("1\n")
    source = lines(path, follow=True)

    async def main() -> list[str]:
        seen = await _pulled(source, 1)
        old = path.rename(tmp_path / "app.log.1")
        path.touch()

        async def write() -> None:
            await pause(30.0)
            with old.open("a") as file:
                file.write("2\n")
            path.write_text("3\n")

        writing = asyncio.create_task(write())
        seen += await _pulled(source, 2)
        await writing
        await source.close()
        return [value for value, _ in seen]

    assert run_virtual(main()) == ["1", "2", "3"]


def test_rotated_files_are_forgotten_when_their_records_have_ended(tmp_path: Path) -> None:
    """Also without a checkpoint: a reader that runs for a year has seen many of them."""
    path = tmp_path / "app.log"
    path.write_text("0\n")
    source = lines(path, follow=True)

    async def main() -> None:
        await _pulled(source, 1)
        for number in range(1, 40):
            path.replace(tmp_path / "app.log.1")
            path.write_text(f"{number}\n")
            assert [value for value, _ in await _pulled(source, 1)] == [str(number)]
            assert len(source._files) == 1
            assert len(source._known) <= 2
        await source.close()

    run_virtual(main())


def test_another_file_with_the_same_inode_is_read_from_its_beginning(tmp_path: Path) -> None:
    """The number is used again for a new file; its records have ids of their own."""
    path, place = tmp_path / "app.log", tmp_path / "place"
    path.write_text("old 1\nold 2\n")
    source = lines(path, checkpoint=place)
    before = run_virtual(_all(source))
    path.write_text("new 1\nnew 2\nnew 3\n")  # the same inode, as if it were used again
    after = run_virtual(_all(lines(path, checkpoint=place)))
    assert [value for value, _ in after] == ["new 1", "new 2", "new 3"]
    assert not {str(handle) for _, handle in before} & {str(handle) for _, handle in after}


async def _all(source: FileSource[str]) -> list[tuple[str, Any]]:
    items = list(await source.pull(100))
    await source.acknowledge([handle for _, handle in items])
    await source.close()
    return items


def test_a_file_that_is_truncated_and_has_grown_again_is_noticed(tmp_path: Path) -> None:
    """It is longer than before when it is looked at, but it begins otherwise."""
    path = tmp_path / "app.log"
    path.write_text("1\n")
    source = lines(path, follow=True)

    async def main() -> list[str]:
        seen = await _pulled(source, 1)
        path.write_text("two\nthree\n")
        seen += await _pulled(source, 2)
        await source.close()
        return [value for value, _ in seen]

    assert run_virtual(main()) == ["1", "two", "three"]


def test_ids_of_records_are_the_same_after_a_restart(tmp_path: Path) -> None:
    """And those of a later file are others: an inbox would take its records for known ones."""
    path, place = tmp_path / "app.log", tmp_path / "place"
    path.write_text("1\n")

    async def main() -> list[tuple[str, Any]]:
        source = lines(path, checkpoint=place, every=0.0, follow=True)
        seen = await _pulled(source, 1)
        path.rename(tmp_path / "app.log.1")
        path.write_text("2\n")
        seen += await source.pull(1)
        await source.close()
        again = lines(path, checkpoint=place, every=0.0, follow=True)
        seen += await _pulled(again, 1)
        await again.close()
        return seen

    first, second, repeated = run_virtual(main())
    assert second == repeated
    assert str(first[1]) != str(second[1])


def test_a_record_that_is_too_long_is_a_dead_letter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are read; of a CSV record without its last quote, it is the first line."""
    monkeypatch.setattr("seawall.pipeline.files.LONGEST_RECORD", 10)
    path = tmp_path / "rows.csv"
    path.write_text('1,a\n2,"open\n3,b\n4,c\n' + "x" * 35 + "\n5,d\n")
    for source, expected in [
        (lines(path), ["1,a", '2,"open', "3,b", "4,c", "5,d"]),
        (csv_rows(path), [["1", "a"], ["3", "b"], ["4", "c"], ["5", "d"]]),
    ]:
        stored: list[Any] = []
        pipeline = Pipeline("p")
        pipeline.read(source).sink(stored.append, name="store")
        run_virtual(pipeline.run())
        assert stored == expected
        assert pipeline.snapshot()["dead_letter"] == 6 - len(expected)


def test_a_record_that_is_too_long_is_waited_for_until_its_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its second half would be taken for a record."""
    monkeypatch.setattr("seawall.pipeline.files.LONGEST_RECORD", 10)
    path = tmp_path / "app.log"
    path.write_text("x" * 25)
    source = lines(path, follow=True)

    async def main() -> list[Any]:
        async def finish() -> None:
            await pause(5.0)
            with path.open("a") as file:
                file.write("yz\n1\n")

        finishing = asyncio.create_task(finish())
        pulled = [value for value, _ in await source.pull(5)]
        await finishing
        await source.close()
        return pulled

    faulty, value = run_virtual(main())
    assert (faulty.value, value) == ("x" * 10, "1")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    acts=st.lists(
        st.sampled_from(["write", "write", "rotate", "pull", "pull", "restart", "crash"]),
        max_size=30,
    ),
    by_date=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_whatever_is_rotated_when_every_line_is_read_in_its_order(  # noqa: C901 - one program
    tmp_path: Path, acts: list[str], seed: int, *, by_date: bool
) -> None:
    """Also over restarts; a crash repeats what was not acknowledged, and nothing else."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    path, place, chance = folder / "app.log", folder / "place", Random(seed)
    path.write_text("0\n")
    written, rotations, crashed = 1, 0, False

    def rotate() -> None:
        if by_date:
            path.rename(folder / f"app.log-{20260101 + rotations}")
        else:
            for number in range(rotations, 0, -1):
                (folder / f"app.log.{number}").rename(folder / f"app.log.{number + 1}")
            path.rename(folder / "app.log.1")
        path.touch()

    async def main() -> list[int]:  # noqa: C901 - one program
        nonlocal written, rotations, crashed
        source = lines(path, checkpoint=place, every=0.0, follow=True)
        seen: list[int] = []
        acknowledged = 0

        async def take(number: int) -> None:
            nonlocal acknowledged
            pulled = await source.pull(number)
            seen.extend(int(value) for value, _ in pulled)
            if chance.random() < 0.8 or not crashed:
                await source.acknowledge([handle for _, handle in pulled])
                acknowledged += len(pulled)

        async with asyncio.timeout(600):
            await take(1)  # what was rotated before the first run is not read
            for act in [*acts, "restart"]:
                if act == "write":
                    with path.open("a") as file:
                        for _ in range(chance.randint(1, 3)):
                            file.write(f"{written}\n")
                            written += 1
                elif act == "rotate":
                    rotate()
                    rotations += 1
                elif act == "pull" and set(seen) != set(range(written)):
                    await take(chance.randint(1, 4))
                elif act == "restart":
                    await source.close()
                    source = lines(path, checkpoint=place, every=0.0, follow=True)
                elif act == "crash":
                    crashed = True
                    if source._reading is not None:
                        source._reading.file.close()
                    source = lines(path, checkpoint=place, every=0.0, follow=True)
            while set(seen) != set(range(written)):
                await take(5)
        await source.close()
        return seen

    seen = run_virtual(main())
    if not crashed:
        assert seen == list(range(written))
