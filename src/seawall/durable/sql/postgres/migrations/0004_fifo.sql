CREATE TABLE {fifo_senders} (
    sender text NOT NULL,
    receiver text NOT NULL,
    epoch bigint NOT NULL,
    last bigint NOT NULL,
    acknowledged bigint NOT NULL,
    allowed bigint,
    PRIMARY KEY (sender, receiver)
);

CREATE TABLE {fifo_sent} (
    sender text NOT NULL,
    receiver text NOT NULL,
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    payload bytea NOT NULL,
    created_at bigint NOT NULL,
    PRIMARY KEY (sender, receiver, epoch, sequence)
);

CREATE TABLE {fifo_positions} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch bigint NOT NULL,
    expected bigint NOT NULL,
    buffered bigint NOT NULL,
    version bigint NOT NULL,
    updated_at bigint NOT NULL,
    PRIMARY KEY (receiver, sender)
);

CREATE TABLE {fifo_buffer} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch bigint NOT NULL,
    sequence bigint NOT NULL,
    payload bytea NOT NULL,
    received_at bigint NOT NULL,
    PRIMARY KEY (receiver, sender, epoch, sequence)
);

CREATE TABLE {fifo_skipped} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch bigint NOT NULL,
    first bigint NOT NULL,
    last bigint NOT NULL,
    skipped_at bigint NOT NULL,
    PRIMARY KEY (receiver, sender, epoch, first)
);
