from __future__ import annotations

import json
from typing import Any

import pytest

from seawall import current_deadline, deadline
from seawall.dashboard import history, sampler
from seawall.testing import run_virtual
from tests.dashboard.app_support import FakeWatcher, Others, Shown, Viewer, get, view_of
from tests.dashboard.pods_support import guard
from tests.support import let_pass

TROUBLE = {"id": "x", "tone": "bad", "where": "w", "what": "?", "advice": "a", "since": 1.0}

# --- Trouble ---


def test_a_watcher_that_fails_breaks_nothing(caplog: pytest.LogCaptureFixture):
    """A sample that cannot be taken is logged once a minute, and the next one is shown."""

    async def main() -> None:
        app = Shown()
        viewer = Viewer(app)
        await let_pass(1.5)
        app.watchers[0].fails = ValueError("boom")
        await let_pass(5.0)
        app.watchers[0].fails = None
        await let_pass(2.0)
        assert viewer.events[-1]["at"] == 1009.0
        await viewer.leave()

    run_virtual(main())
    assert [record.getMessage() for record in caplog.records] == [
        "dashboard: no sample: ValueError('boom')"
    ]


def test_nothing_to_show_is_told():
    """While no sample can be taken, `/state` answers 503."""

    async def main() -> None:
        app = Shown()
        watcher = FakeWatcher()
        watcher.fails = OSError()
        app._new_watcher = lambda: watcher  # type: ignore[method-assign]
        assert (await get(app, "/state")).status == 503

    run_virtual(main())


def test_pods_are_shown_side_by_side():
    """Other pods come after this one, by name; each once; what is no view is left out."""

    async def main() -> None:
        others = Others(view_of("b"), view_of("a"), view_of("here"), view_of("a"), 7, {}, None)
        others.views_told += [{"format": 1, "pod": 3}, view_of("c") | {"format": 99}]
        message = (await get(Shown(pods=others), "/state")).json()
        assert [view["pod"]["name"] for view in message["views"]] == ["here", "a", "b"]

    run_virtual(main())


def test_a_process_with_nothing_to_show_shows_the_others_alone():
    """A subclass may leave its own process out: its view, and its past."""

    class Outside(Shown):
        _shows_itself = False

    async def main() -> None:
        app = Outside(pods=Others(view_of("pod-2"), view_of("pod-1")))
        message = (await get(app, "/state")).json()
        assert [view["pod"]["name"] for view in message["views"]] == ["pod-1", "pod-2"]
        assert sorted(message["history"]) == ["pod-1", "pod-2"]

    run_virtual(main())


def test_the_past_of_other_pods_is_kept_too(monkeypatch: pytest.MonkeyPatch):
    """A stream begins with the past of all pods: a point for each view, as far as there is room."""

    async def main() -> None:
        others = Others()
        app = Shown(pods=others)
        viewer = Viewer(app)
        async with app:
            for n in range(5):
                # One whose view is old adds nothing.
                others.views_told = [view_of("a", at=1000.0 + n, age=3), view_of("b")]
                await let_pass(1.0)
            message = (await get(app, "/state")).json()
            past = message["history"]
            assert list(past) == ["here", "a", "b"]
            assert [len(past[pod]["at"]) for pod in ("a", "b")] == [5, 1]
            assert message["views"][1]["age"] == 3
            monkeypatch.setattr(sampler, "LARGEST_HISTORY", 100)
            await let_pass(1.0)
            assert list((await get(app, "/state")).json()["history"]) == ["here", "a"]
            others.views_told = []
            await let_pass(2.0)
            assert list((await get(app, "/state")).json()["history"]) == ["here"]
        await viewer.task

    run_virtual(main())


def test_others_are_asked_for_while_somebody_looks():
    """Other pods are read only while there are viewers; a new viewer waits for the read."""

    async def main() -> None:
        others = Others(view_of("a"))
        app = Shown(pods=others)
        async with app:
            await let_pass(10.5)
            assert (others.asked, app.watchers[0].samples) == (0, 11)
            names = [one["pod"]["name"] for one in (await get(app, "/state")).json()["views"]]
            assert (names, others.asked) == (["here", "a"], 1)
            await let_pass(sampler.LOOKED_AT + 5.0)
            before = others.asked
            assert before <= sampler.LOOKED_AT + 1
            await let_pass(60.0)
            assert others.asked == before
            viewer = Viewer(app)
            await let_pass(40.0)
            assert all(len(one["views"]) == 2 for one in viewer.events)
            assert others.asked > before + 38
            await viewer.leave()

    run_virtual(main())


