"""What the measurements are to show. Every line of a table that has a target has it here.

The number that is judged is, on Seawall's own line, its cost as a multiple of the bare call; on
another library's line, how many times cheaper Seawall is. Of what is shared it is how many times
faster Seawall is; of what is durable, how many are done in the time of one without it.
"""

from __future__ import annotations

from typing import NamedTuple

from bench.cases import OURS
from bench.durable import (
    DRAIN,
    FILE,
    GROUPED,
    ON_EIGHT,
    ON_ONE,
    ONCE,
    OUT,
    SINGLE,
    TRANSACTION,
)
from bench.peers import ASYNC_DRAWER, ASYNC_DRAWER_OF_FIVE, HYX, PEERS, PYRESILIENCE
from bench.pipelines import BATCHED, IN_BATCHES, IN_PROCESSES, PIPELINES, POOLED, RETRIED
from bench.shared import EXACT, LEASED, PURGATORY, PYBREAKER, SHARED_BREAKER, SHARED_LIMIT
from bench.telemetry import ON, TELEMETRY
from bench.web import IN_LOOP, IN_THREAD, SEAWALL, SERVERS
from bench.wsgi import HELLO, WAITS


class Target(NamedTuple):
    """A number that must not be exceeded, or must be reached."""

    limit: float
    ceiling: bool

    def __str__(self) -> str:
        return f"{'at most' if self.ceiling else 'at least'} {self.limit:.3g}"

    def met_by(self, value: float) -> bool:
        """Tell whether `value` is good enough."""
        return value <= self.limit if self.ceiling else value >= self.limit


def at_most(limit: float) -> Target:
    """Return the target of staying at or below `limit`."""
    return Target(limit, ceiling=True)


def at_least(limit: float) -> Target:
    """Return the target of reaching `limit`."""
    return Target(limit, ceiling=False)


THREADS = "threads"
IMPORTS = "imports"
SHARED = "shared"
WEB = "web"
WSGI = "wsgi"
POISSON = f"{WEB}, Poisson arrivals at capacity"
DURABLE = "durable"

SINGLE_POLICIES = (
    "retry, sync",
    "retry, async",
    "breaker, sync",
    "breaker, async",
    "bulkhead, sync",
    "bulkhead, async",
    "limiter, sync",
    "limiter, async",
    "timeout, async",
)

TARGETS: dict[tuple[str, str], Target] = {
    # Ahead of every library that does the same one thing.
    **{(row, peer): at_least(1.0) for row in SINGLE_POLICIES for peer in PEERS[row]},
    # Four policies cost little, and much less than four policies elsewhere.
    ("stack, async", OURS): at_most(15.0),
    ("stack, async", HYX): at_least(18.0),
    ("stack, async", ASYNC_DRAWER): at_least(30.0),
    ("stack, sync", OURS): at_most(32.0),
    ("stack, sync", PYRESILIENCE): at_least(8.0),
    # A fifth does not change that.
    ("five, async", OURS): at_most(17.0),
    ("five, async", HYX): at_least(18.0),
    ("five, async", ASYNC_DRAWER_OF_FIVE): at_least(35.0),
    ("five, sync", OURS): at_most(36.0),
    # To refuse costs a tenth of what it costs to serve, or a flood of refusals is a load too.
    **{("refusal, async", name): at_most(0.1) for name in ("Shed", "Breaker, open", "RateLimit")},
    # To be seen costs next to nothing.
    (TELEMETRY, ON): at_most(1.1),
    # Accounts, retries and order cost no more than queues by hand, which have none of them.
    (PIPELINES, RETRIED): at_most(1.0),
    (IN_BATCHES, BATCHED): at_most(2.0),
    (IN_PROCESSES, POOLED): at_least(0.85),
    # Threads that share a guard do not slow each other down.
    (THREADS, f"{OURS}, 8 threads"): at_least(0.8),
    # The import itself is felt by no one; what a guard needs is loaded with the first guard.
    (IMPORTS, OURS): at_most(1 / 3),
    # A limit that all pods share costs a round trip for many decisions, a shared breaker none.
    (SHARED_LIMIT, EXACT): at_least(5.0),
    (SHARED_LIMIT, LEASED): at_least(10.0),
    (SHARED_BREAKER, PURGATORY): at_least(100.0),
    (SHARED_BREAKER, PYBREAKER): at_least(100.0),
    # A pod that is asked for too much does as much as it can, in time; to refuse costs little.
    **{
        (f"{WEB}, {handler}", line): target
        for handler in (IN_LOOP, IN_THREAD)
        for line, target in (
            ("least goodput of its peak", at_least(0.8)),
            ("longest p99 of that without load", at_most(3.0)),
            ("a refusal of an answer", at_most(0.1)),
        )
    },
    # A queue that forms by chance is worked off, not refused, and nobody waits for long in it.
    (POISSON, "goodput of the bare one's"): at_least(0.9),
    (POISSON, "p99 in seconds"): at_most(0.15),
    # What happens once costs little more than what may happen twice.
    (ON_ONE, SINGLE): at_least(0.8),
    (ON_EIGHT, SINGLE): at_least(0.7),
    (TRANSACTION, ONCE): at_least(0.5),
    (OUT, DRAIN): at_least(60_000.0),
    (FILE, GROUPED): at_least(2.5),
    # The whole of the edge is felt by no one. The less the server takes, the larger its share.
    **{
        (f"{WEB}, hello, {server}", SEAWALL): at_most(1.4 if "uvloop" in server else 1.35)
        for server in SERVERS
    },
    # The same for threads.
    (f"{WSGI}, {WAITS}", "least goodput of its peak"): at_least(0.8),
    (f"{WSGI}, {HELLO}", SEAWALL): at_most(1.15),
}
