"""The keeper: runs the embedded Valkey, and ends it when the demo is gone, for whatever reason.

A pod that is suspended at that moment is resumed, so that it ends too. Then the keeper removes the
folder of the demo, with its logs. It runs in its own process, which needs only the standard library
and so starts quickly.
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
    """Start Valkey on a socket in `folder`; as root, run it as an unprivileged user."""
    home = folder / "valkey"
    home.mkdir(mode=0o700)
    program = server
    who: dict[str, Any] = {}
    account = _nobody(folder) if hasattr(os, "geteuid") and os.geteuid() == 0 else None
    if account is not None:
        user, group = account
        # The wheel may be where that user has no access, such as in a home directory.
        program = str(shutil.copy(server, home / "valkey-server"))
        Path(program).chmod(0o555)
        os.chown(home, user, group)
        folder.chmod(0o711)
        who = {"user": user, "group": group, "extra_groups": []}
    options = ["--port", "0", "--unixsocket", str(home / SOCKET), "--unixsocketperm", "700"]
    options += ["--save", "", "--appendonly", "no", "--dir", str(home)]
    options += ["--maxmemory", "64mb", "--daemonize", "no"]
    return subprocess.Popen(  # noqa: S603 - the server of the wheel, with our own arguments
        [program, *options],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=home,
        start_new_session=True,
        **who,
    )


def _nobody(folder: Path) -> tuple[int, int] | None:
    """Return the ids of an unprivileged user, if there is one that can access `folder`."""
    import pwd

    if not all(place.stat().st_mode & 0o001 for place in folder.parents):
        return None
    try:
        found = pwd.getpwnam(NOBODY)
    except KeyError:
        return None
    return found.pw_uid, found.pw_gid


def _resume(pid: int) -> None:
    """Resume a suspended process, which could not notice the end of the demo."""
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        pass


def main(folder: str, server: str) -> None:
    """Run Valkey, if there is one, until the standard input ends; then clean up.

    Each line of the input is a message with the id of the suspended process.
    """
    kept = start(server, Path(folder)) if server else None
    suspended: int | None = None
    ready = {"port": 0, "pid": None if kept is None else kept.pid}
    try:
        sys.stdout.write(json.dumps(ready) + "\n")
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
