#!/usr/bin/env bash
# gather_wheels.sh FOLDER [PYTHON_VERSION]: gathers in FOLDER the wheels that `areal-jax bench gpu` needs beside a
# checkout, on a Linux machine that has jax with CUDA, flax, optax, orbax and chex, and perhaps no network. There:
#
#     python -m pip install --no-index --no-deps --target packages FOLDER/*.whl
#     PYTHONPATH=packages:. python -m areal_jax.cli.main bench gpu
#
# PYTHON_VERSION is that machine's, 3.12 unless given.
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$1 version=${2:-3.12}
cd_to=$(dirname "${BASH_SOURCE[0]}")/..
python=${PYTHON:-python3}
# What such a machine has; everything that these need is there as well, and must not be replaced.
have='chex flax jax jaxlib ml_dtypes msgpack numpy optax orbax-checkpoint'

mapfile -t wanted < <("$python" - "$cd_to/pyproject.toml" "$have" <<'END'
import re, sys, tomllib
have = set(sys.argv[2].split())
for need in tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"]:
    if re.match(r"[\w.-]+", need)[0] not in have:
        print(need)
END
)
mkdir -p "$folder"
"$python" -m pip download --quiet --dest "$folder" --only-binary=:all: --implementation cp \
    --python-version "$version" --abi "cp${version/./}" --abi abi3 --abi none \
    --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 \
    "${wanted[@]}"
rm -f "$folder"/{numpy,jax,jaxlib,ml_dtypes,scipy}-*.whl # wheels above depend on them
du -ch "$folder"/*.whl | tail -1
