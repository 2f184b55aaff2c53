"""The commands that submit a run to a scheduler: they use launchers/* with sizes from the config.

Slurm runs slurm.sbatch, or slurm_split.sbatch if hosts need machines of another kind. On Google Cloud
gcloud_gpu.sh starts the run on new VMs, gcloud_tpu.sh on new TPU slices. GKE gets gke/gpu.yaml or tpu.yaml,
filled in: a JobSet with one pod per machine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template

from areal_jax.cluster.launched import Launch, write
from areal_jax.cluster.placement import LaunchError, Plan, make_plan
from areal_jax.file_errors import writing

SUBMIT_DEADLINE_S = {"sbatch": 120, "kubectl": 300, "gcloud": 3600}
"""Program -> time limit of each of its commands, in seconds; gcloud's includes the creation of machines."""

MOUNT = PurePosixPath("/mnt/areal-jax")
"""Mount point of the shared file system on the machines and pods of gcloud and gke."""


@dataclass(frozen=True)
class Submission:
    program: str
    """The scheduler's command, which must be installed: sbatch, gcloud or kubectl."""
    commands: list[list[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the launcher's script reads."""
    files: Mapping[str, str] = field(default_factory=dict)
    """File name -> text; `submit` writes these files to launch/ in the run's folder."""
    after: str = ""
    """Shell commands to watch the run, which are shown after the submission."""

    def text(self) -> str:
        """Returns the output of --dry-run: the files, then each command with its environment variables."""
        settings = "".join(f"{key}={shlex.quote(value)} \\\n" for key, value in self.env.items())
        written = "".join(f"# ---- {name}\n{text}" for name, text in self.files.items())
        return written + "\n".join(settings + shlex.join(words) for words in self.commands)


def launcher_file(name: str) -> Path:
    """Returns the path of the file `name` of launchers/, in a checkout or in an installed wheel."""
    return Path(str(files("areal_jax") / "launchers" / name))


def settings_from(
    environment: Mapping[str, str], needed: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, str]:
    """Returns those of the variables `needed` and `optional` that are set; a needed one must be."""
    for name in needed:
        if not environment.get(name):
            raise LaunchError(f"the environment variable {name} is not set; set it as in launchers/README.md")
    return {name: environment[name] for name in (*needed, *optional) if environment.get(name)}


def folder_on_volume(plan: Plan) -> PurePosixPath:
    """Returns the absolute path of the run's folder on the file system that all machines mount at MOUNT.

    Raises LaunchError if run.dir is outside of MOUNT, /mnt/areal-jax.
    """
    folder = MOUNT / PurePosixPath(plan.config.run.folder)
    if not folder.is_relative_to(MOUNT) or ".." in folder.parts:
        raise LaunchError(
            f"run.dir={plan.config.run.dir} is not on the volume that all machines mount at {MOUNT}; set "
            f"run.dir to a folder relative to {MOUNT}"
        )
    return folder


def submit(launch: Launch, submission: Submission) -> str:
    """Writes the run's config and the submission's files, runs its commands, and returns their stdout.

    Raises LaunchError if `submission.program` is not installed, or if a command fails or takes longer than
    SUBMIT_DEADLINE_S allows.
    """
    program = submission.program
    if shutil.which(program) is None:
        raise LaunchError(
            f"there is no {program} on this machine; install it, or launch from a machine that has it "
            "(--dry-run works without it)"
        )
    write(launch)
    for name, text in submission.files.items():
        path = launch.folder / "launch" / name
        with writing(path):
            path.write_text(text)
    return "".join(_run(words, submission) for words in submission.commands)


def _run(words: list[str], submission: Submission) -> str:
    deadline_s, shown = SUBMIT_DEADLINE_S[submission.program], shlex.join(words)
    try:
        done = subprocess.run(
            words,
            env={**os.environ, **submission.env},
            stdout=subprocess.PIPE,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{shown}` was stopped after {deadline_s} s; run this command by hand to see what it waits for"
        ) from None
    if done.returncode:
        raise LaunchError(
            f"`{shown}` failed with status {done.returncode}; correct the cause, which the command printed "
            "above, and launch again"
        )
    return done.stdout


# --- Slurm --------------------------------------------------------------------------------------------------

IMAGE, MOUNTS = "AREAL_JAX_IMAGE", "AREAL_JAX_MOUNTS"
"""Environment variables of the scripts: a container's image, and what it mounts, in pyxis's syntax."""

BETWEEN = ":"
"""Separator of options, as for sbatch: options after the separator apply to the hosts' machines."""


def _to_slurm(
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


# --- Google Cloud -------------------------------------------------------------------------------------------

NUMBER_PER_DEVICE = {"v5litepod": 1, "v6e": 1, "v5p": 2, "v4": 2}
"""TPU family -> by how much one jax device (chip) raises the number in the name of a TPU type, such as
v5litepod-8: by 1, or by 2 in families that count cores.
"""


def _to_gcloud(
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


# --- GKE ----------------------------------------------------------------------------------------------------

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


def _to_gke(plan: Plan, launch: Launch, options: Sequence[str], environment: Mapping[str, str]) -> Submission:
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


# --- all launchers ------------------------------------------------------------------------------------------

LAUNCHERS: dict[str, Callable[[Plan, Launch, Sequence[str], Mapping[str, str]], Submission]] = {
    "slurm": _to_slurm,
    "gcloud": _to_gcloud,
    "gke": _to_gke,
}


def prepare(
    launcher: str, launch: Launch, options: Sequence[str], environment: Mapping[str, str]
) -> Submission:
    """Returns the commands and files that submit a run by `launcher`: slurm, gcloud or gke; runs nothing.

    `launch`: the run's config and folder. `options`: words for the command that submits. `environment`: its
    variables are the settings of the files in launchers/. Raises LaunchError if one of them is missing or not
    valid for this launcher.
    """
    accelerator = launch.config.launch.accelerator
    plan = make_plan(launch.config, "gpu" if accelerator == "auto" else accelerator)
    return LAUNCHERS[launcher](plan, launch, options, environment)
