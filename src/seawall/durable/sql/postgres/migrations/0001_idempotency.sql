CREATE TABLE {idempotency} (
    scope text NOT NULL,
    operation text NOT NULL,
    key_hash bytea NOT NULL,
    fingerprint bytea NOT NULL,
    state smallint NOT NULL,
    owner text NOT NULL,
    epoch bigint NOT NULL,
    takeovers integer NOT NULL,
    lease_until bigint NOT NULL,
    form smallint,
    status integer,
    headers text,
    body bytea,
    kept smallint,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    CONSTRAINT {index_idempotency_key} PRIMARY KEY (key_hash, scope, operation)
);

CREATE INDEX {index_idempotency_expiry} ON {idempotency} (expires_at);
