"""What a sensor measured, on its way from the collector to the database."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, replace
from typing import Final

OPEN_WIRE: Final = -999.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one sensor, or that there is none."""

    id: str
    """Given once, by the collector: by it a sample is recognised that comes again."""
    sensor: str
    at: str
    vibration: list[float]
    """Empty if the sensor did not answer."""
    missing: str = ""
    """Why it did not."""
    place: str | None = None
    rms: float | None = None
    lesser: str = ""
    """Why this is less than it should be."""

    @classmethod
    def from_line(cls, line: str) -> Sample:
        """Read one line of the journal."""
        return cls(**json.loads(line))

    def to_line(self) -> str:
        """Write it as one."""
        return json.dumps(asdict(self)) + "\n"


def with_features(sample: Sample) -> Sample:
    """Compute what is asked of a vibration; it runs in a worker process.

    It stands for a library in C that crashes on some records.
    """
    if OPEN_WIRE in sample.vibration:
        os._exit(139)
    mean_square = sum(value * value for value in sample.vibration) / len(sample.vibration)
    return replace(sample, rms=math.sqrt(mean_square))
