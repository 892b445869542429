from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seawall import Breaker, Bulkhead, Guard, RateLimit, Retry, Timeout
from seawall.dashboard import Dashboard
from seawall.dashboard.actions import guard_actions
from seawall.dashboard.actions.guard_actions import GuardAction, parse_action
from seawall.dashboard.responses import RequestRefused
from seawall.testing import run_virtual
from tests.dashboard.app_support import Browser, Shown, Viewer, get, view_of
from tests.support import falsified, let_pass
from tests.web.support import Answer

ISOLATE = {"pod": "here", "guard": "vendor", "layer": 0, "act": "isolate"}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def operated(**options: Any) -> Dashboard:
    """Return the real thing, on which this machine may act."""
    return Dashboard(local=True, operate=lambda _: "ann", pod="here", **options)


async def acted(app: Any, body: Any) -> Answer:
    """Return the answer to an act by the page."""
    browser = Browser(app)
    await browser.open()
    return await browser.act(body)


def doing(body: dict[str, Any], *policies: Any, **options: Any) -> Answer:
    """Return the answer to an act on a guard of these policies."""

    async def main() -> Answer:
        vendor = Guard("vendor", *policies)
        try:
            return await acted(operated(**options), body)
        finally:
            vendor.close()

    return run_virtual(main())


# --- What can be done ---


def test_a_breaker_is_isolated_and_closed_and_the_page_shows_it_at_once():
    """The act is done, answered with a sentence, and the next message comes without waiting."""

    async def main() -> None:
        breaker = Breaker(consecutive=3)
        vendor = Guard("vendor", Retry(on=OSError), breaker)
        app = operated(every=10.0)
        viewer = Viewer(app)
        await let_pass(0.5)
        body = {**ISOLATE, "layer": 1, "key": None, "changes": {}}
        answer = await acted(app, body)
        assert answer.json() == {"done": "Isolated Breaker of vendor."}
        assert breaker.state == "isolated"
        await let_pass(0.1)
        assert viewer.events[-1]["views"][0]["guards"][0]["breaker"] == "isolated"
        assert viewer.events[-1]["operator"] == "ann"
        assert viewer.events[-1]["views"][0]["operable"] is True
        answer = await acted(app, {**body, "act": "close"})
        assert answer.json() == {"done": "Closed Breaker of vendor."}
        assert breaker.state == "closed"
        await viewer.leave()
        vendor.close()

    run_virtual(main())


@pytest.mark.parametrize("keys", [["de", "fr"], [7, 8], ["7", 7]])
def test_a_key_of_a_keyed_breaker_is_isolated(keys: list[Any]):
    """The key that is shown so is meant, whatever its type; the text itself comes first."""

    async def main() -> None:
        breaker = Breaker(consecutive=3, key=lambda key: key)
        vendor = Guard("vendor", breaker)
        for key in keys:
            vendor.call(lambda key: key, key)
        answer = await acted(operated(), {**ISOLATE, "key": str(keys[0])})
        assert answer.status == 200
        states = {key: model.state.value for key, model in breaker.models().items()}
        assert states == {keys[0]: "isolated", keys[1]: "closed"}
        for key in ("nobody", None):
            assert (await acted(operated(), {**ISOLATE, "key": key})).status == 422
        assert len(breaker.models()) == 2
        vendor.close()

    run_virtual(main())


def test_a_limit_is_changed():
    """A number that is offered is changed, and only that; state is kept."""

    async def main() -> None:
        bulkhead = Bulkhead(5, max_wait=1.0)
        vendor = Guard("vendor", bulkhead, Timeout(2.0))
        app = operated()
        change = {**ISOLATE, "act": "change", "changes": {"limit": 7}}
        with vendor.hold():
            answer = await acted(app, change)
            assert answer.json() == {"done": "Changed Bulkhead of vendor: limit=7."}
            assert vendor.snapshot()["policies"][0]["in_flight"] == 1
        assert (bulkhead.limit, bulkhead.max_wait) == (7, 1.0)
        whole = {**change, "changes": {"limit": 8.0}}
        assert (await acted(app, whole)).status == 200
        assert bulkhead.limit == 8
        vendor.close()

    run_virtual(main())


def test_everything_that_the_page_offers_can_be_done():
    """Each act and each setting of the view, set to what it is, is taken."""

    async def main() -> None:
        vendor = Guard(
            "vendor",
            Retry(on=OSError),
            Breaker(consecutive=3),
            RateLimit("60/s", burst=10),
            Bulkhead(5),
            Timeout(2.0),
        )
        app = operated()
        (view,) = (await get(app, "/state")).json()["views"]
        (guard,) = view["guards"]
        offered = 0
        for place, layer in enumerate(guard["stack"]):
            for change in layer["changes"]:
                changes = {change["name"]: change["value"]}
                body = {**ISOLATE, "layer": place, "act": "change", "changes": changes}
                answer = await acted(app, body)
                assert answer.status == 200, (layer["title"], change, answer.body)
                offered += 1
            for act in layer["acts"]:
                answer = await acted(app, {**ISOLATE, "layer": place, "act": act})
                assert answer.status == 200
        assert offered >= 4
        vendor.close()

    run_virtual(main())


