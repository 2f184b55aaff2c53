"""The `launch` section: where `areal-jax launch` puts the processes of a run. Nothing in it changes what is
trained, so every key may be another when a run goes on.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_jax.sections import Section


class LaunchConfig(Section):
    accelerator: Literal["auto", "gpu", "tpu", "cpu"] = "auto"
    """What trainer and hosts compute on. auto: what this machine has (local), GPUs otherwise."""
    machine: str | None = None
    """gcloud: machine type such as a3-highgpu-8g, or TPU family such as v5litepod; gke: the node label of the
    accelerator, such as nvidia-h100-80gb or tpu-v5-lite-podslice.
    """
    machine_devices: int = Field(default=8, ge=1)
    """Accelerators of a machine. What fits on one machine runs on one; otherwise trainer and hosts have
    machines of their own.
    """
    cpus: int | None = Field(default=None, ge=1)
    """slurm, gke: cores to ask for, a machine (slurm) or a process (gke); whole machines unless given."""
    hours: float = Field(default=24.0, gt=0)
    """Longest that machines are held."""
    plain: bool = False
    """slurm: two plain jobs, trainer and hosts, where the site takes no heterogeneous one."""
    setup: str = ""
    """slurm, gcloud: shell lines before the processes start, such as `source venv/bin/activate`."""
    image: str | None = None
    """What processes start from: a container image (slurm with pyxis, gke), PROJECT/FAMILY of a VM image
    (gcloud with GPUs), or a runtime version such as v2-alpha-tpuv5-lite (gcloud with TPUs).
    """
    zone: str | None = None
    """gcloud: where machines are made."""
    volume: str | None = None
    """The file system that all machines share: HOST:/EXPORT (gcloud: NFS), a PersistentVolumeClaim (gke)."""
    port: int = Field(default=7600, ge=1024, le=65534)
    """slurm, gcloud, gke: Redis listens at this port of the first machine, and the trainer's processes meet
    at the next one. local takes free ones.
    """
    restarts: int = Field(default=3, ge=0)
    """How often a process that failed is started again; ten minutes of health begin the count anew."""
    options: list[str] = Field(default_factory=list)
    """Further options as they are: of sbatch, of gcloud's create, or of kubectl."""
