CREATE TABLE {jobs} (
    id text PRIMARY KEY,
    scope text NOT NULL,
    kind text NOT NULL,
    key_hash bytea,
    fingerprint bytea NOT NULL,
    state text NOT NULL,
    priority smallint NOT NULL,
    rank bigint NOT NULL,
    due_at bigint NOT NULL,
    owner text,
    epoch bigint NOT NULL,
    attempts integer NOT NULL,
    max_attempts integer NOT NULL,
    cancelling smallint NOT NULL,
    progress double precision NOT NULL,
    message text NOT NULL,
    payload text NOT NULL,
    result bytea,
    result_type text,
    error text NOT NULL,
    created_at bigint NOT NULL,
    started_at bigint,
    ended_at bigint,
    expires_at bigint
) WITH (fillfactor = 80);

CREATE UNIQUE INDEX {index_jobs_key} ON {jobs} (scope, kind, key_hash) WHERE key_hash IS NOT NULL;

CREATE INDEX {index_jobs_line} ON {jobs} (kind, rank, id)
    WHERE state IN ('queued', 'running');

CREATE INDEX {index_jobs_expiry} ON {jobs} (expires_at) WHERE expires_at IS NOT NULL;

CREATE INDEX {index_jobs_failed} ON {jobs} (ended_at, id) WHERE state = 'failed';
