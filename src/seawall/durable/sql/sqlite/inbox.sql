-- What consumers have handled. Times are microseconds of the database's own clock.

-- name: note
-- consumer, message (hash), token, ttl. A row: it is new here, or what was noted has expired; no row: a
-- repeat. Waits for another writer's transaction.
INSERT INTO {inbox} AS noted (consumer, message_hash, token, received_at, expires_at)
VALUES (:consumer, :message, :token, {now}, {now} + :ttl)
ON CONFLICT (consumer, message_hash) DO UPDATE
SET token = excluded.token, received_at = excluded.received_at,
    expires_at = excluded.expires_at
WHERE noted.expires_at <= {now}
RETURNING 1;

-- name: cleanup
-- batch. As many rows as are gone now.
DELETE FROM {inbox} WHERE (consumer, message_hash) IN (
    SELECT consumer, message_hash FROM {inbox} WHERE expires_at <= {now}
    ORDER BY expires_at LIMIT :batch
)
RETURNING 1;
