-- Messages in order: what senders keep until it is acknowledged, and where receivers are.

-- name: keep
INSERT INTO {fifo_sent} (sender, receiver, epoch, sequence, payload, created_at)
VALUES (:sender, :receiver, :epoch, :sequence, :payload, {now});

-- name: sender
SELECT epoch, last, acknowledged FROM {fifo_senders}
WHERE sender = :sender AND receiver = :receiver;

-- name: lock_sender
UPDATE {fifo_senders} SET last = last WHERE sender = :sender AND receiver = :receiver;

-- name: drop_sent
DELETE FROM {fifo_sent}
WHERE sender = :sender AND receiver = :receiver AND epoch = :epoch AND sequence <= :until;

-- name: restart
-- sender, receiver. The next epoch, later than any before: also than one that was lost.
UPDATE {fifo_senders}
SET epoch = CASE WHEN epoch >= {now} THEN epoch + 1 ELSE {now} END,
    last = last - acknowledged, acknowledged = 0, allowed = NULL
WHERE sender = :sender AND receiver = :receiver
RETURNING epoch, last;

-- name: place
-- receiver, sender. Locks it until the transaction ends: one at a time receives of a sender.
UPDATE {fifo_positions} SET updated_at = {now}, version = version + 1
WHERE receiver = :receiver AND sender = :sender
RETURNING epoch, expected, buffered, updated_at, version;

-- name: begin
INSERT INTO {fifo_positions} (receiver, sender, epoch, expected, buffered, version, updated_at)
VALUES (:receiver, :sender, :epoch, 1, 0, 0, {now})
ON CONFLICT (receiver, sender) DO NOTHING;

-- name: payloads
SELECT sequence, payload FROM {fifo_buffer}
WHERE receiver = :receiver AND sender = :sender AND epoch = :epoch
    AND sequence BETWEEN :first AND :last
ORDER BY sequence;

-- name: move
-- No row: the transaction that locked the place was rolled back meanwhile.
UPDATE {fifo_positions}
SET epoch = :epoch, expected = :expected, buffered = :buffered
WHERE receiver = :receiver AND sender = :sender AND version = :version
RETURNING 1;

-- name: buffer
INSERT INTO {fifo_buffer} (receiver, sender, epoch, sequence, payload, received_at)
VALUES (:receiver, :sender, :epoch, :sequence, :payload, {now})
ON CONFLICT (receiver, sender, epoch, sequence) DO NOTHING;

-- name: drop_buffered
DELETE FROM {fifo_buffer}
WHERE receiver = :receiver AND sender = :sender
    AND (epoch < :epoch OR (epoch = :epoch AND sequence < :expected));

-- name: skipped
INSERT INTO {fifo_skipped} (receiver, sender, epoch, first, last, skipped_at)
VALUES (:receiver, :sender, :epoch, :first, :last, {now})
ON CONFLICT (receiver, sender, epoch, first) DO NOTHING;

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
