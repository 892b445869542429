"""A baseline knows what was there before, wherever it has moved."""

from __future__ import annotations

from pathlib import Path

import pytest

from seawall.audit import audit_source
from seawall.audit.findings import new_findings, read_baseline, write_baseline

OLD = "import requests\ndef ask():\n    requests.get(url)\n"


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    assert write_baseline(path, audit_source(OLD, "a.py")) == 1
    return path


def lines_of(text: str, baseline: Path, path: str = "a.py") -> list[int]:
    """Return the lines of the findings that are new."""
    found = new_findings(audit_source(text, path), read_baseline(baseline))
    return [one.line for one in found]


def test_known_findings_are_not_new(baseline: Path):
    """The same file has nothing new."""
    assert lines_of(OLD, baseline) == []


def test_findings_stay_known_when_lines_move(baseline: Path):
    """Lines above it, and another indentation, change nothing."""
    assert lines_of(f"# moved\n\nother = 1\n{OLD}", baseline) == []
    assert lines_of(OLD.replace("    requests", "  requests"), baseline) == []


def test_other_code_is_new(baseline: Path):
    """Other arguments, another function, another file, and a second copy are new."""
    assert lines_of(OLD.replace("url", "other"), baseline) == [3]
    assert lines_of(OLD.replace("ask", "fetch"), baseline) == [3]
    assert lines_of(OLD, baseline, path="b.py") == [3]
    assert lines_of(f"{OLD}    requests.get(url)\n", baseline) == [4]


def test_baseline_is_the_same_for_the_same_findings(baseline: Path, tmp_path: Path):
    """Written again, it is the same file: nothing to commit."""
    again = tmp_path / "again.json"
    write_baseline(again, audit_source(f"\n{OLD}", "a.py"))
    assert again.read_text() == baseline.read_text()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 2, "findings": []}', "\xff"])
def test_other_files_are_refused(tmp_path: Path, content: str):
    """What is no baseline is an error and not an empty baseline."""
    path = tmp_path / "other.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"other\.json"):
        read_baseline(path)


def test_missing_baseline_says_how_to_write_one(tmp_path: Path):
    """A missing file is a mistake in a build, and not a first run."""
    with pytest.raises(ValueError, match="write one by --write-baseline"):
        read_baseline(tmp_path / "none.json")
