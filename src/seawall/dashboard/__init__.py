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
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
