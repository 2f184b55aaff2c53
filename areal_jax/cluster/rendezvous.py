"""How the node agents of a run find each other: through a file in the run's folder, and through Redis.

The agent of rank 0, the head, writes a token, a random string, into Redis, and a file with the token and the
address of Redis into the run's folder. If another agent finds in Redis a token that is not in the file, or no
token, then it has read the file of an earlier head (a shared file system may show old files for a while), and
it reads the file again. The agents share one hash in Redis (see `Situation`).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from areal_jax.assembly.run_folder import SECRET_FILE
from areal_jax.cluster.placement import LaunchError
from areal_jax.cluster.redis_link import Link
from areal_jax.file_errors import writing
from areal_jax.types import ArealError

T = TypeVar("T")

HEAD_FILE = "launch/head.json"
CONNECT_S = 5.0
MEET_S = 600.0
"""Seconds that an agent waits for the file that the head, the agent of rank 0, writes. Long, because gcloud
creates machines one after the other.
"""
POLL_S = 0.5

# Two members that die of one cause report the same generation: it is raised once.
_NEXT_GENERATION = """
local now = tonumber(redis.call('HGET', KEYS[1], 'generation') or ARGV[1])
if now <= tonumber(ARGV[1]) then
  now = ARGV[1] + 1
  redis.call('HSET', KEYS[1], 'generation', now)
end
return now
"""


class AwayError(ArealError):
    """Raised if Redis does not answer or refuses a request; the caller may try again."""


@dataclass(frozen=True)
class Place:
    """This machine's rank and address, and the number of machines of the run."""

    rank: int
    machines: int | None
    """Number of machines according to the scheduler; None if the scheduler does not give it."""
    address: str
    """The address by which the other machines reach this one."""


@dataclass(frozen=True)
class Situation:
    """The state that the node agents of a run share in Redis.

    `token`: a random string that names this start of the head, the agent of rank 0; None after Redis lost its
    data. `generation`: a number that rises each time the trainer's processes must restart. `agents`: the
    ranks of the agents that have joined and not ended.
    """

    token: str | None
    generation: int
    status: int | None
    """The run's exit status; None while the run has not ended."""
    agents: frozenset[int]


class Meeting:
    """One node agent's access to the state that all agents of the run share in Redis (`Situation`).

    Operations raise AwayError at once if Redis does not answer.
    """

    def __init__(self, url: str, run: str, rank: int, token: str, coordinator: str, secret: str) -> None:
        self.url, self.token, self.coordinator, self.secret = url, token, coordinator, secret
        self.rank = rank
        self._key = f"areal:{{{run}}}:agents"
        self._link = Link(url, secret, CONNECT_S, AwayError)

    def _run(self, work: Callable[[Any], T]) -> T:
        # No retries: an agent that waits here does not watch its processes.
        return self._link.run(work, 0.0)

    def open(self) -> None:
        """Writes to Redis the token by which agents recognise this head (the agent of rank 0).

        Deletes the run's exit status and the agents' ranks that an earlier head left in Redis.
        """
        self._link.run(self._opened)

    def _opened(self, client: Any) -> None:
        with client.pipeline() as pipe:
            # The generation stays: agents that survived the last head still have members of it.
            for field in client.hkeys(self._key):
                if field.decode() != "generation":
                    pipe.hdel(self._key, field)
            pipe.hset(self._key, "head", self.token)
            pipe.execute()

    def close(self) -> None:
        """Deletes the agents' shared state; only rank 0 calls this, after the other agents have ended."""
        self._run(lambda client: client.delete(self._key))

    def join(self) -> None:
        token = {"head": self.token} if self.rank == 0 else {}
        here = {f"agent:{self.rank}": "here", **token}
        self._run(lambda client: client.hset(self._key, mapping=here))

    def leave(self) -> None:
        self._run(lambda client: client.hdel(self._key, f"agent:{self.rank}"))

    def end(self, status: int) -> None:
        """Publishes the run's exit status to all agents, which then end their processes."""
        self._run(lambda client: client.hset(self._key, "status", status))

    def next_generation(self, seen: int) -> int:
        """Increases the generation by 1, so that every agent restarts its processes of the trainer's group.

        `seen`: the generation in which the failed processes were started. If the generation in Redis is
        already above `seen`, another agent has increased it, and it stays. Returns the resulting generation.
        """
        return int(self._link.script(_NEXT_GENERATION, [self._key], [seen], 0.0))

    def situation(self) -> Situation:
        found = self._run(lambda client: client.hgetall(self._key))
        plain = {key.decode(): value.decode() for key, value in found.items()}
        agents = frozenset(int(key.removeprefix("agent:")) for key in plain if key.startswith("agent:"))
        status = plain.get("status")
        return Situation(
            plain.get("head"),
            int(plain.get("generation", 0)),
            None if status is None else int(status),
            agents,
        )


