#!/usr/bin/env bash
#SBATCH --job-name=qwen2-5-1-5b-gsm8k
#SBATCH --output=/shared/runs/qwen/logs/slurm-%j.log
#SBATCH --signal=B:TERM@120
#SBATCH --time=720
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
#SBATCH hetjob
#SBATCH --time=720
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --gpus-per-node=8
set -euo pipefail

source /shared/venv/bin/activate

run=/shared/runs/qwen
AREAL_JAX_SECRET=$(<"$run/launch/secret")
export AREAL_JAX_SECRET

address() { # address NODE: by which Slurm itself reaches it
    scontrol --oneliner show node "$1" | sed 's/.* NodeAddr=\([^ ]*\).*/\1/'
}
head=$(address "$SLURMD_NODENAME")

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
        [ "$((SECONDS - began))" -lt 600 ] || failures=0
        failures=$((failures + 1))
        echo "$name ended with $code (failure $failures): see $run/logs/$name.log" >&2
        [ "$failures" -le 3 ] || return 1
        sleep "$((2 ** failures))" &
        wait "$!" || exit "$code"
    done
}

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
trap 'finish 143' TERM INT

mkdir -p "$run/redis"
(umask 077; cat >"$run/launch/redis.conf" <<END
bind $head
port 7600
requirepass $AREAL_JAX_SECRET
dir "$run/redis"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
END
)
need redis srun --overlap --cpu-bind=none --het-group=0 --nodes=1 --ntasks=1 \
    "--nodelist=$SLURMD_NODENAME" redis-server "$run/launch/redis.conf"
redis=$! started=() # it has no end of its own
start reward-0 srun --overlap --cpu-bind=none --het-group=0 --nodes=1 --ntasks=1 \
    "--nodelist=$SLURMD_NODENAME" env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cpu areal-jax role reward \
    "--config=$run/config.yaml" "--run=$run" --name=reward-0 "runtime.redis=redis://$head:7600/0"
need trainer-0 srun --overlap --cpu-bind=none --het-group=0 --nodes=1 --ntasks=1 \
    "--nodelist=$SLURMD_NODENAME" env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda \
    CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 areal-jax role trainer "--config=$run/config.yaml" \
    "--run=$run" --name=trainer-0 --index=0 --processes=1 "--coordinator=$head:7601" \
    "runtime.redis=redis://$head:7600/0"
need controller srun --overlap --cpu-bind=none --het-group=0 --nodes=1 --ntasks=1 \
    "--nodelist=$SLURMD_NODENAME" env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cpu areal-jax role controller \
    "--config=$run/config.yaml" "--run=$run" --name=controller "runtime.redis=redis://$head:7600/0"
controller=$!

start generate-0 srun --overlap --cpu-bind=none --het-group=1 --nodes=1 --ntasks=1 --relative=0 env \
    PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda CUDA_VISIBLE_DEVICES=0 areal-jax role generate \
    "--config=$run/config.yaml" "--run=$run" --name=generate-0 "runtime.redis=redis://$head:7600/0"
start generate-1 srun --overlap --cpu-bind=none --het-group=1 --nodes=1 --ntasks=1 --relative=0 env \
    PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda CUDA_VISIBLE_DEVICES=1 areal-jax role generate \
    "--config=$run/config.yaml" "--run=$run" --name=generate-1 "runtime.redis=redis://$head:7600/0"
start evaluate-0 srun --overlap --cpu-bind=none --het-group=1 --nodes=1 --ntasks=1 --relative=0 env \
    PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda CUDA_VISIBLE_DEVICES=2 areal-jax role evaluate \
    "--config=$run/config.yaml" "--run=$run" --name=evaluate-0 "runtime.redis=redis://$head:7600/0"

code=0
wait "$controller" || code=$?
finish "$code"
