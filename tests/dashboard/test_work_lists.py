"""Jobs, dead letters and events on the dashboard: listed, opened, retried and dropped."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall._failures import described
from seawall.dashboard import Dashboard
from seawall.dashboard.actions import work_lists
from seawall.dashboard.actions.work_lists import payload_text
from seawall.durable.jobs.jobs import Jobs
from seawall.durable.outbox.outbox import Outbox
from seawall.jobs import LocalQueue
from seawall.pipeline import DatabaseDeadLetters, DeadLetter, MemoryDeadLetters
from seawall.redis import PriorityQueue
from tests.dashboard.app_support import HOME, Browser, get, post
from tests.durable.conftest import opening_by, postgres
from tests.durable.outbox.support import Seen, committed, dispatcher
from tests.durable.postgres import Postgres
from tests.redis.conftest import client, new_store, redis_url, store
from tests.web.support import Answer

__all__ = ["client", "new_store", "postgres", "redis_url", "store"]

Test = Callable[["Page", Any], Awaitable[None]]


def dead_letters(queue: Any, *payloads: Any) -> list[str]:
    """Return the ids of jobs that died, the first to die first."""
    ids = []
    for payload in payloads:
        ids.append(queue.push(payload))
        (claim,) = queue.claim()
        assert queue.nack(claim, reason="SMTPError: no such address", retry=False) == "dead"
    return ids


class Page:
    """What the page of an operator asks for; without a name, that of one who only looks."""

    def __init__(self, kind: str, name: str, operator: str | None = "ann") -> None:
        self.app = Dashboard(local=True, operate=lambda _: operator, pod="here")
        self.browser = Browser(self.app)
        self.named = {"kind": kind, "name": name}

    async def read(self, route: str, **asked: Any) -> Answer:
        query = urlencode(self.named | asked).encode()
        return await get(self.app, f"/{route}", query_string=query)

    async def items(self, **asked: Any) -> list[dict[str, Any]]:
        answer = await self.read("list", **asked)
        assert answer.status == 200, answer.body
        found: list[dict[str, Any]] = answer.json()["items"]
        return found

    async def act(self, act: str, **asked: Any) -> Answer:
        if not self.browser.token:
            await self.browser.open()
        return await self.browser.act(self.named | {"act": act} | asked, "/work")


# --- Of every source ---


@asynccontextmanager
async def in_a_queue(queue: Any) -> AsyncIterator[tuple[str, Any, str, int]]:
    """Give a queue with three dead letters: its kind, itself, their state, their number."""
    await asyncio.to_thread(dead_letters, queue, *({"n": n} for n in range(3)))
    yield "queue", queue, "dead", 3


@asynccontextmanager
async def in_a_database(opening: Any, kind: str) -> AsyncIterator[tuple[str, Any, str, int]]:
    """Give jobs that failed, or events that died."""
    async with opening() as database:
        if kind == "jobs":
            jobs = Jobs(database)
            for n in range(3):
                await jobs.asubmit(None, "mail", {"n": n}, scope="acme")
            for claim in await jobs.aclaim(["mail"], 3, owner="w"):
                await jobs.afail(claim, "SMTPError: no such address", retry=False)
            yield "jobs", jobs, "failed", 3
            return
        outbox, sink = Outbox(database), Seen()
        sink.poison = {"1"}
        await committed(outbox, *(("order", "1", "mail", {"n": n}) for n in range(3)))
        await dispatcher(outbox, sink.each, attempts=1, poison="skip").drain()
        yield "outbox", outbox, "dead", 3


@asynccontextmanager
async def of_a_pipeline(letters: Any) -> AsyncIterator[tuple[str, Any, str, int]]:
    """Give three items that a stage has set aside."""
    for n in range(3):
        cause = "SMTPError: no such address"
        await letters.aadd(DeadLetter(f"mails:{n}", {"n": n}, "send", cause, 2, float(n)))
    yield "dead_letters", letters, "dead", 3


@asynccontextmanager
async def of_a_stored_pipeline(opening: Any) -> AsyncIterator[tuple[str, Any, str, int]]:
    """Give the same in a database."""
    async with opening() as database, of_a_pipeline(DatabaseDeadLetters(database, "mails")) as made:
        yield made


ATTEMPTED = ["local", "valkey", "jobs asyncpg", "jobs sqlite", "outbox asyncpg", "outbox sqlite"]
"""They keep the traceback of the last attempt."""
SOURCES = [*ATTEMPTED, "letters", "letters asyncpg", "letters sqlite"]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a context manager that gives one of the things that can be looked through."""
    word, _, driver = request.param.partition(" ")
    if word == "local":
        return in_a_queue(LocalQueue("mails"))
    if word == "valkey":
        return in_a_queue(PriorityQueue(request.getfixturevalue("store"), "mails"))
    if request.param == "letters":
        return of_a_pipeline(MemoryDeadLetters("mails"))
    server: Any = None if driver == "sqlite" else request.getfixturevalue("postgres")
    opening = opening_by(driver, server, tmp_path)
    return of_a_stored_pipeline(opening) if word == "letters" else in_a_database(opening, word)


