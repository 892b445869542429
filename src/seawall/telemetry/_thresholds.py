"""From where on something is wrong: one table for the alert rules and for the dashboard.

Each is a number with its unit in its name or its docstring. A value *above* a threshold is wrong,
unless its docstring says otherwise. `*_WARN` is worth a look; the one without it is wrong.
"""

from __future__ import annotations

from typing import Final

WINDOW: Final = 300.0
"""Seconds over which alert rules look back: a rate over less is moved by a single call."""

FEW_CALLS: Final = 1.0
"""Calls a minute below which shares (of errors, of refusals) mean nothing, and are not told."""

# Guards

CIRCUIT_OPEN: Final = 0.05
"""Share of a guard's calls that open circuits refused, over `WINDOW`."""

ERROR_RATIO: Final = 0.10
"""Share of a guard's attempts that failed."""

ERROR_RATIO_WARN: Final = 0.02
"""The same, worth a look."""

BUDGET_SPENT: Final = 1.0
"""Share of a retry budget that is spent; *at* this value the next retry is refused.

Worth a look by itself, and wrong only where retries are refused (`UNRETRIED`): a budget that
successes refill stays spent for a while after an outage.
"""

BUDGET_SPENT_WARN: Final = 0.8
"""Share from which on a budget is nearly spent, *at* this value: worth a look."""

UNRETRIED: Final = 0.0
"""Calls a second that were not retried because the budget was spent, over `WINDOW`."""

DEGRADED: Final = 0.5
"""Share of lesser ones among a guard's answers, *at* which the service counts as degraded."""

SHED: Final = 0.05
"""Share of an edge's calls that are shed: more than a burst's worth."""

RATE_LIMITED: Final = 0.05
"""Share of a guard's calls that its own rate limit refuses: the limit is below the need."""

ISOLATED_SECONDS: Final = 3600.0
"""How long a breaker is isolated before somebody may have forgotten it."""

FLAPPING: Final = 3.0
"""How often a breaker closes again within `WINDOW`: it lets in what then fails."""

ABANDONED_THREADS: Final = 10.0
"""Threads of a guard that run on without a caller."""

# Slots, pools, executors

LOAD: Final = 0.9
"""How full a process is: at 1.0 work waits."""

LOAD_WARN: Final = 0.7
"""The same, worth a look: where more processes should have been started."""

FULLNESS: Final = 0.9
"""Share of the slots of a bulkhead, a pool or an executor that are taken."""

SLOT_WAIT_SECONDS: Final = 1.0
"""How long the first in line for a slot has waited."""

POOL_WAIT_SECONDS: Final = 0.5
"""p99 of the time that borrowers of a pool wait."""

LOOP_LAG_SECONDS: Final = 0.1
"""How late an event loop is: all of its requests are late by as much."""

# Queues, outboxes, jobs

QUEUE_AGE_SECONDS: Final = 60.0
"""How long the oldest in a queue, of jobs, or of calls for later has waited."""

OUTBOX_AGE_SECONDS: Final = 60.0
"""How long the oldest event of an outbox has waited."""

DEAD: Final = 0.0
"""What was given up, and waits to be looked at."""

BLOCKED_AGGREGATES: Final = 0.0
"""Aggregates of an outbox whose events wait for `unblock`."""

REFUSED_LATE: Final = 0.0
"""Answers of owners that had been taken over, within `WINDOW`."""

FIFO_GAPS: Final = 0.0
"""Messages that were missing for too long, within `WINDOW`."""

# Pipelines

DEAD_ITEMS: Final = 0.05
"""Share of a pipeline's ended items that are dead letters, within `WINDOW`."""

FEW_DEAD_ITEMS: Final = 3.0
"""Dead letters of a pipeline within `WINDOW`, *up to* which their share means nothing."""

STAGE_AGE_SECONDS: Final = 300.0
"""How long the oldest item has waited in front of a stage."""

MISSING_SECONDS: Final = 60.0
"""How long a source of a `Collect` has not answered."""

TOO_FEW: Final = 0.0
"""Collections with less than the minimum, within `WINDOW`."""

# Members

FALSE_SUSPECTS: Final = 0.5
"""Share of ended suspicions that were wrong, within `WINDOW`."""

FALSE_SUSPECTS_WARN: Final = 0.1
"""The same, worth a look."""

FEW_FALSE_SUSPECTS: Final = 3.0
"""Wrong suspicions within `WINDOW`, *up to* which their share means nothing."""

HEALTH_SCORE: Final = 4.0
"""Health score of a process, from 0 to 8, *at* which its own view of a group is in doubt."""

GONE_SECONDS: Final = 600.0
"""How long a member of a cluster is confirmed as failed before it counts as gone for good.

A cluster remembers it for longer. One that comes back, or another pod in its place, is another
matter; a peer of `Heartbeats` is watched on purpose, and stays a trouble.
"""

# Around

STORE_DOWN_SECONDS: Final = 30.0
"""How long a shared store does not answer before it is more than a hiccup."""

READING_AGE_SECONDS: Final = 120.0
"""How old what a store or database told may be: beyond that, its queues' ages say nothing."""

UNREADABLE: Final = 0.0
"""Things whose snapshot or last question failed."""

FOLDED: Final = 0.0
"""Series that are told together as "other" because there are too many."""

UNHEALTHY_HOSTS: Final = 0.5
"""Share of an upstream set's hosts that do not serve."""