# --- What cannot ---


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"guard": "nobody"}, "no such guard"),
        ({"layer": 9}, "no such layer"),
        ({"layer": -1}, "no such layer"),
        ({"layer": 1}, "Bulkhead cannot be isolated"),
        ({"act": "close"}, "cannot be closed as it is now"),
        ({"act": "__class__"}, "write one of isolate, close, change"),
        ({"act": "update"}, "write one of isolate, close, change"),
        ({"key": "x"}, "this breaker has none"),
        ({"act": "change"}, "belong to the act"),
        ({"changes": {"limit": 3}}, "belong to the act"),
        ({"act": "change", "layer": 1, "changes": {"limit": 0}}, "1 or more"),
        ({"act": "change", "layer": 1, "changes": {"limit": 1.5}}, "whole number"),
        ({"act": "change", "layer": 1, "changes": {"limit": "9"}}, "write a number"),
        ({"act": "change", "layer": 1, "changes": {"order": "lifo"}}, "cannot be changed here"),
        ({"act": "change", "layer": 1, "changes": {"shed": "x"}}, "cannot be changed here"),
        ({"act": "change", "layer": 1, "changes": {"__init__": 1}}, "cannot be changed here"),
        ({"act": "change", "layer": 1, "key": "x", "changes": {"limit": 3}}, "key: "),
        ({"act": "change", "layer": 1, "changes": {"limit": [1]}}, "numbers or text"),
        ({"act": "change", "layer": 1, "changes": {"limit": True}}, "numbers or text"),
        ({"act": "change", "layer": 1, "changes": {"limit": 10**400}}, "numbers or text"),
        ({"act": "change", "layer": 1, "changes": {str(n): 1 for n in range(17)}}, "at most 16"),
        ({"layer": True}, "its place in the stack"),
        ({"layer": "0"}, "its place in the stack"),
        ({"guard": 7}, "guard: write text"),
        ({"guard": "x" * 501}, "guard: write text"),
        ({"pod": None}, "pod: write text"),
        ({"key": ["x"]}, "key: "),
        ({"more": 1}, "Write an object with"),
    ],
    ids=str,
)
def test_what_is_not_offered_is_refused_and_changes_nothing(changed: dict[str, Any], words: str):
    """Each is a 422 whose words say what to write instead."""
    breaker, bulkhead = Breaker(consecutive=3), Bulkhead(5)
    before = repr(breaker), repr(bulkhead)
    answer = doing({**ISOLATE, **changed}, breaker, bulkhead)
    assert answer.status == 422
    assert words in answer.json()["detail"]
    assert (repr(breaker), repr(bulkhead), breaker.state) == (*before, "closed")


def test_a_guard_that_is_gone_or_another_by_now_is_left_alone():
    """Between the look and the act the guard may have been replaced: that one is not meant."""
    vendor = Guard("vendor", Breaker(consecutive=3))
    view: Any = view_of("here")
    asked = parse_action(ISOLATE)
    vendor.close()
    with pytest.raises(RequestRefused, match="not there any more"):
        guard_actions.act_here(asked, view, "ann", "127.0.0.1")
    other = Guard("vendor", Bulkhead(1))
    with pytest.raises(RequestRefused, match="another one by now"):
        guard_actions.act_here(asked, view, "ann", "127.0.0.1")
    other.close()


@given(JSON_VALUES | st.fixed_dictionaries({}, optional=dict.fromkeys(ISOLATE, JSON_VALUES)))
def test_no_json_is_more_than_refused(body: Any):
    """Whatever a body says, it is read as an act or refused with 422."""
    try:
        told: Any = parse_action(body)
    except RequestRefused as refusal:
        told = refusal
    assert isinstance(told, GuardAction) or told.problem.status == 422


CASES = st.tuples(
    st.sampled_from(["isolate", "close", "change"]),
    st.integers(-1, 3),
    st.dictionaries(
        st.sampled_from(["limit", "max_wait", "shed", "key", "model", "mode"]),
        st.integers(-1, 9) | st.sampled_from(["off", "x"]),
        max_size=2,
    ),
)


def only_what_is_offered_is_done(case: tuple[str, int, dict[str, Any]]) -> None:
    act, place, changes = case
    breaker, bulkhead = Breaker(consecutive=3), Bulkhead(5)
    vendor = Guard("vendor", breaker, bulkhead)
    offers = {layer["policy"]: layer for layer in view_of("here")["guards"][0]["stack"]}
    body = {**ISOLATE, "act": act, "layer": place, "changes": changes}
    before = bulkhead.mode, breaker.mode, breaker.settings
    try:
        guard_actions.act_here(parse_action(body), view_of("here"), "ann", "127.0.0.1")  # type: ignore[arg-type]
    except RequestRefused:
        pass
    else:
        kind = vendor.policies[place].kind
        names = {change["name"] for change in offers[kind]["changes"]}
        assert act in offers[kind]["acts"] if act != "change" else changes.keys() <= names
    finally:
        vendor.close()
    assert (bulkhead.mode, breaker.mode, breaker.settings) == before


