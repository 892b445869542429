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
