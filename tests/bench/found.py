"""What a measurement might have found, for tests of how it is reported."""

from __future__ import annotations

from bench import durable


def written(single: float = 85.0) -> durable.Rates:
    """Return what a measurement of databases might have found."""
    return {
        durable.ON_ONE: {durable.BARE: [100.0], durable.SINGLE: [single], durable.ALONE: [90.0]},
        durable.ON_EIGHT: {
            durable.BARE: [100.0],
            durable.SINGLE: [single],
            durable.ALONE: [90.0],
        },
        durable.TRANSACTION: {durable.BARE: [100.0], durable.ONCE: [60.0]},
        durable.OUT: {durable.DRAIN: [60_001.0]},
        durable.FILE: {durable.EACH: [10.0], durable.GROUPED: [30.0]},
    }