def lead(folder: Path, url: str, run: str, coordinator: str, secret: str) -> Meeting:
    """Opens the agents' shared state in Redis, as the agent of rank 0; returns the access to this state.

    Also writes the file HEAD_FILE, by which the other agents `find` the state. `url`: the url of the run's
    Redis, which must be running. `coordinator`: host:port of trainer process 0.
    """
    meeting = Meeting(url, run, 0, secrets.token_hex(8), coordinator, secret)
    meeting.open()
    path = folder / HEAD_FILE
    new = path.with_suffix(".new")
    with writing(path):
        new.write_text(json.dumps({"url": url, "token": meeting.token, "coordinator": coordinator}))
        new.replace(path)  # atomic: no reader sees a partial file
    return meeting


def find(folder: Path, run: str, rank: int, deadline_s: float = MEET_S) -> Meeting:
    """Waits for rank 0's file with the address of Redis, then joins the run's node agents as agent `rank`.

    Returns the access to the state that the agents share in Redis. Raises LaunchError if no file
    that names a running Redis of this run is found within `deadline_s` seconds.
    """
    end_s, seen = time.monotonic() + deadline_s, "the file is missing"
    while time.monotonic() < end_s:
        with suppress(FileNotFoundError):
            head = json.loads((folder / HEAD_FILE).read_text())
            secret = (folder / SECRET_FILE).read_text().strip()
            meeting = Meeting(run=run, rank=rank, secret=secret, **head)
            seen = (
                f"the Redis at {meeting.url} belongs to another launch of the run, or this launch has ended"
            )
            try:
                found = meeting.situation()
                if found.token == meeting.token and found.status is None:
                    meeting.join()
                    return meeting
            except AwayError as error:  # refused, or away: the address of an earlier head
                seen = str(error)
        time.sleep(POLL_S)
    raise LaunchError(
        f"rank {rank} found no head (the node agent of rank 0) within {deadline_s:g} s through "
        f"{folder / HEAD_FILE}: {seen}. See the output of rank 0's agent; check that all machines share "
        "this folder and can reach rank 0's ports"
    )


# --- this machine -------------------------------------------------------------------------------------------


def place(
    rank: int | None, first_rank: int, machines: int | None, address: str, env: Mapping[str, str] = os.environ
) -> Place:
    """Returns this machine's rank, address and number of machines; `env`: the scheduler's variables.

    `rank` is by default `first_rank` plus SLURM_PROCID (Slurm) or JOB_COMPLETION_INDEX (Kubernetes);
    `first_rank` is the rank of the job's first machine. `machines` is by default SLURM_STEP_NUM_TASKS, else
    unknown (None). Without a scheduler and without `rank` and `machines`, this machine is the only one. If
    `address` is "", an address of this machine is found.
    """
    # Slurm numbers the tasks of a heterogeneous step through both components, in their order.
    number = env.get("SLURM_PROCID") or env.get("JOB_COMPLETION_INDEX")
    if rank is None:
        rank = first_rank + int(number) if number else 0
    if machines is None and (count := env.get("SLURM_STEP_NUM_TASKS")):
        machines = int(count)
    elif machines is None and not number and rank == 0:
        machines = 1
    if machines == 1 and not address:
        address = "127.0.0.1"
    return Place(rank, machines, address or _own_address(env))


def _own_address(env: Mapping[str, str]) -> str:
    """Returns an address at which other machines can reach this one.

    It is Slurm's SLURM_LAUNCH_NODE_IPADDR if this machine has that address, else the address of the network
    interface of the default route.
    """
    with suppress(KeyError, OSError), socket.socket() as probe:
        known = env["SLURM_LAUNCH_NODE_IPADDR"]
        probe.bind((known, 0))  # refused for an address of another machine
        return known
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address reserved for documentation; nothing is sent
        return probe.getsockname()[0]
    return socket.gethostbyname(socket.gethostname())
