-- Checkpoints: where a source of a pipeline goes on after a restart. A place is JSON.

-- name: load
-- name. The place that was saved last.
SELECT place FROM {checkpoints} WHERE name = :name;

-- name: save
-- name, place.
INSERT INTO {checkpoints} (name, place, saved_at)
VALUES (CAST(:name AS text), CAST(:place AS text), {now})
ON CONFLICT (name) DO UPDATE SET place = excluded.place, saved_at = excluded.saved_at;
