#!/usr/bin/env bash
set -euo pipefail

head=$1 # the first machine's address
own=$(cd "$(dirname "$0")" && pwd)
run=/mnt/areal-jax/runs/qwen
if ! mountpoint --quiet /mnt/areal-jax; then
    sudo mkdir -p /mnt/areal-jax
    sudo mount -t nfs -o rw,hard 10.0.0.2:/share /mnt/areal-jax
fi
sudo install -d -o "$(id -un)" "$run" "$run/logs"
keep() { # keep NAME COMMAND...: a service that starts again where it failed; its output goes to logs/NAME.log
    local unit=areal-jax-$1 log=$run/logs/$1.log
    shift
    sudo systemctl stop "$unit" 2>/dev/null || true
    sudo systemctl reset-failed "$unit" 2>/dev/null || true
    sudo systemd-run --unit="$unit" --uid="$(id -un)" --setenv=HOME="$HOME" --setenv=PATH="$PATH" \
        --property=Restart=on-failure --property=RestartSec=5 \
        --property=StartLimitIntervalSec=600 --property=StartLimitBurst=4 \
        --property=KillMode=mixed --property=TimeoutStopSec=60 \
        --property=StandardOutput="append:$log" --property=StandardError="append:$log" \
        bash "$own/start.sh" "$@"
}

mkdir -p "$run/redis"
(umask 077; cat >"$own/redis.conf" <<END
bind $head
port 7600
requirepass $(<"$own/secret")
dir "$run/redis"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
END
)
keep redis redis-server "$own/redis.conf"
keep controller env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cpu areal-jax role controller \
    "--config=$own/config.yaml" "--run=$run" --name=controller "runtime.redis=redis://$head:7600/0"
keep reward-0 env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cpu areal-jax role reward \
    "--config=$own/config.yaml" "--run=$run" --name=reward-0 "runtime.redis=redis://$head:7600/0"
keep trainer-0 env PYTHONUNBUFFERED=1 JAX_PLATFORMS=cuda CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
    areal-jax role trainer "--config=$own/config.yaml" "--run=$run" --name=trainer-0 --index=0 \
    --processes=1 "--coordinator=$head:7601" "runtime.redis=redis://$head:7600/0"
