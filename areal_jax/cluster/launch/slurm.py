"""Submits a run to Slurm: slurm.sbatch, or slurm_split.sbatch if hosts need machines of another kind."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_jax.cluster.launch.submission import Submission, launcher_file
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import LaunchError, Plan

IMAGE, MOUNTS = "AREAL_JAX_IMAGE", "AREAL_JAX_MOUNTS"
"""Environment variables of the scripts: a container's image, and what it mounts, in pyxis's syntax."""

BETWEEN = ":"
"""Separator of options, as for sbatch: options after the separator apply to the hosts' machines."""


def submission(
    plan: Plan, launch: Launch, options: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Returns what `areal-jax launch slurm` has to run: the sbatch command and its environment variables.

    `plan`: the run's processes and their machines; the rest as in `prepare`. The command inherits the
    environment, which its script reads. Raises LaunchError if the run uses TPUs, or if options are given for
    hosts that share the trainer's machine.
    """
    if plan.accelerator == "tpu":
        raise LaunchError(
            "launch.accelerator=tpu: Slurm does not schedule TPUs; use `areal-jax launch gcloud` or gke"
        )
    trainer, hosts = range(plan.trainer_machines), range(plan.trainer_machines, plan.machines)
    if BETWEEN in options and not hosts:
        raise LaunchError(
            f"'{BETWEEN}' among the options: trainer and hosts share one machine; leave '{BETWEEN}' and the "
            "options after it out"
        )
    parts = [range(plan.machines)]
    if hosts and (BETWEEN in options or plan.devices_on(*trainer) != plan.devices_on(*hosts)):
        parts = [trainer, hosts]
    # As for sbatch, ":" separates the options of the components; without it both get the same.
    at = options.index(BETWEEN) if BETWEEN in options else None
    own = [options, options] if at is None else [options[:at], options[at + 1 :]]
    log = f"--output={launch.folder}/logs/slurm-%j.log"
    words = ["sbatch", f"--job-name={plan.name}", log]
    for number, machines in enumerate(parts):
        words += [*([BETWEEN] if number else []), *_resources(plan, machines, own[number])]
    script = launcher_file("slurm.sbatch" if len(parts) == 1 else "slurm_split.sbatch")
    env: dict[str, str] = {}
    if environment.get(IMAGE) and not launch.folder.absolute().is_relative_to(Path.cwd()):
        # The script mounts the folder from which it is submitted.
        mounted, others = f"{launch.folder.absolute()}:{launch.folder.absolute()}", environment.get(MOUNTS)
        env[MOUNTS] = f"{mounted},{others}" if others else mounted
    return Submission(
        "sbatch",
        [[*words, str(script), str(launch.effective), f"run.dir={launch.folder}"]],
        env,
        after=f"squeue --me; tail -F {shlex.quote(str(launch.folder))}/logs/*.log",
    )


def _resources(plan: Plan, machines: range, own: Sequence[str]) -> list[str]:
    """Returns sbatch's options for nodes, CPUs and GPUs of one component of the (heterogeneous) job.

    `machines`: indices of the component's machines among all machines of the plan. `own`: the user's options,
    which come last; without a number of CPUs among them, the component gets whole nodes.
    """
    are_whole = not any(word.startswith(("--cpus-per-", "-c")) for word in own)
    asked = [f"--nodes={len(machines)}", *(("--exclusive", "--mem=0") if are_whole else ())]
    if plan.accelerator == "gpu":
        asked.append(f"--gpus-per-node={plan.devices_on(*machines)}")
    return [*asked, *own]
