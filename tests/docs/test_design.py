"""docs/design.md is the map of the code: what it names exists, and its walks are short."""

from __future__ import annotations

import re
import tomllib
from typing import Final

import pytest

from tests.docs.reference import ROOT

PAGE: Final = (ROOT / "docs" / "design.md").read_text("utf-8")
PROSE: Final = re.sub(r"^```python\n.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
PLACES: Final = (ROOT, ROOT / "src", ROOT / "src" / "seawall", ROOT / "docs")
FILE: Final = re.compile(r"(?<![\w<])((?:[\w-]+/)*[\w-]+\.(?:py|lua|js|toml))\b")
WALKS: Final = {
    "A guard call": 12,
    "How pods share": 12,
    "How a request passes the edge": 12,
    "How an effect is kept": 12,
    "How a job of a queue runs": 10,
    "A dashboard update": 12,
}
"""How many files a reader may have to open, by the heading of the walk."""


def code() -> frozenset[str]:
    """Return all words of the code."""
    files = [path for place in ("src", "tests") for path in (ROOT / place).rglob("*.py")]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text("utf-8")))


def test_every_file_that_is_named_exists():
    """A path is that of a file; a bare name is that of some file in src or tests."""
    folders = {path.name for path in (ROOT / "src").rglob("*")} | {"tests"}
    names = {path.name for place in ("src", "tests") for path in (ROOT / place).rglob("*")}
    missing = []
    for name in set(FILE.findall(PROSE)):
        if "/" in name and name.split("/")[0] in folders:
            found = any((place / name).is_file() for place in PLACES)
        else:
            found = name.split("/")[-1] in names
        if not found:
            missing.append(name)
    assert missing == []


def test_every_folder_that_is_named_exists():
    """A name with a slash at its end is a folder of the checkout or of the package."""
    inside = [path for path in (ROOT / "src").rglob("*") if path.is_dir()]
    known = [f"/{path.relative_to(ROOT)}/" for path in inside]
    named = set(re.findall(r"`((?:[\w-]+/)+)`", PROSE))
    missing = [name for name in named if not any(one.endswith(f"/{name}") for one in known)]
    assert [name for name in missing if not (ROOT / name).is_dir()] == []


def test_every_name_of_the_code_exists():
    """What is set as code, and looks like a class, a function or an argument, is in the code."""
    spans = re.findall(r"`([^`\n]+)`", PROSE)
    name = re.compile(r"(?<![\w./-])[A-Za-z_]\w{3,}\b(?!\.(?:py|lua|js|toml))")
    assert {word for span in spans for word in name.findall(span)} - code() == set()


@pytest.mark.parametrize("heading", WALKS)
def test_a_walk_is_short(heading: str):
    """The table of a walk has a row for each file, no file twice, and not too many."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    files = re.findall(r"^\|(?: \d+ \|)? `([\w./]+)` \|", section, re.MULTILINE)
    assert 8 <= len(files) <= WALKS[heading]
    assert len(files) == len(set(files))
    assert [name for name in files if not (ROOT / "src" / "seawall" / name).is_file()] == []


def test_the_layers_are_those_of_the_linter():
    """The picture of the layers has those of the linter's contract, in the same order."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    contract = next(one for one in tools["importlinter"]["contracts"] if one["id"] == "layers")
    checked = [re.findall(r"\w+", layer) for layer in contract["layers"]]
    picture = PAGE.split("\n## Layers\n")[1].split("```\n")[1]
    drawn = [re.split(r"  ", line)[0] for line in picture.splitlines()]
    drawn = [name for line in drawn for name in re.findall(r"\w+", line)]
    assert drawn == [name for layer in checked for name in layer if name != "__main__"]
