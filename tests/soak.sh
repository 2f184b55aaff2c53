#!/usr/bin/env bash
# soak.sh [PATH...]: what is run by hand and before a release, or its tests below the paths, and a row in docs/soak.md.
# At the end, one at a time, the tests of what a run does on an idle machine. Without a path, or with that file,
# tests/mutants.py comes last.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
load=$(cut -d' ' -f1 /proc/loadavg) result=passed
pytest=(.venv/bin/python -m pytest -rs --durations=10)

part() { # of which nothing may be below the paths
    local status=0
    "${pytest[@]}" "$@" || status=$?
    [ "$status" -eq 0 ] || [ "$status" -eq 5 ] || result=failed
}

part -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 1 -m 'soak and not alone and not gpu' "$@"
part -m 'alone and not gpu' "$@"
case "$*" in "" | tests/mutants.py) .venv/bin/python tests/mutants.py --whole-tier || result=failed ;; esac
tests/row_of_run.sh "make soak SOAK='$*'" "$load" "$SECONDS" "$result" | tee -a docs/soak.md
[ "$result" = passed ]
