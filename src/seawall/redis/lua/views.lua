-- What each pod shows of itself, for whoever looks at all of them side by side.
-- KEYS[1]  the pods, a sorted set: when each told its view last, in microseconds
-- KEYS[2]  their views, a hash: what they told, as they packed it
-- KEYS[3]  a mark that is there while somebody looks
-- ARGV[1]  'tell', 'leave' or 'read'
-- ARGV[2]  the pod that asks
-- ARGV[3]  for how long a pod that tells nothing is remembered, in microseconds
-- ARGV[4]  how many pods are remembered (tell), or shown (read)
-- tell: ARGV[5]  its view
-- read: ARGV[5]  how many bytes a view may have
--       ARGV[6]  how many bytes all views together may have
--       ARGV[7]  for how long somebody looks who has just looked, in milliseconds
-- Reply to 'tell' and 'leave': 1 if somebody looks, else 0.
-- Reply to 'read': now; how many other pods there are; and of each that is shown three values: the
-- pod, when it told its view last, and the view, empty if it is too large. Numbers are text.
local now = clock()
local pods, views, mark = KEYS[1], KEYS[2], KEYS[3]
local pod, remembered, most = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local at_once = 1000
local function text(number) return string.format('%.0f', number) end

-- What somebody else put here is not ours to fail on.
for key, kind in pairs({[pods] = 'zset', [views] = 'hash', [mark] = 'string'}) do
  local found = redis.call('TYPE', key).ok
  if found ~= 'none' and found ~= kind then redis.call('DEL', key) end
end

local function forget(others)
  for _, other in ipairs(others) do
    redis.call('ZREM', pods, other)
    redis.call('HDEL', views, other)
  end
end

-- A clock that was set back: nobody told anything later than now.
local ahead = redis.call('ZRANGEBYSCORE', pods, '(' .. text(now), '+inf', 'LIMIT', 0, at_once)
for _, other in ipairs(ahead) do redis.call('ZADD', pods, text(now), other) end
forget(redis.call('ZRANGEBYSCORE', pods, '-inf', text(now - remembered), 'LIMIT', 0, at_once))

if ARGV[1] == 'read' then
  local largest, room = tonumber(ARGV[5]), tonumber(ARGV[6])
  redis.call('SET', mark, '1', 'PX', ARGV[7])
  local known = redis.call('ZRANGE', pods, 0, at_once - 1)
  table.sort(known)  -- those who are shown are the same each time
  local reply, others, shown = {text(now), '0'}, 0, 0
  for _, other in ipairs(known) do
    local fit = other ~= pod and #other <= 64
    local size = fit and redis.call('HSTRLEN', views, other) or 0
    if size > 0 then
      others = others + 1
      local told = size <= largest and size or 0
      if shown < most and told <= room then
        shown, room = shown + 1, room - told
        reply[#reply + 1] = other
        reply[#reply + 1] = text(tonumber(redis.call('ZSCORE', pods, other)))
        reply[#reply + 1] = told > 0 and redis.call('HGET', views, other) or ''
      end
    end
  end
  reply[2] = text(others)
  return reply
end

if ARGV[1] == 'leave' then
  forget({pod})
else
  redis.call('ZADD', pods, text(now), pod)
  -- Views of pods that are not known, where the server dropped the one key and not the other.
  if redis.call('HLEN', views) > redis.call('ZCARD', pods) then redis.call('DEL', views) end
  redis.call('HSET', views, pod, ARGV[5])
  forget(redis.call('ZRANGE', pods, 0, -most - 1))
  local kept = text(math.ceil(remembered / 1000))
  redis.call('PEXPIRE', pods, kept)
  redis.call('PEXPIRE', views, kept)
end
return redis.call('EXISTS', mark)
