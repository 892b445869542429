-- name: add
-- The sequence's row is locked until the user's transaction ends: numbers are committed in order.
WITH place AS (
    INSERT INTO {outbox_sequences} AS s (outbox, aggregate, aggregate_id, last, touched_at)
    VALUES (:outbox, :aggregate, :aggregate_id, 1, {now})
    ON CONFLICT (outbox, aggregate, aggregate_id)
    DO UPDATE SET last = s.last + 1, touched_at = excluded.touched_at
    RETURNING s.lane, s.last, s.touched_at
)
INSERT INTO {outbox} (
    outbox, lane, sequence, id, aggregate, aggregate_id, type, payload, headers, created_at
)
SELECT
    CAST(:outbox AS text), lane, last, CAST(:id AS text), CAST(:aggregate AS text),
    CAST(:aggregate_id AS text), CAST(:type AS text), CAST(:payload AS bytea),
    CAST(:headers AS text), touched_at
FROM place
RETURNING sequence

-- name: by_index
-- Claims come and go, so their number when a plan is made says nothing of later. What is off counts
-- as very costly, which is no reason to compile it. These settings end with the transaction.
SELECT
    set_config('jit', 'off', true),
    set_config('enable_seqscan', 'off', true),
    set_config('enable_mergejoin', 'off', true),
    set_config('enable_hashjoin', CAST(:hashing AS text), true)

-- name: claim
-- The aggregates of the next `near` events behind a place; or the next `far` aggregates, by one
-- descent into the index for each, which passes by those of any length that are not to be had.
-- Of these, the ones that nobody holds or that are due again.
WITH RECURSIVE steps AS (
    (
        SELECT e.lane, e.sequence, 1 AS n
        FROM {outbox} AS e
        WHERE e.outbox = :outbox AND e.lane > CAST(:after AS bigint) AND CAST(:far AS bigint) > 0
        ORDER BY e.outbox, e.lane, e.sequence
        LIMIT 1
    )
    UNION ALL
    SELECT next.lane, next.sequence, steps.n + 1
    FROM steps
    CROSS JOIN LATERAL (
        SELECT e.lane, e.sequence
        FROM {outbox} AS e
        WHERE e.outbox = :outbox AND e.lane > steps.lane
        ORDER BY e.outbox, e.lane, e.sequence
        LIMIT 1
    ) AS next
    WHERE steps.n < CAST(:far AS bigint)
),
times AS MATERIALIZED (SELECT {now} AS now),
heads AS (
    SELECT lane, min(sequence) AS head, max(sequence) AS tail, count(*) AS events
    FROM (
        (
            SELECT e.lane, e.sequence
            FROM {outbox} AS e
            WHERE e.outbox = :outbox AND e.lane > CAST(:after AS bigint)
            ORDER BY e.outbox, e.lane, e.sequence
            LIMIT CAST(:near AS bigint)
        )
        UNION ALL
        SELECT lane, sequence FROM steps
    ) AS seen
    GROUP BY lane
),
free AS (
    SELECT heads.lane, heads.head, heads.tail
    FROM heads
    CROSS JOIN times
    WHERE coalesce((
        SELECT NOT c.blocked AND c.lease_until <= times.now AND c.next_at <= times.now
        FROM {outbox_claims} AS c
        WHERE c.lane = heads.lane
    ), true)
),
locked AS (
    SELECT e.lane
    FROM free
    CROSS JOIN LATERAL (
        SELECT o.lane
        FROM {outbox} AS o
        WHERE o.outbox = :outbox AND o.lane = free.lane AND o.sequence = free.head
        FOR UPDATE SKIP LOCKED
    ) AS e
),
taken AS (
    INSERT INTO {outbox_claims} AS c (lane, owner, epoch, lease_until, attempts, next_at, blocked)
    SELECT
        locked.lane, CAST(:owner AS text), times.now, times.now + CAST(:lease AS bigint), 0, 0,
        false
    FROM locked
    CROSS JOIN times
    ORDER BY locked.lane
    ON CONFLICT (lane) DO UPDATE SET
        owner = excluded.owner,
        epoch = greatest(c.epoch + 1, excluded.epoch),
        lease_until = excluded.lease_until
    WHERE NOT c.blocked AND c.lease_until <= {now} AND c.next_at <= {now}
    RETURNING c.lane, c.epoch, c.attempts
)
SELECT seen.looked, seen.furthest, taken.lane, taken.epoch, taken.attempts, heads.head, heads.tail
FROM (SELECT sum(events) AS looked, max(lane) AS furthest FROM heads) AS seen
LEFT JOIN (taken INNER JOIN heads ON heads.lane = taken.lane) ON true