def test_many_large_pods_are_shown_with_less(monkeypatch: pytest.MonkeyPatch):
    """A message has room for all pods: of those with more than their part, what is well goes."""
    monkeypatch.setattr(sampler, "LARGEST_TOGETHER", 40_000)

    async def main() -> None:
        crowd = [guard(f"g{n}", tone="bad" if n == 70 else "ok") for n in range(100)]
        wrong = [dict(TROUBLE, id=str(n), what="?" * 200) for n in range(100)]
        large = view_of("a", guards=crowd), view_of("b", guards=[guard()])
        app = Shown(pods=Others(*large, view_of("c", troubles=wrong), view_of("d")))
        answer = await get(app, "/state")
        assert len(answer.body) < 60_000
        own, a, b, c, d = answer.json()["views"]
        assert 0 < len(a["guards"]) < 100
        assert "g70" in [one["name"] for one in a["guards"]]
        assert (len(b["guards"]), len(b["guards"][0]["stack"])) == (1, 1)
        assert len(c["troubles"]) < 100
        assert (own["pod"]["name"], d["pod"]["name"]) == ("here", "d")

    run_virtual(main())


def test_a_source_that_costs_much_is_asked_less_often():
    """What it takes to read the others counts as what it takes to sample."""

    async def main() -> None:
        others = Others(view_of("a"))
        others.cost = 0.5
        viewer = Viewer(Shown(pods=others))
        await let_pass(50.5)
        assert others.asked == 11
        await viewer.leave()

    run_virtual(main())


def test_a_view_that_json_cannot_tell_hides_no_other():
    """A pod with a NaN in its view is left out, and the others are shown."""

    async def main() -> None:
        others = Others(view_of("bad", load=float("nan")), view_of("good"), view_of("x", at={1}))
        message = (await get(Shown(pods=others), "/state")).json()
        assert [view["pod"]["name"] for view in message["views"]] == ["here", "good"]

    run_virtual(main())


@pytest.mark.parametrize("trouble", [ConnectionError("secret"), "no list", "hangs"])
def test_a_source_of_pods_that_fails_is_a_trouble_of_this_pod(trouble: Any):
    """It is shown with the instant since when, without the error's text, until it is over.

    What was known of the others is shown as old as it is by now, and no longer than a minute.
    """

    async def main() -> None:
        others = Others(view_of("a", age=1.0))
        app = Shown(pods=others)
        viewer = Viewer(app)
        await let_pass(1.5)
        assert viewer.events[-1]["views"][1]["age"] == 1.0
        healthy = others.views_told
        if trouble == "hangs":
            others.hangs = True
        else:
            others.views_told = trouble
        await let_pass(30.0)
        times = [one["at"] for one in viewer.events]
        assert times == [1001.0 + n for n in range(len(times))]
        assert len(times) > 22
        view, old = viewer.events[-1]["views"]
        assert 22 < old["age"] < 32
        ages = [one["views"][1]["age"] for one in viewer.events]
        assert ages[2:] == sorted(set(ages[2:]))
        (told,) = view["troubles"]
        assert told["tone"] == "warn"
        assert told["since"] < times[-1] - 10
        assert told["advice"].startswith("What is shown of them is old.")
        assert "secret" not in json.dumps(told)
        await let_pass(45.0)
        (view,) = viewer.events[-1]["views"]
        assert view["troubles"][0]["since"] == told["since"]
        assert view["troubles"][0]["advice"].startswith("Only this pod is shown.")
        others.hangs, others.views_told = False, healthy
        await let_pass(10.0)
        views = viewer.events[-1]["views"]
        assert [view["pod"]["name"] for view in views] == ["here", "a"]
        assert views[0]["troubles"] == []
        await viewer.leave()

    run_virtual(main())


def test_a_pod_that_tells_too_much_has_no_past_here(monkeypatch: pytest.MonkeyPatch):
    """Curves are kept of as many guards and rows as there is room for, whatever pods tell."""
    monkeypatch.setattr(history, "MOST_CURVES", 20)

    async def main() -> None:
        crowd = [guard(f"g{n}") for n in range(50)]
        app = Shown(pods=Others(view_of("a", guards=crowd), view_of("b", guards=[guard()])))
        message = (await get(app, "/state")).json()
        assert [len(view["guards"]) for view in message["views"]] == [0, 50, 1]
        assert list(message["history"]) == ["here"]
        monkeypatch.setattr(history, "MOST_CURVES", 360)
        app = Shown(pods=Others(view_of("a", guards=crowd), view_of("b", guards=[guard()])))
        assert list((await get(app, "/state")).json()["history"]) == ["here", "a", "b"]

    run_virtual(main())


def test_extra_is_sent_and_its_failure_is_not():
    """What a subclass sends beside comes with each message; if it fails, the rest comes."""

    class More(Shown):
        told: Any = {"vendor": "up"}  # noqa: RUF012

        async def _extra(self) -> Any:
            return self.told

    async def main() -> None:
        app = More()
        assert (await get(app, "/state")).json()["extra"] == {"vendor": "up"}
        app = More()
        app.told = {"bad": object()}
        assert (await get(app, "/state")).json()["extra"] is None

    run_virtual(main())


def test_sampling_outlives_the_request_that_began_it():
    """What is sampled later has not the deadline of the first who looked."""

    class More(Shown):
        async def _extra(self) -> Any:
            left = current_deadline()
            return None if left is None else {"left": left.remaining()}

    async def main() -> None:
        app = More()
        async with deadline(5.0):
            assert (await get(app, "/state")).json()["extra"] is None

    run_virtual(main())
