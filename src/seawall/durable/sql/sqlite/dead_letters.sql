-- Dead letters of pipelines: see both/dead_letters.sql.

-- name: due
SELECT id FROM {dead_letters}
WHERE pipeline = :pipeline AND state IN ('waiting', 'claimed') AND due_at <= {now}
ORDER BY due_at
LIMIT CAST(:most AS bigint);
