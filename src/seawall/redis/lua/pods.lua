-- Which pods live: each says so every now and then, and hears how many do. Mirrors
-- models/rate/split.py (Members), which tells what a pod makes of the answer.
-- KEYS[1]  the pods, a sorted set: when each was last heard of, in microseconds
-- KEYS[2]  the same pods: since when each has been heard of without a pause
-- ARGV[1]  'beat', or 'leave' for a pod that ends
-- ARGV[2]  the pod
-- ARGV[3]  for how long a pod lives that is not heard of, in microseconds
-- ARGV[4]  for how long it is remembered, in microseconds
-- ARGV[5]  for how long a silent pod keeps its part, in microseconds
-- Reply: now; how many live, this one included; for how long there has been nobody else, in
-- microseconds, or -1 if nobody else is remembered; 1 if this one was silent for longer than it keeps
-- its part while others were not, else 0. All as text.
local now = clock()
local pods, runs, pod = KEYS[1], KEYS[2], ARGV[2]
local life, memory, valid = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local most, looked_at, at_once = 10000, 25, 1000
local function text(number) return string.format('%.0f', number) end

local function last_heard_of(other)
  local at = redis.call('ZSCORE', pods, other)
  return at and tonumber(at)
end

-- Drop those of `others` that do not live any more; tell whether one does that is not this pod.
local function swept(others)
  local found = false
  for _, other in ipairs(others) do
    local at = last_heard_of(other)
    if not at or at <= now - life then
      redis.call('ZREM', runs, other)
    elseif other ~= pod then
      found = true
    end
  end
  return found
end

-- A clock that was set back: nobody was heard of later than now.
for _, set in ipairs(KEYS) do
  local ahead = redis.call('ZRANGEBYSCORE', set, '(' .. text(now), '+inf', 'LIMIT', 0, at_once)
  for _, other in ipairs(ahead) do redis.call('ZADD', set, text(now), other) end
end

local before = last_heard_of(pod)
local forgotten = 0
if ARGV[1] == 'leave' then
  -- It is remembered, but lives no more.
  if before then redis.call('ZADD', pods, text(now - life), pod) end
  redis.call('ZREM', runs, pod)
else
  if not before or before <= now - life then
    if before and before <= now - valid then
      -- Is there another that has been there for nearly as long as it takes to grow?
      local grown = text(now - life * 2 / 3)
      local old = redis.call('ZRANGEBYSCORE', runs, '-inf', grown, 'LIMIT', 0, looked_at)
      if swept(old) then forgotten = 1 end
    end
    swept(redis.call('ZRANGE', runs, 0, looked_at - 1))
    swept(redis.call('ZRANGE', runs, -looked_at, -1))
    redis.call('ZADD', runs, text(now), pod)
  end
  redis.call('ZADD', pods, text(now), pod)
end
redis.call('ZREMRANGEBYSCORE', pods, '-inf', text(now - memory))
redis.call('ZREMRANGEBYRANK', pods, 0, -most - 1)
redis.call('ZREMRANGEBYRANK', runs, most, -1)
redis.call('PEXPIRE', pods, text(math.ceil(memory / 1000)))
redis.call('PEXPIRE', runs, text(math.ceil(memory / 1000)))

local quiet = -1
local latest = redis.call('ZREVRANGE', pods, 0, 1, 'WITHSCORES')
for place = 1, #latest, 2 do
  if latest[place] ~= pod then
    -- One that left is remembered as of a life ago.
    quiet = math.max(0, now - tonumber(latest[place + 1]) - life)
    break
  end
end
local live = redis.call('ZCOUNT', pods, '(' .. text(now - life), '+inf')
return {text(now), text(live), text(quiet), text(forgotten)}
