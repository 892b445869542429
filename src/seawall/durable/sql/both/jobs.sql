-- Jobs that are kept here, and done by whoever claims them. The rules: models/durable_jobs.py.
-- Times are microseconds of the database; due_at is when the next worker may take a job: for one
-- at work, the end of its lease. What a worker says counts with its owner's token and epoch only.

-- name: by_key
SELECT id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, due_at, fingerprint,
    {now}
FROM {jobs}
WHERE scope = :scope AND kind = :kind AND key_hash = :key_hash;

-- name: free_key
UPDATE {jobs} SET key_hash = NULL
WHERE scope = :scope AND kind = :kind AND key_hash = :key_hash AND expires_at <= {now};

-- name: view
SELECT id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, due_at, fingerprint,
    {now}
FROM {jobs}
WHERE id = :id AND scope = :scope;

-- name: standing
SELECT state, epoch FROM {jobs} WHERE id = :id;

-- name: depth
SELECT count(*) FROM (
    SELECT 1 FROM {jobs} WHERE state IN ('queued', 'running') LIMIT CAST(:most AS bigint)
) AS there;

-- name: renew
UPDATE {jobs} SET due_at = {now} + CAST(:lease AS bigint),
    progress = CAST(:progress AS double precision), message = CAST(:message AS text)
WHERE id = :id AND state = 'running' AND owner = :owner AND epoch = :epoch
RETURNING cancelling;

-- name: succeed
UPDATE {jobs} SET state = 'succeeded', owner = NULL, progress = 1, message = CAST(:message AS text),
    error = '', result = :result, result_type = :result_type, ended_at = {now},
    expires_at = {now} + CAST(:ttl AS bigint)
WHERE id = :id AND state = 'running' AND owner = :owner AND epoch = :epoch
RETURNING state;

-- name: fail
WITH clock AS (SELECT {now} AS now)
UPDATE {jobs} SET
    state = CASE WHEN cancelling = 1 THEN 'cancelled'
        WHEN CAST(:retry AS integer) = 1 AND attempts < max_attempts THEN 'queued'
        ELSE 'failed' END,
    ended_at = CASE WHEN cancelling = 0 AND CAST(:retry AS integer) = 1 AND attempts < max_attempts
        THEN NULL ELSE (SELECT now FROM clock) END,
    expires_at = CASE WHEN cancelling = 0 AND CAST(:retry AS integer) = 1
        AND attempts < max_attempts THEN NULL
        ELSE (SELECT now FROM clock) + CAST(:ttl AS bigint) END,
    due_at = (SELECT now FROM clock) + CAST(:delay AS bigint),
    owner = NULL, error = CAST(:error AS text), progress = CAST(:progress AS double precision),
    message = CAST(:message AS text)
WHERE id = :id AND state = 'running' AND owner = :owner AND epoch = :epoch
RETURNING state;

-- name: give_back
WITH clock AS (SELECT {now} AS now)
UPDATE {jobs} SET
    state = CASE WHEN cancelling = 1 THEN 'cancelled' ELSE 'queued' END,
    ended_at = CASE WHEN cancelling = 1 THEN (SELECT now FROM clock) ELSE NULL END,
    expires_at = CASE WHEN cancelling = 1
        THEN (SELECT now FROM clock) + CAST(:ttl AS bigint) ELSE NULL END,
    due_at = (SELECT now FROM clock) + CAST(:delay AS bigint), owner = NULL,
    attempts = attempts - 1
WHERE id = :id AND state = 'running' AND owner = :owner AND epoch = :epoch
RETURNING state;

-- name: cancel
WITH clock AS (SELECT {now} AS now)
UPDATE {jobs} SET
    cancelling = 1,
    state = CASE WHEN state = 'queued' OR due_at <= (SELECT now FROM clock)
        THEN 'cancelled' ELSE state END,
    owner = CASE WHEN state = 'queued' OR due_at <= (SELECT now FROM clock)
        THEN NULL ELSE owner END,
    ended_at = CASE WHEN state = 'queued' OR due_at <= (SELECT now FROM clock)
        THEN (SELECT now FROM clock) ELSE NULL END,
    expires_at = CASE WHEN state = 'queued' OR due_at <= (SELECT now FROM clock)
        THEN (SELECT now FROM clock) + CAST(:ttl AS bigint) ELSE NULL END
WHERE id = :id AND scope = :scope AND state IN ('queued', 'running')
RETURNING state;

-- name: counts
SELECT state, count(*), min(created_at), {now} FROM {jobs} GROUP BY state;

-- name: browse_ended
-- The latest first. So many are looked at; the last but one column says whether they match.
SELECT number, id, state, kind, scope, priority, attempts, error, created_at, ended_at, due_at,
    length(payload), substr(payload, 1, CAST(:cut AS integer)),
    lower(id || ' ' || kind || ' ' || scope || ' ' || error)
        LIKE lower(CAST(:pattern AS text)) ESCAPE '!'
    OR (CAST(:cut AS integer) > 0
        AND lower(payload) LIKE lower(CAST(:pattern AS text)) ESCAPE '!'),
    {now}
FROM (
    SELECT ended_at AS number, id, state, kind, scope, priority, attempts, error, created_at,
        ended_at, due_at, payload
    FROM {jobs}
    WHERE state = :state AND expires_at > {now}
        AND (ended_at, id) < (CAST(:number AS bigint), CAST(:id AS text))
    ORDER BY ended_at DESC, id DESC
    LIMIT CAST(:most AS bigint)
) AS looked
ORDER BY number DESC, id DESC;

-- name: browse_open
-- The next in line first; the rest as above.
SELECT number, id, state, kind, scope, priority, attempts, error, created_at, ended_at, due_at,
    length(payload), substr(payload, 1, CAST(:cut AS integer)),
    lower(id || ' ' || kind || ' ' || scope || ' ' || error)
        LIKE lower(CAST(:pattern AS text)) ESCAPE '!'
    OR (CAST(:cut AS integer) > 0
        AND lower(payload) LIKE lower(CAST(:pattern AS text)) ESCAPE '!'),
    {now}
FROM (
    SELECT rank AS number, id, state, kind, scope, priority, attempts, error, created_at,
        ended_at, due_at, payload
    FROM {jobs}
    WHERE state = :state AND (rank, id) > (CAST(:number AS bigint), CAST(:id AS text))
    ORDER BY rank, id
    LIMIT CAST(:most AS bigint)
) AS looked
ORDER BY number, id;

-- name: inspect
SELECT 0, id, state, kind, scope, priority, attempts, error, created_at, ended_at, due_at,
    length(payload), substr(payload, 1, CAST(:cut AS integer)), 1 = 1, {now}
FROM {jobs}
WHERE id = :id AND state <> 'expired' AND (expires_at IS NULL OR expires_at > {now});

-- name: retry
UPDATE {jobs} SET state = 'queued', attempts = 0, progress = 0, message = '',
    started_at = NULL, ended_at = NULL, expires_at = NULL, due_at = {now},
    rank = {now} + priority * CAST(:head_start AS bigint)
WHERE id = :id AND state = 'failed' AND expires_at > {now}
RETURNING id;

-- name: drop_failed
UPDATE {jobs} SET state = 'expired', key_hash = NULL, payload = 'null', error = '', message = '',
    expires_at = {now} + CAST(:gone_for AS bigint)
WHERE id = :id AND state = 'failed'
RETURNING id;
