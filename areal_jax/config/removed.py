"""Config keys of earlier versions: what is used instead, and what an old run's config says or leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Removed(NamedTuple):
    instead: str
    """What replaces the key, for messages."""
    now: Any = None
    """The value by which the code now works; a run that was started with another one is refused."""
    renamed: str | None = None
    """The key that has the value now."""
    is_ignored: bool = False
    """Whether no value of the key changes what a run computes, so that an old run may have any."""


def _renamed(key: str) -> Removed:
    return Removed(f"set {key}", renamed=key)


def _given(instead: str) -> Removed:
    return Removed(instead, is_ignored=True)


_AXIS = Removed("no array is sharded over this axis; raise fsdp or tensor of the mesh", now=1)

REMOVED: Mapping[str, Removed] = {
    "algorithm.kl.allow_biased": Removed(
        "set algorithm.kl.estimator to k1 with algorithm.kl.place=reward, or to k2 or k3 with loss", now=False
    ),
    "control.placement_every_s": Removed("samples are placed again every 2 seconds; leave it out", now=2.0),
    "trainer.prompts": Removed("samples in one row always share their prompt; leave it out", now="shared"),
    "trainer.supervised_steps": _renamed("trainer.supervised.steps"),
    "trainer.supervised_tasks": _renamed("trainer.supervised.tasks"),
    "trainer.supervised_learning_rate": _renamed("trainer.supervised.learning_rate"),
    "trainer.supervised_batch": _renamed("trainer.supervised.batch"),
    **{f"{owner}.mesh.context": _AXIS for owner in ("trainer", "runtime.reference", "runtime.teacher")},
    "launch.machine": _given("set MACHINE (gcloud) or ACCELERATOR (gke) in the environment"),
    "launch.cpus": _given("give --cpus-per-task=N after -- (slurm), or set CPUS in the environment (gke)"),
    "launch.hours": _given(
        "give --time=HOURS:00:00 after -- (slurm), or set MINUTES (gcloud) or LIMIT_SECONDS (gke) in the "
        "environment"
    ),
    "launch.plain": _given("submit launchers/slurm.sbatch by sbatch"),
    "launch.setup": _given("set AREAL_JAX_SETUP (slurm) or SETUP (gcloud) in the environment"),
    "launch.image": _given("set AREAL_JAX_IMAGE (slurm) or IMAGE (gcloud, gke) in the environment"),
    "launch.zone": _given("set ZONE in the environment"),
    "launch.volume": _given("set VOLUME (gcloud) or CLAIM (gke) in the environment"),
    "launch.options": _given("give the options after --: `areal-jax launch slurm CONFIG -- --partition=gpu`"),
}

ADDED: Mapping[str, Any] = {"model.activations": "float32"}
"""Key that earlier versions did not have -> the value by which they worked, where it is not the default."""
