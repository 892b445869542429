"""The files of the page: read once, by names that are known beforehand.

Requested names are looked up in a table; no path is ever made from them.
"""

from __future__ import annotations

import re
from functools import cache
from html import escape
from importlib.resources import files
from typing import Final, NamedTuple

INDEX: Final = "index.html"
SCRIPTS: Final = re.compile(rb"<!-- (?:extra )?scripts -->")
"""The place in the index for the scripts and styles of a derived page."""

KINDS: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
"""Content types of the files, by the extension of their names."""


class Asset(NamedTuple):
    """One file: its content type and its content."""

    kind: bytes
    body: bytes


@cache
def assets(package: str = "seawall.dashboard", folder: str = "page") -> dict[str, Asset]:
    """Return the files in `folder` of `package` by name."""
    found: dict[str, Asset] = {}
    place = files(package).joinpath(folder)
    if place.is_dir():
        for file in place.iterdir():
            kind = KINDS.get(file.name.rpartition(".")[2])
            if kind is not None and file.is_file():
                found[file.name] = Asset(kind, file.read_bytes())
    return found


def index(page: bytes, more: tuple[str, ...]) -> bytes:
    """Return the index with tags for `more` scripts and styles, which are served like its own."""
    tags = "\n".join(_tag(name) for name in more).encode()
    return SCRIPTS.sub(lambda _: tags, page, count=1)


def _tag(name: str) -> str:
    place = escape(f"page/{name}", quote=True)
    if name.endswith(".css"):
        return f'<link rel="stylesheet" href="{place}">'
    return f'<script type="module" src="{place}"></script>'
