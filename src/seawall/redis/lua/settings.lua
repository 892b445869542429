-- Do all pods that share something agree on its settings?
-- KEYS[1]  where the settings of the first who came are kept
-- ARGV[1]  the settings of this pod, as text
-- ARGV[2]  how long to remember them without hearing of them again, in milliseconds
-- Reply: the settings that are kept. They are replaced once nobody who had them comes any more.
-- A full server keeps none, or not for longer: nothing else depends on it, so that is no failure.
local kept = redis.call('GET', KEYS[1])
if not kept then
  kept = ARGV[1]
end
if kept == ARGV[1] then
  local answer = redis.pcall('SET', KEYS[1], kept, 'PX', ARGV[2])
  if answer.err and not string.find(answer.err, 'OOM', 1, true) then
    return answer
  end
end
return kept
