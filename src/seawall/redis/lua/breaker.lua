-- The breakers that pods share: what a pod tells of some of them, and what it is told.
-- Mirrors seawall.models.breaker.state.BreakerModel with models/windows.py and models/breaker/probes.py.
--
-- KEYS, seven for each breaker, all in one slot
--   1  hash: the state, its epoch, and the trial while half-open
--   2  sorted set: ids of the probes that are out, by the instant at which they are hung
--   3  hash: the window: ten buckets of a time window, or how many calls a count window has seen
--   4  sorted set: the failed calls of a count window, by their number
--   5  sorted set: the slow calls of a count window, by their number
--   6  sorted set: pods that vote to trip, by the instant at which the vote is over
--   7  sorted set: ids of probes that nobody wants any more, by the instant at which that is forgotten
-- ARGV[1]  the pod's settings, as JSON; times in whole microseconds
-- ARGV[2]  the channel on which every change of state is pushed
-- ARGV[3..]  what the pod tells of each breaker, as JSON:
--   tag       the breaker's name in pushed messages
--   lineage, epoch, state, left, opens, age   what the pod knows of it; age: since it was last closed
--   failure   the pod's last failure, in words
--   fresh     the lineage to begin if the store knows nothing
--   breaks    how long the next break would be, and the one after it
--   command, order   "isolate", "close" or "trip", and its id: told again, it is not done again
--   settled   [id, "success" | "failure" | "none"] of probes that are over; "lost": one was asked for,
--             no answer came, and nobody will make it, whether this or the question arrives first
--   report    [plain, failed, both, slow, place, before, after]: calls counted (place is -1); or the call
--             at the place has other marks now: 1 failed, 2 slow, 3 both, 0 neither
--   trip      whether the pod's own rule says so
--   pod, vote whether this pod is for tripping (where a quorum has to be)
--   asked     ids of the probes that it would like to make
-- Reply, for each breaker: lineage, epoch, state, left, opens, cause, age, failure, places of the report's last calls,
--   answers to what was asked (an id, or empty), totals of the window
--
-- What is told for another lineage or epoch than the present one is ignored, except commands.

local settings = cjson.decode(ARGV[1])
local channel = ARGV[2]
local now = clock()

-- Microseconds for which a breaker that was begun as closed is doubted by pods that know it as broken.
local GUESS_FOR = 2000000
-- And for which a probe is remembered that was given up before it was asked for.
local GONE_FOR = 10000000
local MOST_GONE = 1000
local MOST_ORDERS = 8
-- Where epochs begin again: far below what a Lua number or a pod takes.
local LAST_EPOCH = 2 ^ 50

local STATES = {closed = true, open = true, half_open = true, isolated = true}

local AFTER = {
  ['tripped'] = 'open',
  ['break over'] = 'half_open',
  ['probes passed'] = 'closed',
  ['probes failed'] = 'open',
  ['trip()'] = 'open',
  ['isolate()'] = 'isolated',
  ['close()'] = 'closed',
}

local function text(number)
  return string.format('%.0f', number)
end

