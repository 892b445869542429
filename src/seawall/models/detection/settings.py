"""Probe and gossip intervals of a group, with presets for three kinds of networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from seawall import _checks as check

LEAST_PACKET: Final = 1200  # bytes: the longest update and the longest names fit into it
MOST_MEMBERS: Final = 10_000  # members whose whole view is certain to fit into one message


@dataclass(frozen=True, slots=True)
class SwimSettings:
    """How often to probe and to gossip, and how long to wait before a failure is confirmed.

    The defaults suit one data centre; `wan()` and `local()` are for slower and faster networks.
    """

    interval: float = 1.0
    """Seconds after which a member that has not answered a probe is suspected."""
    timeout: float = 0.5
    """Seconds after which other members are asked to probe it too."""
    probes: int = 3
    """Number of members probed in each interval, one after the other, while all answer."""
    suspicion_multiplier: int = 4
    retransmit_multiplier: int = 4
    indirect_probes: int = 3
    gossip_interval: float = 0.2
    gossip_nodes: int = 3
    exchange_interval: float = 30.0
    gossip_to_dead: float = 30.0
    forget_after: float = 3600.0
    """Seconds for which a confirmed member is remembered and occasionally contacted."""
    pause: float = 5.0
    """Gap between two evaluations, in seconds, above which this process itself was stopped."""
    packet: int = 1400
    max_members: int = 1000
    lifeguard: bool = True
    """Whether this member doubts its own view.

    It then takes into account its own health and pauses, and waits for others to share a suspicion.
    False is plain SWIM, for comparison.
    """

    def __post_init__(self) -> None:
        for name in ("interval", "timeout", "gossip_interval", "exchange_interval", "pause"):
            check.seconds(name, getattr(self, name))
        for name in ("gossip_to_dead", "forget_after"):
            check.seconds(name, getattr(self, name), zero=True)
        check.count("suspicion_multiplier", self.suspicion_multiplier, minimum=2)
        for name in ("probes", "retransmit_multiplier", "gossip_nodes"):
            check.count(name, getattr(self, name))
        check.count("max_members", self.max_members, maximum=MOST_MEMBERS)
        check.count("indirect_probes", self.indirect_probes, minimum=0)
        check.count("packet", self.packet, minimum=LEAST_PACKET)
        check.flag("lifeguard", self.lifeguard)
        if self.timeout >= self.interval:
            raise ValueError(
                f"timeout={self.timeout:g} is not below interval={self.interval:g}: indirect probes"
                " need the rest of the interval; write a timeout of about half of it"
            )


def lan() -> SwimSettings:
    """Return settings for one data centre."""
    return SwimSettings()


def wan() -> SwimSettings:
    """Return settings for members that are far from each other."""
    return SwimSettings(
        interval=5.0,
        timeout=3.0,
        suspicion_multiplier=6,
        gossip_interval=0.5,
        gossip_nodes=4,
        exchange_interval=60.0,
        gossip_to_dead=60.0,
    )


def local() -> SwimSettings:
    """Return settings for processes on one machine."""
    return SwimSettings(
        timeout=0.2,
        suspicion_multiplier=3,
        retransmit_multiplier=2,
        indirect_probes=1,
        gossip_interval=0.1,
        exchange_interval=15.0,
        gossip_to_dead=15.0,
    )
