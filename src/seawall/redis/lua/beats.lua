-- The heartbeats of a group: each member writes its own, and reads those of all. What a reader makes of
-- them is in members/heartbeats.py.
-- KEYS[1]  the members, a sorted set: when each was last heard, in microseconds
-- KEYS[2]  those that have said goodbye, a sorted set: when
-- ARGV[1]  'beat', or 'leave' for a member that ends
-- ARGV[2]  the member
-- ARGV[3]  for how long a silent member is remembered, in microseconds
-- ARGV[4]  how many are remembered at most
-- Reply: now, as text; the members and when each was heard, latest first; the names of those that left.
local now = clock()
local members, left, member = KEYS[1], KEYS[2], ARGV[2]
local memory, most = tonumber(ARGV[3]), tonumber(ARGV[4])
local function text(number) return string.format('%.0f', number) end

if ARGV[1] == 'leave' then
  redis.call('ZREM', members, member)
  redis.call('ZADD', left, text(now), member)
else
  redis.call('ZADD', members, text(now), member)
  redis.call('ZREM', left, member)
end
for _, set in ipairs(KEYS) do
  redis.call('ZREMRANGEBYSCORE', set, '-inf', text(now - memory))
  redis.call('ZREMRANGEBYRANK', set, 0, -most - 1)
  redis.call('PEXPIRE', set, text(math.ceil(memory / 1000)))
end
return {
  text(now),
  redis.call('ZREVRANGE', members, 0, most - 1, 'WITHSCORES'),
  redis.call('ZREVRANGE', left, 0, most - 1),
}
