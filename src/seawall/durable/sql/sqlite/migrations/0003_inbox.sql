CREATE TABLE {inbox} (
    consumer text NOT NULL,
    message_hash blob NOT NULL,
    token blob NOT NULL,
    received_at integer NOT NULL,
    expires_at integer NOT NULL,
    PRIMARY KEY (consumer, message_hash)
) WITHOUT ROWID;

CREATE INDEX {index_inbox_expiry} ON {inbox} (expires_at);
