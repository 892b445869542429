-- Stands in front of every script. The server's clock is the only one: pods may disagree about time.
-- Returns whole microseconds, exact below 2^53.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end
