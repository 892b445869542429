CREATE TABLE {checkpoints} (
    name text PRIMARY KEY NOT NULL,
    place text NOT NULL,
    saved_at integer NOT NULL
);
