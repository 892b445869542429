CREATE TABLE {idempotency} (
    scope text NOT NULL,
    operation text NOT NULL,
    key_hash bytea NOT NULL,
    fingerprint bytea NOT NULL,
    state smallint NOT NULL,
    owner text,
    epoch bigint NOT NULL,
    lease_until bigint,
    status integer,
    headers text,
    body bytea,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    PRIMARY KEY (scope, operation, key_hash)
);

CREATE INDEX {index_idempotency_expiry} ON {idempotency} (expires_at);