-- name: fetch
-- A statement of its own, after the claim: it sees what the holder before has deleted.
SELECT
    lane, sequence, id, aggregate, aggregate_id, type, payload, headers, created_at
FROM (
    SELECT e.*, sum(octet_length(e.payload)) OVER (ORDER BY e.lane, e.sequence) AS size
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:tails, ',') AS bigint[])
    ) AS held (lane, tail)
    INNER JOIN {outbox} AS e
        ON e.outbox = :outbox AND e.lane = held.lane AND e.sequence <= held.tail
) AS found
WHERE size - octet_length(payload) <= CAST(:bytes AS bigint)
ORDER BY lane, sequence

-- name: renew
WITH marks AS (
    SELECT *
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:epochs, ',') AS bigint[])
    ) AS m (lane, epoch)
)
UPDATE {outbox_claims} AS c
SET lease_until = {now} + CAST(:lease AS bigint)
FROM marks
WHERE c.lane = marks.lane AND c.owner = :owner AND c.epoch = marks.epoch
RETURNING c.lane

-- name: done
-- Who is not the holder any more frees nothing and deletes nothing.
WITH marks AS (
    SELECT *
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:epochs, ',') AS bigint[]),
        CAST(string_to_array(:uptos, ',') AS bigint[])
    ) AS m (lane, epoch, upto)
),
freed AS (
    DELETE FROM {outbox_claims} AS c
    USING marks
    WHERE c.lane = marks.lane AND c.owner = :owner AND c.epoch = marks.epoch
    RETURNING c.lane, marks.upto
),
gone AS (
    DELETE FROM {outbox} AS e
    USING freed
    WHERE e.outbox = :outbox AND e.lane = freed.lane AND e.sequence <= freed.upto
    RETURNING 1
)
SELECT (SELECT count(*) FROM freed), (SELECT count(*) FROM gone)

-- name: keep
-- What was delivered is copied before it is deleted, where it is to be kept for a while.
WITH marks AS (
    SELECT *
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:epochs, ',') AS bigint[]),
        CAST(string_to_array(:uptos, ',') AS bigint[])
    ) AS m (lane, epoch, upto)
),
held AS (
    SELECT c.lane, marks.upto
    FROM {outbox_claims} AS c
    INNER JOIN marks ON marks.lane = c.lane AND marks.epoch = c.epoch
    WHERE c.owner = :owner
    FOR UPDATE OF c
)
INSERT INTO {outbox_ended} (
    outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
    dead, attempts, error, ended_at
)
SELECT
    e.outbox, e.id, e.aggregate, e.aggregate_id, e.sequence, e.type, e.payload, e.headers,
    e.created_at, false, 0, NULL, {now}
FROM {outbox} AS e
INNER JOIN held ON held.lane = e.lane AND e.sequence <= held.upto
WHERE e.outbox = :outbox
ON CONFLICT DO NOTHING

-- name: failed
-- The first `upto` were delivered; the one after that was not.
WITH marks AS (
    SELECT *
    FROM json_to_recordset(CAST(:marks AS json)) AS m (
        lane bigint, epoch bigint, upto bigint, attempts integer, delay bigint, blocked boolean,
        error text
    )
),
held AS (
    UPDATE {outbox_claims} AS c
    SET
        owner = NULL,
        lease_until = 0,
        attempts = marks.attempts,
        next_at = {now} + marks.delay,
        blocked = marks.blocked,
        error = marks.error
    FROM marks
    WHERE c.lane = marks.lane AND c.owner = :owner AND c.epoch = marks.epoch
    RETURNING c.lane, marks.upto
),
gone AS (
    DELETE FROM {outbox} AS e
    USING held
    WHERE e.outbox = :outbox AND e.lane = held.lane AND e.sequence <= held.upto
    RETURNING 1
)
SELECT (SELECT count(*) FROM held), (SELECT count(*) FROM gone)

