"""The dashboard of a small service, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pytest

from seawall import Breaker, Guard
from seawall.dashboard import Dashboard
from seawall.dashboard.watcher import Watcher
from seawall.events import StoreModeChanged
from seawall.events.bus import emit
from tests.browser.service import (
    HOSTILE,
    Service,
    as_operator,
    band,
    breaker_of_payments,
    focused,
    running,
    sideways,
    until_live,
)

if TYPE_CHECKING:
    from playwright.sync_api import Page

Opening = Callable[..., "Page"]
OUTCOMES: Final = ("succeeded", "degraded", "failed", "rejected")


@pytest.fixture
def service() -> Iterator[Service]:
    """Return a service of this test's own."""
    with running() as made:
        yield made


def test_loads_without_a_complaint(service: Service, open_page: Opening):
    """It shows each guard with its stack; nothing fails, and nothing comes from elsewhere."""
    asked: list[str] = []
    page = open_page("about:blank")
    page.on("request", lambda request: asked.append(request.url))
    page.goto(service.url, wait_until="domcontentloaded")
    until_live(page)
    assert page.title().startswith("Seawall")
    for guard in ("payments", "search", HOSTILE):
        band(page, guard).wait_for()
    layers = band(page, "payments").locator(".layer-title").all_inner_texts()
    assert layers == ["Retry", "Breaker", "Timeout"]
    assert asked
    assert [url for url in asked if not url.startswith(service.url)] == []


def test_without_the_slash_it_is_found_too(service: Service, open_page: Opening):
    """The page also loads from the path without the final slash."""
    until_live(open_page(service.url.rstrip("/")))


def test_updates_live(service: Service, open_page: Opening):
    """Numbers and states change on the page as they do in the service; it is never reloaded."""
    page = open_page(service.url)
    until_live(page)
    page.evaluate("window.stayed = true")
    payments = band(page, "payments")
    assert payments.locator(".state-word").inner_text() == "well"
    succeeded = payments.locator(".numbers .succeeded dd")
    assert succeeded.inner_text() == "0"
    for _ in range(200):  # it is a rate: it is seen while calls are made
        service.call(service.payments, 5)
        page.wait_for_timeout(20)
        if succeeded.inner_text() != "0":
            break
    assert succeeded.inner_text() != "0"
    service.call(service.payments, 10, well=False)
    payments.locator(".state-word", has_text="open").wait_for()
    trouble = page.locator("#troubles li").filter(has_text="payments").first
    trouble.wait_for()
    assert re.search(r"since|for \d|\d s", trouble.inner_text())
    assert page.locator("#verdict").get_attribute("data-tone") == "bad"
    assert page.evaluate("window.stayed")


class _Cut:
    """Two other pods that share a store with each other, which is cut."""

    def __init__(self) -> None:
        self.told = []
        for pod in ("pod-2", "pod-3"):
            with closing(Watcher(pod=pod)) as watcher:
                for place in range(3):
                    fields = {"policy": "breaker", "before": "shared", "after": "local"}
                    emit(StoreModeChanged, f"g{place}", store="redis", cause="away", **fields)
                view: Any = watcher.sample()
            began = {"tone": "warn", "advice": "", "since": view["at"] - 90}
            follows = [
                began | {"id": f"store_mode:{guard}:0", "where": guard, "cause": "store:redis"}
                for guard in ("orders", HOSTILE)
            ]
            lost = began | {"id": "store:redis", "tone": "bad", "where": "redis"}
            lost |= {"what": "The store does not answer", "trace": "<ab>"}
            troubles = [lost, *({**one, "what": "It goes without its store"} for one in follows)]
            self.told.append({**view, "guards": [], "troubles": troubles, "age": 0.1})

    async def views(self) -> list[Any]:
        return self.told


class _Degraded:
    """Another pod, whose fallback answers all calls of a guard."""

    def __init__(self) -> None:
        guard = Guard("elsewhere", Breaker())
        with closing(Watcher(pod="pod-2")) as watcher:
            view: Any = watcher.sample()
        guard.close()
        (told,) = [one for one in view["guards"] if one["name"] == "elsewhere"]
        rates = told["rates"] | {"succeeded": 5.0, "degraded": 20.0, "failed": 12.0}
        told = told | {"rates": rates | {"rejected": 8.0}}
        self.told = {**view, "guards": [told], "troubles": [], "age": 0.1}

    async def views(self) -> list[Any]:
        return [self.told]


