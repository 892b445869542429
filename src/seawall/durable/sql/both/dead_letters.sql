-- Dead letters of pipelines. A letter is dead; or waits to be replayed; or is claimed by a pipeline
-- that replays it, until due_at. What a pipeline reports of a claim counts with its epoch only.
-- Times are microseconds: failed_at of the pipeline's clock, the others of the database's.

-- name: add
-- The same item with the same failed_at is the same failure, told again: nothing is added up.
INSERT INTO {dead_letters} AS kept (
    pipeline, id, state, stage, format, value, lesser, error, attempts, failed_at, created_at,
    changed_at, due_at, epoch, claims
)
SELECT CAST(:pipeline AS text), CAST(:id AS text), 'dead', CAST(:stage AS text),
    CAST(:format AS text), CAST(:value AS text), CAST(:lesser AS text), CAST(:error AS text),
    CAST(:attempts AS bigint), CAST(:failed_at AS bigint), clock.now, clock.now, 0, 0, 0
FROM (SELECT {now} AS now) AS clock
WHERE true
ON CONFLICT (pipeline, id) DO UPDATE SET
    state = CASE WHEN kept.state = 'claimed' AND kept.epoch = CAST(:epoch AS bigint)
        THEN 'dead' ELSE kept.state END,
    changed_at = CASE WHEN kept.failed_at = excluded.failed_at
        THEN kept.changed_at ELSE excluded.changed_at END,
    attempts = kept.attempts + CASE WHEN kept.failed_at = excluded.failed_at
        THEN 0 ELSE excluded.attempts END,
    stage = excluded.stage, format = excluded.format, value = excluded.value,
    lesser = excluded.lesser, error = excluded.error, failed_at = excluded.failed_at;

-- name: take
-- What was found is asked again: some drivers of SQLite begin their transaction only here.
UPDATE {dead_letters} SET state = 'claimed', epoch = epoch + 1, claims = claims + 1,
    due_at = {now} + CAST(:lease AS bigint), changed_at = {now}
WHERE pipeline = :pipeline AND id = :id AND state IN ('waiting', 'claimed') AND due_at <= {now}
RETURNING claims, epoch, stage, format, value, lesser, error, attempts, failed_at;

-- name: refuse
UPDATE {dead_letters} SET state = 'dead', error = CAST(:error AS text), changed_at = {now}
WHERE pipeline = :pipeline AND id = :id AND state = 'claimed' AND epoch = :epoch;

-- name: renew
UPDATE {dead_letters} SET due_at = {now} + CAST(:lease AS bigint)
WHERE pipeline = :pipeline AND id = :id AND state = 'claimed' AND epoch = :epoch
RETURNING id;

-- name: settle
DELETE FROM {dead_letters}
WHERE pipeline = :pipeline AND id = :id AND state = 'claimed' AND epoch = :epoch;

-- name: release
UPDATE {dead_letters} SET state = 'waiting', claims = claims - 1, due_at = {now},
    changed_at = {now}
WHERE pipeline = :pipeline AND id = :id AND state = 'claimed' AND epoch = :epoch;

-- name: retry
UPDATE {dead_letters} SET state = 'waiting', claims = 0, due_at = {now}, changed_at = {now}
WHERE pipeline = :pipeline AND id = :id AND state = 'dead' AND format <> 'repr'
RETURNING id;

-- name: drop
DELETE FROM {dead_letters}
WHERE pipeline = :pipeline AND id = :id AND (state <> 'claimed' OR due_at <= {now})
RETURNING id;

-- name: counts
SELECT state, count(*), min(changed_at), {now} FROM {dead_letters}
WHERE pipeline = :pipeline
GROUP BY state;

-- name: browse
-- The latest first. So many are looked at; the last but one column says whether they match.
SELECT changed_at, id, state, stage, format, attempts, error, created_at, length(value),
    substr(value, 1, CAST(:cut AS integer)),
    lower(id || ' ' || stage || ' ' || error) LIKE lower(CAST(:pattern AS text)) ESCAPE '!'
    OR (CAST(:cut AS integer) > 0
        AND lower(value) LIKE lower(CAST(:pattern AS text)) ESCAPE '!'),
    {now}
FROM (
    SELECT changed_at, id, state, stage, format, attempts, error, created_at, value
    FROM {dead_letters}
    WHERE pipeline = :pipeline AND state = :state
        AND (changed_at, id) < (CAST(:number AS bigint), CAST(:id AS text))
    ORDER BY changed_at DESC, id DESC
    LIMIT CAST(:most AS bigint)
) AS looked
ORDER BY changed_at DESC, id DESC;

-- name: inspect
SELECT changed_at, id, state, stage, format, attempts, error, created_at, length(value),
    substr(value, 1, CAST(:cut AS integer)), 1 = 1, {now}
FROM {dead_letters}
WHERE pipeline = :pipeline AND id = :id;
