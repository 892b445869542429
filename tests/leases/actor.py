"""A process that acts while it leads, for test_two_never_act.py; a command line says how.

It prints what happens (lead, checked, act, refused, failed, over), each with the token. Its wall
clock jumps all the time: nothing may depend on it.
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from seawall import RedisStore
from seawall.clock import SYSTEM
from seawall.durable import Database, Fence, Sqlite
from seawall.durable.database.statements import NOW
from seawall.errors import LeaseLost
from seawall.leases import Lease
from seawall.members import Leader, Term

STEPPED = """
local function clock()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2] + tonumber(redis.call('GET', '{key}') or '0')
end
"""
"""The server's clock, as far ahead as a test has set it."""


def database_at(place: str, name: str) -> Database:
    """Return the database at a URL, or in a file."""
    if "://" not in place:
        return Database(Sqlite(place), name=name)
    from psycopg_pool import ConnectionPool

    pool = ConnectionPool(place, min_size=1, max_size=4, timeout=2.0, open=True)
    return Database(pool, name=name)


def store_at(place: str, prefix: str) -> Any:
    """Return where the lease is kept, with a clock that a test can set."""
    if place.startswith("redis://"):
        store = RedisStore(place, prefix=prefix, timeout=0.5)
        store._core._clock = STEPPED.format(key=f"{prefix}:step")
        return store
    database = database_at(place, "store")
    step = database.names.table("step")
    database._now = f"({NOW[database.dialect]} + (SELECT us FROM {step}))"  # noqa: S608 - our own
    return database


class Actor:
    """What the leader does: looks whether it leads, works for a while, and writes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._ledger = database_at(settings["ledger"], "ledger")
        self._fence = Fence(self._ledger, "acts")

    def lead(self, term: Term) -> None:
        say("lead", term)
        try:
            while not term.stop.wait(0.005):
                self._act(term)
        finally:
            say("over", term)

    def _act(self, term: Term) -> None:
        term.check()
        say("checked", term)
        SYSTEM.sleep(self._settings["work"])
        try:
            with self._ledger.transaction() as conn:
                if self._settings["fenced"]:
                    self._fence.check(conn, term.token)
                conn.execute(f"INSERT INTO acts (token) VALUES ({term.token})")  # noqa: S608 - a number
        except LeaseLost:
            say("refused", term)
            raise
        except Exception:  # noqa: BLE001 - a leader that was stopped in its transaction is in the way
            say("failed", term)
        else:
            say("act", term)


def say(what: str, term: Term) -> None:
    sys.stdout.write(f"{what} {term.token}\n")
    sys.stdout.flush()


def main() -> None:
    settings = json.loads(sys.argv[1])
    real = time.time  # noqa: TID251 - the clock that nobody may ask
    time.time = lambda: real() + random.uniform(-1e6, 1e6)  # noqa: TID251 - the same
    store = store_at(settings["store"], settings["prefix"])
    lease = Lease(store, "actors", ttl=settings["ttl"])
    Leader(lease, margin=settings["margin"]).run(Actor(settings).lead)


if __name__ == "__main__":
    main()
