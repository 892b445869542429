"""`seawall members`: what is printed, and the exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from seawall.cli import main
from seawall.cli.members import table
from seawall.cli.top.client import DashboardClient
from seawall.dashboard import Dashboard
from seawall.members import MemberState, MemberView
from tests.cli.top_worlds import NOW, message, row, served, state, view
from tests.telemetry.world import Members
from tests.web.support import serve

FIGURES = {"seconds": 8.25, "level": 9.0, "threshold": 8.0}


def _member(name: str, how: str = "alive", group: str = "pods", **facts: str) -> dict[str, Any]:
    tone = {"alive": "ok", "suspected": "warn", "confirmed": "bad"}.get(how, "off")
    told = [["for", "8 s"], ["level", "9 of 8"], *([key, value] for key, value in facts.items())]
    return row(
        f"{group}: {name}",
        kind="member",
        tone=tone,
        state=how,
        facts=told,
        gauge=None,
        track=1.1,
        figures=FIGURES,
    )


def _pod(name: str, *members: dict[str, Any], **more: Any) -> dict[str, Any]:
    groups = dict.fromkeys(one["name"].partition(": ")[0] for one in members)
    rows = [row(group, kind="members") for group in groups]
    return view(name, sections={"Members": [*rows, *members]}, **more)


WELL = message(_pod("web-1", _member("web-2")))


@pytest.mark.parametrize(
    ("how", "code"),
    [("alive", 0), ("left", 0), ("unknown", 0), ("suspected", 1), ("confirmed", 1)],
)
def test_the_exit_status_tells_whether_somebody_is_suspected(
    how: str, code: int, capsys: pytest.CaptureFixture[str]
):
    """0 if no member is suspected, 1 if one is suspected or confirmed as failed."""
    with served(state=state(message(_pod("web-1", _member("web-2", how))))) as (url, _):
        assert main(["members", url]) == code
    assert how in capsys.readouterr().out


def test_a_table_for_each_group_the_worst_first(capsys: pytest.CaptureFixture[str]):
    """Member, state, level, since when, round trip and reason, as all pods see them."""
    suspected = _member("web-3", "suspected", reason="no answer", by="web-2")
    told = message(
        _pod("web-1", _member("web-2", **{"round trip": "4 ms"}), suspected),
        _pod("web-2", _member("web-3"), _member("a: b", group="cells")),
    )
    with served(state=state(told)) as (url, _):
        assert main(["members", url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines if not line.startswith(" ")] == [
        "cells: 1 member",
        "pods: 2 members",
    ]
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "MEMBER STATE LEVEL SINCE ROUND TRIP REASON",
        "web-3 suspected by 1 of 2 pods 9 of 8 8 s - no answer (by web-2)",
        "web-2 alive 9 of 8 8 s 4 ms",
    ]
    assert lines[2].split()[:2] == ["a:", "b"]


def test_what_a_pod_that_is_gone_has_last_seen_does_not_count(
    capsys: pytest.CaptureFixture[str],
):
    """It was cut off before it went; only where no other pod is left it is all that is known."""
    gone = _pod("web-1", _member("web-2", "suspected"), gone=NOW - 30)
    old = _pod("web-4", _member("web-2", "suspected"), age=20.0)
    with served(state=state(message(gone, old, _pod("web-3", _member("web-2"))))) as (url, _):
        assert main(["members", url]) == 0
    with served(state=state(message(gone))) as (url, _):
        assert main(["members", url]) == 1
    assert "suspected" in capsys.readouterr().out


def test_json_has_what_each_pod_says(capsys: pytest.CaptureFixture[str]):
    """One line, in ASCII, with numbers."""
    told = message(
        _pod("web-1", _member("w\u00e9b-3", "suspected", reason="late")),
        _pod("web-2", _member("w\u00e9b-3")),
    )
    with served(state=state(told)) as (url, _):
        assert main(["members", "--json", url]) == 1
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out) == [
        {
            "group": "pods",
            "member": "w\u00e9b-3",
            "state": "suspected",
            "level_ratio": 1.1,
            "pods": {
                "web-1": {"state": "suspected", **FIGURES, "reason": "late"},
                "web-2": {"state": "alive", **FIGURES},
            },
        }
    ]


@pytest.mark.parametrize(
    ("told", "arguments", "why"),
    [
        (message(), [], "no pod watches members: make a Heartbeats or a Cluster"),
        (WELL, ["--group", "cells"], "no such group: there are pods"),
        (WELL, ["--header", "nonsense"], "a header is not one"),
    ],
)
def test_nothing_to_see_is_said_in_a_line(
    told: Any, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
):
    """With status 2, and nothing on the standard output."""
    with served(state=state(told)) as (url, _):
        assert main(["members", *arguments, url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("seawall members: ")
    assert why in err


def test_only_the_groups_that_were_asked_for(capsys: pytest.CaptureFixture[str]):
    """`--group` may be repeated."""
    told = message(_pod("web-1", *(_member("m", group=group) for group in ("a", "b", "c"))))
    with served(state=state(told)) as (url, _):
        assert main(["members", "--group", "a", "--group", "c", url]) == 0
    out = capsys.readouterr().out
    assert ("a: 1" in out, "b: 1" in out, "c: 1" in out) == (True, False, True)


def test_it_is_sent_with_the_headers_of_top(monkeypatch: pytest.MonkeyPatch):
    """Those of the environment, where no other user sees them, and those that are given."""
    monkeypatch.setenv("SEAWALL_TOP_HEADER", "X-One: 1")
    with served(state=state(WELL)) as (url, asked):
        assert main(["members", "--header", "X-Two: 2", url]) == 0
    assert (asked[0]["x-one"], asked[0]["x-two"]) == ("1", "2")


@pytest.mark.parametrize("as_json", [True, False])
def test_watching_shows_each_message_until_it_is_interrupted(
    as_json: bool,  # noqa: FBT001 - a parameter
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """A service without members for a while is no end; the last that was seen is the status."""

    def messages(_self: DashboardClient, _told: Any) -> Iterator[dict[str, Any]]:
        yield WELL
        yield message()
        yield message(_pod("web-1", _member("web-2", "suspected")))
        raise KeyboardInterrupt

    monkeypatch.setattr(DashboardClient, "messages", messages)
    arguments = ["--watch", *(["--json"] if as_json else []), "http://127.0.0.1:1"]
    assert main(["members", *arguments]) == 1
    out = capsys.readouterr().out
    if as_json:
        lines = [json.loads(line) for line in out.splitlines()]
        assert [[one["state"] for one in line] for line in lines] == [["alive"], [], ["suspected"]]
    else:
        assert out.index("alive") < out.index("suspected")
        assert "\x1b" not in out


def test_a_name_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]):
    """Control characters are escaped."""
    with served(state=state(message(_pod("web-1", _member("\x1b[2J\u202e"))))) as (url, _):
        assert main(["members", url]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out


def test_a_real_dashboard_is_read(capsys: pytest.CaptureFixture[str]):
    """What a process sees of its group is in the table."""
    members = Members(
        "cli-pods",
        MemberView("pod-2", MemberState.SUSPECTED, 2.0, level=9.0, threshold=8.0, reason="late"),
        MemberView("pod-3", MemberState.ALIVE, 2.0, threshold=8.0, round_trip=0.004),
    )
    dashboard = Dashboard(local=True, pod="pod-1")
    with serve(dashboard) as base:
        assert main(["members", "--group", "cli-pods", base]) == 1
        printed = capsys.readouterr().out
        assert main(["members", "--json", "--group", "cli-pods", base]) == 1
        dashboard.end_streams()
    assert members.views
    shown = [one["pods"]["pod-1"] for one in json.loads(capsys.readouterr().out)]
    assert [(one["level"], one["threshold"]) for one in shown] == [(9.0, 8.0), (0.0, 8.0)]
    assert shown[0]["seconds"] > 0
    assert shown[1]["round_trip"] == 0.004
    lines = [line.split() for line in printed.splitlines()]
    assert lines[0] == ["cli-pods:", "2", "members"]
    assert lines[2][:2] == ["pod-2", "suspected"]
    assert lines[2][-1] == "late"
    assert lines[3] == ["pod-3", "alive", "0", "of", "8", "8", "s", "4", "ms"]


def test_an_empty_table_has_no_lines():
    """The table is empty while no member is watched."""
    assert list(table([])) == []
