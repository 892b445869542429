"""The scripts that run inside the store: `lua/*.lua`, each with the server's clock in front."""

from __future__ import annotations

from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import NamedTuple


class Script(NamedTuple):
    """What the server runs, and the name under which it keeps it."""

    text: str
    sha: str


@cache
def lua(name: str) -> str:
    """Return the text of `lua/<name>.lua`."""
    return files(__package__).joinpath("lua", f"{name}.lua").read_text("utf-8")


@cache
def compose(clock: str, text: str) -> Script:
    """Return the script that has `clock` in front of `text`."""
    whole = f"{clock}\n{text}"
    return Script(whole, sha1(whole.encode(), usedforsecurity=False).hexdigest())