def test_an_operator_works_through_a_list(source: Any):
    """It is listed, searched, opened; one is retried, one dropped, and each act happens once."""

    async def main() -> None:
        async with source as (kind, things, state, count):
            page = Page(kind, things.name)
            (listed,) = (await page.read("lists")).json()["lists"]
            assert (listed["kind"], listed["name"]) == (kind, things.name)
            assert listed["states"][0] == state
            items = await page.items(state=state)
            assert len(items) == count
            found = await page.items(state=state, search=items[1]["id"].upper())
            assert [item["id"] for item in found] == [items[1]["id"]]
            assert await page.items(state=state, search="nowhere") == []
            opened = (await page.read("item", id=items[0]["id"])).json()["item"]
            assert (opened["state"], opened["cut"]) == (state, False)
            assert json.loads(opened["payload"]).keys() == {"n"}
            assert opened["error"]
            for act, item in (("retry", items[0]), ("drop", items[1])):
                twice = await asyncio.gather(*(page.act(act, ids=[item["id"]]) for _ in range(2)))
                assert [answer.status for answer in twice] == [200, 200]
                assert sorted(answer.json()["done"] for answer in twice) == [0, 1]
            left = await page.items(state=state)
            assert [item["id"] for item in left] == [items[2]["id"]]
            gone = await page.read("item", id=items[1]["id"])
            assert gone.status == 404

    asyncio.run(main())


def test_all_that_match_are_acted_on(source: Any):
    """A page of them at a time: the answer says how many, and from where to go on."""

    async def main() -> None:
        async with source as (kind, things, state, count):
            page = Page(kind, things.name)
            none = await page.act("drop", state=state, search="nowhere")
            assert none.json() == {"done": 0, "of": 0, "next": None, "problem": ""}
            done = (await page.act("drop", state=state)).json()
            assert done == {"done": count, "of": count, "next": None, "problem": ""}
            assert await page.items(state=state) == []

    asyncio.run(main())


def test_those_who_only_look_see_no_payload(source: Any):
    """They list and open, and learn nothing of payloads, not even by a search; and cannot act."""

    async def main() -> None:
        async with source as (kind, things, state, count):
            page = Page(kind, things.name, operator=None)
            items = await page.items(state=state)
            assert [item["preview"] for item in items] == [None] * count
            opened = (await page.read("item", id=items[0]["id"])).json()["item"]
            assert (opened["payload"], opened["id"]) == (None, items[0]["id"])
            assert await page.items(state=state, search='"n"') == []
            refused = await page.act("drop", ids=[items[0]["id"]])
            assert refused.status == 403
            assert len(await page.items(state=state)) == count

    asyncio.run(main())


def test_hostile_names_and_ids_reach_nothing(source: Any):
    """They are refused, or name nothing; nothing raises, and nothing is done."""

    async def main() -> None:
        async with source as (kind, things, state, count):
            page = Page(kind, things.name)
            for id_ in ("'; DROP TABLE jobs; --", "../../etc", "*", "%", "0" * 501, "", "é\u202e"):
                seen = await page.read("item", id=id_)
                assert seen.status in (404, 422), id_
                done = await page.act("drop", ids=[id_])
                assert done.status == 422 or done.json()["done"] == 0, id_
            for id_ in ("\ud800", "a\0", "a\nb", 5, None, ["x"], {}):
                assert (await page.act("retry", ids=[id_])).status == 422
            for asked in (
                {"after": "x"},
                {"after": "9" * 30 + ":x"},
                {"state": "nothing"},
                {"search": "x" * 201},
                {"search": "\0"},
            ):
                assert (await page.read("list", **asked)).status == 422, asked
            for named in ({"name": "other"}, {"kind": "guard"}, {"kind": "__class__"}):
                assert (await page.read("list", **named)).status == 404
                assert (await page.act("drop", ids=["x"], **named)).status == 404
            assert len(await page.items(state=state)) == count

    asyncio.run(main())


