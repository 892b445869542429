-- An epoch is at least the database's time: it grows also where a record was deleted in between.
-- A record's life never ends before its lease, so who looks at expires_at need not look at both.

-- name: take
-- A row: nobody has had it. Waits for another transaction that has inserted the same and is not over;
-- what is committed already is neither changed nor locked: repeats are in nobody's way.
INSERT INTO {idempotency} (
    scope, operation, key_hash, fingerprint, state, owner, epoch, takeovers, lease_until,
    created_at, expires_at
) VALUES (
    CAST(:scope AS text), CAST(:operation AS text), CAST(:key_hash AS bytea),
    CAST(:fingerprint AS bytea), CAST(:state AS smallint), CAST(:owner AS text), {now}, 0,
    {now} + CAST(:lease AS bigint), {now}, {now} + CAST(:ttl AS bigint)
)
ON CONFLICT (scope, operation, key_hash) DO NOTHING
RETURNING epoch, takeovers, lease_until - {now};

-- name: take_over
-- What was free when it was read; looked at again, since another one may have been faster.
UPDATE {idempotency} SET
    fingerprint = CAST(:fingerprint AS bytea), state = CAST(:state AS smallint),
    owner = CAST(:owner AS text), epoch = greatest(epoch + 1, {now}),
    takeovers = CASE WHEN expires_at <= {now} THEN 0 ELSE takeovers + 1 END,
    lease_until = {now} + CAST(:lease AS bigint),
    form = NULL, status = NULL, headers = NULL, body = NULL, kept = NULL,
    created_at = {now}, expires_at = {now} + CAST(:ttl AS bigint)
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND (expires_at <= {now} OR (
        state = 0 AND lease_until <= {now} AND (
            fingerprint = CAST(:fingerprint AS bytea)
            OR length(fingerprint) = 0 OR length(CAST(:fingerprint AS bytea)) = 0
        )
    ))
RETURNING epoch, takeovers, lease_until - {now};

-- name: take_once
-- The same for a transaction that stays open: it is marked by an advisory lock that ends with it, so
-- that who does not want to wait for it can see that it is there. Repeats take no lock.
WITH marked AS MATERIALIZED (
    SELECT CASE
        WHEN pg_try_advisory_xact_lock(CAST(:lock AS bigint)) THEN true
        ELSE CAST(:wait AS boolean)
    END AS may
    WHERE NOT EXISTS (
        SELECT 1 FROM {idempotency}
        WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
            AND key_hash = CAST(:key_hash AS bytea)
    )
)
INSERT INTO {idempotency} (
    scope, operation, key_hash, fingerprint, state, owner, epoch, takeovers, lease_until,
    created_at, expires_at
)
SELECT
    CAST(:scope AS text), CAST(:operation AS text), CAST(:key_hash AS bytea),
    CAST(:fingerprint AS bytea), CAST(:state AS smallint), CAST(:owner AS text), {now}, 0,
    {now} + CAST(:lease AS bigint), {now}, {now} + CAST(:ttl AS bigint)
FROM marked
WHERE may
ON CONFLICT (scope, operation, key_hash) DO NOTHING
RETURNING epoch, takeovers, lease_until - {now}, pg_try_advisory_xact_lock(CAST(:lock AS bigint));

-- name: take_over_once
UPDATE {idempotency} SET
    fingerprint = CAST(:fingerprint AS bytea), state = CAST(:state AS smallint),
    owner = CAST(:owner AS text), epoch = greatest(epoch + 1, {now}),
    takeovers = CASE WHEN expires_at <= {now} THEN 0 ELSE takeovers + 1 END,
    lease_until = {now} + CAST(:lease AS bigint),
    form = NULL, status = NULL, headers = NULL, body = NULL, kept = NULL,
    created_at = {now}, expires_at = {now} + CAST(:ttl AS bigint)
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND CASE
        WHEN NOT (expires_at <= {now} OR (
            state = 0 AND lease_until <= {now} AND (
                fingerprint = CAST(:fingerprint AS bytea)
                OR length(fingerprint) = 0 OR length(CAST(:fingerprint AS bytea)) = 0
            )
        )) THEN false
        WHEN pg_try_advisory_xact_lock(CAST(:lock AS bigint)) THEN true
        ELSE CAST(:wait AS boolean)
    END
RETURNING epoch, takeovers, lease_until - {now}, pg_try_advisory_xact_lock(CAST(:lock AS bigint));

