"""State machine of the job queue: order, claims, and the ends of jobs.

                 ┌── nack, lease over ──┐
    push ─▶ delayed ─▶ waiting ─▶ claimed ─▶ done
                 │         │          │
                 └─────────┴──────────┴────▶ dead, cancelled or expired

- **Order.** The lowest score is next: the time at which a job could first be claimed, minus a head
  start for each level of its priority. So a job is overtaken only by jobs that came less than their
  greater head start after it: no job starves. A returned job keeps its score. A clock that was set
  back does not change the order: for scores, time stops until the clock has caught up.
- **Claims.** A claim is valid until its lease ends, by one clock. Each claim of a job has a higher
  `fence` than the one before, and a caller with an older one is refused. When the lease ends, the
  claimer loses the job immediately, even if no other worker wants it.
- **Lost replies.** Each claim has a token. A claimer that receives the reply acknowledges it
  (`heard`); one that does not has it taken back (`release`), and a delayed claim request with that
  token then grants nothing. A lease that ends without acknowledgement is not an attempt: the job
  was not started, since a claimer starts only after its acknowledgement was confirmed.
- **Ends.** A job is tried at most `max_attempts` times, and never started after its deadline; every
  job has one. A cancelled job ends immediately: requests of its worker are refused from then on.
- **Memory.** Results are kept for `result_ttl`, dead letters for `keep`, and at most a fixed number
  of each: those that expire first are dropped to make room. Nothing is kept forever.

Times are whole microseconds. `perform` first processes due entries, at most `SWEEP` of each kind,
so that no call takes long. Operations by id and claims give correct results even if more is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seawall.models.queue.index import Index, Tokens
from seawall.models.queue.jobs import (
    BATCH_BYTES,
    BROWSED,
    CALLED_OFF,
    LATE,
    LEASE_OVER,
    NOBODY,
    PRIORITIES,
    SWEEP,
    TOTALS,
    UNHEARD,
    Answer,
    Browsed,
    How,
    JobGranted,
    Letter,
    NewJob,
    QueueCounts,
    QueuedJob,
    QueueRules,
    Seen,
    State,
)


class Queue:
    """The jobs of one queue, and the rules they follow."""

    def __init__(self, rules: QueueRules) -> None:
        self.rules = rules
        self.stirred = False  # whether waiting claimers should look again; the driver resets it
        self.ended: list[str] = []
        """Ids of jobs that ended. The driver notifies their waiters and clears the list."""
        self.died: list[tuple[str, int, str]] = []  # those that died, with attempts and reason
        self.dropped: list[str] = []  # ids of dead letters for which there was no room
        self._jobs: dict[str, QueuedJob] = {}
        self._by_dedupe: dict[str, str] = {}
        self._serial = 0
        self._latest = 0  # the highest time used for a score
        self._ready = Index()  # by score
        self._since = Index()  # the same jobs, by the time since which they could be claimed
        self._delayed = Index()  # by the time at which they become ready
        self._leases = Index()  # claimed jobs, by the end of the lease
        self._deadlines = Index()  # waiting and delayed jobs, by deadline
        self._memory = Index()  # done, cancelled and expired jobs, by the time to forget them
        self._dead = Index()  # dead jobs, by the time to forget them
        self._tokens = Tokens()  # of claims that are not acknowledged yet
        self._waiting = [0] * PRIORITIES
        self._totals = dict.fromkeys(TOTALS, 0)

    def perform(self, now: int, operation: str, *args: Any) -> Any:
        """Process due entries, then run one of the operations below."""
        self._process_due(now)
        return getattr(self, operation)(now, *args)

    # Operations

    def push(self, now: int, jobs: Sequence[NewJob]) -> list[str] | None:
        """Add jobs and return their ids. If there is no room for all, add none and return None.

        A job whose dedupe id is in use is not added: it gets the id of the existing job.
        """
        fresh = sum(self._dedupe_holder(now, new.dedupe) is None for new in jobs)
        if self._unfinished() + fresh > self.rules.max_size:
            return None
        return [self._dedupe_holder(now, new.dedupe) or self._add(now, new) for new in jobs]

    def claim(self, now: int, count: int, lease: int, token: str) -> tuple[list[JobGranted], int]:
        """Claim the next jobs, at most `count`, for `lease`. Repeated, return the same jobs.

        The second result, if there are no jobs, is the time until there may be one, or -1 if
        unknown.
        """
        if token in self._tokens:
            self._tokens.put(token, self._tokens.claims(token), now + lease)
            return [self._grant(now, job, lease) for job in self._claimed_by(now, token)], -1
        granted: list[JobGranted] = []
        size = 0
        for _ in range(count + SWEEP):
            first = self._ready.first()
            if first is None or len(granted) == count:
                break
            job = self._jobs[first[1]]
            if job.deadline <= now:
                self._finish(now, job, "expired", LATE)
                continue
            size += len(job.payload)
            if granted and size > BATCH_BYTES:
                break
            self._leave_indexes(job)
            job.state, job.heard = "claimed", False
            job.fence += 1
            job.attempts += 1
            granted.append(self._grant(now, job, lease))
        if granted:
            self._tokens.put(token, [(one.id, one.fence) for one in granted], now + lease)
            return granted, 0
        if len(self._ready):
            return [], 0
        ahead = [first[0] for index in (self._delayed, self._leases) if (first := index.first())]
        return [], max(0, min(ahead) - now) if ahead else -1

    def heard(self, now: int, token: str) -> Answer:
        """Record that the claimer has received its claim. From now on it counts as an attempt.

        A claimer must not start before it receives the reply to this.
        """
        for job in self._claimed_by(now, token):
            job.heard = True
        self._tokens.discard(token)
        return True, "heard"

    def release(self, now: int, token: str, lease: int) -> Answer:
        """Take back an unacknowledged claim. For `lease`, the token grants nothing any more."""
        for job in self._claimed_by(now, token):
            job.attempts -= 1
            self._return_job(now, job, 0, NOBODY, fatal=False, counted=False)
        self._tokens.put(token, [], now + lease)
        return True, "released"

    def extend(self, now: int, id_: str, fence: int, lease: int) -> Answer:
        """Extend a claim to `lease` from now."""
        job, answer = self._held_job(now, id_, fence)
        if job is not None:
            job.heard = True
            job.at = now + lease
            self._leases.set(id_, job.at)
        return answer

    def ack(self, now: int, id_: str, fence: int, result: bytes) -> Answer:
        """End a claimed job as done. Repeating it with the same claim succeeds again."""
        job, answer = self._held_job(now, id_, fence)
        if job is None:
            known = self._jobs.get(id_)
            again = known is not None and known.state == "done" and known.fence == fence
            return again, answer[1]
        job.result = result
        self._finish(now, job, "done", "")
        return True, job.state

    def nack(self, now: int, id_: str, fence: int, delay: int, reason: str, how: How) -> Answer:
        """Return a claimed job, to be ready after `delay`, or as dead after its last attempt."""
        job, answer = self._held_job(now, id_, fence)
        if job is None:
            return answer
        if how == "returned":
            job.attempts -= 1
        self._return_job(now, job, delay, reason, fatal=how == "fatal", counted=how == "failed")
        return True, job.state

    def cancel(self, now: int, id_: str) -> Answer:
        """Cancel a job that has not ended."""
        job = self._current(now, id_)
        if job is None:
            return False, "unknown"
        if job.state not in ("waiting", "delayed", "claimed"):
            return False, job.state
        self._finish(now, job, "cancelled", CALLED_OFF)
        return True, job.state

    def status(self, now: int, id_: str) -> Seen | None:
        """Return the status of a job, or None if it is unknown."""
        job = self._current(now, id_)
        if job is None:
            return None
        age = max(0, now - job.pushed)
        return Seen(job.state, job.priority, job.attempts, age, job.reason, job.result)

    def dead(self, now: int, limit: int) -> list[Letter]:
        """Return dead letters, oldest first."""
        jobs = [self._jobs[id_] for _, id_ in self._dead.behind(0, "", limit)]
        return [
            Letter(
                one.id, one.priority, one.attempts, max(0, now - one.at), one.reason, one.payload
            )
            for one in jobs
        ]

    def browse(
        self, now: int, state: str, number: int, id_: str, search: bytes, most: int, cut: int
    ) -> tuple[list[Browsed], tuple[int, str] | None]:
        """Return at most `most` jobs of a state after a position, and the position to continue at.

        Jobs are in the order of their index; dead ones are newest first. They contain `search`,
        which must not have ASCII capitals, in the id, the reason or the payload. `cut` is the
        maximum number of payload bytes to return; with 0, payloads are neither returned nor
        searched. One call examines at most `BROWSED` jobs and `BATCH_BYTES` of payloads. The
        position is None if there are no more jobs.
        """
        indexes = {"waiting": self._ready, "delayed": self._delayed, "claimed": self._leases}
        index = indexes.get(state, self._dead)
        found: list[Browsed] = []
        last, size = (number, id_), 0
        places = index.behind(number, id_, BROWSED + 1, back=state not in indexes)
        for looked, place in enumerate(places):
            job = self._jobs[place[1]]
            size += len(job.payload) if cut else 0
            if looked == BROWSED or len(found) == most or (looked and size > BATCH_BYTES):
                return found, last
            last = place
            texts = [job.id.encode(), job.reason.encode(), *([job.payload] if cut else [])]
            if any(search in text.lower() for text in texts):
                found.append(self._browsed(now, job, place[0], cut))
        return found, None

    def inspect(self, now: int, id_: str, cut: int) -> Browsed | None:
        """Return one job, with at most `cut` bytes of its payload, or None if it is unknown."""
        job = self._current(now, id_)
        return None if job is None else self._browsed(now, job, 0, cut)

    def requeue(self, now: int, id_: str) -> Answer:
        """Restart a dead job with all attempts, a new position and a new deadline."""
        job = self._current(now, id_)
        if job is None or job.state != "dead":
            return False, "unknown" if job is None else job.state
        if self._unfinished() >= self.rules.max_size:
            return False, "full"
        if self._dedupe_holder(now, job.dedupe) not in (None, id_):
            return False, "taken"
        if (
            id_ not in self._jobs
        ):  # `_dedupe_holder` may have ended another job and evicted this one
            return False, "unknown"
        if job.dedupe:
            self._by_dedupe[job.dedupe] = id_
        self._dead.discard(id_)
        job.attempts = job.unheard = 0
        job.score = self._score_time(now) - job.priority * self.rules.head_start
        job.deadline = now + self.rules.keep
        self._place(now, job, now)
        return True, job.state

    def drop(self, now: int, id_: str) -> Answer:
        """Delete a dead job."""
        job = self._current(now, id_)
        if job is None or job.state != "dead":
            return False, "unknown" if job is None else job.state
        self._forget(job)
        return True, "dropped"

    @property
    def waiting(self) -> int:
        """Number of waiting jobs."""
        return sum(self._waiting)

    def counts(self, now: int) -> QueueCounts:
        """Return the numbers of jobs by state."""
        oldest = self._since.first()
        return QueueCounts(
            tuple(self._waiting),
            len(self._delayed),
            len(self._leases),
            len(self._dead),
            -1 if oldest is None else max(0, now - oldest[0]),
            tuple(self._totals.values()),
        )

    def _process_due(self, now: int) -> None:
        """Process due entries: at most `SWEEP` of each kind, in this order."""
        for index in (self._memory, self._dead):
            for id_ in index.take(SWEEP, now):
                self._forget(self._jobs[id_])
        self._tokens.sweep(SWEEP, now)
        for id_ in self._leases.take(SWEEP, now):
            self._expire_lease(now, self._jobs[id_])
        for id_ in self._deadlines.take(SWEEP, now):
            self._finish(now, self._jobs[id_], "expired", LATE)
        for id_ in self._delayed.take(SWEEP, now):
            self._place(now, self._jobs[id_], self._jobs[id_].at)

    def _current(self, now: int, id_: str) -> QueuedJob | None:
        """Return a job in its current state, even if the sweep has not reached it yet."""
        job = self._jobs.get(id_)
        if job is None:
            return None
        if job.state == "claimed" and job.at <= now:
            self._expire_lease(now, job)
        if job.state in ("waiting", "delayed") and job.deadline <= now:
            self._finish(now, job, "expired", LATE)
        if job.state == "delayed" and job.at <= now:
            self._place(now, job, job.at)
        return job

    def _held_job(self, now: int, id_: str, fence: int) -> tuple[QueuedJob | None, Answer]:
        """Return the job if that claim of it is valid, and the answer to give."""
        job = self._current(now, id_)
        if job is None:
            return None, (False, "unknown")
        good = job.state == "claimed" and job.fence == fence
        return (job if good else None), (good, job.state)

    def _grant(self, now: int, job: QueuedJob, lease: int) -> JobGranted:
        job.at = now + lease
        self._leases.set(job.id, job.at)
        age, left = max(0, now - job.pushed), job.deadline - now
        waited = max(0, now - job.score - job.priority * self.rules.head_start)
        return JobGranted(
            job.id, job.fence, job.attempts, job.priority, age, waited, left, job.payload
        )

    def _browsed(self, now: int, job: QueuedJob, number: int, cut: int) -> Browsed:
        age, since = max(0, now - job.pushed), now - job.at
        fields = (number, job.id, job.state, job.priority, job.attempts, age, since, job.reason)
        return Browsed(*fields, len(job.payload), job.payload[:cut])

    def _claimed_by(self, now: int, token: str) -> list[QueuedJob]:
        """Return the jobs still claimed with that token and not acknowledged."""
        jobs = [self._held_job(now, id_, fence)[0] for id_, fence in self._tokens.claims(token)]
        return [job for job in jobs if job is not None and not job.heard]

    def _dedupe_holder(self, now: int, dedupe: str) -> str | None:
        """Return the id of the job that holds a dedupe id, or None."""
        job = self._current(now, self._by_dedupe.get(dedupe, "")) if dedupe else None
        if job is None:
            return None
        alive = job.state in ("waiting", "delayed", "claimed")
        return job.id if alive or job.at + self.rules.dedupe > now else None

    def _score_time(self, now: int) -> int:
        """Return the time to use for a score: never earlier than that of the previous score.

        A time further ahead than `keep` came from a wrong clock and is discarded.
        """
        if not now <= self._latest <= now + self.rules.keep:
            self._latest = now
        return self._latest

    def _add(self, now: int, new: NewJob) -> str:
        self._serial += 1
        self._totals["pushed"] += 1
        id_ = f"{self._serial:016d}-{new.nonce}"
        job = QueuedJob(id_, new, now, self._score_time(now), self.rules)
        self._jobs[job.id] = job
        if new.dedupe:
            self._by_dedupe[new.dedupe] = job.id
        self._place(now, job, job.at)
        return job.id

    def _place(self, now: int, job: QueuedJob, ready: int) -> None:
        """Put a job among the waiting or the delayed ones. Set `stirred` if it is the first."""
        job.at = ready
        self._delayed.discard(job.id)
        self._deadlines.set(job.id, job.deadline)
        if ready > now:
            job.state = "delayed"
            first = self._delayed.first()
            self.stirred |= first is None or ready < first[0]
            self._delayed.set(job.id, ready)
            return
        job.state = "waiting"
        self.stirred |= not len(self._ready)
        self._ready.set(job.id, job.score)
        self._since.set(job.id, job.score + job.priority * self.rules.head_start)
        self._waiting[job.priority] += 1

    def _leave_indexes(self, job: QueuedJob) -> None:
        if job.state == "waiting":
            self._waiting[job.priority] -= 1
        for index in (self._ready, self._since, self._delayed, self._leases, self._deadlines):
            index.discard(job.id)

    def _expire_lease(self, now: int, job: QueuedJob) -> None:
        self._totals["lost"] += 1
        counted = job.heard or job.unheard >= UNHEARD
        if not counted:
            job.unheard += 1
            job.attempts -= 1
        self._return_job(now, job, 0, LEASE_OVER, fatal=False, counted=counted)

    def _return_job(
        self, now: int, job: QueuedJob, delay: int, reason: str, *, fatal: bool, counted: bool
    ) -> None:
        self._leave_indexes(job)
        job.reason = reason
        if fatal or (counted and job.attempts >= self.rules.max_attempts):
            self._finish(now, job, "dead", reason)
        elif job.deadline <= now:
            self._finish(now, job, "expired", LATE)
        else:
            self._place(now, job, now + delay)

    def _finish(self, now: int, job: QueuedJob, state: State, reason: str) -> None:
        self._leave_indexes(job)
        job.state, job.at, job.reason = state, now, reason
        self.ended.append(job.id)
        self._totals["died" if state == "dead" else state] += 1
        if state == "dead":
            self.died.append((job.id, job.attempts, reason))
            self._dead.set(job.id, now + self.rules.keep)
            gone = self._make_room(self._dead, self.rules.max_dead)
            self.dropped += gone
            self._totals["dropped"] += len(gone)
        else:
            job.payload = b""
            self._memory.set(job.id, now + self.rules.result_ttl)
            self._make_room(self._memory, self.rules.max_ended)

    def _make_room(self, index: Index, most: int) -> list[str]:
        """Delete the entries that expire first, and return their ids."""
        gone = index.take(min(len(index) - most, SWEEP))
        for id_ in gone:
            self._forget(self._jobs[id_])
        return gone

    def _forget(self, job: QueuedJob) -> None:
        self._memory.discard(job.id)
        self._dead.discard(job.id)
        if self._by_dedupe.get(job.dedupe) == job.id:
            del self._by_dedupe[job.dedupe]
        del self._jobs[job.id]

    def _unfinished(self) -> int:
        return sum(self._waiting) + len(self._delayed) + len(self._leases)
