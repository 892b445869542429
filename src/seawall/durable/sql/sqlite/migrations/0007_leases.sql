CREATE TABLE {leases} (
    name text PRIMARY KEY NOT NULL,
    token integer NOT NULL,
    holder text NOT NULL,
    attempt integer NOT NULL,
    ttl integer NOT NULL,
    ends_at integer NOT NULL
);

CREATE TABLE {fences} (
    resource text PRIMARY KEY NOT NULL,
    token integer NOT NULL
);
