"""Failure detection: which members of a group are alive, suspected or gone, and which one leads.

Each name is loaded when it is first used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall`: importing typing costs more than this file
if TYPE_CHECKING:
    from seawall.events import MemberChanged, OwnPause
    from seawall.members.actions import (
        Action,
        MembersPresent,
        eject_suspected,
        hand_over,
        split_limit,
    )
    from seawall.members.cluster import Cluster
    from seawall.members.group import MemberView
    from seawall.members.heartbeats import Heartbeats
    from seawall.members.keyring import Keyring
    from seawall.members.leader import Leader, Term
    from seawall.members.probes import grpc_probe, http_probe, tcp_probe
    from seawall.models.detection.detectors import (
        exponential,
        fixed_timeout,
        phi_accrual,
        quantile_timeout,
    )
    from seawall.models.detection.gossip import MemberState
    from seawall.models.detection.settings import (
        SwimSettings,
        lan,
        local,
        wan,
    )
    from seawall.models.outliers import ActionBound

__all__ = [
    "Action",
    "ActionBound",
    "Cluster",
    "Heartbeats",
    "Keyring",
    "Leader",
    "MemberChanged",
    "MemberState",
    "MemberView",
    "MembersPresent",
    "OwnPause",
    "SwimSettings",
    "Term",
    "eject_suspected",
    "exponential",
    "fixed_timeout",
    "grpc_probe",
    "hand_over",
    "http_probe",
    "lan",
    "local",
    "phi_accrual",
    "quantile_timeout",
    "split_limit",
    "tcp_probe",
    "wan",
]

_HOMES = {
    "members.actions": "Action MembersPresent eject_suspected hand_over split_limit",
    "members.cluster": "Cluster",
    "members.group": "MemberView",
    "members.heartbeats": "Heartbeats",
    "members.keyring": "Keyring",
    "members.leader": "Leader Term",
    "members.probes": "grpc_probe http_probe tcp_probe",
    "models.detection.detectors": "exponential fixed_timeout phi_accrual quantile_timeout",
    "models.detection.gossip": "MemberState",
    "models.detection.settings": "SwimSettings lan local wan",
    "models.outliers": "ActionBound",
    "events": "MemberChanged OwnPause",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
