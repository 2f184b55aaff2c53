"""GKE: a JobSet (jobset.x-k8s.io/v1alpha2) with one replicated job a role, and the Secret beside it.

A pod is a process. All but the trainer's (Redis lives beside the controller) start again where they failed;
the trainer's processes only work together, so when one fails the JobSet starts all of them again.
The JobSet is complete when the controller is.
"""

from __future__ import annotations

from typing import Any

import yaml

from areal_jax.runtime.launch.plan import (
    MOUNT,
    LaunchError,
    Plan,
    Process,
    environment,
    on_volume,
    words_of,
)
from areal_jax.runtime.launch.shell import BASH, Submission, command, script

CONFIG = "/etc/areal-jax"
"""Where pods find the config."""

RESOURCE = {"gpu": "nvidia.com/gpu", "tpu": "google.com/tpu"}

TWO_AXES = {1: "1x1", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
THREE_AXES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
TOPOLOGY = {
    "tpu-v4-podslice": THREE_AXES,
    "tpu-v5p-slice": THREE_AXES,
    "tpu-v5-lite-podslice": TWO_AXES,
    "tpu-v6e-slice": TWO_AXES,
}
"""cloud.google.com/gke-tpu-accelerator -> chips -> cloud.google.com/gke-tpu-topology."""


class Text(str):
    """A value that is written over several lines."""


def submission(plan: Plan) -> Submission:
    """What `areal-jax launch gke` applies. Raises LaunchError."""
    launch = plan.config.launch
    if launch.image is None:
        raise LaunchError(
            "launch.image is not given: pods start from an image; launchers/Containerfile makes it"
        )
    if launch.setup:
        raise LaunchError("launch.setup is for slurm and gcloud; put into the image what pods need")
    on_volume(plan)
    name, files = plan.name, plan.folder / "launch"
    kubectl = ["kubectl", *launch.options]
    secret = ["create", "secret", "generic", name, f"--from-file=secret={files / 'secret'}"]
    lines = [
        f"{command([*kubectl, *secret, '--dry-run=client', '--output=yaml'])} |",
        f"    {command([*kubectl, 'apply', '--filename=-'])}",
        command([*kubectl, "apply", f"--filename={files / 'jobset.yaml'}"]),
    ]
    if plan.goes_on:  # of a JobSet that is there nothing could be changed
        lines.insert(0, command([*kubectl, "delete", "jobset", name, "--ignore-not-found", "--wait"]))
    after = f"kubectl get jobset,pods; kubectl logs --follow job/{name}-controller-0 --container=controller"
    return Submission(
        {"jobset.yaml": manifests(plan), "submit.sh": script("\n".join([BASH, *lines]))},
        "kubectl",
        after=after,
    )


def manifests(plan: Plan) -> str:
    """The ConfigMap and the JobSet."""
    from areal_jax.config import to_yaml

    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": plan.name},
        "data": {"config.yaml": Text(to_yaml(plan.config))},
    }
    return yaml.dump_all([config, _jobset(plan)], Dumper=_Dumper, sort_keys=False, width=110)


def _jobset(plan: Plan) -> dict[str, Any]:
    slices = {"trainer": plan.config.trainer.mesh.devices}
    jobs = [_job(plan, plan.of("controller"), _controller_pod(plan))]
    for role in ("reward", "trainer", "generate", "evaluate"):
        if processes := plan.of(role):
            first = processes[0]
            jobs.append(_job(plan, processes, _pod(plan, first, slices.get(role, len(first.devices)))))
    late = {"name": "late", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": plan.name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "Any", "targetReplicatedJobs": ["controller"]},
            "failurePolicy": {"maxRestarts": plan.config.launch.restarts, "rules": [late]},
            "replicatedJobs": jobs,
        },
    }


def _job(plan: Plan, processes: tuple[Process, ...], pod: dict[str, Any]) -> dict[str, Any]:
    role, launch = processes[0].role, plan.config.launch
    starts_alone = role != "trainer"
    spec = {
        "parallelism": len(processes),
        "completions": len(processes),
        "completionMode": "Indexed",
        "backoffLimit": launch.restarts * len(processes) if starts_alone else 0,
        "activeDeadlineSeconds": round(launch.hours * 3600),
        "template": {"spec": {**pod, "restartPolicy": "OnFailure" if starts_alone else "Never"}},
    }
    template: dict[str, Any] = {"spec": spec}
    if role == "trainer" and plan.accelerator == "tpu" and len(processes) > 1:
        exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        template = {"metadata": {"annotations": exclusive}, "spec": spec}
    return {"name": role, "replicas": 1, "template": template}


