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

-- name: browse_dead
-- The latest first. So many are looked at; the last but one column says whether they match.
SELECT ended_at, id, 'dead', type, aggregate, aggregate_id, attempts, COALESCE(error, ''),
    created_at, ended_at, length(payload), substr(payload, 1, CAST(:cut AS integer)),
    lower(id || ' ' || type || ' ' || aggregate || ' ' || aggregate_id || ' ' || COALESCE(error, ''))
        LIKE lower(CAST(:pattern AS text)) ESCAPE '!',
    {now}
FROM {outbox_ended}
WHERE outbox = :outbox AND dead
    AND (ended_at, id) < (CAST(:number AS bigint), CAST(:id AS text))
ORDER BY ended_at DESC, id DESC
LIMIT CAST(:most AS bigint)

-- name: browse_blocked
-- The event that blocks each aggregate, in the order in which aggregates had their first event.
SELECT c.lane, e.id, 'blocked', e.type, e.aggregate, e.aggregate_id, c.attempts,
    COALESCE(c.error, ''), e.created_at, NULL, length(e.payload),
    substr(e.payload, 1, CAST(:cut AS integer)),
    lower(e.id || ' ' || e.type || ' ' || e.aggregate || ' ' || e.aggregate_id || ' '
        || COALESCE(c.error, '')) LIKE lower(CAST(:pattern AS text)) ESCAPE '!',
    {now}
FROM {outbox_claims} AS c
INNER JOIN {outbox} AS e
    ON e.outbox = :outbox AND e.lane = c.lane AND e.sequence = (
        SELECT min(head.sequence) FROM {outbox} AS head
        WHERE head.outbox = :outbox AND head.lane = c.lane
    )
WHERE c.blocked AND c.lane > CAST(:number AS bigint)
ORDER BY c.lane
LIMIT CAST(:most AS bigint)

-- name: browse_waiting
-- By aggregate, and there in the order of delivery; of the first of each, how it went so far.
SELECT e.lane, CAST(e.sequence AS text), e.id,
    CASE WHEN c.blocked THEN 'blocked' ELSE 'waiting' END, e.type, e.aggregate, e.aggregate_id,
    COALESCE(c.attempts, 0), COALESCE(c.error, ''), e.created_at, NULL, length(e.payload),
    substr(e.payload, 1, CAST(:cut AS integer)),
    lower(e.id || ' ' || e.type || ' ' || e.aggregate || ' ' || e.aggregate_id || ' '
        || COALESCE(c.error, '')) LIKE lower(CAST(:pattern AS text)) ESCAPE '!',
    {now}
FROM {outbox} AS e
LEFT JOIN {outbox_claims} AS c
    ON c.lane = e.lane AND e.sequence = (
        SELECT min(head.sequence) FROM {outbox} AS head
        WHERE head.outbox = :outbox AND head.lane = e.lane
    )
WHERE e.outbox = :outbox
    AND (e.lane, e.sequence) > (CAST(:number AS bigint), CAST(:id AS bigint))
ORDER BY e.lane, e.sequence
LIMIT CAST(:most AS bigint)

-- name: inspect
SELECT 0, id, 'dead', type, aggregate, aggregate_id, attempts, COALESCE(error, ''), created_at,
    ended_at, length(payload), substr(payload, 1, CAST(:cut AS integer)), 1 = 1, {now}
FROM {outbox_ended}
WHERE outbox = :outbox AND id = :id AND dead
UNION ALL
SELECT 0, e.id, CASE WHEN c.blocked THEN 'blocked' ELSE 'waiting' END, e.type, e.aggregate,
    e.aggregate_id, COALESCE(c.attempts, 0), COALESCE(c.error, ''), e.created_at, NULL,
    length(e.payload), substr(e.payload, 1, CAST(:cut AS integer)), 1 = 1, {now}
FROM {outbox} AS e
LEFT JOIN {outbox_claims} AS c
    ON c.lane = e.lane AND e.sequence = (
        SELECT min(head.sequence) FROM {outbox} AS head
        WHERE head.outbox = :outbox AND head.lane = e.lane
    )
WHERE e.outbox = :outbox AND e.id = :id
