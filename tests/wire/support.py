"""What tests of parsers need: input that is hostile to them, and a measure of how work grows."""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

HOSTILE = ("9", " ", "\t", '"', "\\", '\\"', ",", ";", "=", "a", "a=1,", "%", "%c3", ";a", ";a=1")
HOSTILE += ('"a",', '"a";q=1;', ":", "@1", "?1,", '%"', "a=1;", "-", "1.", " ,", "(", '"\\', "1, ")


def grows(work: Callable[[Any], Any], unit: str) -> bool:
    """Tell whether eight times the length takes more than thrice eight times as long.

    What takes less than a fifth of a millisecond for 32 KiB is fast, however it grows.
    """
    much = _seconds(work, unit * ((1 << 15) // len(unit)))
    return much > 2e-4 and much > 24 * _seconds(work, unit * ((1 << 12) // len(unit)))


def _seconds(work: Callable[[Any], Any], value: Any) -> float:
    start = process_time()
    work(value)
    return process_time() - start
