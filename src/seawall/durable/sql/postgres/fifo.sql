-- Messages in order: what senders keep until it is acknowledged, and where receivers are.

-- name: was_skipped
SELECT 1 FROM {fifo_skipped}
WHERE receiver = :receiver AND sender = :sender AND epoch = :epoch
    AND CAST(:sequence AS bigint) BETWEEN first AND last;

-- name: forget_skipped
-- receiver, age, batch
DELETE FROM {fifo_skipped} WHERE ctid IN (
    SELECT ctid FROM {fifo_skipped}
    WHERE receiver = :receiver AND skipped_at <= (SELECT {now}) - CAST(:age AS bigint)
    LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
)
RETURNING 1;
