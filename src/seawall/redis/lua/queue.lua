-- A queue of jobs. Mirrors seawall.models.queue.state.Queue: the same operations, rules and names.
--
-- KEYS     jobs (hash: id to record), payloads (hash), results (hash), ready (sorted by score),
--          since (the same ids, by the instant since which they could be claimed), delayed (by the
--          instant at which they are ready), leases (the claimed ones, by the end of the lease),
--          deadlines (waiting and delayed ones), memory (those that ended but did not die, by the
--          instant at which they are forgotten), dead (those that died, by the same), tokens (hash:
--          token to what was claimed with it), unheard (the tokens, by the instant at which they
--          are forgotten), dedupe (hash: dedupe id to id), counts (hash)
-- ARGV     head_start, max_attempts, max_size, max_dead, max_ended, keep, result_ttl, dedupe: see
--          QueueRules; the channels on which to tell that somebody who waits for a job should look
--          again, and that a job ended (the message is its id); the expiry of the keys in
--          milliseconds; then the operations: name, number of arguments, arguments
-- Reply    { the operations' replies, { id, attempts, reason of each job that died }, { id of each
--          dead letter that was dropped } }; numbers are text. What each operation takes and
--          replies is said where it is defined.
local JOBS, PAYLOADS, RESULTS, READY, SINCE, DELAYED = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local LEASES, DEADLINES, MEMORY, DEAD = KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local TOKENS, UNHEARD, DEDUPE, COUNTS = KEYS[11], KEYS[12], KEYS[13], KEYS[14]
local SWEEP, BATCH_BYTES, BROWSED, MOST_UNHEARD = 100, 1048576, 200, 10
local LEASE_OVER, CALLED_OFF, LATE = 'the lease was over', 'cancelled', 'the deadline passed'
local NOBODY = 'nobody heard of the claim'
local TOTALS = { 'pushed', 'done', 'died', 'cancelled', 'expired', 'lost', 'dropped' }

local rules = {
  head_start = tonumber(ARGV[1]), max_attempts = tonumber(ARGV[2]), max_size = tonumber(ARGV[3]),
  max_dead = tonumber(ARGV[4]), max_ended = tonumber(ARGV[5]), keep = tonumber(ARGV[6]),
  result_ttl = tonumber(ARGV[7]), dedupe = tonumber(ARGV[8]),
}
local STIRRED, ENDED, EXPIRY, OPERATIONS = ARGV[9], ARGV[10], tonumber(ARGV[11]), 12

local now = clock()
local loaded, changed, added, died, dropped = {}, {}, {}, {}, {}
local stirred = false

local function text(number)
  return string.format('%.0f', number)
end

-- Records are read once, and written once at the end.

local function load(id)
  local job = loaded[id]
  if job == nil then
    local record = redis.call('HGET', JOBS, id)
    job = false
    if record then
      local r = cmsgpack.unpack(record)
      job = { id = id, state = r[1], priority = r[2], score = r[3], fence = r[4], attempts = r[5],
              deadline = r[6], pushed = r[7], at = r[8], dedupe = r[9], reason = r[10],
              heard = r[11], unheard = r[12] }
    end
    loaded[id] = job
  end
  return job
end

local function write_back()
  for id in pairs(changed) do
    local j = loaded[id]
    if j then
      redis.call('HSET', JOBS, id, cmsgpack.pack({ j.state, j.priority, j.score, j.fence, j.attempts,
                                                   j.deadline, j.pushed, j.at, j.dedupe, j.reason,
                                                   j.heard, j.unheard }))
    end
  end
  for field, number in pairs(added) do
    redis.call('HINCRBY', COUNTS, field, number)
  end
  changed, added = {}, {}
end

local function count(field, number)
  added[field] = (added[field] or 0) + number
end

local function first(line)
  local pair = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')
  if pair[1] then
    return tonumber(pair[2]), pair[1]
  end
end

-- What the operations are made of

