-- The same tables as on PostgreSQL.
CREATE TABLE {outbox_sequences} (
    outbox text NOT NULL,
    aggregate text NOT NULL,
    aggregate_id text NOT NULL,
    lane integer PRIMARY KEY AUTOINCREMENT,
    last integer NOT NULL,
    touched_at integer NOT NULL,
    UNIQUE (outbox, aggregate, aggregate_id)
);

CREATE TABLE {outbox} (
    outbox text NOT NULL,
    lane integer NOT NULL,
    sequence integer NOT NULL,
    id text NOT NULL,
    aggregate text NOT NULL,
    aggregate_id text NOT NULL,
    type text NOT NULL,
    payload blob NOT NULL,
    headers text,
    created_at integer NOT NULL,
    PRIMARY KEY (outbox, lane, sequence)
) WITHOUT ROWID;

CREATE TABLE {outbox_claims} (
    lane integer PRIMARY KEY,
    owner text,
    epoch integer NOT NULL,
    lease_until integer NOT NULL,
    attempts integer NOT NULL,
    next_at integer NOT NULL,
    blocked integer NOT NULL,
    error text
);

CREATE TABLE {outbox_ended} (
    outbox text NOT NULL,
    id text NOT NULL,
    aggregate text NOT NULL,
    aggregate_id text NOT NULL,
    sequence integer NOT NULL,
    type text NOT NULL,
    payload blob NOT NULL,
    headers text,
    created_at integer NOT NULL,
    dead integer NOT NULL,
    attempts integer NOT NULL,
    error text,
    ended_at integer NOT NULL,
    PRIMARY KEY (outbox, id)
);

CREATE INDEX {index_outbox_ended_at} ON {outbox_ended} (outbox, dead, ended_at);
