"""The hook of `.pre-commit-hooks.yaml`, as pre-commit runs it: by `git commit`, on staged files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / ".pre-commit-hooks.yaml"

RUNNER = f"""#!{sys.executable}
import re, shlex, subprocess, sys
from pathlib import Path
import yaml

(hook,) = yaml.safe_load(Path({str(HOOKS)!r}).read_text("utf-8"))
assert hook["language"] == "python" and hook["types"] == ["python"] and hook["require_serial"]
asked = ["git", "diff", "--staged", "--name-only", "--no-ext-diff", "-z", "--diff-filter=ACMRTUXB"]
staged = subprocess.check_output(asked, text=True).split("\\0")
files = [file for file in staged if file.endswith(".py") and not re.search(hook["exclude"], file)]
program, *arguments = shlex.split(hook["entry"])
program = Path({sys.executable!r}).with_name(program)
sys.exit(subprocess.call([program, *arguments, *hook.get("args", []), *files]) if files else 0)
"""

BAD = "import requests\n\n\ndef get(url):\n    return requests.get(url)\n"
GOOD = BAD.replace("get(url)\n", "get(url, timeout=5)\n").replace(
    "def get(url, timeout=5)", "def get(url)"
)


class Repository:
    """A repository with the hook."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._git("init", "-q")
        hook = folder / ".git" / "hooks" / "pre-commit"
        hook.parent.mkdir(exist_ok=True)
        hook.write_text(RUNNER, "utf-8")
        hook.chmod(0o755)

    def write(self, name: str, text: str) -> None:
        """Write a file, and stage it."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        self._git("add", name)

    def commit(self) -> subprocess.CompletedProcess[str]:
        """Commit what is staged, if the hook allows it."""
        return self._git("commit", "-m", "work", check=False)

    def _git(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        who = ("-c", "user.name=me", "-c", "user.email=me@example.org")
        own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        return subprocess.run(  # noqa: S603 - git, with our own arguments
            ["git", *who, *arguments],  # noqa: S607
            cwd=self.folder,
            env=own | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"},
            check=check,
            capture_output=True,
            text=True,
        )


def test_a_commit_with_a_finding_is_refused_until_it_is_mended(tmp_path: Path):
    """The finding is shown with its place; what is not staged, no Python or a test is not read."""
    repository = Repository(tmp_path)
    repository.write("app/client.py", BAD)
    repository.write("tests/test_client.py", BAD)
    repository.write("notes.txt", BAD)
    (tmp_path / "draft.py").write_text(BAD, "utf-8")
    refused = repository.commit()
    said = refused.stdout + refused.stderr
    assert refused.returncode == 1
    assert "app/client.py:5:12: SW101" in said
    assert "1 finding in 1 file" in said
    repository.write("app/client.py", GOOD)
    mended = repository.commit()
    assert mended.returncode == 0, mended.stdout + mended.stderr


def test_a_commit_without_python_passes(tmp_path: Path):
    """The hook is not run without files of its type."""
    repository = Repository(tmp_path)
    repository.write("notes.txt", "notes\n")
    assert repository.commit().returncode == 0