def test_a_degraded_call_is_counted_once(open_page: Opening):
    """It failed or was refused before it was answered by less: the two are one call."""
    with running(pods=_Degraded()) as service:
        page = open_page(service.url)
        until_live(page)
        shown = band(page, "elsewhere")
        shown.wait_for()
        assert shown.locator(".band-calls").inner_text() == "25 calls/s"


PILE: Final = """async () => {
    const { piled, mostCalls } = await import(new URL("page/past.js", location.href).href);
    const past = { succeeded: [6, null, 1], degraded: [4, null, 5], failed: [3, null, 0],
                   rejected: [2, null, 0] };
    return [piled(past, 0), piled(past, 1), piled(past, 2), mostCalls(past)];
}"""


def test_the_chart_piles_each_call_once(service: Service, open_page: Opening):
    """Calls that failed or were refused and were then answered with less are drawn as degraded."""
    page = open_page(service.url)
    assert page.evaluate(PILE) == [
        [6, 4, pytest.approx(0.6), pytest.approx(0.4)],
        None,
        [1, 5, 0, 0],
        11,
    ]


def test_one_lost_store_is_one_trouble(open_page: Opening):
    """What follows from it stands below it, as text; runbook and trace are links of the web."""
    links = {"runbook": "https://wiki.example/{kind}", "trace": "http://traces.example/{trace_id}"}
    with running(pods=_Cut(), **links) as service:
        page = open_page(service.url)
        until_live(page)
        trouble = page.locator("#troubles > li")
        trouble.filter(has_text="redis").wait_for()
        assert trouble.count() == 1
        assert "on pod-2, pod-3" in trouble.inner_text()
        follows = trouble.locator(".consequence")
        assert {one.split(" It")[0] for one in follows.all_inner_texts()} == {"orders", HOSTILE}
        told = trouble.locator("p").first.get_by_role("link")
        assert [one.get_attribute("href") for one in told.all()] == [
            "https://wiki.example/store",
            "http://traces.example/%3Cab%3E",
        ]
        assert {one.get_attribute("rel") for one in told.all()} == {"noopener noreferrer"}
        assert page.locator("#verdict-title").inner_text() == "1 thing is wrong"
        assert page.locator("img").count() == 0
        happened = page.locator(".happening").filter(has_text="redis")
        assert happened.count() == 1
        assert "the store was lost" in happened.inner_text()
        assert sideways(page) == []


def test_an_address_that_is_none_of_the_web_is_no_link(open_page: Opening):
    """Whatever another server sends as an address, the page makes no link that runs something."""
    with running() as service:
        page = open_page(service.url)
        until_live(page)
        made = page.evaluate(
            """async () => {
                const { webAddress } = await import('./page/dom.js');
                return ['javascript:alert(1)', ' java\\nscript:1', 'data:text/html,1', '/x', '',
                    null, 3, 'https://', 'https://a/<b>'].map(webAddress);
            }"""
        )
        assert made == [None] * 8 + ["https://a/%3Cb%3E"]


def test_the_charts_show_hours_when_asked(open_page: Opening):
    """A breaker that opened half an hour ago is seen over an hour, and not over three minutes."""

    class Aged(Dashboard):
        """One that has run for an hour already."""

        def _new_watcher(self) -> Watcher:
            watcher = Watcher(pod="pod-1", every=0.2)
            now = watcher.sample()["at"]
            for seconds in range(3600, 10, -5):
                watcher._history.add(_hour_ago(now - seconds, seconds))
            return watcher

    with running(dashboard=Aged) as service:
        page = open_page(service.url)
        until_live(page)
        strip = band(page, "payments").locator(".strip .chart")
        assert strip.locator("rect.open").count() == 0
        page.get_by_role("button", name="1 h", exact=True).click()
        strip.locator("rect.open").first.wait_for(state="attached")
        assert "over the last 1 h" in strip.get_attribute("aria-label")
        page.get_by_role("button", name="12 h", exact=True).click()
        page.locator(".chart[aria-label*='over the last 12 h']").first.wait_for()
        page.get_by_role("button", name="3 min", exact=True).click()
        strip.locator("rect.open").first.wait_for(state="detached")


