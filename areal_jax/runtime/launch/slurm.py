"""Slurm: one job where a machine suffices, a heterogeneous one otherwise, or two plain ones.

The script runs on the head, the first machine of the trainer's component. It starts Redis and a job step for
each process, starts those again that failed, and ends when the controller does. Slurm's variables of both
components are visible in both, so every step is told its place in words.
"""

from __future__ import annotations

import shlex
from math import ceil

from areal_jax.runtime.launch.plan import LaunchError, Plan, Process, environment, words_of
from areal_jax.runtime.launch.shell import BASH, Expanded, Submission, command, script

GRACE_S = 120
"""Before the time limit the script is told to end, so that it ends as cleanly as by scancel."""

HEALTHY_S = 600
"""A process that lived for so long begins its count of restarts anew."""

ADDRESS = """\
address() { # address NODE: by which Slurm itself reaches it
    scontrol --oneliner show node "$1" | sed 's/.* NodeAddr=\\([^ ]*\\).*/\\1/'
}"""

KEEP = """\
keep() { # keep NAME COMMAND...: runs it, and again where it failed; its output goes to logs/NAME.log
    local name=$1 failures=0 ending="" child code began
    shift
    trap 'ending=yes' TERM
    while true; do
        began=$SECONDS code=0
        "$@" >>"$run/logs/$name.log" 2>&1 &
        child=$!
        while kill -0 "$child" 2>/dev/null; do # TERM ends a wait, and not the child
            code=0
            wait "$child" || code=$?
        done
        [ "$code" -ne 0 ] || return 0
        [ -z "$ending" ] || exit "$code"
        [ "$((SECONDS - began))" -lt HEALTHY_S ] || failures=0
        failures=$((failures + 1))
        echo "$name ended with $code (failure $failures): see $run/logs/$name.log" >&2
        [ "$failures" -le RESTARTS ] || return 1
        sleep "$((2 ** failures))" &
        wait "$!" || exit "$code"
    done
}"""

START = """\
started=()
start() { # start NAME COMMAND...: keeps it running in the background
    keep "$@" &
    started+=($!)
}
need() { # need NAME COMMAND...: as start, and the job ends where it cannot be kept
    { keep "$@" || kill -TERM "$$"; } &
    started+=($!)
}
gone() { # gone SECONDS PID...: waits so long for them to end
    local end=$((SECONDS + $1)) each
    shift
    for each in "$@"; do
        while kill -0 "$each" 2>/dev/null; do
            [ "$SECONDS" -lt "$end" ] || return 1
            sleep 0.2
        done
    done
}
finish() { # finish CODE: ends what was started (with 0, after a minute to end by itself), then itself
    trap '' TERM INT
    [ "$1" -ne 0 ] || gone 60 "${started[@]}" || true
    started+=(${redis:+"$redis"})
    kill "${started[@]}" 2>/dev/null || true # nothing starts again
    scancel --signal=TERM "$SLURM_JOB_ID" || true # srun itself would kill its tasks at once
    gone 60 "${started[@]}" || true
    exit "$1"
}
trap 'finish 143' TERM INT"""

REDIS = """\
mkdir -p "$run/redis"
(umask 077; cat >"$run/launch/redis.conf" <<END
bind $head
port PORT
requirepass $AREAL_JAX_SECRET
dir "$run/redis"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
END
)
STEP
redis=$! started=() # it has no end of its own"""

SECRET = """\
AREAL_JAX_SECRET=$(<"$run/launch/secret")
export AREAL_JAX_SECRET"""


def submission(plan: Plan) -> Submission:
    """What `areal-jax launch slurm` hands to sbatch. Raises LaunchError."""
    if plan.accelerator == "tpu":
        raise LaunchError("launch.accelerator=tpu: TPUs are scheduled by gcloud or gke, not by Slurm")
    after = f"squeue --me; tail -F {shlex.quote(str(plan.folder))}/logs/*.log"
    if not (plan.generation_machines and plan.config.launch.plain):
        submit = command(["sbatch", _path(plan, "run.sh")])
        files = {"run.sh": _whole_job(plan)}
    else:
        submit = _submit_two(plan)
        files = {"trainer.sh": _trainer_job(plan), "generation.sh": _generation_job(plan)}
    return Submission({**files, "submit.sh": script(f"{BASH}\n{submit}")}, "sbatch", after=after)


