"""The layout that a run on a CPU measures: chosen once, only by a clear difference, and kept."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from areal_jax.generation import fastest_layout as measuring
from areal_jax.generation.fastest_layout import fastest_layout, measured_s
from areal_jax.models.config import model_config
from areal_jax.models.model import Model
from areal_jax.tasks.tokenizers import CharTokenizer

MODEL = Model(
    model_config("tiny", 10, width=32, heads=2, kv_heads=1, mlp_width=48), CharTokenizer("abcdefgh")
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Where results are kept; here a layer of any size is measured."""
    former = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    monkeypatch.setattr(measuring, "MEASURED_BYTES", 1)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", former)


def never(model: Model, slots: int) -> dict[str, float]:
    raise AssertionError("measured")


def test_a_model_that_caches_hold_is_not_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measuring, "measured_s", never)
    assert fastest_layout(MODEL, 4, 2) == "auto"


@pytest.mark.parametrize(
    ("split_s", "expected"), [(0.85, "split"), (0.95, "feature_major"), (1.5, "feature_major")]
)
def test_the_default_stays_unless_the_other_layout_is_clearly_faster(monkeypatch, folder, split_s, expected):
    monkeypatch.setattr(measuring, "measured_s", lambda *_: {"feature_major": 1.0, "split": split_s})
    assert fastest_layout(MODEL, 4, 2) == expected
    (kept,) = folder.glob("weight-layout-*.json")
    assert json.loads(kept.read_text()) == {
        "layout": expected,
        "seconds": {"feature_major": 1.0, "split": split_s},
    }


def test_a_result_holds_for_its_sizes_and_is_not_measured_again(monkeypatch, folder):
    monkeypatch.setattr(measuring, "measured_s", lambda *_: {"feature_major": 1.0, "split": 0.5})
    assert fastest_layout(MODEL, 4, 2) == "split"
    monkeypatch.setattr(measuring, "measured_s", never)
    assert fastest_layout(MODEL, 4, 2) == "split"
    wider = Model(dataclasses.replace(MODEL.config, mlp_width=64), MODEL.tokenizer)
    for model, slots, cores in ((MODEL, 5, 2), (MODEL, 4, 3), (wider, 4, 2)):
        with pytest.raises(AssertionError, match="measured"):
            fastest_layout(model, slots, cores)


@pytest.mark.slow
def test_each_candidate_is_measured_in_its_layout(monkeypatch, folder):
    converted = []

    def laid_out(model, params, layout, platform):
        converted.append((layout, platform, model.config.layers))
        return original(model, params, layout, platform)

    original = measuring.laid_out
    monkeypatch.setattr(measuring, "laid_out", laid_out)
    monkeypatch.setattr(measuring, "MEASURED_BYTES", 3 * measuring._layer_bytes(MODEL) - 1)
    found = measured_s(MODEL, 4)
    assert converted == [("feature_major", "cpu", 3), ("split", "cpu", 3)]
    assert set(found) == {"feature_major", "split"} and min(found.values()) > 0
