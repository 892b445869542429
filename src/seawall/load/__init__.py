"""How loaded a service is: signals, the level of service, blocked event loops.

Each name is imported on first use.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.load.service_levels import ServiceLevels
    from seawall.load.watchdog import LoopWatchdog
    from seawall.models.service_levels import ServiceLevel

__all__ = ["LoopWatchdog", "ServiceLevel", "ServiceLevels"]

_HOMES = {
    "load.service_levels": "ServiceLevels",
    "load.watchdog": "LoopWatchdog",
    "models.service_levels": "ServiceLevel",
}

if not TYPE_CHECKING:  # a type checker must report names that do not exist
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
