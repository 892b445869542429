"""What can be done to the system: the control strip, without the strip."""

from __future__ import annotations

from typing import Final, NamedTuple


class Switch(NamedTuple):
    """Something that can be broken: its name, what stands on its button, and what it does."""

    name: str
    title: str
    does: str


SWITCHES: Final = (
    Switch("broken", "Break the vendor", "It refuses half of all calls and answers no other."),
    Switch("slow", "Make it slow", "Each of its answers takes 1.5 to 3 s."),
    Switch("cut", "Cut Redis", "The pods lose their shared store, each goes on by itself."),
    Switch("kill", "Kill a pod", "One of them dies at once; it comes back after 8 s."),
    Switch("pause", "Pause a pod", "One of them stands still for 5 s; the others suspect it."),
    Switch("surge", "Surge traffic", "Five times as many requests, the new ones of free users."),
)

NAMES: Final = tuple(switch.name for switch in SWITCHES)
