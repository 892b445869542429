"""`seawall top`: what is read of a message, and how it is drawn."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from seawall.cli.top import history as history_module
from seawall.cli.top import layout, messages
from seawall.cli.top.drawing import frame
from seawall.cli.top.history import MOST_TRACKS, TopHistory
from seawall.cli.top.layout import ASCII, UNICODE, ScreenBlock, Unit, allotted, glyphs_for, line
from seawall.cli.top.messages import NotADashboard, narrowed, parse, validated, verdict
from tests.cli.top_worlds import (
    NOW,
    guard,
    history,
    ill,
    layer,
    message,
    row,
    text_of,
    trouble,
    view,
)
from tests.support import falsified


def drawn(told: dict[str, Any], width: int = 120, height: int | None = None, **more: Any) -> str:
    read = validated(told).message
    return text_of(frame(read, TopHistory().take(read), width, height, **more), 1000)


# --- What it says ---


def test_it_says_what_is_wrong_and_since_when():
    """A problem is shown with place, text, start, duration and advice."""
    text = drawn(ill())
    assert "■ 1 thing is wrong." in text
    assert re.search(
        r"■ vendor: The breaker is open\. +since \d\d:\d\d:\d\d, 2 min\n  Look at the vendor\.",
        text,
    )


def test_members_that_are_well_are_left_to_seawall_members():
    """Of a group there may be hundreds: the group has a line, and who is not alive."""
    rows = [
        row("pods", kind="members", tone="warn", state="1 suspected, 200 alive"),
        row("pods: pod-7", kind="member", tone="warn", state="suspected"),
        *(row(f"pods: well-{n}", kind="member", state="alive") for n in range(200)),
    ]
    text = drawn(message(view(sections={"Members": rows})))
    assert "1 suspected, 200 alive" in text
    assert "pods: pod-7" in text
    assert "well-" not in text


@pytest.mark.parametrize(
    ("rates", "calls"),
    [
        ({"succeeded": 5.0, "degraded": 20.0, "failed": 20.0}, 25),
        ({"degraded": 20.0, "failed": 2.0, "rejected": 18.0}, 20),
        ({"degraded": 20.0, "failed": 2.0}, 20),  # others shared what two calls failed with
        ({"succeeded": 5.0, "failed": 12.0, "rejected": 3.0}, 20),
    ],
)
def test_a_degraded_call_is_counted_once(rates: dict[str, float], calls: int):
    """It failed or was refused before it was answered by less: the two are one call."""
    names = ("succeeded", "degraded", "failed", "rejected", "cancelled", "retries")
    told = dict.fromkeys(names, 0.0) | rates
    text = drawn(message(view("web-1", guards=[guard("vendor", rates=told)])), 60)
    (drawn_line,) = [one for one in text.splitlines() if one.startswith("● vendor")]
    assert f" {calls} " in drawn_line


def test_it_says_the_last_error_of_what_is_not_well():
    """Below the guard; of a guard that is well only with its stack."""
    last = "503 from vendor.example, 12 times, 3 s ago"
    for tone, stacks, told in [("bad", False, 1), ("ok", False, 0), ("ok", True, 1)]:
        one = guard("vendor", tone) | {"last_error": last}
        text = drawn(message(view("web-1", guards=[one])), stacks=stacks)
        assert text.count(f"last error: {last}") == told
    assert "last error" not in drawn(message(view("web-1", guards=[guard("vendor", "bad")])))


def test_it_says_which_pods_are_not_seen_now():
    """Of a view that is old it says how old, of a pod that is gone since when; else nothing."""
    text = drawn(
        message(
            view("web-1"),
            view("web-2", age=42.0),
            view("web-3", age=90.0, gone=NOW - 90.0),
            view("web-4", age=2.0),
            view("web-5", age=6.0, every=5.0),
        )
    )
    assert "NOT SEEN NOW" in text
    assert "▲ web-2: as of 42 s ago\n" in text
    assert re.search(r"○ web-3: gone since \d\d:\d\d:\d\d, 1 min\n", text)
    assert not re.search(r"web-[145]: ", text)
    assert "NOT SEEN NOW" not in drawn(message())


def test_it_says_that_all_is_well():
    """Where nothing is wrong, it says so plainly."""
    assert "● All is well." in drawn(message())


def test_a_guard_is_told_with_its_numbers_and_its_past():
    """A guard's line has state, breaker over time, calls as bars, rate, errors and quantiles."""
    (told,) = [text for text in drawn(ill(), 160).splitlines() if text.startswith("■ vendor o")]
    for part in ("open", "▁" * 10 + "█" * 10, "▅▆", "50", "20%", "12.3ms", "250ms", "1.5s"):
        assert part in told


