"""Submits a run to Slurm: slurm.sbatch, or slurm_split.sbatch if hosts need machines of another kind."""

from __future__ import annotations

import os
import shlex
from math import ceil
from pathlib import Path

from areal_jax.cluster.launch.submission import Submission, launcher_file
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import LaunchError, Plan

MOUNTS = "AREAL_JAX_MOUNTS"
"""Environment variable: what the container of launch.image mounts, in pyxis's syntax."""

BETWEEN = ":"
"""Separator in launch.options, as for sbatch: options after the separator apply to the hosts' machines."""


def submission(plan: Plan, launch: Launch) -> Submission:
    """Returns what `areal-jax launch slurm` has to run: the sbatch command and its environment variables.

    `plan`: the run's processes and their machines; `launch`: the run's config and folder. Raises LaunchError
    if the run uses TPUs.
    """
    c = plan.config.launch
    if plan.accelerator == "tpu":
        raise LaunchError(
            "launch.accelerator=tpu: Slurm does not schedule TPUs; use `areal-jax launch gcloud` or gke"
        )
    trainer, hosts = range(plan.trainer_machines), range(plan.trainer_machines, plan.machines)
    parts = [range(plan.machines)]
    if (
        hosts
        and not c.plain
        and (BETWEEN in c.options or plan.devices_on(*trainer) != plan.devices_on(*hosts))
    ):
        parts = [trainer, hosts]
    # As for sbatch, ":" separates the options of the components; without it both get the same.
    first, _, second = " ".join(map(shlex.quote, c.options)).partition(f" {BETWEEN} ")
    own = [shlex.split(first), shlex.split(second or first)]
    log = f"--output={launch.folder}/logs/slurm-%j.log"
    words = ["sbatch", f"--job-name={plan.name}", log]
    for number, machines in enumerate(parts):
        words += [*([BETWEEN] if number else []), *_resources(plan, machines), *own[number]]
    script = launcher_file("slurm.sbatch" if len(parts) == 1 else "slurm_split.sbatch")
    env = {"AREAL_JAX_SETUP": c.setup, "AREAL_JAX_IMAGE": c.image or ""}
    if c.image and not launch.folder.absolute().is_relative_to(Path.cwd()):
        # The script mounts the folder from which it is submitted.
        own, others = f"{launch.folder.absolute()}:{launch.folder.absolute()}", os.environ.get(MOUNTS)
        env[MOUNTS] = f"{own},{others}" if others else own
    return Submission(
        "sbatch",
        [[*words, str(script), str(launch.effective), f"run.dir={launch.folder}"]],
        {key: value for key, value in env.items() if value},
        after=f"squeue --me; tail -F {shlex.quote(str(launch.folder))}/logs/*.log",
    )


def _resources(plan: Plan, machines: range) -> list[str]:
    """Returns sbatch's options for time, nodes, CPUs and GPUs of one component of the (heterogeneous) job.

    `machines`: indices of the component's machines among all machines of the plan.
    """
    launch = plan.config.launch
    asked = [f"--time={ceil(launch.hours * 60)}", f"--nodes={len(machines)}"]
    asked += ["--exclusive", "--mem=0"] if launch.cpus is None else [f"--cpus-per-task={launch.cpus}"]
    return [*asked, f"--gpus-per-node={plan.devices_on(*machines)}"] if plan.accelerator == "gpu" else asked
