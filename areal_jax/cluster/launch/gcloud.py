"""Submits a run to Google Cloud: gcloud_gpu.sh starts it on new VMs, gcloud_tpu.sh on new TPU slices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from areal_jax.cluster.launch.submission import Submission, folder_on_volume, launcher_file, settings_from
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import LaunchError, Plan

NUMBER_PER_DEVICE = {"v5litepod": 1, "v6e": 1, "v5p": 2, "v4": 2}
"""TPU family -> by how much one jax device (chip) raises the number in the name of a TPU type, such as
v5litepod-8: by 1, or by 2 in families that count cores.
"""


def submission(
    plan: Plan, launch: Launch, options: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Returns what `areal-jax launch gcloud` has to run: the command and its environment variables.

    `plan`: the run's processes and their machines; the rest as in `prepare`. Raises LaunchError if ZONE,
    MACHINE, IMAGE or VOLUME is missing or not valid.
    """
    is_tpu, folder = plan.accelerator == "tpu", folder_on_volume(plan)
    given = settings_from(environment, ("ZONE", "MACHINE", "IMAGE", "VOLUME"), ("SETUP", "MINUTES"))
    env = {**given, "NAME": plan.name, "RUN": str(folder)}
    if is_tpu:
        family = env.pop("MACHINE")
        env |= {
            "TRAINER_TYPE": _tpu_type(family, plan.config.trainer_devices),
            "TRAINER_WORKERS": str(plan.trainer_machines),
            "HOST_TYPE": _tpu_type(family, plan.config.launch.machine_devices),
            "HOSTS": str(plan.generation_machines),
        }
    elif "/" not in env["IMAGE"]:
        raise LaunchError(f"IMAGE={env['IMAGE']} is not a VM image; name one as PROJECT/FAMILY")
    else:
        env |= {"MACHINES": str(plan.machines)}
    script = launcher_file("gcloud_tpu.sh" if is_tpu else "gcloud_gpu.sh")
    ssh = "gcloud compute tpus tpu-vm ssh" if is_tpu else "gcloud compute ssh"
    first = f"{plan.name}-trainer --worker=0" if is_tpu else f"{plan.name}-0"
    return Submission(
        "gcloud",
        [["bash", str(script), str(launch.effective), *options]],
        env,
        after=f"{ssh} {first} --zone={env['ZONE']} --command='tail -F {folder}/logs/*.log'",
    )


def _tpu_type(family: str, devices: int) -> str:
    if family not in NUMBER_PER_DEVICE:
        raise LaunchError(
            f"MACHINE={family} is not a TPU family; choose one of {', '.join(NUMBER_PER_DEVICE)}"
        )
    return f"{family}-{devices * NUMBER_PER_DEVICE[family]}"
