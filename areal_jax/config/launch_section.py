"""The `launch` section: on which machines `areal-jax launch` puts the processes of a run.

No key of this section changes what is trained, so a resumed run may change them all.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_jax.config.sections import Section


class LaunchConfig(Section):
    accelerator: Literal["auto", "gpu", "tpu", "cpu"] = "auto"
    """Device type of trainer and hosts. auto: GPUs, or the CPUs for a run on one machine without GPUs."""
    machine: str | None = None
    """Read by gcloud and gke. gcloud: a machine type such as a3-highgpu-8g, or a TPU family such as
    v5litepod. gke: the accelerator's node label, such as nvidia-h100-80gb or tpu-v5-lite-podslice.
    """
    machine_devices: int = Field(default=8, ge=1)
    """Number of accelerators in one machine. A run that needs more gets separate machines for trainer and
    hosts.
    """
    cpus: int | None = Field(default=None, ge=1)
    """slurm, gke: CPU cores to request per machine. None: whole machines (slurm), at least 1 core (gke)."""
    hours: float = Field(default=24.0, gt=0)
    """Time limit in hours, after which the machines are released even if the run is not complete."""
    plain: bool = False
    """slurm: submit one plain job even if trainer and hosts need machines of different sizes, for sites
    without heterogeneous jobs. Every machine is then as large as the largest one needed.
    """
    setup: str = ""
    """slurm, gcloud: shell commands to run before the processes start, such as `source venv/bin/activate`."""
    image: str | None = None
    """The image in which processes run: a container image (slurm with pyxis, gke), PROJECT/FAMILY of a VM
    image (gcloud with GPUs), or a runtime version such as v2-alpha-tpuv5-lite (gcloud with TPUs).
    """
    zone: str | None = None
    """gcloud: the zone in which machines are created."""
    volume: str | None = None
    """The file system that all machines share: HOST:/EXPORT of NFS (gcloud) or a PersistentVolumeClaim (gke).
    """
    port: int = Field(default=7600, ge=1024, le=65534)
    """slurm, gcloud, gke: port of Redis on the first machine; the trainer's processes use port + 1. Not read
    by local, which chooses free ports.
    """
    restarts: int = Field(default=3, ge=0)
    """Number of times that a failed process is restarted; ten minutes without a failure reset the count."""
    options: list[str] = Field(default_factory=list)
    """Further options, passed on unchanged to sbatch (slurm), the create command (gcloud) or kubectl (gke).
    slurm: options after an item ":" apply to the hosts' machines.
    """