def test_stacks_are_drawn_when_asked_for():
    """The stack of a guard is drawn below it, outermost first, with settings, facts and sharing."""
    asked, unasked = drawn(message(), stacks=True), drawn(message())
    assert "    ├ Retry · 50 % of 30 s · shared · failures 12\n    └ Breaker closed" in asked
    assert "Retry" not in unasked


def test_sections_and_happenings_are_shown():
    """Rows have a gauge, a state and facts; what happened stands with its time."""
    text = drawn(message(history={"web-1": history()}))
    assert re.search(r"QUEUES\n● orders +████░░░░ +[▁-█]+ queue 3 wait · oldest 2 s", text)
    assert re.search(r"LATELY\n\d\d:\d\d:\d\d ■ vendor: The breaker opened\.", text)


def test_the_same_trouble_of_several_pods_is_told_once():
    """A trouble that pods share stands once, with their names and its first beginning."""
    pods = [
        view(f"web-{n}", troubles=[trouble(since=NOW - 100 * n)], guards=[guard(tone="bad")])
        for n in range(1, 6)
    ]
    text = drawn(message(*pods), 160)
    assert text.count("The breaker is open.") == 1
    assert "vendor (web-1, web-2, web-3 and 2 more)" in text
    assert "8 min" in text


def test_what_does_not_fit_is_counted_and_the_worst_comes_first():
    """With too few lines, bad guards are shown before good ones, and the rest is counted."""
    guards = [guard(f"g{n:02}", "bad" if n == 17 else "ok") for n in range(20)]
    text = drawn(message(view(guards=guards, sections={}, happenings=[])), 80, 12)
    lines = [text for text in text.splitlines() if re.match(r". g\d\d", text)]
    assert lines[0].startswith("■ g17")
    assert f"… {20 - len(lines)} more" in text
    assert len(text.splitlines()) <= 12


def test_a_narrow_terminal_still_tells_what_is_wrong():
    """In 60 columns the whole sentence, its time, and state, errors and p99 are legible."""
    text = drawn(message(view(troubles=[trouble()]), view("web-2", troubles=[trouble()])), 60)
    flat = " ".join(text.split())
    assert "vendor (web-1, web-2): The breaker is open." in flat
    assert "2 min" in flat
    assert re.search(r"vendor +web-1 +well .*20% +1\.5s", text)


# --- It always fits ---

NAMES = st.text(max_size=40) | st.sampled_from(
    [
        "\x1b[31mred",
        "\u202eevil",
        "[bold]b[/bold]",
        "日本語" * 12,
        "e" + "\u0301" * 50,
        "👩‍💻️ x",
        "\ud800",
    ]
)
TONES = st.sampled_from(["ok", "warn", "bad", "off"])
AMOUNTS = st.floats(0, 1e15) | st.integers(0, 10**15)
FACTS = st.lists(st.tuples(NAMES, NAMES).map(list), max_size=3)
LAYERS = st.builds(
    lambda title, tone, state, facts: layer(title, tone, state) | {"facts": facts},
    NAMES,
    TONES,
    NAMES,
    FACTS,
)
GUARDS = st.builds(
    lambda name, tone, state, amount, share, edge, stack: guard(
        name, tone, state=state, p99=amount, error_ratio=share, edge=edge, stack=stack, p50=None
    ),
    NAMES,
    TONES,
    NAMES,
    AMOUNTS,
    st.floats(0, 1),
    st.booleans(),
    st.lists(LAYERS, max_size=3),
)
ROWS = st.builds(
    lambda name, tone, facts, fill, track: row(name, tone, facts=facts, gauge=fill, track=track),
    NAMES,
    TONES,
    FACTS,
    st.none() | st.floats(0, 1),
    st.none() | st.floats(-1e15, 1e15),
)
TROUBLES = st.builds(
    lambda where, tone, what, since: trouble(where, tone, what=what, since=since),
    NAMES,
    TONES,
    NAMES | st.text(min_size=100, max_size=300),
    st.floats(-1e15, 1e15),
)
VIEWS = st.builds(
    lambda pod, guards, rows, troubles: view(
        pod, guards=guards, sections={"Queues": rows}, troubles=troubles
    ),
    NAMES,
    st.lists(GUARDS, max_size=4),
    st.lists(ROWS, max_size=4),
    st.lists(TROUBLES, max_size=3),
)
MESSAGES = st.lists(VIEWS, max_size=3).map(
    lambda views: message(*views, history={v["pod"]["name"]: history() for v in views})
)
CASES = st.tuples(
    MESSAGES,
    st.integers(40, 200),
    st.none() | st.integers(1, 60),
    st.booleans(),
    st.sampled_from([UNICODE, ASCII]),
)


