"""The processes that make up one trainer mesh: how a process joins and leaves the others.

Every wait has a deadline. Python cannot interrupt a collective that waits for a dead process. Therefore jax
ends a process when it learns that another process of the group has died, and `cluster.watchdog` kills a
process that is stuck.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from areal_jax.types import ArealError

HEARTBEAT_S = 30
"""Seconds without a heartbeat of one process to jax's coordination service until jax ends all processes."""
SHUTDOWN_S = 20
"""Seconds that a process that leaves the group waits for the other processes to leave too."""


@contextmanager
def joined(
    coordinator: str, processes: int, index: int, deadline_s: int = 300, heartbeat_s: int = HEARTBEAT_S
) -> Iterator[None]:
    """Makes this process number `index` of a jax cluster of `processes` processes while the block runs.

    `coordinator`: host:port of process 0; unused if `processes` is 1. Must be entered before jax initializes
    its devices. Inside the block `jax.devices()` are the devices of all processes, in the order of their
    indices. On CPUs, collectives use Gloo, and each process has `jax_num_cpu_devices` devices. Process 0
    listens at the coordinator's address without a password, so only the trainer's machines should reach it.

    `heartbeat_s`: seconds without a heartbeat of one process after which jax ends all processes. If the block
    raises, this process does not wait for the others. Raises ArealError if `index` or `coordinator` is
    invalid, or if the other processes do not join within `deadline_s` seconds.
    """
    if not 0 <= index < processes:
        raise ArealError(
            f"--name=trainer-{index}: there are {processes} trainer processes (runtime.trainer_processes), "
            f"so the index must be from 0 to {processes - 1}"
        )
    if processes == 1:
        yield
        return
    if ":" not in coordinator:
        raise ArealError(f"--coordinator={coordinator!r} has no port; write it as HOST:PORT")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Asynchronous dispatch runs programs without common data at the same time, in another order in each
    # process: Gloo then takes one program's collective for another's and aborts ("collective mismatch").
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # The service's SIGTERM handler waits until all processes agree on a last step: minutes, if one hangs.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            index,
            initialization_timeout=deadline_s,
            heartbeat_timeout_seconds=heartbeat_s,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=coordinator,
        )
        jax.devices()  # a collective: each process learns of the others' devices
    except RuntimeError as error:
        raise ArealError(
            f"trainer process {index} of {processes} could not join the others at {coordinator} within "
            f"{deadline_s} s: {str(error).splitlines()[0]}. Check that all trainer processes run and can "
            "reach that address"
        ) from error
    # Not in a finally: after an error this process does not wait for the others, and ends with its status.
    yield
    jax.distributed.shutdown()
