"""The folder of a run's versions: the run's own, with room for them, and removed where it is not in RUN."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from areal_jax.assembly.parts import assemble
from areal_jax.config.loading import ConfigError, load_config
from areal_jax.config.tree import Config
from areal_jax.types import ArealError
from areal_jax.weights.folder import cleaned_weights, require_room, weights_folder
from areal_jax.weights.manifest import committed
from areal_jax.weights.orbax import OrbaxStore
from areal_jax.weights.publishing import PublisherSettings
from tests.small_run import small
from tests.weights.values import DEADLINE_S, probe, value


def config(place: Path | None = None, *words: str) -> Config:
    return load_config(*([f"weights.dir={place}"] if place else []), *words)


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=count))


def test_orbax_is_the_default_between_processes_and_memory_within_one():
    assert config().weights_backend == "memory"
    assert config(None, "runtime.redis=redis://there:6379/0").weights_backend == "orbax"
    chosen = config(None, "runtime.redis=redis://there:6379/0", "weights.backend=transfer")
    assert chosen.weights_backend == "transfer"


def test_versions_lie_in_the_runs_folder_unless_another_is_chosen(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "one"
    assert weights_folder(config(), run) == run / "weights"
    chosen = weights_folder(config(tmp_path / "elsewhere"), run)
    assert chosen.parent == tmp_path / "elsewhere" and chosen.name.startswith("one-")
    monkeypatch.chdir(tmp_path)
    assert weights_folder(config(tmp_path / "elsewhere"), Path("runs/../runs/one")) == chosen
    assert weights_folder(config(tmp_path / "elsewhere"), tmp_path / "other" / "one") != chosen


def test_cleaning_removes_what_this_run_left_elsewhere_and_nothing_else(tmp_path):
    one, other = (tmp_path / name for name in ("one", "other"))
    chosen = config(tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    (tmp_path / "shm" / "theirs").touch()
    for run in (one, other):
        store = OrbaxStore(weights_folder(chosen, run), PublisherSettings(probe))
        store.publish(value(3))
        store.close(DEADLINE_S)
    with cleaned_weights(chosen, one):
        assert not weights_folder(chosen, one).exists()
        store = OrbaxStore(weights_folder(chosen, one), PublisherSettings(probe))
        store.publish(value(4))
        store.close(DEADLINE_S)
        assert committed(weights_folder(chosen, one)) == [4]
    names = {path.name for path in (tmp_path / "shm").iterdir()}
    assert names == {"theirs", weights_folder(chosen, other).name}
    assert committed(weights_folder(chosen, other)) == [3]
    store = OrbaxStore(weights_folder(config(), one), PublisherSettings(probe))
    store.publish(value(5))
    store.close(DEADLINE_S)
    with cleaned_weights(config(), one):
        pass
    assert committed(one / "weights") == [5]  # in the run's folder versions stay


def test_a_folder_without_room_for_the_kept_versions_and_two_more_is_refused(tmp_path, monkeypatch):
    chosen, run = config(tmp_path, "weights.keep_versions=2"), tmp_path / "run"
    free(monkeypatch, 4_000_000_000)
    require_room(chosen, run, 1_000_000_000)
    with pytest.raises(ArealError, match=r"has 4 GB free, and the run needs 4.4 GB there: 4 versions of 1.1"):
        require_room(chosen, run, 1_100_000_000)
    require_room(config(None, "weights.keep_versions=2"), run, 10**15)


def test_what_the_run_left_there_counts_as_free(tmp_path, monkeypatch):
    chosen, run = config(tmp_path, "weights.keep_versions=1"), tmp_path / "run"
    weights_folder(chosen, run).mkdir()
    (weights_folder(chosen, run) / "left").write_bytes(jnp.zeros(1000, jnp.int8).tobytes())
    free(monkeypatch, 2000)
    require_room(chosen, run, 1000)
    with pytest.raises(ArealError, match=r"Lower weights.keep_versions"):
        require_room(chosen, run, 1001)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["weights.dir=/dev/shm", "weights.backend=memory"], "set weights.backend=orbax"),
        (["weights.dir=shm"], "give an absolute path"),
        (["weights.backend=memory", "runtime.redis=redis://there:6379/0"], "no other process can read"),
    ],
)
def test_a_backend_or_folder_that_cannot_be_used_is_refused(words, remedy):
    with pytest.raises(ConfigError, match=remedy):
        load_config(*words)


def test_one_process_refuses_the_transfer_between_processes(tmp_path):
    with pytest.raises(ArealError, match=r"weights.backend=transfer is for the processes of a launched run"):
        assemble(small(tmp_path / "run", "weights.backend=transfer"))
