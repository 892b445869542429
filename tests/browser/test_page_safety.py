"""What a page of a small service keeps out, and who may act on it, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.browser.service import (
    HOSTILE,
    Service,
    as_operator,
    band,
    breaker_of_payments,
    focused,
    running,
    until_live,
)
from tests.web.support import serve, text_app

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opening = Callable[..., "Page"]

ISOLATE: Final = {
    "pod": "pod-1",
    "guard": "payments",
    "layer": 1,
    "act": "isolate",
    "key": None,
    "changes": {},
}


@pytest.fixture
def service() -> Iterator[Service]:
    """Return a service of this test's own."""
    with running() as made:
        yield made


# --- What comes from users ---


def test_a_name_that_is_a_script_is_text(service: Service, open_page: Opening):
    """Names with markup are shown as they are written, run nothing, and break no rule."""
    page = open_page(service.url)
    page.evaluate(
        """document.addEventListener('securitypolicyviolation',
            (event) => { window.broken = event.blockedURI })"""
    )
    until_live(page)
    heading = band(page, HOSTILE).get_by_role("heading", level=3)
    assert heading.inner_text() == HOSTILE
    service.call(service.hostile, 50, well=False)
    page.locator("#troubles li").filter(has_text=HOSTILE).first.wait_for()
    band(page, HOSTILE).locator("summary").first.click()
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("window.broken") is None
    assert page.locator("img").count() == 0


def test_markup_has_no_way_in(service: Service, open_page: Opening, complaints: Any):
    """Even a script that had got in could not write markup, or run what it has written."""
    page = open_page(service.url)
    until_live(page)
    said = page.evaluate(
        """() => {
            const tries = [
                () => { document.body.innerHTML = '<img src=x onerror=window.hacked=1>'; },
                () => { document.createElement('script').text = 'window.hacked = 1'; },
                () => { document.createElement('img').setAttribute('onerror', 'hacked = 1'); },
            ];
            return tries.map((one) => {
                try { one(); return 'done'; } catch (error) { return error.name; }
            });
        }"""
    )
    assert "done" not in said
    page.wait_for_timeout(200)
    assert page.evaluate("window.hacked") is None
    complaints.expected = True  # the browser tells of both attempts


# --- Who may act ---


def test_who_may_only_look_has_nothing_to_act_with(
    service: Service, open_page: Opening, complaints: Any
):
    """Without operator rights there are no action buttons, and a POST is refused."""
    page = open_page(service.url)
    until_live(page)
    assert page.locator("#who").inner_text() == "read only"
    breaker_of_payments(page).locator("summary").click()
    assert breaker_of_payments(page).locator("dl").first.is_visible()
    assert page.get_by_role("button", name=re.compile("Isolate|Close|Apply")).count() == 0
    complaints.expected = True  # the browser tells what was refused
    refused = page.evaluate(
        "act => window.seawall.post('act', act).then(() => 'done', (error) => error.message)",
        ISOLATE,
    )
    assert refused != "done"
    assert service.breaker() == "closed"


def test_an_operator_acts_by_mouse(service: Service, open_page: Opening):
    """Two clicks and a confirmation isolate a breaker; the same close it again."""
    page = open_page(service.url)
    as_operator(page)
    until_live(page)
    breaker_of_payments(page).locator("summary").click()
    breaker_of_payments(page).get_by_role("button", name=re.compile("^Isolate")).click()
    dialog = page.get_by_role("dialog")
    assert "payments" in dialog.inner_text()
    dialog.get_by_role("button", name="Cancel").click()
    assert service.breaker() == "closed"
    breaker_of_payments(page).get_by_role("button", name=re.compile("^Isolate")).click()
    dialog.get_by_role("button", name="Isolate").click()
    band(page, "payments").locator(".state-word", has_text="isolated").wait_for()
    assert service.breaker() == "isolated"
    breaker_of_payments(page).get_by_role("button", name=re.compile("^Close")).click()
    dialog.get_by_role("button", name="Close").click()
    band(page, "payments").locator(".state-word", has_text="well").wait_for()
    assert service.breaker() == "closed"


