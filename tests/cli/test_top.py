"""`seawall top`: the command, in and out of a terminal."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from seawall import Breaker
from seawall.cli import main
from seawall.cli.top.client import DashboardClient, parse_address
from seawall.cli.top.messages import validated, verdict
from seawall.dashboard.app import Dashboard
from seawall.events import bus
from tests.cli.top_terminal import COMMAND, SOURCE, terminal
from tests.cli.top_worlds import event, guard, ill, message, served, state, status, stream, view
from tests.support import new_guard
from tests.web.support import serve

pytestmark = pytest.mark.alone  # real servers, and processes in terminals


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "SEAWALL_TOP_HEADER"):
        monkeypatch.delenv(name, raising=False)


# --- Once ---


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        (message(), 0, "All is well."),
        (message(view(guards=[guard(tone="warn")])), 0, "Worth a look."),
        (ill(), 1, "1 thing is wrong."),
    ],
)
def test_the_exit_status_tells_how_it_is(
    told: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str]
):
    """`--once` prints plain text and exits with 0 if nothing is wrong, 1 if something is."""
    with served(state=state(told)) as (url, _):
        assert main(["top", "--once", url]) == code
    out, err = capsys.readouterr()
    assert said in out
    assert "\x1b" not in out
    assert err == ""


def test_colours_are_not_forced_into_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Where stdout is no terminal the text is plain, whatever the environment asks for."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    with served(state=state(ill())) as (url, _):
        main(["top", "--once", url])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 60


def test_json_is_the_message_on_a_line(capsys: pytest.CaptureFixture[str]):
    """`--json` prints the message as it came, with all that steers a terminal escaped."""
    told = {**ill(title="\x1b[31m\u202e"), "more": 1}
    with served(state=state(told)) as (url, _):
        assert main(["top", "--once", "--json", url]) == 1
    out = capsys.readouterr().out
    assert out.isascii()
    assert "\x1b" not in out
    assert json.loads(out) == told


def test_rich_is_needed_for_drawing_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Without rich, `--once --json` works; drawing names the package, and asks no pod."""
    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.setitem(sys.modules, name, None)
    with served(state=state(message())) as (url, asked):
        assert main(["top", "--once", url]) == 2
        assert "rich: pip install 'seawall[cli]'" in capsys.readouterr().err
        assert asked == []
        assert main(["top", "--once", "--json", url]) == 0


