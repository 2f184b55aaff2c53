#!/usr/bin/env bash
set -euo pipefail
sbatch /shared/runs/qwen/launch/run.sh
