CREATE TABLE {idempotency} (
    scope text NOT NULL,
    operation text NOT NULL,
    key_hash blob NOT NULL,
    fingerprint blob NOT NULL,
    state integer NOT NULL,
    owner text NOT NULL,
    epoch integer NOT NULL,
    takeovers integer NOT NULL,
    lease_until integer NOT NULL,
    form integer,
    status integer,
    headers text,
    body blob,
    kept integer,
    created_at integer NOT NULL,
    expires_at integer NOT NULL,
    CONSTRAINT {index_idempotency_key} PRIMARY KEY (scope, operation, key_hash)
);

CREATE INDEX {index_idempotency_expiry} ON {idempotency} (expires_at);
