-- name: place
INSERT INTO {outbox_sequences} (outbox, aggregate, aggregate_id, last, touched_at)
VALUES (:outbox, :aggregate, :aggregate_id, 1, {now})
ON CONFLICT (outbox, aggregate, aggregate_id)
DO UPDATE SET last = last + 1, touched_at = excluded.touched_at
RETURNING lane, last

-- name: put
INSERT INTO {outbox} (
    outbox, lane, sequence, id, aggregate, aggregate_id, type, payload, headers, created_at
)
VALUES (
    :outbox, :lane, :sequence, :id, :aggregate, :aggregate_id, :type, :payload, :headers, {now}
)

-- name: look
WITH RECURSIVE steps (lane, n) AS (
    SELECT (SELECT min(e.lane) FROM {outbox} AS e WHERE e.outbox = :outbox AND e.lane > :after), 1
    WHERE :far > 0
    UNION ALL
    SELECT
        (SELECT min(e.lane) FROM {outbox} AS e WHERE e.outbox = :outbox AND e.lane > steps.lane),
        steps.n + 1
    FROM steps
    WHERE steps.lane IS NOT NULL AND steps.n < :far
),
heads AS (
    SELECT lane, min(sequence) AS head, max(sequence) AS tail, count(*) AS events
    FROM (
        SELECT lane, sequence
        FROM (
            SELECT e.lane, e.sequence
            FROM {outbox} AS e
            WHERE e.outbox = :outbox AND e.lane > :after
            ORDER BY e.lane, e.sequence
            LIMIT :near
        )
        UNION ALL
        SELECT
            steps.lane,
            (SELECT min(e.sequence) FROM {outbox} AS e
                WHERE e.outbox = :outbox AND e.lane = steps.lane)
        FROM steps
        WHERE steps.lane IS NOT NULL
    )
    GROUP BY lane
)
SELECT
    heads.lane,
    c.lane IS NULL OR (NOT c.blocked AND c.lease_until <= {now} AND c.next_at <= {now}),
    heads.head,
    heads.tail,
    heads.events
FROM heads
LEFT JOIN {outbox_claims} AS c ON c.lane = heads.lane
ORDER BY heads.lane

-- name: claim
INSERT INTO {outbox_claims} (lane, owner, epoch, lease_until, attempts, next_at, blocked)
SELECT l.value, :owner, {now}, {now} + :lease, 0, 0, 0
FROM json_each('[' || :lanes || ']') AS l
WHERE true
ON CONFLICT (lane) DO UPDATE SET
    owner = excluded.owner,
    epoch = max(epoch + 1, excluded.epoch),
    lease_until = excluded.lease_until
WHERE NOT blocked AND lease_until <= {now} AND next_at <= {now}
RETURNING lane, epoch, attempts

-- name: fetch
SELECT
    e.lane, e.sequence, e.id, e.aggregate, e.aggregate_id, e.type, e.payload, e.headers,
    e.created_at
FROM (
    SELECT
        o.lane, o.sequence,
        sum(length(o.payload)) OVER (ORDER BY o.lane, o.sequence) - length(o.payload) AS before
    FROM json_each('[' || :marks || ']') AS m
    INNER JOIN {outbox} AS o
        ON o.outbox = :outbox AND o.lane = json_extract(m.value, '$[0]')
        AND o.sequence <= json_extract(m.value, '$[1]')
) AS found
INNER JOIN {outbox} AS e
    ON e.outbox = :outbox AND e.lane = found.lane AND e.sequence = found.sequence
WHERE found.before <= :bytes
ORDER BY e.lane, e.sequence

-- name: held
-- Which of these are still ours; nobody else writes until this transaction ends. It writes itself: some
-- drivers of SQLite begin their transaction only with that.
UPDATE {outbox_claims} SET owner = owner
WHERE owner = :owner
    AND lane IN (SELECT json_extract(l.value, '$[0]') FROM json_each('[' || :marks || ']') AS l)
    AND (lane, epoch) IN (
        SELECT json_extract(m.value, '$[0]'), json_extract(m.value, '$[1]')
        FROM json_each('[' || :marks || ']') AS m
    )
RETURNING lane

-- name: renew
UPDATE {outbox_claims}
SET lease_until = {now} + :lease
WHERE owner = :owner AND lane IN (SELECT l.value FROM json_each('[' || :lanes || ']') AS l)

-- name: free
DELETE FROM {outbox_claims}
WHERE owner = :owner AND lane IN (SELECT l.value FROM json_each('[' || :lanes || ']') AS l)

-- name: gone
DELETE FROM {outbox}
WHERE outbox = :outbox AND (lane, sequence) IN (
    SELECT e.lane, e.sequence
    FROM json_each('[' || :marks || ']') AS m
    INNER JOIN {outbox} AS e
        ON e.outbox = :outbox AND e.lane = json_extract(m.value, '$[0]')
        AND e.sequence <= json_extract(m.value, '$[1]')
)
RETURNING 1

-- name: keep
INSERT INTO {outbox_ended} (
    outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
    dead, attempts, error, ended_at
)
SELECT
    e.outbox, e.id, e.aggregate, e.aggregate_id, e.sequence, e.type, e.payload, e.headers,
    e.created_at, 0, 0, NULL, {now}
FROM json_each('[' || :marks || ']') AS m
INNER JOIN {outbox} AS e
    ON e.outbox = :outbox AND e.lane = json_extract(m.value, '$[0]')
    AND e.sequence <= json_extract(m.value, '$[1]')
WHERE true
ON CONFLICT DO NOTHING

-- name: trouble
UPDATE {outbox_claims}
SET
    owner = NULL, lease_until = 0, attempts = :attempts, next_at = {now} + :delay,
    blocked = :blocked, error = :error
WHERE lane = :lane AND owner = :owner

-- name: bury
INSERT INTO {outbox_ended} (
    outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
    dead, attempts, error, ended_at
)
SELECT
    outbox, id, aggregate, aggregate_id, sequence, type, payload, headers, created_at,
    1, :attempts, :error, {now}
FROM {outbox}
WHERE outbox = :outbox AND lane = :lane AND sequence = :dead
ON CONFLICT (outbox, id) DO UPDATE SET dead = 1, error = excluded.error

-- name: blocked
SELECT s.aggregate, s.aggregate_id, c.attempts, c.error
FROM {outbox_claims} AS c
INNER JOIN {outbox_sequences} AS s ON s.lane = c.lane
WHERE c.blocked AND s.outbox = :outbox
ORDER BY c.lane
LIMIT :most

-- name: clean
DELETE FROM {outbox_ended}
WHERE rowid IN (
    SELECT rowid
    FROM {outbox_ended}
    WHERE outbox = :outbox AND dead = :dead AND ended_at <= {now} - :age
    LIMIT :batch
)
RETURNING 1

-- name: forget
DELETE FROM {outbox_sequences}
WHERE lane IN (
    SELECT s.lane
    FROM {outbox_sequences} AS s
    WHERE
        s.outbox = :outbox AND s.touched_at <= {now} - :age
        AND NOT EXISTS (SELECT 1 FROM {outbox} AS e WHERE e.outbox = s.outbox AND e.lane = s.lane)
    LIMIT :batch
)
RETURNING 1
