-- Calls that are done later. state: 0 it waits (or is being done until not_before), 1 done, 2 dead.
-- A claim is an owner and an epoch: what somebody else has claimed since, nobody else can change.

-- name: store
-- No row: there is one of that key, or as many as may are waiting.
INSERT INTO {deferred_calls} (queue, id, key_hash, call, idempotency_key, tenant, state, epoch, attempts,
    not_before, created_at, expires_at)
SELECT CAST(:queue AS text), CAST(:id AS text), CAST(:key_hash AS bytea), CAST(:call AS text),
    CAST(:key AS text), CAST(:tenant AS text), 0, 0, 0,
    {now} + CAST(:delay AS bigint), {now}, {now} + CAST(:ttl AS bigint)
WHERE (SELECT count(*) FROM (
    SELECT 1 FROM {deferred_calls} WHERE queue = CAST(:queue AS text) AND state = 0
    LIMIT CAST(:most AS bigint)
) AS waiting) < CAST(:most AS bigint)
ON CONFLICT (queue, key_hash) DO NOTHING
RETURNING id;

-- name: claim
-- queue, owner, lease, most. The calls that are due, for as long as the lease.
-- (Materialized: looked for once, whatever the plan, so that there are no more than `most`.)
WITH found AS MATERIALIZED (
    SELECT position FROM {deferred_calls}
    WHERE queue = :queue AND state = 0 AND not_before <= (SELECT {now})
    ORDER BY not_before, position LIMIT CAST(:most AS bigint) FOR UPDATE SKIP LOCKED
)
UPDATE {deferred_calls} AS due
SET owner = :owner, epoch = due.epoch + 1, attempts = due.attempts + 1,
    not_before = {now} + CAST(:lease AS bigint)
FROM found
WHERE due.position = found.position
RETURNING due.position, due.id, due.epoch, due.attempts, due.call, due.idempotency_key, due.tenant,
    CASE WHEN due.expires_at <= {now} THEN 1 ELSE 0 END;

-- name: one_claims
-- queue. Until the transaction ends, nobody else looks which is the oldest.
SELECT pg_advisory_xact_lock(hashtextextended(CAST(:queue AS text), 6));

-- name: claim_first
-- The same for the oldest alone, if it is due and none is being done: a call that was committed
-- late, or revived, may be older than the one at work.
UPDATE {deferred_calls} AS due
SET owner = :owner, epoch = due.epoch + 1, attempts = due.attempts + 1,
    not_before = {now} + CAST(:lease AS bigint)
WHERE due.position = (SELECT min(position) FROM {deferred_calls} WHERE queue = :queue AND state = 0)
    AND due.state = 0 AND due.not_before <= {now} AND CAST(:most AS bigint) > 0
    AND NOT EXISTS (
        SELECT 1 FROM {deferred_calls}
        WHERE queue = :queue AND state = 0 AND owner IS NOT NULL AND not_before > (SELECT {now})
    )
RETURNING due.position, due.id, due.epoch, due.attempts, due.call, due.idempotency_key, due.tenant,
    CASE WHEN due.expires_at <= {now} THEN 1 ELSE 0 END;

-- name: cleanup
-- queue, keep_dead, batch. What was done, and is over; what is dead for longer than that after. What
-- somebody has in hand, such as who revives it, is passed by.
DELETE FROM {deferred_calls} WHERE ctid IN (
    SELECT ctid FROM {deferred_calls}
    WHERE queue = :queue AND (
        (state = 1 AND expires_at <= (SELECT {now}))
        OR (state = 2 AND expires_at <= (SELECT {now}) - CAST(:keep_dead AS bigint))
    )
    LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
)
RETURNING 1;