# --- Of one ---


def test_pages_go_on_from_each_other():
    """Fifty at a time, each once; and an act on all goes on by a hundred."""

    async def main() -> None:
        queue = LocalQueue("mails")
        ids = dead_letters(queue, *range(230))
        page = Page("queue", "mails")
        found: list[str] = []
        after = ""
        while after is not None:
            answer = (await page.read("list", after=after)).json()
            assert len(answer["items"]) <= 50
            found += [item["id"] for item in answer["items"]]
            after = answer["next"]
        assert found == ids[::-1]
        counts = []
        after = None
        while True:
            told = (await page.act("retry", state="dead", after=after)).json()
            counts.append(told["done"])
            after = told["next"]
            if after is None:
                break
        assert counts == [100, 100, 30]
        assert queue.snapshot()["waiting"] == 230

    asyncio.run(main())


@pytest.mark.parametrize("source", ATTEMPTED, indirect=True)
def test_the_traceback_of_the_last_attempt_is_shown(source: Any):
    """Below the error, on lines of its own, of whatever keeps it; a secret in it is hidden."""

    async def main() -> None:
        async with source as (kind, things, state, _count):
            page = Page(kind, things.name)
            error = raised("token=hunter2 is not accepted")
            if kind == "queue":
                await things.apush("one more")
                (claim,) = await things.aclaim()
                await things.anack(claim, reason=error, retry=False)
            elif kind == "jobs":
                await things.asubmit(None, "mail", scope="acme")
                (claim,) = await things.aclaim(["mail"], owner="w")
                await things.afail(claim, error, retry=False)
            else:

                async def fails(_event: Any) -> None:
                    raise error

                await committed(things, ("order", "2", "mail", 1))
                await dispatcher(things, fails, attempts=1, poison="skip").drain()
            found = await page.items(state=state, search="is not accepted")
            (item,) = found or await page.items(state=state, search="ValueError: token")
            assert "\n" not in item["error"]
            opened = (await page.read("item", id=item["id"])).json()["item"]
            assert opened["error"].startswith("ValueError: token=***")
            trace = opened["traceback"].split("\n")
            assert trace[0] == "Traceback (most recent call last):"
            assert any("in raised" in line for line in trace)
            assert "hunter2" not in json.dumps(opened)

    asyncio.run(main())


@pytest.mark.parametrize("operator", ["ann", None])
def test_a_search_finds_no_secret_of_an_error(
    source: Any, operator: str | None, caplog: pytest.LogCaptureFixture
):
    """It is not stored: no search guesses it, letter by letter, and no log line has it."""

    async def main() -> None:
        async with source as (kind, things, state, _count):
            said = "no login at postgres://bob:hunter2@db/x,\npassword=hunter2"
            if kind == "queue":
                await things.apush("one more")
                (claim,) = await things.aclaim()
                await things.anack(claim, reason=said, retry=False)
            elif kind == "jobs":
                await things.asubmit(None, "mail", scope="acme")
                (claim,) = await things.aclaim(["mail"], owner="w")
                await things.afail(claim, said, retry=False)
            elif kind == "dead_letters":
                cause = described(OSError(said))  # as a pipeline writes it
                await things.aadd(DeadLetter("mails:9", 1, "send", cause, 1, 0.0))
            else:

                async def fails(_event: Any) -> None:
                    raise OSError(said)

                await committed(things, ("order", "2", "mail", 1))
                await dispatcher(things, fails, attempts=1, poison="skip").drain()
            page = Page(kind, things.name, operator)
            (item,) = await page.items(state=state, search="no login at")
            opened = (await page.read("item", id=item["id"])).json()["item"]
            assert "postgres://db/..." in opened["error"]
            assert "hunter2" not in json.dumps(opened)
            for guess in ("hunter2", "password=h", "bob:"):
                assert await page.items(state=state, search=guess) == []

    asyncio.run(main())
    assert "hunter2" not in caplog.text


def raised(text: str) -> ValueError:
    """Return an error that has a traceback."""
    with pytest.raises(ValueError, match="token") as caught:
        raise ValueError(text)
    return caught.value


