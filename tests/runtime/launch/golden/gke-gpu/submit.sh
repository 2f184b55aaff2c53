#!/usr/bin/env bash
set -euo pipefail
kubectl create secret generic qwen2-5-1-5b-gsm8k \
    --from-file=secret=/mnt/areal-jax/runs/qwen/launch/secret --dry-run=client --output=yaml |
    kubectl apply --filename=-
kubectl apply --filename=/mnt/areal-jax/runs/qwen/launch/jobset.yaml