def test_an_operator_acts_by_keyboard(service: Service, open_page: Opening):
    """The same without a mouse; the focus is seen all the way."""
    page = open_page(service.url)
    as_operator(page)
    until_live(page)
    for _ in range(3):
        page.keyboard.press("j")
        if focused(page)["name"].startswith("payments"):
            break
    _tab_to(page, lambda at: at["tag"] == "SUMMARY" and "Breaker" in at["name"])
    page.keyboard.press("Enter")
    breaker_of_payments(page).get_by_role("button", name=re.compile("^Isolate")).wait_for()
    _tab_to(page, lambda at: at["name"].startswith("Isolate"))
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    assert focused(page)["id"] == "confirm-no"
    page.keyboard.press("Tab")
    assert focused(page)["id"] == "confirm-yes"
    assert focused(page)["visible"]
    page.keyboard.press("Enter")
    band(page, "payments").locator(".state-word", has_text="isolated").wait_for()
    assert service.breaker() == "isolated"


def _tab_to(page: Page, there: Callable[[dict[str, Any]], bool]) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        at = focused(page)
        assert at["visible"], at
        if there(at):
            return
    raise AssertionError("40 times Tab did not lead there")


def test_an_operator_changes_a_limit(service: Service, open_page: Opening):
    """A number that is typed and confirmed is the limit from then on."""
    page = open_page(service.url)
    as_operator(page)
    until_live(page)
    layer = band(page, "search").locator(".layer").filter(has_text="Bulkhead")
    layer.locator("summary").click()
    field = layer.locator("form.change").first
    field.locator("input").fill("7")
    field.get_by_role("button", name=re.compile("^Apply")).click()
    page.get_by_role("dialog").get_by_role("button", name="Change").click()
    page.locator("#result", has_text=re.compile(".")).wait_for()
    assert page.locator("#result").get_attribute("data-tone") == "ok"
    (bulkhead,) = [policy for policy in service.search.policies if policy.kind == "bulkhead"]
    assert "7" in repr(bulkhead)


EVIL = """<!doctype html><title>evil</title>
<form id="it" method="post" action="{act}" enctype="text/plain" target="frame">
<input name='{start}' value='{end}'></form><iframe name="frame"></iframe>"""

FETCHES = """async ([act, session, body]) => {
    const tries = [
        {mode: 'no-cors', headers: {'Content-Type': 'text/plain'}},
        {mode: 'cors', headers: {'Content-Type': 'text/plain'}},
        {mode: 'cors', headers: {'Content-Type': 'application/json'}},
        {mode: 'cors', headers: {'Content-Type': 'application/json', 'X-Seawall-Token': 'guess'}},
    ];
    const said = [];
    for (const one of tries) {
        try {
            const answer = await fetch(act, {method: 'POST', credentials: 'include', body, ...one});
            said.push(answer.type + ' ' + answer.status);
        } catch (error) { said.push(error.name); }
    }
    try {
        const answer = await fetch(session, {credentials: 'include'});
        said.push((await answer.json()).token);
    } catch (error) { said.push(error.name); }
    return said;
}"""


def test_a_page_of_another_origin_changes_nothing(
    service: Service, open_page: Opening, complaints: Any
):
    """A form and fetches of another origin bring the operator's cookie along, and are refused."""
    act = f"{service.url}act"
    # A form of plain text is "name=value": with this it is JSON, whose last text has an "=".
    start = escape(json.dumps(ISOLATE)[:-1] + ', "more": "')
    evil = EVIL.format(act=act, start=start, end=escape('"}'))

    with serve(text_app(evil), lifespan="off") as elsewhere:
        page = open_page(service.url)
        as_operator(page)
        until_live(page)
        page.goto(elsewhere, wait_until="load")
        said = page.evaluate(FETCHES, [act, f"{service.url}session", json.dumps(ISOLATE)])
        assert said == ["TypeError"] * 5  # the browser lets that page read nothing
        with page.expect_response(act) as answered:
            page.evaluate("document.getElementById('it').submit()")
        assert answered.value.status in {400, 403, 415}
    assert len(service.posted) >= 2
    assert all(post.cookie and post.origin == elsewhere for post in service.posted)
    assert service.breaker() == "closed"
    complaints.expected = True  # the browser tells of each attempt


def test_no_other_page_shows_it_in_a_frame(service: Service, open_page: Opening, complaints: Any):
    """The page stays empty in a frame of another page, which prevents clickjacking."""
    framing = text_app(f'<!doctype html><iframe src="{service.url}"></iframe>')
    with serve(framing, lifespan="off") as elsewhere:
        page = open_page("about:blank")
        page.goto(elsewhere, wait_until="load")
        page.wait_for_timeout(300)
        assert page.frame_locator("iframe").locator("#title").count() == 0
    complaints.expected = True  # the browser tells why
