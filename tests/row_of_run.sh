#!/usr/bin/env bash
# row_of_run.sh WHAT LOAD SECONDS RESULT: prints a run of tests as a row of the table in docs/soak.md. LOAD is the
# machine's load when the run began.
set -euo pipefail
cpu=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)
flags=$(grep -m 1 -oE 'avx512f' /proc/cpuinfo || grep -m 1 -oE 'avx2' /proc/cpuinfo || true)
commit=$(git rev-parse --short HEAD)
[ -z "$(git status --porcelain --untracked-files=no)" ] || commit+='+changes'
echo "| $(date -u +%F) | $commit | $(xargs <<<"$1") | $(nproc) x $cpu ${flags%f} | $2 | $(($3 / 60)) | $4 |"