def test_what_dies_again_is_not_retried_again_by_the_same_press():
    """A press on all goes from the latest to the oldest, and ends, however fast jobs die."""

    async def main() -> None:
        queue = LocalQueue("mails", max_attempts=1)
        dead_letters(queue, *range(250))
        page = Page("queue", "mails")
        retried, after = 0, None
        for _ in range(10):
            told = (await page.act("retry", state="dead", after=after)).json()
            retried += told["done"]
            for claim in queue.claim(500):
                assert queue.nack(claim, reason="again") == "dead"
            after = told["next"]
            if after is None:
                break
        assert retried == 250
        assert queue.snapshot()["dead"] == 250

    asyncio.run(main())


def test_a_search_goes_on_until_the_page_is_full():
    """What one call of the queue does not look at is looked at by the next, within bounds."""

    async def main() -> None:
        queue = LocalQueue("mails")
        (needle,) = dead_letters(queue, "needle")
        dead_letters(queue, *range(500))
        page = Page("queue", "mails")
        answer = (await page.read("list", search="NEEDLE")).json()
        assert ([item["id"] for item in answer["items"]], answer["next"]) == ([needle], None)

    asyncio.run(main())


def test_no_act_without_the_token():
    """Another site's page has neither token nor origin: nothing happens, whatever it names."""

    async def main() -> None:
        queue = LocalQueue("mails")
        (id_,) = dead_letters(queue, 1)
        page = Page("queue", "mails")
        await page.browser.open()
        body = {"kind": "queue", "name": "mails", "act": "drop", "ids": [id_]}
        for wrong in (
            {"x-seawall-token": "0" * 64},
            {"cookie": ""},
            {"origin": "http://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"content-type": "text/plain"},
        ):
            headers = page.browser.headers | wrong
            answer = await post(page.app, "/work", body, headers.items())
            assert answer.status in (403, 415), wrong
        for route in ("lists", "list", "item"):
            seen = await get(page.app, f"/{route}", ("sec-fetch-site", "cross-site"))
            assert seen.status == 403
            posted = await post(page.app, f"/{route}", {}, page.browser.headers.items())
            assert posted.status == 405
        assert (await get(page.app, "/work")).status == 405
        assert [letter.id for letter in queue.dead()] == [id_]

    asyncio.run(main())


def test_nobody_reads_whom_allow_does_not_let_in():
    """The lists are behind the same door as the page."""

    async def main() -> None:
        queue = LocalQueue("mails")
        dead_letters(queue, 1)
        app = Dashboard(allow=lambda _: False)
        for route in ("lists", "list", "item"):
            assert (await get(app, f"/{route}", HOME)).status == 403

    asyncio.run(main())


def test_an_act_is_logged_with_who_did_it(caplog: pytest.LogCaptureFixture):
    """One line that names the operator, the list and the ids; none for what had no effect."""

    async def main() -> None:
        queue = LocalQueue("a\nname")
        ids = dead_letters(queue, 1, 2)
        page = Page("queue", "a\nname")
        with caplog.at_level(logging.WARNING, logger="seawall.dashboard"):
            await page.act("drop", ids=[*ids, ids[0]])
            await page.act("drop", ids=ids)
        (record,) = [one for one in caplog.records if one.name == "seawall.dashboard"]
        assert "'ann'" in record.getMessage()
        assert "drop to 2 of queue 'a\\nname'" in record.getMessage()
        assert all(id_ in record.getMessage() for id_ in ids)
        assert "\n" not in record.getMessage()
        assert (record.seawall_operator, record.seawall_act) == ("ann", "drop")

    asyncio.run(main())


def test_what_was_done_before_a_failure_is_told_and_logged(caplog: pytest.LogCaptureFixture):
    """The store is lost in the middle: the answer says how many were done, and why not all."""

    async def main() -> None:
        queue = LocalQueue("mails")
        ids = dead_letters(queue, 1, 2, 3)
        whole, dropped = queue.adrop, list[str]()

        async def fails(id_: str) -> bool:
            if dropped:
                raise ConnectionError("redis://me:hunter2@host is gone")
            dropped.append(id_)
            return await whole(id_)

        queue.adrop = fails  # type: ignore[method-assign]
        page = Page("queue", "mails")
        with caplog.at_level(logging.WARNING, logger="seawall.dashboard"):
            told = (await page.act("drop", state="dead")).json()
            assert (told["done"], told["next"]) == (1, None)
            assert "could not be asked" in told["problem"]
            assert (await page.act("drop", ids=ids)).status == 503
        messages = " ".join(record.getMessage() for record in caplog.records)
        assert "drop to 1 of queue" in messages
        assert "hunter2" not in messages

    asyncio.run(main())


def test_a_queue_without_room_says_so():
    """What fits is retried; the rest stays dead."""

    async def main() -> None:
        queue = LocalQueue("mails", max_size=1)
        ids = dead_letters(queue, 1, 2)
        told = (await Page("queue", "mails").act("retry", ids=ids)).json()
        assert (told["done"], told["of"]) == (1, 2)
        assert "no room" in told["problem"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        [],
        None,
        {},
        {"act": [], "ids": ["x"]},
        {"act": {}, "ids": ["x"]},
        {"act": "delete", "ids": ["x"]},
        {"act": "drop"},
        {"act": "drop", "ids": []},
        {"act": "drop", "ids": ["x"] * 101},
        {"act": "drop", "ids": ["x"], "state": "dead"},
        {"act": "drop", "ids": "x"},
        {"act": "drop", "state": 5},
        {"act": "drop", "state": "dead", "search": 5},
        {"act": "drop", "state": "dead", "after": {}},
    ],
)
def test_what_is_no_act_is_refused(body: Any):
    """With words that say what to write."""

    async def main() -> None:
        queue = LocalQueue("mails")
        dead_letters(queue, 1)
        page = Page("queue", "mails")
        await page.browser.open()
        sent = page.named | body if isinstance(body, dict) else body
        answer = await page.browser.act(sent, "/work")
        assert answer.status == 422
        assert answer.json()["detail"]
        assert queue.snapshot()["dead"] == 1

    asyncio.run(main())


