"""Keys of earlier versions: refused in a recipe and on the command line, read in the config of an old run."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import yaml

from areal_jax.assembly.run_folder import run_config
from areal_jax.config.loading import ConfigError, load_config, make_config, resolved
from areal_jax.config.removed import REMOVED


class Old(NamedTuple):
    key: str
    value: Any
    """What the config of an old run may say."""
    instead: str
    """Part of the message in a recipe."""
    refused: Any = None
    """A value with which an old run is refused; None: there is none."""
    now: tuple[str, ...] = ()
    """Words that mean the same today."""
    beside: tuple[str, ...] = ()
    """Words of the same config, without which the key has no section."""


REFERENCE = ("algorithm.kl.coef=0.1", "runtime.reference.mesh={fsdp: 2}")
TEACHER = ("algorithm.preset=distillation", "algorithm.teacher=m", "runtime.teacher.mesh={fsdp: 2}")
SHARDED = "no array is sharded over this axis"
OLD = [
    Old("algorithm.kl.allow_biased", False, "set algorithm.kl.estimator to k1", True),
    Old("control.placement_every_s", 2.0, "placed again every 2 seconds", 0.5),
    Old("trainer.prompts", "shared", "always share their prompt", "repeated"),
    Old("trainer.supervised_steps", 7, "set trainer.supervised.steps", now=("trainer.supervised.steps=7",)),
    Old(
        "trainer.supervised_tasks",
        {"pkg.sums:Sums": {"table": {"size": 3}}},
        "set trainer.supervised.tasks",
        now=("trainer.supervised.tasks.pkg.sums:Sums.table.size=3",),
    ),
    Old(
        "trainer.supervised_learning_rate",
        0.5,
        "set trainer.supervised.learning_rate",
        now=("trainer.supervised.learning_rate=0.5",),
    ),
    Old("trainer.supervised_batch", 9, "set trainer.supervised.batch", now=("trainer.supervised.batch=9",)),
    *(
        Old(f"{owner}.mesh.context", 1, SHARDED, 2, beside=beside)
        for owner, beside in (("trainer", ()), ("runtime.reference", REFERENCE), ("runtime.teacher", TEACHER))
    ),
    Old("launch.machine", "a3-highgpu-8g", "set MACHINE (gcloud) or ACCELERATOR (gke)"),
    Old("launch.cpus", 64, "give --cpus-per-task=N after -- (slurm), or set CPUS"),
    Old("launch.hours", 12.0, "give --time=HOURS:00:00 after -- (slurm), or set MINUTES (gcloud)"),
    Old("launch.plain", True, "submit launchers/slurm.sbatch by sbatch"),
    Old("launch.setup", "source venv/bin/activate", "set AREAL_JAX_SETUP (slurm) or SETUP (gcloud)"),
    Old("launch.image", "areal-jax:0.1", "set AREAL_JAX_IMAGE (slurm) or IMAGE (gcloud, gke)"),
    Old("launch.zone", "us-central1-a", "set ZONE in the environment"),
    Old("launch.volume", "runs", "set VOLUME (gcloud) or CLAIM (gke)"),
    Old("launch.options", ["--partition=gpu"], "`areal-jax launch slurm CONFIG -- --partition=gpu`"),
]


def tree_of(key: str, value: Any) -> Any:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def stored(old: Old, value: Any) -> dict[str, Any]:
    """The config.yaml of an old run: every key of today, and this one."""
    tree = resolved(load_config(*old.beside))
    section = tree
    *sections, name = old.key.split(".")
    for one in sections:
        section = section[one]
    section[name] = value
    return tree


@pytest.mark.parametrize("old", OLD, ids=lambda old: old.key)
def test_a_removed_key_is_refused_with_what_replaces_it(old: Old, tmp_path):
    message = re.escape(f"{old.key}={old.value}: this key was removed; ") + f".*{re.escape(old.instead)}"
    word = yaml.safe_dump(old.value, default_flow_style=True).removesuffix("...\n").strip()
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree_of(old.key, old.value)))
    for source in (f"{old.key}={word}", tmp_path / "recipe.yaml", tree_of(old.key, old.value)):
        with pytest.raises(ConfigError, match=message):
            load_config(source)
        with pytest.raises(ConfigError, match=message):  # also beside the config of a run
            load_config(stored(old, old.value), source)


@pytest.mark.parametrize("old", OLD, ids=lambda old: old.key)
def test_an_old_run_is_read_if_its_value_is_what_the_code_does(old: Old, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored(old, old.value)))
    expected = resolved(load_config(*old.beside, *old.now))
    assert resolved(run_config(tmp_path)) == resolved(make_config(stored(old, old.value))) == expected
    if old.refused is not None:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(stored(old, old.refused)))
        with pytest.raises(ConfigError, match=re.escape(f"{old.key}={old.refused} in the config of an ear")):
            run_config(tmp_path)


def test_every_removed_key_is_tested():
    assert sorted(old.key for old in OLD) == sorted(REMOVED)


def test_a_run_of_an_earlier_version_keeps_float32_activations(tmp_path):
    """Its config does not name them; the same recipe would have bfloat16 ones in a new run."""
    config = load_config("model.dtype=bfloat16")
    old = resolved(config)
    del old["model"]["activations"]
    assert make_config(old).activations == "float32" and config.activations == "bfloat16"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    assert load_config(tmp_path / "config.yaml", "run.steps=7").activations == "float32"
    assert make_config(resolved(config)).activations == "bfloat16"
