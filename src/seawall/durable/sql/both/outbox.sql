-- name: exhume
DELETE FROM {outbox_ended}
WHERE outbox = :outbox AND id = :id AND dead
RETURNING aggregate, aggregate_id, type, payload, headers
