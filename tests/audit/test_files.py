"""Which files are read, what suppresses a finding, and what cannot be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from seawall.audit import RULES, audit_files, audit_source

BAD = "import requests\nrequests.get(url)\n"


def names_of(folder: Path, **options: object) -> list[str]:
    found = audit_files([folder], **options)  # type: ignore[arg-type]
    return [str(Path(path).relative_to(folder)) for path, _ in found]


def test_only_the_source_of_the_service_is_read(tmp_path: Path):
    """Environments, builds, hidden folders, generated files and tests are left out."""
    for name in (
        "app/main.py",
        "app/notes.txt",
        "app/api_pb2.py",
        ".venv/lib/a.py",
        "venv/a.py",
        "build/a.py",
        "node_modules/a.py",
        "tests/test_a.py",
        "app/conftest.py",
        "app/tests.py",
        "app_tests/a.py",
        "app/pytest/a.py",
        "app/_version.py",
        "versioneer.py",
        "hatch_build.py",
        "skip/a.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(BAD)
    assert names_of(tmp_path) == ["app/main.py", "skip/a.py"]
    assert names_of(tmp_path, exclude=["skip"]) == ["app/main.py"]
    assert names_of(tmp_path, tests=True) == [
        "app/conftest.py",
        "app/main.py",
        "app/pytest/a.py",
        "app/tests.py",
        "app_tests/a.py",
        "skip/a.py",
        "tests/test_a.py",
    ]


def test_a_file_that_is_named_is_read(tmp_path: Path):
    """A file that is named explicitly is checked, also if it is a test."""
    path = tmp_path / "test_a.py"
    path.write_text(BAD)
    ((_, found),) = audit_files([path])
    assert [one.rule.id for one in found] == ["SW101"]


def test_a_missing_path_is_an_error(tmp_path: Path):
    """A path that is not there must not pass for a clean one."""
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        list(audit_files([tmp_path / "none"]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"def (:\n", "syntax error"),
        (b"x = 1\n  y = 2\n", "syntax error"),
        (b"\xff\xfe\x00bad", "cannot be read"),
        (b"# -*- coding: nonsense -*-\n", "cannot be read"),
        (b"x = '\0'\n", "null byte"),
        (b"x = " + b"(" * 5000 + b")" * 5000, ""),
    ],
)
def test_what_cannot_be_read_is_a_finding(tmp_path: Path, content: bytes, message: str):
    """A file that is no Python is reported with its line, and the others are read."""
    (tmp_path / "a.py").write_bytes(content)
    (tmp_path / "b.py").write_text(BAD)
    (_, broken), (_, fine) = audit_files([tmp_path])
    assert [one.rule.id for one in broken] == ["SW900"]
    assert message in broken[0].message
    assert broken[0].line >= 1
    assert [one.rule.id for one in fine] == ["SW101"]


def test_other_encodings_and_line_ends_are_read(tmp_path: Path):
    """A file is decoded as Python would."""
    path = tmp_path / "a.py"
    path.write_bytes(b"# coding: latin-1\r\nimport requests\r\nrequests.get('\xe9')\r\n")
    ((_, found),) = audit_files([path])
    assert [(one.rule.id, one.line) for one in found] == [("SW101", 3)]


@pytest.mark.parametrize(
    "code",
    [
        "requests.get(url)  # seawall: ok a script, run by hand",
        "# seawall: ok a script, run by hand\nrequests.get(url)",
        "requests.get(\n    url,  # seawall: ok a script, run by hand\n)",
        "requests.get(url)  # noqa: S113  # seawall: ok a script, run by hand",
    ],
)
def test_a_reason_suppresses(code: str):
    """The comment stands on a line of the call, or on the line above it."""
    assert audit_source(f"import requests\n{code}\n") == []


def test_a_suppression_needs_a_reason():
    """Without a reason it suppresses nothing, and is a finding itself."""
    found = audit_source("import requests\nrequests.get(url)  # seawall: ok\n")
    assert [one.rule.id for one in found] == ["SW101", "SW901"]


def test_a_text_is_no_comment():
    """Only a comment suppresses; the same words in a string do not."""
    found = audit_source('import requests\nrequests.get("# seawall: ok because")\n')
    assert [one.rule.id for one in found] == ["SW101"]


def test_the_audited_source_is_neither_imported_nor_run(tmp_path: Path):
    """It is read as text: nothing in it happens, whatever stands at its top level."""
    written = tmp_path / "written"
    source = f"import requests\nopen({str(written)!r}, 'w')\nrequests.get(url)\nraise SystemExit\n"
    (tmp_path / "app.py").write_text(source, "utf-8")
    before = set(sys.modules)
    ((_, findings),) = audit_files([tmp_path])
    assert [one.rule.id for one in findings] == ["SW101"]
    assert not written.exists()
    assert not {"app", "requests"} & (set(sys.modules) - before)


def test_the_page_lists_every_rule():
    """docs/operate/audit.md has a line for each rule, with its name."""
    page = (Path(__file__).parents[2] / "docs" / "operate" / "audit.md").read_text("utf-8")
    for rule in RULES.values():
        assert f"| {rule.id} | {rule.name} |" in page
