-- One holder at a time, with a fencing token. Mirrors seawall.models.lease.LeaseModel.
-- KEYS[1]  a hash: token (the last that was given), holder, attempt, ttl, until
-- ARGV[1]  "take", "renew", "release" or "withdraw"
-- ARGV[2]  the channel on which it is told that the lease is free
-- ARGV[3]  renew, release: the token. take, withdraw: the holder
-- ARGV[4]  take, renew: the time to live in microseconds. withdraw: the number of the attempt
-- ARGV[5]  take: the number of the holder's attempt
-- Reply: {1, token, "0"} if it was done; {0, token, left} if not: the last token that was given, and
-- for how many microseconds more its holder has it. Numbers are text.
-- The key outlives the lease by a week, so that tokens rise even if the clock is set back.
local REMEMBERED_MS = 7 * 24 * 3600 * 1000

local function text(number)
  return string.format('%.0f', number)
end

local now = clock()
local kept = redis.call('HMGET', KEYS[1], 'token', 'holder', 'attempt', 'ttl', 'until')
local token, holder, attempt = tonumber(kept[1]) or 0, kept[2] or '', tonumber(kept[3]) or 0
local ttl, over = tonumber(kept[4]) or 0, tonumber(kept[5]) or 0

-- A clock that was set back: nobody holds the lease for longer than its time to live.
over = math.min(over, now + ttl)

local function keep()
  redis.call('HSET', KEYS[1], 'token', text(token), 'holder', holder, 'attempt', text(attempt),
    'ttl', text(ttl), 'until', text(over))
  redis.call('PEXPIRE', KEYS[1], text(math.ceil(ttl / 1000) + REMEMBERED_MS))
end

local command, done = ARGV[1], false
if command == 'take' then
  local number = tonumber(ARGV[5])
  local newer = holder == ARGV[3] and number > attempt
  if over <= now or newer then
    token = math.max(token + 1, now)
    holder, attempt, ttl = ARGV[3], number, tonumber(ARGV[4])
    over = now + ttl
    done = true
  end
elseif command == 'withdraw' then
  if holder == ARGV[3] and attempt <= tonumber(ARGV[4]) and over > now then
    over = 0
    done = true
  end
elseif token == tonumber(ARGV[3]) and over > now then
  if command == 'renew' then
    ttl = tonumber(ARGV[4])
    over = now + ttl
  else
    over = 0
  end
  done = true
end

if done or (kept[5] and text(over) ~= kept[5]) then
  keep()
end
if not done then
  return {0, text(token), text(math.max(over - now, 0))}
end
if over == 0 then
  redis.call('PUBLISH', ARGV[2], text(token))
end
return {1, text(token), '0'}
