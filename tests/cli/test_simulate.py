from __future__ import annotations

import json
import re
from pathlib import Path
from xml.dom import minidom

import pytest

from seawall.cli import main
from seawall.sim.scenarios import SCENARIOS

WORLDS = """
from seawall import Guard, Timeout

def before(world):
    world.seconds = 30
    vendor = world.service("vendor & <co>", workers=4, latency=0.05)
    world.clients("users", vendor.acall, rate=20, patience=1.0)
    world.at(10, vendor.down(hangs=True), lasts=10)

def after(world):
    world.seconds = 30
    vendor = world.service("vendor & <co>", workers=4, latency=0.05)
    guard = Guard.standard("vendor", on=ConnectionError, timeout=0.5, limit=10)
    world.clients("users", guard(vendor.acall), rate=20, patience=1.0)
    world.at(10, vendor.down(hangs=True), lasts=10)
"""


@pytest.fixture
def worlds(tmp_path: Path) -> Path:
    file = tmp_path / "worlds.py"
    file.write_text(WORLDS)
    return file


def test_scenarios_are_listed(capsys: pytest.CaptureFixture[str]):
    """Without arguments, each scenario has a line."""
    assert main(["simulate"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(SCENARIOS)


def test_two_worlds_are_compared_in_a_table(worlds: Path, capsys: pytest.CaptureFixture[str]):
    """What happened, a column for each world, and a verdict for each."""
    assert main(["simulate", str(worlds)]) == 0
    out = capsys.readouterr().out
    assert "10 s to 20 s: vendor & <co> hangs" in out
    assert re.search(r"^ +before +after$", out, re.MULTILINE)
    assert re.search(r"^  during +0\.0 % +0\.0 %$", out, re.MULTILINE)
    assert re.search(
        r"^before  recovers at once; 0 % of the calls served at worst$", out, re.MULTILINE
    )


def test_json_has_everything_and_replays(worlds: Path, capsys: pytest.CaptureFixture[str]):
    """Two runs print the same bytes; another seed does not."""

    def printed(*given: str) -> str:
        assert main(["simulate", str(worlds), "--json", *given]) == 0
        return capsys.readouterr().out

    first = printed()
    assert first == printed()
    assert first != printed("--seed", "2")
    data = json.loads(first)
    assert [world["name"] for world in data["worlds"]] == ["before", "after"]
    assert len(data["worlds"][0]["series"]["clients"]["users"]["ok"]) == 30
    assert data["worlds"][0]["runs"][0]["kind"] == "recovers"


def test_many_seeds_have_intervals(worlds: Path, capsys: pytest.CaptureFixture[str]):
    """Means with intervals, from two processes."""
    command = ["simulate", f"{worlds}:after", "--seeds", "3", "--processes", "2", "--seconds", "20"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "3 seeds" in out
    assert re.search(r"^goodput +\d+\.\d+ ± \d+\.\d+/s$", out, re.MULTILINE)


def test_the_page_is_one_file_with_charts(worlds: Path, tmp_path: Path):
    """Charts are inline, names are escaped, and nothing is loaded from elsewhere."""
    page = tmp_path / "report.html"
    assert main(["simulate", str(worlds), "--html", str(page)]) == 0
    text = page.read_text("utf-8")
    assert not re.search(r"<script|<link|src=|url\(|@import|https?:", text)
    assert "vendor &amp; &lt;co&gt;" in text
    for title in ("Goodput of users", "Latency of answers", "Load on", "Breakers"):
        assert f"<h3>{title}" in text
    drawn = re.findall(r"<svg.*?</svg>", text)
    assert len(drawn) == 8 + 2  # each of four in both worlds, and the queue of each service
    for svg in drawn:
        minidom.parseString(svg)  # noqa: S318 - our own


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["nothing.toml"], "write a scenario's name, or a .py or .toml file that exists"),
        (["outage", "--seed", "-1"], "seed=-1: write 0 or more"),
        (["outage", "--seconds", "0"], "seconds=0.0"),
    ],
)
def test_mistakes_are_one_line(given: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    """Exit status 2, and what to write instead."""
    assert main(["simulate", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("seawall simulate: ")
    assert said in line
