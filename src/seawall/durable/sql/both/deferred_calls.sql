-- Calls that are done later. state: 0 it waits (or is being done until not_before), 1 done, 2 dead.
-- A claim is an owner and an epoch: what somebody else has claimed since, nobody else can change.
-- `done` and `dead` may be said twice by the same claim: the word of the first may have got lost.

-- name: of_key
SELECT id, state, CASE WHEN expires_at <= {now} THEN 1 ELSE 0 END FROM {deferred_calls}
WHERE queue = :queue AND key_hash = :key_hash;

-- name: drop_done
DELETE FROM {deferred_calls} WHERE id = :id AND state = 1 AND expires_at <= {now};

-- name: done
-- One that has a key stays until it expires: so the same key is not stored again. Nothing else does.
UPDATE {deferred_calls}
SET state = 1, call = '', idempotency_key = NULL, tenant = NULL, error = NULL
WHERE id = :id AND state IN (0, 1) AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: done_without_key
DELETE FROM {deferred_calls}
WHERE id = :id AND state = 0 AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: dead
UPDATE {deferred_calls} SET state = 2, error = :error
WHERE id = :id AND state IN (0, 2) AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: discard
DELETE FROM {deferred_calls} WHERE queue = :queue AND id = :id AND (state = 2 OR (state = 0 AND owner IS NULL))
RETURNING 1;

-- name: counts
SELECT state, count(*), {now} - min(created_at) FROM {deferred_calls}
WHERE queue = :queue GROUP BY state;

-- name: renew
UPDATE {deferred_calls} SET not_before = {now} + CAST(:lease AS bigint)
WHERE id = :id AND state = 0 AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: again
-- refund is 1 where the attempt does not count.
UPDATE {deferred_calls} SET owner = NULL, not_before = {now} + CAST(:delay AS bigint),
    attempts = attempts - CAST(:refund AS bigint), error = :error
WHERE id = :id AND state = 0 AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: dead_letters
SELECT id, attempts, call, error FROM {deferred_calls}
WHERE queue = :queue AND state = 2 ORDER BY position LIMIT CAST(:most AS bigint);

-- name: revive
UPDATE {deferred_calls} SET state = 0, attempts = 0, owner = NULL, not_before = {now},
    expires_at = {now} + CAST(:ttl AS bigint)
WHERE queue = :queue AND id = :id AND state = 2
RETURNING 1;
