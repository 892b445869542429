-- An epoch is at least the database's time: it grows also where a record was deleted in between.
-- A record's life never ends before its lease, so who looks at expires_at need not look at both.

-- name: take
-- A row: nobody has had it. What is there already is not changed.
INSERT INTO {idempotency} (
    scope, operation, key_hash, fingerprint, state, owner, epoch, takeovers, lease_until,
    created_at, expires_at
) VALUES (
    :scope, :operation, :key_hash, :fingerprint, :state, :owner, {now}, 0,
    {now} + :lease, {now}, {now} + :ttl
)
ON CONFLICT (scope, operation, key_hash) DO NOTHING
RETURNING epoch, takeovers, lease_until - {now};

-- name: take_over
-- What was free when it was read; looked at again, since another one may have been faster.
UPDATE {idempotency} SET
    fingerprint = :fingerprint, state = :state,
    owner = :owner, epoch = max(epoch + 1, {now}),
    takeovers = CASE WHEN expires_at <= {now} THEN 0 ELSE takeovers + 1 END,
    lease_until = {now} + :lease,
    form = NULL, status = NULL, headers = NULL, body = NULL, kept = NULL,
    created_at = {now}, expires_at = {now} + :ttl
WHERE scope = :scope AND operation = :operation AND key_hash = :key_hash
    AND (expires_at <= {now} OR (
        state = 0 AND lease_until <= {now} AND (
            fingerprint = :fingerprint
            OR length(fingerprint) = 0 OR length(:fingerprint) = 0
        )
    ))
RETURNING epoch, takeovers, lease_until - {now};

-- name: read
SELECT state, fingerprint, form, status, headers, body, kept, lease_until, expires_at, {now}
FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash;

-- name: lookup
-- For operators: what is known of a record, and nothing that was answered.
SELECT state, owner, epoch, takeovers, status, length(body), kept, lease_until, created_at, expires_at,
    {now}
FROM {idempotency}
WHERE scope = :scope AND operation = :operation AND key_hash = :key_hash;

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

-- name: held
-- What has become of a claim; no row: it is somebody else's.
SELECT state, fingerprint, form, status, headers, body, kept, lease_until, expires_at, {now}
FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch;

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

-- name: abandon
DELETE FROM {idempotency}
WHERE scope = :scope AND operation = :operation
    AND key_hash = :key_hash
    AND owner = :owner AND epoch = :epoch
    AND state = 0
RETURNING 1;

-- name: forget
-- Never a record that is in flight: its owner may still have its effect.
DELETE FROM {idempotency}
WHERE scope = :scope AND operation = :operation AND key_hash = :key_hash
    AND (state <> 0 OR lease_until <= {now})
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
