-- Jobs that are kept here, and done by whoever claims them. The rules: models/durable_jobs.py.
-- Times are microseconds of the database; due_at is when the next worker may take a job: for one
-- at work, the end of its lease. What a worker says counts with its owner's token and epoch only.

-- name: submit
INSERT INTO {jobs} (
    id, scope, kind, key_hash, fingerprint, state, priority, rank, due_at, epoch, attempts,
    max_attempts, cancelling, progress, message, payload, error, created_at
)
SELECT CAST(:id AS text), CAST(:scope AS text), CAST(:kind AS text), CAST(:key_hash AS bytea),
    CAST(:fingerprint AS bytea), 'queued', CAST(:priority AS smallint),
    clock.now + CAST(:delay AS bigint) + CAST(:ahead AS bigint),
    clock.now + CAST(:delay AS bigint), 0, 0, CAST(:max_attempts AS integer), 0, 0, '',
    CAST(:payload AS text), '', clock.now
FROM (SELECT {now} AS now) AS clock
ON CONFLICT (scope, kind, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
RETURNING id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, fingerprint, {now};

-- name: claim
WITH clock AS (SELECT {now} AS now),
due AS (
    SELECT id FROM {jobs}
    WHERE state IN ('queued', 'running')
        AND rank <= (SELECT now FROM clock) + CAST(:reach AS bigint)
        AND due_at <= (SELECT now FROM clock)
        AND kind IN (SELECT jsonb_array_elements_text(CAST(:kinds AS jsonb)))
    ORDER BY rank, id
    LIMIT CAST(:most AS bigint)
    FOR UPDATE SKIP LOCKED
)
UPDATE {jobs} AS job SET
    state = CASE WHEN job.cancelling = 1 THEN 'cancelled'
        WHEN job.attempts >= job.max_attempts THEN 'failed' ELSE 'running' END,
    owner = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN NULL ELSE CAST(:owner AS text) END,
    error = CASE WHEN job.cancelling = 0 AND job.attempts >= job.max_attempts AND job.error = ''
        THEN CAST(:lost AS text) ELSE job.error END,
    epoch = job.epoch + CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN 0 ELSE 1 END,
    attempts = job.attempts + CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN 0 ELSE 1 END,
    due_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN job.due_at ELSE clock.now + CAST(:lease AS bigint) END,
    started_at = COALESCE(job.started_at, clock.now),
    ended_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN clock.now ELSE NULL END,
    expires_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN clock.now + CAST(:ttl AS bigint) ELSE NULL END
FROM due, clock
WHERE job.id = due.id
RETURNING job.id, job.scope, job.kind, job.state, job.epoch, job.attempts, job.max_attempts,
    job.payload, job.rank, job.progress, job.message;

-- name: claim_one
WITH clock AS (SELECT {now} AS now),
due AS (
    SELECT id FROM {jobs}
    WHERE id = :id AND state IN ('queued', 'running') AND due_at <= (SELECT now FROM clock)
    FOR UPDATE SKIP LOCKED
)
UPDATE {jobs} AS job SET
    state = CASE WHEN job.cancelling = 1 THEN 'cancelled'
        WHEN job.attempts >= job.max_attempts THEN 'failed' ELSE 'running' END,
    owner = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN NULL ELSE CAST(:owner AS text) END,
    error = CASE WHEN job.cancelling = 0 AND job.attempts >= job.max_attempts AND job.error = ''
        THEN CAST(:lost AS text) ELSE job.error END,
    epoch = job.epoch + CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN 0 ELSE 1 END,
    attempts = job.attempts + CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN 0 ELSE 1 END,
    due_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN job.due_at ELSE clock.now + CAST(:lease AS bigint) END,
    started_at = COALESCE(job.started_at, clock.now),
    ended_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN clock.now ELSE NULL END,
    expires_at = CASE WHEN job.cancelling = 1 OR job.attempts >= job.max_attempts
        THEN clock.now + CAST(:ttl AS bigint) ELSE NULL END
FROM due, clock
WHERE job.id = due.id
RETURNING job.id, job.scope, job.kind, job.state, job.epoch, job.attempts, job.max_attempts,
    job.payload, job.rank, job.progress, job.message;

-- name: renew
UPDATE {jobs} SET due_at = {now} + CAST(:lease AS bigint),
    progress = CAST(:progress AS double precision), message = CAST(:message AS text)
WHERE id = :id AND state = 'running' AND owner = :owner AND epoch = :epoch
RETURNING cancelling;

-- name: look
SELECT id, epoch, cancelling FROM {jobs}
WHERE id IN (SELECT jsonb_array_elements_text(CAST(:ids AS jsonb))) AND state = 'running' AND owner = :owner;

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

-- name: waiting
SELECT id, priority FROM {jobs}
WHERE state IN ('queued', 'running') AND due_at <= {now}
    AND kind IN (SELECT jsonb_array_elements_text(CAST(:kinds AS jsonb)))
ORDER BY rank, id
LIMIT CAST(:most AS bigint);

-- name: expire
UPDATE {jobs} SET state = 'expired', key_hash = NULL, payload = 'null', result = NULL,
    result_type = NULL, error = '', message = '', expires_at = {now} + CAST(:gone_for AS bigint)
WHERE id IN (
    SELECT id FROM {jobs} WHERE expires_at <= {now} AND state <> 'expired'
    ORDER BY expires_at LIMIT CAST(:most AS bigint)
    FOR UPDATE SKIP LOCKED
)
RETURNING id;

-- name: forget
DELETE FROM {jobs}
WHERE id IN (
    SELECT id FROM {jobs} WHERE expires_at <= {now} AND state = 'expired'
    ORDER BY expires_at LIMIT CAST(:most AS bigint)
    FOR UPDATE SKIP LOCKED
)
RETURNING id;
