"""Launches, one for each launcher and shape of config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from areal_jax.cluster.launched import read
from areal_jax.cluster.submission import Submission, prepare

TASK = ["tasks.gsm8k.data_dir=/shared/data/gsm8k", "model.source=/shared/models/qwen2.5-1.5b"]
EIGHT = ["configs/qwen2.5_1.5b_gsm8k_8gpu.yaml", *TASK, "run.dir=/shared/runs/qwen"]
TWO_HOSTS = ["configs/qwen2.5_1.5b_gsm8k_2hosts.yaml", *TASK, "run.dir=/shared/runs/qwen", "runtime.hosts=2"]
CLOUD = [*TWO_HOSTS, "run.dir=/mnt/areal-jax/runs/qwen"]
TPU = [
    *CLOUD,
    "launch.accelerator=tpu",
    "launch.machine_devices=4",
    "trainer.mesh={data: 1, fsdp: 8}",
    "runtime.trainer_processes=2",
    "runtime.host_tensor=4",
]


class Shape(NamedTuple):
    words: Sequence[str]
    options: Sequence[str] = ()
    environment: Mapping[str, str] = MappingProxyType({})


ON_GCLOUD = {"ZONE": "us-central1-a", "VOLUME": "10.0.0.2:/share"}
ON_GKE = {"IMAGE": "areal-jax:0.1", "CLAIM": "runs"}

SHAPES: dict[str, Shape] = {
    "slurm-one-machine": Shape([*EIGHT, "runtime.hosts=2"], ["--time=12:00:00"]),
    "slurm-two-machines": Shape([*TWO_HOSTS, "observe.evaluate=256"]),
    "slurm-two-trainers": Shape(
        [
            *TWO_HOSTS,
            "trainer.mesh.data=4",
            "runtime.trainer_processes=4",
            "runtime.host_tensor=8",
            "observe.exports=2",
        ],
        ["--cpus-per-task=64"],
    ),
    "slurm-container": Shape(
        [*TWO_HOSTS, "runtime.hosts=8", "runtime.redis=redis://db:6379/0"],
        ["--partition=gpu", "--account=my lab"],
        {"AREAL_JAX_IMAGE": "/shared/areal-jax.sqsh"},
    ),
    "gcloud-gpu": Shape(
        CLOUD,
        environment={
            **ON_GCLOUD,
            "MACHINE": "a3-highgpu-8g",
            "IMAGE": "deeplearning-platform-release/common-cu128",
            "SETUP": "source /mnt/areal-jax/venv/bin/activate",
            "MINUTES": "720",
        },
    ),
    "gcloud-tpu": Shape(
        TPU, ["--spot"], {**ON_GCLOUD, "MACHINE": "v5litepod", "IMAGE": "v2-alpha-tpuv5-lite"}
    ),
    "gke-gpu": Shape(
        [*CLOUD, "observe.evaluate=256", "observe.exports=2"],
        environment={
            **ON_GKE,
            "ACCELERATOR": "nvidia-h100-80gb",
            "CPUS": "16",
            "LIMIT_SECONDS": str(12 * 3600),
        },
    ),
    "gke-tpu": Shape(TPU, ["--namespace=rl"], {**ON_GKE, "ACCELERATOR": "tpu-v5-lite-podslice"}),
}
"""By name, which begins with the launcher's."""


def submission_of(
    name: str, *words: str, options: Sequence[str] | None = None, **environment: str
) -> Submission:
    """What is submitted for the shape `name` with further words, other options, and further variables."""
    shape = SHAPES[name]
    return prepare(
        name.partition("-")[0],
        read([*shape.words, *words]),
        shape.options if options is None else options,
        {**shape.environment, **environment},
    )
