-- Leases: one holder at a time, with a fencing token. The rule is seawall.models.lease.LeaseModel.
-- Instants and times to live are whole microseconds of the database's clock. A lease that was given
-- up has ends_at 0. No row is ever removed, so tokens rise even if the clock is set back.

-- name: look
-- name. Who has it and for how much longer; and whether the clock was set back: then nobody may hold
-- it for longer than its time to live from now on.
SELECT token, holder,
    CASE WHEN ends_at > now + ttl THEN ttl WHEN ends_at > now THEN ends_at - now ELSE 0 END,
    CASE WHEN ends_at > now + ttl THEN 1 ELSE 0 END
FROM {leases}, (SELECT {now} AS now) AS clock WHERE name = :name;

-- name: clamp
-- name. What follows from a clock that was set back.
UPDATE {leases} SET ends_at = {now} + ttl WHERE name = :name AND ends_at > {now} + ttl;

-- name: take
-- name, holder, attempt, ttl. The token; no row if somebody else has it. The time is read once, in the
-- row that would be inserted: there `token` is that instant.
INSERT INTO {leases} (name, token, holder, attempt, ttl, ends_at)
SELECT CAST(:name AS text), now, CAST(:holder AS text), CAST(:attempt AS bigint),
    CAST(:ttl AS bigint), now + CAST(:ttl AS bigint)
FROM (SELECT {now} AS now) AS clock WHERE true
ON CONFLICT (name) DO UPDATE SET
    token = CASE WHEN {leases}.token >= excluded.token THEN {leases}.token + 1 ELSE excluded.token END,
    holder = excluded.holder, attempt = excluded.attempt, ttl = excluded.ttl, ends_at = excluded.ends_at
WHERE {leases}.ends_at <= excluded.token
    OR ({leases}.holder = excluded.holder AND {leases}.attempt < excluded.attempt)
RETURNING token;

-- name: renew
-- name, token, ttl.
UPDATE {leases} SET ttl = CAST(:ttl AS bigint), ends_at = {now} + CAST(:ttl AS bigint)
WHERE name = :name AND token = :token AND ends_at > {now}
RETURNING token;

-- name: release
-- name, token.
UPDATE {leases} SET ends_at = 0
WHERE name = :name AND token = :token AND ends_at > {now}
RETURNING token;

-- name: withdraw
-- name, holder, attempt.
UPDATE {leases} SET ends_at = 0
WHERE name = :name AND holder = :holder AND attempt <= :attempt AND ends_at > {now}
RETURNING token;

-- name: pass_fence
-- resource, token. No row if a higher token has passed. The row is locked until the transaction ends.
INSERT INTO {fences} (resource, token) VALUES (:resource, :token)
ON CONFLICT (resource) DO UPDATE SET token = excluded.token WHERE {fences}.token <= excluded.token
RETURNING token;

-- name: fence
-- resource. The highest token that has passed.
SELECT token FROM {fences} WHERE resource = :resource;
