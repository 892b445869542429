-- Tables of the user's that are read by position.

-- name: columns
-- table. As in PostgreSQL.
SELECT 'r', 0, name, lower(type) FROM pragma_table_info(:table);
