#!/usr/bin/env bash
set -euo pipefail

files=/mnt/areal-jax/runs/qwen/launch
own=areal-jax/qwen2-5-1-5b-gsm8k # in a machine's home

create() { # create NAME OPTION...: makes the machine unless it is there
    gcloud compute instances describe "$1" --zone=us-central1-a >/dev/null 2>&1 || gcloud compute instances create "$@"
}
on() { # on COMMAND NAME [OPTION]: runs it there, with our standard input
    local command=$1
    shift
    gcloud compute ssh "$@" --zone=us-central1-a --quiet --command="$command"
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

create qwen2-5-1-5b-gsm8k-0 --zone=us-central1-a --machine-type=a3-highgpu-8g \
    --image-project=deeplearning-platform-release --image-family=common-cu128 \
    --maintenance-policy=TERMINATE --boot-disk-size=200GB --max-run-duration=43200s \
    --instance-termination-action=DELETE
create qwen2-5-1-5b-gsm8k-1 --zone=us-central1-a --machine-type=a3-highgpu-8g \
    --image-project=deeplearning-platform-release --image-family=common-cu128 \
    --maintenance-policy=TERMINATE --boot-disk-size=200GB --max-run-duration=43200s \
    --instance-termination-action=DELETE

head=$(gcloud compute instances describe qwen2-5-1-5b-gsm8k-0 --zone=us-central1-a \
    '--format=value(networkInterfaces[0].networkIP)')

begin machine-0.sh qwen2-5-1-5b-gsm8k-0
begin machine-1.sh qwen2-5-1-5b-gsm8k-1
