"""Jobs and events that an operator lists, opens, retries and drops, in every database."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seawall.durable import Database, Idempotency, Sqlite
from seawall.durable.jobs.jobs import Jobs
from seawall.durable.outbox.outbox import Outbox
from seawall.errors import JobExpired, UnknownJob
from seawall.jobs import WorkItem
from seawall.jobs import work_list as _work_list
from seawall.jobs.work_list import PREVIEW
from tests.durable.conftest import Opening
from tests.durable.outbox.support import Seen, Time, committed, dispatcher, timed

ODD = "100%_of ! 'these' \\ ä"


async def all_of(things: Any, state: str, **asked: Any) -> list[WorkItem]:
    """Return every page of a list, one behind the other."""
    found: list[WorkItem] = []
    after = None
    while True:
        page = await things.abrowse(state, after=after, **asked)
        found += page.items
        after = page.next
        if after is None:
            return found


async def failed_jobs(jobs: Jobs, time: Time, count: int) -> list[str]:
    """Return the ids of jobs that failed, the first to fail first."""
    for number in range(count):
        await time.pass_by(1.0)
        await jobs.asubmit(None, "mail", {"n": number, "to": f"ann{number}@home"}, scope="acme")
    ids = []
    while claims := await jobs.aclaim(["mail"], 10, owner="w"):
        for claim in claims:
            await time.pass_by(1.0)
            error = f"SMTPError: no {claim.payload['n']}"
            assert await jobs.afail(claim, error, retry=False) == "failed"
            ids.append(claim.id)
    return ids


def test_failed_jobs_are_listed_a_page_at_a_time(opening: Opening):
    """The latest first, each once, whatever comes or goes meanwhile; each as it is."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            jobs = Jobs(outbox.database)
            ids = await failed_jobs(jobs, time, 7)
            page = await jobs.abrowse(limit=3)
            assert [item.id for item in page.items] == ids[:-4:-1]
            first = page.items[0]
            assert (first.kind, first.owner, first.state) == ("mail", "acme", "failed")
            assert (first.attempts, first.acts) == (1, ("retry", "drop"))
            assert first.error == "SMTPError: no 6"
            assert first.payload == b'{"n":6,"to":"ann6@home"}'
            assert first.size == len(first.payload)
            await jobs.adrop(ids[4])  # the last that was seen
            await failed_jobs(jobs, time, 1)
            page = await jobs.abrowse(limit=3, after=page.next)
            assert [item.id for item in page.items] == ids[3:0:-1]
            page = await jobs.abrowse(limit=3, after=page.next)
            assert ([item.id for item in page.items], page.next) == (ids[:1], None)

    asyncio.run(main())


def test_jobs_are_found_by_a_text(opening: Opening):
    """In id, kind, scope, error and payload, as it is written; some at a time where there are many.

    Without payloads these are neither read nor searched.
    """

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            jobs = Jobs(outbox.database)
            ids = await failed_jobs(jobs, time, 5)
            odd = await jobs.asubmit(None, "mail", {"text": ODD}, scope="other")
            await time.pass_by(1.0)
            (claim,) = await jobs.aclaim(["mail"], owner="w")
            await jobs.afail(claim, "boom", retry=False)
            for search, wanted in (
                ("smtperror: NO 3", [ids[3]]),
                ("ANN2@", [ids[2]]),
                (ids[1], [ids[1]]),
                ("OTHER", [odd.id]),
                ("0%_OF !", [odd.id]),
                ("_____", []),
                ("%", [odd.id]),
                ("'; DROP TABLE", []),
                ("mail", [odd.id, *ids[::-1]]),
            ):
                found = await all_of(jobs, "failed", search=search, limit=2)
                assert [item.id for item in found] == wanted, search
            assert await all_of(jobs, "failed", search="ann2@", payloads=False) == []
            hidden = await all_of(jobs, "failed", search="no 2", payloads=False)
            assert [(item.id, item.payload) for item in hidden] == [(ids[2], b"")]

    asyncio.run(main())


def test_a_search_looks_at_some_and_goes_on_from_there(opening: Opening):
    """However many there are that do not match, one page looks at 200 of them."""

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database, max_size=None)
            async with asyncio.timeout(60):
                for number in range(410):
                    await jobs.asubmit(None, "mail", number, scope="acme")
            page = await jobs.abrowse("queued", search="nowhere")
            assert (page.items, page.next is not None) == ([], True)
            pages = 1
            while page.next is not None:
                page = await jobs.abrowse("queued", search="nowhere", after=page.next)
                pages += 1
            assert pages == 3
            assert len(await all_of(jobs, "queued", limit=100)) == 410

    asyncio.run(main())


