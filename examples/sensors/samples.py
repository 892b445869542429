"""What a sensor measured, on its way from the collector to the database."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final

STREAM: Final = "samples"
PARTITIONS: Final = 8
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

    def to_json(self) -> str:
        """Write it as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Sample:
        """Read it from text."""
        return cls(**json.loads(text))

    @classmethod
    def from_entry(cls, fields: Mapping[str, bytes]) -> Sample:
        """Read it from an entry of the stream."""
        return cls.from_json(fields["value"])


def by_sensor(sample: Sample) -> str:
    """Return the key by which samples are in order."""
    return sample.sensor


def with_features(sample: Sample) -> Sample:
    """Compute what is asked of a vibration; it runs in a worker process.

    It stands for a library in C that crashes on some records.
    """
    if OPEN_WIRE in sample.vibration:
        os._exit(139)
    mean_square = sum(value * value for value in sample.vibration) / len(sample.vibration)
    return replace(sample, rms=math.sqrt(mean_square))
