-- Jobs that are kept here, and done by whoever claims them. The rules: models/durable_jobs.py.
-- Times are microseconds of the database; due_at is when the next worker may take a job: for one
-- at work, the end of its lease. What a worker says counts with its owner's token and epoch only.

-- name: submit
INSERT INTO {jobs} (
    id, scope, kind, key_hash, fingerprint, state, priority, rank, due_at, epoch, attempts,
    max_attempts, cancelling, progress, message, payload, error, created_at
)
SELECT CAST(:id AS text), CAST(:scope AS text), CAST(:kind AS text), CAST(:key_hash AS blob),
    CAST(:fingerprint AS blob), 'queued', CAST(:priority AS integer),
    clock.now + CAST(:delay AS integer) + CAST(:ahead AS integer),
    clock.now + CAST(:delay AS integer), 0, 0, CAST(:max_attempts AS integer), 0, 0, '',
    CAST(:payload AS text), '', clock.now
FROM (SELECT {now} AS now) AS clock
WHERE true
ON CONFLICT (scope, kind, key_hash) WHERE key_hash IS NOT NULL DO NOTHING
RETURNING id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, due_at, fingerprint,
    {now};

-- name: due
-- Each kind by its own part of the index: a long line of others is not looked through. Told
-- of each is whether it is over: cancelled, or tried often enough.
SELECT job.id, job.cancelling = 1 OR job.attempts >= job.max_attempts
FROM (SELECT {now} AS now) AS clock
CROSS JOIN json_each(:kinds) AS wanted
CROSS JOIN {jobs} AS job ON job.id IN (
    SELECT id FROM {jobs}
    WHERE kind = wanted.value AND state IN ('queued', 'running')
        AND rank <= clock.now + CAST(:reach AS integer) AND due_at <= clock.now
    ORDER BY rank, id
    LIMIT CAST(:most AS integer)
)
ORDER BY job.rank, job.id
LIMIT CAST(:most AS integer);

-- name: take
-- What was found is asked again: some drivers of SQLite begin their transaction only here.
UPDATE {jobs} SET state = 'running', owner = CAST(:owner AS text), epoch = epoch + 1,
    attempts = attempts + 1, started_at = COALESCE(started_at, {now}),
    due_at = {now} + CAST(:lease AS bigint)
WHERE id IN (SELECT value FROM json_each(:ids))
    AND state IN ('queued', 'running') AND due_at <= {now}
RETURNING id, scope, kind, state, epoch, attempts, max_attempts, payload, rank, progress,
    message;

-- name: give_up
UPDATE {jobs} SET state = CASE WHEN cancelling = 1 THEN 'cancelled' ELSE 'failed' END,
    error = CASE WHEN cancelling = 0 AND error = '' THEN CAST(:lost AS text) ELSE error END,
    owner = NULL, started_at = COALESCE(started_at, {now}), ended_at = {now},
    expires_at = {now} + CAST(:ttl AS bigint)
WHERE id IN (SELECT value FROM json_each(:ids))
    AND state IN ('queued', 'running') AND due_at <= {now}
RETURNING id, scope, kind, state, epoch, attempts, max_attempts, payload, rank, progress,
    message;

-- name: look
SELECT id, epoch, cancelling FROM {jobs}
WHERE id IN (SELECT value FROM json_each(:ids))
    AND state = 'running' AND owner = :owner;

-- name: expire
UPDATE {jobs} SET state = 'expired', key_hash = NULL, payload = 'null', result = NULL,
    result_type = NULL, error = '', message = '', expires_at = {now} + CAST(:gone_for AS integer)
WHERE id IN (
    SELECT id FROM {jobs} WHERE expires_at <= (SELECT {now}) AND state <> 'expired'
    ORDER BY expires_at LIMIT CAST(:batch AS integer)
)
RETURNING id;

-- name: forget
DELETE FROM {jobs}
WHERE id IN (
    SELECT id FROM {jobs} WHERE expires_at <= (SELECT {now}) AND state = 'expired'
    ORDER BY expires_at LIMIT CAST(:batch AS integer)
)
RETURNING id;