def _hour_ago(at: float, seconds: float) -> Any:
    guard = {"name": "payments", "rates": dict.fromkeys(OUTCOMES, 1.0), "p50": 0.1, "p99": 0.2}
    state = "open" if 1500 < seconds < 1800 else "closed"
    return {"at": at, "guards": [guard | {"breaker": state}], "sections": {}}


def test_broken_guards_come_first(service: Service, open_page: Opening):
    """A guard that breaks moves to the front, of the bands and of the jumps."""
    page = open_page(service.url)
    until_live(page)
    names = page.locator(".band .band-name")
    assert names.all_inner_texts() == [HOSTILE, "payments", "search"]
    service.call(service.payments, 10, well=False)
    page.locator(".band[data-tone=bad]").wait_for()
    assert names.all_inner_texts() == ["payments", HOSTILE, "search"]
    assert page.locator("#jump .jump-name").first.inner_text() == "payments"


def test_a_lost_service_is_told_and_found_again(open_page: Opening, complaints: Any):
    """The page says that the service is gone, and reconnects when it is back."""
    complaints.expected = True  # requests that fail are what this is about
    with running() as service:
        page = open_page(service.url)
        until_live(page)
        page.evaluate("window.stayed = true")
        service.call(service.payments, 10, well=False)
        band(page, "payments").locator(".state-word", has_text="open").wait_for()
    page.locator("#live[data-tone=bad]").wait_for()
    assert "reconnecting" in page.locator("#live-text").inner_text()
    page.locator("body[data-live=no]").wait_for()
    assert "lost its connection" in page.locator("#verdict").inner_text()
    port = int(service.url.split(":")[2].partition("/")[0])
    with running(port=port) as service:
        page.locator("#live[data-tone=ok]").wait_for()
        band(page, "payments").locator(".state-word", has_text="well").wait_for()
        assert page.locator("body").get_attribute("data-live") == "yes"
        service.call(service.payments, 10, well=False)
        band(page, "payments").locator(".state-word", has_text="open").wait_for()
        assert page.evaluate("window.stayed")


class _Others:
    """Sixty-four other pods, one of them late and one gone."""

    def __init__(self) -> None:
        with closing(Watcher(pod="pod-late")) as watcher:
            view = watcher.sample()
        told = [{**view, "age": 42.0}, {**view, "age": 30.0, "gone": view["at"] - 30.0}]
        told += [{**view, "guards": [], "age": 0.2} for _ in range(62)]
        names = ["pod-late", "pod-gone", *(f"pod-{number}" for number in range(2, 64))]
        self.told = [
            # A clock that is an hour behind makes nobody late.
            {**one, "pod": {**one["pod"], "name": name}, "at": one["at"] - 3600.0}
            for one, name in zip(told, names, strict=True)
        ]

    async def views(self) -> list[Any]:
        return self.told


def test_other_pods_are_as_old_as_they_are_said_to_be(open_page: Opening):
    """One that is late or gone is grey and says since when, whatever its clock says; all fit."""
    guard = Guard("orders", Breaker(consecutive=5))
    with running(pods=_Others()) as service:
        page = open_page(service.url)
        until_live(page)
        cells = band(page, "orders").locator(".cell")
        assert cells.count() == 3
        late, lost = (cells.filter(has_text=name) for name in ("pod-late", "pod-gone"))
        assert re.match(r"as of 4\d s ago", late.locator(".stale").inner_text())
        assert re.match(r"gone since .*\d\d:\d\d:\d\d", lost.locator(".stale").inner_text())
        assert [late.get_attribute("data-stale"), lost.get_attribute("data-stale")] == ["yes"] * 2
        assert page.locator(".cell[data-stale=yes]").count() == 2
        assert page.locator("#pods li").count() == 65
    guard.close()


