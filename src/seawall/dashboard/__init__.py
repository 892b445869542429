"""The live page of a service: everything that it guards, what is wrong now, and since when.

    app.mount("/seawall", Dashboard(allow=may_look))

A plain ASGI app without dependencies; see `docs/dashboard.md`. Each name is loaded when it is used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.dashboard._live import Pods
    from seawall.dashboard._visit import Visit
    from seawall.dashboard.app import Dashboard

__all__ = [
    "Dashboard",
    "Pods",
    "Visit",
]

_HOMES = {
    "dashboard._live": "Pods",
    "dashboard._visit": "Visit",
    "dashboard.app": "Dashboard",
}
"""The public names by the module in which they are at home."""

if not TYPE_CHECKING:  # a type checker is to tell of names that are not there
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
