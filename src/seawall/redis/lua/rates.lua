-- Rate limits that all pods share: several questions of one policy in one call.
--
-- Mirrors, line by line: seawall.models.rate.buckets (TokenBucket, LeakyBucket, Account,
-- SettledBucket), windows (FixedWindow, SlidingCounter, SlidingLog), caps (Caps), and how
-- seawall.policies.rate_limit.meters (Meter) keeps their states.
--
-- KEYS     the policy's clock, as "latest offset until": what time it was when it was last asked, how
--          far that is ahead of the server's clock, and until when something needs it.
--          Then states, by number; that of a sliding log is followed by its list. Reservations, by number.
-- ARGV[1]  the limits, as JSON: [[algorithm, limit, period, time, units, tolerance, capacity,
--          debt], ...]
--          algorithm: t token bucket, l leaky bucket, f fixed window, c sliding counter, s sliding log;
--          times in microseconds, `time` microseconds pay for `units`; capacity -1: any cost fits
-- ARGV[2]  the questions, as JSON: [[what, ...], ...]; limits and keys by number, from 1
--   ["t", [[limit, key, cost, amount, estimated], ...], times, see]   take all of it or nothing, so
--          many times. `amount` is what the cost is worth in microseconds, in a bucket; estimated: 1 if
--          it is settled later; see: 1 to be told what is left
--   ["r", reservation, [the same, ...]]                   take, and remember it under a reservation
--   ["s", reservation, [[limit, key, cost, amount, used, amount used, amount of used - cost], ...]]
--          settle by reservation: once, since it is forgotten then
--   ["b", [[... as in "s" ..., mark], ...]]               settle by what "t" or "g" replied
--   ["g", limit, key, want, least]                        take what is left, from `least` up to `want`
--   ["u", [[limit, key, cost, amount, estimated], ...], most]   take what is left, up to `most`, of all
--          that are estimated, and the cost of the others; or nothing
--   ["p", [[limit, key, cost, amount], ...]]              take nothing
--   ["l", limit, key, remaining, microseconds]            let no more than that be taken for so long
--   ["z", [[limit, key], ...]]                            forget what was counted
-- Reply: text, the time and an answer for each question, with spaces between them:
--   t, r   "0" if taken, with ";mark" for each charge where that is not simply this instant; t: as many
--          answers as `times`, with "|" between them, each followed by "/" and "left,rest" for each
--          charge, with ";" between them, if it is to see
--          else "first,longest,wait": which limit is exceeded first, which one longest, for how long
--          (microseconds; -1: for ever)
--   s, b, l, z  "0"
--   g      "taken,mark", or "0,wait"
--   u      how much was taken
--   p      "0" or "first,longest,wait", and ";left,rest" for each charge

local MARGIN = 60000         -- milliseconds that a state is kept beyond the time when it matters
local REMEMBERED = 600000    -- milliseconds that a reservation is kept, at least
local ESTIMATES_AT_MOST = 128
local CAPS_AT_MOST = 4
local CHUNK = 64
local CHUNKS_AT_MOST = 16    -- of a sliding log's list are looked at, for one purpose in one call

local max, min, floor = math.max, math.min, math.floor

local function text(number)
  return string.format('%.0f', number)
end

local function over(a, b)    -- a / b, rounded up; exact below 2^53
  return -floor(-a / b)
end

-- Time never goes back, whatever the server's clock does: if that is set back, or another server takes
-- over whose clock is behind, it goes on from where it was.

local latest, ahead, needed = 0, 0, 0
local kept_clock = redis.call('GET', KEYS[1])
if kept_clock then
  local a, b, c = string.match(kept_clock, '^(%d+) (%d+) (%d+)$')
  latest, ahead, needed = tonumber(a), tonumber(b), tonumber(c)
end
local now = clock() + ahead
if now < latest then ahead, now = ahead + latest - now, latest end

local function keep_clock()
  local ttl = max(0, over(needed - now, 1000)) + MARGIN
  local kept = text(now) .. ' ' .. text(ahead) .. ' ' .. text(needed)
  redis.call('SET', KEYS[1], kept, 'PX', text(ttl))
end

