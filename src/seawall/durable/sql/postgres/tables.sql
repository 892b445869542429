-- Tables of the user's that are read by position. The name of a table is a parameter here, as text.

-- name: columns
-- table. Kind of the table, whether this server only follows another one; name and type of each column.
SELECT CAST(c.relkind AS text), pg_is_in_recovery(), CAST(a.attname AS text),
    format_type(a.atttypid, NULL)
FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
WHERE c.oid = to_regclass(CAST(:table AS text)) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;

-- name: writers
-- table. The transactions that may have added rows to it, or to a partition, and have not ended. An
-- INSERT takes this lock before it draws a number, and keeps it until its transaction ends.
WITH RECURSIVE tree (id) AS (
    SELECT CAST(to_regclass(CAST(:table AS text)) AS oid)
    UNION SELECT i.inhrelid FROM pg_inherits i JOIN tree ON i.inhparent = tree.id
)
SELECT DISTINCT l.virtualtransaction FROM pg_locks l
WHERE l.locktype = 'relation' AND l.relation IN (SELECT id FROM tree)
    AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')
    AND l.granted;
