"""The parts that can be broken in each demo: the buttons of the control strip."""

from __future__ import annotations

from typing import Final, NamedTuple


class Switch(NamedTuple):
    """A part that can be broken: its name, the text on its button, and the effect."""

    name: str
    title: str
    does: str


SERVICE: Final = (
    Switch("broken", "Break the vendor", "It refuses half of all calls and answers no other."),
    Switch("slow", "Make it slow", "Each of its answers takes 1.5 to 3 s."),
    Switch("cut", "Cut Redis", "The pods lose their shared store, each goes on by itself."),
    Switch("kill", "Kill a pod", "One of them dies at once; it comes back after 8 s."),
    Switch("pause", "Pause a pod", "One of them stands still for 5 s; the others suspect it."),
    Switch("surge", "Surge traffic", "Five times as many requests, the new ones of free users."),
)

PIPELINE: Final = (
    Switch("S1", "Break sensor S1", "It does not answer; the others are read without it."),
    Switch("S2", "Break sensor S2", "It does not answer; the others are read without it."),
    Switch("S3", "Break sensor S3", "With three of five broken, there is too little to go on."),
    Switch("slow", "Slow directory", "It answers after 1.5 s: samples go on without a place."),
    Switch("down", "Directory down", "It refuses all calls: samples go on without a place."),
    Switch("poison", "Poison records", "Worker processes die of them; they become dead letters."),
    Switch("failover", "Database fails over", "It refuses everything: samples wait for it."),
    Switch("sink", "Slow database", "A batch takes 4 s: the sensors are read more seldom."),
)