local function read(key)
  local flat, fields = redis.call('HGETALL', key), {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = tonumber(flat[i + 1]) or flat[i + 1]
  end
  return fields
end

local function write(key, fields)
  local flat = {}
  for name, value in pairs(fields) do
    flat[#flat + 1] = name
    flat[#flat + 1] = type(value) == 'number' and string.format('%.17g', value) or value
  end
  redis.call('HSET', key, unpack(flat))
end

-- A breaker of which the store knows nothing is what the pod says it is: an open one stays open.
-- That it is closed is a guess at first: a pod that is new may come before one that knows better.
local function begin(told)
  local state = {
    lineage = told.fresh, epoch = told.epoch < LAST_EPOCH and told.epoch + 1 or 1,
    state = 'closed', cause = 'reported by the store', orders = '',
    opens = 0, ends = 0, length = 1, next = told.breaks[1],
    guess = now + GUESS_FOR, knew = told.lineage, since = now - told.age, failure = '=' .. told.failure,
  }
  if told.state == 'open' or told.state == 'half_open' then
    state.state, state.opens = 'open', told.opens
    state.ends, state.length = now + told.left, math.max(told.left, 1)
  elseif told.state == 'isolated' then
    state.state, state.opens = 'isolated', told.opens
  end
  return state
end

local function knows_better(told, at)
  local rest = (tonumber(at.guess) or 0) - now
  return at.state == 'closed' and rest > 0 and rest <= 2 * GUESS_FOR
    and told.state ~= 'closed' and told.lineage ~= '' and told.lineage ~= at.lineage
    and not (told.lineage == at.knew and told.epoch < at.epoch)
end

-- A store that knows less than the pod has lost its memory: all of it, or the latest part.
local function has_forgotten(told, at)
  return type(at.epoch) ~= 'number' or not STATES[at.state]
    or (told.lineage == at.lineage and told.epoch > at.epoch)
    or knows_better(told, at)
end

-- What is left of the break or stage; set back by more than twice its length, it begins again.
local function left(at, ends, length)
  local rest = at[ends] - now
  if rest > 2 * at[length] then
    at[ends], rest = now + at[length], at[length]
    at.changed = true
  end
  return math.max(rest, 0)
end

local function begin_stage(at)
  if at.kind == 'ramp' then
    at.step_ends = now + at.step
  end
  at.offered, at.admitted, at.passed, at.failed, at.refused = 0, 0, 0, 0, 0
end

local function move(b, cause)
  local at = b.at
  if at.state == 'closed' or AFTER[cause] == 'closed' then
    at.since, at.failure = now, '='
  end
  if (cause == 'tripped' or cause == 'probes failed') and b.told.failure ~= '' then
    at.failure = '=' .. b.told.failure -- with a mark: it may look like a number
  end
  at.state, at.cause, at.epoch = AFTER[cause], cause, at.epoch + 1
  at.changed, at.guess = true, 0
  redis.call('DEL', b.probes, b.votes)
  if at.state == 'open' then
    -- A pod that knows of the present state knows how long the breaks are; else it is as was told.
    at.opens = at.opens + 1
    at.length = b.present and b.told.breaks[1] or at.next
    at.next = b.present and b.told.breaks[2] or at.next
    at.ends = now + at.length
  elseif at.state == 'half_open' then
    at.plan, at.kind = settings.plan, settings.kind
    at.step, at.threshold, at.timeout = settings.step, settings.threshold, settings.probe_timeout
    at.stage, at.step_ends, at.latest_ends = 0, now + at.step, now + at.step
    begin_stage(at)
  elseif at.state == 'closed' then
    at.opens = 0
  end
  b.present = false
end

-- The window

local function has_failed(marks)
  return marks % 2
end

local function was_slow(marks)
  return math.floor(marks / 2)
end

-- Count a call with these marks; the answer is its place.
local function add_call(window, marks)
  return window.add(
    marks == 0 and 1 or 0, marks == 1 and 1 or 0, marks == 3 and 1 or 0, marks == 2 and 1 or 0)
end

local function time_window(b)
  local kept, buckets, newest = read(b.window), {}, nil
  local index = math.floor(now / (settings.window / 10))
  if kept.epoch == b.at.epoch then
    newest = kept.newest
    for slot = 0, 9 do
      local numbers = kept['b' .. slot]
      if numbers then
        local i, calls, failed, slow = string.match(numbers, '^(%d+) (%d+) (%d+) (%d+)$')
        buckets[slot] = {tonumber(i), tonumber(calls), tonumber(failed), tonumber(slow)}
      end
    end
  end
  if not newest or index <= newest - 10 then
    newest, buckets = index, {}
  end
  newest = math.max(newest, index)
  local slot = newest % 10
  if not buckets[slot] or buckets[slot][1] ~= newest then
    buckets[slot] = {newest, 0, 0, 0}
  end
  local running = buckets[slot]
  local window = {}

  local function live(bucket)
    return bucket and bucket[1] > newest - 10 and bucket[1] <= newest
  end

  function window.add(plain, failed, both, slow)
    running[2] = running[2] + plain + failed + both + slow
    running[3] = running[3] + failed + both
    running[4] = running[4] + both + slow
    return newest
  end

  -- Give a call other marks; if it has left the window, count it anew and answer with its place.
  function window.change(place, before, after)
    local bucket = buckets[place % 10]
    if not (live(bucket) and bucket[1] == place) then
      return add_call(window, after)
    end
    bucket[3] = math.max(bucket[3] + has_failed(after) - has_failed(before), 0)
    bucket[4] = math.max(bucket[4] + was_slow(after) - was_slow(before), 0)
  end

  function window.totals()
    local calls, failed, slow = 0, 0, 0
    for s = 0, 9 do
      local bucket = buckets[s]
      if live(bucket) then
        calls, failed, slow = calls + bucket[2], failed + bucket[3], slow + bucket[4]
      end
    end
    return calls, failed, slow
  end

  function window.save()
    local fields = {epoch = b.at.epoch, newest = newest}
    for s = 0, 9 do
      if live(buckets[s]) then
        local parts = {}
        for i = 1, 4 do
          parts[i] = text(buckets[s][i])
        end
        fields['b' .. s] = table.concat(parts, ' ')
      end
    end
    redis.call('DEL', b.window)
    write(b.window, fields)
  end

  return window
end

local function count_window(b)
  local size, kept = settings.window_calls, read(b.window)
  local counted = kept.counted or 0
  if kept.epoch ~= b.at.epoch then
    redis.call('DEL', b.window, b.failed, b.slow)
    counted = 0
  end
  local window = {}

  -- Of more calls than the window has, the last are enough.
  local function mark(calls, failed, slow)
    for number = counted + math.max(calls - size, 0) + 1, counted + calls do
      if failed then
        redis.call('ZADD', b.failed, text(number), text(number))
      end
      if slow then
        redis.call('ZADD', b.slow, text(number), text(number))
      end
    end
    counted = counted + calls
  end

  function window.add(plain, failed, both, slow)
    counted = counted + plain
    mark(failed, true, false)
    mark(both, true, true)
    mark(slow, false, true)
    return counted
  end

  local function set(key, place, marked)
    if marked == 1 then
      redis.call('ZADD', key, text(place), text(place))
    else
      redis.call('ZREM', key, text(place))
    end
  end

  function window.change(place, _before, after)
    if counted - place >= size then
      return add_call(window, after)
    end
    set(b.failed, place, has_failed(after))
    set(b.slow, place, was_slow(after))
  end

  function window.totals()
    local last = text(counted - size)
    redis.call('ZREMRANGEBYSCORE', b.failed, '-inf', last)
    redis.call('ZREMRANGEBYSCORE', b.slow, '-inf', last)
    return math.min(counted, size), redis.call('ZCARD', b.failed), redis.call('ZCARD', b.slow)
  end

  function window.save()
    write(b.window, {epoch = b.at.epoch, counted = counted})
  end

  return window
end

local function is_bad(window)
  local calls, failed, slow = window.totals()
  return calls >= settings.min_calls and (
    (settings.failure_ratio and failed / calls >= settings.failure_ratio)
    or (settings.slow_ratio and slow / calls >= settings.slow_ratio))
end

-- Take in what was counted, call after call, and trip at the first that is one too many.
local function count(b, report)
  local window = settings.window and time_window(b) or count_window(b)
  local places = {}
  for i, entry in ipairs(report) do
    local place, worse
    if entry[5] >= 0 then
      local before, after = entry[6], entry[7]
      place = window.change(entry[5], before, after)
      worse = has_failed(after) == 1 or was_slow(after) > was_slow(before)
    else
      place = window.add(entry[1], entry[2], entry[3], entry[4])
      worse = entry[2] + entry[3] + entry[4] > 0
    end
    places[i] = place and text(place) or ''
    if worse and is_bad(window) then
      b.totals = {window.totals()}
      move(b, 'tripped')
      return places
    end
  end
  if #report > 0 then
    window.save()
  end
  b.totals = {window.totals()}
  return places
end

-- The trial

-- As in models/breaker/probes.py: whether the verdict of a probe that began in that stage counts.
local function counts(at, stage)
  return at.kind ~= 'slow_start' or stage == at.stage
end

local function shown_by_slow_start(at)
  local size = 2 ^ at.stage
  if at.failed / size >= at.threshold then
    return 'failure'
  end
  if at.passed + at.failed < size then
    return 'none'
  end
  if at.refused == 0 and left(at, 'step_ends', 'step') <= 0 then
    return 'success'
  end
  if at.refused == 1 and at.failed / size < at.threshold / 2 then
    at.stage = at.stage + 1
  end
  begin_stage(at)
  return 'none'
end

local function shown(at)
  if at.kind == 'slow_start' then
    return shown_by_slow_start(at)
  end
  if at.kind == 'counted' then
    local plan = cjson.decode(at.plan)
    if at.failed > plan[2] - plan[1] then
      return 'failure'
    end
    return at.passed >= plan[1] and 'success' or 'none'
  end
  if at.failed > 0 and at.failed / (at.passed + at.failed) >= at.threshold then
    return 'failure'
  end
  if at.passed > 0 and left(at, 'step_ends', 'step') <= 0 then
    if at.stage + 1 == #cjson.decode(at.plan) then
      return 'success'
    end
    at.stage = at.stage + 1
    begin_stage(at)
  end
  return 'none'
end

local function conclude(b, verdict)
  b.at.changed = true
  if verdict == 'success' then
    move(b, 'probes passed')
  elseif verdict == 'failure' then
    move(b, 'probes failed')
  end
end

-- Probes are kept with the stage in which they began.
local function named(id, stage)
  return id .. ':' .. text(stage)
end

local function find(b, id)
  for stage = b.at.state == 'half_open' and b.at.stage or -1, 0, -1 do
    local hung = redis.call('ZSCORE', b.probes, named(id, stage))
    if hung then
      return stage, tonumber(hung)
    end
  end
end

-- Remember that nobody wants this probe: its question may still be on its way.
local function bury(b, id)
  redis.call('ZREMRANGEBYSCORE', b.gone, '-inf', text(now))
  redis.call('ZADD', b.gone, text(now + GONE_FOR), id)
  redis.call('ZREMRANGEBYRANK', b.gone, 0, -MOST_GONE - 1)
end

local function settle(b, id, verdict)
  local at = b.at
  local stage, hung = find(b, id)
  if not stage then
    if verdict == 'lost' then
      bury(b, id)
    end
    return
  end
  redis.call('ZREM', b.probes, named(id, stage))
  local ran = now - (hung - at.timeout)
  if verdict == 'none' or verdict == 'lost' then
    at.admitted = at.admitted - (stage == at.stage and 1 or 0)
    if hung - at.timeout + at.step == at.latest_ends then
      at.latest_ends = now
    end
  elseif not counts(at, stage) then -- it is only over
  elseif verdict == 'success' and not (settings.slow_after and ran >= settings.slow_after) then
    at.passed = at.passed + 1
  else
    at.failed = at.failed + 1
  end
  conclude(b, shown(at))
end

-- Probes that say nothing have failed; so have those from a future that the clock was set back from.
local function review(b)
  local at = b.at
  local ahead = '(' .. text(now + 2 * at.timeout)
  for _, range in ipairs({{'-inf', text(now)}, {ahead, '+inf'}}) do
    for _, probe in ipairs(redis.call('ZRANGEBYSCORE', b.probes, range[1], range[2])) do
      redis.call('ZREM', b.probes, probe)
      if counts(at, tonumber(string.match(probe, ':(%d+)$'))) then
        at.failed = at.failed + 1
      end
    end
  end
  conclude(b, shown(at))
end

local function has_room(b)
  local at, plan = b.at, cjson.decode(b.at.plan)
  if at.kind == 'counted' then
    return redis.call('ZCARD', b.probes) + at.passed + at.failed < plan[2]
  end
  if at.kind == 'slow_start' then
    -- One that hangs may have begun before the recovery: after `step`, try another.
    -- The permit of a call that failed is not used again: who timed out may still be served.
    local free = redis.call('ZCARD', b.probes) + at.failed < 2 ^ at.stage
    local room = free or left(at, 'latest_ends', 'step') <= 0
    if room then
      at.latest_ends = now + at.step
    else
      at.step_ends, at.refused = now + at.step, 1
    end
    return room
  end
  local room = at.admitted <= at.offered * plan[at.stage + 1]
  at.offered = at.offered + 1
  at.admitted = at.admitted + (room and 1 or 0)
  return room
end

local function ask(b, id)
  local at = b.at
  if redis.call('ZSCORE', b.gone, id) then
    return ''
  end
  if at.state == 'open' and left(at, 'ends', 'length') <= 0 then
    move(b, 'break over')
  end
  if at.state == 'half_open' then
    review(b)
  end
  if at.state ~= 'half_open' or not has_room(b) then
    return ''
  end
  redis.call('ZADD', b.probes, text(now + at.timeout), named(id, at.stage))
  return id
end

-- The exchange

local function take_command(b)
  local command, order, at = b.told.command, b.told.order, b.at
  if not command then
    return
  end
  local orders = {order}
  for known in string.gmatch(at.orders or '', '%S+') do
    if known == order then
      return
    end
    orders[#orders + 1] = #orders < MOST_ORDERS and known or nil
  end
  at.orders, at.guess, at.changed = table.concat(orders, ' '), 0, true
  if command == 'isolate' and at.state ~= 'isolated' then
    move(b, 'isolate()')
  elseif command == 'close' then
    move(b, 'close()') -- also if it is closed: the window is that of the epoch
  elseif command == 'trip' and (at.state == 'closed' or at.state == 'half_open') then
    move(b, 'trip()')
  end
end

local function take_vote(b, vote)
  if vote then
    redis.call('ZADD', b.votes, text(now + settings.vote_for), b.told.pod)
  else
    redis.call('ZREM', b.votes, b.told.pod)
  end
  redis.call('ZREMRANGEBYSCORE', b.votes, '-inf', text(now))
  redis.call('ZREMRANGEBYSCORE', b.votes, '(' .. text(now + 2 * settings.vote_for), '+inf')
  if redis.call('ZCARD', b.votes) >= settings.quorum then
    move(b, 'tripped')
  end
end

local function exchange(b)
  local told = b.told
  local at = read(b.state)
  b.at, b.totals = at, {0, 0, 0}
  b.present = told.lineage == at.lineage and told.epoch == at.epoch
  local before, lineage = at.epoch, at.lineage
  if has_forgotten(told, at) then
    redis.call('DEL', b.probes, b.window, b.failed, b.slow, b.votes)
    at = begin(told)
    at.changed = true
    b.at, b.present = at, true
  end
  take_command(b)
  for _, settled in ipairs(told.settled) do
    settle(b, settled[1], settled[2])
  end
  local places = {}
  if at.state == 'closed' and (settings.window or settings.window_calls) and not settings.quorum then
    places = count(b, b.present and told.report or {})
  end
  if b.present and told.trip and at.state == 'closed' then
    move(b, 'tripped')
  end
  if b.present and settings.quorum and told.vote ~= nil and at.state == 'closed' then
    take_vote(b, told.vote)
  end
  local answers = {}
  for i, id in ipairs(told.asked) do
    answers[i] = ask(b, id)
  end
  local rest = at.state == 'open' and left(at, 'ends', 'length') or 0
  if at.changed then
    at.changed = nil
    write(b.state, at)
  end
  redis.call('PEXPIRE', b.state, at.state == 'isolated' and settings.isolated_for or settings.kept_for)
  for _, key in ipairs({b.probes, b.window, b.failed, b.slow, b.votes, b.gone}) do
    redis.call('PEXPIRE', key, settings.kept_for)
  end
  local age = math.max(now - (tonumber(at.since) or now), 0)
  local known = {
    at.lineage, text(at.epoch), at.state, text(rest), text(at.opens), at.cause,
    text(age), string.sub(tostring(at.failure or '='), 2),
  }
  if at.epoch ~= before or at.lineage ~= lineage then
    redis.call('PUBLISH', channel, cjson.encode({told.tag, unpack(known)}))
  end
  known[9], known[10], known[11] = places, answers, b.totals
  return known
end

local replies = {}
for i = 1, #ARGV - 2 do
  local first = 7 * (i - 1)
  replies[i] = exchange({
    told = cjson.decode(ARGV[i + 2]),
    state = KEYS[first + 1], probes = KEYS[first + 2], window = KEYS[first + 3],
    failed = KEYS[first + 4], slow = KEYS[first + 5], votes = KEYS[first + 6],
    gone = KEYS[first + 7],
  })
end
return replies