def _pod(plan: Plan, process: Process, slice_devices: int = 0) -> dict[str, Any]:
    """Of one process; `slice_devices`: accelerators that are linked to each other, its own among them."""
    claim = plan.config.launch.volume
    pod: dict[str, Any] = {
        "terminationGracePeriodSeconds": 60,
        "containers": [_container(plan, process)],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "config", "configMap": {"name": plan.name}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    if selector := _selector(plan, slice_devices):
        pod["nodeSelector"] = selector
    return pod


def _selector(plan: Plan, devices: int) -> dict[str, str]:
    machine = plan.config.launch.machine
    if not devices or plan.accelerator == "cpu":
        return {}
    if plan.accelerator == "gpu":
        return {"cloud.google.com/gke-accelerator": machine} if machine else {}
    if machine not in TOPOLOGY or devices not in TOPOLOGY[machine]:
        known = ", ".join(TOPOLOGY)
        raise LaunchError(
            f"launch.machine={machine} with a slice of {devices} chips: no such slice is known; machines are "
            f"{known}, slices of 4, 8, 16, ... 256 chips"
        )
    return {
        "cloud.google.com/gke-tpu-accelerator": machine,
        "cloud.google.com/gke-tpu-topology": TOPOLOGY[machine][devices],
    }


def _controller_pod(plan: Plan) -> dict[str, Any]:
    pod = _pod(plan, plan.of("controller")[0])
    return {**pod, "initContainers": [_redis(plan)]} if plan.has_own_redis else pod


def _redis(plan: Plan) -> dict[str, Any]:
    """Beside the controller for as long as it lives; its password comes by its standard input."""
    port, folder = plan.config.launch.port, on_volume(plan) / "redis"
    options = f'--port {port} --bind "*" --dir "$0" --appendonly yes --appendfsync always --save ""'
    password = """<(printf 'requirepass %s\\n' "$AREAL_JAX_SECRET")"""
    start = f'mkdir -p "$0" && exec redis-server {options} - < {password}'
    return {
        "name": "redis",
        "image": plan.config.launch.image,
        "restartPolicy": "Always",
        "command": ["bash", "-c", start, str(folder)],
        "env": [_secret(plan)],
        "ports": [{"containerPort": port}],
        "startupProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1, "failureThreshold": 60},
        "volumeMounts": [{"name": "run", "mountPath": str(MOUNT)}],
    }


def _container(plan: Plan, process: Process) -> dict[str, Any]:
    launch, own = plan.config.launch, environment(plan, process)
    own.pop("CUDA_VISIBLE_DEVICES", None)  # a pod sees its own devices alone
    many = len(plan.of(process.role)) > 1
    env: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in own.items()]
    env.append(_secret(plan))
    if many:
        place = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        env.append({"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": place}}})
    container: dict[str, Any] = {
        "name": process.role,
        "image": launch.image,
        "command": _words(plan, process, many),
        "env": env,
        "volumeMounts": [
            {"name": "run", "mountPath": str(MOUNT)},
            {"name": "config", "mountPath": CONFIG, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    asked = {"requests": {"cpu": str(launch.cpus)}} if launch.cpus else {}
    if process.devices and plan.accelerator in RESOURCE:
        asked["limits"] = {RESOURCE[plan.accelerator]: str(len(process.devices))}
    return {**container, "resources": asked} if asked else container


def _words(plan: Plan, process: Process, many: bool) -> list[str]:
    name, port = plan.name, plan.config.launch.port
    redis = f"redis://{name}-controller-0-0.{name}:{port}/0" if plan.has_own_redis else None
    coordinator = f"{name}-trainer-0-0.{name}:{port + 1}"
    words = words_of(process, plan, str(on_volume(plan)), f"{CONFIG}/config.yaml", coordinator, redis)
    if not many:
        return words
    placed = {f"--name={process.name}": f"--name={process.role}-$(INDEX)", "--index=0": "--index=$(INDEX)"}
    return [placed.get(word, word) for word in words]


def _secret(plan: Plan) -> dict[str, Any]:
    where = {"secretKeyRef": {"name": plan.name, "key": "secret"}}
    return {"name": "AREAL_JAX_SECRET", "valueFrom": where}


class _Dumper(yaml.SafeDumper):
    """No anchors: two equal lists are written twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _as_block(dumper: yaml.SafeDumper, text: Text) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")


_Dumper.add_representer(Text, _as_block)