class _Many:
    """Many pods with many guards."""

    def __init__(self) -> None:
        with closing(Watcher(pod="pod-00")) as watcher:
            view = watcher.sample()
        pods = [{**view["pod"], "name": f"pod-{number:02}"} for number in range(1, 8)]
        self.told = [{**view, "pod": pod} for pod in pods]

    async def views(self) -> list[Any]:
        return self.told


def test_a_large_page_has_cells_only_near_the_screen(open_page: Opening):
    """A band gets its cells when it comes near, loses them far away, and keeps what is in use."""
    guards = [Guard(f"guard-{number:02}", Breaker(consecutive=5)) for number in range(40)]
    with running(pods=_Many()) as service:
        page = open_page(service.url)
        until_live(page)
        first, last = band(page, "guard-00"), band(page, "guard-39")
        page.locator(".jump-one", has_text="guard-00").click()
        first.locator(".cell-in").first.wait_for()
        assert page.locator(".band").count() >= len(guards)
        assert last.locator(".cell").count() == 0
        height = first.bounding_box()["height"]  # type: ignore[index]
        page.locator(".jump-one", has_text="guard-39").click()
        last.locator(".cell-in").first.wait_for()
        page.wait_for_function(
            "() => !document.querySelector('[data-guard=guard-00]').querySelector('.cell')"
        )
        assert abs(first.bounding_box()["height"] - height) <= 1  # type: ignore[index]
        last.locator("summary").first.click()
        page.locator(".jump-one", has_text="guard-00").click()
        first.locator(".cell-in").first.wait_for()
        assert last.locator("details[open]").count() == 1
        assert 0 < page.locator(".cell-in").count() < 120
    for guard in guards:
        guard.close()


def test_what_a_layer_offers_is_there_as_soon_as_it_is_opened(service: Service, open_page: Opening):
    """Opening a layer draws its buttons immediately, so that Tab reaches them."""
    page = open_page(service.url)
    as_operator(page)
    until_live(page)
    summary = breaker_of_payments(page).locator("summary")
    drawn = "(it) => { it.click(); return it.parentElement.querySelectorAll('button').length; }"
    assert summary.evaluate(drawn) > 0
    summary.click()
    summary.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused(page)["name"].startswith("Isolate")


# --- By keyboard, on a phone, in the dark ---


def test_the_first_tab_skips_to_the_guards(service: Service, open_page: Opening):
    """Tab goes through the page in its order, the skip link first, and one sees where one is."""
    page = open_page(service.url)
    until_live(page)
    page.keyboard.press("Tab")
    at = focused(page)
    assert at["name"] == "Skip to the guards"
    assert at["visible"]
    assert page.locator("a.skip").bounding_box()["y"] >= 0
    page.keyboard.press("Tab")
    assert focused(page)["id"] == "theme"
    page.keyboard.press("Tab")
    assert focused(page)["id"] == "keys"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("location.hash") == "#guards"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('#guards') !== null")


def test_keys_go_from_guard_to_guard(service: Service, open_page: Opening):
    """The keys j and k step through the guards, / filters them, Escape ends that."""
    page = open_page(service.url)
    until_live(page)
    names = page.locator(".band .band-name").all_inner_texts()
    assert len(names) == 3
    for key, index in (("j", 0), ("j", 1), ("j", 2), ("j", 2), ("k", 1), ("ArrowUp", 0)):
        page.keyboard.press(key)
        at = focused(page)
        assert at["name"].startswith(names[index]), (key, at)
        assert at["visible"]
    page.keyboard.press("/")
    page.keyboard.type("pay")
    assert page.locator(".band:visible").count() == 1
    page.keyboard.press("Escape")
    assert page.locator(".band:visible").count() == 3


def test_help_opens_and_closes_by_key(service: Service, open_page: Opening):
    """The question mark opens the help, Escape closes it, and the focus is where it was."""
    page = open_page(service.url)
    until_live(page)
    page.keyboard.press("j")
    before = focused(page)["name"]
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    dialog.wait_for()
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert focused(page)["name"].partition(":")[0] == before.partition(":")[0]


