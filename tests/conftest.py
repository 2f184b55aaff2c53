"""What every test shares: virtual devices for meshes, and properties that fail the same way twice."""

from __future__ import annotations

import os

from hypothesis import settings

# Read by jax when it first asks for devices, so it has to stand before any test imports it.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

# No deadline: the first example may compile. Derandomised: a red test is red for whoever runs it next.
settings.register_profile("areal", deadline=None, derandomize=True, database=None)
settings.load_profile("areal")
