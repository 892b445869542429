-- Jobs that are kept here, and done by whoever claims them. The rules: models/durable_jobs.py.
-- Times are microseconds of the database; due_at is when the next worker may take a job: for one
-- at work, the end of its lease. What a worker says counts with its owner's token and epoch only.

-- name: by_key
SELECT id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, fingerprint, {now}
FROM {jobs}
WHERE scope = :scope AND kind = :kind AND key_hash = :key_hash;

-- name: free_key
UPDATE {jobs} SET key_hash = NULL
WHERE scope = :scope AND kind = :kind AND key_hash = :key_hash AND expires_at <= {now};

-- name: view
SELECT id, scope, kind, state, priority, attempts, max_attempts, cancelling, progress, message,
    result, result_type, error, created_at, started_at, ended_at, expires_at, fingerprint, {now}
FROM {jobs}
WHERE id = :id AND scope = :scope;

-- name: state
SELECT state FROM {jobs} WHERE id = :id;

-- name: counts
SELECT state, count(*), min(created_at), {now} FROM {jobs} GROUP BY state;
