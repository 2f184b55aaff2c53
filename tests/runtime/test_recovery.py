"""What a resume reports of a batch that it trains again."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp

from areal_jax.control.events import VersionReissued
from areal_jax.runtime.recovery import retrain
from areal_jax.types import VersionedParams
from areal_jax.weights.digest import digest


def test_a_batch_that_trains_to_other_parameters_is_noted_and_its_published_version_issued_again():
    params = {"w": jnp.arange(3.0) / 3}
    value, notes = VersionedParams(4, params, digest(params)), []
    trainer = SimpleNamespace(train=lambda batch: (value, {}))
    again = lambda *digests: retrain(trainer, None, *digests, "bfloat16", notes.append)  # noqa: E731
    assert again(value.digest, "published") is None and notes == []
    assert again("journaled", "") is None  # no host has it
    assert len(notes) == 1 and f"digest {value.digest} instead of journaled" in notes[0]
    cast = digest({"w": params["w"].astype("bfloat16")})
    assert again("journaled", "published") == VersionReissued(4, "published", cast)
