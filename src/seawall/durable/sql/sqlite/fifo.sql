-- Messages in order: what senders keep until it is acknowledged, and where receivers are.

-- name: was_skipped
SELECT 1 FROM {fifo_skipped}
WHERE receiver = :receiver AND sender = :sender AND epoch = :epoch
    AND :sequence BETWEEN first AND last;

-- name: forget_skipped
-- receiver, age, batch
DELETE FROM {fifo_skipped} WHERE (receiver, sender, epoch, first) IN (
    SELECT receiver, sender, epoch, first FROM {fifo_skipped}
    WHERE receiver = :receiver AND skipped_at <= {now} - :age
    LIMIT :batch
)
RETURNING 1;
