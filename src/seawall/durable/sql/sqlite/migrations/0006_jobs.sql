CREATE TABLE {jobs} (
    id text PRIMARY KEY NOT NULL,
    scope text NOT NULL,
    kind text NOT NULL,
    key_hash blob,
    fingerprint blob NOT NULL,
    state text NOT NULL,
    priority integer NOT NULL,
    rank integer NOT NULL,
    due_at integer NOT NULL,
    owner text,
    epoch integer NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer NOT NULL,
    cancelling integer NOT NULL,
    progress real NOT NULL,
    message text NOT NULL,
    payload text NOT NULL,
    result blob,
    result_type text,
    error text NOT NULL,
    created_at integer NOT NULL,
    started_at integer,
    ended_at integer,
    expires_at integer
);

CREATE UNIQUE INDEX {index_jobs_key} ON {jobs} (scope, kind, key_hash) WHERE key_hash IS NOT NULL;

CREATE INDEX {index_jobs_line} ON {jobs} (kind, rank, id)
    WHERE state IN ('queued', 'running');

CREATE INDEX {index_jobs_expiry} ON {jobs} (expires_at) WHERE expires_at IS NOT NULL;

CREATE INDEX {index_jobs_failed} ON {jobs} (ended_at, id) WHERE state = 'failed';