local function leave_line(job)
  if job.state == 'waiting' then
    count('waiting' .. text(job.priority), -1)
    redis.call('ZREM', READY, job.id)
    redis.call('ZREM', SINCE, job.id)
  elseif job.state == 'delayed' then
    redis.call('ZREM', DELAYED, job.id)
  elseif job.state == 'claimed' then
    redis.call('ZREM', LEASES, job.id)
    return
  else
    return
  end
  redis.call('ZREM', DEADLINES, job.id)
end

local function place(job, ready)
  job.at = ready
  changed[job.id] = true
  redis.call('ZREM', DELAYED, job.id)
  redis.call('ZADD', DEADLINES, text(job.deadline), job.id)
  if ready > now then
    job.state = 'delayed'
    local head = first(DELAYED)
    stirred = stirred or not head or ready < head
    redis.call('ZADD', DELAYED, text(ready), job.id)
    return
  end
  job.state = 'waiting'
  stirred = stirred or redis.call('ZCARD', READY) == 0
  redis.call('ZADD', READY, text(job.score), job.id)
  redis.call('ZADD', SINCE, text(job.score + job.priority * rules.head_start), job.id)
  count('waiting' .. text(job.priority), 1)
end

local function forget(job)
  redis.call('ZREM', MEMORY, job.id)
  redis.call('ZREM', DEAD, job.id)
  if job.dedupe ~= '' and redis.call('HGET', DEDUPE, job.dedupe) == job.id then
    redis.call('HDEL', DEDUPE, job.dedupe)
  end
  redis.call('HDEL', JOBS, job.id)
  redis.call('HDEL', PAYLOADS, job.id)
  redis.call('HDEL', RESULTS, job.id)
  loaded[job.id] = false
end

-- Forgets those that would be forgotten first, and returns their ids.
local function make_room(line, most)
  local over = math.min(redis.call('ZCARD', line) - most, SWEEP)
  local gone = over > 0 and redis.call('ZRANGE', line, 0, over - 1) or {}
  for _, id in ipairs(gone) do
    local job = load(id)
    redis.call('ZREM', line, id)
    if job then
      forget(job)
    end
  end
  return gone
end

