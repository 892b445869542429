-- What consumers have handled. Times are microseconds of the database's own clock.

-- name: forget
-- What was noted with that token alone: an earlier note of the same message stays.
DELETE FROM {inbox}
WHERE consumer = :consumer AND message_hash = :message AND token = :token;

-- name: seen
SELECT 1 FROM {inbox}
WHERE consumer = :consumer AND message_hash = :message AND expires_at > {now};
