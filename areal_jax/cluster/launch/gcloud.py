"""Submits a run to Google Cloud: gcloud_gpu.sh starts it on new VMs, gcloud_tpu.sh on new TPU slices."""

from __future__ import annotations

from math import ceil

from areal_jax.cluster.launch.submission import Submission, folder_on_volume, launcher_file
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import LaunchError, Plan

NUMBER_PER_DEVICE = {"v5litepod": 1, "v6e": 1, "v5p": 2, "v4": 2}
"""TPU family -> by how much one jax device (chip) raises the number in the name of a TPU type, such as
v5litepod-8: by 1, or by 2 in families that count cores.
"""


def submission(plan: Plan, launch: Launch) -> Submission:
    """Returns what `areal-jax launch gcloud` has to run: the command and its environment variables.

    `plan`: the run's processes and their machines; `launch`: the run's config and folder. Raises LaunchError
    if launch.zone, machine, image or volume is missing or not valid.
    """
    c, is_tpu = plan.config.launch, plan.accelerator == "tpu"
    for key in ("zone", "machine", "image"):
        if getattr(c, key) is None:
            raise LaunchError(
                f"launch.{key} is not set, but gcloud needs it to create machines; set it (`areal-jax "
                f"config launch.{key}` shows examples)"
            )
    if not is_tpu and "/" not in str(c.image):
        raise LaunchError(f"launch.image={c.image} is not a VM image; name one as PROJECT/FAMILY")
    folder = folder_on_volume(plan)
    env = {
        "NAME": plan.name,
        "ZONE": str(c.zone),
        "IMAGE": str(c.image),
        "VOLUME": str(c.volume),
        "RUN": str(folder),
        "SETUP": c.setup,
    }
    if is_tpu:
        env |= {
            "TRAINER_TYPE": _tpu_type(plan, plan.config.trainer_devices),
            "TRAINER_WORKERS": str(plan.trainer_machines),
            "HOST_TYPE": _tpu_type(plan, c.machine_devices),
            "HOSTS": str(plan.generation_machines),
        }
    else:
        env |= {"MACHINE": str(c.machine), "MACHINES": str(plan.machines), "MINUTES": str(ceil(c.hours * 60))}
    script = launcher_file("gcloud_tpu.sh" if is_tpu else "gcloud_gpu.sh")
    ssh = "gcloud compute tpus tpu-vm ssh" if is_tpu else "gcloud compute ssh"
    first = f"{plan.name}-trainer --worker=0" if is_tpu else f"{plan.name}-0"
    return Submission(
        "gcloud",
        [["bash", str(script), str(launch.effective), *c.options]],
        env,
        after=f"{ssh} {first} --zone={c.zone} --command='tail -F {folder}/logs/*.log'",
    )


def _tpu_type(plan: Plan, devices: int) -> str:
    family = str(plan.config.launch.machine)
    if family not in NUMBER_PER_DEVICE:
        raise LaunchError(
            f"launch.machine={family} is not a TPU family; choose one of {', '.join(NUMBER_PER_DEVICE)}"
        )
    return f"{family}-{devices * NUMBER_PER_DEVICE[family]}"
