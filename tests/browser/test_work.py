"""Jobs, dead letters and events on the page, in a real browser.

`SEAWALL_SCREENSHOT=1 ./dev test tests/browser/test_work.py` makes its picture anew.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import pytest

from seawall import registry
from seawall.durable import Database, Outbox, Sqlite, migrate
from seawall.durable.jobs.jobs import Jobs
from seawall.jobs import LocalQueue
from tests.browser.service import Service, as_operator, focused, running, sideways, until_live

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opening = Callable[..., "Page"]

ROOT: Final = Path(__file__).parents[2]
KEPT: Final = ROOT / "docs" / "operate" / "dead-letters.png"
KEEP: Final = os.environ.get("SEAWALL_SCREENSHOT") == "1"
HOSTILE: Final = "<img src=x onerror=window.hacked=1>"
ERRORS: Final = (
    "SMTPRecipientsRefused: 550 5.1.1 no such user",
    "ConnectTimeout: smtp.example did not answer in 5 s",
    "KeyError: 'template'",
)


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """Return a service whose process has no queue but those of this test."""
    monkeypatch.setattr(registry, "_entries", WeakKeyDictionary())
    with running() as made:
        yield made


@pytest.fixture
def queue(service: Service) -> LocalQueue:  # noqa: ARG001 - it empties the registry first
    """Return a queue with three dead letters, one of which means harm."""
    queue = LocalQueue("mails", max_attempts=3)
    died(queue, {"to": "ann@example.com", "password": "hunter2"}, ERRORS[0])
    died(queue, {"to": HOSTILE}, HOSTILE)
    died(queue, {"to": "bob@example.com", "template": "welcome"}, ERRORS[2])
    return queue


HANDLER: Final = """\
def send(mail, smtp):
    body = TEMPLATES[mail["template"]]
    return smtp.sendmail(mail["to"], body, timeout=5)
