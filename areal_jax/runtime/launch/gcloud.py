"""Google Cloud without a cluster: machines made by gcloud, GPU VMs or TPU slices, reached by its ssh.

`submit.sh` makes the machines that are missing, copies config, secret and scripts to each, and runs a
machine's own script there. That one mounts the volume and starts each process as a systemd service, which
starts it again where it failed and goes on when the ssh connection is gone.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from areal_jax.runtime.launch.plan import MOUNT, LaunchError, Plan, Process, environment, on_volume, words_of
from areal_jax.runtime.launch.shell import BASH, Expanded, Submission, command, script

NUMBER_PER_DEVICE = {"v5litepod": 1, "v6e": 1, "v5p": 2, "v4": 2}
"""TPU family -> what its type's number counts for a jax device: chips, or the two cores of one."""

RESTART_S = 5

MACHINE = """\
head=$1 # the first machine's address
own=$(cd "$(dirname "$0")" && pwd)
run=FOLDER
if ! mountpoint --quiet MOUNT; then
    sudo mkdir -p MOUNT
    sudo mount -t nfs -o rw,hard VOLUME MOUNT
fi
sudo install -d -o "$(id -un)" "$run" "$run/logs"
keep() { # keep NAME COMMAND...: a service that starts again where it failed; its output goes to logs/NAME.log
    local unit=areal-jax-$1 log=$run/logs/$1.log
    shift
    sudo systemctl stop "$unit" 2>/dev/null || true
    sudo systemctl reset-failed "$unit" 2>/dev/null || true
    sudo systemd-run --unit="$unit" --uid="$(id -un)" --setenv=HOME="$HOME" --setenv=PATH="$PATH" \\
        --property=Restart=on-failure --property=RestartSec=RESTART_S \\
        --property=StartLimitIntervalSec=600 --property=StartLimitBurst=BURST \\
        --property=KillMode=mixed --property=TimeoutStopSec=60 \\
        --property=StandardOutput="append:$log" --property=StandardError="append:$log" \\
        bash "$own/start.sh" "$@"
}"""

START = """\
# start.sh COMMAND...: with the run's secret in its environment, and nowhere else
SETUP
AREAL_JAX_SECRET=$(<"$(dirname "$0")/secret")
export AREAL_JAX_SECRET
exec "$@\""""

REDIS = """\
mkdir -p "$run/redis"
(umask 077; cat >"$own/redis.conf" <<END
bind $head
port PORT
requirepass $(<"$own/secret")
dir "$run/redis"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
END
)
keep redis redis-server "$own/redis.conf\""""

SUBMIT = """\
create() { # create NAME OPTION...: makes the machine unless it is there
    gcloud compute KIND describe "$1" ZONE >/dev/null 2>&1 || gcloud compute KIND create "$@"
}
on() { # on COMMAND NAME [OPTION]: runs it there, with our standard input
    local command=$1
    shift
    gcloud compute SSH ssh "$@" ZONE --quiet --command="$command"
}
begin() { # begin SCRIPT NAME [OPTION]: waits for the machine, copies what it needs, runs its script there
    local script=$1 end=$((SECONDS + 900))
    shift
    until on true "$@" </dev/null 2>/dev/null; do
        [ "$SECONDS" -lt "$end" ] || { echo "$1 does not answer by ssh" >&2; exit 1; }
        sleep 10
    done
    tar --create --file=- --directory="$files" secret start.sh "$script" --directory=.. config.yaml |
        on "umask 077; mkdir -p $own && tar --extract --directory=$own --file=-" "$@"
    on "bash $own/$script $head" "$@" </dev/null
}"""


@dataclass(frozen=True)
class Machine:
    name: str
    worker: int | None = None
    """Of a TPU slice."""

    @property
    def words(self) -> list[str]:
        return [self.name] if self.worker is None else [self.name, f"--worker={self.worker}"]


def submission(plan: Plan) -> Submission:
    """What `areal-jax launch gcloud` runs. Raises LaunchError."""
    launch, is_tpu = plan.config.launch, plan.accelerator == "tpu"
    for key in ("zone", "machine", "image"):
        if getattr(launch, key) is None:
            raise LaunchError(f"launch.{key} is not given: gcloud makes no machine without")
    on_volume(plan)
    machines = [_machine(plan, number) for number in range(plan.machines)]
    files = {f"machine-{number}.sh": _machine_script(plan, number) for number in range(plan.machines)}
    files["start.sh"] = script(
        BASH, START.replace("SETUP", launch.setup.strip() or "# launch.setup is empty")
    )
    files["submit.sh"] = _submit(plan, machines)
    kind = "tpus tpu-vm" if is_tpu else "instances"
    names = " ".join(dict.fromkeys(machine.name for machine in machines))
    ssh = f"gcloud compute {'tpus tpu-vm ' if is_tpu else ''}ssh {' '.join(machines[0].words)}"
    return Submission(
        files,
        "gcloud",
        after=f"{ssh} --zone={launch.zone} --command='tail -F {on_volume(plan)}/logs/*.log'\n"
        f"gcloud compute {kind} delete {names} --zone={launch.zone} # when the run has ended",
    )


