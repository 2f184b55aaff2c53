#!/usr/bin/env bash
set -euo pipefail
trainer=$(sbatch --parsable /shared/runs/qwen/launch/trainer.sh)
trainer=${trainer%%;*}
generation=$(sbatch --parsable "--dependency=after:$trainer" /shared/runs/qwen/launch/generation.sh "$trainer")
echo "${generation%%;*}" >/shared/runs/qwen/launch/generation.job
echo "jobs $trainer (trainer) and ${generation%%;*} (hosts)"
