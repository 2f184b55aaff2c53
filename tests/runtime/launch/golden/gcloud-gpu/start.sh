#!/usr/bin/env bash
set -euo pipefail

# start.sh COMMAND...: with the run's secret in its environment, and nowhere else
source /mnt/areal-jax/venv/bin/activate
AREAL_JAX_SECRET=$(<"$(dirname "$0")/secret")
export AREAL_JAX_SECRET
exec "$@"
