"""State that only a database or a store knows is read only while there are viewers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from seawall import registry
from seawall.dashboard import Dashboard
from seawall.dashboard import sampler as sampler_module
from seawall.durable import Database, Outbox, Sqlite, amigrate
from seawall.durable.jobs.jobs import Jobs
from seawall.testing import run_virtual
from tests.dashboard.app_support import Shown, Viewer, get
from tests.support import let_pass

pytestmark = pytest.mark.usefixtures("nobody_else")


class Kept:
    """A source whose state is in a store and is read as slowly as the test wants."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.asked = self.cancelled = self.now = self.most = 0
        self._seconds = seconds
        registry.enter(self, "kept", "kept", ask="ask", local=False)

    async def ask(self) -> None:
        self.asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await let_pass(self._seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.now -= 1


async def _outbox_as_shown(folder: Path, looks: int) -> Any:
    """Return what one who looks for a while is shown last of an outbox in which one waits."""
    source = Sqlite(folder / "orders.db")
    database = Database(source)
    outbox = Outbox(database, "orders")
    await amigrate(database)
    with database.transaction() as connection:
        outbox.add(connection, "order", "7", "order.made", {})
    app = Dashboard(local=True, every=0.05)
    viewer = Viewer(app)
    shown: Any = {"state": "not asked yet"}
    for _ in range(looks):
        await let_pass(0.05)
        for message in viewer.events:
            for row in message["views"][0]["sections"].get("Outbox and jobs", []):
                shown = row if row["kind"] == "outbox" else shown
        if shown["state"] != "not asked yet":
            break
    await viewer.leave()
    await app.aclose()
    source.close()
    return shown


def test_the_age_of_an_outbox_is_seen_though_nobody_else_asks(tmp_path: Path):
    """A viewer sees the outbox's backlog in the database, and its age."""
    shown = asyncio.run(_outbox_as_shown(tmp_path, looks=200))
    assert shown["state"] == "1 waiting"
    assert "oldest" in dict(shown["facts"])


def test_without_asking_the_age_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is by asking that it is seen: a sample alone asks no database."""
    monkeypatch.setattr(sampler_module.StoreQueries, "ask", lambda _self: None)
    assert asyncio.run(_outbox_as_shown(tmp_path, looks=10))["state"] == "not asked yet"


def test_the_first_state_of_all_knows_what_a_database_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A script that looks once has no second look: it waits for one round of questions."""
    monkeypatch.setattr(
        sampler_module, "WITHIN", 60.0
    )  # no limit of time, on however slow a machine

    async def main() -> None:
        source = Sqlite(tmp_path / "orders.db")
        database = Database(source)
        jobs = Jobs(database)
        await amigrate(database)
        await jobs.asubmit(None, "mail", scope="acme")
        (claim,) = await jobs.aclaim(["mail"], owner="w")
        await jobs.afail(claim, "no such address", retry=False)
        app = Dashboard(local=True)
        told = (await get(app, "/state")).json()
        assert [one["what"] for one in told["troubles"]] == ["Given up: 1 of the jobs"]
        assert told["verdict"]["tone"] == "warn"
        await app.aclose()
        source.close()

    asyncio.run(main())


def test_a_state_waits_for_answers_but_not_for_long():
    """It has those that come within two seconds; later looks wait for no round that is over."""

    async def main(seconds: float) -> tuple[list[float], int]:
        kept, app, took = Kept(seconds), Shown(every=1.0), []
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            assert (await get(app, "/state")).status == 200
            took.append(asyncio.get_running_loop().time() - began)
        await app.aclose()
        return took, kept.asked

    assert run_virtual(main(0.5)) == ([pytest.approx(0.5), 0.0], 1)
    assert run_virtual(main(60.0)) == ([pytest.approx(sampler_module.WITHIN), 0.0], 1)


def test_a_state_during_a_sample_waits_for_the_next_one():
    """The sample under way was taken before the answers came."""

    async def main() -> None:
        sampled: list[int] = []
        kept = Kept(seconds=0.5)

        class Slow(Shown):
            async def _extra(self) -> dict[str, int]:
                answered = kept.asked - kept.now
                await let_pass(0.8)
                sampled.append(answered)
                return {"answered": answered}

        app = Slow(every=5.0)
        assert (await get(app, "/state")).json()["extra"] == {"answered": 1}
        assert sampled == [0, 1]
        await app.aclose()

    run_virtual(main())


def test_while_nobody_looks_nobody_is_asked():
    """A dashboard that is on costs a database nothing; one that is looked at, a round each 5 s."""

    async def main() -> None:
        kept, app = Kept(), Shown()
        async with app:
            await let_pass(30.0)
            assert kept.asked == 0
            viewer = Viewer(app)
            await let_pass(20.5)
            assert kept.asked == 4
            await viewer.leave()
            await let_pass(sampler_module.LOOKED_AT + 2.0)
            asked = kept.asked
            await let_pass(30.0)
            assert kept.asked == asked

    run_virtual(main())


def test_no_two_rounds_at_once_and_samples_go_on():
    """A database that does not answer is asked by one task at a time, and delays no message."""

    async def main() -> None:
        kept, app = Kept(seconds=60.0), Shown(every=1.0)
        viewer = Viewer(app)
        await let_pass(30.5)
        assert len(viewer.events) == 31
        assert kept.most == 1
        assert kept.asked >= 30.0 // sampler_module.EVERY
        await viewer.leave()
        await app.aclose()

    run_virtual(main())


def test_the_end_cuts_a_question_off():
    """A service that stops does not wait for a database."""

    async def main() -> None:
        kept, app = Kept(seconds=60.0), Shown()
        viewer = Viewer(app)
        await let_pass(0.5)
        assert (kept.asked, kept.now) == (1, 1)
        await app.aclose()
        assert (kept.cancelled, kept.now) == (1, 0)
        await viewer.task

    run_virtual(main())


def test_with_nothing_to_ask_there_is_no_task(monkeypatch: pytest.MonkeyPatch):
    """A service without a store or a database starts no task for reading."""
    asked: list[Any] = []
    monkeypatch.setattr(sampler_module, "arefresh", lambda **_: asked.append(1))
    monkeypatch.setattr(registry, "entered", list)

    async def main() -> None:
        viewer = Viewer(Shown())
        await let_pass(12.0)
        await viewer.leave()

    run_virtual(main())
    assert asked == []
