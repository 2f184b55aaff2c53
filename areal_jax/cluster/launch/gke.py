"""Submits a run to GKE: fills in and applies gke/gpu.yaml or tpu.yaml, a JobSet with one pod per machine."""

from __future__ import annotations

from string import Template

from areal_jax.cluster.launch.submission import Submission, folder_on_volume, launcher_file
from areal_jax.cluster.launched import Launch
from areal_jax.cluster.placement import LaunchError, Plan

JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"

TWO_AXES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
THREE_AXES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
TOPOLOGY = {
    "tpu-v4-podslice": THREE_AXES,
    "tpu-v5p-slice": THREE_AXES,
    "tpu-v5-lite-podslice": TWO_AXES,
    "tpu-v6e-slice": TWO_AXES,
}
"""Node label gke-tpu-accelerator -> chips of a slice -> the slice's node label gke-tpu-topology."""


def submission(plan: Plan, launch: Launch) -> Submission:
    """Returns what `areal-jax launch gke` has to run: the kubectl commands and the manifest of the JobSet.

    `plan`: the run's processes and their machines; `launch`: the run's config and folder. Raises LaunchError
    if launch.image, machine or volume is missing or not valid, or launch.setup is set.
    """
    c = plan.config.launch
    if c.image is None:
        raise LaunchError(
            "launch.image is not set, but pods need an image; give one built from launchers/Containerfile"
        )
    if c.setup:
        raise LaunchError(
            f"launch.setup={c.setup!r} works with slurm and gcloud only; leave launch.setup out, and put "
            "what its commands do into launch.image"
        )
    if c.machine is None or plan.accelerator == "cpu":
        raise LaunchError(
            f"launch.machine={c.machine} with launch.accelerator={plan.accelerator}: GKE finds nodes by "
            "their accelerator's label; set launch.machine to such a label (nvidia-h100-80gb), and "
            "launch.accelerator to gpu or tpu"
        )
    manifest = "tpu.yaml" if plan.accelerator == "tpu" else "gpu.yaml"
    text = Template(launcher_file(f"gke/{manifest}").read_text()).substitute(_settings(plan))
    kubectl, name = ["kubectl", *c.options], plan.name
    jobset = str(launch.folder / "launch" / manifest)
    return Submission(
        "kubectl",
        [
            # `create` refuses a name in use, and the jobs of an existing JobSet cannot change.
            [*kubectl, "delete", "jobset,configmap", name, "--ignore-not-found", "--wait"],
            [*kubectl, "create", "configmap", name, f"--from-file=config.yaml={launch.effective}"],
            [*kubectl, "apply", f"--filename={jobset}"],
        ],
        files={manifest: text},
        after=f"kubectl get jobset,pods; kubectl logs --follow --selector={JOBSET_LABEL}={name}",
    )


def _settings(plan: Plan) -> dict[str, str]:
    c = plan.config.launch
    settings = {
        "NAME": plan.name,
        "IMAGE": str(c.image),
        "RUN": str(folder_on_volume(plan)),
        "CLAIM": str(c.volume),
        "ACCELERATOR": str(c.machine),
        "DEVICES": str(plan.devices_on(0)),
        "CPUS": str(c.cpus or 1),
        "LIMIT_SECONDS": str(round(c.hours * 3600)),
        "RESTARTS": str(c.restarts),
        "MACHINES": str(plan.machines),
    }
    if plan.accelerator == "tpu":
        settings |= {
            "TRAINER_MACHINES": str(plan.trainer_machines),
            "HOSTS": str(plan.generation_machines),
            "TRAINER_TOPOLOGY": _topology(plan, plan.config.trainer_devices),
            "HOST_TOPOLOGY": _topology(plan, plan.config.runtime.host_tensor),
        }
    return settings


def _topology(plan: Plan, devices: int) -> str:
    machine = plan.config.launch.machine
    if machine not in TOPOLOGY or devices not in TOPOLOGY[machine]:
        raise LaunchError(
            f"no topology is known for launch.machine={machine} with {devices} chips; choose a machine of "
            f"{', '.join(TOPOLOGY)}, and slices of 4, 8, 16, ... 256 chips (trainer.mesh, "
            "runtime.host_tensor)"
        )
    return TOPOLOGY[machine][devices]
