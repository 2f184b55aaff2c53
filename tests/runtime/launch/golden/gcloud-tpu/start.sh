#!/usr/bin/env bash
set -euo pipefail

# start.sh COMMAND...: with the run's secret in its environment, and nowhere else
# launch.setup is empty
AREAL_JAX_SECRET=$(<"$(dirname "$0")/secret")
export AREAL_JAX_SECRET
exec "$@"