def _path(plan: Plan, name: str) -> str:
    return str(plan.folder / "launch" / name)


def _submit_two(plan: Plan) -> str:
    """The hosts' job may start once the trainer's has: it asks Slurm where that runs."""
    trainer = ["sbatch", "--parsable", _path(plan, "trainer.sh")]
    hosts = ["sbatch", "--parsable", Expanded("--dependency=after:$trainer"), _path(plan, "generation.sh")]
    return f"""\
trainer=$({command(trainer)})
trainer=${{trainer%%;*}}
generation=$({command([*hosts, Expanded("$trainer")])})
echo "${{generation%%;*}}" >{shlex.quote(_path(plan, "generation.job"))}
echo "jobs $trainer (trainer) and ${{generation%%;*}} (hosts)\""""


# --- the jobs -----------------------------------------------------------------------------------------------


def _whole_job(plan: Plan) -> str:
    directives = _directives(plan, plan.name, plan.trainer_machines)
    is_het = plan.generation_machines > 0
    if is_het:
        directives += ["#SBATCH hetjob", *_resources(plan, plan.generation_machines)]
    return _job(
        plan,
        directives,
        'head=$(address "$SLURMD_NODENAME")',
        _head_steps(plan, is_het),
        _host_steps(plan, plan.trainer_machines if is_het else 0, is_het),
        'code=0\nwait "$controller" || code=$?\nfinish "$code"',
    )


def _trainer_job(plan: Plan) -> str:
    job = shlex.quote(_path(plan, "generation.job"))
    return _job(
        plan,
        _directives(plan, f"{plan.name}-trainer", plan.trainer_machines),
        'head=$(address "$SLURMD_NODENAME")',
        _head_steps(plan, False),
        f"""\
trap 'scancel "$(<{job})" || true' EXIT # the hosts would wait for this job in vain
code=0
wait "$controller" || code=$?
[ "$code" -ne 0 ] || trap - EXIT
finish "$code\"""",
    )


def _generation_job(plan: Plan) -> str:
    head = 'head=$(address "$(squeue --noheader --jobs="$1" --format=%B)") # $1: the trainer\'s job'
    return _job(
        plan,
        _directives(plan, f"{plan.name}-hosts", plan.generation_machines),
        head if plan.has_own_redis else "",
        _host_steps(plan, plan.trainer_machines, False),
        'code=0\nfor each in "${started[@]}"; do\n    wait "$each" || code=$?\ndone\nfinish "$code"',
    )


def _job(plan: Plan, directives: list[str], head: str, *steps: str) -> str:
    launch = plan.config.launch
    keep = KEEP.replace("HEALTHY_S", str(HEALTHY_S)).replace("RESTARTS", str(launch.restarts))
    shebang, fails = BASH.split("\n")
    return script(
        "\n".join([shebang, *directives, fails]),
        launch.setup,
        f"run={shlex.quote(str(plan.folder))}\n{SECRET}",
        f"{ADDRESS}\n{head}" if head else "",
        keep,
        START,
        *steps,
    )


def _directives(plan: Plan, name: str, machines: int) -> list[str]:
    """Of the job, and of its first component."""
    return [
        f"#SBATCH --job-name={name}",
        f"#SBATCH --output={shlex.quote(f'{plan.folder}/logs/slurm-%j.log')}",
        f"#SBATCH --signal=B:TERM@{GRACE_S}",
        *_resources(plan, machines),
    ]


def _resources(plan: Plan, machines: int) -> list[str]:
    """What one component asks for; the hours count for each."""
    launch = plan.config.launch
    asked = [f"--time={ceil(launch.hours * 60)}", f"--nodes={machines}"]
    if launch.cpus is None:
        asked += ["--exclusive", "--mem=0"]
    else:
        asked += ["--ntasks-per-node=1", f"--cpus-per-task={launch.cpus}"]
    if plan.accelerator == "gpu":
        asked.append(f"--gpus-per-node={plan.devices_per_machine}")
    return [f"#SBATCH {shlex.quote(word)}" for word in [*asked, *launch.options]]


