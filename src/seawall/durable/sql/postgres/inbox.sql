-- What consumers have handled. Times are microseconds of the database's own clock.

-- name: note
-- consumer, message (hash), token, ttl. A row: it is new here, or what was noted has expired; no row: a
-- repeat. Waits for another transaction that has noted the same and is not over. What is committed
-- already is seen first, and not locked: repeats are in nobody's way.
INSERT INTO {inbox} AS noted (consumer, message_hash, token, received_at, expires_at)
SELECT CAST(:consumer AS text), CAST(:message AS bytea), CAST(:token AS bytea), {now},
    {now} + CAST(:ttl AS bigint)
WHERE NOT EXISTS (
    SELECT 1 FROM {inbox} AS had
    WHERE had.consumer = CAST(:consumer AS text) AND had.message_hash = CAST(:message AS bytea)
        AND had.expires_at > {now}
)
ON CONFLICT (consumer, message_hash) DO UPDATE
SET token = excluded.token, received_at = excluded.received_at,
    expires_at = excluded.expires_at
WHERE noted.expires_at <= {now}
RETURNING 1;

-- name: cleanup
-- batch. As many rows as are gone now.
DELETE FROM {inbox} WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {inbox} WHERE expires_at <= (SELECT {now})
    ORDER BY expires_at LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
))
RETURNING 1;
