#!/usr/bin/env bash
set -euo pipefail

files=/mnt/areal-jax/runs/qwen/launch
own=areal-jax/qwen2-5-1-5b-gsm8k # in a machine's home

create() { # create NAME OPTION...: makes the machine unless it is there
    gcloud compute tpus tpu-vm describe "$1" --zone=us-central1-a >/dev/null 2>&1 || gcloud compute tpus tpu-vm create "$@"
}
on() { # on COMMAND NAME [OPTION]: runs it there, with our standard input
    local command=$1
    shift
    gcloud compute tpus tpu-vm ssh "$@" --zone=us-central1-a --quiet --command="$command"
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
}

create qwen2-5-1-5b-gsm8k-trainer --zone=us-central1-a --accelerator-type=v5litepod-8 \
    --version=v2-alpha-tpuv5-lite --spot
create qwen2-5-1-5b-gsm8k-hosts-0 --zone=us-central1-a --accelerator-type=v5litepod-4 \
    --version=v2-alpha-tpuv5-lite --spot
create qwen2-5-1-5b-gsm8k-hosts-1 --zone=us-central1-a --accelerator-type=v5litepod-4 \
    --version=v2-alpha-tpuv5-lite --spot

head=$(gcloud compute tpus tpu-vm describe qwen2-5-1-5b-gsm8k-trainer --zone=us-central1-a \
    '--format=value(networkEndpoints[0].ipAddress)')

begin machine-0.sh qwen2-5-1-5b-gsm8k-trainer --worker=0
begin machine-1.sh qwen2-5-1-5b-gsm8k-trainer --worker=1
begin machine-2.sh qwen2-5-1-5b-gsm8k-hosts-0 --worker=0
begin machine-3.sh qwen2-5-1-5b-gsm8k-hosts-1 --worker=0