local function finish(job, state, reason)
  leave_line(job)
  job.state, job.at, job.reason = state, now, reason
  changed[job.id] = true
  redis.call('PUBLISH', ENDED, job.id)
  if state == 'dead' then
    count('died', 1)
    for _, value in ipairs({ job.id, text(job.attempts), reason }) do
      died[#died + 1] = value
    end
    redis.call('ZADD', DEAD, text(now + rules.keep), job.id)
    for _, id in ipairs(make_room(DEAD, rules.max_dead)) do
      dropped[#dropped + 1] = id
      count('dropped', 1)
    end
  else
    count(state, 1)
    redis.call('HDEL', PAYLOADS, job.id)
    redis.call('ZADD', MEMORY, text(now + rules.result_ttl), job.id)
    make_room(MEMORY, rules.max_ended)
  end
end

local function back(job, delay, reason, fatal, counted)
  leave_line(job)
  job.reason = reason
  changed[job.id] = true
  if fatal or (counted and job.attempts >= rules.max_attempts) then
    finish(job, 'dead', reason)
  elseif job.deadline <= now then
    finish(job, 'expired', LATE)
  else
    place(job, now + delay)
  end
end

local function lose(job)
  local counted = job.heard or job.unheard >= MOST_UNHEARD
  count('lost', 1)
  if not counted then
    job.unheard = job.unheard + 1
    job.attempts = job.attempts - 1
  end
  back(job, 0, LEASE_OVER, false, counted)
end

-- A job as it is now, also if the sweep has not come to it yet.
local function look(id)
  local job = load(id)
  if not job then
    return false
  end
  if job.state == 'claimed' and job.at <= now then
    lose(job)
  end
  if (job.state == 'waiting' or job.state == 'delayed') and job.deadline <= now then
    finish(job, 'expired', LATE)
  end
  if job.state == 'delayed' and job.at <= now then
    place(job, job.at)
  end
  return job
end

-- The job if that claim of it is good, and the answer to give.
local function mine(id, fence)
  local job = look(id)
  if not job then
    return nil, { '0', 'unknown' }
  end
  if job.state == 'claimed' and job.fence == tonumber(fence) then
    return job, { '1', job.state }
  end
  return nil, { '0', job.state }
end

-- A claim's id, fence, attempt, priority, age, waited, left, payload, appended to a reply.
local function grant(job, lease, reply)
  job.at = now + lease
  changed[job.id] = true
  redis.call('ZADD', LEASES, text(job.at), job.id)
  local since = job.score + job.priority * rules.head_start
  for _, value in ipairs({ job.id, text(job.fence), text(job.attempts), text(job.priority),
                           text(math.max(0, now - job.pushed)), text(math.max(0, now - since)),
                           text(job.deadline - now),
                           redis.call('HGET', PAYLOADS, job.id) or '' }) do
    reply[#reply + 1] = value
  end
end

-- What is still claimed by a token, and not heard of; nil if the token is not known.
local function claimed_by(token)
  local record = redis.call('HGET', TOKENS, token)
  if not record then
    return nil
  end
  local jobs, claims = {}, cmsgpack.unpack(record)
  for i = 1, #claims, 2 do
    local job = mine(claims[i], claims[i + 1])
    if job and not job.heard then
      jobs[#jobs + 1] = job
    end
  end
  return jobs
end

local function remember(token, claims, lease)
  redis.call('HSET', TOKENS, token, cmsgpack.pack(claims))
  redis.call('ZADD', UNHEARD, text(now + lease), token)
end

-- The ids of a line from one place to another, with their numbers: first to last, or back.
local function between(line, back, from, to)
  if back then
    return redis.call('ZREVRANGE', line, from, to, 'WITHSCORES')
  end
  return redis.call('ZRANGE', line, from, to, 'WITHSCORES')
end

-- The next of a line behind a number and id (before them, if `back`); all if `id` is empty. Ids of
-- the same number stand in the order of their text.
local function behind(line, back, number, id, most)
  local from = 0
  if id ~= '' then
    from = back and redis.call('ZCOUNT', line, '(' .. number, '+inf')
      or redis.call('ZCOUNT', line, '-inf', '(' .. number)
    local to = from + redis.call('ZCOUNT', line, number, number)
    while from < to do
      local middle = math.floor((from + to) / 2)
      local other = between(line, back, middle, middle)[1]
      if (back and other >= id) or (not back and other <= id) then
        from = middle + 1
      else
        to = middle
      end
    end
  end
  return between(line, back, from, from + most - 1)
end

-- A job's number, id, state, priority, attempts, age, since, reason, size, the beginning of its
-- payload, appended to a reply.
local function show(job, number, payload, cut, reply)
  for _, value in ipairs({ number, job.id, job.state, text(job.priority), text(job.attempts),
                           text(math.max(0, now - job.pushed)), text(now - job.at), job.reason,
                           text(redis.call('HSTRLEN', PAYLOADS, job.id)),
                           string.sub(payload, 1, cut) }) do
    reply[#reply + 1] = value
  end
end

-- The instant for a score: not before the one of the score before.
local function of_line()
  local latest = tonumber(redis.call('HGET', COUNTS, 'latest') or '0')
  if latest < now or latest > now + rules.keep then
    latest = now
    redis.call('HSET', COUNTS, 'latest', text(now))
  end
  return latest
end

local function known(dedupe)
  local id = dedupe ~= '' and redis.call('HGET', DEDUPE, dedupe)
  local job = id and look(id)
  if not job then
    return nil
  end
  local alive = job.state == 'waiting' or job.state == 'delayed' or job.state == 'claimed'
  return (alive or job.at + rules.dedupe > now) and job.id or nil
end

local function unfinished()
  return redis.call('ZCARD', READY) + redis.call('ZCARD', DELAYED) + redis.call('ZCARD', LEASES)
end

local function add(nonce, payload, priority, delay, ttl, dedupe)
  local ready = now + delay
  local job = {
    id = string.format('%016.0f-%s', redis.call('HINCRBY', COUNTS, 'serial', 1), nonce),
    priority = priority, score = of_line() + delay - priority * rules.head_start, fence = 0, attempts = 0,
    deadline = ttl > 0 and now + ttl or ready + rules.keep, pushed = now, dedupe = dedupe, reason = '',
    heard = true, unheard = 0,
  }
  loaded[job.id] = job
  count('pushed', 1)
  redis.call('HSET', PAYLOADS, job.id, payload)
  if dedupe ~= '' then
    redis.call('HSET', DEDUPE, dedupe, job.id)
  end
  place(job, ready)
  return job.id
end

-- Calls `act` for each job of `line` that is due, `SWEEP` at most. One without a record is removed.
local function sweep(line, act)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', line, '-inf', text(now), 'LIMIT', 0, SWEEP)) do
    local job = load(id)
    redis.call('ZREM', line, id)
    if job then
      act(job)
    end
  end
end

local function settle()
  sweep(MEMORY, forget)
  sweep(DEAD, forget)
  for _, token in ipairs(redis.call('ZRANGEBYSCORE', UNHEARD, '-inf', text(now), 'LIMIT', 0, SWEEP)) do
    redis.call('ZREM', UNHEARD, token)
    redis.call('HDEL', TOKENS, token)
  end
  sweep(LEASES, lose)
  sweep(DEADLINES, function(job) finish(job, 'expired', LATE) end)
  sweep(DELAYED, function(job) place(job, job.at) end)
end

-- The operations

local operations = {}

-- nonce, payload, priority, delay, ttl, dedupe of each job -> the ids; none if there is no room.
function operations.push(...)
  local a, ids, fresh = { ... }, {}, 0
  for i = 1, #a, 6 do
    fresh = fresh + (known(a[i + 5]) and 0 or 1)
  end
  if unfinished() + fresh > rules.max_size then
    return ids
  end
  for i = 1, #a, 6 do
    ids[#ids + 1] = known(a[i + 5])
      or add(a[i], a[i + 1], tonumber(a[i + 2]), tonumber(a[i + 3]), tonumber(a[i + 4]), a[i + 5])
  end
  return ids
end

-- count, lease, token -> in how long there may be a job if there is none (-1 if nobody knows);
--                        what `grant` appends, for each claim
function operations.claim(most, lease, token)
  local granted_before = claimed_by(token)
  if granted_before then
    local reply = { '-1' }
    redis.call('ZADD', UNHEARD, text(now + lease), token)
    for _, job in ipairs(granted_before) do
      grant(job, lease, reply)
    end
    return reply
  end
  local reply, claims, size = { '0' }, {}, 0
  for _ = 1, most + SWEEP do
    local _, id = first(READY)
    if not id or #claims == 2 * most then
      break
    end
    local job = load(id)
    if not job then
      redis.call('ZREM', READY, id)
      redis.call('ZREM', SINCE, id)
      redis.call('ZREM', DEADLINES, id)
    elseif job.deadline <= now then
      finish(job, 'expired', LATE)
    else
      size = size + redis.call('HSTRLEN', PAYLOADS, id)
      if #claims > 0 and size > BATCH_BYTES then
        break
      end
      leave_line(job)
      job.state, job.heard, job.fence, job.attempts = 'claimed', false, job.fence + 1, job.attempts + 1
      grant(job, lease, reply)
      claims[#claims + 1] = id
      claims[#claims + 1] = job.fence
    end
  end
  if #claims > 0 then
    remember(token, claims, lease)
  elseif redis.call('ZCARD', READY) == 0 then
    local ready, over = first(DELAYED), first(LEASES)
    local ahead = ready and over and math.min(ready, over) or ready or over
    reply[1] = ahead and text(math.max(0, ahead - now)) or '-1'
  end
  return reply
end

-- The next eight reply { '1' if it was done, the job's state now }.

-- token
function operations.heard(token)
  for _, job in ipairs(claimed_by(token) or {}) do
    job.heard = true
    changed[job.id] = true
  end
  redis.call('HDEL', TOKENS, token)
  redis.call('ZREM', UNHEARD, token)
  return { '1', 'heard' }
end

-- token, lease
function operations.release(token, lease)
  for _, job in ipairs(claimed_by(token) or {}) do
    job.attempts = job.attempts - 1
    back(job, 0, NOBODY, false, false)
  end
  remember(token, {}, lease)
  return { '1', 'released' }
end

-- id, fence, lease
function operations.extend(id, fence, lease)
  local job, answer = mine(id, fence)
  if job then
    job.heard = true
    job.at = now + lease
    changed[id] = true
    redis.call('ZADD', LEASES, text(job.at), id)
  end
  return answer
end

-- id, fence, result
function operations.ack(id, fence, result)
  local job, answer = mine(id, fence)
  if not job then
    job = load(id)
    local again = job and job.state == 'done' and job.fence == tonumber(fence)
    return { again and '1' or '0', answer[2] }
  end
  redis.call('HSET', RESULTS, id, result)
  finish(job, 'done', '')
  return { '1', job.state }
end

-- id, fence, delay, reason, how
function operations.nack(id, fence, delay, reason, how)
  local job, answer = mine(id, fence)
  if not job then
    return answer
  end
  if how == 'returned' then
    job.attempts = job.attempts - 1
  end
  back(job, tonumber(delay), reason, how == 'fatal', how == 'failed')
  return { '1', job.state }
end

-- id
function operations.cancel(id)
  local job = look(id)
  if not job then
    return { '0', 'unknown' }
  end
  if job.state ~= 'waiting' and job.state ~= 'delayed' and job.state ~= 'claimed' then
    return { '0', job.state }
  end
  finish(job, 'cancelled', CALLED_OFF)
  return { '1', job.state }
end

-- id
function operations.requeue(id)
  local job = look(id)
  if not job or job.state ~= 'dead' then
    return { '0', job and job.state or 'unknown' }
  end
  if unfinished() >= rules.max_size then
    return { '0', 'full' }
  end
  local taken = known(job.dedupe)
  if taken and taken ~= id then
    return { '0', 'taken' }
  end
  if not load(id) then
    return { '0', 'unknown' }
  end
  if job.dedupe ~= '' then
    redis.call('HSET', DEDUPE, job.dedupe, id)
  end
  redis.call('ZREM', DEAD, id)
  job.attempts, job.unheard = 0, 0
  job.score = of_line() - job.priority * rules.head_start
  job.deadline = now + rules.keep
  place(job, now)
  return { '1', job.state }
end

-- id
function operations.drop(id)
  local job = look(id)
  if not job or job.state ~= 'dead' then
    return { '0', job and job.state or 'unknown' }
  end
  forget(job)
  return { '1', 'dropped' }
end

-- id -> state, priority, attempts, age, reason, result or nil; nothing if it is unknown
function operations.status(id)
  local job = look(id)
  if not job then
    return {}
  end
  return { job.state, text(job.priority), text(job.attempts), text(math.max(0, now - job.pushed)), job.reason,
           redis.call('HGET', RESULTS, id) }
end

-- limit -> id, priority, attempts, age, reason, payload of each, the oldest first. No more than one
-- answer may have; the model, whose answers go nowhere, has no such bound.
function operations.dead(limit)
  local reply, size = {}, 0
  for _, id in ipairs(redis.call('ZRANGE', DEAD, 0, limit - 1)) do
    local job = load(id)
    if job then
      size = size + redis.call('HSTRLEN', PAYLOADS, id)
      if #reply > 0 and size > BATCH_BYTES then
        break
      end
      for _, value in ipairs({ id, text(job.priority), text(job.attempts), text(math.max(0, now - job.at)),
                               job.reason, redis.call('HGET', PAYLOADS, id) or '' }) do
        reply[#reply + 1] = value
      end
    end
  end
  return reply
end

-- state, number, id, search, most, cut -> the number and id of the last that was looked at (empty if
-- there are no more); what `show` appends, for each
function operations.browse(state, number, id, search, most, cut)
  local lines = { waiting = READY, delayed = DELAYED, claimed = LEASES }
  local line, found, looked, size, reply = lines[state] or DEAD, 0, 0, 0, { number, id }
  local function has(value)
    return string.find(string.lower(value), search, 1, true)
  end
  local ahead = behind(line, not lines[state], number, id, BROWSED + 1)
  for i = 1, #ahead, 2 do
    local job = load(ahead[i])
    if job then
      if cut ~= '0' then
        size = size + redis.call('HSTRLEN', PAYLOADS, job.id)
      end
      if looked == BROWSED or found == tonumber(most) or (looked > 0 and size > BATCH_BYTES) then
        return reply
      end
      local payload = cut ~= '0' and redis.call('HGET', PAYLOADS, job.id) or ''
      local place = text(tonumber(ahead[i + 1]))
      reply[1], reply[2], looked = place, job.id, looked + 1
      if has(job.id) or has(job.reason) or has(payload) then
        show(job, place, payload, tonumber(cut), reply)
        found = found + 1
      end
    end
  end
  reply[1], reply[2] = '', ''
  return reply
end

-- id, cut -> what `show` appends; nothing if it is unknown
function operations.inspect(id, cut)
  local job, reply = look(id), {}
  if job then
    show(job, '0', redis.call('HGET', PAYLOADS, id) or '', tonumber(cut), reply)
  end
  return reply
end

-- -> waiting by priority (ten numbers), delayed, claimed, dead, oldest, the totals
function operations.counts()
  write_back()
  local reply = {}
  for priority = 0, 9 do
    reply[#reply + 1] = redis.call('HGET', COUNTS, 'waiting' .. priority) or '0'
  end
  for _, line in ipairs({ DELAYED, LEASES, DEAD }) do
    reply[#reply + 1] = text(redis.call('ZCARD', line))
  end
  local oldest = first(SINCE)
  reply[#reply + 1] = oldest and text(math.max(0, now - oldest)) or '-1'
  for _, name in ipairs(TOTALS) do
    reply[#reply + 1] = redis.call('HGET', COUNTS, name) or '0'
  end
  return reply
end

-- A full server refuses the first write of a script that needs memory, and none that follows another
-- write. What is pushed needs memory. All else may go on, or a full queue could not be emptied; and
-- FULL tells that nothing but this push is refused.
local pushing, i = false, OPERATIONS
while i <= #ARGV do
  pushing = pushing or ARGV[i] == 'push'
  i = i + 2 + ARGV[i + 1]
end
if pushing then
  local answer = redis.pcall('HINCRBY', COUNTS, 'serial', 0)
  if type(answer) == 'table' and answer.err then
    if string.find(answer.err, 'OOM', 1, true) then
      return redis.error_reply('FULL the server has no memory left (OOM): raise its maxmemory, or let jobs end first')
    end
    return answer
  end
else
  redis.call('ZREM', LEASES, '')
end

settle()
local replies = {}
i = OPERATIONS
while i <= #ARGV do
  local last = i + 1 + ARGV[i + 1]
  replies[#replies + 1] = operations[ARGV[i]](unpack(ARGV, i + 2, last))
  i = last + 1
end
write_back()
if stirred then
  redis.call('PUBLISH', STIRRED, '1')
end
-- Never sooner than another pod has said. Not each time: that would be a dozen writes more.
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < 0.9 * EXPIRY then
    redis.call('PEXPIRE', key, EXPIRY)
  end
end
return { replies, died, dropped }
