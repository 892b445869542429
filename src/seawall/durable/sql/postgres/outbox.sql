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
-- Claims come and go, so their number when a plan is made says nothing of later. So below, tables are
-- asked by a list of keys, or by one descent into an index for each (what OFFSET 0 sees to): that
-- costs the same, however many there are. What is off counts as very costly, which is no reason to
-- compile it. These settings end with the transaction.
SELECT set_config('jit', 'off', true), set_config('enable_seqscan', 'off', true)

-- name: claim
-- The aggregates of the next `near` events behind a place; or the next `far` aggregates, by one
-- descent into the index for each, which passes by those of any length that are not to be had.
-- Of these, the ones that nobody holds or that are due again. It waits for nobody: whoever writes to a
-- claim just now may be dead, and the server has not noticed.
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
    SELECT lane, min(sequence) AS head, count(*) AS events
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
    SELECT lane, head, due
    FROM (
        SELECT heads.lane, heads.head, (
            SELECT NOT c.blocked AND c.lease_until <= times.now AND c.next_at <= times.now
            FROM {outbox_claims} AS c
            WHERE c.lane = heads.lane
        ) AS due
        FROM heads
        CROSS JOIN times
        OFFSET 0
    ) AS known
    WHERE coalesce(due, true)
),
unlocked AS (
    SELECT c.lane
    FROM free
    CROSS JOIN LATERAL (
        SELECT k.lane
        FROM {outbox_claims} AS k
        WHERE k.lane = free.lane
        FOR UPDATE SKIP LOCKED
    ) AS c
    WHERE free.due
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
    WHERE free.due IS NULL OR free.lane IN (SELECT lane FROM unlocked)
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
SELECT seen.looked, seen.furthest, taken.lane, taken.epoch, taken.attempts
FROM (SELECT sum(events) AS looked, max(lane) AS furthest FROM heads) AS seen
LEFT JOIN taken ON true

-- name: fetch
-- A statement of its own, after the claim: it sees what the holder before has deleted. One descent
-- into the index for each aggregate, until there are enough; never a look at all that is pending.
SELECT
    lane, sequence, id, aggregate, aggregate_id, type, payload, headers, created_at
FROM (
    SELECT enough.*, sum(octet_length(payload)) OVER (ORDER BY lane, sequence) AS size
    FROM (
        SELECT e.*
        FROM unnest(CAST(string_to_array(:lanes, ',') AS bigint[])) AS held (lane)
        CROSS JOIN LATERAL (
            SELECT o.*
            FROM {outbox} AS o
            WHERE o.outbox = :outbox AND o.lane = held.lane
            ORDER BY o.outbox, o.lane, o.sequence
            LIMIT CAST(:each AS bigint)
        ) AS e
        LIMIT CAST(:batch AS bigint)
    ) AS enough
) AS found
WHERE size - octet_length(payload) <= CAST(:bytes AS bigint)
ORDER BY lane, sequence

-- name: renew
-- An owner is that of one round, in which it claims an aggregate once: one of its epochs is this one's.
UPDATE {outbox_claims} AS c
SET lease_until = {now} + CAST(:lease AS bigint)
WHERE
    c.lane = ANY(CAST(string_to_array(:lanes, ',') AS bigint[])) AND c.owner = :owner
    AND c.epoch = ANY(CAST(string_to_array(:epochs, ',') AS bigint[]))
RETURNING c.lane

-- name: done
-- Who is not the holder any more frees nothing and deletes nothing.
WITH marks AS (
    SELECT *
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:uptos, ',') AS bigint[])
    ) AS m (lane, upto)
),
freed AS (
    DELETE FROM {outbox_claims} AS c
    WHERE
        c.lane = ANY(CAST(string_to_array(:lanes, ',') AS bigint[])) AND c.owner = :owner
        AND c.epoch = ANY(CAST(string_to_array(:epochs, ',') AS bigint[]))
    RETURNING c.lane
),
gone AS (
    DELETE FROM {outbox}
    WHERE ctid = ANY(ARRAY(
        SELECT e.ctid
        FROM marks
        INNER JOIN freed ON freed.lane = marks.lane
        CROSS JOIN LATERAL (
            SELECT o.ctid
            FROM {outbox} AS o
            WHERE o.outbox = :outbox AND o.lane = marks.lane AND o.sequence <= marks.upto
            OFFSET 0
        ) AS e
    ))
    RETURNING 1
)
SELECT (SELECT count(*) FROM freed), (SELECT count(*) FROM gone)

