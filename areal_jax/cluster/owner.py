"""The owner of a run: the only controller that may send commands and write the journal.

Redis stores the owner's token (a random string), the owner's epoch and the time at which the owner's lease
ends. Another controller waits until the lease has ended, and then replaces the token by its own token. If the
former owner was only stuck, it finds the other token when it tries to renew its lease, and ends. If Redis
loses its data, the run has no owner: the controller claims the run again, which starts a new epoch.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Mapping
from typing import NamedTuple

from areal_jax.cluster.broker import Broker, BrokerError
from areal_jax.cluster.membership import LOST_S
from areal_jax.trajectories.journal import pack, unpack
from areal_jax.trajectories.lock import is_gone

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
"""First lines of each Lua script: `now` is Redis' time in ms, so all processes use the same clock."""

# Values: token, epoch, holder, lease in ms, a holder that is known to be dead, confirmed numbers.
_CLAIM = (
    _NOW
    + """
local found = redis.call('HMGET', KEYS[1], 'token', 'holder', 'until')
if found[1] and found[1] ~= ARGV[1] and found[2] ~= ARGV[5] and tonumber(found[3]) > now then
  return {'held', found[2], found[3]}
end
local before = redis.call('HGET', KEYS[1], 'epochs')
local epochs = before and before .. ' ' .. ARGV[2] or ARGV[2]
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'epochs', epochs, 'epoch', ARGV[2], 'holder', ARGV[3],
  'until', string.format('%.0f', now + ARGV[4]), 'confirmed', ARGV[6])
return {'claimed', epochs}
"""
)

# Values: token, lease in ms, confirmed numbers. Returns the holder if the token is another controller's.
_RENEW = (
    _NOW
    + """
local found = redis.call('HMGET', KEYS[1], 'token', 'holder')
if not found[1] then return 'gone' end
if found[1] ~= ARGV[1] then return found[2] end
redis.call('HSET', KEYS[1], 'until', string.format('%.0f', now + ARGV[2]), 'confirmed', ARGV[3])
return 'held'
"""
)

_LOOK = (
    _NOW
    + """
local found = redis.call('HMGET', KEYS[1], 'epoch', 'until', 'confirmed')
if not found[1] or tonumber(found[2]) < now then return {} end
return {found[1], found[3]}
"""
)


class Replaced(BrokerError):
    """Raised if another controller owns the run; the message names that controller's process."""


class LiveController(NamedTuple):
    """What other processes read in Redis about the live controller: its epoch and what it has journaled."""

    epoch: str
    confirmed: Mapping[str, int]
    """Mailbox of a process -> number of the newest event of that process that is journaled."""


class RunOwner:
    """A controller's claim on a run; it ends unless the controller renews it within `lease_s` seconds.

    Operations raise BrokerError if Redis cannot be used.
    """

    def __init__(self, broker: Broker, lease_s: float = LOST_S) -> None:
        self._link, self._key, self._lease_ms = broker.link, broker.key_of("owner"), round(1000 * lease_s)
        self.token = secrets.token_hex(8)
        self._holder = f"process {os.getpid()} on {socket.gethostname()}"

    def claim(self) -> list[str]:
        """Claims the run and starts a new epoch; if there is another owner, waits until its lease has ended.

        Does not wait if the other owner's process is known to be dead; raises Replaced if that owner renews
        its lease meanwhile. An epoch lasts from one claim to the next. Returns the names of the epochs since
        Redis last lost its data, the new epoch last; no message of these epochs was lost.
        """
        epoch, dead, first_until = secrets.token_hex(8), "", 0
        while True:
            values = [self.token, epoch, self._holder, self._lease_ms, dead, pack({})]
            answer, *found = self._link.script(_CLAIM, [self._key], values)
            if answer == b"claimed":
                return found[0].decode().split()
            holder, until = found[0].decode(), int(found[1])
            first_until = first_until or until
            if until > first_until:  # the owner renewed its lease, so it is alive
                raise Replaced(
                    f"another controller ({holder}) already controls this run; let that controller "
                    "continue, or stop it and start this command again"
                )
            dead = holder if is_gone(holder) else ""
            time.sleep(0.0 if dead else 0.1)

    def renew(self, confirmed: Mapping[str, int]) -> bool:
        """Extends the lease, and publishes `LiveController.confirmed` to the run's processes.

        Returns False if the claim is gone because Redis lost its data; the caller must then claim again.
        Raises Replaced if another controller has claimed the run.
        """
        values = [self.token, self._lease_ms, pack(dict(confirmed))]
        answer = self._link.script(_RENEW, [self._key], values).decode()
        if answer in ("held", "gone"):
            return answer == "held"
        raise Replaced(
            f"another controller ({answer}) took over the run, because this one was paused and did not "
            f"renew its lease of {self._lease_ms / 1000:g} s. The other controller continues the run; this "
            "one ends and writes nothing more. Check why this process or its machine was paused"
        )


def look(broker: Broker) -> LiveController | None:
    """Returns the controller that has a valid lease on the run, or None if there is none."""
    found = broker.link.script(_LOOK, [broker.key_of("owner")])
    return LiveController(found[0].decode(), unpack(found[1])) if found else None
