"""Thresholds of problems: one table for the alert rules and for the dashboard.

Each is a number with its unit in its name or its docstring. A value *above* a threshold is wrong,
unless its docstring says otherwise. `*_WARN` is worth a look; the one without it is wrong.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 300.0
"""Window of the alert rules in seconds: over less, a single call moves a rate."""
FEW_CALLS: Final = 1.0
"""Calls per minute below which shares (of errors, of refusals) are meaningless and not reported."""

# Guards

CIRCUIT_OPEN: Final = 0.05
"""Share of a guard's calls that open circuits refused, over `WINDOW`."""
ERROR_RATIO: Final = 0.10
"""Share of a guard's attempts that failed."""
ERROR_RATIO_WARN: Final = 0.02
"""The same, worth a look."""
BUDGET_SPENT: Final = 1.0
"""Share of a retry budget that is spent; *at* this value the next retry is refused.

Worth a look on its own, and wrong only if retries are refused (`UNRETRIED`): a budget that
successes refill stays spent for a while after an outage.
"""

BUDGET_SPENT_WARN: Final = 0.8
"""Share from which a budget is nearly spent, *at* this value: worth a look."""
UNRETRIED: Final = 0.0
"""Calls per second that were not retried because the budget was spent, over `WINDOW`."""
DEGRADED: Final = 0.5
"""Share of degraded answers of a guard, *at* which the service counts as degraded."""
SHED: Final = 0.05
"""Share of an edge's calls that are shed: more than in a burst."""
RATE_LIMITED: Final = 0.05
"""Share of a guard's calls that its own rate limit refuses: the limit is below the demand."""
ISOLATED_SECONDS: Final = 3600.0
"""Seconds for which a breaker is isolated before it may have been forgotten."""
FLAPPING: Final = 3.0
"""Number of times that a breaker closes within `WINDOW`: it admits calls that then fail."""
ABANDONED_THREADS: Final = 10.0
"""Number of a guard's threads that run on without a caller."""

# Slots, pools, executors

LOAD: Final = 0.9
"""Utilization of a process: at 1.0 work waits."""
LOAD_WARN: Final = 0.7
"""The same, worth a look: more processes should have been started."""
SLOT_WAIT_SECONDS: Final = 1.0
"""Waiting time of the first call in line for a slot."""
POOL_WAIT_SECONDS: Final = 0.5
"""p99 of the time that borrowers of a pool wait."""
LOOP_LAG_SECONDS: Final = 0.1
"""Lag of an event loop: all of its requests are late by as much."""

# Queues, outboxes, jobs

QUEUE_AGE_SECONDS: Final = 60.0
"""Waiting time of the oldest item in a queue, of jobs, or of deferred calls."""
OUTBOX_AGE_SECONDS: Final = 60.0
"""Waiting time of the oldest event of an outbox."""
DEAD: Final = 0.0
"""Number of items that were given up and wait for an operator."""
BLOCKED_AGGREGATES: Final = 0.0
"""Number of an outbox's aggregates whose events wait for `unblock`."""
REFUSED_LATE: Final = 0.0
"""Number of answers from owners that had been taken over, within `WINDOW`."""
FIFO_GAPS: Final = 0.0
"""Number of messages that were missing for too long, within `WINDOW`."""

# Pipelines

DEAD_ITEMS: Final = 0.05
"""Share of a pipeline's ended items that are dead letters, within `WINDOW`."""
FEW_DEAD_ITEMS: Final = 3.0
"""Number of a pipeline's dead letters within `WINDOW`, *up to* which their share is meaningless."""
STAGE_AGE_SECONDS: Final = 300.0
"""Waiting time of the oldest item in front of a stage."""
MISSING_SECONDS: Final = 60.0
"""Time for which a source of a `Collect` has not answered."""
TOO_FEW: Final = 0.0
"""Number of collections with less than the minimum, within `WINDOW`."""

# Members

FALSE_SUSPECTS: Final = 0.5
"""Share of ended suspicions that were wrong, within `WINDOW`."""
FALSE_SUSPECTS_WARN: Final = 0.1
"""The same, worth a look."""
FEW_FALSE_SUSPECTS: Final = 3.0
"""Number of wrong suspicions within `WINDOW`, *up to* which their share is meaningless."""
HEALTH_SCORE: Final = 4.0
"""Health score of a process, from 0 to 8, *at* which its own view of a group is in doubt."""
GONE_SECONDS: Final = 600.0
"""Seconds for which a cluster member is confirmed as failed before it counts as gone for good.

A cluster remembers it for longer. A member that comes back, or another pod in its place, is treated
as new. A peer of `Heartbeats` is watched on purpose, and stays a problem.
"""

# Surroundings of the service

STORE_DOWN_SECONDS: Final = 30.0
"""Seconds without an answer from a shared store that are more than a hiccup."""
READING_AGE_SECONDS: Final = 120.0
"""Age of the last answer of a store or database, beyond which its queues' ages are meaningless."""
UNREADABLE: Final = 0.0
"""Number of objects whose snapshot or last query failed."""
FOLDED: Final = 0.0
"""Number of series that are folded into "other" because there are too many."""
UNHEALTHY_HOSTS: Final = 0.5
"""Share of an upstream set's hosts that do not serve."""
