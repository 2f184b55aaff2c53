"""Words of launches, one for each launcher and shape of config."""

from __future__ import annotations

from areal_jax.cluster.launch.prepare import prepare
from areal_jax.cluster.launch.submission import Submission
from areal_jax.cluster.launched import read

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

SHAPES: dict[str, list[str]] = {
    "slurm-one-machine": [*EIGHT, "runtime.hosts=2"],
    "slurm-two-machines": [
        *TWO_HOSTS,
        "launch.setup=source /shared/venv/bin/activate",
        "observe.evaluate=256",
    ],
    "slurm-two-trainers": [
        *TWO_HOSTS,
        "trainer.mesh.data=4",
        "runtime.trainer_processes=4",
        "runtime.host_tensor=8",
        "launch.cpus=64",
        "observe.exports=2",
    ],
    "slurm-plain": [
        *TWO_HOSTS,
        "launch.plain=true",
        "launch.image=/shared/areal-jax.sqsh",
        "launch.options=[--partition=gpu, --account=my lab]",
        "runtime.redis=redis://db:6379/0",
    ],
    "gcloud-gpu": [
        *CLOUD,
        "launch.zone=us-central1-a",
        "launch.machine=a3-highgpu-8g",
        "launch.image=deeplearning-platform-release/common-cu128",
        "launch.volume=10.0.0.2:/share",
        "launch.setup=source /mnt/areal-jax/venv/bin/activate",
    ],
    "gcloud-tpu": [
        *TPU,
        "launch.zone=us-central1-a",
        "launch.machine=v5litepod",
        "launch.image=v2-alpha-tpuv5-lite",
        "launch.volume=10.0.0.2:/share",
        "launch.options=[--spot]",
    ],
    "gke-gpu": [
        *CLOUD,
        "launch.machine=nvidia-h100-80gb",
        "launch.image=areal-jax:0.1",
        "launch.volume=runs",
        "launch.cpus=16",
        "observe.evaluate=256",
        "observe.exports=2",
    ],
    "gke-tpu": [
        *TPU,
        "launch.machine=tpu-v5-lite-podslice",
        "launch.image=areal-jax:0.1",
        "launch.volume=runs",
        "launch.options=[--namespace=rl]",
    ],
}
"""Name, which begins with the launcher's -> words."""


def submission_of(shape: str, *words: str) -> Submission:
    return prepare(shape.partition("-")[0], read([*SHAPES[shape], *words]))
