CREATE TABLE {dead_letters} (
    pipeline text NOT NULL,
    id text NOT NULL,
    state text NOT NULL,
    stage text NOT NULL,
    format text NOT NULL,
    value text NOT NULL,
    lesser text NOT NULL,
    error text NOT NULL,
    attempts integer NOT NULL,
    failed_at integer NOT NULL,
    created_at integer NOT NULL,
    changed_at integer NOT NULL,
    due_at integer NOT NULL,
    epoch integer NOT NULL,
    claims integer NOT NULL,
    PRIMARY KEY (pipeline, id)
);

CREATE INDEX {index_dead_letters_list} ON {dead_letters} (pipeline, state, changed_at, id);

CREATE INDEX {index_dead_letters_due} ON {dead_letters} (pipeline, due_at)
    WHERE state IN ('waiting', 'claimed');
