"""The `launch` section: on which machines the processes of a launched run are placed.

No key of this section changes what is trained, so a resumed run may change them all. What only a scheduler
needs, such as a partition or a time limit, is no key: it is given to `areal-jax launch` beside the config.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_jax.config.sections import Section


class LaunchConfig(Section):
    accelerator: Literal["auto", "gpu", "tpu", "cpu"] = "auto"
    """Device type of trainer and hosts. auto: GPUs, or the CPUs for a run on one machine without GPUs."""
    machine_devices: int = Field(default=8, ge=1)
    """Number of accelerators in one machine. A run that needs more gets separate machines for trainer and
    hosts.
    """
    port: int = Field(default=7600, ge=1024, le=65534)
    """slurm, gcloud, gke: port of Redis on the first machine; the trainer's processes use port + 1. Not read
    by local, which chooses free ports.
    """
    restarts: int = Field(default=3, ge=0)
    """Number of times that a failed process is restarted; ten minutes without a failure reset the count."""
