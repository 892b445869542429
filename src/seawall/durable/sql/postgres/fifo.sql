-- Messages in order: what senders keep until it is acknowledged, and where receivers are.

-- name: number
-- sender, receiver, most. The next number; no row: as many as may are unacknowledged. The row
-- is locked until the transaction ends, so a number is given again if it is rolled back.
INSERT INTO {fifo_senders} AS known (sender, receiver, epoch, last, acknowledged)
VALUES (:sender, :receiver, {now}, 1, 0)
ON CONFLICT (sender, receiver) DO UPDATE SET last = known.last + 1
WHERE known.last - known.acknowledged < CAST(:most AS bigint)
RETURNING epoch, last;

-- name: unacknowledged
-- sender, receiver, most. In order, as far as the receiver has room.
SELECT sent.epoch, sent.sequence, sent.payload
FROM {fifo_sent} AS sent
JOIN {fifo_senders} AS known ON known.sender = sent.sender
    AND known.receiver = sent.receiver AND known.epoch = sent.epoch
WHERE sent.sender = :sender AND sent.receiver = :receiver
    AND sent.sequence <= COALESCE(known.allowed, sent.sequence)
ORDER BY sent.sequence LIMIT CAST(:most AS bigint);

-- name: acknowledge
-- sender, receiver, epoch, until, allowed. A row if it was news.
UPDATE {fifo_senders} SET acknowledged = CAST(:until AS bigint), allowed = CAST(:allowed AS bigint)
WHERE sender = :sender AND receiver = :receiver AND epoch = :epoch AND last >= :until
    AND (acknowledged < :until OR (acknowledged = :until AND COALESCE(allowed, 0) < :allowed))
RETURNING last;

-- name: renumber
-- sender, receiver, epoch, acknowledged (as it was). What is kept begins at 1 again.
UPDATE {fifo_sent} SET epoch = :epoch, sequence = sequence - CAST(:acknowledged AS bigint)
WHERE sender = :sender AND receiver = :receiver;

-- name: buffered
-- receiver, sender, epoch, expected, most. What is there and is not delivered, in order.
SELECT sequence, received_at FROM {fifo_buffer}
WHERE receiver = :receiver AND sender = :sender AND epoch = :epoch AND sequence >= :expected
ORDER BY sequence LIMIT CAST(:most AS bigint);

-- name: was_skipped
SELECT 1 FROM {fifo_skipped}
WHERE receiver = :receiver AND sender = :sender AND epoch = :epoch
    AND CAST(:sequence AS bigint) BETWEEN first AND last;

-- name: skips
SELECT sender, epoch, first, last, skipped_at FROM {fifo_skipped}
WHERE receiver = :receiver ORDER BY skipped_at DESC, sender, first LIMIT CAST(:most AS bigint);

-- name: gaps
-- receiver, most. Who waits for a message while later ones are there; the oldest first.
SELECT place.sender, place.epoch, place.expected, min(held.sequence), count(*),
    {now} - min(held.received_at)
FROM {fifo_positions} AS place
JOIN {fifo_buffer} AS held ON held.receiver = place.receiver AND held.sender = place.sender
    AND held.epoch = place.epoch AND held.sequence >= place.expected
WHERE place.receiver = :receiver AND place.buffered > 0
GROUP BY place.sender, place.epoch, place.expected
HAVING min(held.sequence) > place.expected
ORDER BY min(held.received_at) LIMIT CAST(:most AS bigint);

-- name: forget_skipped
-- receiver, age, batch
DELETE FROM {fifo_skipped} WHERE ctid IN (
    SELECT ctid FROM {fifo_skipped}
    WHERE receiver = :receiver AND skipped_at <= (SELECT {now}) - CAST(:age AS bigint)
    LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
)
RETURNING 1;
