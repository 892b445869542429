-- Calls that are done later. state: 0 it waits (or is being done until not_before), 1 done, 2 dead.
-- A claim is an owner and an epoch: what somebody else has claimed since, nobody else can change.

-- name: store
-- No row: there is one of that key, or as many as may are waiting.
INSERT INTO {deferred_calls} (queue, id, key_hash, call, idempotency_key, tenant, state, epoch, attempts,
    not_before, created_at, expires_at)
SELECT CAST(:queue AS text), CAST(:id AS text), CAST(:key_hash AS blob), CAST(:call AS text),
    CAST(:key AS text), CAST(:tenant AS text), 0, 0, 0,
    {now} + CAST(:delay AS integer), {now}, {now} + CAST(:ttl AS integer)
WHERE (SELECT count(*) FROM (
    SELECT 1 FROM {deferred_calls} WHERE queue = CAST(:queue AS text) AND state = 0
    LIMIT CAST(:most AS integer)
) AS waiting) < CAST(:most AS integer)
ON CONFLICT (queue, key_hash) DO NOTHING
RETURNING id;

-- name: claim
-- queue, owner, lease, most. The calls that are due, for as long as the lease.
UPDATE {deferred_calls}
SET owner = :owner, epoch = epoch + 1, attempts = attempts + 1, not_before = {now} + :lease
WHERE position IN (
    SELECT position FROM {deferred_calls}
    WHERE queue = :queue AND state = 0 AND not_before <= {now}
    ORDER BY not_before, position LIMIT :most
)
RETURNING position, id, epoch, attempts, call, idempotency_key, tenant,
    CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END;

-- name: claim_first
-- The same for the oldest alone, if it is due and none is being done: one that was revived may be
-- older than the one at work.
UPDATE {deferred_calls}
SET owner = :owner, epoch = epoch + 1, attempts = attempts + 1, not_before = {now} + :lease
WHERE position IN (
    SELECT min(position) FROM {deferred_calls} WHERE queue = :queue AND state = 0 LIMIT :most
) AND not_before <= {now} AND NOT EXISTS (
    SELECT 1 FROM {deferred_calls}
    WHERE queue = :queue AND state = 0 AND owner IS NOT NULL AND not_before > {now}
)
RETURNING position, id, epoch, attempts, call, idempotency_key, tenant,
    CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END;

-- name: cleanup
-- queue, keep_dead, batch. What was done, and is over; what is dead for longer than that after.
DELETE FROM {deferred_calls} WHERE position IN (
    SELECT position FROM {deferred_calls}
    WHERE queue = :queue AND (
        (state = 1 AND expires_at <= {now})
        OR (state = 2 AND expires_at <= {now} - CAST(:keep_dead AS integer))
    )
    LIMIT CAST(:batch AS integer)
)
RETURNING 1;
