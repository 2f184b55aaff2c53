#!/usr/bin/env bash
# gcloud_gpu.sh and gcloud_tpu.sh run this on each machine: it mounts the volume and starts the node agent as a
# systemd service, which continues without the ssh connection and is restarted if it fails.
# usage: gcloud_node.sh RANK MACHINES HEAD VOLUME RUN SETUP
set -euo pipefail
rank=$1 machines=$2 head=$3 volume=$4 run=$5 setup=$6
own=$(cd "$(dirname "$0")" && pwd) mount=/mnt/areal-jax unit=areal-jax-node-$1

if ! mountpoint --quiet "$mount"; then
    sudo mkdir -p "$mount"
    sudo mount -t nfs -o rw,hard "$volume" "$mount"
fi
sudo install -d -o "$(id -un)" "$run" "$run/launch" "$run/logs"
if [ "$rank" -eq 0 ] && [ -f "$own/secret" ]; then # the password of the Redis in runtime.redis
    install -m 600 "$own/secret" "$run/launch/secret"
fi

options=("--config=$own/config.yaml" "--run=$run" "--rank=$rank" "--machines=$machines")
[ "$rank" -ne 0 ] || options+=("--address=$head")
sudo systemctl stop "$unit" 2>/dev/null || true
sudo systemctl reset-failed "$unit" 2>/dev/null || true
sudo systemd-run --unit="$unit" --uid="$(id -un)" --setenv=HOME="$HOME" --setenv=PATH="$PATH" \
    --property=Restart=on-failure --property=RestartSec=5 \
    --property=StartLimitIntervalSec=600 --property=StartLimitBurst=4 \
    --property=KillMode=mixed --property=TimeoutStopSec=60 \
    --property=StandardOutput="append:$run/logs/node-$rank.log" \
    --property=StandardError="append:$run/logs/node-$rank.log" \
    bash -c "$setup"$'\nexec areal-jax role node "$@"' areal-jax "${options[@]}"
