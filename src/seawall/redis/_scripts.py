"""The scripts that run inside the store: `lua/*.lua`, each prefixed with the server's clock."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """A script's text, and the hash by which the server caches it."""

    text: str
    sha: str


@cache
def lua(name: str) -> str:
    """Return the text of `lua/<name>.lua`."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")


@cache
def compose(clock: str, text: str) -> Script:
    """Return the script that consists of `clock` and `text`."""
    whole = f"{clock}\n{text}"
    return Script(whole, sha1(whole.encode(), usedforsecurity=False).hexdigest())
