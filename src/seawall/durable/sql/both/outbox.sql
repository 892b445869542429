-- name: trail
-- The events whose ids begin alike: those that were committed with one key.
SELECT outbox, id, aggregate, aggregate_id, type, 0 FROM {outbox}
WHERE id LIKE CAST(:pattern AS text)
UNION ALL
SELECT outbox, id, aggregate, aggregate_id, type, CASE WHEN dead THEN 2 ELSE 1 END
FROM {outbox_ended}
WHERE id LIKE CAST(:pattern AS text)
LIMIT CAST(:most AS bigint)

-- name: dead
SELECT
    id, aggregate, aggregate_id, sequence, type, payload, headers, created_at, attempts, error,
    ended_at
FROM {outbox_ended}
WHERE outbox = :outbox AND dead
ORDER BY ended_at, id
LIMIT CAST(:most AS bigint)

-- name: exhume
DELETE FROM {outbox_ended}
WHERE outbox = :outbox AND id = :id AND dead
RETURNING aggregate, aggregate_id, type, payload, headers

-- name: unblock
UPDATE {outbox_claims}
SET
    blocked = false, attempts = 0, next_at = 0, epoch = epoch + 1, owner = NULL, lease_until = 0
WHERE blocked AND lane = (
    SELECT s.lane
    FROM {outbox_sequences} AS s
    WHERE s.outbox = :outbox AND s.aggregate = :aggregate AND s.aggregate_id = :aggregate_id
)
RETURNING lane

-- name: was_blocked
SELECT 1 FROM {outbox_claims} WHERE lane = :lane AND epoch = :epoch AND blocked

-- name: was_buried
SELECT 1 FROM {outbox_ended} WHERE outbox = :outbox AND id = :id AND dead

-- name: hold_blocked
-- Blocked aggregates are nobody's: whoever wants to put the first event aside takes it.
UPDATE {outbox_claims}
SET owner = :owner, epoch = epoch + 1
WHERE blocked AND lane = (
    SELECT s.lane
    FROM {outbox_sequences} AS s
    WHERE s.outbox = :outbox AND s.aggregate = :aggregate AND s.aggregate_id = :aggregate_id
)
RETURNING lane, epoch, attempts, error

-- name: head
SELECT min(sequence) FROM {outbox} WHERE outbox = :outbox AND lane = :lane

-- name: survey
SELECT
    count(*),
    {now} - min(created_at),
    (SELECT count(*) FROM (
        SELECT 1 FROM {outbox_ended} AS d WHERE d.outbox = :outbox AND d.dead LIMIT 100000
    ) AS some_dead),
    (SELECT count(*) FROM {outbox_claims} AS c
        WHERE c.blocked AND EXISTS (
            SELECT 1 FROM {outbox} AS e WHERE e.outbox = :outbox AND e.lane = c.lane
        ))
FROM (SELECT created_at FROM {outbox} WHERE outbox = :outbox LIMIT 100000) AS some_pending
