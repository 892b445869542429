"""The live page of a service: everything that it guards, what is wrong now, and since when.

    app.mount("/seawall", Dashboard(allow=may_look))

A plain ASGI app without dependencies; see `docs/operate/dashboard.md`. Each name is loaded when it
is used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.dashboard.app import Dashboard
    from seawall.dashboard.sampler import PodSource
    from seawall.dashboard.visit import Visit

__all__ = ["Dashboard", "PodSource", "Visit"]

_HOMES = {
    "dashboard.sampler": "PodSource",
    "dashboard.visit": "Visit",
    "dashboard.app": "Dashboard",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