-- Returns how many milliseconds a key is kept, and keeps the clock for as long.
local function ttl_for(rest, margin)
  local ttl = over(rest, 1000) + margin
  needed = max(needed, now + ttl * 1000)
  return text(ttl)
end

-- Most calls need few of the functions below, so they are made only where they are needed.
local function lazily(make)
  local made
  return function()
    made = made or make()
    return made
  end
end

-- Accounts: a token bucket while it is not known yet what some takings really cost

local accounts = lazily(function()
  local own = {}

  local function bisect_left(list, mark)
    local place = 1
    while list[place] and list[place] < mark do place = place + 1 end
    return place
  end

  function own.after(list, mark)
    local place = 1
    while list[place] and list[place] <= mark do place = place + 1 end
    return place
  end

  function own.note(account, owed)
    if account.open == 0 then return end
    account.taken = account.taken + 1
    local marks, lows, estimates = account.marks, account.lows, account.estimates
    while #lows > 0 and lows[#lows] >= owed do
      lows[#lows] = nil
      marks[#marks] = nil
    end
    if #marks > 0 and (#estimates == 0 or marks[#marks] > estimates[#estimates]) then
      marks[#marks] = account.taken
    else
      marks[#marks + 1] = account.taken
      lows[#lows + 1] = owed
    end
  end

  local function merge(account)
    local marks, lows, between = {}, {}, -1
    for place = 1, #account.marks do
      local before = between
      between = bisect_left(account.estimates, account.marks[place])
      if between == before then
        marks[#marks] = account.marks[place]
      else
        marks[#marks + 1] = account.marks[place]
        lows[#lows + 1] = account.lows[place]
      end
    end
    account.marks, account.lows = marks, lows
  end

  function own.begin_estimate(account)
    account.open = account.open + 1
    local estimates = account.estimates
    estimates[#estimates + 1] = account.taken
    if #estimates > ESTIMATES_AT_MOST then
      local kept = {}
      for place = 2, #estimates, 2 do kept[#kept + 1] = estimates[place] end
      account.estimates = kept
      merge(account)
    end
    return account.taken
  end

  function own.end_estimate(state, mark)
    local account = state.account
    account.open = account.open - 1
    local place = bisect_left(account.estimates, mark)
    if account.estimates[place] == mark then
      table.remove(account.estimates, place)
      merge(account)
    end
    if account.open == 0 then state.account = nil end
  end

  function own.owe_less(state, by, first)
    local account = state.account
    state.owed = state.owed - by
    local marks, lows, least = {}, {}, math.huge
    for place = #account.lows, 1, -1 do
      local low = account.lows[place]
      if place >= first then low = max(0, low - by) end
      if low < least then
        least = low
        table.insert(marks, 1, account.marks[place])
        table.insert(lows, 1, low)
      end
    end
    account.marks, account.lows = marks, lows
  end
  return own
end)

-- Caps: what a vendor says is left

local caps_rules = lazily(function()
  local own = {}

  local function remove_cap(caps, place)
    table.remove(caps.untils, place)
    table.remove(caps.lefts, place)
    table.remove(caps.sinces, place)
  end

  local function merge_caps(caps)
    local untils, closest = caps.untils, 1
    for place = 2, #untils - 1 do
      if untils[place + 1] - untils[place] < untils[closest + 1] - untils[closest] then
        closest = place
      end
    end
    caps.lefts[closest + 1] = caps.lefts[closest]
    caps.sinces[closest + 1] = max(caps.sinces[closest], caps.sinces[closest + 1])
    remove_cap(caps, closest)
  end

  function own.lower(caps, remaining, ends)
    local untils, lefts, sinces = caps.untils, caps.lefts, caps.sinces
    while untils[1] and untils[1] <= now do remove_cap(caps, 1) end
    if ends <= now then return end
    for place = 1, #untils do
      if untils[place] >= ends and lefts[place] <= remaining then
        sinces[place] = now
        return
      end
    end
    local place = 1
    while untils[place] and untils[place] <= ends do
      if lefts[place] >= remaining then remove_cap(caps, place) else place = place + 1 end
    end
    table.insert(untils, place, ends)
    table.insert(lefts, place, remaining)
    table.insert(sinces, place, now)
    if #untils > CAPS_AT_MOST then merge_caps(caps) end
  end

  function own.wait(caps, wanted)
    for place = #caps.untils, 1, -1 do
      if caps.untils[place] > now and caps.lefts[place] < wanted then
        return caps.untils[place] - now
      end
    end
    return 0
  end

  function own.take(caps, cost)
    for place = 1, #caps.lefts do caps.lefts[place] = caps.lefts[place] - cost end
  end

  function own.give_back(caps, unused, mark)
    local lefts = caps.lefts
    for place = 1, #lefts do
      if caps.sinces[place] < mark then lefts[place] = lefts[place] + unused end
    end
    for place = #lefts - 1, 1, -1 do
      if lefts[place] >= lefts[place + 1] then remove_cap(caps, place) end
    end
  end

  function own.left(caps, otherwise)
    for place = 1, #caps.untils do
      if caps.untils[place] > now then return min(otherwise, max(0, caps.lefts[place])) end
    end
    return otherwise
  end
  return own
end)

-- The algorithms. `wait` gives microseconds, -1 for ever; `take` the mark for `give_back`.

local function bucket_fresh()
  return {owed = now}
end

local function bucket_rest(_, state)
  return max(0, state.owed - now)
end

-- Who owed ten calls owes ten calls at another rate; whose estimate it was is not known any more.
local function bucket_adopt(limit, state)
  if state.time and (state.time ~= limit.time or state.units ~= limit.units) then
    local units = max(0, state.owed - now) * state.units * limit.time  -- beyond 2^53, nearly so
    state.owed = now + over(units, state.time * limit.units)
    state.account, state.dirty = nil, true
  end
  state.time, state.units = limit.time, limit.units
end

local token_bucket = lazily(function()
  local token = {fresh = bucket_fresh, rest = bucket_rest, adopt = bucket_adopt}

  function token.wait(limit, state, cost, amount)
    if cost > limit.capacity then return -1 end
    return max(0, max(state.owed, now) + amount - now - limit.tolerance)
  end

  function token.take(_, state, _, amount)
    if state.account then accounts().note(state.account, max(0, state.owed - now)) end
    state.owed = max(state.owed, now) + amount
    state.latest = max(state.latest or 0, now)
    return now
  end

  function token.estimate(limit, state, cost, amount)
    if not state.account then
      -- Its number tells it from all others of this key, earlier or later.
      state.serial = max(now, (state.serial or 0) + 1)
      state.account =
        {id = state.serial, open = 0, taken = 0, estimates = {}, marks = {}, lows = {}}
    end
    token.take(limit, state, cost, amount)
    return accounts().begin_estimate(state.account)
  end

  function token.give_back(_, state, taken, mark)
    local later = max(now, state.latest or 0)
    local by = max(0, taken.unused - max(0, later - mark))
    if state.account then by = min(by, max(0, state.owed - later)) end
    state.owed = state.owed - by
  end

  function token.settle(state, unused, mark)
    local account = state.account
    local owed = max(0, state.owed - max(now, state.latest or 0))
    local first = accounts().after(account.marks, mark)
    local unpaid = min(unused, owed, account.lows[first] or owed)
    if unpaid > 0 then accounts().owe_less(state, unpaid, first) end
  end

  function token.left(limit, state)
    local free = now + limit.tolerance - max(state.owed, now)
    return min(limit.capacity, max(0, floor(free * limit.units / limit.time)))
  end
  return token
end)

local leaky_bucket = lazily(function()
  local leaky = {fresh = bucket_fresh, rest = bucket_rest, adopt = bucket_adopt}

  function leaky.wait(_, state)
    return max(0, state.owed - now)
  end

  function leaky.take(_, state, _, amount)
    local began = max(state.owed, now)
    state.owed = began + amount
    return began
  end

  function leaky.give_back(_, state, taken, mark)
    if state.owed == mark + taken.amount then state.owed = state.owed - taken.unused end
  end

  function leaky.left(_, state)
    return state.owed <= now and 1 or 0
  end
  return leaky
end)

local fixed_window = lazily(function()
  local fixed = {}

  function fixed.fresh(limit)
    return {begin = now - now % limit.period, used = 0}
  end

  function fixed.current(limit, state)
    if now >= state.begin + limit.period then
      state.begin, state.used = now - now % limit.period, 0
    end
  end

  function fixed.wait(limit, state, cost)
    if cost > limit.limit then return -1 end
    fixed.current(limit, state)
    local windows = over(min(state.used, limit.limit) + cost - limit.limit, limit.limit)
    if windows <= 0 then return 0 end
    return state.begin + windows * limit.period - now
  end

  function fixed.take(limit, state, cost)
    fixed.current(limit, state)
    state.used = state.used + cost
    return max(state.begin, now)
  end

  function fixed.give_back(limit, state, taken, mark)
    fixed.current(limit, state)
    if mark >= state.begin then state.used = max(0, state.used - taken.cost + taken.used) end
  end

  function fixed.left(limit, state)
    fixed.current(limit, state)
    return max(0, limit.limit - state.used)
  end

  function fixed.rest(limit, state)
    fixed.current(limit, state)
    if state.used > 0 or now < state.begin then return state.begin + limit.period - now end
    return 0
  end
  return fixed
end)

local sliding_counter = lazily(function()
  local counter = {}

  function counter.fresh(limit)
    return {begin = now - now % limit.period, used = 0, before = 0}
  end

  function counter.current(limit, state)
    if now < state.begin + limit.period then return end
    if now < state.begin + 2 * limit.period then
      state.begin, state.used, state.before = state.begin + limit.period, 0, state.used
    else
      state.begin, state.used, state.before = now - now % limit.period, 0, 0
    end
  end

  function counter.wait(limit, state, cost)
    local most, period = limit.limit, limit.period
    if cost > most then return -1 end
    counter.current(limit, state)
    -- What was too much in one window is no matter of the next.
    local begin, used, before = state.begin, state.used, min(state.before, most)
    if used + cost <= most then
      local elapsed = max(0, now - begin)
      if before * (period - elapsed) + (used + cost) * period <= most * period then return 0 end
      return begin + period - floor((most - used - cost) * period / before) - now
    end
    local windows = over(min(used, most) + cost - most, most)
    local last, full = cost, min(used, most)
    if windows > 1 then last, full = min(used, most) + cost - windows * most, most end
    return begin + (windows + 1) * period - floor((most - last) * period / full) - now
  end

  function counter.take(limit, state, cost)
    counter.current(limit, state)
    state.used = state.used + cost
    return max(state.begin, now)
  end

  function counter.give_back(limit, state, taken, mark)
    counter.current(limit, state)
    if mark >= state.begin then
      state.used = max(0, state.used - taken.cost + taken.used)
    elseif mark >= state.begin - limit.period then
      state.before = max(0, state.before - taken.cost + taken.used)
    end
  end

  function counter.left(limit, state)
    local most, period = limit.limit, limit.period
    counter.current(limit, state)
    local elapsed = max(0, now - state.begin)
    local before = min(state.before, most)
    return max(0, floor((most * period - before * (period - elapsed)) / period) - state.used)
  end

  function counter.rest(limit, state)
    counter.current(limit, state)
    local windows = 0
    if state.used > 0 then windows = 2 elseif state.before > 0 or now < state.begin then windows = 1 end
    return windows > 0 and state.begin + windows * limit.period - now or 0
  end
  return counter
end)

-- The takings of a log are in a list, oldest first, as "instant cost". What is taken by this call is
-- kept apart until the end: it is all of one instant, so it is one taking.

local sliding_log = lazily(function()
  local log = {}

  local function taking(entry)
    local at, cost = string.match(entry, '^(%d+) (%d+)$')
    return tonumber(at), tonumber(cost)
  end

  function log.fresh()
    return {latest = now, used = 0}
  end

  function log.load(limit, state)
    state.latest = max(state.latest, now)
    state.extra = 0
    local over_by, past = 0, state.latest - limit.period
    for _ = 1, CHUNKS_AT_MOST do
      local entries = redis.call('LRANGE', state.list, over_by, over_by + CHUNK - 1)
      local before = over_by
      for number = 1, #entries do
        local at, cost = taking(entries[number])
        if at > past then break end
        state.used = state.used - cost
        over_by = over_by + 1
      end
      if over_by - before < CHUNK then break end
    end
    if over_by > 0 then
      -- What is left over is forgotten by the next calls, and counts until then; unless all is over.
      local last = redis.call('LINDEX', state.list, -1)
      if taking(last) <= past then
        redis.call('UNLINK', state.list)
      else
        redis.call('LTRIM', state.list, over_by, -1)
      end
      state.dirty = true
    end
    if redis.call('LLEN', state.list) == 0 then state.used = 0 end
  end

  function log.flush(state)
    if state.extra == 0 then return end
    local last = redis.call('LINDEX', state.list, -1)
    local at, cost
    if last then at, cost = taking(last) end
    if at == state.latest then
      redis.call('LSET', state.list, -1, text(at) .. ' ' .. text(cost + state.extra))
    else
      redis.call('RPUSH', state.list, text(state.latest) .. ' ' .. text(state.extra))
    end
    state.extra = 0
  end

  function log.wait(limit, state, cost)
    if cost > limit.limit then return -1 end
    local missing = state.used + cost - limit.limit
    if missing <= 0 then return 0 end
    local at, taken
    for chunk = 0, CHUNKS_AT_MOST - 1 do
      local entries = redis.call('LRANGE', state.list, chunk * CHUNK, chunk * CHUNK + CHUNK - 1)
      for number = 1, #entries do
        at, taken = taking(entries[number])
        missing = missing - taken
        -- At least 1: what is over, but not forgotten yet, still counts.
        if missing <= 0 then return max(1, at + limit.period - now) end
      end
      if #entries < CHUNK then return state.latest + limit.period - now end
    end
    return max(1, at + limit.period - now)  -- it is as long at least; then more is known
  end

  function log.take(_, state, cost)
    state.extra = state.extra + cost
    state.used = state.used + cost
    return state.latest
  end

  function log.give_back(_, state, taken, mark)
    log.flush(state)
    local size = redis.call('LLEN', state.list)
    local from, to = 0, size
    while from < to do
      local place = floor((from + to) / 2)
      if taking(redis.call('LINDEX', state.list, place)) < mark then from = place + 1 else to = place end
    end
    local entry = redis.call('LINDEX', state.list, from)
    local at, cost
    if entry then at, cost = taking(entry) end
    if at ~= mark then return end
    local unused = taken.cost - taken.used
    state.used = state.used - unused
    if cost > unused then
      redis.call('LSET', state.list, from, text(at) .. ' ' .. text(cost - unused))
    else
      redis.call('LREM', state.list, from < size / 2 and 1 or -1, entry)
    end
  end

  function log.left(limit, state)
    return max(0, limit.limit - state.used)
  end

  function log.rest(limit, state)
    local last = redis.call('LINDEX', state.list, -1)
    local at = last and taking(last)
    if state.extra > 0 then at = state.latest end
    return max(0, (at and at + limit.period or state.latest) - now)
  end
  return log
end)

local rules = {
  t = token_bucket, l = leaky_bucket, f = fixed_window, c = sliding_counter, s = sliding_log,
}

-- States: read once, changed here, and written at the end

local limits = cjson.decode(ARGV[1])
for number, given in ipairs(limits) do
  limits[number] = {
    rule = rules[given[1]](), limit = given[2], period = given[3], time = given[4],
    units = given[5], tolerance = given[6], capacity = given[7], debt = given[8],
  }
end

local states, limit_of = {}, {}

local function at(limit_number, key_number)
  local limit, state = limits[limit_number], states[key_number]
  if not state then
    local kept = redis.call('GET', KEYS[key_number])
    state = kept and cmsgpack.unpack(kept) or limit.rule.fresh(limit)
    states[key_number], limit_of[key_number] = state, limit
    if limit.rule.adopt then limit.rule.adopt(limit, state) end
    if limit.rule.load then
      state.list = KEYS[key_number + 1]
      limit.rule.load(limit, state)
    end
  end
  -- All is paid, so nothing of it can be given back.
  if state.account and state.owed <= now then state.account = nil end
  return limit, state
end

local function rest_of(limit, state)
  local rest = limit.rule.rest(limit, state)
  local caps = state.caps
  if caps and #caps.untils > 0 then rest = max(rest, caps.untils[#caps.untils] - now) end
  return rest
end

local function save()
  for key_number, state in pairs(states) do
    if state.dirty then
      local limit = limit_of[key_number]
      local ttl = ttl_for(rest_of(limit, state), state.since and REMEMBERED or MARGIN)
      local list = state.list
      if list then
        limit.rule.flush(state)
        redis.call('PEXPIRE', list, ttl)
      end
      if state.caps and #state.caps.untils == 0 then state.caps = nil end
      state.dirty, state.list, state.extra = nil, nil, nil
      redis.call('SET', KEYS[key_number], cmsgpack.pack(state), 'PX', ttl)
    end
  end
end

-- Questions

local function wait_of(charge)
  local limit, state = at(charge[1], charge[2])
  local wait = limit.rule.wait(limit, state, charge[3], charge[4])
  if wait >= 0 and state.caps then wait = max(wait, caps_rules().wait(state.caps, charge[3])) end
  return wait
end

local function look(charges)
  local first, longest, most
  for _, charge in ipairs(charges) do
    local wait = charge[3] > 0 and wait_of(charge) or 0
    if wait < 0 then return charge[1], charge[1], -1 end
    if wait > 0 then
      first = first or charge[1]
      if not longest or wait > most then longest, most = charge[1], wait end
    end
  end
  return first, longest, most
end

-- Returns the mark, and of an estimate the number of its account.
local function take(charge, estimated)
  if charge[3] == 0 then return now, 0 end
  local limit, state = at(charge[1], charge[2])
  state.dirty = true
  if state.caps then caps_rules().take(state.caps, charge[3]) end
  if estimated and limit.rule.estimate then
    local mark = limit.rule.estimate(limit, state, charge[3], charge[4])
    return mark, state.account.id
  end
  return limit.rule.take(limit, state, charge[3], charge[4]), 0
end

local function refusal(first, longest, wait)
  return first .. ',' .. longest .. ',' .. text(wait)
end

-- `mark`, `account`: as `take` returned them; `when` it was taken; `own`: an estimate.
local function settle(change, mark, account, when, own)
  local limit, state = at(change[1], change[2])
  local cost, used = change[3], change[5]
  state.dirty = true
  local open = own and state.account and state.account.id == account
  if used > cost then
    local owed = state.owed and max(state.owed, now)
    limit.rule.take(limit, state, used - cost, change[7])
    if owed then  -- a bucket: the debt is bounded, whatever was reported
      state.owed = min(state.owed, max(owed, now + limit.tolerance + limit.debt))
    end
    if state.caps then caps_rules().take(state.caps, used - cost) end
  elseif used < cost and when >= (state.since or 0) then
    local unused = change[4] - change[6]
    if not own then
      limit.rule.give_back(limit, state, {
        cost = cost, used = used, amount = change[4], unused = unused,
      }, mark)
    elseif open then
      limit.rule.settle(state, unused, mark)
    end
    if state.caps then caps_rules().give_back(state.caps, cost - used, when) end
  end
  if open then accounts().end_estimate(state, mark) end
end

local ask = {}

local function take_all(charges)
  local first, longest, wait = look(charges)
  if first then return refusal(first, longest, wait), true end
  local answer
  for number = 1, #charges do
    local mark = take(charges[number], false)
    if not answer and mark ~= now then
      answer = {'0'}
      for before = 2, number do answer[before] = text(now) end
    end
    if answer then answer[number + 1] = text(mark) end
  end
  return answer and table.concat(answer, ';') or '0'
end

local function left_of(limit, state)
  local left = limit.rule.left(limit, state)
  return state.caps and caps_rules().left(state.caps, left) or left
end

local function amount_of(limit, cost)
  return limit.time > 0 and over(cost * limit.time, limit.units) or 0
end

-- In how long more than `left` can be taken; where there never is more, in how long nothing is owed.
local function more_of(charge, limit, state, left)
  local wait = wait_of({charge[1], charge[2], left + 1, amount_of(limit, left + 1)})
  return wait >= 0 and wait or rest_of(limit, state)
end

-- What is left of each limit, and in how long there is `more`; or, without it, in how long all that
-- was taken is forgotten.
local function standings(charges, more)
  local answer = {}
  for number, charge in ipairs(charges) do
    local limit, state = at(charge[1], charge[2])
    local left = left_of(limit, state)
    local time = more and more_of(charge, limit, state, left) or rest_of(limit, state)
    answer[number] = text(left) .. ',' .. text(time)
  end
  return table.concat(answer, ';')
end

function ask.t(charges, times, see)
  local answers, answer, refused = {}, nil, false
  for number = 1, times do
    -- A refusal changes nothing: whoever asks for the same is told the same.
    if not refused then
      answer, refused = take_all(charges)
      if see == 1 then answer = answer .. '/' .. standings(charges, true) end
    end
    answers[number] = answer
  end
  return table.concat(answers, '|')
end

function ask.r(reservation, charges)
  local first, longest, wait = look(charges)
  if first then return refusal(first, longest, wait) end
  local record, rest = {}, 0
  for number, charge in ipairs(charges) do
    local limit, state = at(charge[1], charge[2])
    local own = charge[5] == 1 and charge[3] > 0 and limit.rule.estimate ~= nil
    local mark, account = take(charge, own)
    record[number] = {charge[1], mark, account, now, own}
    rest = max(rest, rest_of(limit, state))
  end
  redis.call('SET', KEYS[reservation], cmsgpack.pack(record), 'PX', ttl_for(rest, REMEMBERED))
  return '0'
end

function ask.s(reservation, changes)
  local kept = redis.call('GET', KEYS[reservation])
  if not kept then return '0' end
  redis.call('DEL', KEYS[reservation])
  for _, taken in ipairs(cmsgpack.unpack(kept)) do
    for _, change in ipairs(changes) do
      if change[1] == taken[1] then
        settle(change, taken[2], taken[3], taken[4], taken[5])
      end
    end
  end
  return '0'
end

function ask.b(changes)
  for _, change in ipairs(changes) do
    settle(change, change[8], 0, change[8], false)
  end
  return '0'
end

function ask.g(limit_number, key_number, want, least)
  local limit, state = at(limit_number, key_number)
  local granted = min(left_of(limit, state), want)
  local charge = {limit_number, key_number, granted, 0}
  if granted < least then charge[3] = least end
  charge[4] = amount_of(limit, charge[3])
  local wait = wait_of(charge)
  if wait ~= 0 then return '0,' .. text(wait) end
  return text(charge[3]) .. ',' .. text((take(charge, false)))
end

function ask.u(charges, most)
  for _, charge in ipairs(charges) do
    if charge[5] == 1 then most = min(most, left_of(at(charge[1], charge[2]))) end
  end
  for _, charge in ipairs(charges) do
    if charge[5] == 1 then charge[3], charge[4] = most, amount_of(limits[charge[1]], most) end
  end
  if most == 0 or look(charges) then return '0' end
  for _, charge in ipairs(charges) do take(charge, false) end
  return text(most)
end

function ask.p(charges)
  local first, longest, wait = look(charges)
  return (first and refusal(first, longest, wait) or '0') .. ';' .. standings(charges)
end

function ask.l(limit_number, key_number, remaining, microseconds)
  local _, state = at(limit_number, key_number)
  state.caps = state.caps or {untils = {}, lefts = {}, sinces = {}}
  caps_rules().lower(state.caps, remaining, now + microseconds)
  state.dirty = true
  return '0'
end

-- What was taken before is not given back any more: `since`. Accounts have numbers of their own.
function ask.z(places)
  for _, place in ipairs(places) do
    local limit, state = at(place[1], place[2])
    local fresh = limit.rule.fresh(limit)
    fresh.serial, fresh.since, fresh.dirty = state.serial, now, true
    if limit.rule.adopt then limit.rule.adopt(limit, fresh) end
    if state.list then
      redis.call('UNLINK', state.list)
      fresh.list, fresh.extra = state.list, 0
    end
    states[place[2]] = fresh
  end
  return '0'
end

local answers = {text(now)}
for number, question in ipairs(cjson.decode(ARGV[2])) do
  answers[number + 1] =
    ask[question[1]](question[2], question[3], question[4], question[5])
end
save()
keep_clock()
return table.concat(answers, ' ')
