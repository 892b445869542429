CREATE TABLE {idempotency} (
    scope text NOT NULL,
    operation text NOT NULL,
    key_hash blob NOT NULL,
    fingerprint blob NOT NULL,
    state integer NOT NULL,
    owner text,
    epoch integer NOT NULL,
    lease_until integer,
    status integer,
    headers text,
    body blob,
    created_at integer NOT NULL,
    expires_at integer NOT NULL,
    PRIMARY KEY (scope, operation, key_hash)
) WITHOUT ROWID;

CREATE INDEX {index_idempotency_expiry} ON {idempotency} (expires_at);
