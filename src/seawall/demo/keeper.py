"""Keeps the embedded Valkey, and ends it when the demo is gone, whatever became of that.

A pod that is suspended at that moment is resumed, so that it ends too. Then the keeper removes the
folder of the demo, with the logs in it. It runs in a process of its own, which knows nothing but
the standard library and starts in an instant.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

NOBODY: Final = "nobody"
SOCKET: Final = "valkey.sock"


def start(server: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start it on a socket in `folder`, as a user who may do nothing if we are who may do all."""
    home = folder / "valkey"
    home.mkdir(mode=0o700)
    program = server
    who: dict[str, Any] = {}
    account = _nobody(folder) if hasattr(os, "geteuid") and os.geteuid() == 0 else None
    if account is not None:
        user, group = account
        # The wheel may be where that user cannot look, such as in somebody's home.
        program = str(shutil.copy(server, home / "valkey-server"))
        Path(program).chmod(0o555)
        os.chown(home, user, group)
        folder.chmod(0o711)
        who = {"user": user, "group": group, "extra_groups": []}
    options = ["--port", "0", "--unixsocket", str(home / SOCKET), "--unixsocketperm", "700"]
    options += ["--save", "", "--appendonly", "no", "--dir", str(home)]
    options += ["--maxmemory", "64mb", "--daemonize", "no"]
    return subprocess.Popen(  # noqa: S603 - the server of the wheel, with arguments of our own
        [program, *options],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=home,
        start_new_session=True,
        **who,
    )


def _nobody(folder: Path) -> tuple[int, int] | None:
    """Return the ids of a user without rights, if there is one and it could get to `folder`."""
    import pwd

    if not all(place.stat().st_mode & 0o001 for place in folder.parents):
        return None
    try:
        found = pwd.getpwnam(NOBODY)
    except KeyError:
        return None
    return found.pw_uid, found.pw_gid


def _resume(pid: int) -> None:
    """Let a suspended process go on: it could not see the end of the demo."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def main(folder: str, server: str) -> None:
    """Keep Valkey, if there is one, until the standard input ends; then leave nothing.

    Each line of the input is a message that says which process is suspended.
    """
    kept = start(server, Path(folder)) if server else None
    suspended: int | None = None
    told = {"port": 0, "pid": None if kept is None else kept.pid}
    try:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        while line := sys.stdin.buffer.readline():
            suspended = json.loads(line)["suspended"]
    finally:
        if suspended is not None:
            _resume(suspended)
        if kept is not None:
            kept.kill()
            kept.wait()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
