"""Processes that make up one trainer mesh: how one joins the others, and how it leaves.

Every wait has a deadline. A collective that waits for a dead process cannot be interrupted from Python: jax
ends this process once it hears that another has died, and `runtime.watchdog` one that hears nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax

from areal_jax.types import ArealError

HEARTBEAT_S = 30
"""A process that is silent for so long is dead, and ends the others."""
SHUTDOWN_S = 20
"""How long one that leaves waits for the others to leave too."""


@contextmanager
def joined(
    coordinator: str, processes: int, index: int, deadline_s: int = 300, heartbeat_s: int = HEARTBEAT_S
) -> Iterator[None]:
    """Be process `index` of `processes`; `coordinator` is host:port of process 0. Before jax has any device.

    Inside, `jax.devices()` are those of all processes, in their order. On CPUs collectives go through Gloo,
    and each process has as many devices as `jax_num_cpu_devices` says. One process alone joins nobody, and
    needs no coordinator. Process 0 listens at the coordinator's address and no other; there is no password to
    it, so that address must be one that only the trainer's machines reach.

    One that leaves by an error does not wait for the others. Raises ArealError where they do not come by the
    deadline, or the numbers cannot be.
    """
    if not 0 <= index < processes:
        raise ArealError(f"process {index} of {processes} processes: give an index from 0 to {processes - 1}")
    if processes == 1:
        yield
        return
    if ":" not in coordinator:
        raise ArealError(f"the coordinator {coordinator!r} has no port; give it as host:port")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler of SIGTERM waits for all processes to agree on a step to stop at: minutes, where one hangs.
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
        jax.devices()  # each learns of the others'
    except RuntimeError as error:
        raise ArealError(
            f"process {index} of {processes} could not join the others at {coordinator} within {deadline_s} "
            f"s: {str(error).splitlines()[0]}. See whether all were started, and can reach that address"
        ) from error
    yield
    jax.distributed.shutdown()