def _submit(plan: Plan, machines: list[Machine]) -> str:
    zone = f"--zone={shlex.quote(str(plan.config.launch.zone))}"
    is_tpu = plan.accelerator == "tpu"
    kind, ssh = ("tpus tpu-vm", "tpus tpu-vm") if is_tpu else ("instances", "")
    functions = SUBMIT.replace("KIND", kind).replace("SSH ", f"{ssh} " if ssh else "").replace("ZONE", zone)
    where = "networkEndpoints[0].ipAddress" if is_tpu else "networkInterfaces[0].networkIP"
    first = machines[0].name
    asks = ["gcloud", "compute", *kind.split(), "describe", first, zone, f"--format=value({where})"]
    begins = [
        command(["begin", f"machine-{number}.sh", *machine.words]) for number, machine in enumerate(machines)
    ]
    return script(
        BASH,
        f"files={shlex.quote(str(plan.folder / 'launch'))}\nown=areal-jax/{plan.name} # in a machine's home",
        functions,
        "\n".join(_creations(plan, machines)),
        f"head=$({command(asks)})",
        "\n".join(begins),
    )


def _machine(plan: Plan, number: int) -> Machine:
    if plan.accelerator != "tpu":
        return Machine(f"{plan.name}-{number}")
    if number < plan.trainer_machines:
        return Machine(f"{plan.name}-trainer", number)
    return Machine(f"{plan.name}-hosts-{number - plan.trainer_machines}", 0)


def _creations(plan: Plan, machines: list[Machine]) -> list[str]:
    launch = plan.config.launch
    zone, image = f"--zone={launch.zone}", str(launch.image)
    if plan.accelerator == "tpu":
        slices = {f"{plan.name}-trainer": plan.config.trainer.mesh.devices}
        slices |= {machine.name: launch.machine_devices for machine in machines[plan.trainer_machines :]}
        types = {name: f"--accelerator-type={_tpu_type(plan, count)}" for name, count in slices.items()}
        return [
            command(["create", name, zone, kind, f"--version={image}", *launch.options])
            for name, kind in types.items()
        ]
    project, _, family = image.partition("/")
    if not family:
        raise LaunchError(f"launch.image={image}: gcloud takes PROJECT/FAMILY of an image for VMs with GPUs")
    held = [f"--max-run-duration={round(launch.hours * 3600)}s", "--instance-termination-action=DELETE"]
    made = [f"--machine-type={launch.machine}", f"--image-project={project}", f"--image-family={family}"]
    always = ["--maintenance-policy=TERMINATE", "--boot-disk-size=200GB"]
    return [
        command(["create", machine.name, zone, *made, *always, *held, *launch.options])
        for machine in machines
    ]


def _tpu_type(plan: Plan, devices: int) -> str:
    family = str(plan.config.launch.machine)
    if family not in NUMBER_PER_DEVICE:
        raise LaunchError(
            f"launch.machine={family} is no TPU family; there are {', '.join(NUMBER_PER_DEVICE)}"
        )
    return f"{family}-{devices * NUMBER_PER_DEVICE[family]}"


def _machine_script(plan: Plan, number: int) -> str:
    launch = plan.config.launch
    set_up = (
        MACHINE.replace("FOLDER", shlex.quote(str(on_volume(plan))))
        .replace("VOLUME", shlex.quote(str(launch.volume)))
        .replace("MOUNT", str(MOUNT))
        .replace("RESTART_S", str(RESTART_S))
        .replace("BURST", str(launch.restarts + 1))
    )
    steps = [_step(plan, process) for process in plan.on(number)]
    if number == 0 and plan.has_own_redis:
        steps.insert(0, REDIS.replace("PORT", str(launch.port)))
    return script(BASH, set_up, "\n".join(steps))


def _step(plan: Plan, process: Process) -> str:
    port = plan.config.launch.port
    redis = f"redis://$head:{port}/0" if plan.has_own_redis else None
    words = words_of(process, plan, "$run", "$own/config.yaml", f"$head:{port + 1}", redis)
    env = [f"{key}={value}" for key, value in environment(plan, process).items()]
    spoken = [Expanded(word) if "$" in word else word for word in words]
    return command(["keep", process.name, "env", *env, *spoken])