-- name: bury
-- The one after `upto` is put aside with its error; its aggregate goes on.
WITH marks AS (
    SELECT *
    FROM json_to_recordset(CAST(:marks AS json)) AS m (
        lane bigint, epoch bigint, upto bigint, dead bigint, attempts integer, error text
    )
),
freed AS (
    DELETE FROM {outbox_claims} AS c
    USING marks
    WHERE c.lane = marks.lane AND c.owner = :owner AND c.epoch = marks.epoch
    RETURNING c.lane, marks.upto, marks.dead, marks.attempts, marks.error
),
gone AS (
    DELETE FROM {outbox} AS e
    USING freed
    WHERE e.outbox = :outbox AND e.lane = freed.lane AND e.sequence <= freed.dead
    RETURNING e.*, freed.upto, freed.attempts, freed.error
),
buried AS (
    INSERT INTO {outbox_ended} (
        outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
        dead, attempts, error, ended_at
    )
    SELECT
        outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
        true, attempts, error, {now}
    FROM gone
    WHERE sequence > upto
    ON CONFLICT (outbox, id) DO UPDATE SET dead = true, error = excluded.error
    RETURNING 1
)
SELECT
    (SELECT count(*) FROM freed),
    (SELECT count(*) FROM gone) - (SELECT count(*) FROM buried)

-- name: unblock
UPDATE {outbox_claims} AS c
SET blocked = false, attempts = 0, next_at = 0, epoch = c.epoch + 1, owner = NULL, lease_until = 0
FROM {outbox_sequences} AS s
WHERE
    c.lane = s.lane AND c.blocked AND s.outbox = :outbox
    AND s.aggregate = :aggregate AND s.aggregate_id = :aggregate_id
RETURNING c.lane

-- name: hold_blocked
-- Blocked aggregates are nobody's: whoever wants to put the first event aside takes it.
UPDATE {outbox_claims} AS c
SET owner = :owner, epoch = c.epoch + 1
FROM {outbox_sequences} AS s
WHERE
    c.lane = s.lane AND c.blocked AND s.outbox = :outbox
    AND s.aggregate = :aggregate AND s.aggregate_id = :aggregate_id
RETURNING c.lane, c.epoch, c.attempts, c.error

-- name: dead
SELECT
    id, aggregate, aggregate_id, sequence, type, payload, headers, created_at, attempts, error,
    ended_at
FROM {outbox_ended}
WHERE outbox = :outbox AND dead
ORDER BY ended_at, id
LIMIT CAST(:most AS bigint)

-- name: blocked
SELECT e.aggregate, e.aggregate_id, c.attempts, c.error
FROM {outbox_claims} AS c
CROSS JOIN LATERAL (
    SELECT o.aggregate, o.aggregate_id
    FROM {outbox} AS o
    WHERE o.outbox = :outbox AND o.lane = c.lane
    ORDER BY o.sequence
    LIMIT 1
) AS e
WHERE c.blocked
ORDER BY c.lane
LIMIT CAST(:most AS bigint)

-- name: clean
DELETE FROM {outbox_ended}
WHERE ctid = ANY(ARRAY(
    SELECT ctid
    FROM {outbox_ended}
    WHERE outbox = :outbox AND dead = CAST(:dead AS boolean) AND ended_at <= {now} - CAST(:age AS bigint)
    LIMIT CAST(:most AS bigint)
    FOR UPDATE SKIP LOCKED
))
RETURNING 1

-- name: forget
-- Aggregates that had no event for long. Who adds one now holds the row, or finds it gone.
DELETE FROM {outbox_sequences}
WHERE ctid = ANY(ARRAY(
    SELECT s.ctid
    FROM {outbox_sequences} AS s
    WHERE
        s.outbox = :outbox AND s.touched_at <= {now} - CAST(:age AS bigint)
        AND NOT EXISTS (SELECT 1 FROM {outbox} AS e WHERE e.outbox = s.outbox AND e.lane = s.lane)
    LIMIT CAST(:most AS bigint)
    FOR UPDATE OF s SKIP LOCKED
))
RETURNING 1

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

-- name: notify
SELECT pg_notify(:channel, '')