@given(CASES)
def test_only_what_is_offered_is_ever_done(case: tuple[str, int, dict[str, Any]]):
    """Of all combinations, those are done that the view offers; nothing else is changed."""
    only_what_is_offered_is_done(case)


def test_without_looking_at_the_offer_more_would_be_done(monkeypatch: pytest.MonkeyPatch):
    """It is the offer that keeps an operator from changing the rest."""

    def anything(asked: GuardAction, view: Any) -> Any:
        layer = view["guards"][0]["stack"][asked.layer]
        names = [{"name": name, "value": 1, "kind": "number"} for name in asked.changes]
        return {**layer, "changes": names}

    monkeypatch.setattr(guard_actions, "_offered", anything)
    monkeypatch.setattr(guard_actions, "_fitting", lambda _change, value: value)
    assert falsified(only_what_is_offered_is_done, CASES.filter(lambda case: 0 <= case[1] < 2))


# --- Other pods ---


class Others:
    """Another pod, that may be acted on."""

    def __init__(self, done: Any) -> None:
        self.done = done
        self.asked: list[Any] = []

    async def views(self) -> list[Any]:
        return [view_of("there")]

    async def act(self, pod: str, act: dict[str, Any]) -> str:
        self.asked.append((pod, act))
        if isinstance(self.done, Exception):
            raise self.done
        return str(self.done)


def test_another_pod_does_it_itself(caplog: pytest.LogCaptureFixture):
    """What is for another pod is handed to its source, whole, and logged here, too."""

    async def main() -> None:
        others = Others("Isolated there.")
        app = operated(pods=others)
        answer = await acted(app, {**ISOLATE, "pod": "there"})
        assert answer.json() == {"done": "Isolated there."}
        whole = {**ISOLATE, "pod": "there", "key": None, "changes": {}}
        assert others.asked == [("there", whole)]
        own, other = (await get(app, "/state")).json()["views"]
        assert (own["operable"], other["operable"]) == (True, True)

    run_virtual(main())
    assert [record.levelname for record in caplog.records] == ["WARNING"]


class ViewsOnly:
    """Another pod, that can only be looked at."""

    async def views(self) -> list[Any]:
        return [view_of("there", operable=True)]


@pytest.mark.parametrize(
    ("source", "operable"),
    [(None, []), (Others(LookupError("secret")), [True]), (ViewsOnly(), [False])],
    ids=["none", "fails", "views only"],
)
def test_a_pod_that_cannot_be_acted_on_is_told(source: Any, operable: list[bool]):
    """Without a way to another pod, or if that fails, it is a 409 without inner details."""

    async def main() -> None:
        app = operated(pods=source)
        answer = await acted(app, {**ISOLATE, "pod": "there"})
        assert answer.status == 409
        assert b"secret" not in answer.body
        views = (await get(app, "/state")).json()["views"]
        assert [view["operable"] for view in views[1:]] == operable

    run_virtual(main())


# --- Further acts, and the log ---


def test_a_subclass_has_further_acts_with_the_same_protection():
    """Its errors are reported; without a token or permission it is not reached."""

    class More(Shown):
        _posts = ("break",)

        async def _post(self, name: str, body: Any, operator: str) -> dict[str, Any]:
            if body != {"vendor": "down"}:
                raise ValueError("vendor: write 'down'")
            return {"done": f"{name} by {operator}"}

    async def main() -> None:
        app = More(operate=lambda _: "ann")
        browser = Browser(app)
        await browser.open()
        done = await browser.act({"vendor": "down"}, "/break")
        assert done.json() == {"done": "break by ann"}
        wrong = await browser.act({}, "/break")
        assert (wrong.status, wrong.json()["detail"]) == (422, "vendor: write 'down'")
        assert (await get(app, "/break")).status == 405
        browser.token = browser.token[::-1]
        assert (await browser.act({"vendor": "down"}, "/break")).status == 403
        assert (await browser.act({}, "/mend")).status == 404

    run_virtual(main())


def test_what_was_done_is_logged_in_one_line(caplog: pytest.LogCaptureFixture):
    """Who did what to which guard is one record; names cannot make it look like two."""
    name = "ven\ndor\x1b[31m WARNING dashboard: operator 'eve'"

    async def main() -> None:
        guard = Guard(name, Breaker(consecutive=3))
        app = Shown(operate=lambda _: "ann\r\nroot")
        assert (await acted(app, {**ISOLATE, "guard": name})).status == 200
        guard.close()

    run_virtual(main())
    record, changed = sorted(caplog.records, key=lambda one: one.name)
    assert (record.name, record.levelno) == ("seawall.dashboard", logging.WARNING)
    assert changed.name == "seawall.events"  # that the breaker changed
    assert all(one.getMessage().isprintable() for one in caplog.records)
    assert "'ann\\r\\nroot' (127.0.0.1) did isolate" in record.getMessage()
    assert record.seawall_act == "isolate"  # type: ignore[attr-defined]
