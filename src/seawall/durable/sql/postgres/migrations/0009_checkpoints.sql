CREATE TABLE {checkpoints} (
    name text COLLATE "C" PRIMARY KEY,
    place text NOT NULL,
    saved_at bigint NOT NULL
) WITH (fillfactor = 50);
