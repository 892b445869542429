-- One consumer of a group of a stream, and writing to the stream; see seawall/redis/streams.py.
-- KEYS[1]  the stream
-- ARGV[1]  the command
-- append:  ARGV[2] the length at which to stop; ARGV[3] '1' to remove the oldest entries then, '0' to
--          refuse; then for each entry the number of its texts, and these: field, value, field, value...
--          Reply: {1, length} or {0, length} if it is full and nothing was written.
-- All others: ARGV[2] the group; ARGV[3] the consumer; ARGV[4] '1' if the consumer must hold the
-- stream alone (fenced), '0' if it is shared. A fenced consumer is called <token>-<name>; of two, the
-- higher token wins. Reply: {-1} if another one holds it, else {1, ...}:
-- hold:    take over all pending entries, and remove all other consumers.
-- read:    ARGV[5] count. Reply: the new entries.
-- list:    ARGV[5] milliseconds (shared): take over entries which nobody has renewed for so long,
--          ARGV[6] at most. Reply: for each pending entry of this consumer its id and its deliveries.
-- take:    then for each entry its id and how often it is delivered now. Reply: the entries; those
--          which do not exist any more have no fields.
-- ack:     then the ids.
-- return:  then the ids; others may have them at once, and this delivery does not count.
-- renew:   ARGV[5] milliseconds: keep pending entries for longer; remove consumers which have none and
--          were silent for so long; remove what all groups have acknowledged from the stream.
--          Reply: how many entries were not read yet, -1 if the server does not know.
-- leave:   return all, and remove this consumer.
local LONG_AGO = '31536000000'
local RETURNED = 'seawall-returned'
local MANY = '100000'
local key, command = KEYS[1], ARGV[1]

if command == 'append' then
  local most, trims = tonumber(ARGV[2]), ARGV[3] == '1'
  local length = redis.call('XLEN', key)
  if not trims and length >= most then
    return {0, length}
  end
  local place = 4
  while place <= #ARGV do
    local texts = tonumber(ARGV[place])
    local entry = {}
    for number = 1, texts do
      entry[number] = ARGV[place + number]
    end
    local added
    if trims then
      added = redis.pcall('XADD', key, 'MAXLEN', '~', ARGV[2], '*', unpack(entry))
    else
      added = redis.pcall('XADD', key, '*', unpack(entry))
    end
    if type(added) == 'table' then
      -- The server has memory for all of a script or for none of it: nothing was written.
      if string.find(added.err, '^OOM') then
        return redis.error_reply('FULL the server has no memory left (OOM) for the stream')
      end
      return added
    end
    place = place + texts + 1
  end
  return {1, redis.call('XLEN', key)}
end

local group, me, fenced = ARGV[2], ARGV[3], ARGV[4] == '1'

local function facts(flat)
  local named = {}
  for place = 1, #flat, 2 do
    named[flat[place]] = flat[place + 1]
  end
  return named
end

-- Return the consumers of the group; a group which does not exist begins with the first entry.
local function consumers()
  local found = redis.pcall('XINFO', 'CONSUMERS', key, group)
  if found.err then
    redis.call('XGROUP', 'CREATE', key, group, '0', 'MKSTREAM')
    return {}
  end
  for place, flat in ipairs(found) do
    found[place] = facts(flat)
  end
  return found
end

local function token_of(name)
  return tonumber(string.match(name, '^(%d+)-')) or 0
end