# --- the steps ----------------------------------------------------------------------------------------------

_ON_HEAD = ["--nodes=1", "--ntasks=1", Expanded("--nodelist=$SLURMD_NODENAME")]


def _head_steps(plan: Plan, is_het: bool) -> str:
    lines = []
    where = ["--het-group=0"] if is_het else []
    if plan.has_own_redis:
        server = ["redis-server", Expanded("$run/launch/redis.conf")]
        step = command(["need", "redis", *_srun(plan, [*where, *_ON_HEAD]), *server])
        redis = REDIS.replace("PORT", str(plan.config.launch.port)).replace("STEP", step)
        lines.append(redis)
    for process in (p for role in ("reward", "evaluate") for p in plan.of(role) if not p.devices):
        lines.append(_step(plan, process, "start", [*where, *_ON_HEAD]))
    lines.append(_trainer_step(plan, where))
    for process in plan.of("controller"):
        lines.append(_step(plan, process, "need", [*where, *_ON_HEAD]))
    return "\n".join([*lines, "controller=$!"])


def _host_steps(plan: Plan, first_machine: int, is_het: bool) -> str:
    lines = []
    for process in plan.decoding:
        where = ["--het-group=1"] if is_het else []
        where += ["--nodes=1", "--ntasks=1", f"--relative={process.machine - first_machine}"]
        lines.append(_step(plan, process, "start", where))
    return "\n".join(lines)


def _step(plan: Plan, process: Process, verb: str, where: list[str]) -> str:
    return command([verb, process.name, *_srun(plan, where), *_process(plan, process)])


def _trainer_step(plan: Plan, where: list[str]) -> str:
    """All of the trainer's processes as one step: they die together and start together."""
    trainers = plan.of("trainer")
    if len(trainers) == 1:
        return _step(plan, trainers[0], "need", [*where, *_ON_HEAD])
    each = sum(process.machine == 0 for process in trainers)
    shape = [f"--nodes={plan.trainer_machines}", f"--ntasks={len(trainers)}", f"--ntasks-per-node={each}"]
    own = 'exec "$@" --name="trainer-$SLURM_PROCID" --index="$SLURM_PROCID"'
    if plan.accelerator == "gpu":
        count = len(trainers[0].devices)
        devices = f'$(seq -s, "$((SLURM_LOCALID * {count}))" "$((SLURM_LOCALID * {count} + {count - 1}))")'
        own = f"CUDA_VISIBLE_DEVICES={devices}; export CUDA_VISIBLE_DEVICES; {own}"
    told = ("--name=", "--index=", "CUDA_VISIBLE_DEVICES=")
    words = [word for word in _process(plan, trainers[0]) if not word.startswith(told)]
    step = [*_srun(plan, [*where, *shape, "--kill-on-bad-exit=1"]), "bash", "-c", own, "trainer"]
    why = "# shellcheck disable=SC2016 # each task finds its own place"
    return f"{why}\n{command(['need', 'trainer', *step, *words])}"


def _srun(plan: Plan, where: list[str]) -> list[str]:
    """Steps share the job's cores, memory and devices; which devices is said to each process."""
    image, folder = plan.config.launch.image, plan.folder
    inside = [f"--container-image={image}", f"--container-mounts={folder}:{folder}"] if image else []
    return ["srun", "--overlap", "--cpu-bind=none", *inside, *where]


def _process(plan: Plan, process: Process) -> list[str]:
    port = plan.config.launch.port
    redis = f"redis://$head:{port}/0" if plan.has_own_redis else None
    words = words_of(process, plan, "$run", "$run/config.yaml", f"$head:{port + 1}", redis)
    env = [f"{key}={value}" for key, value in environment(plan, process).items()]
    return ["env", *env, *(Expanded(word) if "$" in word else word for word in words)]
