"""Submits a run to GKE: fills in and applies gke/gpu.yaml or tpu.yaml, a JobSet with one pod per machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from string import Template

from areal_jax.cluster.launch.submission import Submission, folder_on_volume, launcher_file, settings_from
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


def submission(
    plan: Plan, launch: Launch, options: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Returns what `areal-jax launch gke` has to run: the kubectl commands and the manifest of the JobSet.

    `plan`: the run's processes and their machines; the rest as in `prepare`. Raises LaunchError if IMAGE,
    ACCELERATOR or CLAIM is missing or not valid, or if the run uses CPUs.
    """
    if plan.accelerator == "cpu":
        raise LaunchError(
            "launch.accelerator=cpu: GKE finds nodes by their accelerator; set launch.accelerator=gpu or tpu"
        )
    manifest = "tpu.yaml" if plan.accelerator == "tpu" else "gpu.yaml"
    text = Template(launcher_file(f"gke/{manifest}").read_text()).substitute(_settings(plan, environment))
    kubectl, name = ["kubectl", *options], plan.name
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


def _settings(plan: Plan, environment: Mapping[str, str]) -> dict[str, str]:
    settings = {
        "CPUS": "1",
        "LIMIT_SECONDS": str(24 * 3600),
        **settings_from(environment, ("IMAGE", "ACCELERATOR", "CLAIM"), ("CPUS", "LIMIT_SECONDS")),
        "NAME": plan.name,
        "RUN": str(folder_on_volume(plan)),
        "DEVICES": str(plan.devices_on(0)),
        "RESTARTS": str(plan.config.launch.restarts),
        "MACHINES": str(plan.machines),
    }
    if plan.accelerator == "tpu":
        label = settings["ACCELERATOR"]
        settings |= {
            "TRAINER_MACHINES": str(plan.trainer_machines),
            "HOSTS": str(plan.generation_machines),
            "TRAINER_TOPOLOGY": _topology(label, plan.config.trainer_devices),
            "HOST_TOPOLOGY": _topology(label, plan.config.runtime.host_tensor),
        }
    return settings


def _topology(label: str, devices: int) -> str:
    if label not in TOPOLOGY or devices not in TOPOLOGY[label]:
        raise LaunchError(
            f"no topology is known for ACCELERATOR={label} with {devices} chips; choose one of "
            f"{', '.join(TOPOLOGY)}, and slices of 4, 8, 16, ... 256 chips (trainer.mesh, "
            "runtime.host_tensor)"
        )
    return TOPOLOGY[label][devices]