-- Call XCLAIM for many ids, in parts which fit into one call.
local function claim(owner, ids, ...)
  for first = 1, #ids, 1000 do
    local part = {}
    for place = first, math.min(first + 999, #ids) do
      part[#part + 1] = ids[place]
    end
    for _, option in ipairs({...}) do
      part[#part + 1] = option
    end
    redis.call('XCLAIM', key, group, owner, '0', unpack(part))
  end
end

local function pending(consumer)
  return redis.call('XPENDING', key, group, '-', '+', MANY, consumer)
end

-- Return how often an entry was delivered, if it is pending at this consumer.
local function deliveries(id)
  local found = redis.call('XPENDING', key, group, id, id, '1', me)
  return found[1] and found[1][4]
end

local function take_over(idle, most)
  local from, number = '0-0', 0
  repeat
    local count = math.min(most, 1000)
    local part = redis.call('XAUTOCLAIM', key, group, me, idle, from, 'COUNT', count, 'JUSTID')
    from, number = part[1], number + #part[2]
  until from == '0-0' or number >= most
end

local known = consumers()
if command == 'hold' then
  for _, other in ipairs(known) do
    if token_of(other.name) > token_of(me) then
      return {-1}
    end
  end
  redis.call('XGROUP', 'CREATECONSUMER', key, group, me)
  take_over('0', math.huge)
  for _, other in ipairs(known) do
    if other.name ~= me then
      redis.call('XGROUP', 'DELCONSUMER', key, group, other.name)
    end
  end
  return {1}
end

if fenced then
  local holds = false
  for _, consumer in ipairs(known) do
    holds = holds or consumer.name == me
  end
  if not holds then
    return {-1}
  end
end

if command == 'read' then
  local reply = redis.call('XREADGROUP', 'GROUP', group, me, 'COUNT', ARGV[5], 'STREAMS', key, '>')
  return {1, reply and reply[1][2] or {}}
end

if command == 'list' then
  if not fenced then
    take_over(ARGV[5], tonumber(ARGV[6]))
  end
  local listed = {}
  for place, entry in ipairs(pending(me)) do
    listed[place] = {entry[1], entry[4]}
  end
  return {1, listed}
end

if command == 'take' then
  local taken = {}
  for place = 5, #ARGV, 2 do
    local id = ARGV[place]
    if deliveries(id) then
      local entry = redis.call('XRANGE', key, id, id)[1]
      if entry then
        claim(me, {id}, 'RETRYCOUNT', ARGV[place + 1], 'JUSTID')
      end
      taken[#taken + 1] = entry or {id, {}}
    end
  end
  return {1, taken}
end

if command == 'ack' then
  return {1, redis.call('XACK', key, group, unpack(ARGV, 5))}
end

if command == 'return' then
  for place = 5, #ARGV do
    local id = ARGV[place]
    local count = deliveries(id)
    if count and fenced then
      claim(me, {id}, 'RETRYCOUNT', math.max(count - 1, 0), 'JUSTID')
    elseif count then
      claim(RETURNED, {id}, 'IDLE', LONG_AGO, 'RETRYCOUNT', math.max(count - 1, 0), 'JUSTID')
    end
  end
  return {1}
end

local function own_ids()
  local ids = {}
  for place, entry in ipairs(pending(me)) do
    ids[place] = entry[1]
  end
  return ids
end

local function is_before(one, other)
  local ms, sequence = string.match(one, '(%d+)-(%d+)')
  local other_ms, other_sequence = string.match(other, '(%d+)-(%d+)')
  ms, other_ms = tonumber(ms), tonumber(other_ms)
  return ms < other_ms or (ms == other_ms and tonumber(sequence) < tonumber(other_sequence))
end

-- Remove the entries which every group has acknowledged; return how many this group has not read.
local function trim()
  local lowest, unread
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local one = facts(flat)
    local id = one['last-delivered-id']
    if one.name == group then
      unread = one.lag
    end
    if one.pending > 0 then
      id = redis.call('XPENDING', key, one.name)[2]
    end
    if not lowest or is_before(id, lowest) then
      lowest = id
    end
  end
  redis.call('XTRIM', key, 'MINID', lowest)
  return unread or -1
end

if command == 'renew' then
  if not fenced then
    claim(me, own_ids(), 'JUSTID')
    for _, other in ipairs(known) do
      if other.name ~= me and other.pending == 0 and other.idle > tonumber(ARGV[5]) then
        redis.call('XGROUP', 'DELCONSUMER', key, group, other.name)
      end
    end
  end
  return {1, trim()}
end

if command == 'leave' then
  if not fenced then
    claim(RETURNED, own_ids(), 'IDLE', LONG_AGO, 'JUSTID')
  end
  if #pending(me) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', key, group, me)
  end
  return {1}
end

return redis.error_reply('ERR unknown command of streams.lua: ' .. command)
