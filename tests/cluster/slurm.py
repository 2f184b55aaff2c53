"""A Slurm cluster of three nodes on this one machine: munged, slurmctld and three slurmd of a test's own.

Each node is a slurmd of its own name with two cores, so that a heterogeneous job, which wants a machine for
each component, finds them. Everything lies in one folder, listens on free ports, and is ended by its id.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.ports import reserved_ports
from tests.programs import require, require_root

NODES = 3
DEADLINE_S = 600.0
"""Ends a hang."""
PROGRAMS = (
    "munged",
    "slurmctld",
    "slurmd",
    "sbatch",
    "srun",
    "scancel",
    "scontrol",
    "squeue",
    "redis-server",
)

CONF = """\
ClusterName=areal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=2,sched_interval=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=20
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True)
class Slurm:
    folder: Path
    env: Mapping[str, str]
    daemons: Mapping[str, subprocess.Popen]

    def crashed(self) -> list[str]:
        """Daemons that have ended: slurmd 22.05 was seen to, by "malloc(): unaligned tcache chunk"."""
        return [name for name, daemon in self.daemons.items() if daemon.poll() is not None]

    def call(self, *words: str, timeout_s: float = DEADLINE_S) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            words, env=dict(self.env), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ... of a job, or of a component (17+0)."""
        shown = self.call("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)["JobState"]

    def wait_for(self, job: str, *states: str, timeout_s: float = DEADLINE_S) -> str:
        end_s = time.monotonic() + timeout_s
        while (state := self.state(job)) not in states:
            assert not self.crashed(), self.crashed()
            assert time.monotonic() < end_s, f"job {job} is {state}, not {states}\n{self.logs()}"
            time.sleep(0.5)
        return state

    def node_states(self) -> list[str]:
        """idle, allocated, completing, down, ... of each node."""
        return self.call("sinfo", "--noheader", "--Node", "--format=%T").split()

    def logs(self) -> str:
        return "\n".join(
            f"== {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in self.folder.glob("*.log")
        )


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Up, with every node idle, until the block ends."""
    require(*PROGRAMS)
    require_root("slurmd starts jobs as other users")
    with reserved_ports(NODES + 1) as ports, _cluster(folder, ports) as slurm:
        yield slurm


@contextmanager
def _cluster(folder: Path, ports: Sequence[int]) -> Iterator[Slurm]:
    host = socket.gethostname().split(".")[0]
    nodes = "\n".join(
        f"NodeName=n{i + 1} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=2 RealMemory=1000"
        for i in range(NODES)
    )
    (folder / "state").mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, port=ports[NODES], folder=folder, nodes=nodes))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    with ExitStack() as stack:
        stack.enter_context(_munged(folder))
        daemons = {}
        for words in (["slurmctld", "-D"], *(["slurmd", "-D", "-N", f"n{i + 1}"] for i in range(NODES))):
            name = "-".join(words)
            daemons[name] = stack.enter_context(_daemon(words, env, folder / f"{name}.out"))
        slurm = Slurm(folder, env, daemons)
        _await_idle(slurm)
        try:
            yield slurm
        finally:
            subprocess.run(["scancel", "--full", "--user=root"], env=env, timeout=DEADLINE_S, check=False)
            if slurm.crashed():
                _kill_jobs(conf, daemons.values())
            else:
                _await_idle(slurm)


class Clusters:
    """One cluster after the other: a new one where a daemon of the last crashed."""

    def __init__(self, make_folder: Callable[[], Path]) -> None:
        self._make_folder = make_folder
        self._stack = ExitStack()
        self._last: Slurm | None = None

    def sound(self) -> Slurm:
        if self._last is None or self._last.crashed():
            self.close()
            self._last = self._stack.enter_context(slurm_cluster(self._make_folder()))
        return self._last

    def close(self) -> None:
        self._stack.close()
        self._last = None


# --- inside -------------------------------------------------------------------------------------------------


@contextmanager
def _munged(folder: Path) -> Iterator[None]:
    """munged with a key and a socket of its own. It refuses folders that other users may write."""
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    words = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munged.pid",
        f"--log-file={folder}/munged.log",
        f"--seed-file={folder}/munged.seed",
    ]
    with _daemon(words, os.environ, folder / "munged.out"):
        end_s = time.monotonic() + DEADLINE_S
        while not (folder / "munge.socket").exists():
            assert time.monotonic() < end_s, (folder / "munged.out").read_text()
            time.sleep(0.1)
        yield


def _kill_jobs(conf: Path, daemons: Iterable[subprocess.Popen]) -> None:
    """Kill the processes that this cluster left, found by their environment: no daemon will end them."""
    own = {daemon.pid for daemon in daemons}
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            pid = int(environ.parent.name)
            if f"SLURM_CONF={conf}".encode() in environ.read_bytes().split(b"\0") and pid not in own:
                os.kill(pid, signal.SIGKILL)


@contextmanager
def _daemon(words: list[str], env: Mapping[str, str], out: Path) -> Iterator[subprocess.Popen]:
    with out.open("w") as file:
        process = subprocess.Popen(words, env=dict(env), stdout=file, stderr=file, start_new_session=True)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await_idle(slurm: Slurm, timeout_s: float = DEADLINE_S) -> None:
    end_s = time.monotonic() + timeout_s
    seen = ""
    while time.monotonic() < end_s:
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=dict(slurm.env),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        seen = done.stdout + done.stderr
        if done.stdout.split() == ["idle"] * NODES:
            return
        time.sleep(0.5)
    raise AssertionError(f"the nodes are not idle: {seen}\n{slurm.logs()}")