def check_fits(case: tuple[Any, ...]) -> None:
    """Render a case, and look at every line of it."""
    told, width, height, stacks, glyphs = case
    text = drawn(
        json.loads(json.dumps(told)), width, height, stacks=stacks, glyphs=glyphs, status="keys"
    )
    lines = text.splitlines()
    assert all(cell_len(one) <= width for one in lines)
    assert all(one.isprintable() for one in lines)
    assert not re.search(r"[\u0300-\u036f]{5}", text)
    if height is not None:
        assert len(lines) <= height
    if glyphs is ASCII:
        assert text.isascii()


@given(CASES)
def test_any_message_fits_any_terminal(case: tuple[Any, ...]):
    """Whatever is named how, no line is too wide, none too many, and nothing steers a terminal."""
    check_fits(case)


def test_without_the_cut_lines_would_be_too_wide(monkeypatch: pytest.MonkeyPatch):
    """The property fails if lines are not cut: that is what keeps them in."""
    monkeypatch.setattr(layout, "set_cell_size", lambda text, _width: text)
    assert falsified(check_fits, CASES)


def test_without_the_reading_names_would_steer_the_terminal(monkeypatch: pytest.MonkeyPatch):
    """The property fails if views are taken as they come: reading them is what disarms names."""
    monkeypatch.setattr(messages, "valid_view", lambda told: told)
    assert falsified(check_fits, CASES)


def test_without_calming_marks_would_pile_up(monkeypatch: pytest.MonkeyPatch):
    """The property fails if marks are not counted."""
    monkeypatch.setattr(messages, "MOST_MARKS", 1000)
    assert falsified(check_fits, CASES)


@given(st.integers(0, 80), st.lists(st.tuples(st.integers(1, 20), st.integers(2, 9)), max_size=6))
def test_blocks_share_the_height(height: int, wanted: list[tuple[int, int]]):
    """No more lines are given than there are, none gets more than it has, and none just a title."""
    blocks = [ScreenBlock(line("t"), [Unit([line("x")], "ok")] * n, least) for n, least in wanted]
    given_lines = allotted(height, blocks)
    assert sum(given_lines) <= height
    for block, lines in zip(blocks, given_lines, strict=True):
        assert lines == 0 or 2 <= lines <= block.height
        assert len(block.cut(lines, UNICODE)) <= lines
    if sum(block.height for block in blocks) <= height:
        assert given_lines == [block.height for block in blocks]


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [
        ("utf-8", UNICODE),
        ("UTF8", UNICODE),
        ("ascii", ASCII),
        ("cp1252", ASCII),
        ("no such", ASCII),
    ],
)
def test_glyphs_are_those_that_can_be_written(encoding: str, glyphs: Any):
    """Where only ASCII can be written, ASCII is drawn."""
    assert glyphs_for(encoding) is glyphs


def test_markup_is_text():
    """What looks like markup is shown as it is."""
    assert "[red]x[/red]" in drawn(message(view(guards=[guard("[red]x[/red]")])))


# --- Reading ---

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["views", "history", "format", "pod", "at", "guards", "title", "rows"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=25,
)


@given(JSON)
def test_any_json_is_read_or_refused(told: Any):
    """Whatever is sent, it is refused as no message of ours, or it can be drawn."""
    try:
        raw = parse(json.dumps(told))
    except NotADashboard:
        return
    drawn(raw)


@given(st.dictionaries(st.sampled_from(["at", "guards", "rows"]), JSON), JSON)
def test_any_past_is_read(past: dict[str, Any], track: Any):
    """A past that makes no sense is no past, and never a failure."""
    for told in (past, {**history(), **past, "guards": {"vendor": track}}):
        drawn(message(history={"web-1": told}), 160)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"views":1}', b"\xff", b"[" * 100_000, b'{"views":[],"at":NaN}']
)
def test_what_is_no_message_is_refused(text: bytes):
    """Garbage of any sort, deep nesting and numbers that are none are refused with one error."""
    with pytest.raises(NotADashboard, match="not a Seawall dashboard"):
        parse(text)


