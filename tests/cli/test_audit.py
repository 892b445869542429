"""`seawall audit`: formats, choices, baselines and exit status."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from seawall.cli import main

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
