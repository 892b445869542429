"""A pod in its own process, with no viewer, that runs until its standard input ends."""

from __future__ import annotations

import json
import sys

from seawall import Breaker, Guard, RedisStore
from seawall.dashboard import Dashboard


def main() -> None:
    """Take the store's URL and prefix, and this pod's name, as JSON."""
    told = json.loads(sys.argv[1])
    breaker = Breaker()
    guard = Guard("vendor", breaker)
    store = RedisStore(told["url"], prefix=told["prefix"], timeout=2.0)
    dashboard = Dashboard(local=True, shared=store, pod=told["name"], every=0.2)
    for _line in sys.stdin:  # each isolates the breaker
        breaker.isolate()
    store.close()
    dashboard.close()
    guard.close()


if __name__ == "__main__":
    main()
