CREATE TABLE {inbox} (
    consumer text NOT NULL,
    message_hash bytea NOT NULL,
    token bytea NOT NULL,
    received_at bigint NOT NULL,
    expires_at bigint NOT NULL,
    PRIMARY KEY (consumer, message_hash)
);

CREATE INDEX {index_inbox_expiry} ON {inbox} (expires_at);
