#!/usr/bin/env bash
# Starts a run on TPU slices of Google Cloud: one slice trains; the other slices, of one machine each, generate.
# Creates missing slices, and starts a node agent on each machine. To continue a run after a failure, run this
# script again. More: README.md beside this file.
#   NAME=my-run ZONE=us-central1-a IMAGE=v2-alpha-tpuv5-lite VOLUME=HOST:/EXPORT RUN=/mnt/areal-jax/runs/my-run \
#   TRAINER_TYPE=v5litepod-8 TRAINER_WORKERS=2 HOST_TYPE=v5litepod-4 HOSTS=2 SETUP='source venv/bin/activate' \
#       gcloud_tpu.sh CONFIG.yaml [option of gcloud compute tpus tpu-vm create ...]
set -euo pipefail
: "${NAME:?}" "${ZONE:?}" "${IMAGE:?a runtime version, such as v2-alpha-tpuv5-lite}"
: "${VOLUME:?HOST:/EXPORT of an NFS server, mounted at /mnt/areal-jax}" "${RUN:?a folder below /mnt/areal-jax}"
: "${TRAINER_TYPE:?}" "${TRAINER_WORKERS:?number of machines of the trainer slice}" "${HOST_TYPE:?}"
HOSTS=${HOSTS:-1} SETUP=${SETUP:-}
config=${1:?usage: gcloud_tpu.sh CONFIG.yaml [option of create ...]}
shift

create() { # create NAME OPTION...: creates the slice unless it exists
    gcloud compute tpus tpu-vm describe "$1" --zone="$ZONE" >/dev/null 2>&1 ||
        gcloud compute tpus tpu-vm create "$@" --zone="$ZONE"
}
removal() { echo "for name in ${names[*]}; do gcloud compute tpus tpu-vm delete \$name --zone=$ZONE --quiet; done"; }
on() { # on COMMAND NAME OPTION: runs the command on that machine, with this script's stdin
    local command=$1
    shift
    gcloud compute tpus tpu-vm ssh "$@" --zone="$ZONE" --quiet --command="$command"
}
# shellcheck source=launchers/gcloud_begin.sh
. "$(dirname "$0")/gcloud_begin.sh"

make "$NAME-trainer" --accelerator-type="$TRAINER_TYPE" --version="$IMAGE" "$@"
for ((host = 0; host < HOSTS; host++)); do
    make "$NAME-hosts-$host" --accelerator-type="$HOST_TYPE" --version="$IMAGE" "$@"
done
made
head=$(gcloud compute tpus tpu-vm describe "$NAME-trainer" --zone="$ZONE" \
    --format='value(networkEndpoints[0].ipAddress)')
machines=$((TRAINER_WORKERS + HOSTS))
for ((rank = 0; rank < TRAINER_WORKERS; rank++)); do
    begin "$config" "$rank" "$machines" "$head" "$NAME-trainer" --worker="$rank"
done
for ((host = 0; host < HOSTS; host++)); do
    begin "$config" "$((TRAINER_WORKERS + host))" "$machines" "$head" "$NAME-hosts-$host" --worker=0
done
echo "when the run has ended: $(removal)"
