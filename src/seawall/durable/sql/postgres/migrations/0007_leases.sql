CREATE TABLE {leases} (
    name text COLLATE "C" PRIMARY KEY,
    token bigint NOT NULL,
    holder text NOT NULL,
    attempt bigint NOT NULL,
    ttl bigint NOT NULL,
    ends_at bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE {fences} (
    resource text COLLATE "C" PRIMARY KEY,
    token bigint NOT NULL
) WITH (fillfactor = 50);