def test_an_operator_retries_a_job_once(opening: Opening):
    """It has all its attempts again; said twice, it is done once. What runs is left alone."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            jobs = Jobs(outbox.database, attempts=1)
            (id_,) = await failed_jobs(jobs, time, 1)
            done = await asyncio.gather(*(jobs.aretry(id_) for _ in range(5)))
            assert sorted(done) == [False] * 4 + [True]
            assert (await jobs.aget(id_, scope="acme")).attempts == 0
            (claim,) = await jobs.aclaim(["mail"], owner="w")
            assert not await jobs.aretry(id_)
            assert await jobs.asucceed(claim, "sent")
            assert not await jobs.aretry(id_)
            assert not await jobs.adrop(id_)
            assert (await jobs.aget(id_, scope="acme")).result == "sent"
            for unknown in ("0" * 8 + "-0000" * 3 + "-" + "0" * 12, "nothing", "", "'--"):
                assert not await jobs.aretry(unknown)
                assert not await jobs.adrop(unknown)
                assert await jobs.ainspect(unknown) is None

    asyncio.run(main())


def test_an_operator_drops_a_job(opening: Opening):
    """One that failed is forgotten, with its payload; one that waits or runs is cancelled."""

    async def main() -> None:
        async with timed(opening) as (outbox, time):
            jobs = Jobs(outbox.database)
            (failed,) = await failed_jobs(jobs, time, 1)
            assert await jobs.adrop(failed)
            assert not await jobs.adrop(failed)
            assert not await jobs.aretry(failed)
            with pytest.raises((JobExpired, UnknownJob)):
                await jobs.aget(failed, scope="acme")
            waiting = await jobs.asubmit(None, "mail", scope="acme")
            (item,) = (await jobs.abrowse("queued")).items
            assert (item.id, item.acts) == (waiting.id, ("drop",))
            assert await jobs.adrop(waiting.id)
            assert not await jobs.adrop(waiting.id)
            (item,) = (await jobs.abrowse("cancelled")).items
            assert (item.id, item.acts) == (waiting.id, ())
            running = await jobs.asubmit(None, "mail", scope="acme")
            (claim,) = await jobs.aclaim(["mail"], owner="w")
            assert await jobs.adrop(running.id)
            seen = await jobs.aget(running.id, scope="acme")
            assert (seen.state, seen.cancelling) == ("running", True)
            assert await jobs.afail(claim, "stopped") == "cancelled"

    asyncio.run(main())


def test_a_long_payload_is_cut(opening: Opening, monkeypatch: pytest.MonkeyPatch):
    """A list has the beginning of it; opened, it has more, and never all of something huge."""
    monkeypatch.setattr("seawall.durable.jobs.jobs.OPENED", 2000)

    async def main() -> None:
        async with opening() as database:
            jobs = Jobs(database)
            job = await jobs.asubmit(None, "mail", "x" * 5000, scope="acme")
            (item,) = (await jobs.abrowse("queued")).items
            assert (len(item.payload), item.size) == (PREVIEW, 5002)
            opened = await jobs.ainspect(job.id)
            assert opened is not None
            assert len(opened.payload) == 2000
            bare = await jobs.ainspect(job.id, payload=False)
            assert bare is not None
            assert bare.payload == b""

    asyncio.run(main())


async def troubled(outbox: Outbox, poison: str) -> tuple[Seen, Any]:
    """Commit events of three orders, of which the first of order 2 is not taken; dispatch them."""
    sink = Seen()
    sink.poison = {"2"}
    await committed(
        outbox,
        ("order", "1", "paid", {"n": 1}),
        ("order", "2", "paid", {"n": 2}),
        ("order", "2", "sent", {"n": 3}),
        ("order", "3", "paid", b"\xff\0"),
    )
    return sink, dispatcher(outbox, sink.each, attempts=1, poison=poison)


def test_dead_events_are_listed_retried_and_dropped(opening: Opening):
    """The latest first; each act happens once."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            sink, sending = await troubled(outbox, "skip")
            await sending.drain()
            items = await all_of(outbox, "dead", limit=1)
            assert {item.kind for item in items} == {"paid", "sent"}
            assert {(item.owner, item.state) for item in items} == {("order 2", "dead")}
            assert all("poison" in item.error for item in items)
            found = await all_of(outbox, "dead", search="SENT")
            assert [item.payload for item in found] == [b'{"n":3}']
            assert await all_of(outbox, "dead", search="nothing") == []
            paid, sent = sorted(items, key=lambda item: item.kind)
            done = await asyncio.gather(*(outbox.aretry(paid.id) for _ in range(4)))
            assert sorted(done) == [False, False, False, True]
            assert await outbox.adrop(sent.id)
            assert not await outbox.adrop(sent.id)
            assert not await outbox.aretry(sent.id)
            assert (await outbox.abrowse("dead")).items == []
            (waiting,) = (await outbox.abrowse("waiting")).items
            assert (waiting.id, waiting.acts) == (paid.id, ())
            assert not await outbox.adrop(paid.id)  # numbers without gaps: it is delivered
            sink.poison = set()
            await sending.drain()
            assert sink.of("2") == [3]

    asyncio.run(main())