@pytest.mark.parametrize("code", [401, 403, 404, 500])
def test_what_cannot_be_seen_is_one_line_and_2(code: int, capsys: pytest.CaptureFixture[str]):
    """What goes wrong is a line on stderr, and the exit status is 2."""
    with served(state=status(code)) as (url, _):
        assert main(["top", "--once", url]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"seawall top: http://.*{code}.*\n", err)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--guard", "nobody"], "no such guard: there are vendor"),
        (["--pod", "nobody"], "no such pod: there are web-1"),
        (["--json", "--guard", "vendor"], "leave out --guard"),
        (["--header", "secret"], "write it as 'Authorization: Bearer"),
    ],
)
def test_what_is_asked_for_in_vain_is_said(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    """A guard or pod that is not there, or a wrong option, is 2 and never "all is well"."""
    with served(state=state(message())) as (url, _):
        assert main(["top", "--once", *arguments, url]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "secret" not in err


def test_only_what_is_asked_for_counts(capsys: pytest.CaptureFixture[str]):
    """With `--guard`, the exit status is about that guard."""
    told = message(view(guards=[guard("a", tone="bad"), guard("b")]))
    with served(state=state(told)) as (url, _):
        assert main(["top", "--once", "--guard", "a", url]) == 1
        assert main(["top", "--once", "--guard", "b", url]) == 0
    assert capsys.readouterr().out.count("GUARDS") == 2


def test_headers_come_from_both_places(monkeypatch: pytest.MonkeyPatch):
    """Headers of the environment, one on each line, and of the command line are all sent."""
    monkeypatch.setenv("SEAWALL_TOP_HEADER", "Authorization: Bearer x\nX-One: 1\n")
    with served(state=state(message())) as (url, asked):
        assert main(["top", "--once", "--header", "X-Two: 2", url]) == 0
    assert [asked[0][name] for name in ("authorization", "x-one", "x-two")] == [
        "Bearer x",
        "1",
        "2",
    ]


def test_without_a_terminal_live_says_what_to_write(capsys: pytest.CaptureFixture[str]):
    """Live and without a terminal there is nothing to draw in, and it says so."""
    assert main(["top", "http://127.0.0.1:1"]) == 2
    assert "write --once or --json" in capsys.readouterr().err


def test_ascii_terminals_get_ascii():
    """Where the output's encoding is ASCII nothing else is written, and nothing fails."""
    told = message(view(guards=[guard("日本語")]))
    with served(state=state(told)) as (url, _):
        ran = subprocess.run(  # noqa: S603 - this project's own command
            [sys.executable, "-c", COMMAND, "top", "--once", url],
            env={**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=False,
        )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert ran.stdout.isascii()
    assert b"+ ???" in ran.stdout


# --- The real one ---


@pytest.mark.usefixtures("_nobody_listens")
def test_it_shows_what_a_real_dashboard_tells(capsys: pytest.CaptureFixture[str]):
    """A mounted dashboard is read, once and live: a breaker that opened is what is wrong."""
    vendor = new_guard(Breaker(consecutive=2))

    def down() -> None:
        raise ConnectionError

    for _ in range(3):
        vendor.attempt(down)
    dashboard = Dashboard(local=True, pod="web-1", every=0.05)
    with serve(dashboard) as url:
        assert main(["top", "--once", "--stacks", url]) == 1
        source = DashboardClient(parse_address(url))
        live = source.messages(pytest.fail)
        readings = [validated(next(live)) for _ in range(2)]
        source.close()
        live.close()
    out = capsys.readouterr().out
    assert f"■ {vendor.name}: The breaker is open" in out
    assert "└ Breaker open" in out
    for reading in readings:
        assert reading.notes == ()
        assert verdict(reading.message) == "bad"
    assert readings[0].message["history"]
    assert readings[1].message["history"] is None


@pytest.fixture
def _nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(bus, "_listeners", ())


# --- Live ---


@contextmanager
def dashboard(*told: dict[str, Any]) -> Iterator[str]:
    """Serve an endless stream that begins with the messages `told`."""
    over = threading.Event()
    with served(events=stream(*map(event, told), until=over)) as (url, _):
        try:
            yield url
        finally:
            over.set()


@pytest.mark.parametrize(
    ("leave", "code"), [(b"\x03", 0), (b"q", 0), (signal.SIGTERM, 143)], ids=["^C", "q", "TERM"]
)
def test_the_terminal_is_left_as_it_was(leave: bytes | int, code: int):
    """However it is ended, the terminal's settings, screen and cursor are what they were."""
    with dashboard(ill()) as url, terminal(url) as shown:
        shown.until("1 thing is wrong")
        assert not shown.is_as_before()
        if isinstance(leave, bytes):
            shown.press(leave)
        else:
            shown.process.send_signal(leave)
        assert shown.ended() == code
        assert shown.is_as_before()
        assert "Traceback" not in shown.seen


def test_keys_and_sizes_change_what_is_drawn():
    """The key `s` draws the stacks and takes them away; a new size is drawn to."""
    with dashboard(ill()) as url, terminal(url) as shown:
        shown.frame("LATELY", without="Retry")
        shown.press(b"s")
        shown.frame("Retry", without="nothing")
        shown.press(b"s")
        assert len(shown.frame("P95", without="Retry")) == 30
        shown.resize(44, 8)
        small = shown.frame("GUARDS", without="P95")
        assert len(small) == 8
        assert max(map(len, small)) <= 44
        shown.press(b"\x1a")  # Ctrl-Z: would leave the shell in our screen
        shown.press(b"q")
        assert shown.ended() == 0


def test_a_lost_dashboard_is_told_and_found_again():
    """When the stream ends it says so and shows the last it knew; then it goes on."""
    answers = [stream(event(message())), status(503), stream(event(ill()))]

    def answer(request: BaseHTTPRequestHandler) -> None:
        (answers.pop(0) if answers else status(503))(request)

    with served(events=answer) as (url, _), terminal(url) as shown:
        shown.until("All is well")
        shown.until("NOT LIVE, last heard .* ago")
        shown.until("1 thing is wrong")
        shown.press(b"q")
        assert shown.ended() == 0


def test_live_waits_for_a_dashboard_that_is_not_there_yet():
    """Without a server it says what it waits for, and retries."""
    with terminal("http://127.0.0.1:1/seawall") as shown:
        shown.until("connection refused.*next try in")
        shown.press(b"\x03")
        assert shown.ended() == 0
        assert shown.is_as_before()


def test_colours_are_shown_unless_unwanted():
    """In a terminal there are colours, with --no-color none."""
    with served(state=state(ill())) as (url, _):
        for arguments, coloured in ([], True), (["--no-color"], False):
            with terminal("--once", *arguments, url) as shown:
                shown.until("LATELY.*\n.*\n")
                assert shown.ended() == 1
                assert ("\x1b[1;31m" in shown.seen) is coloured


def test_live_json_is_a_line_for_each_message():
    """`--json` without `--once` prints each message as it comes, until its reader has enough."""
    with dashboard(message(title="a"), message(title="b")) as url:
        process = subprocess.Popen(  # noqa: S603 - this project's own command
            [sys.executable, "-c", COMMAND, "top", "--json", url],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            stdout=subprocess.PIPE,
        )
        with process:
            assert process.stdout is not None
            lines = [json.loads(process.stdout.readline()) for _ in range(2)]
            process.send_signal(signal.SIGINT)
            assert process.wait(10) == 130
    assert [told["title"] for told in lines] == ["a", "b"]