"""


class ConnectTimeout(Exception):
    """The error of a mail server that does not answer."""


def raised() -> ConnectTimeout:
    """Return the error of a handler, with a traceback that looks the same on every machine."""

    class Smtp:
        def __getattr__(self, _name: str) -> Any:
            raise ConnectTimeout("smtp.example did not answer in 5 s")

    file = "app/mails.py"
    linecache.cache[file] = (len(HANDLER), None, HANDLER.splitlines(keepends=True), file)
    names: dict[str, Any] = {"TEMPLATES": {"receipt": ""}}
    exec(compile(HANDLER, file, "exec"), names)  # noqa: S102 - the text above
    try:
        names["send"]({"to": "ann", "template": "receipt"}, Smtp())
    except ConnectTimeout as error:
        step = error.__traceback__
        assert step is not None
        assert step.tb_next is not None
        step.tb_next.tb_next = None  # without the frame of this file
        return error.with_traceback(step.tb_next)
    raise AssertionError


def died(queue: LocalQueue, payload: Any, error: str | BaseException) -> str:
    """Let a job die, and return its id."""
    id_ = queue.push(payload)
    (claim,) = queue.claim()
    assert queue.nack(claim, reason=error, retry=False) == "dead"
    return id_


def opened(open_page: Opening, service: Service, *, operator: bool = True, **options: Any) -> Page:
    page = open_page(service.url, **options)
    if operator:
        as_operator(page)
    until_live(page)
    page.locator("#work").wait_for()
    return page


def rows(page: Page) -> Any:
    return page.locator("#work-rows tr")


def until(page: Page, count: int) -> None:
    """Wait until `count` rows are shown."""
    page.wait_for_function(
        "n => document.querySelectorAll('#work-rows tr').length === n", arg=count
    )


def confirm(page: Page) -> str:
    """Answer the question with yes, and return it."""
    dialog = page.locator("#confirm")
    dialog.wait_for()
    text: str = dialog.inner_text()
    page.locator("#confirm-yes").click()
    return text


def test_without_lists_there_is_no_such_part(service: Service, open_page: Opening):
    """A service that has no queue is not bothered with one."""
    page = open_page(service.url)
    until_live(page)
    page.wait_for_timeout(500)
    assert not page.locator("#work").is_visible()


def test_an_operator_opens_retries_and_drops(
    service: Service, queue: LocalQueue, open_page: Opening
):
    """The newest comes first; details show payload and error; each action asks first."""
    page = opened(open_page, service)
    until(page, 3)
    assert "mails" in page.locator("#work-lists").inner_text()
    first = rows(page).first
    assert "KeyError" in first.inner_text()
    assert page.locator("#work-states button[aria-pressed=true]").inner_text().startswith("dead")
    first.locator(".work-open").click()
    detail = page.locator("#work-detail")
    detail.wait_for()
    assert '"template": "welcome"' in detail.inner_text()
    assert "KeyError" in detail.inner_text()
    page.locator("#work-one-retry").click()
    assert "all attempts" in confirm(page)
    until(page, 2)
    assert not detail.is_visible()
    assert queue.snapshot()["waiting"] == 1
    rows(page).filter(has_text="SMTPRecipients").get_by_role("button", name="Drop").click()
    assert "deleted for good" in confirm(page)
    until(page, 1)
    assert queue.snapshot()["dead"] == 1
    page.locator("#work-states button", has_text="waiting").click()
    page.wait_for_function(
        "() => document.querySelector('#work-rows')?.textContent.includes('welcome')"
    )
    assert rows(page).count() == 1


def test_cancelled_nothing_happens(service: Service, queue: LocalQueue, open_page: Opening):
    """The question has a no, and that is what has the focus."""
    page = opened(open_page, service)
    until(page, 3)
    rows(page).first.get_by_role("button", name="Drop").click()
    page.locator("#confirm").wait_for()
    assert focused(page)["id"] == "confirm-no"
    page.keyboard.press("Enter")
    page.locator("#confirm").wait_for(state="hidden")
    assert queue.snapshot()["dead"] == 3
    assert [posted for posted in service.posted if posted.path.endswith("/work")] == []


@pytest.mark.usefixtures("queue")
def test_what_jobs_say_is_only_text(service: Service, open_page: Opening):
    """Markup in payloads and errors is shown, and does nothing; secrets are hidden."""
    page = opened(open_page, service)
    until(page, 3)
    hostile = rows(page).filter(has_text="onerror")
    hostile.locator(".work-open").click()
    page.locator("#work-detail").wait_for()
    assert HOSTILE in page.locator("#work-error").inner_text()
    assert "onerror" in page.locator("#work-payload").inner_text()
    assert page.locator("#work img").count() == 0
    rows(page).filter(has_text="SMTP").locator(".work-open").click()
    page.wait_for_function(
        "() => document.querySelector('#work-payload').textContent.includes('ann@')"
    )
    assert "hunter2" not in page.content()
    assert page.evaluate("window.hacked") is None


@pytest.mark.usefixtures("queue")
def test_who_only_looks_sees_no_payload_and_no_buttons(service: Service, open_page: Opening):
    """Ids and errors are there; nothing can be done."""
    page = opened(open_page, service, operator=False)
    until(page, 3)
    text = page.locator("#work").inner_text()
    assert "KeyError" in text
    assert "welcome" not in text
    assert page.locator("#work").get_by_role("button", name="Drop").count() == 0
    rows(page).first.locator(".work-open").click()
    page.locator("#work-hidden").wait_for()
    assert "welcome" not in page.content()


def test_a_long_list_is_paged_and_searched(service: Service, queue: LocalQueue, open_page: Opening):
    """Fifty at a time; what is searched for is found on any page; all that match are retried."""
    for number in range(120):
        died(queue, {"n": number}, "TimeoutError" if number % 2 else "ValueError")
    page = opened(open_page, service)
    until(page, 50)
    page.locator("#work-next").click()
    page.get_by_text("page 2", exact=True).wait_for()
    page.locator("#work-next").click()
    until(page, 23)
    assert page.locator("#work-next").is_disabled()
    page.locator("#work-before").click()
    until(page, 50)
    page.locator("#work-text").fill("TIMEOUTerror")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Retry all that match").wait_for()
    page.get_by_text("page 1", exact=True).wait_for()
    page.get_by_role("button", name="Retry all that match").click()
    assert "TIMEOUTerror" in confirm(page)
    page.locator("#result", has_text="Retried 60 jobs").wait_for()
    page.locator("#work-none", has_text="No dead jobs that contain").wait_for()
    assert queue.snapshot()["waiting"] == 60
    assert queue.snapshot()["dead"] == 63


def test_counts_follow_what_happens(service: Service, queue: LocalQueue, open_page: Opening):
    """A job that dies is on the page within seconds, without a reload."""
    page = opened(open_page, service)
    until(page, 3)
    died(queue, {"to": "late"}, "OSError: it broke")
    page.locator("#work-rows", has_text="it broke").wait_for(timeout=20_000)
    assert page.locator("#work-states button", has_text="dead").inner_text().split() == [
        "dead",
        "4",
    ]


@pytest.mark.usefixtures("queue")
def test_it_works_by_keyboard(service: Service, open_page: Opening):
    """From a row into the item and back; what has the focus shows it."""
    page = opened(open_page, service)
    until(page, 3)
    first = rows(page).first.locator(".work-open")
    first.focus()
    page.keyboard.press("Enter")
    page.locator("#work-detail").wait_for()
    assert focused(page)["id"] == "work-detail"
    page.keyboard.press("Tab")
    assert focused(page)["id"] == "work-close"
    assert focused(page)["visible"]
    page.keyboard.press("Escape")
    page.locator("#work-detail").wait_for(state="hidden")
    assert "work-open" in focused(page)["classes"]


@pytest.mark.parametrize("width", [360, 768, 1440])
def test_it_fits_the_screen(service: Service, queue: LocalQueue, open_page: Opening, width: int):
    """On a phone nothing scrolls sideways, not even with an item open."""
    died(queue, {"to": "x" * 500}, "E" * 400)
    page = opened(open_page, service, viewport={"width": width, "height": 800})
    until(page, 4)
    rows(page).first.locator(".work-open").click()
    page.locator("#work-detail").wait_for()
    assert sideways(page) == []


# --- The picture for the documentation ---


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """Return a database with the tables."""
    source = Sqlite(tmp_path / "work.db")
    database = Database(source, name="orders")
    migrate(database)
    yield database
    database.close()
    source.close()


def test_the_lists_of_a_service_side_by_side(
    service: Service, queue: LocalQueue, database: Database, open_page: Opening, tmp_path: Path
):
    """A queue, jobs and an outbox; an item is open. It is photographed, for the documentation."""

    def fill() -> tuple[Jobs, Outbox]:
        jobs, outbox = Jobs(database, name="reports"), Outbox(database, "orders")
        jobs.submit(None, "report", {"month": 13}, scope="acme")
        (claim,) = jobs.claim(["report"], owner="w")
        jobs.fail(claim, "ValueError: month must be in 1..12", retry=False)
        jobs.submit(None, "report", {"month": 7}, scope="acme")
        with database.transaction() as connection:
            outbox.add(connection, "order", "4711", "order.paid", {"total": 30})
        return jobs, outbox

    with ThreadPoolExecutor(1) as thread:  # Playwright has an event loop running in this one
        kept = thread.submit(fill).result(30)
    for letter in queue.dead():
        if HOSTILE in letter.reason:
            queue.drop(letter.id)
    for number in range(6):
        payload = {"to": f"user{number}@example.com", "template": "receipt", "order": 4700 + number}
        died(queue, payload, raised() if number == 4 else ERRORS[number % 3])
    for number in range(14):
        queue.push({"to": f"user{number}@example.com", "template": "news"})
    page = opened(open_page, service, color_scheme="dark", viewport={"width": 1440, "height": 900})
    until(page, 8)
    assert page.locator("#work-lists button").all_inner_texts()[0].split() == [
        "mails",
        "·",
        "queue",
        "8",
    ]
    for name, wanted in (("reports", "month must be"), ("orders", "No dead events")):
        page.locator("#work-lists button", has_text=name).click()
        page.locator("#work", has_text=wanted).wait_for()
    page.locator("#work-lists button", has_text="mails").click()
    until(page, 8)
    rows(page).nth(1).locator(".work-open").click()
    page.locator("#work-detail").wait_for()
    trace = page.locator("#work-traceback").inner_text().split("\n")
    assert trace[0] == "Traceback (most recent call last):"
    assert "app/mails.py" in trace[1]
    assert "smtp.sendmail" in trace[2]
    page.locator("#work").scroll_into_view_if_needed()
    page.mouse.move(0, 0)
    path = KEPT if KEEP else tmp_path / "dead-letters.png"
    page.evaluate("() => window.scrollTo(0, document.querySelector('#work').offsetTop - 80)")
    box = page.locator("#work").bounding_box()
    assert box is not None
    edge = 20
    clip = {
        "x": box["x"] - edge,
        "y": box["y"] - edge,
        "width": box["width"] + 2 * edge,
        "height": box["height"] + 2 * edge,
    }
    page.screenshot(path=path, animations="disabled", clip=clip)
    assert path.stat().st_size > 20_000
    assert len(kept) == 2
