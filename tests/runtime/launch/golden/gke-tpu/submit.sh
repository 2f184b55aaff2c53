#!/usr/bin/env bash
set -euo pipefail
kubectl --namespace=rl create secret generic qwen2-5-1-5b-gsm8k \
    --from-file=secret=/mnt/areal-jax/runs/qwen/launch/secret --dry-run=client --output=yaml |
    kubectl --namespace=rl apply --filename=-
kubectl --namespace=rl apply --filename=/mnt/areal-jax/runs/qwen/launch/jobset.yaml
