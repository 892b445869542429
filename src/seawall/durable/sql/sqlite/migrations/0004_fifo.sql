CREATE TABLE {fifo_senders} (
    sender text NOT NULL,
    receiver text NOT NULL,
    epoch integer NOT NULL,
    last integer NOT NULL,
    acknowledged integer NOT NULL,
    allowed integer,
    PRIMARY KEY (sender, receiver)
) WITHOUT ROWID;

CREATE TABLE {fifo_sent} (
    sender text NOT NULL,
    receiver text NOT NULL,
    epoch integer NOT NULL,
    sequence integer NOT NULL,
    payload blob NOT NULL,
    created_at integer NOT NULL,
    PRIMARY KEY (sender, receiver, epoch, sequence)
);

CREATE TABLE {fifo_positions} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch integer NOT NULL,
    expected integer NOT NULL,
    buffered integer NOT NULL,
    version integer NOT NULL,
    updated_at integer NOT NULL,
    PRIMARY KEY (receiver, sender)
) WITHOUT ROWID;

CREATE TABLE {fifo_buffer} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch integer NOT NULL,
    sequence integer NOT NULL,
    payload blob NOT NULL,
    received_at integer NOT NULL,
    PRIMARY KEY (receiver, sender, epoch, sequence)
);

CREATE TABLE {fifo_skipped} (
    receiver text NOT NULL,
    sender text NOT NULL,
    epoch integer NOT NULL,
    first integer NOT NULL,
    last integer NOT NULL,
    skipped_at integer NOT NULL,
    PRIMARY KEY (receiver, sender, epoch, first)
) WITHOUT ROWID;