def test_lists_of_one_name_are_told_apart(tmp_path: Path, postgres: Postgres):
    """Two databases are two lists; two objects of one database are one."""

    async def main() -> None:
        async with (
            opening_by("sqlite", postgres, tmp_path)() as one,
            opening_by("asyncpg", postgres, tmp_path)() as two,
        ):
            kept = [Outbox(one), Outbox(one), Outbox(two), Jobs(one)]
            lists = (await Page("", "").read("lists")).json()["lists"]
            names = [(told["kind"], told["name"]) for told in lists]
            assert names == [("jobs", "jobs"), ("outbox", "outbox"), ("outbox", "outbox (2)")]
            assert len(kept) == 4

    asyncio.run(main())


def test_counts_are_those_that_are_known_already():
    """Of a local queue at once; of others as they were last asked."""

    async def main() -> None:
        queue = LocalQueue("mails")
        dead_letters(queue, 1, 2)
        queue.push(3)
        (told,) = (await Page("", "").read("lists")).json()["lists"]
        assert told["counts"] == {"dead": 2, "waiting": 1, "delayed": 0, "claimed": 0}

    asyncio.run(main())


# --- What is shown of a payload ---


def test_secrets_are_not_shown():
    """By the names of members, however deep; and what looks like one in a text."""
    payload = {
        "to": "ann",
        "password": "hunter2",
        "login": {"api_key": ["hunter2"], "Token": {"a": "hunter2"}},
        "url": "postgres://me:hunter2@host/x",
        "list": [{"secret": 5}, "Authorization: Bearer hunter2"],
    }
    data = json.dumps(payload).encode()
    text, cut = payload_text(data, len(data))
    assert not cut
    assert "hunter2" not in text
    assert '"to": "ann"' in text
    assert '"secret": "***"' in text
    beginning, cut = payload_text(data[:60], len(data))
    assert cut
    assert "hunter2" not in beginning


@given(st.binary(max_size=300))
def test_any_payload_can_be_shown(payload: bytes):
    """Whatever it is, it is text that can be written as JSON, without control characters."""
    text, _ = payload_text(payload, len(payload))
    assert all(line.isprintable() for line in text.split("\n"))
    json.dumps(text).encode()


@given(st.recursive(st.text(max_size=5) | st.integers() | st.none(), st.lists, max_leaves=5))
def test_any_json_can_be_shown(payload: Any):
    """Deep and odd values, too."""
    data = json.dumps(payload).encode()
    text, _ = payload_text(data, len(data))
    assert text


def test_a_deep_or_long_payload_is_bounded():
    """It ends somewhere, and says so."""
    deep = b"[" * 60 + b"]" * 60
    assert "***" in payload_text(deep, len(deep))[0]
    hollow = b"[" * 100_000
    text, cut = payload_text(hollow, len(hollow))
    assert cut
    assert len(text) <= work_lists.LONGEST_PAYLOAD
