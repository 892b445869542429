-- An epoch is at least the database's time: it grows also where a record was deleted in between.
-- A record's life never ends before its lease, so who looks at expires_at need not look at both.

-- name: take
INSERT INTO {idempotency} AS had (
    scope, operation, key_hash, fingerprint, state, owner, epoch, takeovers, lease_until,
    created_at, expires_at
) VALUES (
    :scope, :operation, :key_hash, :fingerprint, :state, :owner, {now}, 0,
    {now} + :lease, {now}, {now} + :ttl
)
ON CONFLICT (scope, operation, key_hash) DO UPDATE SET
    fingerprint = excluded.fingerprint,
    state = excluded.state,
    owner = excluded.owner,
    epoch = max(had.epoch + 1, {now}),
    takeovers = CASE WHEN had.expires_at <= {now} THEN 0 ELSE had.takeovers + 1 END,
    lease_until = {now} + :lease,
    form = NULL, status = NULL, headers = NULL, body = NULL, kept = NULL,
    created_at = {now},
    expires_at = {now} + :ttl
WHERE had.expires_at <= {now} OR (
    had.state = 0 AND had.lease_until <= {now} AND (
        had.fingerprint = excluded.fingerprint
        OR length(had.fingerprint) = 0 OR length(excluded.fingerprint) = 0
    )
)
RETURNING epoch, takeovers, lease_until - {now};

-- name: read
SELECT state, fingerprint, form, status, headers, body, kept, lease_until, expires_at, {now}
FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash;

-- name: complete
UPDATE {idempotency} SET
    state = :state, form = :form,
    status = :status, headers = :headers,
    body = :body, kept = :kept,
    expires_at = {now} + :ttl
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch AND state = 0
RETURNING 1;

-- name: completed
SELECT 1 FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch AND state <> 0;

-- name: answer
UPDATE {idempotency} SET
    state = :state, form = :form,
    status = :status, headers = :headers,
    body = :body, kept = :kept
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch
RETURNING 1;

-- name: renew
UPDATE {idempotency} SET
    lease_until = {now} + :lease, expires_at = {now} + :ttl
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch AND state = 0
RETURNING 1;

-- name: forget
DELETE FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch
    AND state = :state
RETURNING 1;

-- name: clear
DELETE FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND (expires_at <= {now} OR (
        state = 0 AND lease_until <= {now} AND (
            fingerprint = :fingerprint
            OR length(fingerprint) = 0 OR length(:fingerprint) = 0
        )
    ))
RETURNING 1;

-- name: clean
DELETE FROM {idempotency}
WHERE rowid IN (
    SELECT rowid FROM {idempotency} WHERE expires_at <= {now}
    ORDER BY expires_at LIMIT :batch
)
RETURNING 1;

-- name: withdraw
DELETE FROM {idempotency}
WHERE scope = :scope AND operation = :operation AND key_hash = :key_hash AND owner = :owner
RETURNING 1;
