"""What the journal does inside of Redis, each at once or not at all.

The keys of a run: its state (hash), its events (stream, the id of event n is n-0), its payloads and rewards
(hashes), its writer's lease (string with an expiry). State: format, identity, token (whose holder alone may
write), last (seq of the newest event). Scripts that write answer `taken` to anybody but the token's holder.
Each may be sent twice, when its answer was lost, and does its work once.
"""

from __future__ import annotations

from typing import NamedTuple


class Keys(NamedTuple):
    """Five keys a run; the braces keep them on one node of a cluster."""

    state: str
    events: str
    payloads: str
    rewards: str
    lease: str

    @classmethod
    def of(cls, run: str) -> Keys:
        return cls(*(f"areal:{{{run}}}:{field}" for field in cls._fields))


MAKE = """
-- values: format, identity, token, last, holder, lease in ms. A run whose creation was killed is replaced.
if redis.call('HGET', KEYS[1], 'token') == ARGV[3] then return {'made'} end
local found = redis.call('HGET', KEYS[1], 'last')
if found and (found ~= '0' or redis.call('GET', KEYS[5])) then return {'exists', found} end
redis.call('DEL', unpack(KEYS))
redis.call('HSET', KEYS[1], 'format', ARGV[1], 'identity', ARGV[2], 'token', ARGV[3], 'last', ARGV[4])
redis.call('SET', KEYS[5], ARGV[5], 'PX', ARGV[6])
return {'made'}
"""

LOOK = """
return redis.call('HMGET', KEYS[1], 'format', 'identity')
"""

CLAIM = """
-- values: identity, token, holder, lease in ms. Who held the token before cannot write any more.
local found = redis.call('HMGET', KEYS[1], 'identity', 'token')
if found[1] ~= ARGV[1] then return {'gone'} end
if found[2] == ARGV[2] then return {'claimed'} end
local holder = redis.call('GET', KEYS[5])
if holder then return {'held', holder, redis.call('PTTL', KEYS[5])} end
redis.call('HSET', KEYS[1], 'token', ARGV[2])
redis.call('SET', KEYS[5], ARGV[3], 'PX', ARGV[4])
return {'claimed'}
"""

_OWN = """
local token = redis.call('HGET', KEYS[1], 'token')
if not token then return {'gone'} end
if token ~= ARGV[1] then return {'taken', redis.call('GET', KEYS[5]) or 'another process'} end
"""

RENEW = (
    _OWN
    + """
-- values: token, holder, lease in ms
redis.call('SET', KEYS[5], ARGV[2], 'PX', ARGV[3])
return {'done'}
"""
)

RELEASE = (
    _OWN
    + """
-- A renewal that was sent before finds another token, so it does not bring the lease back.
redis.call('HSET', KEYS[1], 'token', '')
redis.call('DEL', KEYS[5])
return {'done'}
"""
)

APPEND = (
    _OWN
    + """
-- values: token, seq of the first event, counts of events, payloads, rewards; then those, field by field.
-- The holder of a token appends one after the other, so what ends where this ends is this, written before.
local first, events = tonumber(ARGV[2]), tonumber(ARGV[3])
local payloads, rewards = tonumber(ARGV[4]), tonumber(ARGV[5])
local last = tonumber(redis.call('HGET', KEYS[1], 'last'))
if last == first + events - 1 then return {'done'} end
if last ~= first - 1 then return {'differs', last} end
local at = 6
for i = 0, events - 1 do
  redis.call('XADD', KEYS[2], string.format('%.0f-0', first + i), 'wall_s', ARGV[at], 'kind', ARGV[at + 1],
    'event', ARGV[at + 2], 'actions', ARGV[at + 3])
  at = at + 4
end
for _ = 1, payloads do
  redis.call('HSETNX', KEYS[3], ARGV[at], ARGV[at + 1])
  at = at + 2
end
for _ = 1, rewards do
  redis.call('HSETNX', KEYS[4], ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('HSET', KEYS[1], 'last', string.format('%.0f', first + events - 1))
return {'done'}
"""
)

READ = """
-- values: seq of the first event, how many: the newest seq, and these events
return {redis.call('HGET', KEYS[1], 'last'), redis.call('XRANGE', KEYS[2], ARGV[1], '+', 'COUNT', ARGV[2])}
"""

TRIM = (
    _OWN
    + """
-- values: token, the first seq that stays, count of payloads; then names of payloads, names of rewards
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[2])
local payloads = tonumber(ARGV[3])
for at = 4, #ARGV do
  redis.call('HDEL', at - 4 < payloads and KEYS[3] or KEYS[4], ARGV[at])
end
return {'done'}
"""
)

CATCH_UP = (
    _OWN
    + """
-- values: token, the newest seq of the archive
redis.call('HSET', KEYS[1], 'last', ARGV[2])
return {'done'}
"""
)

REMOVE = (
    "if redis.call('EXISTS', KEYS[1]) == 0 then return {'done'} end"
    + _OWN
    + """
redis.call('DEL', unpack(KEYS))
return {'done'}
"""
)
