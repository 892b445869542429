"""How long a request has waited in the server before a thread took it.

Two sources, of which the longer time counts:

- On Linux the kernel knows when the last bytes of the request arrived (TCP_INFO). Needed is the
  connection's socket, which gunicorn and Werkzeug put into the environ.
- A trusted proxy may write when it passed the request on: `X-Request-Start: t=1700000000.123`, in
  seconds, milliseconds or microseconds. The clocks of both machines have to agree.

Without either it is 0: nothing is refused for it.
"""

from __future__ import annotations

import re
import socket
import struct
import time
from typing import Any, Final

from seawall.web.request import Incoming

_TCP: Final = socket.IPPROTO_TCP
_INFO: Final = getattr(socket, "TCP_INFO", None)
_INFO_SIZE: Final = 104
_LAST_RECEIVED: Final = struct.Struct("@I")
_LAST_RECEIVED_AT: Final = 52
"""Position of `tcpi_last_data_recv` in Linux' `struct tcp_info`: milliseconds."""

_START: Final = re.compile(r"(?:t=)?([0-9]{10,17}(?:\.[0-9]{1,6})?)", re.ASCII)
_MILLISECONDS: Final = 1e11
_MICROSECONDS: Final = 1e14  # numbers from these on are in that unit

LONGEST: Final = 3600.0
"""Longer waits are not believed: the clocks differ, or the text is something else."""


def queue_wait(environ: dict[str, Any], incoming: Incoming) -> float:
    """Return the seconds that the request has waited; 0 if that is unknown."""
    known = 0.0
    connection = environ.get("gunicorn.socket") or environ.get("werkzeug.socket")
    if connection is not None and _INFO is not None:
        try:
            info = connection.getsockopt(_TCP, _INFO, _INFO_SIZE)
            known = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_AT)[0] / 1e3
        except (OSError, struct.error, AttributeError):
            pass  # a unix socket, or another system
        if known > LONGEST:
            known = 0.0
    start = environ.get("HTTP_X_REQUEST_START")
    if start is not None and incoming.trust.is_proxy(incoming.peer):
        known = max(known, _since(start))
    return known


def _since(text: str) -> float:
    """Return the seconds since the time in this header; 0 if it is none."""
    found = _START.fullmatch(text.strip())
    if found is None:
        return 0.0
    at = float(found[1])
    if at >= _MILLISECONDS:
        at /= 1e6 if at >= _MICROSECONDS else 1e3
    seconds = time.time() - at  # noqa: TID251 - the proxy writes the time of day
    return seconds if 0.0 < seconds < LONGEST else 0.0
