"""Responses of hosts: their bodies are watched, and their redirects lead back to the set.

A host is done when the body is: a hundred open streams are load, and a body that breaks off is a
failure, however well it began. The outcome of a body is reported once: at its end, when it is
closed, or when it is garbage-collected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from seawall.clients.http.bodies import PassedBody

if TYPE_CHECKING:
    from seawall.clients.upstreams.picks import Pick

CREATED: Final = 201
REDIRECTS: Final = range(300, 400)


class WatchedBody(PassedBody):
    """The body of a response; reports its end to `pick`."""

    def __init__(self, stream: Any, pick: Pick) -> None:
        super().__init__(stream)
        self._pick = pick

    def _ended(self, error: BaseException | None) -> None:
        self._pick._end(error)  # does nothing if it has ended


def send_back(response: Any, asked: Any, sent: Any, prefix: str) -> None:
    """Rewrite a `Location` at the chosen host to the host that the user requested.

    `asked` is the URL that the user wrote, `sent` the one that was sent. Otherwise a redirect would
    bypass the other hosts, and the client would treat it as another origin and drop the user's
    credentials.
    """
    if response.status_code not in REDIRECTS and response.status_code != CREATED:
        return
    location = response.headers.get("location")
    if location is None or not (prefix or "//" in location):
        return  # a relative URL fits both
    try:
        target = sent.join(location)
        own = (target.scheme, target.host, target.port) == (sent.scheme, sent.host, sent.port)
        path = target.raw_path.decode("ascii")
        if not own or not path.startswith(prefix) or path[len(prefix) :][:1] not in ("", "/", "?"):
            return
        rest = path[len(prefix) :]
        if not rest.startswith("/"):
            rest = f"/{rest}"
        back = asked.copy_with(
            userinfo=b"", raw_path=rest.encode("ascii"), fragment=target.fragment or None
        )
    except Exception:  # noqa: BLE001 - a host may send anything: leave it unchanged
        return
    response.headers["location"] = str(back)