-- name: keep
-- What was delivered is copied before it is deleted, where it is to be kept for a while.
WITH marks AS (
    SELECT *
    FROM unnest(
        CAST(string_to_array(:lanes, ',') AS bigint[]),
        CAST(string_to_array(:uptos, ',') AS bigint[])
    ) AS m (lane, upto)
),
held AS (
    SELECT c.lane
    FROM {outbox_claims} AS c
    WHERE
        c.lane = ANY(CAST(string_to_array(:lanes, ',') AS bigint[])) AND c.owner = :owner
        AND c.epoch = ANY(CAST(string_to_array(:epochs, ',') AS bigint[]))
    FOR UPDATE
)
INSERT INTO {outbox_ended} (
    outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
    dead, attempts, error, ended_at
)
SELECT
    e.outbox, e.id, e.aggregate, e.aggregate_id, e.sequence, e.type, e.payload, e.headers,
    e.created_at, false, 0, NULL, {now}
FROM marks
INNER JOIN held ON held.lane = marks.lane
CROSS JOIN LATERAL (
    SELECT *
    FROM {outbox} AS o
    WHERE o.outbox = :outbox AND o.lane = marks.lane AND o.sequence <= marks.upto
    OFFSET 0
) AS e
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
    DELETE FROM {outbox}
    WHERE ctid = ANY(ARRAY(
        SELECT e.ctid
        FROM held
        CROSS JOIN LATERAL (
            SELECT o.ctid
            FROM {outbox} AS o
            WHERE o.outbox = :outbox AND o.lane = held.lane AND o.sequence <= held.upto
            OFFSET 0
        ) AS e
    ))
    RETURNING 1
)
SELECT lane, (SELECT count(*) FROM gone) FROM held

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
    DELETE FROM {outbox}
    WHERE ctid = ANY(ARRAY(
        SELECT e.ctid
        FROM freed
        CROSS JOIN LATERAL (
            SELECT o.ctid
            FROM {outbox} AS o
            WHERE o.outbox = :outbox AND o.lane = freed.lane AND o.sequence <= freed.dead
            OFFSET 0
        ) AS e
    ))
    RETURNING *
),
buried AS (
    INSERT INTO {outbox_ended} (
        outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
        dead, attempts, error, ended_at
    )
    SELECT
        gone.outbox, gone.id, gone.aggregate, gone.aggregate_id, gone.sequence, gone.type,
        gone.payload, gone.headers, gone.created_at, true, freed.attempts, freed.error, {now}
    FROM gone
    INNER JOIN freed ON freed.lane = gone.lane AND freed.upto < gone.sequence
    ON CONFLICT (outbox, id) DO UPDATE SET dead = true, error = excluded.error
    RETURNING 1
)
SELECT lane, (SELECT count(*) FROM gone) - (SELECT count(*) FROM buried) FROM freed

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
    WHERE outbox = :outbox AND dead = CAST(:dead AS boolean) AND ended_at <= (SELECT {now}) - CAST(:age AS bigint)
    LIMIT CAST(:batch AS bigint)
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
        s.outbox = :outbox AND s.touched_at <= (SELECT {now}) - CAST(:age AS bigint)
        AND NOT EXISTS (SELECT 1 FROM {outbox} AS e WHERE e.outbox = s.outbox AND e.lane = s.lane)
    LIMIT CAST(:batch AS bigint)
    FOR UPDATE OF s SKIP LOCKED
))
RETURNING 1

-- name: notify
SELECT pg_notify(:channel, '')
