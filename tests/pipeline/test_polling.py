"""Functions and HTTP resources that are asked again and again: when, and from where on."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from seawall import Guard, Retry, transient
from seawall.clients.httpx import AsyncGuardedTransport
from seawall.pipeline import Page, PageSource, Pipeline, calls, pages, poll
from seawall.testing import run_virtual


def now() -> float:
    return asyncio.get_running_loop().time()


async def take(source: PageSource[Any], number: int) -> list[Any]:
    """Return the next values, all of them acknowledged."""
    values: list[Any] = []
    while len(values) < number:
        pulled = await source.pull(number - len(values))
        await source.acknowledge([handle for _, handle in pulled])
        values += [value for value, _ in pulled]
    return values


@pytest.mark.parametrize("is_async", [True, False])
def test_a_function_is_called_at_its_times(*, is_async: bool) -> None:
    """None means nothing now; what it returns are items."""
    asked: list[float] = []

    def read() -> list[int] | None:
        asked.append(now())
        return None if len(asked) % 2 else [len(asked), 0]

    async def aread() -> list[int] | None:
        return read()

    async def main() -> None:
        start = now()
        source = calls(aread if is_async else read, every=10.0)
        assert await take(source, 4) == [2, 0, 4, 0]
        await source.close()
        assert [round(at - start, 6) for at in asked] == [0.0, 10.0, 20.0, 30.0]
        assert source.name == ("aread" if is_async else "read")

    run_virtual(main())


def test_a_function_that_takes_long_is_not_called_beside_itself() -> None:
    """The next call comes when it has returned; a cancelled read has its answer later."""
    running, most = 0, 0

    async def slow() -> list[int]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(25.0)  # noqa: TID251 - virtual time
        running -= 1
        return [1]

    async def main() -> None:
        source = calls(slow, every=1.0)
        for _ in range(3):
            waiting = asyncio.create_task(source.pull(1))
            await asyncio.sleep(1.0)  # noqa: TID251 - virtual time
            waiting.cancel()
            await asyncio.wait([waiting])
        assert await take(source, 2) == [1, 1]
        await source.close()
        assert most == 1

    run_virtual(main())


def test_a_function_that_fails_is_called_again_by_the_pipeline() -> None:
    """An outage of what is polled ends nothing."""
    asked = 0

    async def read() -> list[int]:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise ConnectionError("away")
        return [asked]

    async def main() -> None:
        pipeline = Pipeline("p")
        stored: list[int] = []

        def store(value: int) -> None:
            stored.append(value)
            pipeline.stop(1.0)

        pipeline.read(calls(read)).sink(store)
        assert await pipeline.run() is False
        assert stored[0] == 4

    run_virtual(main())


def test_a_page_is_not_asked_for_before_the_one_before_is_handed_out() -> None:
    """Bounded: one page at most waits in the source; where there is more, it is asked at once."""
    asked: list[int] = []

    def page(cursor: int) -> Page[int]:
        asked.append(cursor)
        return Page(range(cursor, cursor + 10), cursor + 10, more=True)

    async def main() -> None:
        start = now()
        source = pages(page, start=0, every=60.0)
        assert await take(source, 5) == [0, 1, 2, 3, 4]
        assert asked == [0]
        assert await take(source, 15) == list(range(5, 20))
        assert asked == [0, 10]
        assert now() == start
        await source.close()

    run_virtual(main())


def test_a_page_comes_again_until_all_of_it_has_ended(tmp_path: Path) -> None:
    """Under the same ids; a page without items moves the place, too."""
    place = tmp_path / "place"
    data = {None: Page([1, 2], "b", more=True), "b": Page([], "c", more=True), "c": Page([3], "d")}

    async def main() -> None:
        def open_() -> PageSource[int]:
            return pages(data.get, checkpoint=place, save_every=0.0, name="p")

        first = open_()
        items = [*await first.pull(5), *await first.pull(5)]
        await first.acknowledge([items[0][1], items[2][1]])
        await first.close()
        assert not place.exists()
        second = open_()
        again = [*await second.pull(5), *await second.pull(5)]
        assert [(value, str(handle)) for value, handle in again] == [
            (value, str(handle)) for value, handle in items
        ]
        await second.acknowledge([handle for _, handle in again[:2]])
        await second.close()
        assert place.read_text() == '{"cursor": "c"}'
        third = open_()
        assert await take(third, 1) == [3]
        await third.close()
        assert place.read_text() == '{"cursor": "d"}'

    run_virtual(main())


def test_what_cannot_be_kept_or_is_no_page_is_an_error_at_once(tmp_path: Path) -> None:
    """Not when the first item has ended."""

    async def main() -> None:
        kept = pages(lambda _cursor: Page([1], {1, 2}), checkpoint=tmp_path / "place", name="kept")
        with pytest.raises(TypeError, match="JSON"):
            await kept.pull(1)
        with pytest.raises(TypeError, match="write Page"):
            await pages(lambda _cursor: [1], name="no page").pull(1)  # type: ignore[arg-type, return-value]
        (tmp_path / "place").write_text("5")
        with pytest.raises(ValueError, match="no checkpoint of this source"):
            await pages(lambda _c: None, checkpoint=tmp_path / "place", name="other").pull(1)

    run_virtual(main())


class Vendor:
    """A server in memory; it writes down when it was asked for what."""

    def __init__(self, *answers: httpx.Response) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[float, str, str | None]] = []
        guard = Guard("polled vendor", Retry(on=transient, attempts=2, backoff=0.01), replace=True)
        transport = AsyncGuardedTransport(guard, httpx.MockTransport(self.answer))
        self.client = httpx.AsyncClient(transport=transport)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((now(), request.url.path, request.headers.get("if-none-match")))
        return self.answers.pop(0)


def test_what_has_not_changed_brings_no_item(tmp_path: Path) -> None:
    """By its ETag, which a resumed run knows, too."""

    async def main() -> None:
        vendor = Vendor(
            httpx.Response(200, json={"n": 1}, headers={"ETag": '"one"'}),
            httpx.Response(304),
            httpx.Response(200, json={"n": 2}, headers={"ETag": '"two"'}),
            httpx.Response(304),
            httpx.Response(200, json={"n": 3}),
        )
        place = tmp_path / "place"
        for expected in ([{"n": 1}, {"n": 2}], [{"n": 3}]):
            source = poll(vendor.client, "https://vendor.example/price", checkpoint=place)
            assert await take(source, len(expected)) == expected
            assert source.name == "vendor.example"
            await source.close()
        await vendor.client.aclose()
        assert [tag for _, _, tag in vendor.asked] == [None, '"one"', '"one"', '"two"', '"two"']
        times = [at for at, _, _ in vendor.asked]
        assert [round(b - a) for a, b in pairwise(times[:3])] == [60, 60]

    run_virtual(main())


def test_a_server_that_says_when_to_come_again_is_not_asked_before() -> None:
    """Whatever `every` says."""

    async def main() -> None:
        busy = [httpx.Response(503, headers={"Retry-After": "600"}) for _ in range(2)]
        vendor = Vendor(*busy, httpx.Response(200, json=[1]))
        source = poll(vendor.client, "https://vendor.example/orders", every=1.0)
        start = now()
        assert await take(source, 1) == [[1]]
        assert now() - start >= 600
        await source.close()
        await vendor.client.aclose()

    run_virtual(main())


def test_pages_are_followed_and_their_items_come_one_by_one() -> None:
    """The next page at once; the last one is asked again later."""

    async def main() -> None:
        vendor = Vendor(
            httpx.Response(200, json={"orders": [1, 2], "next": "https://vendor.example/2"}),
            httpx.Response(200, json={"orders": [3]}),
            httpx.Response(200, json={"orders": []}),
            httpx.Response(200, json={"orders": [4]}),
        )
        source = poll(
            vendor.client,
            "https://vendor.example/1",
            every=5.0,
            items=lambda response: response.json()["orders"],
            following=lambda response: response.json().get("next"),
        )
        start = now()
        assert await take(source, 3) == [1, 2, 3]
        assert now() - start < 1
        assert await take(source, 1) == [4]
        await source.close()
        await vendor.client.aclose()
        assert [path for _, path, _ in vendor.asked] == ["/1", "/2", "/2", "/2"]

    run_virtual(main())


def test_an_answer_that_cannot_be_read_is_a_dead_letter() -> None:
    """And the next one is an item: one bad answer does not end the run."""

    async def main() -> None:
        vendor = Vendor(httpx.Response(200, text="<html>"), httpx.Response(200, json={"n": 1}))
        pipeline = Pipeline("p")
        stored: list[Any] = []

        def store(value: Any) -> None:
            stored.append(value)
            pipeline.stop(0.0)

        pipeline.read(poll(vendor.client, "https://vendor.example/x")).sink(store)
        await pipeline.run()
        await vendor.client.aclose()
        assert stored == [{"n": 1}]
        assert pipeline.snapshot()["dead_letter"] == 1

    run_virtual(main())


def test_ids_of_answers_tell_nothing_of_their_urls() -> None:
    """A URL may hold a token, and ids are seen in logs; the same answer has the same id."""

    async def main() -> None:
        ids = []
        for _ in range(2):
            vendor = Vendor(httpx.Response(200, json=[1]))
            source = poll(vendor.client, "https://vendor.example/x?token=secret", name="orders")
            ((_, handle),) = await source.pull(1)
            ids.append(str(handle))
            await source.close()
            await vendor.client.aclose()
        assert ids[0] == ids[1]
        assert "secret" not in ids[0]

    run_virtual(main())
