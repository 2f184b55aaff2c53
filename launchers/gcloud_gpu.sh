#!/usr/bin/env bash
# Starts a run on GPU VMs of Google Cloud: creates missing machines, and starts a node agent on each machine.
# To continue a run after a failure, run this script again. More: README.md beside this file.
#   NAME=my-run ZONE=us-central1-a MACHINE=a3-highgpu-8g MACHINES=2 IMAGE=PROJECT/FAMILY VOLUME=HOST:/EXPORT \
#   RUN=/mnt/areal-jax/runs/my-run SETUP='source /mnt/areal-jax/venv/bin/activate' \
#       gcloud_gpu.sh CONFIG.yaml [option of gcloud compute instances create ...]
set -euo pipefail
: "${NAME:?}" "${ZONE:?}" "${MACHINE:?such as a3-highgpu-8g}" "${IMAGE:?PROJECT/FAMILY of a VM image}"
: "${VOLUME:?HOST:/EXPORT of an NFS server, mounted at /mnt/areal-jax}" "${RUN:?a folder below /mnt/areal-jax}"
MACHINES=${MACHINES:-1} MINUTES=${MINUTES:-1440} SETUP=${SETUP:-}
config=${1:?usage: gcloud_gpu.sh CONFIG.yaml [option of create ...]}
shift

create() { # create NAME OPTION...: creates the machine unless it exists
    gcloud compute instances describe "$1" --zone="$ZONE" >/dev/null 2>&1 ||
        gcloud compute instances create "$@" --zone="$ZONE"
}
removal() { echo "gcloud compute instances delete ${names[*]} --zone=$ZONE"; }
on() { # on COMMAND NAME: runs the command on that machine, with this script's stdin
    gcloud compute ssh "$2" --zone="$ZONE" --quiet --command="$1"
}
# shellcheck source=launchers/gcloud_begin.sh
. "$(dirname "$0")/gcloud_begin.sh"

for ((rank = 0; rank < MACHINES; rank++)); do
    make "$NAME-$rank" --machine-type="$MACHINE" --image-project="${IMAGE%%/*}" --image-family="${IMAGE#*/}" \
        --maintenance-policy=TERMINATE --boot-disk-size=200GB \
        --max-run-duration="${MINUTES}m" --instance-termination-action=DELETE "$@"
done
made
head=$(gcloud compute instances describe "$NAME-0" --zone="$ZONE" --format='value(networkInterfaces[0].networkIP)')
for ((rank = 0; rank < MACHINES; rank++)); do
    begin "$config" "$rank" "$MACHINES" "$head" "$NAME-$rank"
done
echo "when the run has ended: $(removal)"
