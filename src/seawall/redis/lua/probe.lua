-- Can the store be written to? A read-only or full one cannot keep what is shared.
-- KEYS[1]  any key that nobody else uses
-- Reply: 1
redis.call('SET', KEYS[1], '1', 'PX', 1000)
return 1
