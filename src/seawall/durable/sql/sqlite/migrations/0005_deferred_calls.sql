CREATE TABLE {deferred_calls} (
    position integer PRIMARY KEY AUTOINCREMENT,
    queue text NOT NULL,
    id text NOT NULL UNIQUE,
    key_hash blob,
    call text NOT NULL,
    idempotency_key text,
    tenant text,
    state integer NOT NULL,
    owner text,
    epoch integer NOT NULL,
    attempts integer NOT NULL,
    not_before integer NOT NULL,
    created_at integer NOT NULL,
    expires_at integer NOT NULL,
    error text,
    UNIQUE (queue, key_hash)
);

CREATE INDEX {index_deferred_calls_due} ON {deferred_calls} (queue, state, not_before);

CREATE INDEX {index_deferred_calls_expiry} ON {deferred_calls} (state, expires_at);