@pytest.mark.parametrize(("width", "height"), [(390, 844), (320, 568)])
def test_it_fits_a_phone(service: Service, open_page: Opening, width: int, height: int):
    """On a narrow screen nothing is cut off sideways, also with names that have no spaces."""
    page = open_page(
        service.url, viewport={"width": width, "height": height}, is_mobile=True, has_touch=True
    )
    as_operator(page)
    until_live(page)
    service.call(service.payments, 20, well=False)
    band(page, "payments").locator(".state-word", has_text="open").wait_for()
    breaker_of_payments(page).locator("summary").tap()
    isolate = breaker_of_payments(page).get_by_role("button", name=re.compile("^Isolate"))
    isolate.scroll_into_view_if_needed()
    assert sideways(page) == []
    box = isolate.bounding_box()
    assert box["height"] >= 24
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_dark_and_light(service: Service, open_page: Opening, scheme: str):
    """It follows the system's scheme, and text stands out from its ground in both."""
    page = open_page(service.url, color_scheme=scheme)
    until_live(page)
    ground = _luminance(page, "body", "backgroundColor")
    assert (ground < 0.2) == (scheme == "dark")
    for part in ("h1", ".band-name", ".layer-title", ".muted", ".layer-settings"):
        ink = _luminance(page, part, "color")
        lighter, darker = max(ink, ground), min(ink, ground)
        assert (lighter + 0.05) / (darker + 0.05) >= 4.5, part


def test_the_theme_is_chosen_by_key_and_kept(service: Service, open_page: Opening):
    """The key t goes through the themes; the choice is there after a reload."""
    page = open_page(service.url, color_scheme="light")
    until_live(page)
    while page.locator("html").get_attribute("data-theme") != "dark":
        page.keyboard.press("t")
    assert _luminance(page, "body", "backgroundColor") < 0.2
    page.reload(wait_until="domcontentloaded")
    until_live(page)
    assert _luminance(page, "body", "backgroundColor") < 0.2


def _luminance(page: Page, selector: str, what: str) -> float:
    """Return how light a colour is, from 0 to 1, as contrast is reckoned."""
    found: float = page.evaluate(
        """([selector, what]) => {
            const canvas = document.createElement('canvas').getContext('2d');
            canvas.fillStyle = getComputedStyle(document.querySelector(selector))[what];
            canvas.fillRect(0, 0, 1, 1);
            const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((part) => {
                const one = part / 255;
                return one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        }""",
        [selector, what],
    )
    return found


def test_who_wants_no_motion_gets_none(service: Service, open_page: Opening):
    """With reduced motion nothing on the page is animated."""
    moving = """() => document.getAnimations()
        .filter((one) => one.playState === 'running'
            && (one.effect.getComputedTiming().duration > 50
                || one.effect.getComputedTiming().iterations === Infinity)).length"""
    page = open_page(service.url, reduced_motion="reduce")
    until_live(page)
    service.call(service.payments, 20, well=False)
    band(page, "payments").locator(".state-word", has_text="open").wait_for()
    assert page.evaluate(moving) == 0


def test_what_could_be_set_instead_stands_beside_its_policy(service: Service, open_page: Opening):
    """A proposal has its reason and the command that proves it; too few calls give none."""
    service.call(service.search, 2000)
    page = open_page(service.url)
    until_live(page)
    layers = band(page, "search").locator(".layer")
    layers.filter(has_text="Bulkhead").locator("summary").click()
    shown = layers.filter(has_text="Bulkhead").locator(".proposal")
    shown.get_by_text("bulkhead: limit 20 -> 4").wait_for()
    words = shown.inner_text()
    assert "Proposed, not proven." in words
    assert "seawall tune --url http://127.0.0.1" in words
    assert "--guard 'search'" in words  # in single quotes, in which a shell expands nothing
    assert "20 bound nothing" in words
    assert "timeout: add it" in words  # it would come last
    payments = band(page, "payments").locator(".layer").filter(has_text="Timeout")
    payments.locator("summary").click()
    payments.locator(".facts").wait_for()
    assert not payments.locator(".proposal").is_visible()
