"""Simulate a service through its worst hour, with the very policies that will run in production."""

from seawall.sim.clients import ClosedUsers, OpenClients, ramp, zipf
from seawall.sim.latency import Latency
from seawall.sim.records import Change, Disturbance
from seawall.sim.rehearsal import CONDITIONS, Rehearsal, compare, rehearse
from seawall.sim.result import SimulationResult, Verdict
from seawall.sim.seeds import Estimate, Runs, run_seeds
from seawall.sim.services import Network, Service, ServiceFailed, SimulatedStore, asgi
from seawall.sim.world import World, simulate

__all__ = [
    "CONDITIONS",
    "Change",
    "ClosedUsers",
    "Disturbance",
    "Estimate",
    "Latency",
    "Network",
    "OpenClients",
    "Rehearsal",
    "Runs",
    "Service",
    "ServiceFailed",
    "SimulatedStore",
    "SimulationResult",
    "Verdict",
    "World",
    "asgi",
    "compare",
    "ramp",
    "rehearse",
    "run_seeds",
    "simulate",
    "zipf",
]
