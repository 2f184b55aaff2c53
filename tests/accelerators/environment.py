"""A pytest plugin (`-p tests.accelerators.environment`): its process compiles for devices that are not there.

It is a plugin, because jax reads these variables when it is imported; set in a conftest.py, they would also
hold for tests of other folders.
"""

from __future__ import annotations

import os

from areal_jax.plan.targets import environment

os.environ.update(environment(os.environ.get("XLA_FLAGS", "")))
# A program that was read from the cache was not compiled.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
