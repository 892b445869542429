"""Tune: better settings from what a service measures, proven in the simulator.

    seawall tune --url http://127.0.0.1:8000/seawall

reads a running service, a snapshot of it or a Prometheus export, and proposes timeouts, attempts,
budgets, breakers, limits, hedges and pool sizes; see
`docs/operate/tune.md`. Each name is loaded when it is used.
"""

from seawall._lazy import lazily

TYPE_CHECKING = False  # as in `seawall` itself
if TYPE_CHECKING:
    from seawall.tune.exports import read_export
    from seawall.tune.measurements import Measurement, measurements_of, tuning_snapshot
    from seawall.tune.proof import Effect, Proof, prove
    from seawall.tune.proposals import Proposal, Refusal, TuningAdvice, propose

__all__ = [
    "Effect",
    "Measurement",
    "Proof",
    "Proposal",
    "Refusal",
    "TuningAdvice",
    "measurements_of",
    "propose",
    "prove",
    "read_export",
    "tuning_snapshot",
]

_HOMES = {
    "tune.exports": "read_export",
    "tune.measurements": "Measurement measurements_of tuning_snapshot",
    "tune.proof": "Effect Proof prove",
    "tune.proposals": "TuningAdvice Proposal Refusal propose",
}
"""Public names by the module that defines them."""

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names
    __getattr__, __dir__ = lazily(__name__, _HOMES, globals())
