"""Listening addresses of this process, found through its open files.

A server binds its port after the app was created, and no framework passes the address to the app.
So it is looked up: each open file that is a listening TCP socket has its address.
"""

from __future__ import annotations

import os
import socket
import stat
from ipaddress import IPv6Address, ip_address
from typing import Final

FOLDERS: Final = ("/proc/self/fd", "/dev/fd")
"""Where systems list the open files of a process; on others, nothing is known."""

_ANYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_CLOSED: Final = 7
"""The state, in Linux's TCP_INFO, of a socket that neither listens nor is connected."""


def is_loopback(address: str) -> bool:
    """Return whether `address` can be reached from this machine only."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return (parsed if mapped is None else mapped).is_loopback


def listens_beyond_loopback() -> str | None:
    """Return an address and port at which other machines can reach this process, if any.

    Return None too if the system does not provide it (Windows).
    """
    for descriptor in _open_files():
        address = _listening_at(descriptor)
        if address is not None and not is_loopback(address[0]):
            host = f"[{address[0]}]" if ":" in address[0] else address[0]
            return f"{host}:{address[1]}"
    return None


def _open_files() -> list[int]:
    for folder in FOLDERS:
        try:
            return sorted(int(name) for name in os.listdir(folder) if name.isdigit())  # noqa: PTH208
        except OSError:
            continue
    return []


def _listening_at(descriptor: int) -> tuple[str, int] | None:
    """Return the address at which this file listens; None if it is no listening TCP socket."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        # A copy: the owner of the file may close it in the meantime, and this must not close
        # another one.
        copy = os.dup(descriptor)
    except OSError:
        return None
    try:
        looked_at = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None
    with looked_at:
        try:
            return _where(looked_at)
        except OSError:
            return None


def _where(looked_at: socket.socket) -> tuple[str, int] | None:
    if looked_at.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    host, port = looked_at.getsockname()[:2]
    listens = looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return (str(host), int(port)) if listens or _is_about_to(looked_at, host, port) else None


def _is_about_to(bound: socket.socket, host: str, port: int) -> bool:
    """Return whether a server has bound this socket for all addresses, and will listen on it.

    Some servers bind before the app is started, to share the port with other processes.
    """
    if not port or host not in _ANYWHERE or bound.type != socket.SOCK_STREAM:
        return False
    if not hasattr(socket, "TCP_INFO"):
        return False
    return bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
