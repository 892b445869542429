"""A pod as a process of its own: it tells its view until its standard input ends."""

from __future__ import annotations

import json
import sys

from seawall import Breaker, Guard, RedisStore
from seawall.dashboard._watcher import Watcher
from seawall.dashboard.pods import StorePods


def main() -> None:
    """Take the store's URL and prefix, and this pod's name, as JSON."""
    told = json.loads(sys.argv[1])
    breaker = Breaker()
    guard = Guard("vendor", breaker)
    store = RedisStore(told["url"], prefix=told["prefix"], timeout=2.0)
    watcher = Watcher(pod=told["name"])
    pods = StorePods(store, watcher, every=0.2)
    for _line in sys.stdin:  # each isolates the breaker
        breaker.isolate()
    store.close()
    pods.close()
    watcher.close()
    guard.close()


if __name__ == "__main__":
    main()
