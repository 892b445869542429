CREATE TABLE {deferred_calls} (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text NOT NULL,
    id text NOT NULL UNIQUE,
    key_hash bytea,
    call text NOT NULL,
    idempotency_key text,
    tenant text,
    state bigint NOT NULL,
    owner text,
    epoch bigint NOT NULL,
    attempts bigint NOT NULL,
    not_before bigint NOT NULL,
    created_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    error text,
    UNIQUE (queue, key_hash)
);

CREATE INDEX {index_deferred_calls_due} ON {deferred_calls} (queue, state, not_before);

CREATE INDEX {index_deferred_calls_expiry} ON {deferred_calls} (state, expires_at);