@pytest.mark.parametrize("act", ["retry", "drop"])
def test_an_event_that_blocks_its_aggregate(opening: Opening, act: str):
    """It is tried again, or deleted; then the events behind it go on, in their order."""

    async def main() -> None:
        async with timed(opening) as (outbox, _time):
            sink, sending = await troubled(outbox, "block")
            await sending.drain()
            (item,) = (await outbox.abrowse("blocked")).items
            assert (item.kind, item.owner, item.attempts) == ("paid", "order 2", 1)
            assert item.acts == ("retry", "drop")
            opened = await outbox.ainspect(item.id)
            assert opened is not None
            assert (opened.state, opened.payload) == ("blocked", b'{"n":2}')
            waiting = (await outbox.abrowse("waiting")).items
            assert [(one.kind, one.state) for one in waiting] == [
                ("paid", "blocked"),
                ("sent", "waiting"),
            ]
            assert not await outbox.aretry(waiting[1].id)
            assert not await outbox.adrop(waiting[1].id)
            sink.poison = set()
            does = outbox.aretry if act == "retry" else outbox.adrop
            assert await does(item.id)
            assert not await does(item.id)
            await sending.drain()
            assert sink.of("2") == ([1, 2] if act == "retry" else [2])
            assert (await outbox.asurvey()) | {"oldest_age": 0} == {
                "pending": 0,
                "oldest_age": 0,
                "dead": 0,
                "blocked": 0,
            }

    asyncio.run(main())


def test_waiting_events_are_paged_by_aggregate(opening: Opening):
    """Each once, in the order of delivery."""

    async def main() -> None:
        async with opening() as database:
            outbox = Outbox(database)
            await committed(outbox, *(("order", str(n % 3), "moved", n) for n in range(9)))
            items = await all_of(outbox, "waiting", limit=2)
            assert [item.payload for item in items] == [
                str(n).encode() for n in (0, 3, 6, 1, 4, 7, 2, 5, 8)
            ]
            with pytest.raises(ValueError, match="of the page before"):
                await outbox.abrowse("waiting", after="1:a")

    asyncio.run(main())


def test_what_a_list_is_asked_for_is_checked(opening: Opening):
    """Hostile and mistaken arguments are refused before the database is asked."""

    async def main() -> None:
        async with opening() as database:
            for things in (Jobs(database), Outbox(database)):
                for wrong, message in (
                    ({"state": "no"}, "write one of"),
                    ({"search": "x" * 201}, "at most 200"),
                    ({"search": "a\0"}, "NUL"),
                    ({"search": "\ud800"}, "surrogates"),
                    ({"after": "x"}, "of the page before"),
                    ({"after": "1:a\n"}, "of the page before"),
                    ({"after": f"{10**18}:a"}, "of the page before"),
                    ({"limit": 0}, "write"),
                    ({"limit": 101}, "write"),
                ):
                    with pytest.raises(ValueError, match=message):
                        await things.abrowse(**wrong)

    asyncio.run(main())


def test_the_bounds_of_a_page_are_what_the_documentation_says():
    """A hundred items, 200 characters."""
    assert (_work_list.MOST_LISTED, _work_list.LONGEST_SEARCH) == (100, 200)


def test_a_mistake_is_told_without_asking_the_database(tmp_path: Path):
    """A wrong argument raises also during an outage of the database."""
    database = Database(Sqlite(tmp_path / "missing" / "lists.db"), name="away")
    for things in (Jobs(database), Outbox(database)):
        with pytest.raises(ValueError, match="state='whatever'"):
            things.browse("whatever")
    with pytest.raises(ValueError, match="operation"):
        Idempotency(database).lookup("acme", "", "a key")