-- name: mark
-- For a transaction that took the key but not the lock: one that was rolled back wakes those that
-- wait for its row a moment before its lock is free. Up to 100 ms; the lock may be held by a caller
-- that waits for this transaction, so it must not wait for it without a bound.
WITH RECURSIVE attempt (number, locked) AS (
    SELECT 1, pg_try_advisory_xact_lock(CAST(:lock AS bigint))
    UNION ALL
    SELECT number + 1, CASE
        WHEN pg_sleep(0.005) IS NOT NULL THEN pg_try_advisory_xact_lock(CAST(:lock AS bigint))
    END
    FROM attempt
    WHERE NOT locked AND number < 20
)
SELECT bool_or(locked) FROM attempt;

-- name: read
SELECT state, fingerprint, form, status, headers, body, kept, lease_until, expires_at, {now}
FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea);

-- name: lookup
-- For operators: what is known of a record, and nothing that was answered.
SELECT state, owner, epoch, takeovers, status, octet_length(body), kept, lease_until, created_at, expires_at,
    {now}
FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea);

-- name: complete
UPDATE {idempotency} SET
    state = CAST(:state AS smallint), form = CAST(:form AS smallint),
    status = CAST(:status AS integer), headers = CAST(:headers AS text),
    body = CAST(:body AS bytea), kept = CAST(:kept AS smallint),
    expires_at = {now} + CAST(:ttl AS bigint)
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint) AND state = 0
RETURNING 1;

-- name: completed
SELECT 1 FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint) AND state <> 0;

-- name: held
-- What has become of a claim; no row: it is somebody else's.
SELECT state, fingerprint, form, status, headers, body, kept, lease_until, expires_at, {now}
FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint);

-- name: answer
UPDATE {idempotency} SET
    state = CAST(:state AS smallint), form = CAST(:form AS smallint),
    status = CAST(:status AS integer), headers = CAST(:headers AS text),
    body = CAST(:body AS bytea), kept = CAST(:kept AS smallint)
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint)
RETURNING 1;

-- name: renew
UPDATE {idempotency} SET
    lease_until = {now} + CAST(:lease AS bigint), expires_at = {now} + CAST(:ttl AS bigint)
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint) AND state = 0
RETURNING 1;

-- name: abandon
DELETE FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND owner = CAST(:owner AS text) AND epoch = CAST(:epoch AS bigint)
    AND state = 0
RETURNING 1;

-- name: forget
-- Never a record that is in flight: its owner may still have its effect.
DELETE FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND (state <> 0 OR lease_until <= {now})
RETURNING 1;

-- name: clear
DELETE FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea)
    AND (expires_at <= {now} OR (
        state = 0 AND lease_until <= {now} AND (
            fingerprint = CAST(:fingerprint AS bytea)
            OR length(fingerprint) = 0 OR length(CAST(:fingerprint AS bytea)) = 0
        )
    ))
RETURNING 1;

-- name: clean
-- The time is asked once, else no index could be used.
DELETE FROM {idempotency}
WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM {idempotency} WHERE expires_at <= (SELECT {now})
    ORDER BY expires_at LIMIT CAST(:batch AS bigint) FOR UPDATE SKIP LOCKED
))
RETURNING 1;

-- name: withdraw
DELETE FROM {idempotency}
WHERE scope = CAST(:scope AS text) AND operation = CAST(:operation AS text)
    AND key_hash = CAST(:key_hash AS bytea) AND owner = CAST(:owner AS text)
RETURNING 1;

-- name: single
-- What begins with :seawall_ and is no argument is filled in where the whole is put together: see
-- _idempotency_single.py.
INSERT INTO {idempotency} (
    scope, operation, key_hash, fingerprint, state, owner, epoch, takeovers, lease_until,
    form, body, kept, created_at, expires_at
)
SELECT
    CAST(:seawall_scope AS text), CAST(:seawall_operation AS text),
    CAST(:seawall_key_hash AS bytea), CAST(:seawall_fingerprint AS bytea), 1,
    '', at, 0, at, 2,
    CASE WHEN octet_length(body) <= :seawall_max_body THEN body END,
    CASE WHEN octet_length(body) <= :seawall_max_body THEN 1 ELSE 0 END,
    at, at + :seawall_ttl
FROM (SELECT :seawall_rows AS body, {now} AS at FROM business LIMIT 1) AS seawall_made
RETURNING body;
