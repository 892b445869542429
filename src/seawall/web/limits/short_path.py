"""Limits for the short path of the edge: all in this process, taken without creating an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from seawall.models.rate.rates import MICROSECONDS
from seawall.web.limits.fields import STATE, Header, state_header
from seawall.web.limits.groups import Held, Part

if TYPE_CHECKING:
    from seawall.policies.rate_limit.fast_path import Quick, Taken

_MOST_WRITTEN: Final = 1000

Fields = Callable[[float, tuple[float, ...]], list[Header]]
"""Function that returns the limit headers, given the time of taking and the states after it."""


class PlainLimits:
    """Limits for requests without a tier, where all of them support the fast path."""

    __slots__ = ("_part", "fields", "quick")

    def __init__(self, part: Part, quick: Quick, told: Header | None) -> None:
        """Take with `quick`; `told` is the policy header for callers, or None for no headers."""
        self._part = part
        self.quick = quick
        self.fields = None if told is None else _fields(part, told)

    def give_back(self, us: float, taken: Taken) -> None:
        """Give back what was taken, since the request cannot be admitted yet."""
        Held(self._part, taken[0], (us, taken[1])).cancel()


def _fields(part: Part, policy: Header) -> Fields:
    """Return a function that writes the fields; most services report one limit to callers."""
    if len(part.terms) == 1:
        place, told, most, tolerance, units, time = part.terms[0]
        written: dict[tuple[float, float], list[Header]] = {}

        def of_one(us: float, states: tuple[float, ...]) -> list[Header]:
            free = tolerance - states[place] + us  # from here on as in `Held.binding`
            left = free * units // time
            more = -(-(left + 1) * time // units) - free
            standing = left, -(-more // MICROSECONDS)
            try:  # a caller well within its limit gets the same values repeatedly
                return written[standing]
            except KeyError:
                pass
            if len(written) >= _MOST_WRITTEN:
                written.clear()
            fields = [policy, (STATE, b"%b%d;t=%d" % (told, min(left, most), standing[1]))]
            written[standing] = fields
            return fields

        return of_one

    def of_several(us: float, states: tuple[float, ...]) -> list[Header]:
        binding = Held(part, None, (us, states)).binding()
        return [policy] if binding is None else [policy, state_header(*binding)]

    return of_several
