-- What consumers have handled. Times are microseconds of the database's own clock.

-- name: note
-- consumer, message (hash), token, ttl. A row: it is new here, or what was noted has expired; no row: a
-- repeat. Waits for another transaction that has noted the same and is not over.
INSERT INTO {inbox} AS noted (consumer, message_hash, token, received_at, expires_at)
VALUES (:consumer, :message, :token, {now}, {now} + CAST(:ttl AS bigint))
ON CONFLICT (consumer, message_hash) DO UPDATE
SET token = excluded.token, received_at = excluded.received_at,
    expires_at = excluded.expires_at
WHERE noted.expires_at <= {now}
RETURNING 1;

-- name: cleanup
-- batch. As many rows as are gone now.
DELETE FROM {inbox} WHERE ctid IN (
    SELECT ctid FROM {inbox} WHERE expires_at <= (SELECT {now})
    ORDER BY expires_at LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
)
RETURNING 1;
