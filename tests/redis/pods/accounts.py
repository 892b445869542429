"""What the pods protect: accounts at the vendor, each with the policy that guards it, by name.

A name that ends in "alone" stands for the same policy without sharing: what the tests demand of
the shared ones must fail for it, or they demand nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from seawall import Breaker, RateLimit
from seawall.policies.breaker import n_of_m, single_probe

BREAK_FOR: Final = 0.2
PROBE_TIMEOUT: Final = 1.0
PROBES: Final = {"one": 1, "some": 3, "one-alone": 1}
"""How many probes may reach the vendor in one trial, over all pods."""
SUCCESSES: Final = {"one": 1, "some": 2, "one-alone": 1}
"""How many of them close the breaker."""

_BROKEN: Final = {"break_for": BREAK_FOR, "probe_timeout": PROBE_TIMEOUT}
# Ten failures are enough, whatever there was before.
_BY_CALLS: Final = {"failure_ratio": 0.5, "window_calls": 20, "min_calls": 10, **_BROKEN}
# As many failures as there were successes since the breaker closed.
_BY_TIME: Final = {"failure_ratio": 0.5, "window": 10.0, "min_calls": 10, **_BROKEN}

RATE: Final = 100
BURST: Final = {"log": 0, "bucket": 10, "leased": 5, "leased-log": 0, "split": 6, "alone": 10}
"""What the algorithm itself admits in a second beyond the rate, in the worst of them."""

_BATCH: Final = 5
"""Three pods hold up to 15 of 100, and 5 is the burst: a fifth."""

Make = Callable[[Any], Any]

POLICIES: Final[Mapping[str, Make]] = {
    "one": lambda store: Breaker(probes=single_probe(), shared=store, name="one", **_BY_CALLS),
    "some": lambda store: Breaker(probes=n_of_m(2, 3), shared=store, name="some", **_BY_TIME),
    "one-alone": lambda _: Breaker(probes=single_probe(), **_BY_CALLS),
    "log": lambda store: _limit(store, "log", algorithm="sliding_log"),
    "bucket": lambda store: _limit(store, "bucket", burst=BURST["bucket"]),
    "leased": lambda store: _limit(
        store, "leased", burst=BURST["leased"], sharing="leased", batch=_BATCH
    ),
    "leased-log": lambda store: _limit(
        store, "leased-log", algorithm="sliding_log", sharing="leased"
    ),
    "split": lambda store: _limit(store, "split", burst=BURST["split"], sharing="split"),
    "alone": lambda _: RateLimit(f"{RATE}/s", burst=BURST["alone"]),
}


def _limit(store: Any, name: str, **options: Any) -> RateLimit:
    """Share a limit. Who cannot ask the store refuses: nothing is hidden."""
    return RateLimit(f"{RATE}/s", shared=store, name=name, on_store_failure="closed", **options)