def test_a_pod_that_cannot_be_read_is_left_out_and_told():
    """A view of another version or shape hides no other, and a note says what is missing."""
    read = validated(message(view(), view("b", format=2), view("c", guards="none"), view("web-1")))
    assert [v["pod"]["name"] for v in read.message["views"]] == ["web-1"]
    assert read.notes == (
        "1 pod of another version of Seawall not shown",
        "1 pod not shown: what was sent of them cannot be read",
    )


@pytest.mark.parametrize(
    ("told", "tone"),
    [
        (message(), "ok"),
        (message(view(guards=[guard(tone="warn")])), "warn"),
        (message(view(guards=[guard(tone="off")])), "ok"),
        (message(view(), view("b", sections={"Queues": [row(tone="bad")]})), "bad"),
        (message(view(troubles=[trouble()])), "bad"),
    ],
)
def test_the_verdict_is_the_worst_of_all(told: dict[str, Any], tone: str):
    """Anything bad makes the whole bad, wherever it is told; what is off disturbs nobody."""
    assert verdict(validated(told).message) == tone


def test_what_is_not_asked_for_is_left_out():
    """By pod or guard, with * and ?, only what is about them is left."""
    told = validated(
        message(view(guards=[guard(), guard("other")], troubles=[trouble("other")]), view("db-1"))
    ).message
    assert [v["pod"]["name"] for v in narrowed(told, ["db-?"], [])["views"]] == ["db-1"]
    (first, _) = narrowed(told, [], ["vend*"])["views"]
    assert [g["name"] for g in first["guards"]] == ["vendor"]
    assert (first["troubles"], first["sections"]) == ([], {})
    assert len(first["happenings"]) == 1


def test_how_many_guards_there_are_is_said_if_not_all_are_shown():
    """The header counts those that were left out, unless only some were asked for."""
    told = message(view(all_guards=300), view("web-2"))
    shown = sum(len(one["guards"]) for one in told["views"])
    there = 300 + len(told["views"][1]["guards"])
    assert f" {shown} of {there} guards " in drawn(told).splitlines()[0]
    some = narrowed(validated(told).message, [], ["*"])
    assert all("all_guards" not in one for one in some["views"])


# --- The past ---


def test_the_past_goes_on_with_each_message():
    """The first message brings the past; each further sample adds a point, a repeated one none."""
    past = TopHistory()
    first = validated(message(history={"web-1": history(3)})).message
    past.take(first)
    past.take(validated(message()).message)
    (told,) = past.take(validated(message(view(at=NOW + 1), at=NOW + 1)).message).values()
    assert told["at"] == [NOW - 2, NOW - 1, NOW, NOW + 1]
    assert told["guards"]["vendor"]["succeeded"] == [0.0, 1.0, 2.0, 40.0]
    assert told["guards"]["vendor"]["breaker"] == ["closed", "closed", "open", "closed"]
    assert told["rows"]["queue/orders"] == [0.0, 1.0, 2.0, 3.0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=12))
def test_the_past_is_even_and_bounded(steps: list[tuple[int, int]]):
    """All lists of a pod are of one length, whichever guards come and go, and never too long."""
    past, at = TopHistory(), NOW
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(history_module, "MOST_POINTS", 8)
        for number, samples in steps:
            for _ in range(samples):
                at += 1
                told = view(f"pod-{number % 2}", at=at, guards=[guard(f"g{number}")])
                kept = past.take(validated(message(told, at=at)).message)
            for pod in kept.values():
                lists = [t for track in pod["guards"].values() for t in track.values()]
                lengths = {len(one) for one in [*lists, *pod["rows"].values(), pod["at"]]}
                assert len(lengths) == 1
                assert max(lengths) <= 8


def test_names_without_end_do_not_fill_the_memory():
    """Pods and guards that always have new names are not all kept."""
    past = TopHistory()
    for number in range(220):
        at = NOW + number
        told = view(f"pod-{number}", at=at, guards=[guard(f"g{number}-{n}") for n in range(25)])
        kept = past.take(validated(message(told, at=at)).message)
    assert len(kept) <= 200
    assert sum(len(pod["guards"]) + len(pod["rows"]) for pod in kept.values()) <= MOST_TRACKS
