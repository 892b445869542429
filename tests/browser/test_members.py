"""The members section of the dashboard, in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from seawall.dashboard.watcher import Watcher
from seawall.members import MemberState, MemberView
from tests.browser.service import HOSTILE, running, sideways, until_live
from tests.telemetry.world import Members

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opening = Callable[..., "Page"]
ALIVE, SUSPECTED = MemberState.ALIVE, MemberState.SUSPECTED


class _Others:
    """Three more pods, of which the last suspects `pod-3` too."""

    def __init__(self) -> None:
        self.told = []
        for number, state in enumerate((ALIVE, ALIVE, SUSPECTED), start=2):
            level = 9.0 if state is SUSPECTED else 0.5
            view = MemberView("pod-3", state, 2.0, level=level, threshold=8.0, reason="no answer")
            with closing(Watcher(pod=f"pod-{number}")) as watcher:
                members = Members("pods", view)
                seen: Any = watcher._view_of({"members": [{**members.snapshot(), "name": "pods"}]})
            self.told.append({**seen, "age": 0.1})

    async def views(self) -> list[Any]:
        return self.told


@pytest.fixture
def group() -> Members:
    """Return a group as this process sees it."""
    members = Members(
        "pods",
        MemberView("pod-3", ALIVE, 1.0, threshold=8.0, round_trip=0.012),
        MemberView("pod-4", ALIVE, 1.0, threshold=8.0),
        MemberView(HOSTILE, ALIVE, 1.0, threshold=8.0),
    )
    members.health_score = 1
    members.group.note_own_pause(6.0)
    return members


def _member(page: Page, name: str) -> Any:
    return page.locator(".member").filter(has=page.locator(".member-name", has_text=name))


def test_a_member_that_one_pod_suspects_is_seen(group: Members, open_page: Opening):
    """It is first, with how many pods say so; its level, reason and each pod's word are there."""
    with running(pods=_Others()) as service:
        page = open_page(service.url)
        until_live(page)
        first = page.locator(".member").first
        first.locator(".member-state", has_text="suspected by 1 of 4 pods").wait_for()
        assert first.locator(".member-name").inner_text() == "pod-3"
        assert "no answer" in first.inner_text()
        assert "9 of 8" in first.inner_text()
        trouble = page.locator("#troubles li").filter(has_text="pod-3").first
        assert "suspected by 1 of 4 pods: no answer" in trouble.inner_text()
        first.locator("summary").click()
        sights = first.locator(".sight")
        sights.nth(3).wait_for()
        assert [one.split("\n")[0] for one in sights.all_inner_texts()] == [
            f"pod-{number}" for number in range(1, 5)
        ]
        assert "12 ms" in sights.nth(0).inner_text()
        # This pod suspects it now, too.
        group.views[0] = MemberView(
            "pod-3", SUSPECTED, 1.0, level=12.0, threshold=8.0, reason="late"
        )
        first.locator(".member-state", has_text="suspected by 2 of 4 pods").wait_for()
        line = first.locator(".member-level path.line")
        assert line.get_attribute("d").startswith("M")
        # What this pod says of itself: its score and its pauses.
        own = page.locator(".group-pods .line").filter(has_text="pod-1").inner_text()
        assert "1 of 8" in own
        assert "1, 6 s" in own
        # A name is text.
        _member(page, HOSTILE).wait_for()
        assert page.evaluate("window.hacked") is None
        assert sideways(page) == []


def test_a_suspicion_that_is_cleared_goes_from_the_page(group: Members, open_page: Opening):
    """The member is alive again, the trouble is gone, and the event is told in a sentence."""
    group.views[1] = MemberView("pod-4", SUSPECTED, 1.0, level=9.0, threshold=8.0, reason="late")
    with running() as service:
        page = open_page(service.url)
        until_live(page)
        suspected = _member(page, "pod-4").locator(".member-state", has_text="suspected")
        suspected.wait_for()
        page.locator("#troubles li").filter(has_text="pod-4 is suspected").first.wait_for()
        group.views[1] = MemberView("pod-4", ALIVE, 1.0, threshold=8.0)
        group.change("pod-4", "suspected", "alive")
        _member(page, "pod-4").locator(".member-state", has_text="alive").wait_for()
        page.locator("#troubles li").filter(has_text="pod-4").wait_for(state="detached")
        page.locator(".happening").filter(has_text="pod-4 is cleared of suspicion").wait_for()


def test_two_hundred_members_are_shown_on_demand(open_page: Opening):
    """The worst few are drawn; all of them when somebody asks; a phone need not scroll sideways."""
    views = [MemberView(f"pod-{n}", SUSPECTED if n == 150 else ALIVE, 1.0) for n in range(200)]
    members = Members("pods", *views)
    with running() as service:
        page = open_page(service.url, viewport={"width": 390, "height": 800})
        until_live(page)
        page.locator(".member").first.wait_for()
        assert page.locator(".member").count() == 24
        assert page.locator(".member-name").first.inner_text() == "pod-150"
        assert page.locator(".group .card-kind").inner_text() == "1 suspected, 199 alive"
        page.get_by_role("button", name="Show all 200").click()
        assert page.locator(".member").count() == 200
        assert sideways(page) == []
    assert members.views
