"""`seawall audit`: formats, choices, baselines and exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from seawall.cli import main
from tests.cli.top_worlds import served, state

BAD = "import requests, time\nrequests.get(url)\nasync def ask():\n    time.sleep(1)\n"


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a small service, which is the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app.py").write_text(BAD)
    return tmp_path


@pytest.mark.usefixtures("service")
def test_findings_have_status_1(capsys: pytest.CaptureFixture[str]):
    """Without a path it reads this folder, and its paths are relative to it."""
    assert main(["audit"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("app.py:2:1: SW101 no-timeout: ")
    assert "app.py:4:5: SW401 blocking-in-async: " in output
    assert output.endswith("2 findings in 1 file: SW101 1, SW401 1\n")


def test_nothing_found_has_status_0(service: Path, capsys: pytest.CaptureFixture[str]):
    """A clean file says so."""
    (service / "app.py").write_text("x = 1\n")
    assert main(["audit", "."]) == 0
    assert capsys.readouterr().out == "nothing found in 1 file\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "there is no file or folder 'nowhere'"),
        (["--select", "SW7777"], "--select SW7777: there is no such rule"),
        (["--baseline", "none.json"], "there is no baseline none.json"),
        (["--format", "xml"], "invalid choice"),
    ],
)
@pytest.mark.usefixtures("service")
def test_bad_usage_has_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    """A mistake is one line on the standard error."""
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "rules"),
    [
        (["--select", "SW1"], ["SW101"]),
        (["--select", "blocking-in-async"], ["SW401"]),
        (["--ignore", "SW101"], ["SW401"]),
        (["--select", "SW1,SW4", "--ignore", "SW4"], ["SW101"]),
    ],
)
@pytest.mark.usefixtures("service")
def test_rules_can_be_chosen(
    arguments: list[str], rules: list[str], capsys: pytest.CaptureFixture[str]
):
    """By ids, by the beginning of ids, and by names."""
    assert main(["audit", "--format", "json", *arguments]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [one["rule"] for one in found] == rules


@pytest.mark.usefixtures("service")
def test_all_rules_ignored_is_clean():
    """What is ignored does not count for the status."""
    assert main(["audit", "--ignore", "SW1,SW4"]) == 0


def test_what_cannot_be_read_is_reported_whatever_is_selected(service: Path):
    """A build must not pass because a file could not be parsed; --ignore says that it may."""
    (service / "app.py").write_text("def (:\n")
    assert main(["audit", "--select", "SW1"]) == 1
    assert main(["audit", "--ignore", "SW900"]) == 0


def test_formats_and_output(service: Path):
    """SARIF goes to a file; annotations are commands."""
    assert main(["audit", "--format", "sarif", "--output", "out.sarif"]) == 1
    assert json.loads((service / "out.sarif").read_text())["version"] == "2.1.0"
    assert main(["audit", "--format", "github", "--output", "out.txt"]) == 1
    assert (service / "out.txt").read_text().startswith("::error file=app.py,line=2,col=1,title=")


def test_baseline(service: Path, capsys: pytest.CaptureFixture[str]):
    """What is in the baseline does not count, what comes later does."""
    assert main(["audit", "--write-baseline", "known.json"]) == 0
    assert main(["audit", "--baseline", "known.json"]) == 0
    assert "nothing found in 1 file, 2 more in the baseline" in capsys.readouterr().out
    (service / "app.py").write_text(f"# moved\n{BAD}requests.post(url)\n")
    assert main(["audit", "--baseline", "known.json", "--format", "json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert found["line"] == 6


def test_rules_are_listed(capsys: pytest.CaptureFixture[str]):
    """--rules needs no path and finds nothing."""
    assert main(["audit", "--rules"]) == 0
    assert "SW101 no-timeout (error)\n" in capsys.readouterr().out


@pytest.mark.usefixtures("service")
def test_plain_text_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """In a terminal without rich the text has no colours; with it, the same words."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["audit"]) == 1
    assert "SW101" in capsys.readouterr().out


# --- A running process ---

FINDINGS = [
    {"path": "guard 'a'", "rule": "SW701", "message": "Timeout(9)", "write": "1"},
    {"path": "guard 'b'", "rule": "SW703", "message": "no call", "write": "it"},
]


def test_a_process_is_asked_at_its_dashboard(capsys: pytest.CaptureFixture[str]):
    """Its findings are shown with the names of its guards, and chosen like others."""
    routes = {"audit?connections=100&pods=4": state({"findings": FINDINGS})}
    with served(**routes) as (url, asked):
        arguments = ["--connections", "100", "--pods", "4", "--header", "X-Key: secret"]
        assert main(["audit", "--url", url, *arguments, "--ignore", "SW703"]) == 1
    output = capsys.readouterr().out
    assert output.startswith("guard 'a': SW701 timeout-far-above-latency: Timeout(9)\n")
    assert output.endswith("1 finding in the process: SW701 1\n")
    assert [one["x-key"] for one in asked] == ["secret"]


def test_a_process_without_findings(capsys: pytest.CaptureFixture[str]):
    """Nothing found is status 0."""
    with served(audit=state({"findings": []})) as (url, _):
        assert main(["audit", "--url", url]) == 0
    assert capsys.readouterr().out == "nothing found in the process\n"


def test_the_findings_of_a_process_have_a_baseline(tmp_path: Path):
    """Findings in the baseline are not reported again."""
    known = str(tmp_path / "known.json")
    with served(audit=state({"findings": FINDINGS})) as (url, _):
        assert main(["audit", "--url", url, "--write-baseline", known]) == 0
        assert main(["audit", "--url", url, "--baseline", known]) == 0


@pytest.mark.parametrize(
    "answer", [{}, [], {"findings": 3}, {"findings": [3]}, {"findings": [{"rule": "SW1"}]}]
)
def test_other_servers_are_no_dashboards(answer: object, capsys: pytest.CaptureFixture[str]):
    """What is no audit is an error, and not a clean process."""
    with served(audit=state(answer)) as (url, _):
        assert main(["audit", "--url", url]) == 2
    assert capsys.readouterr().err.startswith("seawall audit: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:1/x", "src"], "leave out paths"),
        (["--connections", "3"], "go with --url"),
        (["--url", "http://127.0.0.1:1/x", "--pods", "3"], "--pods goes with --connections"),
        (["--url", "http://127.0.0.1:1/x"], "nothing listens there"),
    ],
)
def test_mistakes_about_a_process(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    """Options that do not fit together, and a process that is not there, are status 2."""
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err
