-- Adders lock rows of sequences, dispatchers those of claims: neither waits for the other.
CREATE TABLE {outbox_sequences} (
    outbox text COLLATE "C" NOT NULL,
    aggregate text COLLATE "C" NOT NULL,
    aggregate_id text COLLATE "C" NOT NULL,
    lane bigint GENERATED ALWAYS AS IDENTITY,
    last bigint NOT NULL,
    touched_at bigint NOT NULL,
    PRIMARY KEY (aggregate_id, aggregate, outbox)
);

CREATE TABLE {outbox} (
    outbox text COLLATE "C" NOT NULL,
    lane bigint NOT NULL,
    sequence bigint NOT NULL,
    id text NOT NULL,
    aggregate text NOT NULL,
    aggregate_id text NOT NULL,
    type text NOT NULL,
    payload bytea NOT NULL,
    headers text,
    created_at bigint NOT NULL,
    PRIMARY KEY (outbox, lane, sequence)
);

CREATE TABLE {outbox_claims} (
    lane bigint PRIMARY KEY,
    owner text,
    epoch bigint NOT NULL,
    lease_until bigint NOT NULL,
    attempts integer NOT NULL,
    next_at bigint NOT NULL,
    blocked boolean NOT NULL,
    error text
);

CREATE TABLE {outbox_ended} (
    outbox text COLLATE "C" NOT NULL,
    id text COLLATE "C" NOT NULL,
    aggregate text NOT NULL,
    aggregate_id text NOT NULL,
    sequence bigint NOT NULL,
    type text NOT NULL,
    payload bytea NOT NULL,
    headers text,
    created_at bigint NOT NULL,
    dead boolean NOT NULL,
    attempts integer NOT NULL,
    error text,
    ended_at bigint NOT NULL,
    PRIMARY KEY (outbox, id)
);

CREATE INDEX {index_outbox_ended_at} ON {outbox_ended} (outbox, dead, ended_at);
