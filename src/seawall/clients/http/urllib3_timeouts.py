"""Timeouts of urllib3, for the libraries that send with it: requests and botocore."""

from __future__ import annotations

from typing import Any

from urllib3.util import Timeout


def lowered(timeout: Any, seconds: float | None) -> Any:
    """Return `timeout` with connecting and reading together limited to `seconds`.

    It is a number, a pair for connecting and reading, None, or a timeout of urllib3.
    """
    if seconds is None:
        return timeout
    if isinstance(timeout, Timeout):
        total = timeout.total
        least = min(total, seconds) if isinstance(total, (int, float)) else seconds
        return Timeout(least, timeout._connect, timeout._read)
    connect, read = timeout if isinstance(timeout, tuple) else (timeout, timeout)
    return Timeout(seconds, connect, read)


def relax(raw: Any, timeout: Any) -> None:
    """Apply the user's `timeout` to each remaining piece of the body that is read from `raw`.

    If the response is the connection's last, its socket is not accessible, and nothing changes.
    """
    socket = getattr(getattr(raw, "connection", None), "sock", None)
    if isinstance(timeout, Timeout):
        read = timeout._read if timeout.total is None else socket
    else:
        read = timeout[1] if isinstance(timeout, tuple) else timeout
    if socket is not None and (read is None or isinstance(read, (int, float))):
        socket.settimeout(read)
